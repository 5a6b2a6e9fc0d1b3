"""Linear cross entropy for autograd and torch.compile.

In eager mode, a torch.autograd.Function runs the kernels' schedules. `chunked` computes the gradients in forward. The
first backward scales these buffers in place and returns them; a second backward computes them again. torch.compile,
dispatch modes and the portable path use the custom operators at the end of this file, which run the same schedules but
copy where the autograd.Function writes in place.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from quackish import kernels as kernel_table
from quackish.configs import row_state
from quackish.configs.arguments import by_name
from quackish.configs.gemm import NUM_TICKETS
from quackish.errors import UnsupportedError
from quackish.ops.cuda import dtype_of
from quackish.ops.device import Device, as_current, check_same_device, device_of, refuse_compile, require_device
from quackish.ops.linear_cross_entropy import portable, schedules
from quackish.ops.linear_cross_entropy.buffers import RowState, padded_matrix, padded_strides
from quackish.ops.linear_cross_entropy.calls import (
    Call,
    ForwardResult,
    GradOutputs,
    Grads,
    GradsNeeded,
    Plan,
    ProblemFields,
)
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import LceKernels, Loop
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward, scale_grads
from quackish.ops.modes import as_plain, check_memory
from quackish.reference.linear_cross_entropy import accumulate_dtype

NO_SECOND_DERIVATIVES = "linear_cross_entropy: create_graph=True (double backward) is not supported"
_NO_RESULT, _NO_GRADS = ForwardResult(None), GradOutputs()
_GRAD_NAMES = [f"grad_{name}" for name in GradOutputs._fields]


def make_kernels(device: Device, loop: Loop = iter) -> LceKernels | CublasKernels:
    """New kernels of a device: with our GEMM if the kernel table has one for the GPU, else with cuBLAS's."""
    try:
        kernel_table.find("lce_gemm", device.gpu)
    except UnsupportedError:
        return CublasKernels(device, loop)
    return LceKernels(device, loop)


def kernels_of(device: Device) -> LceKernels | CublasKernels:
    """The kernels that the calls on a device share."""
    kernels = device.cache.get("linear_cross_entropy")
    if kernels is None:
        kernels = device.cache["linear_cross_entropy"] = make_kernels(device)
    return kernels


def kernels_on(device: torch.device) -> LceKernels | CublasKernels:
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


def _forward(
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
        out = _apply(x, w, bias, inputs, plan, return_lse, kernels)
        return out if isinstance(out, tuple) else (out, None)
    with torch.no_grad():
        outputs, _, _ = _forward(inputs, plan, kernels, GradsNeeded(None, None, False), return_lse)
    return (*outputs, None) if len(outputs) == 1 else tuple(outputs)


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
        outputs, state, out = _forward(inputs, plan, kernels, needed, return_lse)
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
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVES)
        grads = grads[: len(GradOutputs._fields)]  # predicted has none
        if any(map(is_batched, grads)):
            raise RuntimeError("linear_cross_entropy: vmap over gradients (is_grads_batched=True) is not supported")
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
            exp_logits = _writable_exp_logits(kernels.device, exp_logits, grad_outputs)
            saved = saved._replace(grads=Grads(), live_x=live_x, exp_logits=exp_logits)  # frees unused gradients
            call = prepare_call(inputs, plan, kernels, _writable_state(state), grad_outputs)
            grads = grads.fill_missing(schedules.backward(call, saved, needed))
        return of_all_inputs(ctx, _in_shape(grads, shape))


# Skips Python wrappers of torch that do nothing here, as in rms_norm.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_LinearCrossEntropy._backward_cls.apply = _LinearCrossEntropy.backward


def of_all_inputs(ctx, grads: tuple) -> tuple[Tensor | None, ...]:
    """What backward returns: the gradients, which are of the first inputs, and None for each other input."""
    return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


def _writable_exp_logits(device: Device, saved: Tensor | None, grad_outputs: GradOutputs) -> Tensor | None:
    """exp_logits that backward may overwrite: a copy of `saved` if the graph is retained or autograd is not running.

    None if backward recomputes the logits.
    """
    if grad_outputs.entropy is not None:  # backward recomputes the logits
        return None
    if saved is None or not _is_graph_kept():
        return saved
    rows, columns = saved.shape
    return padded_matrix(device, rows, columns, saved.dtype).copy_(saved)


def _writable_state(state: RowState) -> RowState:
    """A state that backward may write to: a copy with zeroed tickets if the graph is retained."""
    if not _is_graph_kept():
        return state
    memory = state.memory.clone()
    memory[:NUM_TICKETS] = 0
    return RowState.from_memory(memory, state.m)


_is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph


