"""Shared by the command line programs: progress, SIGTERM, and the message without a GPU."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from typing import TextIO

NO_GPU = "No GPU: small shapes run on the CPU. This tests the benchmark itself; the numbers mean nothing."
EVERY_S = 5.0  # between lines of progress


def progress(
    total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Callable[[int, str], None]:
    """Returns show(done, text), which prints a line at most every few seconds."""
    started = last = clock()

    def show(done: int, text: str) -> None:
        nonlocal last
        now = clock()
        if now - last >= EVERY_S:
            last = now
            print(f"{text}: {done} of {total} done, {now - started:.0f} s", file=stream, flush=True)

    return show


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
