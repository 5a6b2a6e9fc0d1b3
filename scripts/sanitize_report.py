"""Judges one log of compute-sanitizer: prints what is not known to be harmless, then a verdict in one line.

python scripts/sanitize_report.py LOG EXIT_CODE
"""

import re
import sys
from pathlib import Path

KNOWN = Path(__file__).with_name("sanitize_known.txt")
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")


def reports(log: str) -> list[str]:
    """Each report, joined into one line: what happened, where, by which thread."""
    found = []
    for line in log.splitlines():
        text = line.removeprefix("=========").removeprefix(" ")
        if not line.startswith("=========") or not text.strip():
            continue
        if text.startswith("  ") and found:  # lines that go on with a report are indented
            found[-1] += " " + text.strip()
        elif "SUMMARY" not in text and text.strip() != "COMPUTE-SANITIZER":
            found.append(text)
    return found


def main(log: Path, exit_code: int) -> int:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    known = [re.compile(line) for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    found = reports(text)
    unknown = [report for report in found if not any(pattern.search(report) for pattern in known)]
    counted = [int(n) for n in SUMMARY.findall(text)]  # what the tool itself says there is
    for report in unknown[:20]:
        print(report[:1000])

    failed = True
    if not counted or exit_code not in (0, 99):
        verdict = f"exit code {exit_code}: the tool or the program did not come to its end"
    elif unknown:
        verdict = f"{len(unknown)} reports, and {len(found) - len(unknown)} known false positives"
    elif sum(counted) > len(found):
        verdict = f"{sum(counted)} reports, of which this script could read {len(found)}"
    else:
        failed = False
        verdict = f"clean, but for {len(found)} known false positives" if found else "clean"
    print(f"FAILED: {verdict}; see {log}" if failed else verdict)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