def is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (
        torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def _in_shape(grads: Grads, shape: torch.Size) -> Grads:
    """With dx in input's shape. Autograd casts gradients to the dtypes of their parameters."""
    return grads if grads.dx is None or grads.dx.shape == shape else grads._replace(dx=grads.dx.view(shape))


# Custom operators: functional; absent results are None ----------------------------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)


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
_lib.define(
    f"linear_cross_entropy_fwd({_CALL}) -> {_results(*Outputs._fields, *Saved._fields, *Grads._fields)}", tags=_TAGS
)
# Backward overwrites `exp_logits` unless the graph is retained (`_writable_exp_logits`). No other operator reads it.
_lib.define(
    f"linear_cross_entropy_bwd({_arguments(GradOutputs, 'grad_')}, {_arguments(Saved)}, {_CALL}) -> "
    f"{_results(*Grads._fields)}",
    tags=_TAGS,
)
_fwd_op = torch.ops.quackish.linear_cross_entropy_fwd.default
_bwd_op = torch.ops.quackish.linear_cross_entropy_bwd.default


def _run_ops(inputs: Inputs, plan: Plan) -> tuple[Tensor, ...]:
    refuse_compile("linear_cross_entropy", inputs.input.device)
    items = inputs.num_items
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code is not specialized on it
        dtype = accumulate_dtype(plan.compute_dtype)
        inputs = inputs._replace(num_items=torch.full((), items, dtype=dtype, device=inputs.input.device))
    outputs, _ = unpack(_fwd_op(*inputs, *plan, requires_grad(inputs)), Outputs)
    return outputs if plan.return_stats else (outputs.loss, outputs.lse)


def unpack(values: tuple, *types: Any) -> list:
    """The values as one NamedTuple of each type, and the remaining values."""
    parts, first = [], 0
    for kind in types:
        last = first + len(kind._fields)
        parts.append(kind(*values[first:last]))
        first = last
    return [*parts, values[first:]]


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
    outputs, state, out = _forward(inputs, plan, kernels, needed, return_lse=True, allow_dw_in_forward=False)
    return Outputs(*outputs), Saved(state.memory, out.live_x, out.exp_logits), out.grads


def run_backward(
    inputs: Inputs, plan: Plan, needed: GradsNeeded, grad_outputs: GradOutputs, saved: Saved, kernels=None, device=None
) -> Grads:
    """The gradients, from what run_forward returned for backward. Kernels add dw to grad_weight_out if it is given."""
    if plan.why_portable is not None:
        return portable.backward(inputs, plan, needed, grad_outputs, saved.state, saved.exp_logits, device)
    kernels = kernels or kernels_on(inputs.input.device)
    state = _writable_state(RowState.from_memory(saved.state, inputs.target.numel()))
    exp_logits = _writable_exp_logits(kernels.device, saved.exp_logits, grad_outputs)
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
    keeps = plan.schedule == "stored" and needed.any()
    if plan.why_portable is None:
        state = x.new_empty(row_state.size(m, plan.return_stats), dtype=torch.int32)
        if keeps:
            live_x = x.new_empty((m, h), dtype=plan.compute_dtype)
            exp_logits = x.new_empty_strided((m, v), padded_strides(v), dtype=plan.compute_dtype)
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


def _on_tensor_device(impl):
    """Runs `impl` on plain tensors, with their device as the current one for allocations and launches."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain("linear_cross_entropy", a) if isinstance(a, Tensor) else a for a in args]
        with as_current(next(t.device for t in args if isinstance(t, Tensor) and t.dim() > 0)):
            return impl(*args)

    return on_device


IMPLEMENTATIONS = {_fwd_op: _fwd_impl, _bwd_op: _bwd_impl}
for _op, _impl, _fake in (("fwd", _fwd_impl, _fwd_fake), ("bwd", _bwd_impl, _bwd_fake)):
    _lib.impl(f"linear_cross_entropy_{_op}", _on_tensor_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::linear_cross_entropy_{_op}", _fake, lib=_lib)


def _setup_context(ctx, inputs, output):
    inputs, ctx.plan, (ctx.needs,) = unpack(inputs, Inputs, Plan)
    ctx.device, ctx.grad_weight_out = device_of(inputs.input.device), inputs.grad_weight_out
    saved = output[len(Outputs._fields) :]
    ctx.mark_non_differentiable(*(t for t in saved if t is not None))
    ctx.save_for_backward(*inputs._replace(grad_weight_out=None), *saved)
    ctx.set_materialize_grads(False)


def _scaled_grad(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in one pass; in place if the dtype is grad's and the graph is not retained."""
    in_place = grad.dtype == dtype and not _is_graph_kept()
    return torch.mul(grad, factor, out=grad if in_place else torch.empty_like(grad, dtype=dtype))


def _op_backward(ctx, *grads):
    if torch.is_grad_enabled():
        raise RuntimeError(NO_SECOND_DERIVATIVES)
    grad_outputs, _ = unpack(grads, GradOutputs)  # the other outputs have none
    if all(grad is None for grad in grad_outputs):
        return of_all_inputs(ctx, Grads())
    inputs, saved, computed, _ = unpack(ctx.saved_tensors, Inputs, Saved, Grads)
    check_same_device("linear_cross_entropy", ctx.device, inputs.input.device)
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
        late = Grads(*_bwd_op(*grad_outputs, *saved, *inputs, *plan, missing))
        if dw_out is not None and late.dw is not None:
            dw_out.add_(late.dw)
            late = late._replace(dw=None)
        grads = grads.fill_missing(late)
    dx, dw, db = _in_shape(grads, inputs.input.shape)
    return of_all_inputs(ctx, Inputs(input=dx, linear_weight=dw, target=None, linear_bias=db))


torch.library.register_autograd(
    "quackish::linear_cross_entropy_fwd", _op_backward, setup_context=_setup_context, lib=_lib
)
