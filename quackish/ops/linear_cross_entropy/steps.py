"""The steps of linear cross entropy's schedules, each one or a few launches. schedules.py explains the terms."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import address, dtype_of
from quackish.device.modes import check_memory
from quackish.ops.linear_cross_entropy.buffers import F32, I32, NOT_STORED, ExpLogits, row_slice
from quackish.ops.linear_cross_entropy.calls import Call, Chunk, GradOutputs, Grads, GradsNeeded
from quackish.ops.linear_cross_entropy.gemm_problems import DlogitsArgs, ResidualArgs, RowsOutArgs, SoftmaxArgs
from quackish.ops.linear_cross_entropy.layout import Layout
from quackish.ops.linear_cross_entropy.row_problems import (
    MOST_ROWS_COUNTED,
    WIDE_BIAS,
    BiasArgs,
    GatherArgs,
    GradsArgs,
    LceBiasProblem,
    LceGatherProblem,
    LceRowsProblem,
    LceSortProblem,
    LceTargetsProblem,
    LossArgs,
    RowsArgs,
    SortArgs,
    StatsArgs,
    TargetsArgs,
)

# Logits and row statistics --------------------------------------------------------------------------------------------


def start_forward(call: Call) -> Tensor:
    """Lists the live rows. Returns an (m,) fp32 buffer for the rows' losses."""
    plan = call.plan
    call.kernels.compact(
        call.target, call.class_weight, call.num_items, plan.ignore_index, call.v, plan.reduction == "mean", call.state
    )
    return call.device.vector(call.m, F32)


def allocate_grads(call: Call, needed: GradsNeeded, owns_dw: bool = True) -> Grads:
    """Buffers for the gradients; for dw only with `owns_dw`."""
    m, h, v, device = call.m, call.h, call.v, call.device
    return Grads(
        device.matrix(m, h, needed.dx) if needed.dx else None,
        device.matrix(v, h, needed.dw) if needed.dw and owns_dw else None,
        device.vector(v, F32) if needed.db else None,
    )


def allocate_live_x(call: Call, rows: int) -> Tensor:
    return call.device.matrix(min(rows, call.m), call.h, call.x.dtype)


def chunks(
    call: Call, layout: Layout, live_x: Tensor, exp_logits: ExpLogits = NOT_STORED, first: int = 0
) -> Iterator[Chunk]:
    """The chunks of the slots from `first` on, in order. They share the same buffers."""
    for start, rows in call.kernels.ranges(call.m - first, layout.chunk_rows):
        yield Chunk(first + start, rows, row_slice(live_x, 0, rows), exp_logits.rows(rows))


class PartialSums(NamedTuple):
    """What the logits GEMM computes for `launch_rows`: sums per row and tile of classes, and each row's argmax."""

    part_sum: Tensor  # (rows, tiles) fp32
    part_wsum: Tensor | None  # as part_sum; with label smoothing
    part_elog: Tensor | None  # as part_sum; with return_stats
    argmax_bits: Tensor | None  # (rows,) int64; with return_stats


def compute_loss(
    call: Call, chunk: Chunk, loss: Tensor, dx: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
) -> None:  # fmt: skip
    """Computes chunk.live_x, chunk.exp_logits and the row statistics. `scale` and later arguments: of `launch_rows`.

    Zeroes the outputs and dx of the chunk's ignored rows.
    """
    kernels, plan, parts, offset = call.kernels, call.plan, call.state.parts, 4 * chunk.start
    device, rows, tiles, smoothing = call.device, chunk.rows, kernels.num_tiles(call.v), plan.label_smoothing > 0
    sums = by_name(PartialSums)(
        part_sum=device.matrix(rows, tiles, F32),
        part_wsum=device.matrix(rows, tiles, F32) if smoothing else None,
        part_elog=device.matrix(rows, tiles, F32) if plan.return_stats else None,
        argmax_bits=device.vector(rows, torch.int64) if plan.return_stats else None,
    )
    gather(call, chunk, loss, dx, sums.argmax_bits)
    epilogue = by_name(SoftmaxArgs)(
        bias=address(call.bias), class_weight=address(call.class_weight) if smoothing else None,
        row_shift=parts.row_shift + offset, slot_target=parts.slot_target + offset,
        row_max_bits=parts.row_max_bits + offset, flags=parts.flags, part_sum=sums.part_sum.data_ptr(),
        target_logit=parts.target_logit + offset, part_wsum=address(sums.part_wsum), part_elog=address(sums.part_elog),
        argmax_bits=address(sums.argmax_bits), softcap=call.softcap, tiles=tiles, logit_scale=address(call.logit_scale),
    )  # fmt: skip
    kernels.logits(chunk.live_x, call.w, chunk.exp_logits, epilogue, call.fields, call.state, chunk.start)
    launch_rows(call, chunk, sums, loss=loss, scale=scale, scaled_x=scaled_x, first_slots=first_slots)


