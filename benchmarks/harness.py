"""What the programs here share: options, where results go, and what they say on a machine without a GPU."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quackish.bench import environment, runner
from quackish.bench.console import NO_GPU
from quackish.bench.console import console as _console
from quackish.bench.operations import OPERATIONS
from quackish.bench.report import Page

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# On a GPU a shape that no kernel covers fails and is named, instead of running the portable path.
BACKEND = "cute" if torch.cuda.is_available() else "auto"

console = _console()


def device_to_measure() -> torch.device:
    """The GPU; without one the CPU, and a line that says so."""
    device = environment.device_to_measure()
    if device.type == "cpu":
        console.print(NO_GPU)
    return device


def results_dir(device: torch.device) -> Path:
    """Results are kept per GPU model."""
    return RESULTS / re.sub(r"[^\w.-]+", "-", environment.device_name(device))


def arguments(name: str, doc: str) -> argparse.ArgumentParser:
    """The options that all programs have."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.split("\n")[0])
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results/<GPU>")
    parser.add_argument("--commit", help="recorded if there is no git to ask")
    return parser


def run(op: str, jobs_of: Callable, page: Page, columns: Sequence[str], args: argparse.Namespace, **options) -> Path:
    """Measures the jobs for the names of the user's providers; `options` are quackish.bench.measured.Run's."""
    path = (args.out or results_dir(environment.device_to_measure())) / f"{op}.csv"
    more = dict(append=getattr(args, "append", False), also=getattr(args, "also", None), commit=args.commit)
    return runner.run(runner.Settings(OPERATIONS[op], path, page, columns, options=options, **more), jobs_of)


def main(program) -> None:
    """Runs a program; an invalid request is one line on stderr."""
    try:
        program()
    except ValueError as error:
        sys.exit(str(error))
