"""The schedules of linear cross entropy on kernels: which launches, in which order, over which buffers.

A chunk is a range of places in `order`, which has the live rows first; a "row" below is such a place. Where the
gradients' dtypes and the options allow (`KernelProblem.has_e`), one GEMM writes E = exp(a - ref) of the logits a, and
both gradients are a GEMM of E each, rows scaled by what the row's sum and the incoming gradient say. Else gradients
are made in backward, from logits that are multiplied again.

Nothing here looks at a value on the device, or knows autograd. `k` has the launchers of LceKernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.lce_rows import NO_PLACE
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
    """What is multiplied, and what changes the loss of a row."""

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
    """The gradients to compute, by dtype; None for those nobody asks for. dbias is fp32."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: bool

    def any(self) -> bool:
        return self.dx is not None or self.dw is not None or self.db

    def but(self, other: "GradsNeeded") -> "GradsNeeded":
        """Those of them that `other` has not."""
        return GradsNeeded(None if other.dx else self.dx, None if other.dw else self.dw, self.db and not other.db)


class Grads(NamedTuple):
    dx: Tensor | None = None  # (m, h)
    dw: Tensor | None = None  # (v, h)
    db: Tensor | None = None  # (v,) fp32

    def and_also(self, other: "Grads") -> "Grads":
        return Grads(*(mine if mine is not None else its for mine, its in zip(self, other, strict=True)))


class GradOutputs(NamedTuple):
    """What arrives in backward."""

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
    dw: Tensor | None = None  # (v, h): `recompute` may have made the rows of the first `classes`, up to a factor
    classes: int = 0


# Schedules -----------------------------------------------------------------------------------------------------------


def statistics(k, call: Call, chunk_rows: int) -> Forward:
    """loss and lse alone: without grad, and forward of `recompute`."""
    out = begin(k, call)
    for start in range(0, call.x.shape[0], chunk_rows):
        Chunk(k, call, out, start, chunk_rows).statistics()
    return out


def chunked(k, call: Call, chunk_rows: int, wanted: GradsNeeded, lean: bool = False) -> Forward:
    """loss, lse, and the gradients of the loss (the sum of the rows, divided for `mean`), chunk by chunk.

    dw is summed over chunks in fp32. A single chunk's E lies partly where dw comes to be. `lean`: no scratch for GEMMs.
    """
    (m, h), v = call.x.shape, call.w.shape[0]
    single = m <= chunk_rows
    chunk_rows = even_chunks(m, chunk_rows)
    dx = matrix(call.x, m, h, wanted.dx) if wanted.dx else None
    dw = matrix(call.x, v, h, wanted.dw if single else torch.float32) if wanted.dw else None
    db = vector(call.x, v, torch.float32) if wanted.db else None
    out = begin(k, call)
    for start in range(0, m, chunk_rows):
        # not named: what a chunk allocates is gone before the next one allocates
        Chunk(k, call, out, start, chunk_rows, dx).statistics_and_gradients(single, dx, dw, db, lean)
    if dw is not None and dw.dtype != wanted.dw:
        dw = dw.to(wanted.dw)
    return out._replace(grads=Grads(dx, dw, db))


def stored(k, call: Call) -> Forward:
    """loss and lse, and what `stored_backward` starts from."""
    out = begin(k, call)
    chunk = Chunk(k, call, out, 0, call.x.shape[0])
    e = E.alone(call.w, chunk.rows)
    chunk.statistics(e)
    return out._replace(xc=chunk.xc, e=e.blocks[0].e)


