"""Exceptions and warnings of quackish."""

import difflib
import sys
import threading
import warnings
from collections.abc import Collection, Iterable
from typing import Any


class UnsupportedError(NotImplementedError):  # a RuntimeError; DTensor re-raises NotImplementedError unchanged
    """No kernel covers this GPU or option; `backend="auto"` runs the portable path instead."""


class PortablePathWarning(UserWarning):
    """Something runs on plain PyTorch although the caller could expect a kernel. See docs/guides/portable_path.md.

    Each reason is given once per process. `warnings.simplefilter("ignore", quackish.PortablePathWarning)` silences
    them, "error" turns them into exceptions, and `backend="cute"` makes one call raise `UnsupportedError` instead.
    """


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """A suffix for an error about the unknown name `given`: the closest known names; "" if none is close."""
    names = {name.lower(): name for name in known}
    close = [names[match] for match in difflib.get_close_matches(given.lower(), names)]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def describe(value: Any) -> str:
    """A wrong argument, for a message: "'x', a str", "an int", "a list" or "None"."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = a(type(value))
    return f"{value!r}, {kind}" if isinstance(value, (bool, int, float, str)) else kind


def a(kind: Any) -> str:
    """The name of a type with its article: "an int", "an RMSNorm"."""
    name = f"numpy.{kind.__name__}" if kind.__module__ == "numpy" else kind.__name__
    is_spelled = name[:2].isupper() and name[0] in "FHLMNRSX"  # letters whose names begin with a vowel
    return f"{'an' if is_spelled or name[0] in 'aeiouAEIO' else 'a'} {name}"


def check_bool(who: str, **flags: Any) -> None:
    """TypeError for a flag that is not True or False."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{who}: {name} is {describe(flag)}; expected True or False")


def refuse_unknown(who: str, options: Iterable[str], known: Collection[str]) -> None:
    """TypeError for an option that `who` does not have, instead of one that names a function it calls."""
    for name in options:
        if name not in known:
            expected = f"one of {', '.join(known)}{did_you_mean(name, known)}"
            raise TypeError(f"{who} has no option {name!r}; expected {expected}")


_warned: set[str] = set()
_lock = threading.Lock()


def warn_once(reason: str, category: type[Warning] = PortablePathWarning) -> None:
    """Warns once per process and `reason`, at the innermost caller outside quackish and torch.

    Do not call it in code that torch.compile traces: tracing it fails.
    """
    with _lock:
        is_new = reason not in _warned
        _warned.add(reason)
    if is_new:
        level, frame = 2, sys._getframe(1)
        skipped = ("quackish", "torch", "")  # graphs that torch.fx generates have no __name__
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in skipped:
            level, frame = level + 1, frame.f_back
        warnings.warn(reason, category, stacklevel=level)
