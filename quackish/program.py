"""Tells whether this process is a command of quackish, and how its user runs it."""

import sys
from pathlib import PurePath


def _is_command() -> bool:
    """True in `quackish` and `python -m quackish`, also while `-m` imports the package and sys.argv[0] is "-m"."""
    if not sys.argv or len(sys.orig_argv) < len(sys.argv):
        return False
    # Processes that a command starts have its sys.argv, but their own words here.
    started = sys.orig_argv[-len(sys.argv)]
    if sys.argv[0] == "-m":
        return started in ("quackish", "-mquackish")
    return sys.argv[0] == started and PurePath(started).name in ("quackish", "quackish.exe")


IS_COMMAND = _is_command()


def name() -> str:
    """What the user types, for messages: "quackish", or "python -m quackish" if this process was started by that."""
    started_by_m = PurePath(sys.argv[0]).parts[-2:] == ("quackish", "__main__.py")
    return "python -m quackish" if started_by_m else "quackish"
