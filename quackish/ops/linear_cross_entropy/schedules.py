"""The schedules of linear cross entropy on kernels: which launches, in which order, over which buffers.

Formulas. For row r with logits a, target t and class weights w, all sums in fp32:
    lse = logsumexp(a),    loss = w_t * (lse - a_t) + z_loss * lse^2    (label smoothing: see reference/)
    dlogits = coef_softmax * exp(a - lse) - coef_target * onehot(t)
    dx = dlogits @ w,    dw = dlogits.T @ x,    dbias = sum of dlogits over rows

Exponentials. The logits GEMM stores exp_logits = exp(a - row_shift) in bf16 and their sums per row and tile. bf16 has
fp32's exponent range, so any row_shift within some 60 of the row's maximum loses nothing; the target's logit is known
before the GEMM and serves as row_shift. Then dlogits = row_scale * exp_logits, up to the element at the target, with
one fp32 number row_scale per row: both gradients are plain GEMMs on exp_logits, and no pass over the logits is left.

Flagged rows. A row with a logit far above its row_shift raises row_max_bits, its encoded maximum, and flags its tile.
`redo`, always launched, recomputes flagged tiles and returns at once without them: no synchronization, graph-safe.

Three products. `logits`; `dx` scales each row of its result; `dw` multiplies by xs, the rows of x scaled before. The
targets' elements are removed from exp_logits before `dw`, and their terms, row_scale * exp_logits[t] * x, are added in
fp32: rounding xs would otherwise be most of the error of dw.

Rows. `compact` lists the live rows first in `order`. A chunk is a range of slots, indices into `order`; a "row" below
is a slot. All sums end at the number of live rows, which only the device knows. Ignored rows: their loss, lse and dx
are 0, and NaN in them reaches nothing, because they are never multiplied. Between the last live row and the end of
its GEMM tile, buffers hold zeros; after that, anything.

Schedules.
    chunked    forward: per chunk of rows the logits, dx, and dw added to an fp32 sum. backward: scales these.
    stored     forward: the logits of all rows, keeping exp_logits. backward: dx and dw from them.
    recompute  forward: the logits; dx where only a scalar factor is unknown; dw of the first classes where there is
               room. backward: logits again, by blocks of classes, and the gradients that are missing.
Where exp_logits cannot be used (fp16, label smoothing: `KernelProblem.has_e`), `recompute` computes both gradients in
backward from dlogits, which a GEMM with an epilogue of its own writes.

Memory. exp_logits of a chunk with all rows, or of a block of classes, lie partly in the storage of dw, in front of
which dw itself is written: see configs/linear_cross_entropy.py.

Nothing here reads a value on the device or knows autograd. `k` is LceKernels, or an emulation of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.lce_rows import NO_SLOT
from quackish.configs.linear_cross_entropy import (
    even_chunks,
    first_classes,
    recompute_blocks,
    scratch_columns,
)
from quackish.ops.linear_cross_entropy.exp_logits import (
    Block,
    E,
    RowState,
    Targets,
    add_dw,
    inside,
    matrix,
    new_places,
    padded,
    padded_strides,
    vector,
)

_ROWS_A_FLAG = 128


class Call(NamedTuple):
    """The operands of the GEMMs, and the options of the loss."""

    x: Tensor  # (m, h) compute dtype, unit stride along h
    w: Tensor  # (v, h) compute dtype, contiguous
    target: Tensor  # (m,) contiguous
    bias: Tensor | None  # (v,) contiguous, compute dtype or fp32
    class_weight: Tensor | None  # (v,) contiguous, fp32
    total_weight: Tensor | None  # 0-dim: its sum, where label smoothing asks for it
    num_items: float | Tensor | None  # 0-dim
    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    mean: bool


class GradsNeeded(NamedTuple):
    """The dtypes of the gradients to compute, None for those not needed; dbias is fp32."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: bool

    def any(self) -> bool:
        return self.dx is not None or self.dw is not None or self.db

    def but(self, other: "GradsNeeded") -> "GradsNeeded":
        """Without those that `other` has."""
        return GradsNeeded(None if other.dx else self.dx, None if other.dw else self.dw, self.db and not other.db)


class Grads(NamedTuple):
    dx: Tensor | None = None  # (m, h)
    dw: Tensor | None = None  # (v, h)
    db: Tensor | None = None  # (v,) fp32

    def and_also(self, other: "Grads") -> "Grads":
        return Grads(*(mine if mine is not None else its for mine, its in zip(self, other, strict=True)))


