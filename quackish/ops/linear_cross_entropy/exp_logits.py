"""The exponentials exp(a - row_shift) of a chunk's logits: where they are stored, and the GEMMs that read them.

The weight gradient removes the targets' elements from them first and adds these terms, which are most of the gradient
of a class with few rows, in fp32.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.gemm import NUM_TICKETS
from quackish.configs.lce_rows import MOST_ROWS_COUNTED
from quackish.configs.linear_cross_entropy import E_ITEMSIZE, SHARED_FROM, shared_storage
from quackish.ops import cuda
from quackish.ops.modes import check_memory

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
    if columns % 8:  # the last row's padding is memory too: it is read, 16 bytes at a time, not used
        return padded(like, rows, -(-columns // 8) * 8, dtype)[:, :columns]
    return empty(like, (rows, columns), padded_strides(columns), dtype)


def inside(of: Tensor, offset: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix `offset` bytes into the storage that `of`, contiguous, has for itself."""
    if of.dtype != dtype:
        of = of.view(-1).view(dtype)
    return of.as_strided((rows, columns), (columns, 1), offset // dtype.itemsize)


def padded_strides(columns: int) -> tuple[int, int]:
    """Of E: its rows start on 128 bytes."""
    return -(-columns // 64) * 64, 1


class RowState(NamedTuple):
    """Small tensors, from forward until backward."""

    num_live: Tensor  # (1,) int32
    order: Tensor  # (m,) int32
    slot_target: Tensor  # (m,) int32
    row_max_bits: Tensor  # (m,) int32: encoded
    target_logit: Tensor  # (m,) fp32
    row_sum: Tensor  # (m,) fp32
    inv_divisor: Tensor  # (1,) fp32
    tickets: Tensor  # (NUM_TICKETS,) int32: 0 but while a GEMM runs

    @classmethod
    def make(cls, m: int, vector: Callable[[int, torch.dtype], Tensor]) -> "RowState":
        i, f = torch.int32, torch.float32
        of_rows = vector(m, i), vector(m, i), vector(m, i), vector(m, f), vector(m, f)
        return cls(vector(1, i), *of_rows, vector(1, f), vector(NUM_TICKETS, i))


# exp_logits -----------------------------------------------------------------------------------------------------------


class Block(NamedTuple):
    e: Tensor | None  # (rows, v1 - v0) bf16, rows ld apart
    v0: int
    v1: int


class E:
    """E, or a chunk's, in one or two blocks of columns; in two where one lies in dw's storage."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = blocks

    @classmethod
    def alone(cls, w: Tensor, rows: int) -> "E":
        v = w.shape[0]
        return cls([Block(padded(w, rows, v, w.dtype), 0, v)])

    @classmethod
    def beside(cls, dw: Tensor, rows: int) -> "E | None":
        """The first columns at the end of dw's storage, where they fit and E is large; see `shared_storage`."""
        v, h = dw.shape
        plan = shared_storage(rows, v, h, dw.itemsize) if rows * v * E_ITEMSIZE > SHARED_FROM else None
        if plan is None:
            return None
        first = inside(dw, plan.offset, rows, plan.columns, torch.bfloat16)
        rest = v - plan.columns
        second = padded(dw, rows, rest, torch.bfloat16)
        return cls([Block(first, 0, plan.columns), Block(second, plan.columns, v)])

    def in_two(self) -> tuple[Tensor | None, Tensor | None, int]:
        """The first columns, the others if they lie elsewhere, and the number of the first of these."""
        first = self.blocks[0]
        return first.e, self.blocks[1].e if len(self.blocks) > 1 else None, first.v1

    def dx(
        self, k, w: Tensor, row_scale: Tensor, rows: RowState, start: int, dx: Tensor, tickets: Tensor | None
    ) -> None:
        k.dx(*self.in_two(), w, row_scale, rows.order, rows.num_live, start, dx, False, tickets)

    def dw(
        self, k, x: Tensor, xs: Tensor, slot_target: Tensor, row_scale: Tensor, rows: RowState, start: int, dw: Tensor,
        accumulate: bool, places: Tensor | None,
    ) -> None:  # fmt: skip
        """The last to look at the targets' elements: they are 0 afterwards. places: `new_places`, NO_SLOT."""
        targets = rest = None
        if places is not None or dw.dtype == torch.float32:
            targets = Targets.taken_from(self, k, slot_target, row_scale, rows, start, places, dw)
            rest = targets.rest
        for e, v0, v1 in self.blocks:
            whole = len(self.blocks) == 1
            part = dw if whole else dw[v0:v1]
            its_places = places if whole or places is None else places[v0:v1]
            k.dw(e, xs, rows.num_live, start, part, accumulate, rows.tickets, its_places, rest)
        if targets is not None:
            k.targets(x, *targets.of_rows, rows.num_live, start, 0, dw, rest)

    def bias_sum(self, k, row_scale: Tensor, rows: RowState, start: int, db: Tensor, accumulate: bool) -> None:
        for e, v0, v1 in self.blocks:
            k.bias_sum(e, row_scale, rows.num_live, start, db if len(self.blocks) == 1 else db[v0:v1], accumulate)


class Targets(NamedTuple):
    """What a chunk's live rows have at their targets, by class: their part of the weight gradient is row_scale * E
    there times x, which is added in fp32, with x not rounded as xs is."""

    of_rows: tuple[Tensor, Tensor, Tensor]  # (rows,) each: slot_target, int32; row of x, int32; row_scale * E, fp32
    # With `places`: the bits that rounding cuts off the classes that have targets, until theirs are added.
    rest: Tensor | None = None  # (rows, h)

    @classmethod
    def taken_from(
        cls,
        e: E,
        k,
        classes: Tensor,
        row_scale: Tensor,
        rows: RowState,
        start: int,
        places: Tensor | None,
        dw: Tensor,
    ) -> "Targets":
        n = classes.shape[0]
        of_rows = tuple(vector(classes, n, dtype) for dtype in (torch.int32, torch.int32, torch.float32))
        rest = None if places is None else matrix(dw, n, dw.shape[1], torch.int16)
        index = order_by_class(classes, rows.num_live, start) if n > MOST_ROWS_COUNTED else None
        k.sort(classes, rows.order, rows.num_live, start, row_scale, *e.in_two(), *of_rows, places, index)
        return cls(of_rows, rest)


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """Chunk rows by class, then by number, those that are not live last: (rows,) int64, by PyTorch's radix sort."""
    n = classes.shape[0]
    rows = torch.arange(start, start + n, dtype=torch.int32, device=classes.device)
    return classes.masked_fill(rows >= num_live, torch.iinfo(torch.int32).max).sort(stable=True).indices


def new_places(k, like: Tensor, v: int, dw: torch.dtype | None) -> Tensor | None:
    """(v,) int32 for a 16-bit dw: the row of the rounding residual that belongs to a class, or NO_SLOT.

    None if the GEMM cannot keep the residual. Then the targets' elements stay in exp_logits: adding their terms to a
    rounded dw would be less exact than rounding xs.
    """
    return vector(like, v, torch.int32) if k.keeps_rest and dw not in (None, torch.float32) else None


def _adds_in_gemm(out: Tensor) -> bool:
    """Whether a GEMM may add to `out` itself, by TMA."""
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    return out.dtype == torch.float32 and dense and out.data_ptr() % 16 == 0


def add_dw(
    k, e: Tensor, xs: Tensor, rows: RowState, out: Tensor, x: Tensor | None = None, targets: Targets | None = None,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """out += factor * e.T @ xs, and the targets' part where they are not in e."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    if _adds_in_gemm(out):
        k.dw(e, xs, rows.num_live, 0, out, True, rows.tickets, factor=factor)
        if targets is not None:
            k.targets(x, *targets.of_rows, rows.num_live, 0, 0, out)
        torch.autograd.graph.increment_version(out)
        return
    for v0 in range(0, out.shape[0], 4096):  # so that there is only a small buffer
        part = out[v0 : v0 + 4096]
        dw = matrix(xs, *part.shape, torch.float32)
        k.dw(e[:, v0 : v0 + 4096], xs, rows.num_live, 0, dw, False, rows.tickets, factor=factor)
        if targets is not None:
            k.targets(x, *targets.of_rows, rows.num_live, 0, v0, dw)
        part.add_(dw)
