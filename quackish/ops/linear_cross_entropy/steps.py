"""The steps of linear cross entropy's schedules, each one or a few launches. schedules.py explains the terms."""

from collections.abc import Iterator

import torch
from torch import Tensor

from quackish.configs.lce_args import (
    BiasArgs,
    DlogitsArgs,
    GatherArgs,
    ResidualArgs,
    RowsArgs,
    RowsOutArgs,
    SoftmaxArgs,
    SortArgs,
    TargetsArgs,
)
from quackish.configs.lce_rows import MOST_ROWS_COUNTED, WIDE_BIAS
from quackish.configs.linear_cross_entropy import Layout
from quackish.ops.cuda import address, dtype_of, matrix, vector
from quackish.ops.linear_cross_entropy.calls import Call, Chunk, Grads, GradsNeeded
from quackish.ops.linear_cross_entropy.launches import F32, I32, NOT_STORED, ExpLogits, row_slice
from quackish.ops.modes import check_memory

# Logits and row statistics --------------------------------------------------------------------------------------------


def start_forward(call: Call) -> Tensor:
    """Lists the live rows. Returns an (m,) fp32 buffer for the rows' losses."""
    plan = call.plan
    call.kernels.compact(
        call.target, call.class_weight, call.num_items, plan.ignore_index, call.v, plan.reduction == "mean", call.state
    )
    return vector(call.x, call.m, F32)


def allocate_grads(call: Call, needed: GradsNeeded, owns_dw: bool = True) -> Grads:
    """Buffers for the gradients; for dw only with `owns_dw`."""
    m, h, v, x = call.m, call.h, call.v, call.x
    return Grads(
        matrix(x, m, h, needed.dx) if needed.dx else None,
        matrix(x, v, h, needed.dw) if needed.dw and owns_dw else None,
        vector(x, v, F32) if needed.db else None,
    )


def allocate_live_x(call: Call, rows: int) -> Tensor:
    return matrix(call.x, min(rows, call.m), call.h, call.x.dtype)


def chunks(call: Call, layout: Layout, live_x: Tensor, exp_logits: ExpLogits = NOT_STORED) -> Iterator[Chunk]:
    """All chunks in order. They share the same buffers."""
    for start, rows in call.kernels.ranges(call.m, layout.chunk_rows):
        yield Chunk(start, rows, row_slice(live_x, 0, rows), exp_logits.rows(rows))


