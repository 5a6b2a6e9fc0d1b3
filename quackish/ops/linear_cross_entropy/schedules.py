"""The schedules of linear cross entropy on kernels: which launches, in which order, over which buffers.

Formulas. For row r with logits a, target t and class weights w, all sums in fp32:
    lse = logsumexp(a),    loss = w_t * (lse - a_t) + z_loss * lse^2    (label smoothing: see reference/)
    dlogits = coef_softmax * exp(a - lse) - coef_target * onehot(t)
    dx = dlogits @ w,    dw = dlogits.T @ x,    dbias = sum of dlogits over rows

Exponentials. The logits GEMM stores exp_logits = exp(a - row_shift) in bf16 and their sums per row and tile. bf16 has
fp32's exponent range, so any row_shift within some 60 of the row's maximum loses nothing; the target's logit is known
before the GEMM and serves as row_shift. Then dlogits = row_scale * exp_logits, up to the element at the target, with
one fp32 number row_scale per row: both gradients are plain GEMMs on exp_logits, and no pass over the logits is left.

logit_scale s. Kernels keep a, row_shift and target_logit as they are before it, and scale exponents:
exp(s * (a - row_shift)). lse and loss are of s * a. The factors of the gradients, row_scale and coef_*, include s.

Flagged rows. A row with a logit far above its row_shift raises row_max_bits, its encoded maximum, and flags its tile.
A second launch of the logits GEMM recomputes flagged tiles, and returns at once without them: no synchronization,
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

Nothing here reads a value on the device or knows autograd.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.configs.lce_args import (
    BiasArgs,
    DlogitsArgs,
    GatherArgs,
    ResidualArgs,
    RowsArgs,
    RowsOutArgs,
    ScatterArgs,
    SoftmaxArgs,
    SortArgs,
    TargetsArgs,
)
from quackish.configs.lce_rows import MOST_ROWS_COUNTED, NO_SLOT, WIDE_BIAS
from quackish.configs.linear_cross_entropy import Layout, layout
from quackish.ops.linear_cross_entropy.launches import (
    F32,
    I32,
    NOT_STORED,
    ExpLogits,
    RowKernels,
    RowState,
    address,
    dtype_of,
    inside,
    matrix,
    padded,
    padded_strides,
    part,
    vector,
)
from quackish.ops.modes import check_memory


class Plan(NamedTuple):
    """Options of a call that are not tensors; schedule to dw_in_chunks are a LinearCrossEntropyConfig."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_stats: bool
    compute_dtype: torch.dtype
    schedule: str
    chunk_rows: int
    dx_in_forward: bool
    dw_in_chunks: bool
    why_portable: str | None  # None: kernels run; else the portable path, and what it warns of once ("": nothing)


class Call(NamedTuple):
    """What is the same for all launches of a forward or a backward."""

    k: RowKernels  # LceKernels or CublasKernels
    plan: Plan
    state: RowState  # filled by forward, read by backward
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
    softcap: float  # 0: none
    logit_scale: Tensor | None  # 0-dim fp32
    dw_out: Tensor | None  # (v, h): dw is added to it instead of returned
    # What arrives in backward; None in forward, whose gradients are those of a loss gradient of 1.
    grad_loss: Tensor | None = None  # 0-dim, or (m,) contiguous; fp32; None is 1
    grad_lse: Tensor | None = None  # (m,) contiguous fp32; None is 0, as for the next two
    grad_log_prob: Tensor | None = None
    grad_entropy: Tensor | None = None

    def has_row_grads(self) -> bool:
        """Whether rows have gradients that are not the loss's."""
        return any(grad is not None for grad in (self.grad_lse, self.grad_log_prob, self.grad_entropy))


