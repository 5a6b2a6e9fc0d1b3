"""Runs other people's programs in the emulator, and writes docs/emulated_programs.md.

    python scripts/emulate_programs.py --cutlass ../cutlass              # all of scripts/emulated_programs/cases.txt
    python scripts/emulate_programs.py --cutlass ../cutlass --only hopper

It fetches nothing. --cutlass is a clone of NVIDIA's CUTLASS, for its examples; `pip install -e '.[peers]'` brings the
libraries. Each program runs by `quackish emulate` in a process of its own, and is right if it launches a kernel, checks
its result and exits with status 0. Programs that --only leaves out keep their line in the page.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).with_name("emulated_programs")
RESULTS = CASES / "results.json"
PAGE = ROOT / "docs" / "emulated_programs.md"
EXAMPLES = Path("examples", "python", "CuTeDSL")
AT_ONCE = 2  # processes
TIMEOUT = 300  # seconds
COMMAND = sys.executable, "-m", "quackish", "emulate", "--gpu"
ABOUT_THE_LAUNCH = re.compile(r"  launch \d+, counted from 0: kernel")  # begins the last lines of an error's message
ANSI_COLOR = re.compile(r"\x1b\[[\d;]*m")
ADDRESS = re.compile(r"\[?0x\w{9,}(, 0x\w{9,}\))?")  # of global memory, which differs from run to run
LAUNCHES = re.compile(r"^(\d+) launches on an emulated", re.MULTILINE)
UNSUPPORTED = "PtxError", "NotImplementedError"
UNCHECKED = "checks nothing"  # the note of a program that compares with nothing
ITS_OWN = "the program", "the library"  # how a note begins that blames these for a Fault
KINDS = "right", "runs", "fault of the program", "fault", "unsupported", "error", "timeout"
LONGEST = 120  # characters of a message in the page
SOURCES = {
    "ampere": "CUTLASS, kernels for Ampere",
    "blackwell": "CUTLASS, kernels and tutorials for Blackwell",
    "cute_ext": "CUTLASS, `cute.experimental`",
    "hopper": "CUTLASS, kernels for Hopper",
    "prim": "CUTLASS, `cutlass.experimental` primitives",
    "tut": "CUTLASS, tutorials of the DSL",
    "quack": "quack-kernels",
    "fa4": "flash-attn-4",
}
HEADING = """# Programs in the emulator

Examples of NVIDIA's CUTLASS 4.8, and calls of quack-kernels 0.6.5 and flash-attn-4 4.0.0b36, run in
[the emulator](emulator.md) at small sizes, with late completion and seed 0. A program is right if it launches a kernel,
checks its result and exits with status 0; a few programs check nothing. A Fault is the program's own where the remark
says so: each was compared with the PTX manual, and such programs may work on a card all the same.
`scripts/emulate_programs.py` runs all of them and writes this page.
"""


class Case(NamedTuple):
    name: str
    gpu: str
    script: str  # below CUTLASS's examples, or in the folder of cases.txt
    arguments: list[str]
    note: str  # a remark: the reason if the program does not run, and anything else that a reader needs to know

    @property
    def source(self) -> str:
        return self.name.partition("/")[0]


class Result(NamedTuple):
    outcome: str  # right, or what went wrong and why
    seconds: int


def read_cases() -> list[Case]:
    cases = []
    for line in (CASES / "cases.txt").read_text().splitlines():
        name, gpu, script, arguments, note, *_ = (*map(str.strip, line.split("|")), "", "")
        cases.append(Case(name, gpu, script, shlex.split(arguments), note))
    return cases


def read_results() -> dict[str, Result]:
    """Results of earlier runs, by the program's name."""
    return (
        {name: Result(*result) for name, result in json.loads(RESULTS.read_text()).items()} if RESULTS.exists() else {}
    )


