"""Buffers of linear cross entropy on kernels, above all exp_logits: where they lie, and the GEMMs that read them.

The weight gradient removes the targets' elements from exp_logits first, and adds their terms, which are most of the
gradient of a class with few rows, in fp32.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.gemm import NUM_TICKETS
from quackish.configs.lce_args import SortArgs, TargetsArgs
from quackish.configs.lce_rows import MOST_ROWS_COUNTED
from quackish.ops import cuda
from quackish.ops.modes import check_memory

I32, F32 = torch.int32, torch.float32

# Memory ---------------------------------------------------------------------------------------------------------------


def empty(like: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if like.is_cuda:  # the current device, which is like's
        return cuda.empty(shape, strides, dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


def vector(like: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (n,), (1,), dtype)


def matrix(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return empty(like, (rows, columns), (columns, 1), dtype)


def padded(like: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose rows start on 128 bytes."""
    if columns % 8:  # the last row's padding must exist: it is read, 16 bytes at a time, but not used
        return padded(like, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return empty(like, (rows, columns), padded_strides(columns), dtype)


def padded_strides(columns: int) -> tuple[int, int]:
    return -(-columns // 64) * 64, 1


def inside(of: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage of `of`, which is contiguous and has a storage of its own."""
    if of.dtype != dtype:
        of = of.view(-1).view(dtype)
    return of.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


class RowState(NamedTuple):
    """What forward finds out about rows and backward needs."""

    lse: Tensor  # (m,) fp32
    num_live: Tensor  # (1,) int32
    order: Tensor  # (m,) int32: the row of each slot, live rows first
    slot_target: Tensor  # (m,) int32
    row_max_bits: Tensor  # (m,) int32
    target_logit: Tensor  # (m,) fp32
    row_sum: Tensor  # (m,) fp32
    inv_divisor: Tensor  # (1,) fp32
    tickets: Tensor  # (NUM_TICKETS,) int32: 0 unless a GEMM runs

    @classmethod
    def make(cls, m: int, vector: Callable[[int, torch.dtype], Tensor]) -> "RowState":
        of_rows = vector(m, I32), vector(m, I32), vector(m, I32), vector(m, F32), vector(m, F32)
        return cls(vector(m, F32), vector(1, I32), *of_rows, vector(1, F32), vector(NUM_TICKETS, I32))


class Chunk(NamedTuple):
    """Slots [start, start + rows): parts of RowState's tensors, and buffers of their own."""

    start: int
    rows: int
    slot_target: Tensor  # (rows,)
    row_max_bits: Tensor  # (rows,)
    target_logit: Tensor  # (rows,)
    row_sum: Tensor  # (rows,)
    live_x: Tensor | None = None  # (rows, h): their rows of x
    row_scale: Tensor | None = None  # (rows,) fp32

    @classmethod
    def of(cls, state: RowState, start: int, rows: int, live_x: Tensor | None, row_scale: Tensor | None) -> "Chunk":
        of_rows = state.slot_target, state.row_max_bits, state.target_logit, state.row_sum
        if rows != state.order.shape[0]:
            of_rows = [t[start : start + rows] for t in of_rows]
        return cls(start, rows, *of_rows, live_x, row_scale)


# exp_logits -----------------------------------------------------------------------------------------------------------


class ExpBlock(NamedTuple):
    data: Tensor | None  # (rows, v1 - v0) bf16; None: not stored
    v0: int
    v1: int


class ExpLogits:
    """exp_logits of a chunk, in one or two blocks of classes."""

    def __init__(self, *blocks: ExpBlock):
        self.blocks = blocks
        first = blocks[0]
        self.first, self.second = first.data, blocks[1].data if len(blocks) > 1 else None
        self.split = first.v1  # the first class of `second`

    @classmethod
    def alone(cls, w: Tensor, rows: int) -> "ExpLogits":
        v = w.shape[0]
        return cls(ExpBlock(padded(w, rows, v, w.dtype), 0, v))

    @classmethod
    def beside(cls, dw: Tensor, rows: int, columns: int, offset: int) -> "ExpLogits":
        """The first `columns` classes in dw's storage."""
        v, dtype = dw.shape[0], torch.bfloat16
        first, second = inside(dw, offset, rows, columns, dtype), padded(dw, rows, v - columns, dtype)
        return cls(ExpBlock(first, 0, columns), ExpBlock(second, columns, v))

    @property
    def strides(self) -> tuple[int, int]:
        return self.first.stride(0), 0 if self.second is None else self.second.stride(0)

    def dx(
        self, k, w: Tensor, row_scale: Tensor, state: RowState, start: int, dx: Tensor, tickets: Tensor | None
    ) -> None:
        two = self.first, self.second, self.split
        k.dx(*two, w, row_scale, state.order, state.num_live, start, dx, False, tickets)

    def bias_sum(self, k, row_scale: Tensor, state: RowState, start: int, db: Tensor, accumulate: bool) -> None:
        for data, v0, v1 in self.blocks:
            part = db if len(self.blocks) == 1 else db[v0:v1]
            k.bias_sum(data, row_scale, state.num_live, start, part, accumulate)

    def dw(
        self, k, x: Tensor, scaled_x: Tensor, chunk: Chunk, state: RowState, dw: Tensor, accumulate: bool,
        first_slot_of_class: Tensor | None,
    ) -> None:  # fmt: skip
        """Consumes exp_logits: zeroes its target entries. Call last. first_slot_of_class holds NO_SLOT."""
        targets = residual = None
        if first_slot_of_class is not None or dw.dtype == F32:
            targets = self.take_targets(k, chunk, state, first_slot_of_class)
            if first_slot_of_class is not None:
                residual = matrix(dw, chunk.rows, dw.shape[1], torch.int16)
        for data, v0, v1 in self.blocks:
            whole = len(self.blocks) == 1
            listed = first_slot_of_class if whole or first_slot_of_class is None else first_slot_of_class[v0:v1]
            part = dw if whole else dw[v0:v1]
            k.dw(data, scaled_x, state.num_live, chunk.start, part, accumulate, state.tickets, listed, residual)
        if targets is not None:
            add_targets(k, x, targets, state, chunk.start, dw, 0, residual)

    def take_targets(self, k, chunk: Chunk, state: RowState, first_slot_of_class: Tensor | None = None) -> "Targets":
        """Moves the elements at the targets out of exp_logits, where they become 0."""
        n = chunk.rows
        made = Targets(*(vector(chunk.slot_target, n, dtype) for dtype in (I32, I32, F32)))
        index = order_by_class(chunk.slot_target, state.num_live, chunk.start) if n > MOST_ROWS_COUNTED else None
        k.sort(
            SortArgs(
                chunk.slot_target, state.order, state.num_live, chunk.row_scale, self.first, self.second,
                *self.strides, self.split, *made, first_slot_of_class, index, self.blocks[-1].v1, chunk.start, n,
            )
        )  # fmt: skip
        return made


class Targets(NamedTuple):
    """What a chunk's live rows have at their targets, sorted by class. Their part of dw is grad * x[row]."""

    target: Tensor  # (rows,) int32
    row: Tensor  # (rows,) int32
    grad: Tensor  # (rows,) fp32: row_scale * exp_logits at the target


def add_targets(
    k, x: Tensor, targets: Targets, state: RowState, start: int, dw: Tensor, v0: int, residual: Tensor | None = None
) -> None:
    """dw (n, h) of classes v0 and up += the targets' part, before which `residual` is added to the rounded dw."""
    rows, v1 = targets.target.shape[0], v0 + dw.shape[0]
    k.targets(TargetsArgs(x, *targets, state.num_live, dw, residual, x.stride(0), v0, v1, start, rows))


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """Slots of a chunk by class, those that are not live last: (rows,) int64, by PyTorch's stable radix sort."""
    n = classes.shape[0]
    slots = torch.arange(start, start + n, dtype=I32, device=classes.device)
    return classes.masked_fill(slots >= num_live, torch.iinfo(I32).max).sort(stable=True).indices


def new_first_slot_of_class(k, like: Tensor, v: int, dw: torch.dtype | None) -> Tensor | None:
    """(v,) int32 for the first slot of each class, where the rounding residual of a 16-bit dw is kept until the
    targets' terms are added.

    None if the GEMM cannot keep the residual. Then the targets' elements stay in exp_logits: adding their terms to a
    rounded dw would be less exact than rounding scaled_x.
    """
    return vector(like, v, I32) if k.keeps_residual and dw not in (None, F32) else None


def add_dw(
    k, dlogits: Tensor, scaled_x: Tensor, state: RowState, out: Tensor, x: Tensor | None = None,
    targets: Targets | None = None, factor: Tensor | None = None,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x, and the targets' part if it is not in dlogits. `out` is the user's."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it, by TMA
        k.dw(dlogits, scaled_x, state.num_live, 0, out, True, state.tickets, factor=factor)
        if targets is not None:
            add_targets(k, x, targets, state, 0, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0 in range(0, out.shape[0], 4096):  # bounds the memory of dw
        part = out[v0 : v0 + 4096]
        dw = matrix(scaled_x, *part.shape, F32)
        k.dw(dlogits[:, v0 : v0 + 4096], scaled_x, state.num_live, 0, dw, False, state.tickets, factor=factor)
        if targets is not None:
            add_targets(k, x, targets, state, 0, dw, v0)
        part.add_(dw)