class GradOutputs(NamedTuple):
    """The incoming gradients of backward."""

    loss: Tensor | None  # 0-dim or (m,) fp32; None is 1
    lse: Tensor | None = None  # (m,) fp32; None is 0


_ONES = GradOutputs(None)


class Forward(NamedTuple):
    loss: Tensor  # (m,) fp32, divided for `mean`: the loss is their sum
    lse: Tensor  # (m,) fp32
    rows: RowState
    grads: Grads = Grads()
    xc: Tensor | None = None  # (m, h): `stored` keeps the live rows of x, and E
    e: Tensor | None = None  # (m, ld)
    dw: Tensor | None = None  # (v, h): with `recompute` the first `classes` rows may be computed, up to a factor
    classes: int = 0


# Schedules -----------------------------------------------------------------------------------------------------------


def statistics(k, call: Call, chunk_rows: int) -> Forward:
    """loss and lse only: the forward of a call without grad, and of `recompute`."""
    out = begin(k, call)
    for start in range(0, call.x.shape[0], chunk_rows):
        Chunk(k, call, out, start, chunk_rows).statistics()
    return out


def chunked(k, call: Call, chunk_rows: int, wanted: GradsNeeded, min_memory: bool = False) -> Forward:
    """loss, lse and the gradients of the summed loss (divided for "mean"), chunk by chunk.

    dw is summed over chunks in fp32. A single chunk has part of exp_logits in dw's storage. `min_memory`: GEMMs get no
    scratch.
    """
    (m, h), v = call.x.shape, call.w.shape[0]
    single = m <= chunk_rows
    chunk_rows = even_chunks(m, chunk_rows)
    dx = matrix(call.x, m, h, wanted.dx) if wanted.dx else None
    dw = matrix(call.x, v, h, wanted.dw if single else torch.float32) if wanted.dw else None
    db = vector(call.x, v, torch.float32) if wanted.db else None
    out = begin(k, call)
    for start in range(0, m, chunk_rows):
        # not assigned to a name: a chunk's buffers are freed before the next chunk allocates
        Chunk(k, call, out, start, chunk_rows, dx).statistics_and_gradients(single, dx, dw, db, min_memory)
    if dw is not None and dw.dtype != wanted.dw:
        dw = dw.to(wanted.dw)
    return out._replace(grads=Grads(dx, dw, db))


def stored(k, call: Call) -> Forward:
    """loss, lse, and exp_logits and the live rows of x for `stored_backward`."""
    out = begin(k, call)
    chunk = Chunk(k, call, out, 0, call.x.shape[0])
    e = E.alone(call.w, chunk.rows)
    chunk.statistics(e)
    return out._replace(xc=chunk.xc, e=e.blocks[0].e)


