"""Shared by the programs here: options, the folder of results, the message without a GPU, and first steps."""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path

import torch

from quackish.bench import environment, runner
from quackish.bench.cells import Cell, Job
from quackish.bench.report import Page, report
from quackish.cli.console import NO_GPU, progress
from quackish.cli.parser import output_folder
from quackish.device.compile_jobs import defer_interrupts

RESULTS = Path(__file__).resolve().parent / "results"


def device_to_measure() -> torch.device:
    """The GPU; without one the CPU, with a message."""
    device = environment.device_to_measure()
    if device.type == "cpu":
        print(NO_GPU)
    return device


def arguments(name: str, doc: str, csv: bool = True) -> argparse.ArgumentParser:
    """A parser with the common options; `csv` adds the options of programs that write a CSV."""
    prog, description = f"python -m benchmarks.{name}", doc.split("\n")[0]
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    gpu = re.sub(r"[^\w.-]+", "-", environment.device_name(environment.device_to_measure()))
    out_help = "folder of the results; default %(default)s"
    parser.add_argument("--out", type=output_folder, default=str(RESULTS / gpu), help=out_help)
    parser.add_argument("--commit", help="commit to record if git is not available")
    if csv:
        append_help = "keep the rows of the file; the last row of a cell and provider counts"
        parser.add_argument("--append", action="store_true", help=append_help)
        parser.add_argument("--report", action="store_true", help="only write the page and the figures of the file")
    return parser


def run(jobs: Sequence[Job], page: Page, args: argparse.Namespace, **options) -> Path:
    """Measures the jobs and returns the CSV file. `options` are fields of quackish.bench.measure.Run."""
    path = args.out / f"{jobs[0].cell.op}.csv"
    if args.report:
        report(path, page)
        return path
    runner.run(jobs, path, page, args.append, args.commit, **options)
    return path


def warm_up(jobs: Sequence[Job], names: Container[str], first_step: Callable[[Cell, str], object]) -> None:
    """Calls `first_step` for the cells of `jobs` and their providers in `names`, in several processes.

    What they compile is then in their caches on disk. Otherwise the measuring process compiles one kernel at a time.
    first_step: a function of a module, because it is sent to the processes
    """
    todo = [(job.cell, name) for job in jobs for name in job.providers if name in names]
    workers = max(1, min(12, len(os.sched_getaffinity(0)) * 3 // 4, len(todo)))
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, initializer=_one_thread)
    show = progress(len(todo), "first steps")
    with pool:
        with defer_interrupts():
            futures = [pool.submit(_call, first_step, *one) for one in todo]
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            with contextlib.suppress(Exception):  # the run reports it
                future.result()
            show(done, "compiling")


def _one_thread() -> None:
    os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "1", "QUACKISH_COMPILE_JOBS": "1"}


def _call(first_step: Callable[[Cell, str], object], cell: Cell, name: str) -> None:
    try:
        first_step(cell, name)
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def write_page(page: str, path: Path) -> None:
    """Prints and writes the page of a program that writes no CSV."""
    print(page)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def main(program: Callable[[], object]) -> None:
    """Runs a program. Invalid requests and interruptions print one line on stderr."""
    try:
        program()
    except ValueError as error:
        sys.exit(str(error))
    except KeyboardInterrupt as interrupt:  # Ctrl-C or SIGTERM; results so far are written
        print(f"Interrupted {interrupt}".rstrip(), file=sys.stderr)
        sys.exit(130)
