"""A check that operators return what their fake implementations promise to compiled code."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class ChecksFakes(TorchDispatchMode):
    """Calls in this mode go through the dispatcher. Results of operators must have their fakes' shapes and strides."""

    def __init__(self):
        super().__init__()
        self.checked: list[str] = []  # names of operators

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **kwargs or {})
        if func.namespace == "quackish":
            fakes = func(*map(_fake, args), **{name: _fake(value) for name, value in (kwargs or {}).items()})
            assert _layouts(results) == _layouts(fakes), func
            self.checked.append(func._schema.name.removeprefix("quackish::"))
        return results


def _fake(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _layouts(results) -> list:
    results = results if isinstance(results, (tuple, list)) else (results,)
    return [None if t is None else (t.dtype, t.shape, _strides(t)) for t in results]


def _strides(t: torch.Tensor) -> list[int | None]:
    """Without those that address nothing."""
    return [None if size == 1 or not t.numel() else stride for size, stride in zip(t.shape, t.stride(), strict=True)]