class Chunk(NamedTuple):
    """Slots [start, start + rows)."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): their rows of x
    exp_logits: ExpLogits


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


class Forward(NamedTuple):
    """What forward computes, beside the state of the rows. Backward needs all but the loss."""

    loss: Tensor | None  # (m,) fp32, divided for `mean`: the loss is their sum
    grads: Grads = Grads()
    live_x: Tensor | None = None  # (m, h): `stored` keeps the live rows of x, and exp_logits
    exp_logits: Tensor | None = None  # (m, v), row stride padded
    dw: Tensor | None = None  # (v, h): with `recompute` the first `classes` rows may be computed
    classes: int = 0


# Which schedule -------------------------------------------------------------------------------------------------------


def forward(call: Call, needed: GradsNeeded, may_begin: bool = True) -> Forward:
    """may_begin: with `recompute` dw of some classes may be computed, in storage that backward is to be given."""
    plan = call.plan
    if plan.schedule == "stored" and needed.any():
        return stored(call)
    own_dw, may_begin = call.dw_out is None, may_begin and call.k.keeps_residual
    lay = forward_layout(plan, call.m, call.v, call.h, needed, own_dw, may_begin)
    if plan.schedule == "recompute" and lay.columns:
        return recompute_forward(call, lay, needed)
    early = made_in_forward(plan, needed)
    return chunked(call, lay, early) if early.any() else statistics(call, lay)


def made_in_forward(plan: Plan, needed: GradsNeeded) -> GradsNeeded:
    """The gradients that are ready before backward, up to a scalar factor."""
    if plan.schedule == "chunked" and plan.reduction != "none":
        return needed
    return GradsNeeded(needed.dx if plan.dx_in_forward else None, None, False)


def backward(call: Call, kept: Forward, needed: GradsNeeded) -> Grads:
    """The gradients from what forward kept."""
    plan, own_dw, grads = call.plan, call.dw_out is None, Grads()
    if plan.schedule == "stored" and call.grad_entropy is None:
        return stored_backward(call, kept, needed)
    if not call.has_row_grads():
        early = made_in_forward(plan, needed)
        if early.any():  # they were handed out before: compute them again
            made = forward(call._replace(state=RowState.new(call.x, plan.return_stats), grad_loss=None), needed)
            kept = kept._replace(dw=made.dw, classes=made.classes)
            grads = scale_grads(call.k, made, call.grad_loss, call.dw_out)
        needed = needed.but(early)
    if not needed.any():
        return grads
    plan = plan._replace(schedule="recompute")  # for `chunked` too, if rows have gradients
    lay = _layout(plan, call.m, call.v, call.h, needed, own_dw, kept.dw is not None)
    if lay.dw_block:
        return grads.and_also(recompute_dw_in_chunks(call, lay, needed))
    return grads.and_also(recompute_backward(call, lay, kept, needed))


def forward_layout(plan: Plan, m: int, v: int, h: int, needed: GradsNeeded, own_dw: bool, may_begin: bool) -> Layout:
    both = needed.dx is not None and needed.dw is not None
    begins_dw = may_begin and own_dw and plan.dx_in_forward and both and not needed.db
    return _layout(plan, m, v, h, needed, own_dw, begins_dw)


def _layout(plan: Plan, m: int, v: int, h: int, needed: GradsNeeded, own_dw: bool, begins_dw: bool) -> Layout:
    how = plan.schedule, plan.chunk_rows, plan.dx_in_forward, plan.dw_in_chunks
    dw = None if needed.dw is None else needed.dw.itemsize
    return layout(*how, m, v, h, needed.dx is not None, dw, own_dw, begins_dw)


def scale_grads(k: RowKernels, made: Forward, factor: Tensor, dw_out: Tensor | None) -> Grads:
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


def statistics(call: Call, lay: Layout) -> Forward:
    """loss and lse only: the forward of a call without grad, and of `recompute`."""
    loss = begin(call)
    live_x = new_live_x(call, lay.chunk_rows)
    for chunk in chunks(call, lay, live_x):
        run_rows(call, chunk, sums=gather_and_multiply(call, chunk, loss), loss=loss)
    return Forward(loss)


def chunked(call: Call, lay: Layout, needed: GradsNeeded) -> Forward:
    """loss, lse and the gradients of the summed loss (divided for "mean"), chunk by chunk.

    dw is summed over chunks in fp32. A single chunk has part of exp_logits in dw's storage.
    """
    dw_dtype = F32 if needed.dw and call.m > lay.chunk_rows else needed.dw
    grads = dx, dw, _ = new_grads(call, GradsNeeded(needed.dx, dw_dtype, needed.db))
    rows, v, dtype = min(lay.chunk_rows, call.m), call.v, call.x.dtype
    if lay.columns:
        first = inside(dw, lay.offset, rows, lay.columns, dtype)
        exp_logits = ExpLogits(first, lay.columns, padded(dw, rows, v - lay.columns, dtype))
    else:
        exp_logits = ExpLogits(padded(call.w, rows, v, dtype), v)
    live_x, first_slots = new_live_x(call, rows), new_first_slots(call, v, dw_dtype)
    split_tail = not call.plan.dw_in_chunks  # dx's GEMM may take scratch
    loss = begin(call)
    for chunk in chunks(call, lay, live_x, exp_logits):
        scaled_x = None if dw is None else chunk.live_x  # in place
        # No name for the sums: they make room for the scratch of the gradients.
        run_rows(
            call, chunk, sums=gather_and_multiply(call, chunk, loss, dx), loss=loss, scale=True, scaled_x=scaled_x,
            first_slots=first_slots,
        )  # fmt: skip
        multiply_gradients(call, chunk, grads, scaled_x, first_slots, split_tail)
    if dw_dtype != needed.dw:
        del live_x, exp_logits, chunk, scaled_x  # makes room for the rounded dw
        grads = grads._replace(dw=dw.to(needed.dw))
    return Forward(loss, grads)


def stored(call: Call) -> Forward:
    """loss, lse, and exp_logits and the live rows of x for `stored_backward`."""
    loss = begin(call)
    exp_logits = padded(call.w, call.m, call.v, call.w.dtype)
    chunk = Chunk(0, call.m, new_live_x(call, call.m), ExpLogits(exp_logits, call.v))
    run_rows(call, chunk, sums=gather_and_multiply(call, chunk, loss), loss=loss)
    return Forward(loss, live_x=chunk.live_x, exp_logits=exp_logits)


def stored_backward(call: Call, kept: Forward, needed: GradsNeeded) -> Grads:
    """The gradients from exp_logits.

    Overwrites each row's element of kept.exp_logits at its target, which depends on the incoming gradients.
    """
    m, v, saved, scaled_x, first_slots = call.m, call.v, kept.exp_logits, None, None
    if saved.stride() != padded_strides(v):  # a saved-tensor hook or compiled code changed its strides
        saved = padded(call.x, m, v, saved.dtype).copy_(saved)
    chunk = Chunk(0, m, kept.live_x, ExpLogits(saved, v))
    if needed.dw:
        scaled_x = new_live_x(call, m)
        first_slots = new_first_slots(call, v, needed.dw) if call.dw_out is None else None
    run_rows(call, chunk, scale=True, scaled_x=scaled_x, first_slots=first_slots)
    grads = new_grads(call, needed, call.dw_out is None)
    if grads.dx is not None:
        grads.dx.zero_()  # ignored rows stay 0
    multiply_gradients(call, chunk, grads, scaled_x, first_slots, split_tail=True)
    if needed.dw and call.dw_out is not None:
        take_targets(call, chunk, v)
        add_dw(call, saved, scaled_x, call.dw_out, chunk)
    return grads


def recompute_forward(call: Call, lay: Layout, needed: GradsNeeded) -> Forward:
    """loss, lse, dx, and dw of the first lay.columns classes; no dbias.

    exp_logits lie in dw's storage: those of the first classes for all rows, those of the other classes for one chunk.
    """
    m, v, dtype = call.m, call.v, call.x.dtype
    dx, dw, _ = new_grads(call, needed)
    scaled_x = new_live_x(call, m)
    first = inside(dw, lay.offset, m, lay.columns, dtype)
    n = v - lay.columns
    others = inside(dw, 0, lay.chunk_rows, padded_strides(n)[0], dtype)[:, :n]
    loss = begin(call)
    for start, rows in ranges(m, lay.chunk_rows):
        exp_logits = ExpLogits(part(first, start, start + rows), lay.columns, part(others, 0, rows))
        chunk = Chunk(start, rows, part(scaled_x, start, start + rows), exp_logits)
        sums = gather_and_multiply(call, chunk, loss, dx)
        run_rows(call, chunk, sums=sums, loss=loss, scale=True, scaled_x=chunk.live_x)
        del sums
        multiply_gradients(call, chunk, Grads(dx))
    first_slots = new_first_slots(call, lay.columns, needed.dw)
    if first_slots is not None:
        first_slots.fill_(NO_SLOT)
    all_rows = Chunk(0, m, scaled_x, ExpLogits(first, lay.columns))
    multiply_gradients(call, all_rows, Grads(None, dw[: lay.columns]), scaled_x, first_slots)
    return Forward(loss, Grads(dx), dw=dw, classes=lay.columns)


def recompute_backward(call: Call, lay: Layout, kept: Forward, needed: GradsNeeded) -> Grads:
    """The gradients from x and the rows' statistics, one block of classes at a time.

    If kept.dw is given, its first kept.classes rows are final. A block's dw is final, and only dx is summed over
    blocks. A block's dlogits lie in the storage of later blocks' dw while they fit: see `recompute_blocks`.
    """
    k, m, h, dtype = call.k, call.m, call.h, call.x.dtype
    dx, dw, db = new_grads(call, needed, call.dw_out is None and kept.dw is None)
    if kept.dw is not None:
        dw = kept.dw
    acc = matrix(call.x, m, h, F32) if needed.dx else None
    if dx is None:
        live_x = new_live_x(call, m)
    else:  # dx is written after the last block; until then its storage holds the live rows of x
        live_x = dx.view(-1).view(dtype)[: m * h].view(m, h)
    factor = None
    if dtype == torch.float16:
        factor, call = _common_factor(call)
    state = call.state
    gather_again(call, 0, live_x)
    coefs = coefficients(call)
    scratch = padded(call.x, m, max(v1 - v0 for v0, v1, offset in lay.blocks if offset is None), dtype)
    for v0, v1, offset in lay.blocks:
        out = scratch[:, : v1 - v0] if offset is None else inside(dw, offset, m, v1 - v0, dtype)
        write_dlogits(call, 0, live_x, coefs, v0, v1, out)
        if dw is not None:
            k.dw(out, live_x, state, 0, dw[v0:v1], False, True, factor)
        elif needed.dw:
            add_dw(call, out, live_x, call.dw_out[v0:v1], factor=factor)
        if db is not None:
            add_bias(call, out, None, 0, db[v0:v1])
        if acc is not None:
            k.dx(ExpLogits(out), call.w[v0:v1], state, 0, acc, v0 > 0)
    if factor is not None:
        for grad in (acc, db):
            if grad is not None:
                k.scale(grad, factor)
    if dx is not None:
        dx.zero_()
        args = ScatterArgs(acc.data_ptr(), None, state.order, dx.data_ptr(), state.num_live, 0, m)
        k.launch(args, "lce_scatter", h, dx.dtype)
    return Grads(dx, dw, db)


def recompute_dw_in_chunks(call: Call, lay: Layout, needed: GradsNeeded) -> Grads:
    """dw and dbias, by blocks of classes and chunks of rows; a block's dw is summed in fp32 and rounded once."""
    h, v, dtype, rows = call.h, call.v, call.x.dtype, lay.chunk_rows
    _, dw, db = grads = new_grads(call, needed._replace(dx=None))
    coefs = coefficients(call)
    block = lay.dw_block
    live_x, dlogits = new_live_x(call, rows), padded(call.x, rows, block, dtype)
    dw_sums = matrix(call.x, block, h, F32) if needed.dw != F32 else None
    for v0, n in ranges(v, block):
        v1 = v0 + n
        acc = dw[v0:v1] if dw_sums is None else part(dw_sums, 0, n)
        columns = dlogits if n == block else dlogits[:, :n]
        for start, size in ranges(call.m, rows):
            x, out = part(live_x, 0, size), part(columns, 0, size)
            gather_again(call, start, x)
            write_dlogits(call, start, x, coefs, v0, v1, out)
            call.k.dw(out, x, call.state, start, acc, start > 0)
            if db is not None:
                add_bias(call, out, None, start, db[v0:v1])
        if dw_sums is not None:
            dw[v0:v1] = acc
    return grads


