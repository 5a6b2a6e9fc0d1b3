"""Linear cross entropy's portable path for torch: custom operators and autograd around the chunk loop.

`mean` is the sum divided outside of the operators, so they know only "none" and "sum".
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.errors import warn_once
from quackish.ops.linear_cross_entropy_checks import check_targets
from quackish.ops.linear_cross_entropy_chunks import ChunkLoop
from quackish.reference.linear_cross_entropy import (
    RowOptions,
    accumulate_dtype,
    linear_cross_entropy_forward,
    mean_divisor,
    rows_of,
)


class Plan(NamedTuple):
    """Everything but the tensors."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    schedule: str
    chunk_rows: int
    compute_dtype: torch.dtype
    reason: str  # why this path runs, to warn of once; "" for nothing


def run(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    num_items: int | Tensor | None,
    grad_weight_out: Tensor | None,
    plan: Plan,
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of checked arguments."""
    x = input.reshape(-1, input.shape[-1])
    flat_target = target.reshape(-1)
    grad = torch.is_grad_enabled()
    loss, lse = _forward_op(
        x,
        linear_weight,
        flat_target,
        linear_bias,
        weight,
        grad_weight_out,
        plan.ignore_index,
        plan.label_smoothing,
        plan.softcap,
        plan.z_loss,
        "none" if plan.reduction == "none" else "sum",
        plan.schedule,
        plan.chunk_rows,
        plan.compute_dtype,
        [grad and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)],
        plan.reason,
    )[:2]
    if plan.reduction == "mean":
        rows = rows_of(flat_target, linear_weight.shape[0], weight, plan.ignore_index, loss.dtype)
        loss = loss / mean_divisor(rows, num_items).detach()
    elif plan.reduction == "none":
        loss = loss.reshape(target.shape)
    return loss, lse.reshape(target.shape)


def run_reference(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    num_items: int | Tensor | None,
    plan: NamedTuple,  # of either path
) -> tuple[Tensor, Tensor]:
    """(loss, lse) of checked arguments, by operations that torch.func and forward-mode AD know: all logits are held."""
    x, flat_target = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    if input.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(target):
        check_targets(flat_target, linear_weight.shape[0], plan.ignore_index)
    with torch.autocast(input.device.type, enabled=False):
        loss, lse = linear_cross_entropy_forward(
            x.to(plan.compute_dtype),
            linear_weight.to(plan.compute_dtype),
            flat_target,
            linear_bias=linear_bias,
            weight=None if weight is None else weight.detach(),
            reduction=plan.reduction,
            ignore_index=plan.ignore_index,
            label_smoothing=plan.label_smoothing,
            softcap=plan.softcap,
            z_loss=plan.z_loss,
            num_items=num_items,
        )
    return loss.reshape(target.shape) if plan.reduction == "none" else loss, lse.reshape(target.shape)


# --- operators ---


@torch.library.custom_op("quackish::linear_cross_entropy_fwd", mutates_args=())
def _forward_op(
    x: Tensor,  # (m, h)
    w: Tensor,  # (v, h)
    target: Tensor,  # (m,)
    bias: Tensor | None,  # (v,)
    class_weight: Tensor | None,  # (v,)
    grad_weight_out: Tensor | None,  # (v, h): here only so that backward gets it
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    reduction: str,  # "none" or "sum"
    schedule: str,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    needs: list[bool],  # of x, w, bias: who asks for a gradient
    reason: str,  # see Plan
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss () or (m,), lse (m,), then what backward starts from, empty where it does not: unit dx, dw, db, logits.

    "Unit" gradients are those of the plain sum, unscaled and in fp32: fp16 gradients of a mean would underflow before
    a loss scale arrives in backward.
    """
    if x.device.type == "cpu":
        check_targets(target, w.shape[0], ignore_index)
    if reason:
        warn_once(reason)
    now = needs if _gradients_in_forward(schedule, reduction) else [False] * 3
    options = RowOptions(label_smoothing, softcap, z_loss)
    loop = ChunkLoop(x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, now)
    keep = schedule == "stored" and any(needs)
    logits = loop.loss.new_empty((x.shape[0], w.shape[0]) if keep else 0)
    loop.run(keep_logits_in=logits if keep else None)
    return loop.loss.sum() if reduction == "sum" else loop.loss, loop.lse, loop.dx, loop.dw, loop.db, logits


def _gradients_in_forward(schedule: str, reduction: str) -> bool:
    return schedule == "chunked" and reduction == "sum"


@_forward_op.register_fake
def _(
    x,
    w,
    target,
    bias,
    class_weight,
    grad_weight_out,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    reduction,
    schedule,
    chunk_rows,
    compute_dtype,
    needs,
    reason,
):
    (m, h), v, dtype = x.shape, w.shape[0], accumulate_dtype(compute_dtype)
    now = needs if _gradients_in_forward(schedule, reduction) else [False] * 3
    return (
        x.new_empty(() if reduction == "sum" else (m,), dtype=dtype),
        x.new_empty(m, dtype=dtype),
        x.new_empty((m, h) if now[0] else 0, dtype=dtype),
        x.new_empty((v, h) if now[1] else 0, dtype=dtype),
        x.new_empty(v if now[2] else 0, dtype=dtype),
        x.new_empty((m, v) if schedule == "stored" and any(needs) else 0, dtype=dtype),
    )


@torch.library.custom_op("quackish::linear_cross_entropy_bwd", mutates_args=())
def _backward_op(
    grad_rows: Tensor | None,  # (m,) gradient of each row's loss; None is 1
    grad_lse: Tensor | None,  # (m,); None is 0
    x: Tensor,
    w: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    logits: Tensor | None,  # (m, v) where they were stored
    ignore_index: int,
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    chunk_rows: int,
    compute_dtype: torch.dtype,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (m, h), dw (v, h), db (v,) in fp32 (fp64 for fp64), empty where nobody asks."""
    options = RowOptions(label_smoothing, softcap, z_loss)
    loop = ChunkLoop(x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, needs)
    loop.run(grad_rows=grad_rows, grad_lse=grad_lse, logits=logits)
    return loop.dx, loop.dw, loop.db


@_backward_op.register_fake
def _(
    grad_rows,
    grad_lse,
    x,
    w,
    target,
    bias,
    class_weight,
    logits,
    ignore_index,
    label_smoothing,
    softcap,
    z_loss,
    chunk_rows,
    compute_dtype,
    needs,
):
    dtype = accumulate_dtype(compute_dtype)
    return (
        x.new_empty(x.shape if needs[0] else 0, dtype=dtype),
        x.new_empty(w.shape if needs[1] else 0, dtype=dtype),
        x.new_empty(w.shape[0] if needs[2] else 0, dtype=dtype),
    )


# --- autograd ---


def _setup_context(ctx, inputs, output) -> None:
    x, w, target, bias, class_weight, grad_weight_out, *rest = inputs
    ctx.save_for_backward(x, w, target, bias, class_weight, *output[2:])
    # not saved: another graph's backward may add to it first, which is no error here
    ctx.grad_weight_out = grad_weight_out
    (
        ctx.ignore_index,
        ctx.label_smoothing,
        ctx.softcap,
        ctx.z_loss,
        ctx.reduction,
        ctx.schedule,
        ctx.chunk_rows,
        ctx.compute_dtype,
        ctx.needs,
        _,
    ) = rest
    ctx.set_materialize_grads(False)


def _scaled(unit: Tensor, factor: Tensor | None, dtype: torch.dtype) -> Tensor:
    """unit * factor in `dtype`, rounded once and in one pass; `unit` is not written: a second backward wants it."""
    if factor is None:
        return unit.to(dtype)
    return torch.mul(unit, factor, out=torch.empty_like(unit, dtype=dtype))


def _backward(ctx, grad_loss, grad_lse, *_):
    if torch.is_grad_enabled():
        raise RuntimeError("linear_cross_entropy: create_graph=True (double backward) is not supported")
    nothing = (None,) * 11
    if grad_loss is None and grad_lse is None:
        return (*(None,) * 5, *nothing)
    x, w, target, bias, class_weight, dx, dw, db, logits = ctx.saved_tensors
    plain_sum = ctx.reduction == "sum" and grad_lse is None
    factor = grad_loss if plain_sum else None
    if not (plain_sum and _gradients_in_forward(ctx.schedule, ctx.reduction)):
        if plain_sum:
            grad_rows = None
        else:
            grad_rows = torch.zeros_like(grad_lse) if grad_loss is None else grad_loss.expand(target.shape)
        dx, dw, db = _backward_op(
            grad_rows,
            grad_lse,
            x,
            w,
            target,
            bias,
            class_weight,
            logits if ctx.schedule == "stored" else None,
            ctx.ignore_index,
            ctx.label_smoothing,
            ctx.softcap,
            ctx.z_loss,
            ctx.chunk_rows,
            ctx.compute_dtype,
            ctx.needs,
        )
    need_dx, need_dw, need_db = ctx.needs
    if need_dw and ctx.grad_weight_out is not None:
        if factor is None:
            ctx.grad_weight_out.add_(dw)
        else:
            ctx.grad_weight_out.addcmul_(dw, factor)
        need_dw = False
    return (
        _scaled(dx, factor, x.dtype) if need_dx else None,
        _scaled(dw, factor, w.dtype) if need_dw else None,
        None,
        _scaled(db, factor, bias.dtype) if need_db else None,
        None,
        *nothing,
    )


_forward_op.register_autograd(_backward, setup_context=_setup_context)
