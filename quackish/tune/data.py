"""Random data for the launches that `tune` times. Shared by the operations' tuning.py."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Run = Callable[[], tuple[Tensor | None, ...]]  # launches once and returns the results
MakeRun = Callable[[], Run]  # compiles or loads the kernel of the config that is forced now


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def normal(device: torch.device, dtype: str | None, *shape: int) -> Tensor | None:
    return None if dtype is None else torch.randn(shape, dtype=dtype_of(dtype), device=device)


def epilogue_args(spec: tuple | None, makers: Mapping[str, Callable[[], Any]]) -> tuple | None:
    """Makes the arguments that the spec of an epilogue has."""
    if spec is None:
        return None
    fields: Any = spec  # a NamedTuple
    return fields._make(None if kind is None else makers[name]() for name, kind in fields._asdict().items())


def addresses(args: Any) -> tuple:
    """Replaces the tensors in a NamedTuple by their addresses."""

    def value(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return arg.data_ptr()
        return addresses(arg) if isinstance(arg, tuple) else arg

    return args._make(map(value, args))


def matrix(rows: int, columns: int, is_row_major: bool, *batch: int, **options: Any) -> Tensor:
    """Random numbers, without their product's rounding to infinity."""
    shape = (rows, columns) if is_row_major else (columns, rows)
    t = torch.randn(*batch, *shape, **options).mul_(0.1)
    return t if is_row_major else t.mT