def gather(call: Call, chunk: Chunk, loss: Tensor, dx: Tensor | None, argmax_bits: Tensor | None) -> None:
    x = call.x
    args = by_name(GatherArgs)(
        state=call.state.address, x=x.data_ptr(), live_x=chunk.live_x.data_ptr(), w=call.w.data_ptr(),
        bias=address(call.bias), target=call.target.data_ptr(), dx=address(dx), loss=loss.data_ptr(),
        argmax_bits=address(argmax_bits), x_stride=x.stride(0), softcap=call.softcap, m=call.m, start=chunk.start,
        rows=chunk.rows, v=call.v,
    )  # fmt: skip
    call.kernels.launch(args, LceGatherProblem, call.fields, dx_dtype=dtype_of(dx))


def regather_live_x(call: Call, start: int, live_x: Tensor) -> None:
    """Gathers the rows of x of slots `start` and up into live_x."""
    x = call.x
    args = by_name(GatherArgs)(
        state=call.state.address, x=x.data_ptr(), live_x=live_x.data_ptr(), x_stride=x.stride(0), softcap=0.0,
        m=call.m, start=start, rows=live_x.shape[0], v=call.v,
    )  # fmt: skip
    call.kernels.launch(
        args, LceGatherProblem, h=call.h, dtype=x.dtype, only_live_x=True, x_aligned=call.fields.x_aligned
    )


def launch_rows(
    call: Call, chunk: Chunk, sums: PartialSums | None = None, *, loss: Tensor | None = None, scale: bool = False,
    scaled_x: Tensor | None = None, first_slots: Tensor | None = None, coefs: Tensor | None = None,
    coef_entropy: Tensor | None = None,
) -> None:  # fmt: skip
    """Launches `lce_rows`, which computes, depending on the arguments given:

    sums: the row statistics loss, lse and row_sum; with return_stats also log_prob, entropy and predicted.
    scale: row_scale, the target entries of exp_logits, and scaled_x = row_scale * live_x.
    coefs: the coefficients of dlogits, and coef_entropy if the entropy has a gradient.
    """
    plan, state, grads, stats_args, grads_args = call.plan, call.state, call.grad_outputs, None, None
    options = by_name(LossArgs)(
        class_weight=address(call.class_weight), total_weight=address(call.total_weight),
        logit_scale=address(call.logit_scale), softcap=call.softcap, z_loss=plan.z_loss,
        label_smoothing=plan.label_smoothing, inv_divisor=state.parts.inv_divisor,
    )  # fmt: skip
    if sums is not None:
        stats_args = by_name(StatsArgs)(
            part_sum=sums.part_sum.data_ptr(), part_wsum=address(sums.part_wsum), part_elog=address(sums.part_elog),
            argmax_bits=address(sums.argmax_bits), loss=loss.data_ptr(),
        )  # fmt: skip
    if grads.loss is not None:
        grads_args = by_name(GradsArgs)(
            loss=grads.loss.data_ptr(), lse=address(grads.lse), log_prob=address(grads.log_prob),
            entropy=address(grads.entropy),
        )  # fmt: skip
    args = by_name(RowsArgs)(
        state=state.address, options=options, stats=stats_args, grads=grads_args,
        exp_logits=chunk.exp_logits.args() if scale else None,
        live_x=None if scaled_x is None else chunk.live_x.data_ptr(), scaled_x=address(scaled_x), coefs=address(coefs),
        coef_entropy=address(coef_entropy), first_slot_of_class=address(first_slots), v=call.v,
        tiles=0 if sums is None else sums.part_sum.shape[1], m=call.m, start=chunk.start, rows=chunk.rows,
    )  # fmt: skip
    fields, scales_x = call.fields, scaled_x is not None
    call.kernels.launch(
        args, LceRowsProblem, fields, stats=sums is not None,
        grads="scale" if scale else "none" if coefs is None else "coefs", h=call.h if scales_x else 0,
        dtype=fields.dtype if scales_x else None, label_smoothing=fields.smoothing, softcap=scale and fields.softcap,
        exp_logits_split=scale and chunk.exp_logits.second is not None, first_slot_of_class=first_slots is not None,
        return_stats=sums is not None and fields.return_stats,
        grad_loss="one" if grads.loss is None else "rows" if grads.loss.dim() else "scalar",
        grad_lse=grads.lse is not None, grad_log_prob=grads.log_prob is not None,
        grad_entropy=coef_entropy is not None,
    )  # fmt: skip


