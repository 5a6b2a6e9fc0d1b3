"""Ctrl-C ends `python -m quackish` with one line and status 130, also while torch is imported.

`python -m quackish` imports the package, and with it torch, before it runs __main__.py. So __init__.py imports this
file first. In other programs it changes nothing.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

STATUS = 130  # 128 + SIGINT


def _is_program() -> bool:
    """True in `python -m quackish`. While `-m` imports the package, sys.argv[0] is "-m"."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("quackish", "-mquackish")


def set_handler(handler: Callable) -> None:
    """Sets what Ctrl-C does, unless it is ignored, as in background jobs of a shell."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def end(*_: object) -> NoReturn:
    os.write(2, b"quackish: interrupted\n")
    os._exit(STATUS)  # an exception would pass through half-imported modules


if _is_program():
    set_handler(end)
