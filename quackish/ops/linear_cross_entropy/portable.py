"""Linear cross entropy's portable path for torch: a custom operator and autograd around the chunk loop.

`mean` is the sum divided outside of the operator, so it knows only rows and their sum.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.errors import warn_once
from quackish.ops.linear_cross_entropy.checks import Inputs, check_targets
from quackish.reference.linear_cross_entropy import (
    RowOptions,
    accumulate_dtype,
    chunk_of_rows,
    linear_cross_entropy_forward,
    mean_divisor,
    rows_of,
)


class PortablePlan(NamedTuple):
    """Options of a call that are not tensors."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    compute_dtype: torch.dtype
    schedule: str
    chunk_rows: int
    reason: str  # why this path runs, to warn of once; "" for nothing


def run(inputs: Inputs, plan: PortablePlan) -> tuple[Tensor, Tensor]:
    """(loss, lse) of checked arguments."""
    x, w, bias, target, weight, num_items, grad_weight_out = inputs
    flat_target, grad = target.reshape(-1), torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (x, w, bias)]
    summed = plan.reduction != "none"
    loss, lse, *_ = _loop_op(
        x.reshape(-1, x.shape[-1]), w, flat_target, bias, weight, grad_weight_out, None, None, None, plan.ignore_index,
        plan.label_smoothing, plan.softcap, plan.z_loss, plan.chunk_rows, plan.compute_dtype,
        needs if summed and plan.schedule == "chunked" else _NONE, plan.schedule == "stored" and any(needs), summed,
        plan.reason,
    )  # fmt: skip
    if plan.reduction == "mean":
        rows = rows_of(flat_target, w.shape[0], weight, plan.ignore_index, loss.dtype)
        loss = loss / mean_divisor(rows, num_items).detach()
    elif plan.reduction == "none":
        loss = loss.reshape(target.shape)
    return loss, lse.reshape(target.shape)


def run_reference(inputs: Inputs, plan: NamedTuple) -> tuple[Tensor, Tensor]:
    """(loss, lse) of checked arguments, by operations that torch.func and forward-mode AD know: all logits are held.

    `plan` is of either path.
    """
    x, w, bias, target, weight, num_items, _ = inputs
    flat_target = target.reshape(-1)
    if x.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(target):
        check_targets(flat_target, w.shape[0], plan.ignore_index)
    with torch.autocast(x.device.type, enabled=False):
        loss, lse = linear_cross_entropy_forward(
            x.reshape(-1, x.shape[-1]).to(plan.compute_dtype), w.to(plan.compute_dtype), flat_target, linear_bias=bias,
            weight=None if weight is None else weight.detach(), reduction=plan.reduction,
            ignore_index=plan.ignore_index, label_smoothing=plan.label_smoothing, softcap=plan.softcap,
            z_loss=plan.z_loss, num_items=num_items,
        )  # fmt: skip
    return loss.reshape(target.shape) if plan.reduction == "none" else loss, lse.reshape(target.shape)


# The operator and its gradient ----------------------------------------------------------------------------------------

_NONE = [False] * 3


