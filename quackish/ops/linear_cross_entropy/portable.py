"""Linear cross entropy's portable path for torch: custom operators and autograd around the chunk loop.

`mean` is the sum divided outside of the operators, so they know only "none" and "sum".
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.errors import warn_once
from quackish.ops.linear_cross_entropy.checks import check_targets
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
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    num_items: int | Tensor | None, grad_weight_out: Tensor | None, plan: PortablePlan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, lse) of checked arguments."""
    x = input.reshape(-1, input.shape[-1])
    flat_target = target.reshape(-1)
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (input, linear_weight, linear_bias)]
    loss, lse, *_ = _forward_op(
        x, linear_weight, flat_target, linear_bias, weight, grad_weight_out, plan.ignore_index, plan.label_smoothing,
        plan.softcap, plan.z_loss, "none" if plan.reduction == "none" else "sum", plan.schedule, plan.chunk_rows,
        plan.compute_dtype, needs, plan.reason,
    )  # fmt: skip
    if plan.reduction == "mean":
        rows = rows_of(flat_target, linear_weight.shape[0], weight, plan.ignore_index, loss.dtype)
        loss = loss / mean_divisor(rows, num_items).detach()
    elif plan.reduction == "none":
        loss = loss.reshape(target.shape)
    return loss, lse.reshape(target.shape)


def run_reference(
    input: Tensor, linear_weight: Tensor, target: Tensor, linear_bias: Tensor | None, weight: Tensor | None,
    num_items: int | Tensor | None, plan: NamedTuple,  # of either path
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss, lse) of checked arguments, by operations that torch.func and forward-mode AD know: all logits are held."""
    x, flat_target = input.reshape(-1, input.shape[-1]), target.reshape(-1)
    if input.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(target):
        check_targets(flat_target, linear_weight.shape[0], plan.ignore_index)
    with torch.autocast(input.device.type, enabled=False):
        loss, lse = linear_cross_entropy_forward(
            x.to(plan.compute_dtype), linear_weight.to(plan.compute_dtype), flat_target, linear_bias=linear_bias,
            weight=None if weight is None else weight.detach(), reduction=plan.reduction,
            ignore_index=plan.ignore_index, label_smoothing=plan.label_smoothing, softcap=plan.softcap,
            z_loss=plan.z_loss, num_items=num_items,
        )  # fmt: skip
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
    reason: str,  # see PortablePlan
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
    x, w, target, bias, class_weight, grad_weight_out, ignore_index, label_smoothing, softcap, z_loss, reduction,
    schedule, chunk_rows, compute_dtype, needs, reason,
):  # fmt: skip
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
    grad_rows, grad_lse, x, w, target, bias, class_weight, logits, ignore_index, label_smoothing, softcap, z_loss,
    chunk_rows, compute_dtype, needs,
):  # fmt: skip
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
    ctx.options, (ctx.reduction, ctx.schedule), ctx.chunk_rows, ctx.compute_dtype, ctx.needs, _ = (
        rest[:4], rest[4:6], *rest[6:]
    )  # fmt: skip
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
            grad_rows, grad_lse, x, w, target, bias, class_weight, logits if ctx.schedule == "stored" else None,
            *ctx.options, ctx.chunk_rows, ctx.compute_dtype, ctx.needs,
        )  # fmt: skip
    need_dx, need_dw, need_db = ctx.needs
    if need_dw and ctx.grad_weight_out is not None:
        if factor is None:
            ctx.grad_weight_out.add_(dw)
        else:
            ctx.grad_weight_out.addcmul_(dw, factor)
        need_dw = False
    dx = _scaled(dx, factor, x.dtype) if need_dx else None
    dw = _scaled(dw, factor, w.dtype) if need_dw else None
    db = _scaled(db, factor, bias.dtype) if need_db else None
    return dx, dw, None, db, None, *nothing


_forward_op.register_autograd(_backward, setup_context=_setup_context)


# --- the loop over chunks ---


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
        self.starts = range(0, m, chunk_rows)
        self.chunk_rows = chunk_rows
        self.needs = needs
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
            for start in self.starts:
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