# Their parts: before the gradients ------------------------------------------------------------------------------------


def begin(call: Call) -> Tensor:
    """Finds the live rows; (m,) fp32 for their losses."""
    plan = call.plan
    call.k.compact(
        call.target, call.class_weight, call.num_items, plan.ignore_index, call.v, plan.reduction == "mean", call.state
    )
    return vector(call.x, call.m, F32)


def new_grads(call: Call, needed: GradsNeeded, own_dw: bool = True) -> Grads:
    """Memory for the gradients, and for dw with `own_dw`."""
    m, h, v, x = call.m, call.h, call.v, call.x
    return Grads(
        matrix(x, m, h, needed.dx) if needed.dx else None,
        matrix(x, v, h, needed.dw) if needed.dw and own_dw else None,
        vector(x, v, F32) if needed.db else None,
    )


def new_live_x(call: Call, rows: int) -> Tensor:
    return matrix(call.x, min(rows, call.m), call.h, call.x.dtype)


def ranges(n: int, size: int) -> Iterator[tuple[int, int]]:
    """(start, size) of each part of n, all but the last of the same size."""
    return ((start, min(size, n - start)) for start in range(0, n, size))


def chunks(call: Call, lay: Layout, live_x: Tensor, exp_logits: ExpLogits = NOT_STORED) -> Iterator[Chunk]:
    """All chunks, one after another in the same buffers."""
    for start, rows in ranges(call.m, lay.chunk_rows):
        yield Chunk(start, rows, part(live_x, 0, rows), exp_logits.rows(rows))


