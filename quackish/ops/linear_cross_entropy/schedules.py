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
`recompute_flagged`, always launched, recomputes flagged tiles and returns at once without them: no synchronization,
graph-safe.

Three products. `logits`; `dx` scales each row of its result; `dw` multiplies by scaled_x, the rows of x scaled before.
The targets' elements are removed from exp_logits before `dw`, and their terms, row_scale * exp_logits[t] * x, are added
in fp32: rounding scaled_x would otherwise be most of the error of dw.

Rows. `compact` lists the live rows first in `order`. A chunk is a range of slots, indices into `order`; a "row" below
is a slot. All sums end at the number of live rows, which only the device knows. Ignored rows: their loss, lse and dx
are 0, and NaN in them reaches nothing, because they are never multiplied. Between the last live row and the end of
its GEMM tile, buffers hold zeros; after that, anything.

Schedules.
    chunked    forward: per chunk of rows the logits, dx, and dw added to an fp32 sum. backward: scales these.
    stored     forward: the logits of all rows, keeping exp_logits. backward: dx and dw from them.
    recompute  forward: the logits; dx if only a scalar factor is unknown; dw of the first classes if there is room.
               backward: logits again, by blocks of classes, and the gradients that are missing.
Without exp_logits (fp16, label smoothing: `KernelProblem.has_e`), `recompute` computes both gradients in backward from
dlogits, which a GEMM with an epilogue of its own writes.

Memory. exp_logits of a chunk with all rows, or of a block of classes, lie partly in the storage of dw, in front of
which dw itself is written: see `Layout` in configs/linear_cross_entropy.py.

Nothing here reads a value on the device or knows autograd. `k` is LceKernels or CublasKernels.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.lce_args import GatherArgs, RowsArgs
from quackish.configs.lce_rows import NO_SLOT
from quackish.configs.linear_cross_entropy import Layout, layout
from quackish.ops.linear_cross_entropy.exp_logits import (
    F32,
    I32,
    Chunk,
    ExpLogits,
    RowState,
    add_dw,
    inside,
    matrix,
    new_first_slot_of_class,
    padded,
    padded_strides,
    vector,
)
from quackish.ops.linear_cross_entropy.launches import DlogitsCall, LogitsCall


