"""Linear cross entropy: which way a call takes, and the custom operators.

torch.compile, dispatch modes and the portable path use the operators. They run the same schedules as the function of
`autograd`, but copy where that writes in place. They are functional; absent results are None.
"""

import math
from typing import NamedTuple, get_type_hints

import torch
from torch import Tensor

from quackish.ops.linear_cross_entropy import portable, row_state, schedules
from quackish.ops.linear_cross_entropy.autograd import (
    apply,
    forward,
    grads_needed,
    in_shape,
    is_graph_kept,
    kernels_on,
    logit_scale_tensor,
    prepare_call,
    prepare_grads,
    requires_grad,
    reshaped,
    writable_exp_logits,
    writable_state,
)
from quackish.ops.linear_cross_entropy.buffers import RowState, padded_strides
from quackish.ops.linear_cross_entropy.calls import ForwardResult, GradOutputs, Grads, GradsNeeded, Plan, unpack
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.layout import rows_kept
from quackish.ops.linear_cross_entropy.reference import accumulate_dtype
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward
from quackish.ops.operator import Operator


def run(inputs: Inputs, plan: Plan, return_lse: bool, eager: bool, kernels=None) -> tuple[Tensor | None, ...]:
    """(loss, lse) of checked arguments; with return_stats (loss, lse, log_prob, entropy, predicted).

    lse may be None if not requested. eager: launch kernels directly instead of through the custom operators.
    kernels: in eager, those of the plan; None on the portable path.
    """
    if inputs.logit_scale is not None:
        inputs = inputs._replace(logit_scale=logit_scale_tensor(inputs, plan))
    if not eager or plan.why_portable is not None:
        return _run_ops(inputs, plan)
    x, w, bias = inputs.parameters()
    device = kernels.device
    if device.current() != device.index:  # allocations and launches use the current one
        with device.make_current():
            return run(inputs, plan, return_lse, eager, kernels)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        out = apply(x, w, bias, inputs, plan, return_lse, kernels)
        return out if isinstance(out, tuple) else (out, None)
    with torch.no_grad():
        outputs, _, _ = forward(inputs, plan, kernels, GradsNeeded(None, None, False), return_lse)
    return (*outputs, None) if len(outputs) == 1 else tuple(outputs)


# Operators -----------------------------------------------------------------------------------------------------------


class Outputs(NamedTuple):
    loss: Tensor
    lse: Tensor | None = None
    log_prob: Tensor | None = None
    entropy: Tensor | None = None
    predicted: Tensor | None = None


class Saved(NamedTuple):
    """What forward returns for backward. On the portable path, state is the divisor of "mean"."""

    state: Tensor | None
    live_x: Tensor | None
    exp_logits: Tensor | None  # on the portable path the logits, in fp32 or fp64


_TYPES = {
    bool: "bool", int: "int", float: "float", float | None: "float?", str: "str", str | None: "str?",
    torch.dtype: "ScalarType", Tensor: "Tensor",
}  # fmt: skip


def _arguments(fields: type, prefix: str = "") -> str:
    """The fields of a NamedTuple as arguments of an operator. Types that are not in _TYPES are tensors or None."""
    types = {name: _TYPES.get(hint, "Tensor?") for name, hint in get_type_hints(fields).items()}
    return ", ".join(f"{'SymInt' if name == 'chunk_rows' else kind} {prefix}{name}" for name, kind in types.items())


def _results(*fields: str) -> str:
    return f"({', '.join(f'Tensor {name}' for name in fields)})"


# needs: which of Inputs.parameters() require grad
_CALL = f"{_arguments(Inputs)}, {_arguments(Plan)}, bool[] needs"


def _run_ops(inputs: Inputs, plan: Plan) -> tuple[Tensor, ...]:
    items = inputs.num_items
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code is not specialized on it
        dtype = accumulate_dtype(plan.compute_dtype)
        inputs = inputs._replace(num_items=torch.full((), items, dtype=dtype, device=inputs.input.device))
    outputs, _ = unpack(forward_operator(*inputs, *plan, requires_grad(inputs)), Outputs)
    return outputs if plan.return_stats else (outputs.loss, outputs.lse)


