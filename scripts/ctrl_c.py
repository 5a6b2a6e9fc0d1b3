"""Ctrl-C ends a script in one line, also while it imports torch, which takes seconds."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def end_at_once() -> None:
    """From now on Ctrl-C ends the process."""
    _set_handler(_end)


def run(main: Callable[[], int]) -> NoReturn:
    """Exits with the status of `main`, in which Ctrl-C raises KeyboardInterrupt."""
    try:
        _set_handler(signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        _end()
    end_at_once()
    sys.exit(status)


def _set_handler(handler: Callable) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in background jobs of a shell
        signal.signal(signal.SIGINT, handler)


def _end(*_: object) -> NoReturn:
    os.write(2, f"{Path(sys.argv[0]).name}: interrupted\n".encode())
    os._exit(130)  # 128 + SIGINT
