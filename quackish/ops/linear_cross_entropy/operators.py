"""Linear cross entropy and autograd: in plain eager mode a Function on kernels, for all other calls custom operators.

Both run the same forward and backward, and differ in what happens to gradients that forward has computed:

- The Function's first backward scales these buffers in place and returns them. A second one computes them again, and so
  does one in a CUDA graph that does not contain its forward.
- The operators, for torch.compile, dispatch modes, subclasses and the portable path, are functional: autograd saves the
  gradients that the forward operator returns. Absent results are None.
"""

import math
from collections.abc import Sequence
from typing import Any, get_type_hints

import torch
from torch import Tensor

from quackish.device.cuda import is_capturing
from quackish.device.kernel_device import KernelDevice, check_same_device, device_of, require_device
from quackish.device.modes import as_plain, check_memory
from quackish.once import once
from quackish.ops.linear_cross_entropy import portable, row_state, schedules
from quackish.ops.linear_cross_entropy.calls import (
    NO_GRADS,
    Call,
    ForwardGrads,
    GradOutputs,
    Grads,
    GradsNeeded,
    LossPlan,
    Outputs,
    Saved,
    grads_needed,
    padded_strides,
    unpack,
)
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.linear_cross_entropy.layout import rows_kept
from quackish.ops.linear_cross_entropy.reference import accumulate_dtype
from quackish.ops.operator import Operator, fast_apply, is_graph_kept, refuse_second_derivatives

_WHO = "linear_cross_entropy"
_NOTHING, _NO_INPUTS = ForwardGrads(), Inputs(*[None] * len(Inputs._fields))
_NUM_GRAD_OUTPUTS = len(GradOutputs._fields)  # `predicted` has none
_GRAD_NAMES = [f"grad_{name}" for name in GradOutputs._fields]


def run(call: Call) -> tuple[Tensor, ...]:
    """The outputs of a call with checked arguments: loss, then lse or the statistics if requested."""
    inputs, kernels = call.inputs, call.kernels
    if inputs.logit_scale is not None:
        call = call._replace(inputs=inputs._replace(logit_scale=logit_scale_tensor(inputs, call.plan)))
    if not call.eager or kernels is None:
        return _run_operator(call)
    device = kernels.device
    if device.current() != device.index:  # allocations and launches use the current one
        with device.make_current():
            return run(call)
    if call.needed.any():
        out = _apply(*inputs.parameters(), call)
        return out if isinstance(out, tuple) else (out,)
    with torch.no_grad():
        outputs, _, _ = schedules.forward(call)
    return tuple(outputs)


def forward(call: Call) -> tuple[list[Tensor], Saved, ForwardGrads]:
    """(the call's outputs, what backward needs, the gradients that forward computes)."""
    return portable.forward(call) if call.kernels is None else schedules.forward(call)


def backward(call: Call, saved: Saved) -> Grads:
    """The gradients in call.needed. dw is added to grad_weight_out if given."""
    return portable.backward(call, saved) if call.kernels is None else schedules.backward(call, saved)


def kernels_of(device: KernelDevice) -> LceKernels:
    """The kernels that the calls on a device share."""
    return once(device.cache, _WHO, LceKernels, device)


def kernels_on(device: torch.device) -> LceKernels:
    return kernels_of(require_device(_WHO, device))


def logit_scale_tensor(inputs: Inputs, plan: LossPlan) -> Tensor:
    """logit_scale on input's device, in the dtype of the logits."""
    scale, device, dtype = inputs.logit_scale, inputs.input.device, accumulate_dtype(plan.compute_dtype)
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.to(dtype)
    # Multiply: copying a CPU tensor would synchronize, and torch.full would specialize compiled code on the number.
    return (torch.ones((), dtype=dtype, device=device) * scale).to(dtype)


# Autograd -------------------------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, call):
        # Only the first three need autograd, and each argument costs host time.
        outputs, saved, ctx.computed = schedules.forward(call)
        save_call(ctx, call, saved)
        ctx.device, ctx.is_captured = device_of(input.device), input.is_cuda and is_capturing()
        ctx.set_materialize_grads(False)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        grads = grads[:_NUM_GRAD_OUTPUTS]
        refuse_second_derivatives(_WHO, *grads)
        given = next((grad for grad in grads if grad is not None), None)
        if given is None:
            return None, None, None, None
        check_same_device(_WHO, ctx.device, given.device)
        if given.is_cuda and not ctx.is_captured and is_capturing():
            ctx.computed = _NOTHING  # each replay would scale forward's gradients again
        grads = [as_plain(_WHO, grad) for grad in grads]
        if not all(grad is None or grad.data_ptr() for grad in grads):
            check_memory(_WHO, **dict(zip(_GRAD_NAMES, grads, strict=False)))
        return *_gradients(ctx, *grads), None


