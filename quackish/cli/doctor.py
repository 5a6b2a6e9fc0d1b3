"""Checks the installation: versions, GPUs, compiler, cache, and the path and results of each operation.

    quackish doctor
    quackish doctor --json
    quackish doctor --check     # for a new GPU model: tests and times every kernel

The exit status is 1 if there are problems, each with a suggestion. Forward and backward of each operation are compared
with the reference in fp64, and with the bits of a second run. This takes a second, longer if kernels must be compiled.

--check runs calls that launch every kernel of this GPU, each in a process of its own with a time limit: a kernel that
hangs or faults loses only its own results. They are compared with fp64 and timed,
GEMMs beside cuBLAS's. This takes some minutes and 40 GB of the GPU's memory.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quackish.cli import call_arguments
from quackish.cli.parser import CommandError, program_name
from quackish.text import fill

if TYPE_CHECKING:
    from quackish.cli.doctor_report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON, for a bug report")
    default = Path("quackish-check.json")
    check_help = "also test and time every kernel; writes the report to FILE, to attach to an issue; "
    check_help += f"default {default}"
    parser.add_argument("--check", nargs="?", type=Path, const=default, metavar="FILE", help=check_help)


def begin(args: argparse.Namespace) -> None:
    if args.check and not call_arguments.has_gpu():
        raise CommandError(f"there is no GPU here to check; `{program_name()} emulate` runs kernels on a CPU")
    what = "checking versions, GPUs, the compiler, all operations, the cache and the environment"
    line = f"doctor: {what}; this takes seconds, longer if kernels must be compiled"
    print(fill(line, indent="  "), file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    from quackish.cli.doctor_report import CHECKS, SECTIONS, examine, text

    report = examine(SECTIONS | CHECKS if args.check else SECTIONS)
    print(json.dumps(report, indent=1) if args.json else text(report))
    if args.check:
        write(report, args.check)
    return 1 if report["problems"] else 0


def write(report: "Report", path: Path) -> None:
    """Writes the report as JSON. Raises CommandError if that fails."""
    try:
        path.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise CommandError(f"the report above cannot be written: {error}") from None
    print(f"written to {path}", file=sys.stderr)
