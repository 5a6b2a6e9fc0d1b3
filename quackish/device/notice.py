"""Tells the user of a terminal that a call waits for the compiler. Nothing is printed where stderr is a file."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from quackish.device import cache

AFTER_S = 2.0  # seconds


@contextlib.contextmanager
def if_slow(kernel_classes: Sequence[Any], target: str) -> Iterator[None]:
    """Prints a line if the block, which compiles these kernels, takes longer than two seconds."""
    # One of the processes that torchrun starts on this machine speaks for all.
    if not sys.stderr.isatty() or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    timer = threading.Timer(AFTER_S, lambda: print(_line(kernel_classes, target), file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _line(kernel_classes: Sequence[Any], target: str) -> str:
    count = len(kernel_classes)
    what = kernel_classes[0].__name__ if count == 1 else f"{count} kernels"
    folder = cache.folder_for(kernel_classes[0])
    return f"quackish: compiling {what} for {target}, first use only; " + (
        f"kept in {folder}" if folder else "not kept, so the next process compiles again"
    )
