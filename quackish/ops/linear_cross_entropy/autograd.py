"""Linear cross entropy for autograd and torch.compile.

In eager mode, a torch.autograd.Function runs the kernels' schedules. `chunked` computes the gradients in forward. The
first backward scales these buffers in place and returns them; a second backward computes them again. torch.compile,
dispatch modes and the portable path use the custom operators at the end of this file, which run the same schedules but
copy where the autograd.Function writes in place.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from quackish import kernels as kernel_table
from quackish.configs.gemm import NUM_TICKETS
from quackish.errors import UnsupportedError
from quackish.ops.device import Device, check_same_device, device_of, refuse_compile, require_device
from quackish.ops.linear_cross_entropy import portable, schedules
from quackish.ops.linear_cross_entropy.calls import Call, ForwardResult, Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import LceKernels, Loop, RowState, padded_matrix, padded_strides
from quackish.ops.linear_cross_entropy.schedules import grads_in_forward, scale_grads
from quackish.ops.modes import as_plain, check_memory
from quackish.reference.linear_cross_entropy import accumulate_dtype

NO_SECOND_DERIVATIVES = "linear_cross_entropy: create_graph=True (double backward) is not supported"
_NO_RESULT = ForwardResult(None)
_GRAD_OUTPUTS = "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy"


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


def prepare_call(inputs: Inputs, plan: Plan, kernels, state: RowState | None = None, *grads: Tensor | None) -> Call:
    """The Call, with the user's tensors in the dtypes, strides and alignment that the kernels take.

    grads: of `flatten_grad_outputs`.
    """
    x, w, bias, target, class_weight, logit_scale, num_items, dw_out = inputs
    dtype, (v, h) = plan.compute_dtype, w.shape
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
    return Call(
        kernels, plan, state or RowState.new(x, plan.return_stats), x.shape[0], h, v, x, w, target, bias, class_weight,
        total_weight, num_items, plan.softcap or 0.0, logit_scale, dw_out, *grads,
    )  # fmt: skip


def requires_grad(inputs: Inputs) -> list[bool]:
    """Whether input, linear_weight and linear_bias need gradients."""
    enabled = torch.is_grad_enabled()
    return [enabled and t is not None and t.requires_grad for t in inputs[:3]]


def grads_needed(inputs: Inputs, plan: Plan, needs: Sequence[bool]) -> GradsNeeded:
    """The gradients to compute. In the parameter's dtype if our GEMM can write it, else in fp32 (fp64 for fp64)."""
    dx, dw, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, accumulate_dtype(plan.compute_dtype)
    direct = (plan.compute_dtype,) if plan.why_portable is None else ()
    dw_out = inputs.grad_weight_out
    if dw_out is not None and dw_out.dtype in (*direct, fp32):
        dw = dw_out.dtype
    dx, dw = dx if dx in direct else fp32, dw if dw in direct else fp32
    return GradsNeeded(dx if needs[0] else None, dw if needs[1] else None, needs[2])


def _forward(
    inputs: Inputs, plan: Plan, kernels, needed: GradsNeeded, return_lse: bool, allow_dw_in_forward: bool = True
) -> tuple[list[Tensor], RowState, ForwardResult]:
    """([loss, then lse and the other statistics if requested], the row state, the schedule's result)."""
    call = prepare_call(inputs, plan, kernels)
    out, state, shape = schedules.forward(call, needed, allow_dw_in_forward), call.state, inputs.target.shape
    outputs = [reshaped(out.loss, shape) if plan.reduction == "none" else out.loss.sum()]
    floats = [state.lse] if return_lse else []
    if plan.return_stats:
        floats = [state.lse, state.log_prob, state.entropy]
    # copies, because users may write to them
    outputs += [reshaped(state.tensor(address, call.m, torch.float32).clone(), shape) for address in floats]
    if plan.return_stats:
        outputs.append(reshaped(state.tensor(state.predicted, call.m).long(), shape))
    return outputs, state, out