class KernelPlan(NamedTuple):
    """Options of a call that are not tensors. The last four are from `kernel_config`."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    compute_dtype: torch.dtype
    schedule: str
    chunk_rows: int
    dx_in_forward: bool
    dw_in_chunks: bool


class Call(NamedTuple):
    """The operands of the GEMMs, and the options of the loss."""

    m: int
    h: int
    v: int
    x: Tensor  # (m, h) compute dtype, unit stride along h
    w: Tensor  # (v, h) compute dtype, contiguous
    target: Tensor  # (m,) contiguous
    bias: Tensor | None  # (v,) contiguous, compute dtype or fp32
    class_weight: Tensor | None  # (v,) contiguous, fp32
    total_weight: Tensor | None  # 0-dim: its sum; with label smoothing
    num_items: float | Tensor | None  # 0-dim
    ignore_index: int
    label_smoothing: float
    softcap: float  # 0: none
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

    loss: Tensor | None  # 0-dim, or (m,) contiguous; fp32; None is 1
    lse: Tensor | None = None  # (m,) contiguous fp32; None is 0


_ONES = GradOutputs(None)
_NO_EXP_LOGITS = ExpLogits(None, 0)


class Forward(NamedTuple):
    """What forward computes. Backward needs all but the loss; its gradients are those of a loss gradient of 1."""

    loss: Tensor | None  # (m,) fp32, divided for `mean`: the loss is their sum
    state: RowState
    grads: Grads = Grads()
    live_x: Tensor | None = None  # (m, h): `stored` keeps the live rows of x, and exp_logits
    exp_logits: Tensor | None = None  # (m, v), row stride padded
    dw: Tensor | None = None  # (v, h): with `recompute` the first `classes` rows may be computed
    classes: int = 0


# Which schedule -------------------------------------------------------------------------------------------------------


def forward(k, call: Call, plan: KernelPlan, needed: GradsNeeded, own_dw: bool, may_begin: bool = True) -> Forward:
    """own_dw: backward returns a dw. may_begin: with `recompute` dw of some classes may be computed already, in storage
    that backward is then to be given."""
    if plan.schedule == "stored" and needed.any():
        return stored(k, call)
    lay = forward_layout(plan, call.m, call.v, call.h, needed, own_dw, may_begin and k.keeps_residual)
    if plan.schedule == "recompute" and lay.columns:
        return recompute_forward(k, call, lay, needed)
    early = made_in_forward(plan, needed)
    return chunked(k, call, lay, early, not plan.dw_in_chunks) if early.any() else statistics(k, call, lay)


def made_in_forward(plan: KernelPlan, needed: GradsNeeded) -> GradsNeeded:
    """The gradients that are ready before backward, up to a scalar factor."""
    if plan.schedule == "chunked":
        return needed
    return GradsNeeded(needed.dx if plan.dx_in_forward else None, None, False)


def backward(
    k, call: Call, plan: KernelPlan, kept: Forward, incoming: GradOutputs, needed: GradsNeeded,
    dw_out: Tensor | None,
) -> Grads:  # fmt: skip
    """The gradients for `incoming`, from what forward kept; dw is added to dw_out if there is one."""
    if plan.schedule == "stored":
        return stored_backward(k, call, kept, incoming, needed, dw_out)
    grads = Grads()
    if incoming.lse is None:
        early = made_in_forward(plan, needed)
        if early.any():  # they were handed out before: compute them again
            made = forward(k, call, plan, needed, dw_out is None)
            kept = kept._replace(dw=made.dw, classes=made.classes)
            grads = scale_grads(k, made, incoming.loss, dw_out)
        needed = needed.but(early)
    if not needed.any():
        return grads
    plan = plan._replace(schedule="recompute")  # for `chunked` too, if lse has a gradient
    lay = _layout(plan, call.m, call.v, call.h, needed, dw_out is None, kept.dw is not None)
    if lay.dw_block:
        return grads.and_also(recompute_dw_in_chunks(k, call, lay, kept, incoming, needed))
    return grads.and_also(recompute_backward(k, call, lay, kept, incoming, needed, dw_out))


def forward_layout(
    plan: KernelPlan, m: int, v: int, h: int, needed: GradsNeeded, own_dw: bool, may_begin: bool
) -> Layout:
    both = needed.dx is not None and needed.dw is not None
    begins_dw = may_begin and own_dw and plan.dx_in_forward and both and not needed.db
    return _layout(plan, m, v, h, needed, own_dw, begins_dw)


def _layout(plan: KernelPlan, m: int, v: int, h: int, needed: GradsNeeded, own_dw: bool, begins_dw: bool) -> Layout:
    how = plan.schedule, plan.chunk_rows, plan.dx_in_forward, plan.dw_in_chunks
    dw = None if needed.dw is None else needed.dw.itemsize
    return layout(*how, m, v, h, needed.dx is not None, dw, own_dw, begins_dw)


def scale_grads(k, made: Forward, factor: Tensor, dw_out: Tensor | None) -> Grads:
    """Scales the gradients that forward made by the loss's gradient, in place. Adds dw to dw_out if there is one."""
    grads = made.grads
    begun = None if made.dw is None else made.dw[: made.classes]
    tensors = [t for t in (*grads, begun) if t is not None]
    while tensors:  # a launch scales two tensors of one dtype
        first = tensors.pop(0)
        pair = tensors and tensors[0].dtype == first.dtype
        k.scale(first, factor, tensors.pop(0) if pair else None)
    if dw_out is not None and grads.dw is not None:
        dw_out.add_(grads.dw)
        return grads._replace(dw=None)
    return grads


# Schedules ------------------------------------------------------------------------------------------------------------


def statistics(k, call: Call, lay: Layout) -> Forward:
    """loss and lse only: the forward of a call without grad, and of `recompute`."""
    out = begin(k, call)
    for start in range(0, call.m, lay.chunk_rows):
        _statistics_of_chunk(k, call, out, start, lay.chunk_rows)
    return out


def _statistics_of_chunk(k, call: Call, out: Forward, start: int, rows: int) -> None:
    # A function, as others below: a chunk's buffers are freed before the next chunk allocates.
    chunk = new_chunk(call, out.state, start, rows)
    sums = gather_and_multiply(k, call, out, chunk, ExpLogits(None, call.v))
    run_rows(k, call, out.state, chunk, sums=sums, loss=out.loss)


