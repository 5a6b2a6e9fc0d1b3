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

import torch
from torch import Tensor

from quackish.configs.lce_args import (
    ScatterArgs,
)
from quackish.configs.lce_rows import NO_SLOT
from quackish.configs.linear_cross_entropy import Layout, layout
from quackish.ops.linear_cross_entropy.calls import Call, Chunk, Forward, Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.launches import (
    F32,
    ExpLogits,
    RowKernels,
    RowState,
    inside,
    matrix,
    padded,
    padded_strides,
    part,
)
from quackish.ops.linear_cross_entropy.parts import (
    add_bias,
    add_dw,
    begin,
    chunks,
    coefficients,
    common_factor,
    gather_again,
    gather_and_multiply,
    multiply_gradients,
    new_first_slots,
    new_grads,
    new_live_x,
    ranges,
    run_rows,
    take_targets,
    write_dlogits,
)

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
    blocks. A block's dlogits lie in the storage of later blocks' dw while they fit: see
    `recompute_blocks` in configs/linear_cross_entropy.py.
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
        factor, call = common_factor(call)
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
