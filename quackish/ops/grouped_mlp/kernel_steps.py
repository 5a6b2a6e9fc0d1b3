"""The steps of `reference/grouped_mlp.py` on kernels: bf16 and fp16 on Hopper, one launch each.

Kernels read operands in place if one dimension is contiguous, the groups' matrices are adjacent, and all rows start on
16 bytes. Other operands are copied.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from quackish.configs import choose
from quackish.configs.grouped_gemm import (
    DSCALES_COLUMNS,
    MAX_GROUPS,
    MAX_ROWS,
    DownArgs,
    DownBackwardArgs,
    GroupedGemmArgs,
    GroupedGemmProblem,
    UpArgs,
    cluster_tile_for,
    max_groups_for,
)
from quackish.configs.token_rows import TokenRowsProblem
from quackish.gpu import Gpu, gpu_of
from quackish.ops import cuda
from quackish.ops.kernel_for import KernelFor, kernel_for
from quackish.reference import grouped_mlp as reference
from quackish.reference.grouped_mlp import GATED, Needs


def why_none(who: str, x: Tensor, columns: int = 0, groups: int = 0) -> str:
    """Why kernels do not cover these sizes; "" where they do."""
    rows, width = x.shape
    if x.dtype not in (torch.bfloat16, torch.float16):
        why = f"{x.dtype}; supported: torch.bfloat16, torch.float16"
    elif width % 8 or columns % 8:
        why = f"matrices with {width} and {columns} columns; expected multiples of 8"
    elif groups > MAX_GROUPS:
        why = f"{groups} groups; expected at most {MAX_GROUPS}"
    elif rows >= MAX_ROWS:
        why = f"{rows} rows; expected fewer than 2**30"
    else:
        return ""
    return f'{who}: no kernel for {why}. backend="auto" runs the portable path.'


def up(x, w1, w3, b1, scales, offs, activation, keep_preactivation):
    i = w1.shape[1] if w3 is not None or activation not in GATED else w1.shape[1] // 2
    act = x.new_empty((x.shape[0], i))
    preactivation = x.new_empty((x.shape[0], _width(i, activation))) if keep_preactivation else None
    bias, scales = _fp32(b1), _fp32(scales)
    epilogue = UpArgs(_address(preactivation), _address(bias), _address(scales))
    options = dict(activation=activation, biased=b1 is not None, scaled=scales is not None, keeps=keep_preactivation)
    _rows("up", x, _contiguous(w1), _contiguous(w3), act, offs, epilogue, i, x.shape[1], **options)
    return preactivation, act


def down(act, w2, b2, offs):
    y, bias = act.new_empty((act.shape[0], w2.shape[1])), _fp32(b2)
    _rows("down", act, w2, None, y, offs, DownArgs(_address(bias)), *w2.shape[1:], biased=b2 is not None)
    return y


def down_backward(dy, w2, preactivation, scales, offs, activation, needs: Needs):
    if not (needs.dpreactivation or needs.dscales):  # only w2 needs act, which takes no matrix product
        return reference.down_backward(dy, w2, preactivation, scales, offs, activation, needs)
    i, rows = w2.shape[2], dy.shape[0]
    z = _aligned(preactivation)
    dz, act = torch.empty_like(z), dy.new_empty((rows, i))
    parts, s = None, _fp32(scales)
    if s is not None:  # partial sums of each row
        parts = torch.empty((-(-i // DSCALES_COLUMNS), rows), dtype=torch.float32, device=dy.device)
    epilogue = DownBackwardArgs(z.data_ptr(), act.data_ptr(), _address(s), _address(parts))
    options = dict(activation=activation, scaled=s is not None)
    _rows("down_backward", dy, w2.transpose(1, 2), None, dz, offs, epilogue, i, w2.shape[1], **options)
    return dz, act, parts.sum(0).to(scales.dtype) if needs.dscales else None


def rows_gradient(dpreactivation, w1, w3, offs):
    dx = dpreactivation.new_empty((dpreactivation.shape[0], w1.shape[2]))
    w1, w3 = w1.transpose(1, 2), None if w3 is None else w3.transpose(1, 2)
    _rows("down", dpreactivation, w1, w3, dx, offs, DownArgs(), *w1.shape[1:])
    return dx


def weight_gradient(a, b, offs, dtype, out=None):
    a, b = _aligned(a), _aligned(b)
    (rows, m), n, groups = a.shape, b.shape[1], offs.shape[0]
    if out is None:
        d = torch.empty((groups, m, n), dtype=dtype, device=a.device)
    else:
        d = _aligned(out.to(torch.float32, memory_format=torch.contiguous_format))
    problem = _problem("store", _gpu(a), a.dtype, groups, d.dtype, m, n, None, accumulate=out is not None)
    ld = a.stride(0) if rows > 1 else m  # a single row may have any stride
    sizes = ld, rows, m, n, None, groups
    _launch(problem, a, a.data_ptr(), b.data_ptr(), None, d.data_ptr(), offs, None, sizes)
    if out is None:
        return d
    if d is out:
        torch.autograd.graph.increment_version(out)
    else:
        out.copy_(d)
    return None


def bias_gradient(a, offs, dtype):
    ones = a.new_ones((a.shape[0], 8))  # kernels need at least 8 columns
    return weight_gradient(a, ones, offs, torch.float32)[:, :, 0].contiguous().to(dtype)


def copy_rows(x, rows):
    return _token_rows("copy", x, rows, rows.numel())


def sum_rows(x, rows):
    return _token_rows("sum", x, rows, rows.shape[0])


# Launches -------------------------------------------------------------------------------------------------------------


def _rows(
    epilogue: str, a: Tensor, w: Tensor, second: Tensor | None, d: Tensor, offs: Tensor, args: tuple, n: int, k: int,
    **options: Any
) -> None:  # fmt: skip
    """a (R, k) times w (groups, n, k). `second` has w's other rows (up) or columns (down), if w is in two tensors."""
    if not w.is_contiguous() and not w.transpose(1, 2).is_contiguous():
        w = w.contiguous()
    b_major = "k" if w.is_contiguous() else "n"
    if second is not None:
        second = second.contiguous() if b_major == "k" else second.transpose(1, 2).contiguous().transpose(1, 2)
    a, w, second = _aligned(a), _aligned(w), None if second is None else _aligned(second)
    groups, rows = offs.shape[0], a.shape[0]
    fields = dict(b_major=b_major, b_in_two=second is not None, **options)
    total_k = k * (2 if epilogue == "down" and second is not None else 1)
    problem = _problem(epilogue, _gpu(a), a.dtype, groups, d.dtype, None, n, total_k, **fields)
    sizes = None, rows, None, n, k, groups
    _launch(problem, a, a.data_ptr(), w.data_ptr(), _address(second), d.data_ptr(), offs, args, sizes)


