"""Plans of calls: what depends on shapes, strides, dtypes and options only, computed once."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.cuda import name_of
from quackish.device.kernel_device import KernelDevice
from quackish.errors import UnsupportedError
from quackish.ops.rotary.problems import MAX_THREADS, RotaryProblem, Strides, TableStrides, no_kernel

Sizes = tuple[int, ...]


Kind = tuple[Sizes, Sizes, torch.dtype]  # shape, strides, dtype


class Plan(NamedTuple):
    """For arguments that the kernel can read in place."""

    launch: Callable[..., None]
    results: tuple[Kind, ...]  # of q and k
    numbers: tuple[Any, ...]  # the kernel's arguments after its addresses


def kind_of(t: Tensor) -> Kind:
    return t.shape, t.stride(), t.dtype


@functools.lru_cache(maxsize=4096)  # with packed sequences, shapes may be new in every step
def plan_for(
    device: KernelDevice,
    epoch: int,  # choose.epoch: kernels may be chosen differently from then on
    q: Kind,
    k: Kind | None,
    cos: Kind,
    sin: Kind,
    q_strides: Sizes | None,  # of the result; None: `strides_of_result`
    k_strides: Sizes | None,
    aligned: bool,  # all addresses are multiples of 16 bytes
    rotary_dim: int,
    layout: str,
    transpose: bool,
) -> Plan | str | None:
    """None: the kernel needs copies of arguments (`readable`). A string says why no kernel covers the call."""
    tensors, tables = [q] if k is None else [q, k], (cos, sin)
    if not all(_is_readable(shape, strides) for shape, strides, _ in (*tensors, *tables)):
        return None
    results = tuple(
        (tuple(shape), strides_of_result(shape, strides) if given is None else given, dtype)
        for (shape, strides, dtype), given in zip(tensors, (q_strides, k_strides), strict=False)
    )
    steps = [_steps(*kind) for kind in (*tensors, *results)]
    table_steps = [TableStrides(_batch_step(t[0], t[1], 2) or 0, t[1][-2]) for t in tables]
    (*leading, q_heads, length, d), dtype, table_dtype = q[0], q[2], cos[2]
    problem = RotaryProblem(
        d=d,
        dtype=name_of(dtype),
        table_dtype=name_of(table_dtype),
        rotary_dim=rotary_dim,
        layout=layout,
        half_table=cos[0][-1] < rotary_dim,
        transpose=transpose,
        aligned=aligned
        and all(step * dtype.itemsize % 16 == 0 for step in itertools.chain(*steps))
        and all(step * table_dtype.itemsize % 16 == 0 for step in itertools.chain(*table_steps)),
    )
    tokens, k_heads = math.prod(leading) * length, 0 if k is None else k[0][-3]
    try:
        if tokens * problem.threads_per_token > MAX_THREADS:
            raise no_kernel(f"{tokens} rows of {d} per head; at most {MAX_THREADS // problem.threads_per_token}")
        launch = device.kernel_for(problem, device.gpu).launch
    except UnsupportedError as error:
        return str(error)
    of_tensors, of_results = steps[: len(tensors)], steps[len(tensors) :]
    strides = of_tensors[0], of_tensors[-1], of_results[0], of_results[-1]  # without k, those of q
    return Plan(launch, results, (*strides, *table_steps, tokens, length, q_heads, k_heads))


# Strides --------------------------------------------------------------------------------------------------------------


def strides_of_result(shape: Sequence[int], strides: Sequence[int]) -> Sizes:
    """The argument's strides if the kernel can write a tensor with them that is dense, else those of a contiguous one.

    Also for symbolic sizes, in fake results.
    """
    if strides[-1] == 1 and _batch_step(shape, strides) is not None and _is_dense(shape, strides):
        return tuple(strides)
    contiguous, step = [], 1
    for size in reversed(shape):
        contiguous.append(step)
        step = step * size
    return tuple(contiguous[::-1])


def readable(t: Tensor) -> Tensor:
    """t, or a contiguous copy if a kernel cannot read it in place."""
    return t if _is_readable(t.shape, t.stride()) else t.contiguous()


def _is_readable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return (strides[-1] == 1 or shape[-1] == 1) and _batch_step(shape, strides) is not None


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements fill a range of memory, each at a place of its own."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != extent:
            return False
        extent = extent * size
    return True


def _batch_step(shape: Sequence[int], strides: Sequence[int], dims: int = 3) -> int | None:
    """The distance of batch entries if all dimensions before the last `dims` fold into one, else None."""
    step, count = 0, 1
    for size, stride in zip(reversed(shape[:-dims]), reversed(strides[:-dims]), strict=True):
        if size == 1:
            continue
        if count == 1:
            step = stride
        elif stride != step * count:
            return None
        count = count * size
    return step


def _steps(shape: Sizes, strides: Sizes, dtype: torch.dtype) -> Strides:
    head, row = (0 if size == 1 else step for size, step in zip(shape[-3:-1], strides[-3:-1], strict=True))
    return Strides(_batch_step(shape, strides), head, row)