class Sums(NamedTuple):
    """Of the rows of a chunk, over the classes of a tile: (rows, tiles) fp32. And argmax_bits, (rows,) int64."""

    part_sum: Tensor | None = None  # exponentials
    part_wsum: Tensor | None = None  # class weight * logit; with label smoothing
    part_elog: Tensor | None = None  # exponentials times their log2; with return_stats, as argmax_bits
    argmax_bits: Tensor | None = None


NO_SUMS = Sums()


def gather_and_multiply(call: Call, chunk: Chunk, loss: Tensor, dx: Tensor | None = None) -> Sums:
    """Fills chunk.live_x and exp_logits. Sets what is returned of the chunk's ignored rows, and their dx."""
    k, state, smoothing, at = call.k, call.state, call.plan.label_smoothing > 0, 4 * chunk.start
    tiles, return_stats = k.num_tiles(call.v), call.plan.return_stats
    argmax_bits = vector(call.x, chunk.rows, torch.int64) if return_stats else None
    _gather(call, chunk.start, chunk.live_x, state.slot_target, state.row_max_bits, dx, loss, argmax_bits)
    part_sum = matrix(call.x, chunk.rows, tiles, F32)
    part_wsum = matrix(call.x, chunk.rows, tiles, F32) if smoothing else None
    part_elog = matrix(call.x, chunk.rows, tiles, F32) if return_stats else None
    epilogue = SoftmaxArgs(
        address(call.bias), address(call.class_weight) if smoothing else None, state.row_shift + at,
        state.slot_target + at, state.row_max_bits + at, state.flags, part_sum.data_ptr(), state.target_logit + at,
        address(part_wsum), address(part_elog), address(argmax_bits), call.softcap, tiles, address(call.logit_scale),
    )  # fmt: skip
    k.logits(chunk.live_x, call.w, chunk.exp_logits, epilogue, dtype_of(call.bias), state, chunk.start)
    return Sums(part_sum, part_wsum, part_elog, argmax_bits)


