"""The schedules on kernels: which steps run, in which order, and over which buffers.

Formulas. For a row with logits a, target t and class weights w, all sums in fp32 (label smoothing: see reference.py):
    lse = logsumexp(a),    loss = w_t * (lse - a_t) + z_loss * lse^2
    dlogits = coef_softmax * exp(a - lse) - coef_target * onehot(t)
    dx = dlogits @ w,    dw = dlogits.T @ x,    dbias = sum of dlogits over rows

exp_logits. The logits GEMM stores exp_logits = exp(a - row_shift) in bf16, and their sums per row and tile. bf16 has
fp32's exponent range, so any row_shift within about 60 of the row's maximum is accurate. The target's logit, which is
known before the GEMM, serves as row_shift. Except at the target, dlogits = row_scale * exp_logits with one fp32
row_scale per row. So both gradients are plain GEMMs on exp_logits, without another pass over the logits.

logit_scale s. Kernels store a, row_shift and target_logit before scaling, and scale exponents:
exp(s * (a - row_shift)). lse and loss are of s * a. row_scale and coef_* include s.

Flagged rows. A logit far above its row_shift raises row_max_bits, the row's encoded maximum, and flags its tile. A
second launch of the logits GEMM recomputes flagged tiles and returns immediately if there are none. The host never
synchronizes, so CUDA graphs work.

Matmuls. `logits`, `dx` and `dw`. `dx` applies row_scale in its epilogue; `dw` multiplies by scaled_x = row_scale * x.
The target entries are removed from exp_logits before `dw`, and their terms, row_scale * exp_logits[t] * x, are added in
fp32. Otherwise rounding scaled_x would cause most of dw's error.

Rows. `compact` lists the live rows first in `order`. A slot is an index into `order`, a chunk is a range of slots, and
"row i" of a chunk's buffers is slot start + i. Only the device knows the number of live rows, where all sums end. The
loss, lse and dx of ignored rows are 0. Ignored rows are never multiplied, so their NaNs do not spread. From the last
live row to the end of its GEMM tile, buffers hold zeros; after that tile, they hold arbitrary values.

Schedules.
    chunked    forward: per chunk of rows the logits, dx, and dw added to an fp32 sum. backward: scales these.
    stored     forward: the logits of all rows, keeping exp_logits. backward: dx and dw from them.
    recompute  forward: the logits; dx if only a scalar factor is unknown; dw of the first classes if there is room.
               backward: logits again, by blocks of classes, and the missing gradients.
               With `keeps_first`, exp_logits of the first rows are kept, as in `stored`.
fp16 and label smoothing have no exp_logits (`has_exp_logits`). There `recompute` computes both gradients in
backward from dlogits, which another GEMM epilogue writes.

Memory. exp_logits of a single chunk, or of a block of classes, partly lie in dw's storage, behind the rows of dw that
are written first: see `Layout` in layout.py.

The schedules read no value on the device. Of autograd, `backward` asks only whether the graph is retained.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.ops.linear_cross_entropy import launch_problems
from quackish.ops.linear_cross_entropy.calls import (
    F32,
    NO_GRADS,
    Call,
    Chunk,
    ExpLogits,
    ForwardGrads,
    Grads,
    GradsNeeded,
    KernelCall,
    LossPlan,
    RowState,
    Saved,
    padded_matrix,
    padded_strides,
    prepare,
    reshaped,
    row_slice,
    view_into,
)
from quackish.ops.linear_cross_entropy.launches import (
    LceKernels,
    add_targets,
    add_to_dw_out,
    allocate_first_slots,
    allocate_grads,
    allocate_live_x,
    chunks,
    common_factor,
    compute_coefs,
    compute_db,
    compute_dlogits,
    compute_grads,
    compute_loss,
    extract_targets,
    launch_rows,
    regather_live_x,
    start_forward,
)
from quackish.ops.linear_cross_entropy.layout import Layout, choose_layout
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT, ScatterArgs
from quackish.ops.operator import is_graph_kept

# Dispatch -------------------------------------------------------------------------------------------------------------


def forward(call: Call) -> tuple[list[Tensor], Saved, ForwardGrads]:
    """(the call's outputs, what backward needs, gradients)."""
    plan, shape, prepared = call.plan, call.inputs.target.shape, prepare(call)
    loss, saved, computed = run_forward(prepared, call.needed, call.eager)
    outputs, state = [reshaped(loss, shape) if plan.reduction == "none" else loss.sum()], prepared.state
    # copies, because users may write to them
    for name in ("lse", "log_prob", "entropy")[: call.num_outputs() - 1]:
        outputs.append(reshaped(state.tensor(name).clone(), shape))
    if plan.return_stats:
        outputs.append(reshaped(state.tensor("predicted").long(), shape))
    return outputs, saved, computed


def backward(call: Call, saved: Saved, partial_dw: Tensor | None = None) -> Grads:
    """The gradients. dw is added to grad_weight_out if given. partial_dw: ForwardGrads.dw, scaled."""
    state, exp_logits = RowState.from_memory(_readable(saved.state), call.inputs.target.numel()), saved.exp_logits
    if call.grad_outputs.entropy is not None:
        exp_logits = None  # all logits are recomputed
    if is_graph_kept():  # autograd may run backward again, or is not running
        memory = state.memory.clone()
        memory[:NUM_TICKETS] = 0
        state = RowState.from_memory(memory, state.m)
        if exp_logits is not None:
            rows, v = exp_logits.shape
            exp_logits = padded_matrix(call.kernels.device, rows, v, exp_logits.dtype).copy_(exp_logits)
    live_x = None if saved.live_x is None else _readable(saved.live_x)
    return run_backward(prepare(call, state), Saved(state.memory, live_x, exp_logits), partial_dw, call.needed)


def _readable(t: Tensor) -> Tensor:
    """t, or a copy if a saved-tensor hook returned memory that kernels cannot read."""
    return t if t.is_contiguous() and t.data_ptr() % 16 == 0 else t.clone(memory_format=torch.contiguous_format)


Forward = tuple[Tensor, Saved, ForwardGrads]  # the rows' losses (m,) fp32; divided for "mean", whose loss is their sum


def run_forward(call: KernelCall, needed: GradsNeeded, allow_dw: bool = True) -> Forward:
    """allow_dw: `recompute` may compute dw of the first classes."""
    plan = call.plan
    layout = forward_layout(plan, call.m, call.v, call.h, needed, call.dw_out is None, allow_dw)
    if plan.schedule == "recompute" and layout.columns:
        return recompute_forward(call, layout, needed)
    in_forward = grads_in_forward(plan, needed)
    if in_forward.any():
        return chunked(call, layout, in_forward)
    return statistics(call, layout, layout.kept if needed.any() else 0)


def grads_in_forward(plan: LossPlan, needed: GradsNeeded) -> GradsNeeded:
    """The gradients that forward computes, up to a scalar factor."""
    if plan.schedule == "chunked" and plan.reduction != "none":
        return needed
    return GradsNeeded(needed.dx if plan.dx_in_forward else None, None, False)


def run_backward(call: KernelCall, saved: Saved, partial_dw: Tensor | None, needed: GradsNeeded) -> Grads:
    plan, grads = call.plan, Grads()
    if plan.schedule == "stored" and call.grad_outputs.entropy is None:
        return stored_backward(call, saved, needed)
    if not call.grad_outputs.has_row_grads() and grads_in_forward(plan, needed).any():
        # an earlier backward has scaled them, or a CUDA graph of backward alone must not: compute them again
        state = RowState.new(call.device, call.m, plan.return_stats)
        _, _, computed = run_forward(call._replace(state=state, grad_outputs=NO_GRADS), needed)
        partial_dw, needed = computed.dw, needed.without(computed.grads)
        grads = scale_grads(call.kernels, computed, call.grad_outputs.loss, call.dw_out)
    if not needed.any():
        return grads
    # also for `chunked` if lse, log_prob or entropy has a gradient
    plan = plan._replace(schedule="recompute", keeps_first=plan.keeps_first and saved.exp_logits is not None)
    layout = _layout(plan, call.m, call.v, call.h, needed, call.dw_out is None, partial_dw is not None)
    if layout.dw_block:
        return grads.fill_missing(recompute_dw_in_chunks(call, layout, needed))
    return grads.fill_missing(recompute_backward(call, layout, saved, partial_dw, needed))


def forward_layout(
    plan: LossPlan, m: int, v: int, h: int, needed: GradsNeeded, owns_dw: bool, allow_dw: bool
) -> Layout:
    both = needed.dx is not None and needed.dw is not None
    dw_in_forward = allow_dw and owns_dw and plan.dx_in_forward and both and not needed.db
    return _layout(plan, m, v, h, needed, owns_dw, dw_in_forward)


def _layout(plan: LossPlan, m: int, v: int, h: int, needed: GradsNeeded, owns_dw: bool, dw_in_forward: bool) -> Layout:
    dw = None if needed.dw is None else needed.dw.itemsize
    return choose_layout(*plan.config, m, v, h, needed.dx is not None, dw, owns_dw, dw_in_forward)


def scale_grads(kernels: LceKernels, computed: ForwardGrads, factor: Tensor, dw_out: Tensor | None) -> Grads:
    """Scales forward's gradients by the loss's gradient, in place. Adds dw to dw_out if given."""
    partial_dw = None if computed.dw is None else computed.dw[: computed.dw_classes]
    tensors = [t for t in (*computed.grads, partial_dw) if t is not None]
    while tensors:  # one launch scales up to two tensors of equal dtype
        first = tensors.pop(0)
        pair = tensors and tensors[0].dtype == first.dtype
        kernels.scale(first, factor, tensors.pop(0) if pair else None)
    return computed.grads.with_dw_added_to(dw_out)


# Schedules ------------------------------------------------------------------------------------------------------------


def statistics(call: KernelCall, layout: Layout, kept: int) -> Forward:
    """loss and row statistics; exp_logits and the live rows of x of the first `kept` slots, for backward."""
    loss, kept_x, exp_logits = start_forward(call), None, None
    if kept:
        kept_x, exp_logits = allocate_live_x(call, kept), padded_matrix(call.device, kept, call.v, call.w.dtype)
        compute_loss(call, Chunk(0, kept, kept_x, ExpLogits(exp_logits, call.v)), loss)
    if kept < call.m:
        live_x = allocate_live_x(call, layout.chunk_rows)
        for chunk in chunks(call, layout, live_x, first=kept):
            compute_loss(call, chunk, loss)
    return loss, Saved(call.state.memory, kept_x, exp_logits), ForwardGrads()


def chunked(call: KernelCall, layout: Layout, needed: GradsNeeded) -> Forward:
    """loss, lse and the gradients of the summed loss (divided for "mean"), chunk by chunk.

    dw is summed over chunks in fp32. With a single chunk, part of exp_logits lies in dw's storage.
    """
    dw_dtype = F32 if needed.dw and call.m > layout.chunk_rows else needed.dw
    grads = dx, dw, _ = allocate_grads(call, GradsNeeded(needed.dx, dw_dtype, needed.db))
    rows, v, dtype = min(layout.chunk_rows, call.m), call.v, call.x.dtype
    if layout.columns:
        first = view_into(dw, layout.offset, rows, layout.columns, dtype)
        exp_logits = ExpLogits(first, layout.columns, padded_matrix(call.device, rows, v - layout.columns, dtype))
    else:
        exp_logits = ExpLogits(padded_matrix(call.device, rows, v, dtype), v)
    live_x, first_slots = allocate_live_x(call, rows), allocate_first_slots(call, v, dw_dtype)
    split_tail = not call.plan.dw_in_chunks  # dx's GEMM may allocate scratch
    loss = start_forward(call)
    for chunk in chunks(call, layout, live_x, exp_logits):
        scaled_x = None if dw is None else chunk.live_x  # in place
        compute_loss(call, chunk, loss, dx, True, scaled_x, first_slots)
        compute_grads(call, chunk, grads, scaled_x, first_slots, split_tail)
    if dw_dtype != needed.dw:
        del live_x, exp_logits, chunk, scaled_x  # frees memory for the rounded dw
        grads = grads._replace(dw=dw.to(needed.dw))
    return loss, Saved(call.state.memory), ForwardGrads(grads)


def stored_backward(call: KernelCall, saved: Saved, needed: GradsNeeded) -> Grads:
    """The gradients from exp_logits.

    Overwrites the target entries of saved.exp_logits.
    """
    first_slots = allocate_first_slots(call, call.v, needed.dw) if needed.dw and call.dw_out is None else None
    chunk, scaled_x = scale_kept(call, saved, needed, first_slots)
    grads = allocate_grads(call, needed, call.dw_out is None)
    if grads.dx is not None:
        grads.dx.zero_()  # ignored rows stay 0
    compute_grads(call, chunk, grads, scaled_x, first_slots, split_tail=True)
    if needed.dw and call.dw_out is not None:
        extract_targets(call, chunk, call.v)
        add_to_dw_out(call, chunk.exp_logits.first, scaled_x, call.dw_out, chunk)
    return grads


def scale_kept(
    call: KernelCall, saved: Saved, needed: GradsNeeded, first_slots: Tensor | None = None
) -> tuple[Chunk, Tensor | None]:
    """The chunk of saved.exp_logits, with row_scale and its target entries computed, and scaled_x if dw is needed."""
    exp_logits, (rows, v) = saved.exp_logits, saved.exp_logits.shape
    if exp_logits.stride() != padded_strides(v) or exp_logits.data_ptr() % 16:  # a hook or compiled code moved it
        exp_logits = padded_matrix(call.device, rows, v, exp_logits.dtype).copy_(exp_logits)
    chunk = Chunk(0, rows, saved.live_x, ExpLogits(exp_logits, v))
    scaled_x = allocate_live_x(call, rows) if needed.dw else None
    launch_rows(call, chunk, scale=True, scaled_x=scaled_x, first_slots=first_slots)
    return chunk, scaled_x


def recompute_forward(call: KernelCall, layout: Layout, needed: GradsNeeded) -> Forward:
    """loss, lse, dx, and dw of the first layout.columns classes; no dbias.

    exp_logits lie in dw's storage: of the first classes for all rows, of the other classes for one chunk at a time.
    """
    m, v, dtype = call.m, call.v, call.x.dtype
    dx, dw, _ = allocate_grads(call, needed)
    scaled_x = allocate_live_x(call, m)
    first = view_into(dw, layout.offset, m, layout.columns, dtype)
    n = v - layout.columns
    other_classes = view_into(dw, 0, layout.chunk_rows, padded_strides(n)[0], dtype)[:, :n]
    loss = start_forward(call)
    for start, rows in call.kernels.ranges(m, layout.chunk_rows):
        exp_logits = ExpLogits(row_slice(first, start, start + rows), layout.columns, row_slice(other_classes, 0, rows))
        chunk = Chunk(start, rows, row_slice(scaled_x, start, start + rows), exp_logits)
        compute_loss(call, chunk, loss, dx, True, chunk.live_x)
        compute_grads(call, chunk, Grads(dx))
    first_slots = allocate_first_slots(call, layout.columns, needed.dw)
    if first_slots is not None:
        first_slots.fill_(NO_SLOT)
    all_rows = Chunk(0, m, scaled_x, ExpLogits(first, layout.columns))
    compute_grads(call, all_rows, Grads(None, dw[: layout.columns]), scaled_x, first_slots)
    return loss, Saved(call.state.memory), ForwardGrads(Grads(dx), dw, layout.columns)


def recompute_backward(
    call: KernelCall, layout: Layout, saved: Saved, partial_dw: Tensor | None, needed: GradsNeeded
) -> Grads:
    """The gradients from x and the row statistics, one block of classes at a time.

    A block's dw is final; only dx is summed over blocks. A block's dlogits lie in the storage of later blocks' dw if
    they fit there: see `recompute_blocks` in layout.py. If partial_dw is given, its rows before the first block are
    already final.

    Of the first layout.kept slots, exp_logits are used. A block's dw is then summed in fp32 and rounded once.
    """
    kernels, start, m, h, dtype = call.kernels, layout.kept, call.m - layout.kept, call.h, call.x.dtype
    dx, dw, db = allocate_grads(call, needed, call.dw_out is None and partial_dw is None)
    if partial_dw is not None:
        dw = partial_dw
    kept = KeptRows.of(call, layout, saved, needed, Grads(dx, None, db)) if start else None
    acc = call.device.matrix(m, h, F32) if needed.dx else None
    if dx is None or start:
        live_x = allocate_live_x(call, m)
    else:  # dx is written after the last block: until then, its storage holds the live rows of x
        live_x = dx.view(-1).view(dtype)[: m * h].view(m, h)
    factor = None
    if dtype == torch.float16:
        factor, call = common_factor(call)
    state = call.state
    regather_live_x(call, start, live_x)
    coefs = compute_coefs(call)
    scratch = padded_matrix(call.device, m, max(v1 - v0 for v0, v1, offset in layout.blocks if offset is None), dtype)
    for v0, v1, offset in kernels.loop(layout.blocks):
        out = scratch[:, : v1 - v0] if offset is None else view_into(dw, offset, m, v1 - v0, dtype)
        compute_dlogits(call, start, live_x, coefs, v0, v1, out)
        if dw is not None and kept is not None:
            kept.sum_dw(call, v0, out, live_x, dw[v0:v1])
        elif dw is not None:
            kernels.dw(out, live_x, state, 0, dw[v0:v1], False, True, factor)
        elif needed.dw:
            add_to_dw_out(call, out, live_x, call.dw_out[v0:v1], factor=factor, start=start)
        if db is not None:
            compute_db(call, out, None, start, db[v0:v1])
        if acc is not None:
            kernels.dx(ExpLogits(out), call.w[v0:v1], state, start, acc, v0 > 0)
    if factor is not None:
        for grad in (acc, db):
            if grad is not None:
                kernels.scale(grad, factor)
    if dx is not None:
        if not start:
            dx.zero_()
        args = by_name(ScatterArgs)(
            state=state.address, acc=acc.data_ptr(), dx=dx.data_ptr(), m=call.m, start=start, rows=m
        )
        kernels.launch(args, launch_problems.scatter, h, dx.dtype)
    return Grads(dx, dw, db)


class KeptRows(NamedTuple):
    """The rows of which exp_logits were kept, in a backward that recomputes the other rows."""

    chunk: Chunk
    scaled_x: Tensor | None
    sums: Tensor | None  # fp32, of a block's dw

    @classmethod
    def of(cls, call: KernelCall, layout: Layout, saved: Saved, needed: GradsNeeded, grads: Grads) -> "KeptRows":
        """Writes `grads`, dx and db; dw follows by blocks, or is added to the user's buffer."""
        chunk, scaled_x = scale_kept(call, saved, needed)
        if grads.dx is not None:
            grads.dx.zero_()  # ignored rows stay 0
        compute_grads(call, chunk, grads, split_tail=True)
        sums = None
        if needed.dw:
            extract_targets(call, chunk, call.v)
            if call.dw_out is not None:
                add_to_dw_out(call, chunk.exp_logits.first, scaled_x, call.dw_out, chunk)
            elif needed.dw != F32:
                sums = call.device.matrix(max(v1 - v0 for v0, v1, _ in layout.blocks), call.h, F32)
        return cls(chunk, scaled_x, sums)

    def sum_dw(self, call: KernelCall, v0: int, dlogits: Tensor, live_x: Tensor, dw: Tensor) -> None:
        """dw of classes v0 and up, summed over these rows and those of dlogits."""
        n, state = dw.shape[0], call.state
        acc = dw if self.sums is None else row_slice(self.sums, 0, n)
        call.kernels.dw(self.chunk.exp_logits.first[:, v0 : v0 + n], self.scaled_x, state, 0, acc, False, True)
        add_targets(call, self.chunk, acc, v0)
        call.kernels.dw(dlogits, live_x, state, self.chunk.rows, acc, True, True)
        if acc is not dw:
            dw.copy_(acc)


def recompute_dw_in_chunks(call: KernelCall, layout: Layout, needed: GradsNeeded) -> Grads:
    """dw and dbias by blocks of classes and chunks of rows. A block's dw is summed in fp32 and rounded once."""
    h, v, dtype, rows = call.h, call.v, call.x.dtype, layout.chunk_rows
    _, dw, db = grads = allocate_grads(call, needed._replace(dx=None))
    coefs = compute_coefs(call)
    block = layout.dw_block
    live_x, dlogits = allocate_live_x(call, rows), padded_matrix(call.device, rows, block, dtype)
    dw_acc = call.device.matrix(block, h, F32) if needed.dw != F32 else None
    for v0, n in call.kernels.ranges(v, block):
        v1 = v0 + n
        acc = dw[v0:v1] if dw_acc is None else row_slice(dw_acc, 0, n)
        columns = dlogits if n == block else dlogits[:, :n]
        for start, size in call.kernels.ranges(call.m, rows):
            x, out = row_slice(live_x, 0, size), row_slice(columns, 0, size)
            regather_live_x(call, start, x)
            compute_dlogits(call, start, x, coefs, v0, v1, out)
            call.kernels.dw(out, x, call.state, start, acc, start > 0)
            if db is not None:
                compute_db(call, out, None, start, db[v0:v1])
        if dw_acc is not None:
            dw[v0:v1] = acc
    return grads
