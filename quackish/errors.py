"""What quackish raises and warns with, in one place."""

import difflib
import sys
import warnings
from collections.abc import Iterable


class UnsupportedError(NotImplementedError):  # a RuntimeError, and DTensor re-raises NotImplementedError unchanged
    """No kernel covers this GPU or option; `backend="auto"` runs the portable path instead."""


class PortablePathWarning(UserWarning):
    """The portable PyTorch path runs where the caller could have expected a kernel."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """The end of an error message about the unknown name `given`: the names closest to it; "" where none is close."""
    close = difflib.get_close_matches(given.lower(), list(known))
    return f"; did you mean {' or '.join(close)}?" if close else ""


_warned: set[str] = set()


def warn_once(reason: str, category: type[Warning] = PortablePathWarning) -> None:
    """Warns once a process for each distinct `reason`, at the innermost line that is neither quackish's nor torch's.

    Not for code that torch.compile traces, which it fails on.
    """
    if reason not in _warned:
        _warned.add(reason)
        level, frame = 2, sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("quackish", "torch"):
            level, frame = level + 1, frame.f_back
        warnings.warn(reason, category, stacklevel=level)