def gather_again(call: Call, start: int, live_x: Tensor) -> None:
    """The rows of x of slots `start` and up, in live_x. The kernel's other outputs, known from forward, are dropped."""
    _gather(call, start, live_x, call.state.sorted_target, call.state.sorted_row)


def _gather(
    call: Call, start: int, live_x: Tensor, slot_target: int, row_max_bits: int, dx: Tensor | None = None,
    loss: Tensor | None = None, argmax_bits: Tensor | None = None,
) -> None:  # fmt: skip
    x, state, at, stride = call.x, call.state, 4 * start, call.x.stride(0)
    x_at, return_stats = x.data_ptr(), argmax_bits is not None
    stats = (state.log_prob, state.entropy, state.predicted) if return_stats else (None, None, None)
    args = GatherArgs(
        x_at, call.w.data_ptr(), address(call.bias), call.target.data_ptr(), state.order, state.num_live,
        live_x.data_ptr(), slot_target + at, state.row_shift + at, row_max_bits + at, state.flags, address(dx),
        address(loss), None if loss is None else state.lse, *stats, address(argmax_bits), stride, call.softcap, start,
        live_x.shape[0], call.v,
    )  # fmt: skip
    aligned = not (x_at | stride * 2) & 15  # each row starts on 16 bytes
    dtypes = x.dtype, call.target.dtype, dtype_of(call.bias), dtype_of(dx)
    call.k.launch(args, "lce_gather", call.h, *dtypes, call.softcap > 0, loss is not None, aligned, return_stats)