def _launch(problem: GroupedGemmProblem, x: Tensor, a, b, second, d, offs: Tensor, epilogue, sizes: tuple) -> None:
    if stand_ins := _stand_ins.get():
        (launch, clusters), stream = _kernel_by(*stand_ins, problem), 0
    else:
        (launch, clusters), stream = _kernel(problem, x.device.index, choose.epoch), cuda.stream_of(x.device.index)
    launch(GroupedGemmArgs(a, b, second, d, offs.data_ptr(), epilogue, *sizes, clusters), stream)


def _gpu(t: Tensor) -> Gpu:
    stand_ins = _stand_ins.get()
    return stand_ins[1] if stand_ins else gpu_of(t.device.index)


@functools.cache
def _kernel(problem: GroupedGemmProblem, device_index: int, epoch: int) -> tuple[Callable, int]:
    return _kernel_by(kernel_for, gpu_of(device_index), problem)


def _kernel_by(kernel_for: KernelFor, gpu: Gpu, problem: GroupedGemmProblem) -> tuple[Callable, int]:
    kernel = kernel_for("grouped_gemm", problem, gpu)
    return kernel.launch, kernel.config.max_clusters(gpu.sm_count)


def _token_rows(op: str, x: Tensor, rows: Tensor, num_out: int) -> Tensor:
    x, rows = _aligned(x.contiguous()), rows.contiguous()  # a hook on saved tensors may return other strides
    (tokens, k), out = rows.shape, x.new_empty((num_out, x.shape[1]))
    problem = TokenRowsProblem(op, x.shape[1], cuda.name_of(x.dtype))
    if stand_ins := _stand_ins.get():
        kernel_for, gpu = stand_ins
        launch, stream = kernel_for("token_rows", problem, gpu).launch, 0
    else:
        launch, stream = _token_rows_kernel(problem, x.device.index), cuda.stream_of(x.device.index)
    launch(x.data_ptr(), rows.data_ptr(), out.data_ptr(), tokens, k, stream)
    return out


@functools.cache
def _token_rows_kernel(problem: TokenRowsProblem, device_index: int) -> Callable:
    return kernel_for("token_rows", problem, gpu_of(device_index)).launch


_stand_ins: ContextVar[tuple[KernelFor, Gpu] | None] = ContextVar("stand_ins", default=None)


@contextlib.contextmanager
def stand_ins(kernel_for: KernelFor, gpu: Gpu) -> Iterator[None]:
    """Inside the block the steps launch these kernels, on tensors of any device. For dry runs and tests."""
    token = _stand_ins.set((kernel_for, gpu))
    try:
        yield
    finally:
        _stand_ins.reset(token)


@functools.lru_cache(maxsize=1024)
def _problem(
    epilogue: str, gpu: Gpu, dtype: torch.dtype, groups: int, out_dtype: torch.dtype, m: int | None, n: int,
    k: int | None, b_major: str = "k", **fields: Any
) -> GroupedGemmProblem:  # fmt: skip
    problem = GroupedGemmProblem(
        epilogue, cuda.name_of(dtype), max_groups_for(groups), cuda.name_of(out_dtype), b_major=b_major, **fields
    )
    columns = n * (1 + (epilogue == "up" and problem.gated))
    return dataclasses.replace(problem, cluster_tile=cluster_tile_for(problem, gpu, m, columns, k))


# Operands -------------------------------------------------------------------------------------------------------------


def _width(i: int, activation: str) -> int:
    return 2 * i if activation in GATED else i


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _fp32(t: Tensor | None) -> Tensor | None:
    return None if t is None else _aligned(t.float().contiguous())


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _aligned(t: Tensor) -> Tensor:
    """t, or a copy if its rows do not start on 16 bytes. (Numbers of columns are multiples of 8.)"""
    if t.data_ptr() % 16 == 0 and (t.is_contiguous() or all(step == 1 or step % 8 == 0 for step in t.stride())):
        return t
    return t.clone(memory_format=torch.preserve_format)