def chunked(k, call: Call, lay: Layout, needed: GradsNeeded, split_tail: bool = True) -> Forward:
    """loss, lse and the gradients of the summed loss (divided for "mean"), chunk by chunk.

    dw is summed over chunks in fp32. A single chunk has part of exp_logits in dw's storage. split_tail: GEMMs may take
    scratch.
    """
    m = call.m
    dw_dtype = F32 if needed.dw and m > lay.chunk_rows else needed.dw
    grads = new_grads(call, GradsNeeded(needed.dx, dw_dtype, needed.db))
    out = begin(k, call)
    for start in range(0, m, lay.chunk_rows):
        _gradients_of_chunk(k, call, lay, out, start, grads, split_tail)
    if dw_dtype != needed.dw:
        grads = grads._replace(dw=grads.dw.to(needed.dw))
    return Forward(out.loss, out.state, grads)


def _gradients_of_chunk(k, call: Call, lay: Layout, out: Forward, start: int, grads: Grads, split_tail: bool) -> None:
    state, (dx, dw, db) = out.state, grads
    chunk = new_chunk(call, state, start, lay.chunk_rows)
    if lay.columns:
        exp_logits = ExpLogits.beside(dw, chunk.rows, lay.columns, lay.offset)
    else:
        exp_logits = ExpLogits.alone(call.w, chunk.rows)
    sums = gather_and_multiply(k, call, out, chunk, exp_logits, dx)
    scaled_x = first_slot_of_class = None
    if dw is not None:
        scaled_x = chunk.live_x  # in place
        first_slot_of_class = new_first_slot_of_class(k, dw, dw.shape[0], dw.dtype)
    run_rows(
        k, call, state, chunk, sums=sums, loss=out.loss, exp_logits=exp_logits, scaled_x=scaled_x,
        first_slot_of_class=first_slot_of_class,
    )  # fmt: skip
    del sums
    if dx is not None:
        exp_logits.dx(k, call.w, chunk, state, dx, state.tickets if split_tail else None)
    if db is not None:
        exp_logits.bias_sum(k, chunk, state, db)
    if dw is not None:
        exp_logits.dw(k, call.x, scaled_x, chunk, state, dw, first_slot_of_class)


def stored(k, call: Call) -> Forward:
    """loss, lse, and exp_logits and the live rows of x for `stored_backward`."""
    out = begin(k, call)
    chunk = new_chunk(call, out.state, 0, call.m)
    exp_logits = ExpLogits.alone(call.w, chunk.rows)
    sums = gather_and_multiply(k, call, out, chunk, exp_logits)
    run_rows(k, call, out.state, chunk, sums=sums, loss=out.loss)
    return out._replace(live_x=chunk.live_x, exp_logits=exp_logits.first)


