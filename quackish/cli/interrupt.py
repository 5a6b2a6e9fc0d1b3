"""Ctrl-C ends a command with one line and status 130, also while torch is imported. SIGTERM can act like Ctrl-C."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import NoReturn

STATUS = 130  # 128 + SIGINT


def set_handler(handler: Callable) -> None:
    """Sets what Ctrl-C does, unless it is ignored, as in background jobs of a shell."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def end(*_: object) -> NoReturn:
    """The handler of Ctrl-C: prints a line and ends the process at once."""
    os.write(2, b"quackish: interrupted\n")
    os._exit(STATUS)  # an exception would pass through half-imported modules


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
