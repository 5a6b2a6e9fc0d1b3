"""What the command line programs share: progress, SIGTERM, and words about a missing GPU or extra."""

import contextlib
import importlib.util
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import TextIO

NO_GPU = "No GPU: the portable path runs on the CPU, small. This tries the benchmark itself; it measures nothing."
EVERY_S = 5.0  # between plain lines of progress


@contextlib.contextmanager
def progress(total: int, stream: TextIO | None = None) -> Iterator[Callable[[int, str], None]]:
    """Yields show(done, text): a bar by rich on a terminal, else a plain line at most every few seconds."""
    stream = stream or sys.stdout
    started = last = time.monotonic()
    if stream.isatty() and importlib.util.find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress, TimeElapsedColumn

        columns = (*Progress.get_default_columns(), TimeElapsedColumn())
        # Steps differ by a factor of 100: the speed is that of ten minutes, not of the last thirty seconds.
        with Progress(*columns, console=Console(file=stream), transient=True, speed_estimate_period=600) as bar:
            task = bar.add_task("", total=total)
            yield lambda done, text: bar.update(task, completed=done, description=text)
        return

    def show(done: int, text: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY_S:
            last = now
            print(f"{text}: {done} of {total} done, {now - started:.0f} s", file=stream, flush=True)

    yield show


@contextlib.contextmanager
def end_on_sigterm() -> Iterator[None]:
    """In this block SIGTERM, which `timeout` sends, does what Ctrl-C does: results so far are written."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt("SIGTERM")

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def check_extra() -> None:
    """Raises ImportError that says how to get the extra `bench` if it is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("bench needs matplotlib; pip install 'quackish[bench]' brings it")
