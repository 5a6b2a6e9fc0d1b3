"""Linear cross entropy for autograd in plain eager mode, where a torch.autograd.Function runs the kernels' schedules.

`chunked` computes the gradients in forward. The first backward scales these buffers in place and returns them; a second
backward computes them again.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import dtype_of
from quackish.device.kernel_device import KernelDevice, check_same_device, device_of, require_device
from quackish.device.modes import as_plain, check_memory
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.once import once
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.buffers import RowState, padded_matrix
from quackish.ops.linear_cross_entropy.calls import (
    Call,
    ForwardResult,
    GradOutputs,
    Grads,
    GradsNeeded,
    Plan,
    ProblemFields,
    unpack,
)
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.launches import LceKernels
from quackish.ops.linear_cross_entropy.reference import accumulate_dtype
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward, scale_grads
from quackish.ops.operator import fast_apply, refuse_second_derivatives

_NO_RESULT, _NO_GRADS = ForwardResult(None), GradOutputs()
_GRAD_NAMES = [f"grad_{name}" for name in GradOutputs._fields]


def kernels_of(device: KernelDevice) -> LceKernels:
    """The kernels that the calls on a device share."""
    return once(device.cache, "linear_cross_entropy", LceKernels, device)


def kernels_on(device: torch.device) -> LceKernels:
    return kernels_of(require_device("linear_cross_entropy", device))


def prepare_call(
    inputs: Inputs, plan: Plan, kernels, state: RowState | None = None, grad_outputs: GradOutputs = _NO_GRADS
) -> Call:
    """The Call, with the user's tensors in the dtypes, strides and alignment that the kernels take.

    grad_outputs: of `prepare_grads`.
    """
    (x, w, bias), target, class_weight = inputs.parameters(), inputs.target, inputs.weight
    logit_scale, num_items, dtype, (v, h) = inputs.logit_scale, inputs.num_items, plan.compute_dtype, w.shape
    check_memory(
        "linear_cross_entropy", input=x, linear_weight=w, linear_bias=bias, target=target, weight=class_weight,
        logit_scale=logit_scale, num_items=num_items if isinstance(num_items, Tensor) else None,
    )  # fmt: skip
    if x.dim() != 2:
        x = x.reshape(-1, h)
    if x.dtype != dtype:
        x = x.to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    # a single class is contiguous with any stride
    if w.dtype != dtype or not w.is_contiguous() or w.stride(0) != h or w.data_ptr() % 16:
        w = w.new_empty(w.shape, dtype=dtype).copy_(w)
    if bias is not None:
        bias = (bias if bias.dtype in (dtype, torch.float32) else bias.to(torch.float32)).contiguous()
    total_weight = None
    if class_weight is not None:
        class_weight = class_weight.to(torch.float32).contiguous()
        if plan.label_smoothing:
            total_weight = class_weight.sum()
    if target.dim() != 1 or not target.is_contiguous():
        target = target.reshape(-1).contiguous()
    m, device, smoothing = x.shape[0], kernels.device, plan.label_smoothing > 0
    fields = by_name(ProblemFields)(
        h=h, dtype=dtype, target_dtype=target.dtype, bias_dtype=dtype_of(bias),
        class_weight_dtype=dtype_of(class_weight), softcap=plan.softcap is not None, smoothing=smoothing,
        weighted=smoothing and class_weight is not None, logit_scale=logit_scale is not None,
        return_stats=plan.return_stats, x_aligned=not (x.data_ptr() | x.stride(0) * 2) & 15,  # each row on 16 bytes
    )  # fmt: skip
    return by_name(Call)(
        kernels, device, plan, state or RowState.new(device, m, plan.return_stats), m, h, v, x, w, target, bias=bias,
        class_weight=class_weight, total_weight=total_weight, num_items=num_items, softcap=plan.softcap or 0.0,
        logit_scale=logit_scale, dw_out=inputs.grad_weight_out, fields=fields, grad_outputs=grad_outputs,
    )  # fmt: skip


def requires_grad(inputs: Inputs) -> list[bool]:
    """Whether input, linear_weight and linear_bias need gradients."""
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in inputs.parameters()]


def grads_needed(inputs: Inputs, plan: Plan, needs: Sequence[bool]) -> GradsNeeded:
    """The gradients to compute. In the parameter's dtype if our GEMM can write it, else in fp32 (fp64 for fp64)."""
    dx, dw, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, accumulate_dtype(plan.compute_dtype)
    direct = (plan.compute_dtype,) if plan.why_portable is None else ()
    dw_out = inputs.grad_weight_out
    if dw_out is not None and dw_out.dtype in (*direct, fp32):
        dw = dw_out.dtype
    dx, dw = dx if dx in direct else fp32, dw if dw in direct else fp32
    needs_dx, needs_dw, needs_db = needs
    return GradsNeeded(dx if needs_dx else None, dw if needs_dw else None, needs_db)


def forward(
    inputs: Inputs, plan: Plan, kernels, needed: GradsNeeded, return_lse: bool, allow_dw_in_forward: bool = True
) -> tuple[list[Tensor], RowState, ForwardResult]:
    """([loss, then lse and the other statistics if requested], the row state, the schedule's result)."""
    call = prepare_call(inputs, plan, kernels)
    out, state, shape = schedules.forward(call, needed, allow_dw_in_forward), call.state, inputs.target.shape
    outputs = [reshaped(out.loss, shape) if plan.reduction == "none" else out.loss.sum()]
    names = ["lse"] if return_lse else []
    if plan.return_stats:
        names = ["lse", "log_prob", "entropy"]
    # copies, because users may write to them
    outputs += [reshaped(state.tensor(name).clone(), shape) for name in names]
    if plan.return_stats:
        outputs.append(reshaped(state.tensor("predicted").long(), shape))
    return outputs, state, out


