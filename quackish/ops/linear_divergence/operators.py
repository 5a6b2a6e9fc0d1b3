"""The operators of linear_divergence. They and their gradient are written once, in the steps of `schedule.py`.

For "mean" and "sum", forward computes the gradients, up to the gradient of the loss. For "none" it keeps the gradients
of the logits if all rows are one block; otherwise backward computes both models' logits again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.kernel_device import report_portable, require_device, why_unsupported
from quackish.device.modes import check_memory, is_compiling, traced_as_constant
from quackish.ops.linear_divergence import kernel_steps, reference, schedule
from quackish.ops.linear_divergence.checks import WHO
from quackish.ops.linear_divergence.problems import padded
from quackish.ops.linear_divergence.reference import RowOptions, Side
from quackish.ops.linear_divergence.schedule import Grads, Layout, Models, Needed, Rows, Sizes, Steps
from quackish.ops.operator import Operator, is_graph_kept
from quackish.ops.shared.launches import launches_of
from quackish.ops.shared.matmul import accumulate_dtype
from quackish.ops.shared.problems import GEMM_SPEC, SCALE_SPEC


class Tensors(NamedTuple):
    """The operators' tensors: x (M, H), w (V, H), teacher_x (M, Ht), teacher_w (V, Ht), mask (M,)."""

    x: Tensor
    w: Tensor
    bias: Tensor | None  # (V,)
    teacher_x: Tensor
    teacher_w: Tensor
    teacher_bias: Tensor | None
    mask: Tensor | None
    num_items: Tensor | None  # 0-dim
    grad_w_out: Tensor | None  # forward does not read or write it


class Plan(NamedTuple):
    """The operators' other arguments."""

    dtype: torch.dtype  # of the matrix products' operands
    beta: float
    temperature: float
    reduction: str
    softcap: float | None
    teacher_softcap: float | None
    scale: float
    teacher_scale: float
    return_entropy: bool
    chunk: int
    block: int
    needs: list[bool]  # whether x, w and bias get gradients
    backend: str


_NUM_TENSORS = len(Tensors._fields)


def _split(args: tuple) -> tuple[Tensors, Plan]:
    return Tensors(*args[:_NUM_TENSORS]), Plan(*args[_NUM_TENSORS:])


def needed_of(t: Tensors, plan: Plan) -> Needed:
    dx, dw, db = plan.needs
    dw_dtype = t.w.dtype if t.grad_w_out is None else t.grad_w_out.dtype
    return Needed(
        t.x.dtype if dx else None, dw_dtype if dw else None, t.bias.dtype if db and t.bias is not None else None
    )


@traced_as_constant
def _why_no_kernels(device: torch.device) -> str:
    return why_unsupported(WHO, GEMM_SPEC, device)


def _why_portable(t: Tensors, plan: Plan) -> str:
    """Why kernels do not cover the call; "" if they do."""
    widths = t.w.shape[1], t.teacher_w.shape[1]
    return _why_no_kernels(t.x.device) or kernel_steps.why_unsupported(plan.dtype, t.w.shape[0], widths)


def sizes_of(t: Tensors, plan: Plan) -> Sizes:
    (m, _), (v, h) = t.x.shape, t.w.shape
    portable = t.x.device.type if plan.backend == "reference" or _why_portable(t, plan) else ""
    return Sizes(m, v, h, plan.dtype, needed_of(t, plan), plan.reduction == "none", t.mask is not None, portable)


def steps_for(t: Tensors, plan: Plan) -> Steps:
    """The steps that run: kernels or the portable path, which on a GPU warns once per reason."""
    x = t.x
    if plan.backend == "reference" or x.numel() == 0:
        return reference
    if why := _why_portable(t, plan):
        report_portable(why, x.device, plan.backend)
        return reference
    return kernel_steps.steps_of(require_device(WHO, x.device))


def _boost(plan: Plan) -> float:
    """The factor of dlogits, without which those of many classes vanish in fp16.

    It makes them a multiple of g of reference.py, whose absolute values are at most 1.4, but unbounded for beta 1.
    """
    if plan.dtype != torch.float16:
        return 1.0
    return (64.0 if plan.beta == 1 else 1024.0) * plan.temperature / plan.scale


def _defers_divisor(plan: Plan) -> bool:
    """Whether "mean" divides its gradients in backward, after the gradient of the loss has scaled them, as AMP does."""
    return plan.reduction == "mean" and plan.dtype == torch.float16


class Prepared(NamedTuple):
    """What the steps of a call share."""

    steps: Steps
    rows: Rows
    models: Models
    options: RowOptions
    layout: Layout
    divisor: Tensor | None  # (1,): "mean" divides by it
    inverse_boost: Tensor | None  # (1,): 1 / options.boost; only in fp16