def stored_backward(
    k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from E. dw_out: (v, h), to which dw is added instead of returned.

    Of what forward kept, E's element at each row's target is written: it depends on what arrives. Each backward writes
    it before it reads it, and nobody else looks.
    """
    (m, h), v, rows = call.x.shape, call.w.shape[0], kept.rows
    kept_e = kept.e
    if kept_e.stride() != padded_strides(v):  # a saved-tensor hook, or compiled code, laid it out anew
        kept_e = padded(call.x, m, v, kept_e.dtype).copy_(kept_e)
    e = E([Block(kept_e, 0, v)])
    xc, xs = (kept.xc, matrix(kept.xc, *kept.xc.shape, kept.xc.dtype)) if wanted.dw else (None, None)
    row_scale = vector(call.x, m, torch.float32)
    places = new_places(k, call.x, v, wanted.dw) if dw_out is None else None
    run_rows(k, call, kept, 0, m, "scale", incoming, e=e, xc=xc, xs=xs, row_scale=row_scale, places=places)
    dx = call.x.new_zeros((m, h), dtype=wanted.dx) if wanted.dx else None  # the rows that are not live stay 0
    dw = matrix(call.x, v, h, wanted.dw) if wanted.dw and dw_out is None else None
    db = vector(call.x, v, torch.float32) if wanted.db else None
    if dx is not None:
        e.dx(k, call.w, row_scale, rows, 0, dx, rows.tickets)
    if db is not None:
        e.bias_sum(k, row_scale, rows, 0, db, False)
    if dw is not None:
        e.dw(k, call.x, xs, rows.cls, row_scale, rows, 0, dw, False, places)
    elif wanted.dw:
        targets = Targets.taken_from(e, k, rows.cls, row_scale, rows, 0, None, dw_out)
        add_dw(k, kept_e, xs, rows, dw_out, call.x, targets)
    return Grads(dx, dw, db)


def recompute_forward(k, call: Call, wanted: GradsNeeded) -> Forward:
    """loss, lse, dx, and dw of the first classes, which `first_classes` must have found room for; no dbias.

    A chunk's E lies where dw comes to be: the first classes' for good, the others' until dx is made.
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
        del chunk  # what it allocated is gone before the next one allocates
    places = new_places(k, call.x, columns, wanted.dw)
    if places is not None:
        places.fill_(NO_PLACE)
    e = E([Block(first, 0, columns)])
    e.dw(k, call.x, xs, out.rows.cls, row_scale, out.rows, 0, dw[:columns], False, places)
    return out._replace(grads=Grads(dx), dw=dw, classes=columns)


def recompute_backward(
    k, call: Call, kept: Forward, incoming: GradOutputs, wanted: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from x and the statistics of the rows, a block of classes at a time; dw_out as above.

    Of kept.dw, where there is one, the rows of the first block are made, and scaled.
    A block's dw is final, so nothing is summed over blocks but dx. Its dlogits lie where later blocks' dw comes to be,
    while there is room: see `recompute_blocks`.
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
    else:  # dx is not written before all blocks are done; until then its storage holds the live rows of x
        xc = dx.view(-1).view(dtype)[: m * h].view(m, h)
    factor, inv_divisor = None, rows.inv_divisor
    if dtype == torch.float16:
        factor, inv_divisor, incoming = _common_factor(call, rows, incoming)
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
            xc, w, bias, coefs, rows.cls, rows.num_live, 0, call.class_weight, call.softcap,
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
    """Which rows are live; loss and lse still to be written."""
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
    """Rows [start, start + chunk_rows) of those there are, gathered, and the scratch that is theirs alone."""

    def __init__(
        self, k, call: Call, out: Forward, start: int, chunk_rows: int, dx: Tensor | None = None,
        xc: Tensor | None = None, row_scale: Tensor | None = None, part_sum: Tensor | None = None,
    ):  # fmt: skip
        (m, h), v = call.x.shape, call.w.shape[0]
        self.k, self.call, self.out, self.start = k, call, out, start
        self.rows = rows = min(chunk_rows, m - start)
        part = slice(start, start + rows)
        of_rows = out.rows.cls, out.rows.top, out.rows.zt, out.rows.row_sum
        self.cls, self.top, self.zt, self.row_sum = of_rows if rows == m else [t[part] for t in of_rows]
        x, tiles = call.x, k.num_tiles(v)
        self.flags = vector(x, _num_flags(rows), torch.int32)
        self.ref = vector(x, rows, torch.float32)
        self.row_scale = vector(x, rows, torch.float32) if row_scale is None else row_scale
        self.part_sum = matrix(x, rows, tiles, torch.float32) if part_sum is None else part_sum
        self.part_wsum = matrix(x, rows, tiles, torch.float32) if call.label_smoothing else None
        self.xc = matrix(x, rows, h, x.dtype) if xc is None else xc
        k.gather(
            call.x, call.w, call.bias, call.target, out.rows.order, out.rows.num_live, start, v, call.softcap,
            self.xc, self.cls, self.ref, self.top, self.flags, dx, out.loss, out.lse,
        )  # fmt: skip

    def statistics(self, e: E | None = None) -> None:
        self._logits(e or E([Block(None, 0, self.call.w.shape[0])]))
        self._rows("none")

    def statistics_and_gradients(
        self, single: bool, dx: Tensor | None, dw: Tensor | None, db: Tensor | None, lean: bool
    ) -> None:
        e = E.beside(dw, self.rows) if single and dw is not None else None
        e = e or E.alone(self.call.w, self.rows)
        places = None if dw is None else new_places(self.k, dw, dw.shape[0], dw.dtype)
        self.statistics_and_scale(e, None if dw is None else self.xc, places)
        rows, start = self.out.rows, self.start
        if dx is not None:
            e.dx(self.k, self.call.w, self.row_scale, rows, start, dx, None if lean else rows.tickets)
        if db is not None:
            e.bias_sum(self.k, self.row_scale, rows, start, db, start > 0)
        if dw is not None:  # last: it takes the targets out of E, and may overwrite it
            e.dw(self.k, self.call.x, self.xc, self.cls, self.row_scale, rows, start, dw, start > 0, places)

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
            self.xc, call.w, call.bias, call.class_weight if call.label_smoothing else None, self.ref, self.cls,
            self.out.rows.num_live, self.start, call.softcap, *e.in_two(), self.part_sum, self.part_wsum, self.zt,
            self.top, self.flags,
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
        zt=of.zt,
        top=of.top,
        cls=of.cls,
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


def _common_factor(call: Call, rows: RowState, incoming: GradOutputs) -> tuple[Tensor | None, Tensor, GradOutputs]:
    """(what all rows' gradients have in common, what is left of the divisor, what is left of the incoming gradient).

    fp16 is too narrow for p - onehot divided by the number of rows: most of it would be subnormal. So what is common
    to the rows is left to fp32 accumulators, and class weights are at most 1 until then. Rows with gradients
    of their own have nothing in common: (None, ...).
    """
    if incoming.lse is not None or incoming.loss.dim():
        return None, rows.inv_divisor, incoming
    largest = rows.inv_divisor.new_ones(1) if call.class_weight is None else call.class_weight.abs().amax().view(1)
    largest = largest.clamp_(min=torch.finfo(torch.float32).tiny)
    return rows.inv_divisor * incoming.loss * largest, largest.reciprocal(), _ONES


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
    cls, top, flags = (vector(call.x, count, torch.int32) for count in (n, n, _num_flags(n)))
    ref = vector(call.x, n, torch.float32)
    k.gather(
        call.x, call.w, call.bias, call.target, rows.order, rows.num_live, start, call.w.shape[0], call.softcap,
        xc, cls, ref, top, flags, None, None, None,
    )  # fmt: skip


def _num_flags(rows: int) -> int:
    return 1 + -(-rows // _ROWS_A_FLAG)
