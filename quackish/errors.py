"""Exceptions and warnings of quackish."""

import difflib
import sys
import warnings
from collections.abc import Iterable


class UnsupportedError(NotImplementedError):  # a RuntimeError; DTensor re-raises NotImplementedError unchanged
    """No kernel covers this GPU or option; `backend="auto"` runs the portable path instead."""


class PortablePathWarning(UserWarning):
    """The portable PyTorch path runs although the caller could expect a kernel."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A suffix for an error about the unknown name `given`: the closest known names; "" if none is close."""
    names = {name.lower(): name for name in known}
    close = [names[match] for match in difflib.get_close_matches(given.lower(), names)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


_warned: set[str] = set()


def warn_once(reason: str, category: type[Warning] = PortablePathWarning) -> None:
    """Warns once per process and `reason`, at the innermost caller outside quackish and torch.

    Do not call it in code that torch.compile traces: tracing it fails.
    """
    if reason not in _warned:
        _warned.add(reason)
        level, frame = 2, sys._getframe(1)
        skipped = ("quackish", "torch", "")  # graphs that torch.fx generates have no __name__
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
            level, frame = level + 1, frame.f_back
        warnings.warn(reason, category, stacklevel=level)