def compute_loss(
    call: Call, chunk: Chunk, loss: Tensor, dx: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes chunk.live_x, chunk.exp_logits and the row statistics. `scale` and later arguments: of `launch_rows`.

    Zeroes the outputs and dx of the chunk's ignored rows.
    """
    kernels, state, smoothing, offset = call.kernels, call.state, call.plan.label_smoothing > 0, 4 * chunk.start
    tiles, return_stats = kernels.num_tiles(call.v), call.plan.return_stats
    argmax_bits = vector(call.x, chunk.rows, torch.int64) if return_stats else None
    _gather(call, chunk.start, chunk.live_x, state.slot_target, state.row_max_bits, dx, loss, argmax_bits)
    part_sum = matrix(call.x, chunk.rows, tiles, F32)
    part_wsum = matrix(call.x, chunk.rows, tiles, F32) if smoothing else None
    part_elog = matrix(call.x, chunk.rows, tiles, F32) if return_stats else None
    epilogue = SoftmaxArgs(
        address(call.bias), address(call.class_weight) if smoothing else None, state.row_shift + offset,
        state.slot_target + offset, state.row_max_bits + offset, state.flags, part_sum.data_ptr(),
        state.target_logit + offset, address(part_wsum), address(part_elog), address(argmax_bits), call.softcap, tiles,
        address(call.logit_scale),
    )  # fmt: skip
    kernels.logits(chunk.live_x, call.w, chunk.exp_logits, epilogue, dtype_of(call.bias), state, chunk.start)
    launch_rows(
        call, chunk, part_sum, part_wsum, part_elog, argmax_bits, loss=loss, scale=scale, scaled_x=scaled_x,
        first_slots=first_slots,
    )  # fmt: skip


def regather_live_x(call: Call, start: int, live_x: Tensor) -> None:
    """Gathers the rows of x of slots `start` and up into live_x. Other outputs of the kernel go to unused buffers."""
    _gather(call, start, live_x, slot_target=call.state.sorted_target, row_max_bits=call.state.sorted_row)


def _gather(
    call: Call, start: int, live_x: Tensor, slot_target: int, row_max_bits: int, dx: Tensor | None = None,
    loss: Tensor | None = None, argmax_bits: Tensor | None = None,
) -> None:  # fmt: skip
    x, state, offset, stride = call.x, call.state, 4 * start, call.x.stride(0)
    x_ptr, return_stats = x.data_ptr(), argmax_bits is not None
    stats = (state.log_prob, state.entropy, state.predicted) if return_stats else (None, None, None)
    args = GatherArgs(
        x_ptr, call.w.data_ptr(), address(call.bias), call.target.data_ptr(), state.order, state.num_live,
        live_x.data_ptr(), slot_target + offset, state.row_shift + offset, row_max_bits + offset, state.flags,
        address(dx), address(loss), None if loss is None else state.lse, *stats, address(argmax_bits), stride,
        call.softcap, start, live_x.shape[0], call.v,
    )  # fmt: skip
    aligned = not (x_ptr | stride * 2) & 15  # each row starts on 16 bytes
    dtypes = x.dtype, call.target.dtype, dtype_of(call.bias), dtype_of(dx)
    call.kernels.launch(args, "lce_gather", call.h, *dtypes, call.softcap > 0, loss is not None, aligned, return_stats)


def launch_rows(
    call: Call, chunk: Chunk, part_sum: Tensor | None = None, part_wsum: Tensor | None = None,
    part_elog: Tensor | None = None, argmax_bits: Tensor | None = None, *, loss: Tensor | None = None,
    scale: bool = False, scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
    coefs: Tensor | None = None, coef_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches `lce_rows`, which computes, depending on the arguments given:

    part_sum (rows, tiles), of each tile of classes: the row statistics loss, lse and row_sum.
    part_elog, argmax_bits: also log_prob, entropy and predicted.
    scale: row_scale, the target entries of exp_logits, and scaled_x = row_scale * live_x.
    coefs: the coefficients of dlogits, and coef_entropy if the entropy has a gradient.
    """
    plan, state, offset, grad_loss = call.plan, call.state, 4 * chunk.start, call.grad_loss
    stats, return_stats = part_sum is not None, part_elog is not None
    exp_logits = chunk.exp_logits if scale else NOT_STORED
    args = RowsArgs(
        state.slot_target + offset, state.order, state.num_live, address(part_sum), address(part_wsum),
        address(part_elog), address(argmax_bits), state.target_logit + offset if stats or scale else None,
        state.row_max_bits + offset, address(call.class_weight), address(call.total_weight), address(loss), state.lse,
        state.row_sum + offset,
        state.log_prob if return_stats else None, state.entropy if return_stats or coef_entropy is not None else None,
        state.predicted if return_stats else None, address(grad_loss), state.inv_divisor, address(call.grad_lse),
        address(call.grad_log_prob), address(call.grad_entropy), address(exp_logits.first), address(exp_logits.second),
        None if scaled_x is None else chunk.live_x.data_ptr(), address(scaled_x),
        state.row_scale + offset if scale else None, address(coefs), address(coef_entropy), address(first_slots),
        call.softcap, plan.z_loss, plan.label_smoothing, *exp_logits.strides, exp_logits.split, call.v,
        part_sum.shape[1] if stats else 0, chunk.start, chunk.rows, address(call.logit_scale),
    )  # fmt: skip
    call.kernels.launch(
        args, "lce_rows", stats, "scale" if scale else "none" if coefs is None else "coefs",
        0 if scaled_x is None else call.h, dtype_of(scaled_x), dtype_of(call.class_weight), plan.label_smoothing > 0,
        scale and call.softcap > 0, "one" if grad_loss is None else "rows" if grad_loss.dim() else "scalar",
        call.grad_lse is not None, exp_logits.second is not None, first_slots is not None, call.logit_scale is not None,
        return_stats, call.grad_log_prob is not None, coef_entropy is not None,
    )  # fmt: skip


Coefs = tuple[Tensor, Tensor | None]  # (m, 4) fp32; coef_entropy, (m,) fp32, if the entropy has a gradient


def compute_coefs(call: Call) -> Coefs:
    """The coefficients of dlogits, for all rows."""
    coefs = matrix(call.x, call.m, 4, F32)
    coef_entropy = None if call.grad_entropy is None else vector(call.x, call.m, F32)
    launch_rows(call, Chunk(0, call.m, None, NOT_STORED), coefs=coefs, coef_entropy=coef_entropy)
    return coefs, coef_entropy


def compute_dlogits(call: Call, start: int, live_x: Tensor, coefs: Coefs, v0: int, v1: int, out: Tensor) -> None:
    """out = dlogits of classes [v0, v1) for the rows of live_x, which are the slots from `start` on."""
    state, smoothing, bias, (coefs, coef_entropy) = call.state, call.plan.label_smoothing > 0, call.bias, coefs
    epilogue = DlogitsArgs(
        None if bias is None else bias.data_ptr() + bias.itemsize * v0,
        address(call.class_weight) if smoothing else None, coefs.data_ptr() + 16 * start, state.slot_target + 4 * start,
        None if coef_entropy is None else coef_entropy.data_ptr() + 4 * start, call.softcap, v0,
        address(call.logit_scale),
    )  # fmt: skip
    call.kernels.dlogits(live_x, call.w[v0:v1], out, epilogue, dtype_of(bias), smoothing, state, start)


# Gradients from exp_logits --------------------------------------------------------------------------------------------


def compute_grads(
    call: Call, chunk: Chunk, grads: Grads, scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
    split_tail: bool = False,
) -> None:  # fmt: skip
    """Writes `grads`; after the first chunk, adds to dw and db. dw comes last, because it modifies exp_logits.

    split_tail: as in LceKernels.dx. first_slots: of `allocate_first_slots`, filled with NO_SLOT.
    """
    state, exp_logits, (dx, dw, db) = call.state, chunk.exp_logits, grads
    row_scale = state.row_scale + 4 * chunk.start
    if dx is not None:
        epilogue = RowsOutArgs(row_scale, state.order)
        call.kernels.dx(exp_logits, call.w, state, chunk.start, dx, False, split_tail, epilogue)
    if db is not None:
        for block, v0, v1 in exp_logits.blocks(call.v):
            compute_db(call, block, row_scale, chunk.start, row_slice(db, v0, v1))
    if dw is not None:
        _compute_dw(call, chunk, scaled_x, dw, first_slots)


def compute_db(call: Call, block: Tensor, row_scale: int | None, start: int, db: Tensor) -> None:
    """db = (+= after the first chunk) the sum of row_scale * block over live rows."""
    n = db.shape[0]
    args = BiasArgs(
        block.data_ptr(), row_scale, db.data_ptr(), call.state.num_live, block.stride(0), start, block.shape[0], n
    )
    call.kernels.launch(args, "lce_bias", block.dtype, row_scale is not None, start > 0, n >= WIDE_BIAS)


def _compute_dw(call: Call, chunk: Chunk, scaled_x: Tensor, dw: Tensor, first_slots: Tensor | None) -> None:
    """dw of the first dw.shape[0] classes.

    The target terms are added in fp32, because they are most of the gradient of a class with few rows.
    """
    (v, h), state, residual_args, residual = dw.shape, call.state, None, None
    separate_targets = first_slots is not None or dw.dtype == F32
    if separate_targets:
        extract_targets(call, chunk, v, first_slots)
    if first_slots is not None:
        residual = matrix(dw, chunk.rows, h, torch.int16)
    for block, v0, v1 in chunk.exp_logits.blocks(v):
        if residual is not None:
            residual_args = ResidualArgs(first_slots.data_ptr() + 4 * v0, residual.data_ptr())
        out = row_slice(dw, v0, v1)
        call.kernels.dw(block, scaled_x, state, chunk.start, out, chunk.start > 0, True, residual=residual_args)
    if separate_targets:
        add_targets(call, chunk, dw, 0, residual)


def allocate_first_slots(call: Call, v: int, dw_dtype: torch.dtype | None) -> Tensor | None:
    """(v,) int32, the first slot of each class, where a 16-bit dw keeps its rounding residual.

    None if the GEMM cannot keep the residual. Then the target entries stay in exp_logits, because adding their terms to
    a rounded dw would be less exact than rounding scaled_x.
    """
    return vector(call.x, v, I32) if call.kernels.keeps_residual and dw_dtype not in (None, F32) else None


def extract_targets(call: Call, chunk: Chunk, v: int, first_slots: Tensor | None = None) -> None:
    """Moves the target entries of exp_logits to state.sorted_grad, and zeroes them in exp_logits.

    Must not directly follow the launch that writes slot_target.
    """
    n, state, exp_logits, offset, index = chunk.rows, call.state, chunk.exp_logits, 4 * chunk.start, None
    if n > MOST_ROWS_COUNTED:
        classes, num_live = state.tensor(state.slot_target + offset, n), state.tensor(state.num_live, 1)
        index = order_by_class(classes, num_live, chunk.start)
    args = SortArgs(
        state.slot_target + offset, state.order, state.num_live, state.row_scale + offset, exp_logits.first.data_ptr(),
        address(exp_logits.second), *exp_logits.strides, exp_logits.split, state.sorted_target + offset,
        state.sorted_row + offset, state.sorted_grad + offset, address(first_slots), address(index), v, chunk.start, n,
    )  # fmt: skip
    call.kernels.launch(args, "lce_sort", exp_logits.second is not None, first_slots is not None, index is not None)


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """A chunk's slots sorted by class with PyTorch's stable sort, dead slots last: (rows,) int64."""
    n = classes.shape[0]
    slots = torch.arange(start, start + n, dtype=I32, device=classes.device)
    return classes.masked_fill(slots >= num_live, torch.iinfo(I32).max).sort(stable=True).indices


def add_targets(call: Call, chunk: Chunk, dw: Tensor, v0: int, residual: Tensor | None = None) -> None:
    """Adds `residual`, then the target terms, to dw (n, h) of classes v0 and up.

    The previous launch may write dw and the residual, but no other argument.
    """
    x, state, offset, stride = call.x, call.state, 4 * chunk.start, call.x.stride(0)
    x_ptr = x.data_ptr()
    args = TargetsArgs(
        x_ptr, state.sorted_target + offset, state.sorted_row + offset, state.sorted_grad + offset, state.num_live,
        dw.data_ptr(), address(residual), stride, v0, v0 + dw.shape[0], chunk.start, chunk.rows,
    )  # fmt: skip
    aligned = not (x_ptr | stride * 2) & 15
    call.kernels.launch(args, "lce_targets", call.h, x.dtype, dw.dtype, aligned, residual is not None)


def add_to_dw_out(
    call: Call, dlogits: Tensor, scaled_x: Tensor, out: Tensor, targets: Chunk | None = None,
    factor: Tensor | None = None,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x, plus the target terms of chunk `targets`. `out`: the user's buffer."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    kernels, state = call.kernels, call.state
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it with TMA
        kernels.dw(dlogits, scaled_x, state, 0, out, True, True, factor)
        if targets is not None:
            add_targets(call, targets, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0, n in kernels.ranges(out.shape[0], 4096):  # bounds the memory of dw
        dw = matrix(scaled_x, n, out.shape[1], F32)
        kernels.dw(dlogits[:, v0 : v0 + n], scaled_x, state, 0, dw, False, True, factor)
        if targets is not None:
            add_targets(call, targets, dw, v0)
        out[v0 : v0 + n].add_(dw)


def common_factor(call: Call) -> tuple[Tensor | None, Call]:
    """(the factor common to all rows, the call without it); (None, call) if rows have gradients of their own.

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So the common factor is applied to the
    fp32 accumulators instead. It includes the largest coefficient of a live row, so that coefficients are at most 1.
    The returned call's inv_divisor points into the factor's memory: keep the factor alive.
    """
    plan, state, weight = call.plan, call.state, call.class_weight
    if call.has_row_grads() or call.grad_loss.dim():
        return None, call
    largest = call.grad_loss.new_ones(())
    if weight is not None:  # only of classes that are targets: other weights may have any value
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
    both = vector(call.x, 2, F32)  # not in the state: a backward that ran out of memory may run again
    torch.mul(state.tensor(state.inv_divisor, 1, F32) * call.grad_loss, largest, out=both[:1])
    torch.reciprocal(largest, out=both[1:])
    return both[:1], call._replace(state=state._replace(inv_divisor=both.data_ptr() + 4), grad_loss=None)


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)
