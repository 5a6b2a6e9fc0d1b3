"""Shared by the command line programs: progress, SIGTERM, and messages about a missing GPU or extra."""

import contextlib
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

NO_GPU = "No GPU: small shapes run on the CPU. This tests the benchmark itself; the numbers mean nothing."
EVERY_S = 5.0  # between plain lines of progress


@contextlib.contextmanager
def progress(
    total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Callable[[int, str], None]]:
    """Yields show(done, text): a rich progress bar on a terminal, else a plain line at most every few seconds."""
    stream = stream or sys.stdout
    started = last = clock()
    if stream.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns(), TimeElapsedColumn())
        # Steps differ by a factor of 100, so the speed is estimated over ten minutes rather than thirty seconds.
        with Progress(*columns, console=Console(file=stream), transient=True, speed_estimate_period=600) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, text: bar.update(task, completed=done, description=text)
        return

    def show(done: int, text: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= EVERY_S:
            last = now
            print(f"{text}: {done} of {total} done, {now - started:.0f} s", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """In this block SIGTERM, which `timeout` sends, acts like Ctrl-C, so that results so far are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def check_extra() -> None:
    """Raises ImportError if the extra `bench` is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("bench needs matplotlib; pip install 'quackish[bench]' installs it")