def run(case: Case, examples: Path, logs: Path) -> Result:
    """Runs a program, whose output goes to a file in `logs`."""
    own = CASES / case.script
    path = own if own.exists() else examples / case.script
    log = logs / (re.sub(r"[^\w.]+", "_", case.name) + ".txt")
    with tempfile.TemporaryDirectory() as folder, log.open("w") as output:
        begin = time.monotonic()
        process = subprocess.Popen(
            [*COMMAND, case.gpu, path, *case.arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return Result(f"timeout after {TIMEOUT} s", TIMEOUT)
    return Result(outcome(status, log.read_text()), round(time.monotonic() - begin))


def outcome(status: int, output: str) -> str:
    """`right`, or the kind of failure and its reason."""
    launches = LAUNCHES.findall(output)
    if status == 0:
        return "right" if launches and int(launches[-1]) else "error: no kernel was launched"
    _, raised, traceback = output.rpartition("Traceback (most recent call last)")
    # The error follows a traceback: its first line is the first one that is not indented. A Fault begins at once.
    text = traceback if raised else output
    lines = [line for line in text.splitlines()[bool(raised) :] if line.strip() and not line.startswith(" ")]
    about = [i for i, line in enumerate(output.splitlines()) if ABOUT_THE_LAUNCH.match(line)]
    if about and not raised:
        lines = [line for line in output.splitlines()[: about[0]] if not line.startswith(" ")][-1:]
        return f"fault: {ADDRESS.sub('an address', lines[0])}"
    if not raised:
        lines = [line for line in ANSI_COLOR.sub("", output).splitlines() if "error:" in line] or [f"status {status}"]
        return f"error: {lines[-1].partition('error:')[2].strip() or lines[-1]}"
    kind, colon, reason = lines[0].partition(": ")
    name = kind.rpartition(".")[2]
    if name in UNSUPPORTED or "does not support" in reason:
        return f"unsupported: {reason}"
    return f"error: {name}{colon}{reason}"


def kind_of(case: Case, result: Result) -> str:
    """The column of the page's first table that a program counts in."""
    kind = result.outcome.partition(":")[0].split()[0]
    if kind == "right" and case.note == UNCHECKED:
        return "runs"
    return "fault of the program" if kind == "fault" and case.note.startswith(ITS_OWN) else kind


def page(cases: list[Case], results: dict[str, Result]) -> str:
    """The page: counts by source, and a line for each program."""
    counts: dict[str, collections.Counter] = {}
    for case in cases:
        if case.name in results:
            counts.setdefault(case.source, collections.Counter())[kind_of(case, results[case.name])] += 1
    total = sum(counts.values(), collections.Counter())
    kinds = [kind for kind in KINDS if total[kind]]
    lines = [HEADING, f"| source | programs | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
    for source, count in [*((SOURCES[source], count) for source, count in counts.items()), ("all", total)]:
        cells = [str(count[kind] or "") for kind in kinds]
        lines.append(f"| {source} | {count.total()} | {' | '.join(cells)} |")
    lines += ["", "| program | GPU | result | remark | seconds |", "|---|---|---|---|---|"]
    for case in cases:
        if case.name in results:
            cells = case.name, case.gpu, told(case, results[case.name]), case.note, results[case.name].seconds
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def told(case: Case, result: Result) -> str:
    """A program's result in a cell of the page."""
    if kind_of(case, result) == "runs":
        return "runs"
    return textwrap.shorten(result.outcome, LONGEST, placeholder=" ...").rstrip(":").replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--cutlass", type=Path, required=True, metavar="FOLDER", help="a clone of NVIDIA/cutlass")
    parser.add_argument("--only", default="", metavar="REGEX", help="run programs whose name matches")
    logs = ROOT / "out" / "emulated_programs"
    parser.add_argument("--logs", type=Path, default=logs, metavar="FOLDER", help="for the programs' output")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    examples = args.cutlass.resolve() / EXAMPLES
    if not examples.is_dir():
        parser.error(f"--cutlass: {args.cutlass} has no folder {EXAMPLES}")
    cases = read_cases()
    results = read_results()
    chosen = [case for case in cases if re.search(args.only, case.name)]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(run, case, examples, args.logs): case for case in chosen}
        for done in concurrent.futures.as_completed(running):
            case, result = running[done], done.result()
            results[case.name] = result
            print(f"{case.name:45} {case.gpu}  {result.seconds:5.0f} s  {result.outcome[:200]}", flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(results.items())), indent=0) + "\n")
    PAGE.write_text(page(cases, results))
    return int(any(results[case.name].outcome != "right" and not case.note for case in chosen))


if __name__ == "__main__":
    sys.exit(main())
