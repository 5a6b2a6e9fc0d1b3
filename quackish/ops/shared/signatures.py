"""Results that depend on the kind of a call's arguments only, such as those of their checks, computed once."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

from quackish.device.modes import are_plain, autocast_dtype, is_compiling

_MAX_RESULTS = 4096  # all are dropped when there are more: with packed sequences, shapes may be new in every step
Result = TypeVar("Result")


class PerSignature(Generic[Result]):
    """`function(tensors, *options)`, which is called once per signature.

    A signature is autocast's dtype, the options, which are not nested, and all of the tensors but their addresses and
    values. So `function` reads nothing else. It returns no tensors and not None, or raises.
    """

    def __init__(self, function: Callable[..., Result]):
        self._function = function
        self._results: dict[tuple, Result] = {}

    def __call__(self, tensors: tuple, *options: object) -> Result:
        if is_compiling():
            return self._function(tensors, *options)
        try:
            key = _signature(tensors, options)
            found = self._results.get(key)
        except (AttributeError, TypeError, RuntimeError):  # no tensor, a nested one, or what is not hashable
            return self._function(tensors, *options)
        if found is None:
            found = self._function(tensors, *options)
            if are_plain(tensors):
                if len(self._results) >= _MAX_RESULTS:
                    self._results.clear()
                self._results[key] = found
        return found


def _signature(tensors: tuple[Tensor | None, ...], options: tuple) -> tuple:
    key = [autocast_dtype(tensors[0].device.type), *options, *map(type, options)]  # 1, 1.0 and True are equal
    for t in tensors:
        if t is None:
            key.append(None)
        else:
            key += t.shape, t.stride(), t.dtype, t.device, type(t)
    return tuple(key)
