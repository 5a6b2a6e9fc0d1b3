"""What quackish raises and warns with, in one place."""

import warnings


class UnsupportedError(RuntimeError):
    """No kernel covers this GPU or option; `backend="auto"` runs the portable path instead."""


class PortablePathWarning(UserWarning):
    """The portable PyTorch path runs where the caller could have expected a kernel."""


_warned: set[str] = set()


def warn_once(reason: str, category: type[Warning] = PortablePathWarning) -> None:
    """Warns once a process for each distinct `reason`."""
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, category, stacklevel=3)
