"""Checks of single arguments, which the operations share."""

import numbers
from collections.abc import Collection
from typing import Any, get_args

from torch import Tensor, nn

from quackish.errors import describe, did_you_mean
from quackish.types import Backend

_BACKENDS = get_args(Backend)


def check_tensor(who: str, name: str, value: Any, optional: bool = False, hint: str = "") -> None:
    """TypeError for anything but a tensor, and None if `optional`. hint: what to do, after the usual message."""
    if isinstance(value, Tensor) or (optional and value is None):
        return
    if isinstance(value, nn.Module) and isinstance(getattr(value, "weight", None), Tensor):
        hint = hint or f"; for a module, pass its parameter: {name}=module.weight"
    elif hasattr(value, "__array_interface__") and getattr(value, "shape", None):
        hint = hint or "; torch.from_numpy converts it"
    raise TypeError(f"{who}: {name} is {describe(value)}; expected a torch.Tensor{' or None' * optional}{hint}")


def check_number(who: str, name: str, value: Any, optional: bool = False) -> None:
    """TypeError for anything but an int or a float. A tensor would have to be copied to the host."""
    if not (isinstance(value, (int, float)) or (optional and value is None)) or isinstance(value, bool):
        raise TypeError(f"{who}: {name} is {describe(value)}; expected a float{' or None' * optional}")


def check_sizes(who: str, **sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, numbers.Integral) or isinstance(size, bool):
            raise TypeError(f"{who}: {name} is {describe(size)}; expected an int")
        if size < 1:
            raise ValueError(f"{who}: {name} is {size}; expected at least 1")


def check_backend(who: str, backend: Any) -> None:
    if backend not in _BACKENDS:
        raise ValueError(f"{who}: backend is {shown(backend)}; expected {choices(backend, _BACKENDS)}")


def choices(given: Any, known: Collection[str]) -> str:
    """What to expect instead of `given`, with the closest names."""
    hint = did_you_mean(given, known) if isinstance(given, str) else ""
    return f"one of {', '.join(map(repr, known))}{hint}"


def shown(value: Any) -> str:
    """The value of an option for a message, without the contents of large objects."""
    return repr(value) if value is None or isinstance(value, str) else describe(value)
