"""Checks one log of compute-sanitizer: prints the reports that are not known false positives, then a verdict.

python scripts/sanitize_report.py LOG EXIT_CODE
"""

import re
import sys
from pathlib import Path

KNOWN = Path(__file__).with_name("sanitize_known.txt")
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:error|hazard)")


def reports(log: str) -> list[str]:
    """The reports, each joined into one line."""
    joined = []
    for line in log.splitlines():
        text = line.removeprefix("=========").removeprefix(" ")
        if not line.startswith("=========") or not text.strip():
            continue
        if text.startswith("  ") and joined:  # continuation lines are indented
            joined[-1] += " " + text.strip()
        elif "SUMMARY" not in text and text.strip() != "COMPUTE-SANITIZER":
            joined.append(text)
    return joined


def main(log: Path, exit_code: int) -> int:
    text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    known = [re.compile(line) for line in KNOWN.read_text().splitlines() if line and not line.startswith("#")]
    parsed = reports(text)
    unknown = [report for report in parsed if not any(pattern.search(report) for pattern in known)]
    counts = [int(n) for n in SUMMARY.findall(text)]  # the tool's own count
    for report in unknown[:20]:
        print(report[:1000])

    failed = True
    if not counts or exit_code not in (0, 99):
        verdict = f"exit code {exit_code}: the tool or the program did not finish"
    elif unknown:
        verdict = f"{len(unknown)} reports, and {len(parsed) - len(unknown)} known false positives"
    elif sum(counts) > len(parsed):
        verdict = f"{sum(counts)} reports, but this script could parse only {len(parsed)}"
    else:
        failed = False
        verdict = f"clean except for {len(parsed)} known false positives" if parsed else "clean"
    print(f"FAILED: {verdict}; see {log}" if failed else verdict)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