_apply = fast_apply(_LinearCrossEntropy)


def _gradients(ctx: Any, *grads: Tensor | None) -> Grads:
    """The gradients of input, linear_weight and linear_bias, for the Function and for the operator."""
    call, given, found, saved = ctx.call, GradOutputs(*grads[:_NUM_GRAD_OUTPUTS]), Grads(), None
    if call.eager:
        computed = ctx.__dict__.pop("computed", _NOTHING)  # atomic: only one backward gets the buffers
    else:
        call, saved, computed = saved_call(ctx)
    needed, partial_dw = call.needed, computed.dw
    if not given.has_row_grads() and any(grad is not None for grad in computed.grads):
        if call.eager:
            found = schedules.scale_grads(call.kernels, computed, given.loss, call.inputs.grad_weight_out)
        else:
            found = _scale_saved_grads(call, saved, computed.grads, given.loss)
        needed = needed.without(computed.grads)
    del computed  # frees unused gradients
    if needed.any():
        if saved is None:
            call, saved, _ = saved_call(ctx)
        call = call._replace(needed=needed, grad_outputs=given)
        late = schedules.backward(call, saved, partial_dw) if call.eager else _run_backward(call, saved)
        found = found.fill_missing(late)
    dx, shape = found.dx, ctx.input_shape  # autograd casts gradients to the dtypes of their parameters
    return found if dx is None or dx.shape == shape else found._replace(dx=dx.view(shape))


def save_call(ctx: Any, call: Call, results: Sequence[Tensor | None]) -> None:
    """Saves what `saved_call` returns. results: Saved, then gradients if forward's are saved."""
    (inputs, *fields), not_saved = call, _NO_INPUTS
    number, dw_out = None if isinstance(inputs.num_items, Tensor) else inputs.num_items, inputs.grad_weight_out
    ctx.input_shape = inputs.input.shape
    if number is not None or dw_out is not None:
        # dw_out is not a saved tensor, because another graph's backward may legally add to it first.
        not_saved = not_saved._replace(num_items=number, grad_weight_out=dw_out)
        inputs = inputs._replace(num_items=None if number is not None else inputs.num_items, grad_weight_out=None)
    ctx.call = Call(not_saved, *fields)
    ctx.save_for_backward(*inputs, *results)


def saved_call(ctx: Any) -> tuple[Call, Saved, ForwardGrads]:
    """Unpacks saved tensors, so at most once: hooks, such as of checkpoints, may allow no more."""
    (inputs, saved, grads), (not_saved, *fields) = unpack(ctx.saved_tensors, Inputs, Saved), ctx.call
    number, dw_out = not_saved.num_items, not_saved.grad_weight_out
    if number is not None or dw_out is not None:
        inputs = inputs._replace(num_items=inputs.num_items if number is None else number, grad_weight_out=dw_out)
    return Call(inputs, *fields), saved, ForwardGrads(Grads(*grads))


# Operators ------------------------------------------------------------------------------------------------------------


def _run_operator(call: Call) -> tuple[Tensor, ...]:
    inputs, items = call.inputs, call.inputs.num_items
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code is not specialized on it
        dtype = accumulate_dtype(call.plan.compute_dtype)
        inputs = inputs._replace(num_items=torch.full((), items, dtype=dtype, device=inputs.input.device))
    return forward_operator.apply(*inputs, *call.plan, call.needed.as_bools())[: call.num_outputs()]


def _run_backward(call: Call, saved: Saved) -> Grads:
    """`backward` through its operator."""
    grads = backward_operator(*call.grad_outputs, *saved, *call.inputs, *call.plan, call.needed.as_bools())
    return Grads(*grads).with_dw_added_to(call.inputs.grad_weight_out)


def _scale_saved_grads(call: Call, saved: Saved, grads: Grads, grad_loss: Tensor) -> Grads:
    """The saved gradients times the loss's gradient, in the parameters' dtypes. dw is added to grad_weight_out."""
    if call.plan.why_portable is not None and call.plan.reduction == "mean":  # they are of the sum
        grad_loss = grad_loss / saved.state
    factor = grad_loss.view(1)  # not 0-dim: PyTorch would round a 0-dim factor to the gradients' 16-bit dtype
    dw_out = call.inputs.grad_weight_out
    if dw_out is not None and grads.dw is not None:
        dw_out.addcmul_(grads.dw, factor)
        grads = grads._replace(dw=None)
    pairs = zip(grads, call.inputs.parameters(), strict=True)
    return Grads(*(None if grad is None else _scaled(grad, factor, t.dtype) for grad, t in pairs))