def _prepare(t: Tensors, plan: Plan, steps: Steps) -> Prepared:
    dtype = plan.dtype
    rows = schedule.live_first(t.x.to(dtype), t.teacher_x.to(dtype), t.mask)
    w, teacher_w = t.w.to(dtype), t.teacher_w.to(dtype)
    if steps is not reference:
        operand = kernel_steps.operand
        rows = rows._replace(x=operand(rows.x), teacher=operand(rows.teacher))
        w, teacher_w = operand(w), operand(teacher_w)
    student = Side(t.bias, plan.scale, plan.softcap)
    teacher = Side(t.teacher_bias, plan.teacher_scale, plan.teacher_softcap)
    boost = _boost(plan)
    options = RowOptions(plan.beta, plan.temperature, plan.return_entropy, dlogits=False, boost=boost)
    models, layout = Models(w, student, teacher_w, teacher), Layout(plan.chunk, plan.block)
    inverse_boost = t.x.new_full((1,), 1 / boost, dtype=torch.float32) if dtype == torch.float16 else None
    return Prepared(steps, rows, models, options, layout, _divisor(t, rows, plan), inverse_boost)


def _divisor(t: Tensors, rows: Rows, plan: Plan) -> Tensor | None:
    """num_items, or the number of rows that count; 1 instead of 0."""
    if plan.reduction != "mean":
        return None
    dtype = accumulate_dtype(plan.dtype)
    if t.num_items is not None:
        # multiplied instead of copied: copying a 0-dim CPU tensor to the GPU would synchronize
        count = (t.x.new_ones(1, dtype=dtype) * t.num_items).to(dtype)
    elif rows.num_live is not None:
        count = rows.num_live.to(dtype)
    else:
        count = t.x.new_full((1,), t.x.shape[0], dtype=dtype)
    return count.clamp_min(1)


def forward(t: Tensors, plan: Plan, steps: Steps) -> tuple[Tensor | None, ...]:
    """(loss, entropy, dx, dw, db, divisor, dlogits). Gradients are still to be divided by `divisor`, if it is given."""
    needed, wide = needed_of(t, plan), accumulate_dtype(plan.dtype)
    (m, _), is_none = t.x.shape, plan.reduction == "none"
    if m == 0:
        empty = t.x.new_empty((0,), dtype=wide)
        grads = Grads() if is_none else _zeros(t, needed)
        return empty if is_none else empty.sum(), empty.clone() if plan.return_entropy else None, *grads, None, None
    call = _prepare(t, plan, steps)
    keep = is_none and any(needed) and m <= plan.block
    factor = None if call.divisor is None else 1 / call.divisor
    deferred = call.divisor if _defers_divisor(plan) and any(needed) else None
    in_forward = Needed(None, None, None) if is_none else needed
    of_grads = factor if call.inverse_boost is None else call.inverse_boost
    found = schedule.run(
        call.steps, call.rows, call.models, call.options, call.layout, in_forward, factor=of_grads, keep=keep
    )
    loss = found.loss
    if not is_none:
        loss = loss.sum() if factor is None else loss.sum() * factor[0]
    return loss, found.entropy, *found.grads, deferred, found.dlogits


def backward(dloss: Tensor, dlogits: Tensor | None, t: Tensors, plan: Plan, steps: Steps) -> tuple[Tensor | None, ...]:
    """(dx, dw, db) of "none"."""
    needed = needed_of(t, plan)
    if dloss.numel() == 0:
        return tuple(_zeros(t, needed))
    call, wide = _prepare(t, plan, steps), accumulate_dtype(plan.dtype)
    grads = dloss.to(wide)
    if call.rows.order is not None:
        grads = grads.index_select(0, call.rows.order)
        grads = grads.masked_fill(torch.arange(len(grads), device=grads.device) >= call.rows.num_live, 0)
    factor = call.inverse_boost
    if factor is not None:  # fp16: the largest gradient becomes about 1, by a power of two
        largest = grads.nan_to_num(0.0, 0.0, 0.0).abs().amax().view(1)
        power = torch.where(largest > 0, largest, 1).log2().ceil().exp2()
        grads, factor = grads / power, factor * power
    if dlogits is None:
        found = schedule.run(call.steps, call.rows, call.models, call.options, call.layout, needed, grads, factor).grads
    else:
        m, v = dlogits.shape
        if steps is not reference and (dlogits.stride() != (padded(v), 1) or dlogits.data_ptr() % 16):
            # from a hook on saved tensors
            dlogits = steps.matrix(m, v, dlogits.dtype, dlogits.device).copy_(dlogits)
        found = schedule.gradients_of(call.steps, call.rows, call.models, dlogits, needed, grads, factor)
    return tuple(found)


def _zeros(t: Tensors, needed: Needed) -> Grads:
    pairs = zip((t.x, t.w, t.bias), needed, strict=True)
    return Grads(*(None if dtype is None else like.new_zeros(like.shape, dtype=dtype) for like, dtype in pairs))


# Operators ------------------------------------------------------------------------------------------------------------


def _run_forward(*args):
    t, plan = _checked(args)
    return forward(t, plan, steps_for(t, plan))


def _run_backward(dloss, dlogits, *args):
    t, plan = _checked(args)
    return backward(dloss, dlogits, t, plan, steps_for(t, plan))


def _checked(args: tuple) -> tuple[Tensors, Plan]:
    t, plan = _split(args)
    check_memory(WHO, input=t.x, linear_weight=t.w, teacher_input=t.teacher_x, teacher_weight=t.teacher_w)
    return t, plan


