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


class Layout(NamedTuple):
    shape: Sizes
    strides: Sizes
    dtype: torch.dtype


class Plan(NamedTuple):
    launch: Callable[..., None]
    results: list[Layout]  # of q and k
    numbers: tuple[Any, ...]  # the kernel's arguments after its addresses


def layout_of(t: Tensor) -> Layout:
    return Layout(tuple(t.shape), t.stride(), t.dtype)


@functools.lru_cache(maxsize=4096)  # with packed sequences, shapes may be new in every step
def plan_for(
    device: KernelDevice,
    epoch: int,  # choose.epoch: kernels may be chosen differently from then on
    tensors: tuple[Layout, ...],  # q, and k if there is one
    tables: tuple[Layout, Layout],  # cos and sin
    result_strides: tuple[Sizes, ...],  # of q and k
    aligned: bool,  # all addresses are multiples of 16 bytes
    rotary_dim: int,
    layout: str,
    transpose: bool,
) -> Plan | str:
    """A string says why no kernel covers the call. All arguments are `readable`."""
    results = [t._replace(strides=strides) for t, strides in zip(tensors, result_strides, strict=True)]
    steps = [_steps(t) for t in (*tensors, *results)]
    table_steps = [TableStrides(0 if t.shape[:-2] in ((), (1,)) else t.strides[0], t.strides[-2]) for t in tables]
    (*leading, q_heads, length, d), dtype, table_dtype = tensors[0].shape, tensors[0].dtype, tables[0].dtype
    problem = RotaryProblem(
        d=d,
        dtype=name_of(dtype),
        table_dtype=name_of(table_dtype),
        rotary_dim=rotary_dim,
        layout=layout,
        half_table=tables[0].shape[-1] < rotary_dim,
        transpose=transpose,
        aligned=aligned
        and all(step * dtype.itemsize % 16 == 0 for step in itertools.chain(*steps))
        and all(step * table_dtype.itemsize % 16 == 0 for step in itertools.chain(*table_steps)),
    )
    tokens, k_heads = math.prod(leading) * length, sum(t.shape[-3] for t in tensors[1:])
    try:
        if tokens * problem.threads_per_token > MAX_THREADS:
            raise no_kernel(f"{tokens} rows of {d} per head; at most {MAX_THREADS // problem.threads_per_token}")
        launch, config = device.kernel_for(problem, device.gpu)
    except UnsupportedError as error:
        return str(error)
    heads_per_cta = config.heads_per_cta(problem, tokens, q_heads + k_heads, device.gpu.sm_count)
    q, k = steps[0], steps[len(tensors) - 1]  # without k, those of q
    q_out, k_out = steps[len(tensors)], steps[-1]
    numbers = q, k, q_out, k_out, *table_steps, tokens, length, q_heads, k_heads, heads_per_cta
    return Plan(launch, results, numbers)


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
    strides = t.stride()
    return t if strides[-1] == 1 and _batch_step(t.shape, strides) is not None else t.contiguous()


def _is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if the elements fill a range of memory, each at a place of its own."""
    extent = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != extent:
            return False
        extent = extent * size
    return True


def _batch_step(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The distance of batch entries, if all dimensions before (heads, length, D) fold into one; else None."""
    step, count = 0, 1
    for size, stride in zip(reversed(shape[:-3]), reversed(strides[:-3]), strict=True):
        if size == 1:
            continue
        if count == 1:
            step = stride
        elif stride != step * count:
            return None
        count = count * size
    return step


def _steps(t: Layout) -> Strides:
    head, row = (0 if size == 1 else step for size, step in zip(t.shape[-3:-1], t.strides[-3:-1], strict=True))
    return Strides(_batch_step(t.shape, t.strides), head, row)