def stored_backward(
    k, call: Call, kept: Forward, incoming: GradOutputs, needed: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from exp_logits. dw_out: (v, h) buffer that dw is added to instead of returned.

    Overwrites each row's element of kept.exp_logits at its target, which depends on the incoming gradients.
    """
    m, v, state, saved = call.m, call.v, kept.state, kept.exp_logits
    if saved.stride() != padded_strides(v):  # a saved-tensor hook or compiled code changed its strides
        saved = padded(call.x, m, v, saved.dtype).copy_(saved)
    exp_logits = ExpLogits(saved, v)
    chunk = Chunk.of(state, 0, m, kept.live_x if needed.dw else None)
    scaled_x = matrix(kept.live_x, m, call.h, kept.live_x.dtype) if needed.dw else None
    first_slot_of_class = new_first_slot_of_class(k, call.x, v, needed.dw) if dw_out is None else None
    run_rows(
        k, call, state, chunk, incoming=incoming, exp_logits=exp_logits, scaled_x=scaled_x,
        first_slot_of_class=first_slot_of_class,
    )  # fmt: skip
    dx, dw, db = grads = new_grads(call, needed, dw_out is None)
    if dx is not None:
        dx.zero_()  # ignored rows stay 0
        exp_logits.dx(k, call.w, chunk, state, dx, state.tickets)
    if db is not None:
        exp_logits.bias_sum(k, chunk, state, db)
    if dw is not None:
        exp_logits.dw(k, call.x, scaled_x, chunk, state, dw, first_slot_of_class)
    elif needed.dw:
        exp_logits.take_targets(k, chunk, state)
        add_dw(k, saved, scaled_x, state, dw_out, call.x, chunk)
    return grads


def recompute_forward(k, call: Call, lay: Layout, needed: GradsNeeded) -> Forward:
    """loss, lse, dx, and dw of the first lay.columns classes; no dbias.

    exp_logits lie in dw's storage: those of the first classes for all rows, those of the other classes for one chunk.
    """
    m, h, v, dtype = call.m, call.h, call.v, call.x.dtype
    dx, dw, _ = new_grads(call, needed)
    scaled_x = matrix(call.x, m, h, dtype)
    first = inside(dw, lay.offset, m, lay.columns, dtype)
    n = v - lay.columns
    others = inside(dw, 0, lay.chunk_rows, padded_strides(n)[0], dtype)[:, :n]
    out = begin(k, call)
    all_rows = Chunk.of(out.state, 0, m, scaled_x)
    for start in range(0, m, lay.chunk_rows):
        part = slice(start, min(start + lay.chunk_rows, m))
        chunk = Chunk.of(out.state, start, part.stop - start, scaled_x[part])
        chunk = chunk._replace(row_scale=all_rows.row_scale + F32.itemsize * start)
        exp_logits = ExpLogits(first[part], lay.columns, others[: chunk.rows], v)
        sums = gather_and_multiply(k, call, out, chunk, exp_logits, dx)
        run_rows(k, call, out.state, chunk, sums=sums, loss=out.loss, exp_logits=exp_logits, scaled_x=chunk.live_x)
        exp_logits.dx(k, call.w, chunk, out.state, dx, None)
        del sums  # freed before the next chunk allocates
    first_slot_of_class = new_first_slot_of_class(k, call.x, lay.columns, needed.dw)
    if first_slot_of_class is not None:
        first_slot_of_class.fill_(NO_SLOT)
    exp_logits = ExpLogits(first, lay.columns)
    exp_logits.dw(k, call.x, scaled_x, all_rows, out.state, dw[: lay.columns], first_slot_of_class)
    return out._replace(grads=Grads(dx), dw=dw, classes=lay.columns)


def recompute_backward(
    k, call: Call, lay: Layout, kept: Forward, incoming: GradOutputs, needed: GradsNeeded, dw_out: Tensor | None
) -> Grads:
    """The gradients from x and the rows' statistics, one block of classes at a time; dw_out as in `stored_backward`.

    If kept.dw is given, its first kept.classes rows are final. A block's dw is final, and only dx is summed over
    blocks. A block's dlogits lie in the storage of later blocks' dw while they fit: see `recompute_blocks`.
    """
    m, h, state, dtype = call.m, call.h, kept.state, call.x.dtype
    dx, dw, db = new_grads(call, needed, dw_out is None and kept.dw is None)
    if kept.dw is not None:
        dw = kept.dw
    acc = matrix(call.x, m, h, F32) if needed.dx else None
    if dx is None:
        live_x = matrix(call.x, m, h, dtype)
    else:  # dx is written after the last block; until then its storage holds the live rows of x
        live_x = dx.view(-1).view(dtype)[: m * h].view(m, h)
    factor = None
    if dtype == torch.float16:
        factor, state, incoming = _common_factor(call, state, incoming)
    gather_again(k, call, state, 0, live_x)
    coefs = coefficients(k, call, state, incoming)
    scratch = padded(call.x, m, max(v1 - v0 for v0, v1, offset in lay.blocks if offset is None), dtype)
    for v0, v1, offset in lay.blocks:
        out = scratch[:, : v1 - v0] if offset is None else inside(dw, offset, m, v1 - v0, dtype)
        _dlogits(k, call, state, 0, live_x, coefs, v0, v1, out)
        if dw is not None:
            k.dw(out, live_x, state.num_live, 0, dw[v0:v1], False, state.tickets, factor=factor)
        elif needed.dw:
            add_dw(k, out, live_x, state, dw_out[v0:v1], factor=factor)
        if db is not None:
            k.bias_sum(out, None, state.num_live, 0, db[v0:v1], False)
        if acc is not None:
            k.dx(out, None, 0, call.w[v0:v1], None, None, state.num_live, 0, acc, v0 > 0)
    if factor is not None:
        for grad in (acc, db):
            if grad is not None:
                k.scale(grad, factor)
    if dx is not None:
        dx.zero_()
        k.scatter(acc, None, state.order, state.num_live, 0, dx)
    return Grads(dx, dw, db)


def recompute_dw_in_chunks(
    k, call: Call, lay: Layout, kept: Forward, incoming: GradOutputs, needed: GradsNeeded
) -> Grads:
    """dw and dbias, by blocks of classes and chunks of rows; a block's dw is summed in fp32 and rounded once."""
    m, h, v, state, rows = call.m, call.h, call.v, kept.state, lay.chunk_rows
    _, dw, db = grads = new_grads(call, needed._replace(dx=None))
    coefs = coefficients(k, call, state, incoming)
    block = lay.dw_block
    live_x, dlogits = matrix(call.x, rows, h, call.x.dtype), padded(call.x, rows, block, call.x.dtype)
    dw_sums = matrix(call.x, block, h, F32) if needed.dw != F32 else None
    for v0 in range(0, v, block):
        v1 = min(v0 + block, v)
        acc = dw[v0:v1] if dw_sums is None else dw_sums[: v1 - v0]
        for start in range(0, m, rows):
            n = min(rows, m - start)
            x, out = live_x[:n], dlogits[:n, : v1 - v0]
            gather_again(k, call, state, start, x)
            _dlogits(k, call, state, start, x, coefs, v0, v1, out)
            k.dw(out, x, state.num_live, start, acc, start > 0)
            if db is not None:
                k.bias_sum(out, None, state.num_live, start, db[v0:v1], start > 0)
        if dw_sums is not None:
            dw[v0:v1] = acc
    return grads


# Their parts ----------------------------------------------------------------------------------------------------------


def new_grads(call: Call, needed: GradsNeeded, own_dw: bool = True) -> Grads:
    """Memory for the gradients, and for dw with `own_dw`."""
    m, h, v, x = call.m, call.h, call.v, call.x
    return Grads(
        matrix(x, m, h, needed.dx) if needed.dx else None,
        matrix(x, v, h, needed.dw) if needed.dw and own_dw else None,
        vector(x, v, F32) if needed.db else None,
    )


def begin(k, call: Call) -> Forward:
    """Finds the live rows; allocates the results."""
    x, m = call.x, call.m
    state = RowState.of(vector(x, m, F32), vector(x, RowState.size(m), I32))
    k.compact(call.target, call.class_weight, call.num_items, call.ignore_index, call.v, call.mean, state)
    return Forward(vector(x, m, F32), state)


def new_chunk(call: Call, state: RowState, start: int, chunk_rows: int) -> Chunk:
    rows = min(chunk_rows, call.m - start)
    return Chunk.of(state, start, rows, matrix(call.x, rows, call.h, call.x.dtype))


class Sums(NamedTuple):
    """Sums over the classes of a tile of the logits GEMM, per row and tile."""

    exp: Tensor  # (rows, tiles) fp32: of exp(logit - row_shift)
    weighted: Tensor | None  # as exp: of class weight * logit; with label smoothing


def gather_and_multiply(
    k, call: Call, out: Forward, chunk: Chunk, exp_logits: ExpLogits, dx: Tensor | None = None
) -> Sums:
    """Fills the chunk and exp_logits. Zeros loss, lse and dx of the chunk's ignored rows."""
    rows, state = chunk.rows, out.state
    _gather(k, call, state, chunk, dx, out.loss, state.lse)
    tiles, smoothing = k.num_tiles(call.v), call.label_smoothing > 0
    sums = Sums(matrix(call.x, rows, tiles, F32), matrix(call.x, rows, tiles, F32) if smoothing else None)
    args = LogitsCall(
        chunk.live_x, call.w, call.bias, call.class_weight if smoothing else None, chunk.row_shift, chunk.slot_target,
        state.num_live, chunk.start, call.softcap, exp_logits.first, exp_logits.second, exp_logits.split, *sums,
        chunk.target_logit, chunk.row_max_bits, chunk.flags,
    )  # fmt: skip
    k.logits(args)
    k.recompute_flagged(args)
    return sums


def gather_again(k, call: Call, state: RowState, start: int, live_x: Tensor) -> None:
    """The rows of x of slots `start` and up, in live_x. The kernel's other outputs, known from forward, are dropped."""
    chunk = Chunk.of(state, start, live_x.shape[0], live_x)
    _gather(k, call, state, chunk._replace(slot_target=chunk.sorted_target, row_max_bits=chunk.sorted_row))


def _gather(
    k, call: Call, state: RowState, chunk: Chunk, dx: Tensor | None = None, loss: Tensor | None = None,
    lse: Tensor | None = None,
) -> None:  # fmt: skip
    k.gather(
        GatherArgs(
            call.x, call.w, call.bias, call.target, state.order, state.num_live, chunk.live_x, chunk.slot_target,
            chunk.row_shift, chunk.row_max_bits, chunk.flags, dx, loss, lse, call.x.stride(0), call.softcap,
            chunk.start, chunk.rows, call.v,
        )
    )  # fmt: skip


def run_rows(
    k, call: Call, state: RowState, chunk: Chunk, *, sums: Sums | None = None, loss: Tensor | None = None,
    incoming: GradOutputs = _ONES, exp_logits: ExpLogits = _NO_EXP_LOGITS, scaled_x: Tensor | None = None,
    first_slot_of_class: Tensor | None = None, coefs: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs `lce_rows` for what is given:

    sums: the statistics of the rows, into loss, lse and row_sum.
    exp_logits: row_scale, the elements at the targets, and scaled_x = row_scale * live_x.
    coefs: the coefficients of dlogits.
    """
    scale = exp_logits.first is not None
    k.rows(
        RowsArgs(
            chunk.slot_target, state.order, state.num_live, *(sums or (None, None)),
            chunk.target_logit if sums or scale else None, chunk.row_max_bits, call.class_weight, call.total_weight,
            loss, state.lse, chunk.row_sum, incoming.loss, state.inv_divisor, incoming.lse, exp_logits.first,
            exp_logits.second, None if scaled_x is None else chunk.live_x, scaled_x,
            chunk.row_scale if scale else None, coefs, first_slot_of_class, call.softcap, call.z_loss,
            call.label_smoothing, *exp_logits.strides, exp_logits.split, call.v, sums.exp.shape[1] if sums else 0,
            chunk.start, chunk.rows,
        )
    )  # fmt: skip


def coefficients(k, call: Call, state: RowState, incoming: GradOutputs) -> Tensor:
    """(m, 4) fp32: those of dlogits, for all rows."""
    coefs = matrix(call.x, call.m, 4, F32)
    run_rows(k, call, state, Chunk.of(state, 0, call.m), incoming=incoming, coefs=coefs)
    return coefs


def _dlogits(
    k, call: Call, state: RowState, start: int, live_x: Tensor, coefs: Tensor, v0: int, v1: int, out: Tensor
) -> None:
    """The gradient of the logits of classes [v0, v1), for the slots of live_x, from `start` on."""
    smoothing = call.label_smoothing > 0
    k.dlogits(
        DlogitsCall(
            live_x, call.w[v0:v1], None if call.bias is None else call.bias[v0:v1], coefs[start:],
            state.slot_target + I32.itemsize * start, state.num_live, start, call.class_weight if smoothing else None,
            call.softcap, smoothing, v0, out,
        )
    )  # fmt: skip


def _common_factor(call: Call, state: RowState, incoming: GradOutputs) -> tuple[Tensor | None, RowState, GradOutputs]:
    """(the factor common to all rows, the state with the remaining inv_divisor, the remaining incoming gradients).

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So a factor common to all rows is
    applied to the fp32 accumulators instead, and so is the largest coefficient of a live row, so that the others are at
    most 1. With a gradient per row there is no such factor: (None, ...).
    """
    weight = call.class_weight
    if incoming.lse is not None or incoming.loss.dim():
        return None, state, incoming
    largest = incoming.loss.new_ones(())
    if weight is not None:  # of the classes that are targets: the weight of another class may be anything
        target = state.tensor(state.slot_target, call.m)
        weights = weight[target.clamp(0, weight.shape[0] - 1).long()].abs().masked_fill(target < 0, 0.0)
        largest = _finite(weights).amax()
        if call.label_smoothing:
            spread = call.label_smoothing / call.v
            largest = torch.maximum(largest, spread * _finite(weight.abs()).amax())
    if call.z_loss:
        largest = torch.maximum(largest, 2 * call.z_loss * _finite(state.lse.abs()).amax())
    largest = largest.clamp(min=torch.finfo(F32).tiny).view(1)
    factor = state.tensor(state.inv_divisor, 1, F32) * incoming.loss * largest
    return factor, state._replace(inv_divisor=largest.reciprocal()), _ONES


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)