def stored_backward(
    k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from exp_logits. dw_out: (v, h) buffer that dw is added to instead of returned.

    Overwrites each row's element of kept.e at its target, which depends on the incoming gradients.
    """
    (m, h), v, rows = call.x.shape, call.w.shape[0], kept.rows
    kept_e = kept.e
    if kept_e.stride() != padded_strides(v):  # a saved-tensor hook or compiled code changed its strides
        kept_e = padded(call.x, m, v, kept_e.dtype).copy_(kept_e)
    e = E([Block(kept_e, 0, v)])
    xc, xs = (kept.xc, matrix(kept.xc, *kept.xc.shape, kept.xc.dtype)) if wanted.dw else (None, None)
    row_scale = vector(call.x, m, torch.float32)
    places = new_places(k, call.x, v, wanted.dw) if dw_out is None else None
    run_rows(k, call, kept, 0, m, "scale", incoming, e=e, xc=xc, xs=xs, row_scale=row_scale, places=places)
    dx = call.x.new_zeros((m, h), dtype=wanted.dx) if wanted.dx else None  # ignored rows stay 0
    dw = matrix(call.x, v, h, wanted.dw) if wanted.dw and dw_out is None else None
    db = vector(call.x, v, torch.float32) if wanted.db else None
    if dx is not None:
        e.dx(k, call.w, row_scale, rows, 0, dx, rows.tickets)
    if db is not None:
        e.bias_sum(k, row_scale, rows, 0, db, False)
    if dw is not None:
        e.dw(k, call.x, xs, rows.slot_target, row_scale, rows, 0, dw, False, places)
    elif wanted.dw:
        targets = Targets.taken_from(e, k, rows.slot_target, row_scale, rows, 0, None, dw_out)
        add_dw(k, kept_e, xs, rows, dw_out, call.x, targets)
    return Grads(dx, dw, db)


def recompute_forward(k, call: Call, wanted: GradsNeeded) -> Forward:
    """loss, lse, dx, and dw of the first classes, for which `first_classes` must have found room; no dbias.

    exp_logits lie in dw's storage: those of the first classes for all rows, those of the other classes for one chunk.
    """
    (m, h), v = call.x.shape, call.w.shape[0]
    columns, offset, part_rows = first_classes(m, v, h, wanted.dw.itemsize)
    dx, dw = matrix(call.x, m, h, wanted.dx), matrix(call.x, v, h, wanted.dw)
    xs, row_scale = matrix(call.x, m, h, call.x.dtype), vector(call.x, m, torch.float32)
    first = inside(dw, offset, m, columns, call.x.dtype)
    others = inside(dw, 0, even_chunks(m, part_rows), padded_strides(v - columns)[0], call.x.dtype)[:, : v - columns]
    out = begin(k, call)
    for start in range(0, m, others.shape[0]):
        part = slice(start, min(start + others.shape[0], m))
        e = E([Block(first[part], 0, columns), Block(others[: part.stop - start], columns, v)])
        chunk = Chunk(k, call, out, start, others.shape[0], dx, xs[part], row_scale[part])
        chunk.statistics_and_scale(e, chunk.xc, None)
        e.dx(k, call.w, chunk.row_scale, out.rows, start, dx, None)
        del chunk  # its buffers are freed before the next chunk allocates
    places = new_places(k, call.x, columns, wanted.dw)
    if places is not None:
        places.fill_(NO_SLOT)
    e = E([Block(first, 0, columns)])
    e.dw(k, call.x, xs, out.rows.slot_target, row_scale, out.rows, 0, dw[:columns], False, places)
    return out._replace(grads=Grads(dx), dw=dw, classes=columns)


def recompute_backward(
    k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from x and the rows' statistics, one block of classes at a time; dw_out as in `stored_backward`.

    If kept.dw is given, its rows of the first block are final. A block's dw is final, and only dx is summed over
    blocks. A block's dlogits lie in the storage of later blocks' dw while they fit: see `recompute_blocks`.
    """
    (m, h), v, rows = call.x.shape, call.w.shape[0], kept.rows
    dtype = call.x.dtype
    dx = matrix(call.x, m, h, wanted.dx) if wanted.dx else None
    dw = kept.dw
    if dw is None and wanted.dw and dw_out is None:
        dw = matrix(call.x, v, h, wanted.dw)
    db = vector(call.x, v, torch.float32) if wanted.db else None
    acc = matrix(call.x, m, h, torch.float32) if wanted.dx else None
    if dx is None:
        xc = matrix(call.x, m, h, dtype)
    else:  # dx is written after the last block; until then its storage holds the live rows of x
        xc = dx.view(-1).view(dtype)[: m * h].view(m, h)
    factor, inv_divisor = None, rows.inv_divisor
    if dtype == torch.float16:
        factor, inv_divisor, incoming = _common_factor(call, kept, incoming)
    coefs = _coefficients(k, call, kept, incoming, xc, inv_divisor)
    blocks = recompute_blocks(m, v, h, None if dw is None else dw.itemsize, scratch_columns(m, dw is None, acc is None))
    if kept.dw is not None:
        blocks = blocks[1:]
    scratch = padded(call.x, m, max(v1 - v0 for v0, v1, offset in blocks if offset is None), dtype)
    for v0, v1, offset in blocks:
        n = v1 - v0
        e = scratch[:, :n] if offset is None else inside(dw, offset, m, n, dtype)
        w = call.w[v0:v1]
        bias = None if call.bias is None else call.bias[v0:v1]
        k.dlogits(
            xc, w, bias, coefs, rows.slot_target, rows.num_live, 0, call.class_weight, call.softcap,
            call.label_smoothing > 0, v0, e,
        )  # fmt: skip
        if dw is not None:
            k.dw(e, xc, rows.num_live, 0, dw[v0:v1], False, rows.tickets, factor=factor)
        elif wanted.dw:
            add_dw(k, e, xc, rows, dw_out[v0:v1], factor=factor)
        if db is not None:
            k.bias_sum(e, None, rows.num_live, 0, db[v0:v1], False)
        if acc is not None:
            k.dx(e, None, 0, w, None, None, rows.num_live, 0, acc, v0 > 0)
    if factor is not None:
        for grad in (acc, db):
            if grad is not None:
                k.scale(grad, factor)
    if dx is not None:
        dx.zero_()
        k.scatter(acc, rows.order, rows.num_live, 0, dx)
    return Grads(dx, dw, db)


# Their parts ---------------------------------------------------------------------------------------------------------


def begin(k, call: Call) -> Forward:
    """Finds the live rows; allocates loss and lse."""
    m = call.x.shape[0]
    x = call.x
    rows = RowState.make(m, lambda n, dtype: vector(x, n, dtype))
    loss, lse = vector(x, m, torch.float32), vector(x, m, torch.float32)
    k.compact(
        call.target, call.class_weight, call.num_items, call.ignore_index, call.w.shape[0], call.mean,
        rows.order, rows.num_live, rows.inv_divisor, rows.tickets,
    )  # fmt: skip
    return Forward(loss, lse, rows)


class Chunk:
    """Rows [start, start + chunk_rows), gathered, and the buffers of this chunk."""

    def __init__(
        self, k, call: Call, out: Forward, start: int, chunk_rows: int, dx: Tensor | None = None,
        xc: Tensor | None = None, row_scale: Tensor | None = None, part_sum: Tensor | None = None,
    ):  # fmt: skip
        (m, h), v = call.x.shape, call.w.shape[0]
        self.k, self.call, self.out, self.start = k, call, out, start
        self.rows = rows = min(chunk_rows, m - start)
        part = slice(start, start + rows)
        of_rows = out.rows.slot_target, out.rows.row_max_bits, out.rows.target_logit, out.rows.row_sum
        self.slot_target, self.row_max_bits, self.target_logit, self.row_sum = (
            of_rows if rows == m else [t[part] for t in of_rows]
        )
        x, tiles = call.x, k.num_tiles(v)
        self.flags = vector(x, _num_flags(rows), torch.int32)
        self.row_shift = vector(x, rows, torch.float32)
        self.row_scale = vector(x, rows, torch.float32) if row_scale is None else row_scale
        self.part_sum = matrix(x, rows, tiles, torch.float32) if part_sum is None else part_sum
        self.part_wsum = matrix(x, rows, tiles, torch.float32) if call.label_smoothing else None
        self.xc = matrix(x, rows, h, x.dtype) if xc is None else xc
        k.gather(
            call.x, call.w, call.bias, call.target, out.rows.order, out.rows.num_live, start, v, call.softcap,
            self.xc, self.slot_target, self.row_shift, self.row_max_bits, self.flags, dx, out.loss, out.lse,
        )  # fmt: skip

    def statistics(self, e: E | None = None) -> None:
        self._logits(e or E([Block(None, 0, self.call.w.shape[0])]))
        self._rows("none")

    def statistics_and_gradients(
        self, single: bool, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, min_memory: bool
    ) -> None:
        e = E.beside(dw, self.rows) if single and dw is not None else None
        e = e or E.alone(self.call.w, self.rows)
        places = None if dw is None else new_places(self.k, dw, dw.shape[0], dw.dtype)
        self.statistics_and_scale(e, None if dw is None else self.xc, places)
        rows, start = self.out.rows, self.start
        if dx is not None:
            e.dx(self.k, self.call.w, self.row_scale, rows, start, dx, None if min_memory else rows.tickets)
        if db is not None:
            e.bias_sum(self.k, self.row_scale, rows, start, db, start > 0)
        if dw is not None:  # last: it takes the targets out of E, and may overwrite it
            e.dw(self.k, self.call.x, self.xc, self.slot_target, self.row_scale, rows, start, dw, start > 0, places)

    def statistics_and_scale(self, e: E, xc: Tensor | None, places: Tensor | None) -> None:
        """xc is scaled in place."""
        self._logits(e)
        self._rows("scale", e=e, xc=xc, xs=xc, row_scale=self.row_scale, places=places)

    def _rows(self, grads: str, **given) -> None:
        stats = dict(part_sum=self.part_sum, part_wsum=self.part_wsum)
        run_rows(self.k, self.call, self.out, self.start, self.rows, grads, _ONES, self, **stats, **given)

    def _logits(self, e: E) -> None:
        call = self.call
        args = (
            self.xc, call.w, call.bias, call.class_weight if call.label_smoothing else None, self.row_shift,
            self.slot_target,
            self.out.rows.num_live, self.start, call.softcap, *e.in_two(), self.part_sum, self.part_wsum,
            self.target_logit,
            self.row_max_bits, self.flags,
        )  # fmt: skip
        self.k.logits(*args)
        self.k.redo(*args)


def run_rows(
    k, call: Call, out: Forward, start: int, rows: int, grads: str, incoming: GradOutputs,
    of: "Chunk | RowState | None" = None, *, part_sum=None, part_wsum=None, e: E | None = None,
    xc=None, xs=None, row_scale=None, coefs=None, places=None, inv_divisor: Tensor | None = None,
) -> None:  # fmt: skip
    of = of or out.rows
    first, second, v_split = (None, None, 0) if e is None else e.in_two()
    k.rows(
        part_sum is not None,
        grads,
        part_sum=part_sum,
        part_wsum=part_wsum,
        target_logit=of.target_logit,
        row_max_bits=of.row_max_bits,
        slot_target=of.slot_target,
        order=out.rows.order,
        num_live=out.rows.num_live,
        start=start,
        class_weight=call.class_weight,
        total_weight=call.total_weight,
        v=call.w.shape[0],
        softcap=call.softcap,
        z_loss=call.z_loss,
        label_smoothing=call.label_smoothing,
        loss=out.loss,
        lse=out.lse,
        row_sum=of.row_sum,
        grad_loss=incoming.loss,
        inv_divisor=out.rows.inv_divisor if inv_divisor is None else inv_divisor,
        grad_lse=incoming.lse,
        e=first,
        e2=second,
        v_split=v_split,
        xc=xc,
        xs=xs,
        row_scale=row_scale,
        coefs=coefs,
        places=places,
    )


def _common_factor(call: Call, kept: Forward, incoming: GradOutputs) -> tuple[Tensor | None, Tensor, GradOutputs]:
    """(the factor common to all rows, the remaining inv_divisor, the remaining incoming gradients).

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So a factor common to all rows is
    applied to the fp32 accumulators instead, and so is the largest coefficient of a live row, so that the others are at
    most 1. With a gradient per row there is no such factor: (None, ...).
    """
    rows, weight = kept.rows, call.class_weight
    if incoming.lse is not None or incoming.loss.dim():
        return None, rows.inv_divisor, incoming
    largest = rows.inv_divisor.new_ones(())
    if weight is not None:  # of the classes that are targets: another one's may be anything
        target = rows.slot_target
        weights = weight[target.clamp(0, weight.shape[0] - 1).long()].abs().masked_fill(target < 0, 0.0)
        largest = _finite(weights).amax()
        if call.label_smoothing:
            spread = call.label_smoothing / call.w.shape[0]
            largest = torch.maximum(largest, spread * _finite(weight.abs()).amax())
    if call.z_loss:
        largest = torch.maximum(largest, 2 * call.z_loss * _finite(kept.lse.abs()).amax())
    largest = largest.clamp(min=torch.finfo(torch.float32).tiny).view(1)
    return rows.inv_divisor * incoming.loss * largest, largest.reciprocal(), _ONES


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)


def _coefficients(
    k, call: Call, kept: Forward, incoming: GradOutputs, xc: Tensor, inv_divisor: Tensor | None = None
) -> Tensor:
    """coefs (m, 4); and x's live rows in xc, once more."""
    m = call.x.shape[0]
    coefs = matrix(call.x, m, 4, torch.float32)
    gather(k, call, kept.rows, 0, xc)
    run_rows(k, call, kept, 0, m, "coefs", incoming, coefs=coefs, inv_divisor=inv_divisor)
    return coefs


def gather(k, call: Call, rows: RowState, start: int, xc: Tensor) -> None:
    """x's rows from place `start` on, in xc; the rest of what the kernel makes was made before."""
    n = xc.shape[0]
    slot_target, row_max_bits, flags = (vector(call.x, count, torch.int32) for count in (n, n, _num_flags(n)))
    row_shift = vector(call.x, n, torch.float32)
    k.gather(
        call.x, call.w, call.bias, call.target, rows.order, rows.num_live, start, call.w.shape[0], call.softcap,
        xc, slot_target, row_shift, row_max_bits, flags, None, None, None,
    )  # fmt: skip


def _num_flags(rows: int) -> int:
    return 1 + -(-rows // _ROWS_A_FLAG)