def run_forward(
    inputs: Inputs, plan: Plan, needed: GradsNeeded, kernels=None, device=None
) -> tuple[Outputs, Saved, Grads]:
    """kernels: those of the plan, if the caller has them. Dry runs of the portable path pass the simulated device."""
    shape = inputs.target.shape
    if plan.why_portable is not None:
        loss, stats, divisor, grads, logits = portable.forward(inputs, plan, needed, device)
        outputs = [reshaped(loss, shape) if loss.dim() else loss, *(reshaped(t, shape) for t in stats)]
        return Outputs(*outputs), Saved(divisor, None, logits), grads
    kernels = kernels or kernels_on(inputs.input.device)
    outputs, state, out = forward(inputs, plan, kernels, needed, return_lse=True, allow_dw_in_forward=False)
    return Outputs(*outputs), Saved(state.memory, out.live_x, out.exp_logits), out.grads


def run_backward(
    inputs: Inputs, plan: Plan, needed: GradsNeeded, grad_outputs: GradOutputs, saved: Saved, kernels=None, device=None
) -> Grads:
    """The gradients, from what run_forward returned for backward. Kernels add dw to grad_weight_out if it is given."""
    if plan.why_portable is not None:
        return portable.backward(inputs, plan, needed, grad_outputs, saved.state, saved.exp_logits, device)
    kernels = kernels or kernels_on(inputs.input.device)
    state = writable_state(RowState.from_memory(saved.state, inputs.target.numel()))
    exp_logits = writable_exp_logits(kernels.device, saved.exp_logits, grad_outputs)
    call = prepare_call(inputs, plan, kernels, state, prepare_grads(plan, grad_outputs))
    return schedules.backward(call, ForwardResult(None, Grads(), saved.live_x, exp_logits), needed)


def _fwd_impl(*args, kernels=None, device=None):
    inputs, plan, (needs,) = unpack(args, Inputs, Plan)
    outputs, saved, grads = run_forward(inputs, plan, grads_needed(inputs, plan, needs), kernels, device)
    return *outputs, *saved, *grads


def _bwd_impl(*args, kernels=None, device=None):
    grad_outputs, saved, inputs, plan, (needs,) = unpack(args, GradOutputs, Saved, Inputs, Plan)
    needed = grads_needed(inputs, plan, needs)
    inputs = inputs._replace(grad_weight_out=None)  # operators are functional
    return tuple(run_backward(inputs, plan, needed, grad_outputs, saved, kernels, device))