def prepare_grads(plan: Plan, grads: GradOutputs) -> GradOutputs:
    """The output gradients, at least one, in the shapes of Call: of the loss 0-dim or (m,), the others (m,)."""
    loss, *row_grads = grads
    if grads.has_row_grads():
        row_grads = [None if grad is None else grad.reshape(-1).contiguous() for grad in row_grads]
    if loss is None:
        loss = next(grad for grad in row_grads if grad is not None).new_zeros(())
    elif plan.reduction == "none":
        loss = loss.reshape(-1)
        loss = loss[0] if loss.stride(0) == 0 else loss.contiguous()
    elif not grads.has_row_grads():
        return grads
    return GradOutputs(loss, *row_grads)


def logit_scale_tensor(inputs: Inputs, plan: Plan) -> Tensor:
    """logit_scale on input's device, in the dtype of the logits."""
    scale, device, dtype = inputs.logit_scale, inputs.input.device, accumulate_dtype(plan.compute_dtype)
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.to(dtype)
    # Multiply: copying a CPU tensor would synchronize, and torch.full would specialize compiled code on the number.
    return (torch.ones((), dtype=dtype, device=device) * scale).to(dtype)


def reshaped(t: Tensor, shape: torch.Size) -> Tensor:
    """t in another shape, but not as an autograd view: users may write to it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


# Autograd in plain eager ---------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, inputs, plan, return_lse, kernels):
        # Only the first three need autograd, and each argument costs host time.
        needed = grads_needed(inputs, plan, ctx.needs_input_grad[: len(Grads._fields)])
        outputs, state, out = forward(inputs, plan, kernels, needed, return_lse)
        number, dw_out = None if isinstance(inputs.num_items, Tensor) else inputs.num_items, inputs.grad_weight_out
        if number is not None or dw_out is not None:
            inputs = inputs._replace(num_items=None if number is not None else inputs.num_items, grad_weight_out=None)
        ctx.save_for_backward(*inputs, out.live_x, out.exp_logits)
        ctx.computed = ForwardResult(None, out.grads, dw=out.dw, dw_classes=out.dw_classes)
        # dw_out is not a saved tensor, because another graph's backward may legally add to it first.
        ctx.saved = kernels, plan, needed, state, number, dw_out, input.shape
        ctx.device = device_of(input.device)
        ctx.set_materialize_grads(False)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx, *grads):
        grads = grads[: len(GradOutputs._fields)]  # predicted has none
        refuse_second_derivatives("linear_cross_entropy", *grads)
        if all(grad is None for grad in grads):
            return of_all_inputs(ctx, Grads())
        grads = [as_plain("linear_cross_entropy", grad) for grad in grads]
        check_memory("linear_cross_entropy", **dict(zip(_GRAD_NAMES, grads, strict=False)))
        kernels, plan, needed, state, number, dw_out, shape = ctx.saved
        check_same_device("linear_cross_entropy", ctx.device, state.memory.device)
        grad_outputs, grads = prepare_grads(plan, GradOutputs(*grads)), Grads()
        saved = ctx.__dict__.pop("computed", _NO_RESULT)  # atomic: only one backward gets the buffers
        if not grad_outputs.has_row_grads() and any(grad is not None for grad in saved.grads):
            grads = scale_grads(kernels, saved, grad_outputs.loss, dw_out)
            needed = needed.without(grads_in_forward(plan, needed))
        if needed.any():
            inputs, (live_x, exp_logits) = unpack(ctx.saved_tensors, Inputs)
            if number is not None or dw_out is not None:
                items = inputs.num_items if number is None else number
                inputs = inputs._replace(num_items=items, grad_weight_out=dw_out)
            exp_logits = writable_exp_logits(kernels.device, exp_logits, grad_outputs)
            saved = saved._replace(grads=Grads(), live_x=live_x, exp_logits=exp_logits)  # frees unused gradients
            call = prepare_call(inputs, plan, kernels, writable_state(state), grad_outputs)
            grads = grads.fill_missing(schedules.backward(call, saved, needed))
        return of_all_inputs(ctx, in_shape(grads, shape))


apply = fast_apply(_LinearCrossEntropy)


def of_all_inputs(ctx, grads: tuple) -> tuple[Tensor | None, ...]:
    """What backward returns: the gradients, which are of the first inputs, and None for each other input."""
    return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


def writable_exp_logits(device: KernelDevice, saved: Tensor | None, grad_outputs: GradOutputs) -> Tensor | None:
    """exp_logits that backward may overwrite: a copy of `saved` if the graph is retained or autograd is not running.

    None if backward recomputes the logits.
    """
    if grad_outputs.entropy is not None:  # backward recomputes the logits
        return None
    if saved is None or not is_graph_kept():
        return saved
    rows, columns = saved.shape
    return padded_matrix(device, rows, columns, saved.dtype).copy_(saved)


def writable_state(state: RowState) -> RowState:
    """A state that backward may write to: a copy with zeroed tickets if the graph is retained."""
    if not is_graph_kept():
        return state
    memory = state.memory.clone()
    memory[:NUM_TICKETS] = 0
    return RowState.from_memory(memory, state.m)


is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph


def in_shape(grads: Grads, shape: torch.Size) -> Grads:
    """With dx in input's shape. Autograd casts gradients to the dtypes of their parameters."""
    return grads if grads.dx is None or grads.dx.shape == shape else grads._replace(dx=grads.dx.view(shape))