Coefs = tuple[Tensor, Tensor | None]  # (m, 4) fp32; coef_entropy, (m,) fp32, if the entropy has a gradient


def compute_coefs(call: Call) -> Coefs:
    """The coefficients of dlogits, for all rows."""
    coefs = call.device.matrix(call.m, 4, F32)
    coef_entropy = None if call.grad_outputs.entropy is None else call.device.vector(call.m, F32)
    launch_rows(call, Chunk(0, call.m, None, NOT_STORED), coefs=coefs, coef_entropy=coef_entropy)
    return coefs, coef_entropy


def compute_dlogits(call: Call, start: int, live_x: Tensor, coefs: Coefs, v0: int, v1: int, out: Tensor) -> None:
    """out = dlogits of classes [v0, v1) for the rows of live_x, which are the slots from `start` on."""
    bias, (coefs, coef_entropy) = call.bias, coefs
    epilogue = by_name(DlogitsArgs)(
        bias=None if bias is None else bias.data_ptr() + bias.itemsize * v0,
        class_weight=address(call.class_weight) if call.plan.label_smoothing > 0 else None,
        coefs=coefs.data_ptr() + 16 * start, slot_target=call.state.parts.slot_target + 4 * start,
        coef_entropy=None if coef_entropy is None else coef_entropy.data_ptr() + 4 * start, softcap=call.softcap, v0=v0,
        logit_scale=address(call.logit_scale),
    )  # fmt: skip
    call.kernels.dlogits(live_x, call.w[v0:v1], out, epilogue, call.fields, call.state, start)


# Gradients from exp_logits --------------------------------------------------------------------------------------------


def compute_grads(
    call: Call, chunk: Chunk, grads: Grads, scaled_x: Tensor | None = None, first_slots: Tensor | None = None,
    split_tail: bool = False,
) -> None:  # fmt: skip
    """Writes `grads`; after the first chunk, adds to dw and db. dw comes last, because it modifies exp_logits.

    split_tail: as in LceKernels.dx. first_slots: of `allocate_first_slots`, filled with NO_SLOT.
    """
    state, exp_logits, (dx, dw, db) = call.state, chunk.exp_logits, grads
    row_scale = state.parts.row_scale + 4 * chunk.start
    if dx is not None:
        epilogue = by_name(RowsOutArgs)(row_scale=row_scale, order=state.parts.order)
        call.kernels.dx(exp_logits, call.w, state, chunk.start, dx, False, split_tail, epilogue)
    if db is not None:
        for block, v0, v1 in exp_logits.blocks(call.v):
            compute_db(call, block, row_scale, chunk.start, row_slice(db, v0, v1))
    if dw is not None:
        _compute_dw(call, chunk, scaled_x, dw, first_slots)