def _fake_grads(inputs: Inputs, plan: Plan, needed: GradsNeeded) -> tuple[Tensor | None, ...]:
    x, (v, h) = inputs.input, inputs.linear_weight.shape
    dtypes = needed.dx, needed.dw, accumulate_dtype(plan.compute_dtype) if needed.db else None
    shapes = (x.numel() // h, h), (v, h), (v,)
    return tuple(x.new_empty(s, dtype=d) if d else None for s, d in zip(shapes, dtypes, strict=True))


def _fwd_fake(*args):
    inputs, plan, (needs,) = unpack(args, Inputs, Plan)
    needed = grads_needed(inputs, plan, needs)
    x, target, (v, h) = inputs.input, inputs.target, inputs.linear_weight.shape
    m, dtype, state, live_x, exp_logits = x.numel() // h, accumulate_dtype(plan.compute_dtype), None, None, None
    kept = rows_kept(plan.schedule, plan.chunk_rows, plan.keeps_first, m)
    keeps = needed.any() and (plan.schedule == "stored" or kept > 0)
    if plan.why_portable is None:
        state = x.new_empty(row_state.size(m, plan.return_stats), dtype=torch.int32)
        if keeps:
            live_x = x.new_empty((kept, h), dtype=plan.compute_dtype)
            exp_logits = x.new_empty_strided((kept, v), padded_strides(v), dtype=plan.compute_dtype)
    else:
        state = x.new_empty((), dtype=dtype) if plan.reduction == "mean" else None
        exp_logits = x.new_empty((m, v), dtype=dtype) if keeps else None
    loss = x.new_empty(target.shape if plan.reduction == "none" else (), dtype=dtype)
    dtypes = (dtype, dtype, dtype, torch.int64) if plan.return_stats else (dtype,)
    outputs = Outputs(loss, *(loss.new_empty(target.shape, dtype=d) for d in dtypes))
    grads = _fake_grads(inputs, plan, grads_in_forward(plan, needed))
    return *outputs, *Saved(state, live_x, exp_logits), *grads


def _bwd_fake(*args):
    _, _, inputs, plan, (needs,) = unpack(args, GradOutputs, Saved, Inputs, Plan)
    return _fake_grads(inputs, plan, grads_needed(inputs, plan, needs))


def _setup(ctx, args, output):
    inputs, ctx.plan, (ctx.needs,) = unpack(args, Inputs, Plan)
    ctx.grad_weight_out = inputs.grad_weight_out
    ctx.save_for_backward(*inputs._replace(grad_weight_out=None), *output[len(Outputs._fields) :])


def _scaled_grad(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in one pass; in place if the dtype is grad's and the graph is not retained."""
    in_place = grad.dtype == dtype and not is_graph_kept()
    return torch.mul(grad, factor, out=grad if in_place else torch.empty_like(grad, dtype=dtype))


def _gradients(ctx, *grads):
    grad_outputs = GradOutputs(*grads)
    inputs, saved, computed, _ = unpack(ctx.saved_tensors, Inputs, Saved, Grads)
    plan, (_, needs_dw, _), grads = ctx.plan, ctx.needs, Grads()
    dw_out = ctx.grad_weight_out if needs_dw else None
    if grad_outputs.has_row_grads():
        computed = Grads()
    missing = [need and g is None for need, g in zip(ctx.needs, computed, strict=True)]
    if any(g is not None for g in computed):
        is_sum = plan.why_portable is not None and plan.reduction == "mean"
        # Not 0-dim: PyTorch would round a 0-dim factor to the gradients' 16-bit dtype.
        factor = (grad_outputs.loss / saved.state if is_sum else grad_outputs.loss).view(1)
        if dw_out is not None and computed.dw is not None:
            dw_out.addcmul_(computed.dw, factor)
            computed = computed._replace(dw=None)
        pairs = zip(computed, inputs.parameters(), strict=True)
        grads = Grads(*(None if g is None else _scaled_grad(g, factor, t.dtype) for g, t in pairs))
    if any(missing):
        inputs = inputs._replace(grad_weight_out=dw_out)
        late = Grads(*backward_operator(*grad_outputs, *saved, *inputs, *plan, missing))
        if dw_out is not None and late.dw is not None:
            dw_out.add_(late.dw)
            late = late._replace(dw=None)
        grads = grads.fill_missing(late)
    dx, dw, db = in_shape(grads, inputs.input.shape)
    return Inputs(input=dx, linear_weight=dw, target=None, linear_bias=db)


def _forward_flops(*args, out_shape=None):
    inputs, plan, (needs,) = unpack(args, Inputs, Plan)
    dx, dw, _ = grads_in_forward(plan, GradsNeeded(*needs))
    return 2 * math.prod(inputs.input) * inputs.linear_weight[0] * (1 + bool(dx) + bool(dw))


def _backward_flops(*args, out_shape=None):
    grads, saved, inputs, plan, ((dx, dw, _),) = unpack(args, GradOutputs, Saved, Inputs, Plan)
    v, h = inputs.linear_weight
    m = math.prod(inputs.input[:-1])
    kept = 0 if saved.exp_logits is None else saved.exp_logits[0]
    if grads.entropy is not None and plan.why_portable is None:
        kept = 0  # kernels recompute all logits
    return 2 * v * h * (m * (dx + dw) + m - kept)


forward_operator = Operator(
    f"linear_cross_entropy_fwd({_CALL}) -> {_results(*Outputs._fields, *Saved._fields, *Grads._fields)}",
    _fwd_impl,
    _fwd_fake,
    who="linear_cross_entropy",
    flops=_forward_flops,
)
# Backward overwrites `exp_logits` unless the graph is retained (`writable_exp_logits`). No other operator reads it.
backward_operator = Operator(
    f"linear_cross_entropy_bwd({_arguments(GradOutputs, 'grad_')}, {_arguments(Saved)}, {_CALL}) -> "
    f"{_results(*Grads._fields)}",
    _bwd_impl,
    _bwd_fake,
    who="linear_cross_entropy",
    flops=_backward_flops,
)
forward_operator.differentiable(_setup, _gradients, outputs=len(GradOutputs._fields))
IMPLEMENTATIONS = {forward_operator.overload: _fwd_impl, backward_operator.overload: _bwd_impl}