@torch.library.custom_op("quackish::linear_cross_entropy_loop", mutates_args=())
def _loop_op(
    x: Tensor,  # (m, h)
    w: Tensor,  # (v, h)
    target: Tensor,  # (m,)
    bias: Tensor | None,  # (v,)
    class_weight: Tensor | None,  # (v,)
    grad_weight_out: Tensor | None,  # (v, h): here only so that backward gets it
    grad_rows: Tensor | None,  # (m,) gradient of each row's loss; None is 1
    grad_lse: Tensor | None,  # (m,); None is 0
    logits: Tensor | None,  # (m, v) where they were kept
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    needs: list[bool],  # which gradients to compute: of x, w, bias
    keep_logits: bool,
    summed: bool,  # loss is the sum of the rows
    reason: str,  # see PortablePlan
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss () or (m,), lse (m,), dx, dw, db in fp32 (fp64 for fp64), logits; empty where not asked for.

    Forward's gradients are those of the plain sum, in fp32: fp16 gradients of a mean would underflow before a loss
    scale arrives in backward.
    """
    v = w.shape[0]
    if x.device.type == "cpu":
        check_targets(target, v, ignore_index)
    if reason:
        warn_once(reason)
    options, dtype = RowOptions(label_smoothing, softcap, z_loss), accumulate_dtype(compute_dtype)
    # GEMM operands are 16-bit only where torch's GEMM delivers fp32 from them, which is CUDA's.
    gemm_dtype = compute_dtype if x.device.type == "cuda" and torch.version.hip is None else dtype
    w = w.to(compute_dtype).to(gemm_dtype)
    w = w if 1 in w.stride() else w.contiguous()  # else each chunk's GEMM would make its own copy
    bias, class_weight = (None if t is None else t.to(dtype) for t in (bias, class_weight))
    rows = rows_of(target, v, class_weight, ignore_index, dtype)
    loss, lse, dx, dw, db, kept = _outputs(x, w, dtype, needs, keep_logits)
    dw.zero_()
    db.zero_()

    def run(part: slice) -> None:
        # A function: what a chunk allocates is gone before the next one allocates.
        # An ignored row of x is zeroed, or its NaN would reach dw as 0 * NaN.
        chunk_x = x[part].masked_fill(~rows.live[part, None], 0.0).to(compute_dtype).to(gemm_dtype)
        if logits is not None:
            z = logits[part].clone()
        else:
            z = loss.new_empty((chunk_x.shape[0], v))
            mm(chunk_x, w.t(), out=z)
            if bias is not None:
                z.add_(bias)
        if keep_logits:
            kept[part] = z
        grads = (None if t is None else t[part] for t in (grad_rows, grad_lse))
        loss[part], lse[part], dlogits = chunk_of_rows(z, rows[part], class_weight, options, any(needs), *grads)
        if needs[2]:
            db.add_(dlogits.sum(0))
        if needs[0] or needs[1]:
            dlogits = dlogits.to(gemm_dtype)
        if needs[0]:
            mm(dlogits, w, out=dx[part])
        if needs[1]:
            addmm(dlogits.t(), chunk_x, out=dw)

    # Operators run with the caller's autocast on; it would round the fp32 operands here.
    with torch.autocast(x.device.type, enabled=False):
        for start in range(0, x.shape[0], chunk_rows):
            run(slice(start, start + chunk_rows))
    return loss.sum() if summed else loss, lse, dx, dw, db, kept


def _outputs(x: Tensor, w: Tensor, dtype: torch.dtype, needs: list[bool], keep_logits: bool) -> tuple[Tensor, ...]:
    """Memory for the losses of the rows, lse, dx, dw, db and the kept logits."""
    (m, h), v = x.shape, w.shape[0]
    wanted = True, True, *needs, keep_logits
    shapes = (m,), (m,), (m, h), (v, h), (v,), (m, v)
    return tuple(x.new_empty(s if want else 0, dtype=dtype) for s, want in zip(shapes, wanted, strict=True))


@_loop_op.register_fake
def _(x, w, target, *args):
    *_, compute_dtype, needs, keep_logits, summed, _ = args
    loss, *others = _outputs(x, w, accumulate_dtype(compute_dtype), needs, keep_logits)
    return loss.new_empty(()) if summed else loss, *others


def _setup_context(ctx, inputs, output) -> None:
    # grad_weight_out is not saved: another graph's backward may add to it first, which is no error here
    *tensors, ctx.grad_weight_out = inputs[:6]
    *ctx.options, ctx.made, ctx.kept, ctx.summed, _ = inputs[9:]
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _scaled(unit: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """unit * factor in `dtype`, rounded once and in one pass; `unit` is not written: a second backward wants it."""
    if factor is None:
        return unit.to(dtype)
    return torch.mul(unit, factor, out=torch.empty_like(unit, dtype=dtype))


def _backward(ctx, grad_loss, grad_lse, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("linear_cross_entropy: create_graph=True (double backward) is not supported")
    grads = [None] * 19
    if grad_loss is None and grad_lse is None:
        return tuple(grads)
    x, w, target, bias, class_weight, *made, logits = ctx.saved_tensors
    needs = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    factor, grad_rows = None, None
    if ctx.summed and grad_lse is None:
        factor = grad_loss
    else:
        grad_rows = torch.zeros_like(grad_lse) if grad_loss is None else grad_loss.expand(target.shape)
    if factor is None or not any(ctx.made):
        _, _, *made, _ = _loop_op(
            x, w, target, bias, class_weight, None, grad_rows, grad_lse, logits if ctx.kept else None, *ctx.options,
            needs, False, False, "",
        )  # fmt: skip
    if needs[1] and ctx.grad_weight_out is not None:
        if factor is None:
            ctx.grad_weight_out.add_(made[1])
        else:
            ctx.grad_weight_out.addcmul_(made[1], factor)
        needs[1] = False
    for i, need, grad, of in zip((0, 1, 3), needs, made, (x, w, bias), strict=True):
        if need:
            grads[i] = _scaled(grad, factor, of.dtype)
    return tuple(grads)


_loop_op.register_autograd(_backward, setup_context=_setup_context)


# GEMMs ----------------------------------------------------------------------------------------------------------------


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, in out's dtype from the accumulator on."""
    torch.mm(a, b, out=out) if a.dtype == out.dtype else torch.mm(a, b, out_dtype=out.dtype, out=out)


def addmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, inside of the GEMM: no second buffer of out's size."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