def compute_db(call: Call, block: Tensor, row_scale: int | None, start: int, db: Tensor) -> None:
    """db = (+= after the first chunk) the sum of row_scale * block over live rows."""
    n = db.shape[0]
    args = by_name(BiasArgs)(
        exp_logits=block.data_ptr(), row_scale=row_scale, db=db.data_ptr(), num_live=call.state.parts.num_live,
        exp_logits_stride=block.stride(0), start=start, rows=block.shape[0], n=n,
    )  # fmt: skip
    call.kernels.launch(
        args,
        LceBiasProblem,
        dtype=block.dtype,
        row_scale=row_scale is not None,
        accumulate=start > 0,
        wide=n >= WIDE_BIAS,
    )


def _compute_dw(call: Call, chunk: Chunk, scaled_x: Tensor, dw: Tensor, first_slots: Tensor | None) -> None:
    """dw of the first dw.shape[0] classes.

    The target terms are added in fp32, because they are most of the gradient of a class with few rows.
    """
    (v, h), state, kept, residual = dw.shape, call.state, None, None
    separate_targets = first_slots is not None or dw.dtype == F32
    if separate_targets:
        extract_targets(call, chunk, v, first_slots)
    if first_slots is not None:
        residual = call.device.matrix(chunk.rows, h, torch.int16)
    for block, v0, v1 in chunk.exp_logits.blocks(v):
        if residual is not None:
            kept = by_name(ResidualArgs)(
                first_slot_of_class=first_slots.data_ptr() + 4 * v0, rounding_residual=residual.data_ptr()
            )
        out = row_slice(dw, v0, v1)
        call.kernels.dw(block, scaled_x, state, chunk.start, out, chunk.start > 0, True, residual=kept)
    if separate_targets:
        add_targets(call, chunk, dw, 0, residual)


def allocate_first_slots(call: Call, v: int, dw_dtype: torch.dtype | None) -> Tensor | None:
    """(v,) int32, the first slot of each class, where a 16-bit dw keeps its rounding residual.

    None for an fp32 dw, of which rounding drops nothing, and without dw.
    """
    return call.device.vector(v, I32) if dw_dtype not in (None, F32) else None


def extract_targets(call: Call, chunk: Chunk, v: int, first_slots: Tensor | None = None) -> None:
    """Moves the target entries of exp_logits to state.sorted_grad, and zeroes them in exp_logits.

    Must not directly follow the launch that writes slot_target.
    """
    n, state, exp_logits, index = chunk.rows, call.state, chunk.exp_logits, None
    if n > MOST_ROWS_COUNTED:
        classes = state.tensor("slot_target")[chunk.start : chunk.start + n]
        index = order_by_class(classes, state.tensor("num_live", 1), chunk.start)
    args = by_name(SortArgs)(
        state=state.address, exp_logits=exp_logits.args(), first_slot_of_class=address(first_slots),
        index=address(index), v=v, m=call.m, start=chunk.start, rows=n,
    )  # fmt: skip
    call.kernels.launch(
        args, LceSortProblem, exp_logits_split=exp_logits.second is not None,
        first_slot_of_class=first_slots is not None, presorted=index is not None,
    )  # fmt: skip


def order_by_class(classes: Tensor, num_live: Tensor, start: int) -> Tensor:
    """A chunk's slots sorted by class with PyTorch's stable sort, dead slots last: (rows,) int64."""
    n = classes.shape[0]
    slots = torch.arange(start, start + n, dtype=I32, device=classes.device)
    return classes.masked_fill(slots >= num_live, torch.iinfo(I32).max).sort(stable=True).indices