def _scaled(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in one pass; in place if the dtype is grad's and the graph is not retained."""
    in_place = grad.dtype == dtype and not is_graph_kept()
    return torch.mul(grad, factor, out=grad if in_place else torch.empty_like(grad, dtype=dtype))


def _call_of(
    inputs: Inputs, plan: LossPlan, needs: Sequence[bool], kernels: LceKernels | None, device: torch.device | None,
    grad_outputs: GradOutputs = NO_GRADS,
) -> Call:  # fmt: skip
    """The call of an operator. kernels, device: of a dry run."""
    device = device or inputs.input.device
    if plan.why_portable is None:
        kernels = kernels or kernels_on(device)
    needed = grads_needed(inputs, plan, needs)
    return Call(inputs, plan, needed, kernels, device, True, eager=False, grad_outputs=grad_outputs)


def _forward(*args, kernels=None, device=None):
    inputs, plan, (needs,) = unpack(args, Inputs, LossPlan)
    outputs, saved, computed = forward(_call_of(inputs, plan, needs, kernels, device))
    return *Outputs(*outputs), *saved, *computed.grads


def _backward(*args, kernels=None, device=None):
    grad_outputs, saved, inputs, plan, (needs,) = unpack(args, GradOutputs, Saved, Inputs, LossPlan)
    call = _call_of(inputs, plan, needs, kernels, device, grad_outputs)
    return tuple(backward(call._replace(inputs=inputs._replace(grad_weight_out=None)), saved))  # functional


def _fake_forward(*args):
    inputs, plan, (needs,) = unpack(args, Inputs, LossPlan)
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
    grads = _fake_grads(inputs, plan, schedules.grads_in_forward(plan, needed))
    return *outputs, *Saved(state, live_x, exp_logits), *grads


def _fake_backward(*args):
    _, _, inputs, plan, (needs,) = unpack(args, GradOutputs, Saved, Inputs, LossPlan)
    return _fake_grads(inputs, plan, grads_needed(inputs, plan, needs))


def _fake_grads(inputs: Inputs, plan: LossPlan, needed: GradsNeeded) -> tuple[Tensor | None, ...]:
    x, (v, h) = inputs.input, inputs.linear_weight.shape
    dtypes = needed.dx, needed.dw, accumulate_dtype(plan.compute_dtype) if needed.db else None
    shapes = (x.numel() // h, h), (v, h), (v,)
    return tuple(x.new_empty(s, dtype=d) if d else None for s, d in zip(shapes, dtypes, strict=True))


def _forward_flops(*args, out_shape=None):
    inputs, plan, (needs,) = unpack(args, Inputs, LossPlan)
    dx, dw, _ = schedules.grads_in_forward(plan, GradsNeeded(*needs))
    return 2 * math.prod(inputs.input) * inputs.linear_weight[0] * (1 + bool(dx) + bool(dw))


def _backward_flops(*args, out_shape=None):
    grads, saved, inputs, plan, ((dx, dw, _),) = unpack(args, GradOutputs, Saved, Inputs, LossPlan)
    v, h = inputs.linear_weight
    m = math.prod(inputs.input[:-1])
    kept = 0 if saved.exp_logits is None else saved.exp_logits[0]
    if grads.entropy is not None and plan.why_portable is None:
        kept = 0  # kernels recompute all logits
    return 2 * v * h * (m * (dx + dw) + m - kept)


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
_CALL = f"{_arguments(Inputs)}, {_arguments(LossPlan)}, bool[] needs"
forward_operator = Operator(
    f"linear_cross_entropy_fwd({_CALL}) -> {_results(*Outputs._fields, *Saved._fields, *Grads._fields)}",
    _forward,
    _fake_forward,
    who=_WHO,
    flops=_forward_flops,
)
# Backward overwrites `exp_logits` unless the graph is retained. No other operator reads it.
backward_operator = Operator(
    f"linear_cross_entropy_bwd({_arguments(GradOutputs, 'grad_')}, {_arguments(Saved)}, {_CALL}) -> "
    f"{_results(*Grads._fields)}",
    _backward,
    _fake_backward,
    who=_WHO,
    flops=_backward_flops,
)


def _setup(ctx, args, results):
    inputs, plan, (needs,) = unpack(args, Inputs, LossPlan)
    needed = grads_needed(inputs, plan, needs)
    call = Call(inputs, plan, needed, None, inputs.input.device, return_lse=True, eager=False)
    save_call(ctx, call, results[len(Outputs._fields) :])


def _operator_gradients(ctx, *grads):
    dx, dw, db = _gradients(ctx, *grads)
    return Inputs(input=dx, linear_weight=dw, target=None, linear_bias=db)


OPERATORS = forward_operator, backward_operator
forward_operator.differentiable(_setup, _operator_gradients, outputs=len(Outputs._fields))
