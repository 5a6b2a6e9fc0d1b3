"""What the programs here share: options, where results go, and what they say on a machine without a GPU."""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from quackish.bench import environment, runner
from quackish.bench.cells import Job
from quackish.bench.console import NO_GPU, console
from quackish.bench.operations import Operation
from quackish.bench.processes import Supervisor
from quackish.bench.report import Page
from quackish.bench.results import PROGRAM_COLUMNS

RESULTS = Path(__file__).resolve().parent / "results"
# On a GPU a shape that no kernel covers fails and is named, instead of running the portable path.
BACKEND = "cute" if torch.cuda.is_available() else "auto"


def device_to_measure() -> torch.device:
    """The GPU; without one the CPU, and a line that says so."""
    device = environment.device_to_measure()
    if device.type == "cpu":
        console().print(NO_GPU)
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


def run(
    op: Operation, jobs: Sequence[Job], page: Page, args: argparse.Namespace, by: Supervisor | None, **options
) -> Path:
    """Measures the jobs; returns the CSV file. `options` are quackish.bench.measured.Run's."""
    path = (args.out or results_dir(environment.device_to_measure())) / f"{op.name}.csv"
    options = {"backend": BACKEND, **options}
    append = getattr(args, "append", False)
    settings = runner.Settings(op, path, page, PROGRAM_COLUMNS, append=append, commit=args.commit, options=options)
    return runner.run(settings, lambda own: jobs, by)


def main(program: Callable[[], object]) -> None:
    """Runs a program; an invalid request is one line on stderr."""
    try:
        program()
    except ValueError as error:
        sys.exit(str(error))
