"""The portable path of linear cross entropy: plain PyTorch, one chunk of rows at a time."""

from typing import Any

import torch
from torch import Tensor

from quackish.errors import warn_once
from quackish.ops.linear_cross_entropy.calls import Call, ForwardGrads, Grads, GradsNeeded, Saved, reshaped
from quackish.ops.linear_cross_entropy.checks import check_targets
from quackish.ops.linear_cross_entropy.reference import (
    Rows,
    chunk_of_rows,
    linear_cross_entropy_forward,
    mean_divisor,
    rows_of,
)
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward
from quackish.ops.shared.matmul import accumulate_dtype, mm, operand_dtype


def forward(call: Call) -> tuple[list[Tensor], Saved, ForwardGrads]:
    """(the call's outputs, what backward needs, gradients).

    The gradients are of the undivided sum, in fp32 (fp64 for fp64): fp16 gradients of a mean would underflow before
    backward applies the loss scale.
    """
    inputs, plan, needed, shape = call.inputs, call.plan, call.needed, call.inputs.target.shape
    x, target, v = inputs.input, inputs.target.reshape(-1), inputs.linear_weight.shape[0]
    if x.device.type == "cpu":
        check_targets(target, v, plan.ignore_index)
    if plan.why_portable:
        warn_once(plan.why_portable)
    dtype = accumulate_dtype(plan.compute_dtype)
    rows, divisor = rows_of(target, v, inputs.weight, plan.ignore_index, dtype), None
    keeps = plan.schedule == "stored" and needed.any()
    logits = x.new_empty((target.numel(), v), dtype=dtype) if keeps else None
    loss, stats, grads = _loop(call, grads_in_forward(plan, needed), rows, logits_out=logits)
    if plan.reduction != "none":
        loss = loss.sum()
    if plan.reduction == "mean":
        divisor = mean_divisor(rows, inputs.num_items)
        loss = loss / divisor
    outputs = [reshaped(loss, shape) if loss.dim() else loss, *(reshaped(t, shape) for t in stats)]
    return outputs[: call.num_outputs()], Saved(divisor, None, logits), ForwardGrads(grads)


def backward(call: Call, saved: Saved) -> Grads:
    """The gradients. dw is added to grad_weight_out if given."""
    inputs, plan, dtype, all_grads = call.inputs, call.plan, accumulate_dtype(call.plan.compute_dtype), ()
    target, (grad_loss, *row_grads), divisor = inputs.target.reshape(-1), call.grad_outputs, saved.state
    row_grads = [None if grad is None else grad.reshape(-1) for grad in row_grads]
    first = next((grad for grad in row_grads if grad is not None), None)
    if divisor is not None and grad_loss is not None:
        grad_loss = grad_loss / divisor
    is_scalar = first is None and plan.reduction != "none"  # one factor for all rows: applied at the end
    if not is_scalar:
        grad_loss = first.new_zeros(()) if grad_loss is None else grad_loss
        all_grads = grad_loss.reshape(-1).expand(target.shape), *row_grads
    rows = rows_of(target, inputs.linear_weight.shape[0], inputs.weight, plan.ignore_index, dtype)
    call = call._replace(plan=plan._replace(return_stats=False))
    _, _, grads = _loop(call, call.needed, rows, all_grads, saved.exp_logits)
    for grad in grads:
        if is_scalar and grad is not None:
            grad.mul_(grad_loss)
    return grads.with_dw_added_to(inputs.grad_weight_out)