def _fake_forward(*args):
    t, plan = _split(args)
    needed, wide, (m, _) = needed_of(t, plan), accumulate_dtype(plan.dtype), t.x.shape
    entropy = t.x.new_empty((m,), dtype=wide) if plan.return_entropy else None
    if plan.reduction != "none":
        divisor = t.x.new_empty((1,), dtype=wide) if _defers_divisor(plan) and any(needed) and m > 0 else None
        return t.x.new_empty((), dtype=wide), entropy, *_fake_grads(t, needed), divisor, None
    keep, v = any(needed) and 0 < m <= plan.block, t.w.shape[0]
    stride = v if steps_for(t, plan) is reference else padded(v)
    dlogits = t.x.new_empty_strided((m, v), (stride, 1), dtype=plan.dtype) if keep else None
    return t.x.new_empty((m,), dtype=wide), entropy, None, None, None, None, dlogits


def _fake_backward(dloss, dlogits, *args):
    t, plan = _split(args)
    return _fake_grads(t, needed_of(t, plan))


def _fake_grads(t: Tensors, needed: Needed) -> tuple[Tensor | None, ...]:
    pairs = zip((t.x, t.w, t.bias), needed, strict=True)
    return tuple(None if dtype is None else like.new_empty(like.shape, dtype=dtype) for like, dtype in pairs)


def _setup(ctx, args, output):
    t, ctx.plan = _split(args)
    ctx.grad_w_out = t.grad_w_out  # not saved: backward adds to it
    is_none = ctx.plan.reduction == "none"
    ctx.save_for_backward(*(t._replace(grad_w_out=None) if is_none else ()), *output[2:])


def _gradients(ctx, dloss, dentropy):
    out, plan = ctx.grad_w_out, ctx.plan
    *tensors, dx, dw, db, divisor, dlogits = ctx.saved_tensors
    if plan.reduction == "none":
        t = Tensors(*tensors)._replace(grad_w_out=out)
        dx, dw, db = backward_operator.direct(dloss, dlogits, *t, *plan)
    else:
        factor = dloss if divisor is None else dloss / divisor.view(())
        dx, dw, db = (None if grad is None else _scaled(grad, factor, plan) for grad in (dx, dw, db))
    if out is not None and dw is not None:
        out.add_(dw)
        dw = None
    return dx, dw, db


def _scaled(grad: Tensor, factor: Tensor, plan: Plan) -> Tensor:
    """grad * factor, a 0-dim tensor; in grad's memory if no other backward and no replay of a CUDA graph needs it."""
    is_portable = plan.backend == "reference" or grad.dtype == torch.float64
    if is_compiling() or is_portable or why_unsupported(WHO, SCALE_SPEC, grad.device):
        return torch.mul(grad, factor.view(1), out=torch.empty_like(grad))  # 0-dim, it would be rounded to grad's dtype
    is_captured = grad.is_cuda and torch.cuda.is_current_stream_capturing()  # of backward alone
    if is_captured or is_graph_kept() or not grad.is_contiguous() or grad.data_ptr() % 16:
        grad = grad.clone(memory_format=torch.contiguous_format)
    launches_of(require_device(WHO, grad.device)).scale(grad, factor.view(1))
    return grad


def _flops(t: Any, plan: Any, products: int, teacher: int) -> int:
    (m, h), v = t.x, t.w[0]
    return 2 * m * v * (products * h + teacher * t.teacher_w[1])


def _forward_flops(*args, out_shape=None):
    t, plan = _split(args)
    dx, dw, _ = plan.needs if plan.reduction != "none" else (False, False, False)
    return _flops(t, plan, 1 + dx + dw, 1)


def _backward_flops(dloss, dlogits, *args, out_shape=None):
    t, plan = _split(args)
    dx, dw, _ = plan.needs
    again = dlogits is None
    return _flops(t, plan, again + dx + dw, again)


_TENSORS = (
    "Tensor x, Tensor w, Tensor? bias, Tensor teacher_x, Tensor teacher_w, Tensor? teacher_bias, Tensor? mask, "
    "Tensor? num_items, Tensor? grad_w_out"
)
_PLAN = (
    "ScalarType dtype, float beta, float temperature, str reduction, float? softcap, float? teacher_softcap, "
    "float scale, float teacher_scale, bool return_entropy, SymInt chunk, SymInt block, bool[] needs, str backend"
)
forward_operator = Operator(
    f"linear_divergence_fwd({_TENSORS}, {_PLAN}) -> "
    "(Tensor loss, Tensor entropy, Tensor dx, Tensor dw, Tensor db, Tensor divisor, Tensor dlogits)",
    _run_forward,
    _fake_forward,
    who=WHO,
    flops=_forward_flops,
)
backward_operator = Operator(
    f"linear_divergence_bwd(Tensor dloss, Tensor? dlogits, {_TENSORS}, {_PLAN}) -> (Tensor dx, Tensor dw, Tensor db)",
    _run_backward,
    _fake_backward,
    who=WHO,
    flops=_backward_flops,
)
forward_operator.differentiable(_setup, _gradients, outputs=2)
