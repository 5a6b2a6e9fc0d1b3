"""Buffers of linear cross entropy on kernels, above all exp_logits: where they lie, and the GEMMs that read them.

The weight gradient removes the targets' elements from exp_logits first, and adds their terms, which are most of the
gradient of a class with few rows, in fp32.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.gemm import NUM_TICKETS
from quackish.configs.lce_args import SortArgs, TargetsArgs
from quackish.configs.lce_rows import MOST_ROWS_COUNTED, ROW_TILE
from quackish.ops import cuda
from quackish.ops.modes import check_memory

I32, F32 = torch.int32, torch.float32

# Memory ---------------------------------------------------------------------------------------------------------------

Vector = Tensor | int  # a number per row, or one number: 4 bytes each, contiguous; or its address


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
    """What forward finds out about rows and backward needs: lse, and addresses in one allocation, `memory`."""

    lse: Tensor  # (m,) fp32; apart, since users may get it
    memory: Tensor  # (RowState.size(m),) int32
    tickets: int  # (NUM_TICKETS,) int32: 0 unless a GEMM runs
    num_live: int  # (1,) int32
    inv_divisor: Vector  # (1,) fp32
    order: int  # (m,) int32: the row of each slot, live rows first
    slot_target: int  # (m,) int32
    row_max_bits: int  # (m,) int32
    target_logit: int  # (m,) fp32
    row_sum: int  # (m,) fp32

    @staticmethod
    def size(m: int) -> int:
        return NUM_TICKETS + 4 + 5 * -(-m // 4) * 4

    @classmethod
    def of(cls, lse: Tensor, memory: Tensor) -> "RowState":
        tickets, step = memory.data_ptr(), -(-lse.shape[0] // 4) * 16  # each vector starts on 16 bytes
        num_live = tickets + 4 * NUM_TICKETS
        order = num_live + 16
        slot_target = order + step
        row_max_bits = slot_target + step
        target_logit = row_max_bits + step
        return cls(
            lse, memory, tickets, num_live, num_live + 4, order, slot_target, row_max_bits, target_logit,
            target_logit + step,
        )  # fmt: skip

    def tensor(self, address: int, n: int, dtype: torch.dtype = I32) -> Tensor:
        first = (address - self.tickets) // 4
        return self.memory[first : first + n].view(dtype)


class Chunk(NamedTuple):
    """Slots [start, start + rows): addresses of parts of RowState's vectors, and of vectors in `memory`."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): their rows of x
    slot_target: int
    row_max_bits: int
    target_logit: int
    row_sum: int
    memory: Tensor
    row_shift: int  # (rows,) fp32
    row_scale: int  # (rows,) fp32
    # What live rows have at their targets, by class. Their part of dw is sorted_grad * x[sorted_row].
    sorted_target: int  # (rows,) int32
    sorted_row: int  # (rows,) int32
    sorted_grad: int  # (rows,) fp32: row_scale * exp_logits at the target
    flags: int  # (1 + ceil(rows / ROW_TILE),) int32

    @classmethod
    def of(cls, state: RowState, start: int, rows: int, live_x: Tensor | None = None) -> "Chunk":
        padded_rows, at = -(-rows // 4) * 4, 4 * start
        memory = vector(state.lse, 5 * padded_rows + 1 + -(-rows // ROW_TILE), I32)
        own, step = memory.data_ptr(), 4 * padded_rows
        return cls(
            start, rows, live_x, state.slot_target + at, state.row_max_bits + at, state.target_logit + at,
            state.row_sum + at, memory, own, own + step, own + 2 * step, own + 3 * step, own + 4 * step, own + 5 * step,
        )  # fmt: skip


# exp_logits -----------------------------------------------------------------------------------------------------------


class ExpLogits(NamedTuple):
    """exp_logits of a chunk: those of the classes from `split` on are in `second`, if there is one."""

    first: Tensor | None  # (rows, split) bf16; None: not stored
    split: int
    second: Tensor | None = None  # (rows, v - split) bf16
    v: int = 0  # with second

    @classmethod
    def alone(cls, w: Tensor, rows: int) -> "ExpLogits":
        v = w.shape[0]
        return cls(padded(w, rows, v, w.dtype), v)

    @classmethod
    def beside(cls, dw: Tensor, rows: int, columns: int, offset: int) -> "ExpLogits":
        """The first `columns` classes in dw's storage."""
        v, dtype = dw.shape[0], torch.bfloat16
        first, second = inside(dw, offset, rows, columns, dtype), padded(dw, rows, v - columns, dtype)
        return cls(first, columns, second, v)

    @property
    def blocks(self) -> list[tuple[Tensor, int, int]]:
        """(exp_logits, first class, end of the classes)"""
        first = self.first, 0, self.split
        return [first] if self.second is None else [first, (self.second, self.split, self.v)]

    @property
    def strides(self) -> tuple[int, int]:
        first, second = self.first, self.second
        return 0 if first is None else first.stride(0), 0 if second is None else second.stride(0)

    def dx(self, k, w: Tensor, chunk: Chunk, state: RowState, dx: Tensor, tickets: Vector | None) -> None:
        two = self.first, self.second, self.split
        k.dx(*two, w, chunk.row_scale, state.order, state.num_live, chunk.start, dx, False, tickets)

    def bias_sum(self, k, chunk: Chunk, state: RowState, db: Tensor) -> None:
        """Writes db, or adds to it after the first chunk."""
        for data, v0, v1 in self.blocks:
            k.bias_sum(data, chunk.row_scale, state.num_live, chunk.start, db[v0:v1], chunk.start > 0)

    def dw(
        self, k, x: Tensor, scaled_x: Tensor, chunk: Chunk, state: RowState, dw: Tensor,
        first_slot_of_class: Tensor | None,
    ) -> None:  # fmt: skip
        """Writes dw, or adds to it after the first chunk. Consumes exp_logits: zeroes its target entries. Call last.

        first_slot_of_class holds NO_SLOT.
        """
        residual = None
        targets_apart = first_slot_of_class is not None or dw.dtype == F32
        if targets_apart:
            self.take_targets(k, chunk, state, first_slot_of_class)
            if first_slot_of_class is not None:
                residual = matrix(dw, chunk.rows, dw.shape[1], torch.int16)
        for data, v0, v1 in self.blocks:
            part, slots = dw, first_slot_of_class
            if self.second is not None:
                part, slots = dw[v0:v1], None if slots is None else slots[v0:v1]
            k.dw(data, scaled_x, state.num_live, chunk.start, part, chunk.start > 0, state.tickets, slots, residual)
        if targets_apart:
            add_targets(k, x, chunk, state, dw, 0, residual)

    def take_targets(self, k, chunk: Chunk, state: RowState, first_slot_of_class: Tensor | None = None) -> None:
        """Moves the elements at the targets out of exp_logits, where they become 0, to chunk.sorted_grad."""
        n, index = chunk.rows, None
        if n > MOST_ROWS_COUNTED:
            classes, num_live = state.tensor(chunk.slot_target, n), state.tensor(state.num_live, 1)
            index = order_by_class(classes, num_live, chunk.start)
        k.sort(
            SortArgs(
                chunk.slot_target, state.order, state.num_live, chunk.row_scale, self.first, self.second,
                *self.strides, self.split, chunk.sorted_target, chunk.sorted_row, chunk.sorted_grad,
                first_slot_of_class, index, self.v or self.split, chunk.start, n,
            )
        )  # fmt: skip


def add_targets(
    k, x: Tensor, chunk: Chunk, state: RowState, dw: Tensor, v0: int, residual: Tensor | None = None
) -> None:
    """dw (n, h) of classes v0 and up += the targets' part, before which `residual` is added to the rounded dw."""
    k.targets(
        TargetsArgs(
            x, chunk.sorted_target, chunk.sorted_row, chunk.sorted_grad, state.num_live, dw, residual, x.stride(0), v0,
            v0 + dw.shape[0], chunk.start, chunk.rows,
        )
    )  # fmt: skip


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
    targets: Chunk | None = None, factor: Tensor | None = None,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x, and the targets' part if it is not in dlogits. `out` is the user's."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it, by TMA
        k.dw(dlogits, scaled_x, state.num_live, 0, out, True, state.tickets, factor=factor)
        if targets is not None:
            add_targets(k, x, targets, state, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0 in range(0, out.shape[0], 4096):  # bounds the memory of dw
        part = out[v0 : v0 + 4096]
        dw = matrix(scaled_x, *part.shape, F32)
        k.dw(dlogits[:, v0 : v0 + 4096], scaled_x, state.num_live, 0, dw, False, state.tickets, factor=factor)
        if targets is not None:
            add_targets(k, x, targets, state, dw, v0)
        part.add_(dw)