def run_rows(
    call: Call, chunk: Chunk, *, sums: Sums = NO_SUMS, loss: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None, coefs: Tensor | None = None,
    coef_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Runs `lce_rows` for what is given:

    sums: the statistics of the rows, into loss, lse and row_sum, and those of return_stats.
    scale: row_scale, the elements of exp_logits at the targets, and scaled_x = row_scale * live_x.
    coefs: the coefficients of dlogits, and coef_entropy if the entropy has a gradient.
    """
    plan, state, at, grad_loss = call.plan, call.state, 4 * chunk.start, call.grad_loss
    stats, exp_logits = sums.part_sum is not None, chunk.exp_logits if scale else NOT_STORED
    return_stats = sums.part_elog is not None
    args = RowsArgs(
        state.slot_target + at, state.order, state.num_live, *map(address, sums),
        state.target_logit + at if stats or scale else None, state.row_max_bits + at, address(call.class_weight),
        address(call.total_weight), address(loss), state.lse, state.row_sum + at,
        state.log_prob if return_stats else None, state.entropy if return_stats or coef_entropy is not None else None,
        state.predicted if return_stats else None, address(grad_loss), state.inv_divisor, address(call.grad_lse),
        address(call.grad_log_prob), address(call.grad_entropy), address(exp_logits.first), address(exp_logits.second),
        None if scaled_x is None else chunk.live_x.data_ptr(), address(scaled_x),
        state.row_scale + at if scale else None, address(coefs), address(coef_entropy), address(first_slots),
        call.softcap, plan.z_loss, plan.label_smoothing, *exp_logits.strides, exp_logits.split, call.v,
        sums.part_sum.shape[1] if stats else 0, chunk.start, chunk.rows, address(call.logit_scale),
    )  # fmt: skip
    call.k.launch(
        args, "lce_rows", stats, "scale" if scale else "none" if coefs is None else "coefs",
        0 if scaled_x is None else call.h, dtype_of(scaled_x), dtype_of(call.class_weight), plan.label_smoothing > 0,
        scale and call.softcap > 0, "one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar",
        call.grad_lse is not None, exp_logits.second is not None, first_slots is not None, call.logit_scale is not None,
        return_stats, call.grad_log_prob is not None, coef_entropy is not None,
    )  # fmt: skip


Coefs = tuple[Tensor, Tensor | None]  # (m, 4) fp32; coef_entropy, (m,) fp32, if the entropy has a gradient


def coefficients(call: Call) -> Coefs:
    """Those of dlogits, for all rows."""
    coefs = matrix(call.x, call.m, 4, F32)
    coef_entropy = None if call.grad_entropy is None else vector(call.x, call.m, F32)
    run_rows(call, Chunk(0, call.m, None, NOT_STORED), coefs=coefs, coef_entropy=coef_entropy)
    return coefs, coef_entropy


def write_dlogits(call: Call, start: int, live_x: Tensor, coefs: Coefs, v0: int, v1: int, out: Tensor) -> None:
    """The gradient of the logits of classes [v0, v1), for the slots of live_x, from `start` on."""
    state, smoothing, bias, (coefs, coef_entropy) = call.state, call.plan.label_smoothing > 0, call.bias, coefs
    epilogue = DlogitsArgs(
        None if bias is None else bias.data_ptr() + bias.itemsize * v0,
        address(call.class_weight) if smoothing else None, coefs.data_ptr() + 16 * start, state.slot_target + 4 * start,
        None if coef_entropy is None else coef_entropy.data_ptr() + 4 * start, call.softcap, v0,
        address(call.logit_scale),
    )  # fmt: skip
    call.k.dlogits(live_x, call.w[v0:v1], out, epilogue, dtype_of(bias), smoothing, state, start)


# Their parts: gradients from exp_logits -------------------------------------------------------------------------------


def multiply_gradients(
    call: Call, chunk: Chunk, grads: Grads, scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
    split_tail: bool = False,
) -> None:  # fmt: skip
    """Writes `grads`, or adds dw and db to them after the first chunk. dw consumes exp_logits, so it comes last.

    split_tail: as in LceKernels.dx. first_slots: `new_first_slots`, which hold NO_SLOT.
    """
    state, exp_logits, (dx, dw, db) = call.state, chunk.exp_logits, grads
    row_scale = state.row_scale + 4 * chunk.start
    if dx is not None:
        epilogue = RowsOutArgs(row_scale, state.order)
        call.k.dx(exp_logits, call.w, state, chunk.start, dx, False, split_tail, epilogue)
    if db is not None:
        for block, v0, v1 in exp_logits.blocks(call.v):
            add_bias(call, block, row_scale, chunk.start, part(db, v0, v1))
    if dw is not None:
        _multiply_dw(call, chunk, scaled_x, dw, first_slots)


def add_bias(call: Call, block: Tensor, row_scale: int | None, start: int, db: Tensor) -> None:
    """db = (or += after the first chunk) the sum of row_scale * block over live rows."""
    n = db.shape[0]
    args = BiasArgs(
        block.data_ptr(), row_scale, db.data_ptr(), call.state.num_live, block.stride(0), start, block.shape[0], n
    )
    call.k.launch(args, "lce_bias", block.dtype, row_scale is not None, start > 0, n >= WIDE_BIAS)


def _multiply_dw(call: Call, chunk: Chunk, scaled_x: Tensor, dw: Tensor, first_slots: Tensor | None) -> None:
    """dw of the first classes. The targets' terms, most of the gradient of a class with few rows, are added in fp32."""
    (v, h), state, kept, residual = dw.shape, call.state, None, None
    targets_apart = first_slots is not None or dw.dtype == F32
    if targets_apart:
        take_targets(call, chunk, v, first_slots)
    if first_slots is not None:
        residual = matrix(dw, chunk.rows, h, torch.int16)
    for block, v0, v1 in chunk.exp_logits.blocks(v):
        if residual is not None:
            kept = ResidualArgs(first_slots.data_ptr() + 4 * v0, residual.data_ptr())
        out = part(dw, v0, v1)
        call.k.dw(block, scaled_x, state, chunk.start, out, chunk.start > 0, True, residual=kept)
    if targets_apart:
        add_targets(call, chunk, dw, 0, residual)


def new_first_slots(call: Call, v: int, dw: torch.dtype | None) -> Tensor | None:
    """(v,) int32 for the first slot of each class, where the rounding residual of a 16-bit dw is kept until the
    targets' terms are added.

    None if the GEMM cannot keep the residual. Then the targets' elements stay in exp_logits: adding their terms to a
    rounded dw would be less exact than rounding scaled_x.
    """
    return vector(call.x, v, I32) if call.k.keeps_residual and dw not in (None, F32) else None


def take_targets(call: Call, chunk: Chunk, v: int, first_slots: Tensor | None = None) -> None:
    """Moves the elements at the targets out of exp_logits, where they become 0, to state.sorted_grad.

    Not to be launched right after the launch that writes slot_target.
    """
    n, state, exp_logits, at, index = chunk.rows, call.state, chunk.exp_logits, 4 * chunk.start, None
    if n > MOST_ROWS_COUNTED:
        classes, num_live = state.tensor(state.slot_target + at, n), state.tensor(state.num_live, 1)
        index = order_by_class(classes, num_live, chunk.start)
    args = SortArgs(
        state.slot_target + at, state.order, state.num_live, state.row_scale + at, exp_logits.first.data_ptr(),
        address(exp_logits.second), *exp_logits.strides, exp_logits.split, state.sorted_target + at,
        state.sorted_row + at, state.sorted_grad + at, address(first_slots), address(index), v, chunk.start, n,
    )  # fmt: skip
    call.k.launch(args, "lce_sort", exp_logits.second is not None, first_slots is not None, index is not None)


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """Slots of a chunk by class, those that are not live last: (rows,) int64, by PyTorch's stable radix sort."""
    n = classes.shape[0]
    slots = torch.arange(start, start + n, dtype=I32, device=classes.device)
    return classes.masked_fill(slots >= num_live, torch.iinfo(I32).max).sort(stable=True).indices


def add_targets(call: Call, chunk: Chunk, dw: Tensor, v0: int, residual: Tensor | None = None) -> None:
    """dw (n, h) of classes v0 and up += the targets' part, before which `residual` is added to the rounded dw.

    The launch right before may write dw and the residual, but no other argument.
    """
    x, state, at, stride = call.x, call.state, 4 * chunk.start, call.x.stride(0)
    x_at = x.data_ptr()
    args = TargetsArgs(
        x_at, state.sorted_target + at, state.sorted_row + at, state.sorted_grad + at, state.num_live, dw.data_ptr(),
        address(residual), stride, v0, v0 + dw.shape[0], chunk.start, chunk.rows,
    )  # fmt: skip
    aligned = not (x_at | stride * 2) & 15
    call.k.launch(args, "lce_targets", call.h, x.dtype, dw.dtype, aligned, residual is not None)


def add_dw(
    call: Call, dlogits: Tensor, scaled_x: Tensor, out: Tensor, targets: Chunk | None = None,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x, and the targets' part if it is not in dlogits. `out` is the user's."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    k, state = call.k, call.state
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it, by TMA
        k.dw(dlogits, scaled_x, state, 0, out, True, True, factor)
        if targets is not None:
            add_targets(call, targets, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0, n in ranges(out.shape[0], 4096):  # bounds the memory of dw
        dw = matrix(scaled_x, n, out.shape[1], F32)
        k.dw(dlogits[:, v0 : v0 + n], scaled_x, state, 0, dw, False, True, factor)
        if targets is not None:
            add_targets(call, targets, dw, v0)
        out[v0 : v0 + n].add_(dw)


def _common_factor(call: Call) -> tuple[Tensor | None, Call]:
    """(the factor common to all rows, the call without it). The call's inv_divisor lives as long as the factor.

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So a factor common to all rows is
    applied to the fp32 accumulators instead, and so is the largest coefficient of a live row, so that the others are at
    most 1. With a gradient per row there is no such factor: (None, call).
    """
    plan, state, weight = call.plan, call.state, call.class_weight
    if call.has_row_grads() or call.grad_loss.dim():
        return None, call
    largest = call.grad_loss.new_ones(())
    if weight is not None:  # of the classes that are targets: the weight of another class may be anything
        target = state.tensor(state.slot_target, call.m)
        weights = weight[target.clamp(0, weight.shape[0] - 1).long()].abs().masked_fill(target < 0, 0.0)
        largest = _finite(weights).amax()
        if plan.label_smoothing:
            spread = plan.label_smoothing / call.v
            largest = torch.maximum(largest, spread * _finite(weight.abs()).amax())
    if plan.z_loss:
        lse = state.tensor(state.lse, call.m, F32)
        largest = torch.maximum(largest, 2 * plan.z_loss * _finite(lse.abs()).amax())
    if call.logit_scale is not None:
        largest = largest * call.logit_scale
    largest = largest.clamp(min=torch.finfo(F32).tiny).view(1)
    both = vector(call.x, 2, F32)  # not in the state: a backward that runs out of memory may be run again
    torch.mul(state.tensor(state.inv_divisor, 1, F32) * call.grad_loss, largest, out=both[:1])
    torch.reciprocal(largest, out=both[1:])
    return both[:1], call._replace(state=state._replace(inv_divisor=both.data_ptr() + 4), grad_loss=None)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)