def flatten_grad_outputs(plan: Plan, grad_loss: Tensor | None, *row_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The output gradients, at least one, in the shapes of Call: grad_loss 0-dim or (m,), the others (m,)."""
    row_grads = [None if grad is None else grad.reshape(-1).contiguous() for grad in row_grads]
    if grad_loss is None:
        grad_loss = next(grad for grad in row_grads if grad is not None).new_zeros(())
    elif plan.reduction == "none":
        grad_loss = grad_loss.reshape(-1)
        grad_loss = grad_loss[0] if grad_loss.stride(0) == 0 else grad_loss.contiguous()
    return grad_loss, *row_grads


def run(inputs: Inputs, plan: Plan, return_lse: bool, eager: bool, kernels=None) -> tuple[Tensor | None, ...]:
    """(loss, lse) of checked arguments; with return_stats (loss, lse, log_prob, entropy, predicted).

    lse may be None if not requested. eager: launch kernels directly instead of through the custom operators.
    kernels: in eager, those of the plan; None on the portable path.
    """
    if inputs.logit_scale is not None:
        inputs = inputs._replace(logit_scale=logit_scale_tensor(inputs, plan))
    if not eager or plan.why_portable is not None:
        return _run_ops(inputs, plan)
    x, w, bias = inputs[:3]
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
        *tensors, items, dw_out = inputs
        needed = grads_needed(inputs, plan, ctx.needs_input_grad)
        outputs, state, out = _forward(inputs, plan, kernels, needed, return_lse)
        number, items = (None, items) if isinstance(items, Tensor) else (items, None)
        ctx.save_for_backward(*tensors, items, out.live_x, out.exp_logits)
        ctx.computed = ForwardResult(None, out.grads, dw=out.dw, dw_classes=out.dw_classes)
        # dw_out is not a saved tensor, because another graph's backward may legally add to it first.
        ctx.saved = kernels, plan, needed, state, number, dw_out, input.shape
        ctx.device = device_of(input.device)
        ctx.set_materialize_grads(False)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    def backward(ctx, grad_loss, grad_lse=None, grad_log_prob=None, grad_entropy=None, grad_predicted=None):
        if torch.is_grad_enabled():
            raise RuntimeError(NO_SECOND_DERIVATIVES)
        grads = grad_loss, grad_lse, grad_log_prob, grad_entropy
        if any(map(is_batched, grads)):
            raise RuntimeError("linear_cross_entropy: vmap over gradients (is_grads_batched=True) is not supported")
        if all(grad is None for grad in grads):
            return (None,) * 7
        grads = [as_plain("linear_cross_entropy", grad) for grad in grads]
        check_memory("linear_cross_entropy", **dict(zip(_GRAD_OUTPUTS, grads, strict=True)))
        kernels, plan, needed, state, number, dw_out, shape = ctx.saved
        check_same_device("linear_cross_entropy", ctx.device, state.memory.device)
        grad_loss, *row_grads = flatten_grad_outputs(plan, *grads)
        saved = ctx.__dict__.pop("computed", _NO_RESULT)  # atomic: only one backward gets the buffers
        grads = Grads()
        if not any(grad is not None for grad in row_grads) and any(grad is not None for grad in saved.grads):
            grads = scale_grads(kernels, saved, grad_loss, dw_out)
            needed = needed.without(grads_in_forward(plan, needed))
        if needed.any():
            *tensors, items, live_x, exp_logits = ctx.saved_tensors
            inputs = Inputs(*tensors, number if items is None else items, dw_out)
            exp_logits = _writable_exp_logits(exp_logits, grad_entropy)
            saved = saved._replace(grads=Grads(), live_x=live_x, exp_logits=exp_logits)  # frees unused gradients
            state = _writable_state(state, inputs.target.numel())
            call = prepare_call(inputs, plan, kernels, state, grad_loss, *row_grads)
            grads = grads.fill_missing(schedules.backward(call, saved, needed))
        return *_in_shape(grads, shape), None, None, None, None


# Skips Python wrappers of torch that do nothing here, as in rms_norm.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_LinearCrossEntropy._backward_cls.apply = _LinearCrossEntropy.backward


def _writable_exp_logits(saved: Tensor | None, grad_entropy: Tensor | None) -> Tensor | None:
    """exp_logits that backward may overwrite: a copy of `saved` if the graph is retained or autograd is not running.

    None if backward recomputes the logits.
    """
    if grad_entropy is not None:  # backward recomputes the logits
        return None
    if saved is None or not _is_graph_kept():
        return saved
    rows, columns = saved.shape
    return padded_matrix(saved, rows, columns, saved.dtype).copy_(saved)


def _writable_state(state: RowState, m: int) -> RowState:
    """A state that backward may write to: a copy with zeroed tickets if the graph is retained."""
    if not _is_graph_kept():
        return state
    memory = state.memory.clone()
    memory[:NUM_TICKETS] = 0
    return RowState.from_memory(memory, m)


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
_CALL = (  # Inputs, Plan, and which of input, linear_weight and linear_bias require grad
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? logit_scale, "
    "Tensor? num_items, Tensor? grad_weight_out, int ignore_index, float label_smoothing, float? softcap, "
    "float z_loss, str reduction, bool return_stats, ScalarType compute_dtype, str schedule, SymInt chunk_rows, "
    "bool dx_in_forward, bool dw_in_chunks, str? why_portable, bool[] needs"
)
_GRADS = "Tensor dx, Tensor dw, Tensor db"
# On the portable path, state is the divisor of "mean", and exp_logits are the logits in fp32 or fp64.
_lib.define(
    f"linear_cross_entropy_fwd({_CALL}) -> (Tensor loss, Tensor lse, Tensor log_prob, Tensor entropy, "
    f"Tensor predicted, Tensor state, Tensor live_x, Tensor exp_logits, {_GRADS})",
    tags=_TAGS,
)
# Backward overwrites `exp_logits` unless the graph is retained (`_writable_exp_logits`). No other operator reads it.
_lib.define(
    "linear_cross_entropy_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_log_prob, Tensor? grad_entropy, "
    f"Tensor? state, Tensor? live_x, Tensor? exp_logits, {_CALL}) -> ({_GRADS})",
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
    return _fwd_op(*inputs, *plan, requires_grad(inputs))[: 5 if plan.return_stats else 2]


def _parse(args) -> tuple[Inputs, Plan, GradsNeeded]:
    """The arguments that both operators share: Inputs, Plan, and the GradsNeeded that `needs` means."""
    inputs, plan = Inputs(*args[:8]), Plan(*args[8:-1])
    return inputs, plan, grads_needed(inputs, plan, args[-1])


def run_forward(inputs: Inputs, plan: Plan, needed: GradsNeeded, kernels=None, device=None) -> tuple:
    """(loss, lse, log_prob, entropy, predicted, state, live_x, exp_logits, dx, dw, db); absent ones are None.

    kernels: those of the plan, if the caller has them. Dry runs of the portable path pass the simulated device.
    """
    shape = inputs.target.shape
    if plan.why_portable is not None:
        loss, stats, divisor, grads, logits = portable.forward(inputs, plan, needed, device)
        outputs = [reshaped(loss, shape) if loss.dim() else loss, *(reshaped(t, shape) for t in stats)]
        return *outputs, *[None] * (5 - len(outputs)), divisor, None, logits, *grads
    kernels = kernels or kernels_on(inputs.input.device)
    outputs, state, out = _forward(inputs, plan, kernels, needed, return_lse=True, allow_dw_in_forward=False)
    return *outputs, *[None] * (5 - len(outputs)), state.memory, out.live_x, out.exp_logits, *out.grads


def run_backward(
    inputs: Inputs,
    plan: Plan,
    needed: GradsNeeded,
    grad_outputs: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None],  # of loss, lse, log_prob, entropy
    saved: Sequence[Tensor | None],  # state, live_x, exp_logits
    kernels=None,
    device=None,
) -> Grads:
    """The gradients, from what run_forward returned for backward. Kernels add dw to grad_weight_out if it is given."""
    state, live_x, exp_logits = saved
    if plan.why_portable is not None:
        return portable.backward(inputs, plan, needed, *grad_outputs, state, exp_logits, device)
    m = inputs.target.numel()
    kernels, state = kernels or kernels_on(inputs.input.device), _writable_state(RowState.from_memory(state, m), m)
    call = prepare_call(inputs, plan, kernels, state, *flatten_grad_outputs(plan, *grad_outputs))
    saved = ForwardResult(None, Grads(), live_x, _writable_exp_logits(exp_logits, grad_outputs[3]))
    return schedules.backward(call, saved, needed)


def _fwd_impl(*args, kernels=None, device=None):
    return run_forward(*_parse(args), kernels, device)


def _bwd_impl(*args, kernels=None, device=None):
    """args: gradients of loss, lse, log_prob and entropy; state, live_x and exp_logits; the shared arguments."""
    inputs, plan, needed = _parse(args[7:])
    inputs = inputs._replace(grad_weight_out=None)  # operators are functional
    return tuple(run_backward(inputs, plan, needed, args[:4], args[4:7], kernels, device))


def _fake_grads(inputs: Inputs, plan: Plan, needed: GradsNeeded) -> tuple[Tensor | None, ...]:
    x, (v, h) = inputs.input, inputs.linear_weight.shape
    dtypes = needed.dx, needed.dw, accumulate_dtype(plan.compute_dtype) if needed.db else None
    shapes = (x.numel() // h, h), (v, h), (v,)
    return tuple(x.new_empty(s, dtype=d) if d else None for s, d in zip(shapes, dtypes, strict=True))


def _fwd_fake(*args):
    inputs, plan, needed = _parse(args)
    x, target, (v, h) = inputs.input, inputs.target, inputs.linear_weight.shape
    m, dtype, state, live_x, exp_logits = x.numel() // h, accumulate_dtype(plan.compute_dtype), None, None, None
    keeps = plan.schedule == "stored" and needed.any()
    if plan.why_portable is None:
        state = x.new_empty(RowState.size(m, plan.return_stats), dtype=torch.int32)
        if keeps:
            live_x = x.new_empty((m, h), dtype=plan.compute_dtype)
            exp_logits = x.new_empty_strided((m, v), padded_strides(v), dtype=plan.compute_dtype)
    else:
        state = x.new_empty((), dtype=dtype) if plan.reduction == "mean" else None
        exp_logits = x.new_empty((m, v), dtype=dtype) if keeps else None
    loss = x.new_empty(target.shape if plan.reduction == "none" else (), dtype=dtype)
    stats = [loss.new_empty(target.shape), None, None, None]
    if plan.return_stats:
        stats = [loss.new_empty(target.shape, dtype=d) for d in (dtype, dtype, dtype, torch.int64)]
    grads = _fake_grads(inputs, plan, grads_in_forward(plan, needed))
    return loss, *stats, state, live_x, exp_logits, *grads


def _bwd_fake(*args):
    return _fake_grads(*_parse(args[7:]))


def _on_tensor_device(impl):
    """Runs `impl` on plain tensors, with their device as the current one for allocations and launches."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain("linear_cross_entropy", a) if isinstance(a, Tensor) else a for a in args]
        with torch.cuda.device_of(next(t for t in args if isinstance(t, Tensor) and t.dim() > 0)):
            return impl(*args)

    return on_device


IMPLEMENTATIONS = {_fwd_op: _fwd_impl, _bwd_op: _bwd_impl}
for _op, _impl, _fake in (("fwd", _fwd_impl, _fwd_fake), ("bwd", _bwd_impl, _bwd_fake)):
    _lib.impl(f"linear_cross_entropy_{_op}", _on_tensor_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::linear_cross_entropy_{_op}", _fake, lib=_lib)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.grad_weight_out = inputs[:8]
    ctx.args, ctx.device = inputs[8:], device_of(tensors[0].device)
    saved = output[5:]
    ctx.mark_non_differentiable(*(t for t in saved if t is not None))
    ctx.save_for_backward(*tensors, *saved)
    ctx.set_materialize_grads(False)


def _scaled_grad(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in one pass; in place if the dtype is grad's and the graph is not retained."""
    in_place = grad.dtype == dtype and not _is_graph_kept()
    return torch.mul(grad, factor, out=grad if in_place else torch.empty_like(grad, dtype=dtype))


def _op_backward(ctx, grad_loss, grad_lse, grad_log_prob, grad_entropy, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(NO_SECOND_DERIVATIVES)
    row_grads = grad_lse, grad_log_prob, grad_entropy
    has_row_grads = any(grad is not None for grad in row_grads)
    if grad_loss is None and not has_row_grads:
        return (None,) * (8 + len(ctx.args))
    *tensors, state, live_x, exp_logits, dx, dw, db = ctx.saved_tensors
    check_same_device("linear_cross_entropy", ctx.device, tensors[0].device)
    *options, needs = ctx.args
    plan, dw_out = Plan(*options), ctx.grad_weight_out if needs[1] else None
    inputs, grads = Inputs(*tensors, dw_out), Grads()
    computed = grads if has_row_grads else Grads(dx, dw, db)
    missing = [need and g is None for need, g in zip(needs, computed, strict=True)]
    if any(g is not None for g in computed):
        is_sum = plan.why_portable is not None and plan.reduction == "mean"
        # Not 0-dim: PyTorch would round a 0-dim factor to the gradients' 16-bit dtype.
        factor = (grad_loss / state if is_sum else grad_loss).view(1)
        if dw_out is not None and computed.dw is not None:
            dw_out.addcmul_(computed.dw, factor)
            computed = computed._replace(dw=None)
        pairs = zip(computed, inputs[:3], strict=True)
        grads = Grads(*(None if g is None else _scaled_grad(g, factor, t.dtype) for g, t in pairs))
    if any(missing):
        saved = state, live_x, exp_logits
        late = Grads(*_bwd_op(grad_loss, *row_grads, *saved, *inputs, *options, missing))
        if dw_out is not None and late.dw is not None:
            dw_out.add_(late.dw)
            late = late._replace(dw=None)
        grads = grads.fill_missing(late)
    return *_in_shape(grads, inputs.input.shape), *(None,) * (5 + len(ctx.args))


torch.library.register_autograd(
    "quackish::linear_cross_entropy_fwd", _op_backward, setup_context=_setup_context, lib=_lib
)
