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
    Rows,
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
    if x.device.type == "cpu":
        check_targets(target, w.shape[0], ignore_index)
    if reason:
        warn_once(reason)
    options = RowOptions(label_smoothing, softcap, z_loss)
    loop = ChunkLoop(x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, needs)
    kept = loop.loss.new_empty((x.shape[0], w.shape[0]) if keep_logits else 0)
    loop.run(grad_rows, grad_lse, kept if keep_logits else None, logits)
    return loop.loss.sum() if summed else loop.loss, loop.lse, loop.dx, loop.dw, loop.db, kept


@_loop_op.register_fake
def _(x, w, target, *args):
    *_, compute_dtype, needs, keep_logits, summed, _ = args
    (m, h), v, dtype = x.shape, w.shape[0], accumulate_dtype(compute_dtype)
    return (
        x.new_empty(() if summed else (m,), dtype=dtype),
        x.new_empty(m, dtype=dtype),
        x.new_empty((m, h) if needs[0] else 0, dtype=dtype),
        x.new_empty((v, h) if needs[1] else 0, dtype=dtype),
        x.new_empty(v if needs[2] else 0, dtype=dtype),
        x.new_empty((m, v) if keep_logits else 0, dtype=dtype),
    )


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


# The loop over chunks -------------------------------------------------------------------------------------------------


def _gemm_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What GEMM operands are given as: 16-bit only where torch's GEMM delivers fp32 from them, which is CUDA's."""
    widening = device.type == "cuda" and torch.version.hip is None
    return compute_dtype if widening else accumulate_dtype(compute_dtype)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, in out's dtype from the accumulator on."""
    torch.mm(a, b, out=out) if a.dtype == out.dtype else torch.mm(a, b, out_dtype=out.dtype, out=out)


def addmm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a @ b, inside of the GEMM: no second buffer of out's size."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)


class ChunkLoop:
    """One pass over the rows: everything that is the same for each chunk, and the results it fills."""

    def __init__(self, x, w, target, bias, class_weight, ignore_index, options, chunk_rows, compute_dtype, needs):
        dtype = accumulate_dtype(compute_dtype)
        self.x, self.bias, self.options = x, None if bias is None else bias.to(dtype), options
        self.compute_dtype, self.gemm_dtype = compute_dtype, _gemm_dtype(compute_dtype, x.device)
        w = w.to(compute_dtype).to(self.gemm_dtype)
        self.w = w if 1 in w.stride() else w.contiguous()  # else each chunk's GEMM would make its own copy
        self.class_weight = None if class_weight is None else class_weight.to(dtype)
        self.rows: Rows = rows_of(target, w.shape[0], self.class_weight, ignore_index, dtype)
        m, v, h = x.shape[0], *w.shape
        self.chunk_rows, self.needs = chunk_rows, needs
        self.loss = x.new_empty(m, dtype=dtype)
        self.lse = x.new_empty(m, dtype=dtype)
        self.dx = x.new_empty((m, h) if needs[0] else 0, dtype=dtype)
        self.dw = x.new_zeros((v, h) if needs[1] else 0, dtype=dtype)
        self.db = x.new_zeros(v if needs[2] else 0, dtype=dtype)

    def run(self, grad_rows=None, grad_lse=None, keep_logits_in=None, logits=None) -> None:
        """Gradients where `needs` asks: for a gradient of 1 a row, or `grad_rows` and `grad_lse` (m,).

        `keep_logits_in` (m, v) is filled with the logits; `logits` (m, v) are such ones, used and not written.
        """
        # Operators run with the caller's autocast on; it would round the fp32 operands here.
        with torch.autocast(self.x.device.type, enabled=False):
            for start in range(0, self.x.shape[0], self.chunk_rows):
                part = slice(start, start + self.chunk_rows)
                given = (grad_rows, grad_lse, keep_logits_in, logits)
                self._chunk(part, *(None if t is None else t[part] for t in given))

    def _chunk(self, part, grad_rows, grad_lse, keep_logits_in, logits) -> None:
        # A function of its own: what a chunk allocates is gone before the next one allocates.
        rows = self.rows[part]
        # an ignored row of x is zeroed, or its NaN would reach dw as 0 * NaN
        x = self.x[part].masked_fill(~rows.live[:, None], 0.0).to(self.compute_dtype).to(self.gemm_dtype)
        if logits is not None:
            z = logits.clone()
        else:
            z = self.loss.new_empty((x.shape[0], self.w.shape[0]))
            mm(x, self.w.t(), out=z)
            if self.bias is not None:
                z.add_(self.bias)
        if keep_logits_in is not None:
            keep_logits_in.copy_(z)
        self.loss[part], self.lse[part], dlogits = chunk_of_rows(
            z, rows, self.class_weight, self.options, any(self.needs), grad_rows, grad_lse
        )
        if self.needs[2]:
            self.db.add_(dlogits.sum(0))
        if self.needs[0] or self.needs[1]:
            dlogits = dlogits.to(self.gemm_dtype)
        if self.needs[0]:
            mm(dlogits, self.w, out=self.dx[part])
        if self.needs[1]:
            addmm(dlogits.t(), x, out=self.dw)