def add_targets(call: Call, chunk: Chunk, dw: Tensor, v0: int, residual: Tensor | None = None) -> None:
    """Adds `residual`, then the target terms, to dw (n, h) of classes v0 and up.

    The previous launch may write dw and the residual, but no other argument.
    """
    x = call.x
    args = by_name(TargetsArgs)(
        state=call.state.address, x=x.data_ptr(), dw=dw.data_ptr(), rounding_residual=address(residual),
        x_stride=x.stride(0), v0=v0, v1=v0 + dw.shape[0], m=call.m, start=chunk.start, rows=chunk.rows,
    )  # fmt: skip
    call.kernels.launch(
        args, LceTargetsProblem, h=call.h, dtype=x.dtype, dw_dtype=dw.dtype, x_aligned=call.fields.x_aligned,
        rounding_residual=residual is not None,
    )  # fmt: skip


def add_to_dw_out(
    call: Call, dlogits: Tensor, scaled_x: Tensor, out: Tensor, targets: Chunk | None = None,
    factor: Tensor | None = None, start: int = 0,
) -> None:  # fmt: skip
    """out += factor * dlogits.T @ scaled_x of slots `start` on, plus target terms of `targets`. out: the user's."""
    if not out.is_meta:
        check_memory("linear_cross_entropy", grad_weight_out=out)
    kernels, state = call.kernels, call.state
    dense = out.is_contiguous() and out.stride(0) == out.shape[1]  # a single row is contiguous with any stride
    if out.dtype == F32 and dense and out.data_ptr() % 16 == 0:  # the GEMM can add to it with TMA
        kernels.dw(dlogits, scaled_x, state, start, out, True, True, factor)
        if targets is not None:
            add_targets(call, targets, out, 0)
        torch.autograd.graph.increment_version(out)
        return
    for v0, n in kernels.ranges(out.shape[0], 4096):  # bounds the memory of dw
        dw = call.device.matrix(n, out.shape[1], F32)
        kernels.dw(dlogits[:, v0 : v0 + n], scaled_x, state, start, dw, False, True, factor)
        if targets is not None:
            add_targets(call, targets, dw, v0)
        out[v0 : v0 + n].add_(dw)


def common_factor(call: Call) -> tuple[Tensor | None, Call]:
    """(the factor common to all rows, the call without it); (None, call) if rows have gradients of their own.

    In fp16, p - onehot divided by the number of rows would be mostly subnormal. So the common factor is applied to the
    fp32 accumulators instead. It includes the largest coefficient of a live row, so that coefficients are at most 1.
    The returned call's inv_divisor points into the factor's memory: keep the factor alive.
    """
    plan, state, weight, grad_loss = call.plan, call.state, call.class_weight, call.grad_outputs.loss
    if call.grad_outputs.has_row_grads() or grad_loss.dim():
        return None, call
    largest = grad_loss.new_ones(())
    if weight is not None:  # only of classes that are targets: other weights may have any value
        target = state.tensor("slot_target")
        weights = weight[target.clamp(0, weight.shape[0] - 1).long()].abs().masked_fill(target < 0, 0.0)
        largest = _finite(weights).amax()
        if plan.label_smoothing:
            spread = plan.label_smoothing / call.v
            largest = torch.maximum(largest, spread * _finite(weight.abs()).amax())
    if plan.z_loss:
        lse = state.tensor("lse")
        largest = torch.maximum(largest, 2 * plan.z_loss * _finite(lse.abs()).amax())
    if call.logit_scale is not None:
        largest = largest * call.logit_scale
    largest = largest.clamp(min=torch.finfo(F32).tiny).view(1)
    both = call.device.vector(2, F32)  # not in the state: a backward that ran out of memory may run again
    torch.mul(state.tensor("inv_divisor", 1) * grad_loss, largest, out=both[:1])
    torch.reciprocal(largest, out=both[1:])
    state = state._replace(parts=state.parts._replace(inv_divisor=both.data_ptr() + 4))
    return both[:1], call._replace(state=state, grad_outputs=GradOutputs())


def _finite(t: Tensor) -> Tensor:
    return t.nan_to_num(0.0, 0.0, 0.0)