def _loop(
    call: Call,
    needed: GradsNeeded,
    rows: Rows,
    grad_outputs: tuple[Tensor | None, ...] = (),  # (m,) gradients of each row's loss, lse, log_prob and entropy
    logits: Tensor | None = None,  # (m, v), kept by forward
    logits_out: Tensor | None = None,  # (m, v), written
) -> tuple[Tensor, list[Tensor], Grads]:
    """The rows' losses, statistics, and the gradients; without `grad_outputs`, of the sum of the losses."""
    inputs, plan, device_type = call.inputs, call.plan, call.device.type
    (x, w, bias), weight = inputs.parameters(), inputs.weight
    m, (v, h), dtype = rows.ignored.numel(), w.shape, accumulate_dtype(plan.compute_dtype)
    gemm_dtype = operand_dtype(plan.compute_dtype, device_type)
    x, w = x.reshape(-1, h), w.to(plan.compute_dtype).to(gemm_dtype)
    w = w if 1 in w.stride() else w.contiguous()  # copy once instead of in each chunk's GEMM
    bias, weight = (None if t is None else t.to(dtype) for t in (bias, weight))
    loss = x.new_empty(m, dtype=dtype)
    dtypes = (dtype, dtype, dtype, torch.int64) if plan.return_stats else (dtype,)
    stats = [x.new_empty(m, dtype=d) for d in dtypes]
    grads = dx, dw, db = Grads(
        x.new_empty((m, h), dtype=dtype) if needed.dx else None,
        (x.new_empty if m else x.new_zeros)((v, h), dtype=dtype) if needed.dw else None,  # the first chunk writes it
        x.new_zeros(v, dtype=dtype) if needed.db else None,
    )

    def run_chunk(chunk: slice) -> None:
        # A function, so that a chunk's memory is freed before the next chunk.
        # Zero ignored rows of x: their NaNs would reach dw as 0 * NaN.
        chunk_x = x[chunk].masked_fill(rows.ignored[chunk, None], 0.0).to(plan.compute_dtype).to(gemm_dtype)
        if logits is not None:
            z = logits[chunk].clone()
        else:
            z = x.new_empty((chunk_x.shape[0], v), dtype=dtype)
            mm(chunk_x, w.t(), out=z)
            if bias is not None:
                z.add_(bias)
        if logits_out is not None:
            logits_out[chunk] = z
        chunk_grad_outputs = (None if t is None else t[chunk] for t in grad_outputs)
        loss[chunk], chunk_stats, dlogits = chunk_of_rows(
            z, rows[chunk], weight, plan.label_smoothing, plan.softcap, plan.z_loss, inputs.logit_scale, needed.any(),
            *chunk_grad_outputs, return_stats=plan.return_stats,
        )  # fmt: skip
        for values, chunk_values in zip(stats, chunk_stats, strict=True):
            values[chunk] = chunk_values
        if db is not None:
            db.add_(dlogits.sum(0))
        if dx is not None or dw is not None:
            dlogits = dlogits.to(gemm_dtype)
        if dx is not None:
            mm(dlogits, w, out=dx[chunk])
        if dw is not None:
            (addmm if chunk.start else mm)(dlogits.t(), chunk_x, out=dw)

    # Operators run under the caller's autocast, which would round the fp32 operands.
    with torch.autocast(device_type, enabled=False):
        for start in range(0, m, plan.chunk_rows):
            run_chunk(slice(start, start + plan.chunk_rows))
    return loss, stats, grads


def run_full_logits(call: Call) -> tuple[Tensor, ...]:
    """The outputs from full logits, with operations that torch.func and forward-mode AD support."""
    inputs, plan = call.inputs, call.plan
    (x, w, bias), target, weight = inputs.parameters(), inputs.target, inputs.weight
    flat_target = target.reshape(-1)
    if x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(target):
        check_targets(flat_target, w.shape[0], plan.ignore_index)
    with torch.autocast(x.device.type, enabled=False):
        loss, stats = linear_cross_entropy_forward(
            x.reshape(-1, x.shape[-1]).to(plan.compute_dtype), w.to(plan.compute_dtype), flat_target, linear_bias=bias,
            weight=weight, reduction=plan.reduction,
            ignore_index=plan.ignore_index, label_smoothing=plan.label_smoothing, softcap=plan.softcap,
            logit_scale=inputs.logit_scale, z_loss=plan.z_loss, num_items=inputs.num_items,
            return_stats=plan.return_stats,
        )  # fmt: skip
    per_row: Any = stats if plan.return_stats else (stats,)
    loss = loss.reshape(target.shape) if plan.reduction == "none" else loss
    return (loss, *(t.reshape(target.shape) for t in per_row))[: call.num_outputs()]


def addmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b in the GEMM, without a second buffer."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    elif a.device.type == "cpu":  # as in `mm`
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
