"""Linear cross entropy for autograd and torch.compile.

In plain eager a torch.autograd.Function runs the kernels' schedules. `chunked` has its gradients ready before backward
knows what arrives; backward hands these buffers out once, scaled in place, and makes them anew when it is asked again.
torch.compile, dispatch modes and the portable path use the custom operators at the end of this file: the same
schedules, with copies.
"""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from quackish import kernels
from quackish.configs.gemm import NUM_TICKETS
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu, gpu_of
from quackish.ops import cuda
from quackish.ops.kernel_for import KernelFor, kernel_for
from quackish.ops.linear_cross_entropy import portable, schedules
from quackish.ops.linear_cross_entropy.calls import Call, Forward, Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import LceKernels, RowState, padded, padded_strides
from quackish.ops.linear_cross_entropy.schedules import made_in_forward, scale_grads
from quackish.ops.modes import as_plain, check_memory
from quackish.reference.linear_cross_entropy import accumulate_dtype

NO_SECOND_DERIVATIVES = "linear_cross_entropy: create_graph=True (double backward) is not supported"
_NOTHING = Forward(None)
_ARRIVING = "grad_loss", "grad_lse", "grad_log_prob", "grad_entropy"


def kernels_on(
    device: torch.device, gpu: Gpu | None = None, kernel_for: KernelFor = kernel_for
) -> LceKernels | CublasKernels:
    """The kernels of a device: with our GEMM if the table of kernels has one for the GPU, else with cuBLAS's."""
    gpu = gpu or gpu_of(device.index)
    try:
        kernels.find("lce_gemm", gpu)
    except UnsupportedError:
        return CublasKernels(device, gpu, kernel_for)
    return LceKernels(device, gpu, kernel_for)


kernels_of = functools.cache(kernels_on)


def call_of(inputs: Inputs, plan: Plan, k, state: RowState | None = None, *grads: Tensor | None) -> Call:
    """With the user's tensors in the dtypes, strides and alignment that the kernels take. `grads`: of `incoming`."""
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
        k, plan, state or RowState.new(x, plan.return_stats), x.shape[0], h, v, x, w, target, bias, class_weight,
        total_weight, num_items, plan.softcap or 0.0, logit_scale, dw_out, *grads,
    )  # fmt: skip


def grads_needed(inputs: Inputs, plan: Plan, needs: Sequence[bool]) -> GradsNeeded:
    """Gradients are computed in their own dtypes if a GEMM of ours can, else in fp32 (fp64 for fp64)."""
    dx, dw, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, accumulate_dtype(plan.compute_dtype)
    direct = (plan.compute_dtype,) if plan.why_portable is None else ()
    dw_out = inputs.grad_weight_out
    if dw_out is not None and dw_out.dtype in (*direct, fp32):
        dw = dw_out.dtype
    dx, dw = dx if dx in direct else fp32, dw if dw in direct else fp32
    return GradsNeeded(dx if needs[0] else None, dw if needs[1] else None, needs[2])


def _forward(
    inputs: Inputs, plan: Plan, k, needed: GradsNeeded, return_lse: bool, may_begin: bool = True
) -> tuple[list[Tensor], RowState, Forward]:
    """([loss, then lse and the other statistics if asked for], the rows' state, what backward needs)."""
    call = call_of(inputs, plan, k)
    out, state, shape = schedules.forward(call, needed, may_begin), call.state, inputs.target.shape
    outputs = [shaped(out.loss, shape) if plan.reduction == "none" else out.loss.sum()]
    floats = [state.lse] if return_lse else []
    if plan.return_stats:
        floats = [state.lse, state.log_prob, state.entropy]
    # copies: users may write to theirs
    outputs += [shaped(state.tensor(at, call.m, torch.float32).clone(), shape) for at in floats]
    if plan.return_stats:
        outputs.append(shaped(state.tensor(state.predicted, call.m).long(), shape))
    return outputs, state, out


def incoming(plan: Plan, grad_loss: Tensor | None, *row_grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Call.grad_loss, grad_lse, grad_log_prob and grad_entropy from what arrives in backward: at least one."""
    row_grads = [None if grad is None else grad.reshape(-1).contiguous() for grad in row_grads]
    if grad_loss is None:
        grad_loss = next(grad for grad in row_grads if grad is not None).new_zeros(())
    elif plan.reduction == "none":
        grad_loss = grad_loss.reshape(-1)
        grad_loss = grad_loss[0] if grad_loss.stride(0) == 0 else grad_loss.contiguous()
    return grad_loss, *row_grads


def run(inputs: Inputs, plan: Plan, return_lse: bool, eager: bool, k=None) -> tuple[Tensor | None, ...]:
    """(loss, lse) of checked arguments, with return_stats (loss, lse, log_prob, entropy, predicted). An lse that is not
    asked for may be None. `eager`: nobody but autograd has to see what is computed.

    k: other kernels than the device's, in eager only.
    """
    if inputs.logit_scale is not None:
        inputs = inputs._replace(logit_scale=scale_of(inputs, plan))
    if not eager or plan.why_portable is not None:
        return _run_ops(inputs, plan)
    x, w, bias = inputs[:3]
    device = x.device
    if device.type == "cuda" and cuda.current_device() != device.index:  # where memory comes from, and launches go
        with torch.cuda.device(device):
            return run(inputs, plan, return_lse, eager, k)
    k = k or kernels_of(device)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        out = _apply(x, w, bias, inputs, plan, return_lse, k)
        return out if isinstance(out, tuple) else (out, None)
    with torch.no_grad():
        outputs, _, _ = _forward(inputs, plan, k, GradsNeeded(None, None, False), return_lse)
    return (*outputs, None) if len(outputs) == 1 else tuple(outputs)


def scale_of(inputs: Inputs, plan: Plan) -> Tensor:
    """logit_scale on input's device, in the dtype of the logits."""
    scale, device, dtype = inputs.logit_scale, inputs.input.device, accumulate_dtype(plan.compute_dtype)
    if isinstance(scale, Tensor) and scale.device == device:
        return scale.to(dtype)
    # A product: a copy of a CPU tensor would synchronize, and with torch.full compiled code would be of one number.
    return (torch.ones((), dtype=dtype, device=device) * scale).to(dtype)


def shaped(t: Tensor, shape: torch.Size) -> Tensor:
    """t in another shape, no view to autograd: users may write to it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


# Autograd in plain eager ---------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, inputs, plan, return_lse, k):
        # autograd has to see the first three; each argument costs it time
        *tensors, items, dw_out = inputs
        needed = grads_needed(inputs, plan, ctx.needs_input_grad)
        outputs, state, out = _forward(inputs, plan, k, needed, return_lse)
        number, items = (None, items) if isinstance(items, Tensor) else (items, None)
        ctx.save_for_backward(*tensors, items, out.live_x, out.exp_logits)
        ctx.made = Forward(None, out.grads, dw=out.dw, classes=out.classes)
        # dw_out is not saved: another graph's backward may add to it first, which is no error here.
        ctx.kept = k, plan, needed, state, number, dw_out, input.shape
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
        check_memory("linear_cross_entropy", **dict(zip(_ARRIVING, grads, strict=True)))
        k, plan, needed, state, number, dw_out, shape = ctx.kept
        grad_loss, *row_grads = incoming(plan, *grads)
        kept = ctx.__dict__.pop("made", _NOTHING)  # handed out once, to the thread that asks first
        grads = Grads()
        if not any(grad is not None for grad in row_grads) and any(grad is not None for grad in kept.grads):
            grads = scale_grads(k, kept, grad_loss, dw_out)
            needed = needed.but(made_in_forward(plan, needed))
        if needed.any():
            *tensors, items, live_x, exp_logits = ctx.saved_tensors
            inputs = Inputs(*tensors, number if items is None else items, dw_out)
            # without gradients: those not used make room for what follows
            kept = Forward(None, Grads(), live_x, _scratch_of(exp_logits, grad_entropy), kept.dw, kept.classes)
            call = call_of(inputs, plan, k, _own(state, inputs.target.numel()), grad_loss, *row_grads)
            grads = grads.and_also(schedules.backward(call, kept, needed))
        return *_in_shape(grads, shape), None, None, None, None


# As in rms_norm: skips Python wrappers of torch that do nothing here.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_LinearCrossEntropy._backward_cls.apply = _LinearCrossEntropy.backward


def _scratch_of(saved: Tensor | None, grad_entropy: Tensor | None) -> Tensor | None:
    """exp_logits that backward may overwrite: `saved`, or a copy if it may be read again; None if they are not used.

    A copy if the graph is retained (another backward may even run at the same time) or autograd is not running.
    """
    if grad_entropy is not None:  # the logits are computed again
        return None
    if saved is None or not _is_graph_kept():
        return saved
    return padded(saved, *saved.shape, saved.dtype).copy_(saved)


def _own(state: RowState, m: int) -> RowState:
    """A state that backward may write to: a copy, its tickets 0, where `_scratch_of` makes one."""
    if not _is_graph_kept():
        return state
    memory = state.memory.clone()
    memory[:NUM_TICKETS] = 0
    return RowState.of(memory, m)


_is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph


def is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (
        torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def _in_shape(grads: Grads, shape: torch.Size) -> Grads:
    """With dx in input's shape. Autograd itself rounds gradients to the dtypes of what they are gradients of."""
    return grads if grads.dx is None or grads.dx.shape == shape else grads._replace(dx=grads.dx.view(shape))


# Operators: functional, absent results None -------------------------------------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_CALL = (  # Inputs, Plan, and which of input, linear_weight and linear_bias require grad
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? logit_scale, "
    "Tensor? num_items, Tensor? grad_weight_out, int ignore_index, float label_smoothing, float? softcap, "
    "float z_loss, str reduction, bool return_stats, ScalarType compute_dtype, str schedule, SymInt chunk_rows, "
    "bool dx_in_forward, bool dw_in_chunks, str? why_portable, bool[] needs"
)
_GRADS = "Tensor dx, Tensor dw, Tensor db"
# state: RowState.memory, or the divisor of "mean" on the portable path, where exp_logits are logits, in fp32 or fp64.
_lib.define(
    f"linear_cross_entropy_fwd({_CALL}) -> (Tensor loss, Tensor lse, Tensor log_prob, Tensor entropy, "
    f"Tensor predicted, Tensor state, Tensor live_x, Tensor exp_logits, {_GRADS})",
    tags=_TAGS,
)
# Backward overwrites `exp_logits` unless it is read again, see `_scratch_of`; no other operator ever reads it.
_lib.define(
    "linear_cross_entropy_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor? grad_log_prob, Tensor? grad_entropy, "
    f"Tensor? state, Tensor? live_x, Tensor? exp_logits, {_CALL}) -> ({_GRADS})",
    tags=_TAGS,
)
_fwd_op = torch.ops.quackish.linear_cross_entropy_fwd.default
_bwd_op = torch.ops.quackish.linear_cross_entropy_bwd.default


def _run_ops(inputs: Inputs, plan: Plan) -> tuple[Tensor, ...]:
    items, grad = inputs.num_items, torch.is_grad_enabled()
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code takes any number
        dtype = accumulate_dtype(plan.compute_dtype)
        inputs = inputs._replace(num_items=torch.full((), items, dtype=dtype, device=inputs.input.device))
    needs = [grad and t is not None and t.requires_grad for t in inputs[:3]]
    return _fwd_op(*inputs, *plan, needs)[: 5 if plan.return_stats else 2]


def _parse(args) -> tuple[Inputs, Plan, GradsNeeded]:
    """The arguments that both operators have, and which gradients those with `needs` are."""
    inputs, plan = Inputs(*args[:8]), Plan(*args[8:-1])
    return inputs, plan, grads_needed(inputs, plan, args[-1])


def forward_of(inputs: Inputs, plan: Plan, needed: GradsNeeded, k=None, device=None) -> tuple[Tensor | None, ...]:
    """(loss, lse, log_prob, entropy, predicted), what backward needs (state, live_x, exp_logits), and gradients.

    Rehearsals pass kernels, or for the portable path the device whose calls they rehearse.
    """
    shape = inputs.target.shape
    if plan.why_portable is not None:
        loss, stats, divisor, grads, logits = portable.forward(inputs, plan, needed, device)
        outputs = [shaped(loss, shape) if loss.dim() else loss, *(shaped(t, shape) for t in stats)]
        return *outputs, *[None] * (5 - len(outputs)), divisor, None, logits, *grads
    k = k or kernels_of(inputs.input.device)
    outputs, state, out = _forward(inputs, plan, k, needed, return_lse=True, may_begin=False)
    return *outputs, *[None] * (5 - len(outputs)), state.memory, out.live_x, out.exp_logits, *out.grads


def backward_of(
    inputs: Inputs,
    plan: Plan,
    needed: GradsNeeded,
    arriving: Sequence[Tensor | None],  # gradients of loss, lse, log_prob and entropy
    kept: Sequence[Tensor | None],  # state, live_x, exp_logits
    k=None,
    device=None,
) -> Grads:
    """The gradients, from what forward_of kept. Kernels add dw to grad_weight_out instead if there is one."""
    state, live_x, exp_logits = kept
    if plan.why_portable is not None:
        return portable.backward(inputs, plan, needed, *arriving, state, exp_logits, device)
    m = inputs.target.numel()
    k, state = k or kernels_of(inputs.input.device), _own(RowState.of(state, m), m)
    call = call_of(inputs, plan, k, state, *incoming(plan, *arriving))
    return schedules.backward(call, Forward(None, Grads(), live_x, _scratch_of(exp_logits, arriving[3])), needed)


def _fwd_impl(*args, k=None, device=None):
    return forward_of(*_parse(args), k, device)


def _bwd_impl(grad_loss, grad_lse, grad_log_prob, grad_entropy, state, live_x, exp_logits, *args, k=None, device=None):
    inputs, plan, needed = _parse(args)
    inputs = inputs._replace(grad_weight_out=None)  # an operator writes to no argument
    arriving, kept = (grad_loss, grad_lse, grad_log_prob, grad_entropy), (state, live_x, exp_logits)
    return tuple(backward_of(inputs, plan, needed, arriving, kept, k, device))


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
        stats = [loss.new_empty(target.shape, dtype=of) for of in (dtype, dtype, dtype, torch.int64)]
    grads = _fake_grads(inputs, plan, made_in_forward(plan, needed))
    return loss, *stats, state, live_x, exp_logits, *grads


def _bwd_fake(grad_loss, grad_lse, grad_log_prob, grad_entropy, state, live_x, exp_logits, *args):
    return _fake_grads(*_parse(args))


def _on_its_device(impl):
    """Memory comes from the current device, and launches go there; tensors are plain ones."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain("linear_cross_entropy", a) if isinstance(a, Tensor) else a for a in args]
        with torch.cuda.device_of(next(t for t in args if isinstance(t, Tensor) and t.dim() > 0)):
            return impl(*args)

    return on_device


IMPLEMENTATIONS = {_fwd_op: _fwd_impl, _bwd_op: _bwd_impl}
for _op, _impl, _fake in (("fwd", _fwd_impl, _fwd_fake), ("bwd", _bwd_impl, _bwd_fake)):
    _lib.impl(f"linear_cross_entropy_{_op}", _on_its_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::linear_cross_entropy_{_op}", _fake, lib=_lib)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.grad_weight_out = inputs[:8]
    ctx.args = inputs[8:]
    kept = output[5:]
    ctx.mark_non_differentiable(*(t for t in kept if t is not None))
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)


def _product(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """grad * factor in one pass; in place where the dtype is grad's and nobody reads grad again."""
    in_place = grad.dtype == dtype and not _is_graph_kept()
    return torch.mul(grad, factor, out=grad if in_place else torch.empty_like(grad, dtype=dtype))


def _op_backward(ctx, grad_loss, grad_lse, grad_log_prob, grad_entropy, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(NO_SECOND_DERIVATIVES)
    row_grads = grad_lse, grad_log_prob, grad_entropy
    has_row_grads = any(grad is not None for grad in row_grads)
    if grad_loss is None and not has_row_grads:
        return (None,) * (8 + len(ctx.args))
    *given, state, live_x, exp_logits, dx, dw, db = ctx.saved_tensors
    *options, needs = ctx.args
    plan, dw_out = Plan(*options), ctx.grad_weight_out if needs[1] else None
    inputs, grads = Inputs(*given, dw_out), Grads()
    made = grads if has_row_grads else Grads(dx, dw, db)
    missing = [need and g is None for need, g in zip(needs, made, strict=True)]
    if any(g is not None for g in made):
        is_sum = plan.why_portable is not None and plan.reduction == "mean"
        # Not 0-dim: such a factor of 16-bit gradients would be rounded to their dtype.
        factor = (grad_loss / state if is_sum else grad_loss).view(1)
        if dw_out is not None and made.dw is not None:
            dw_out.addcmul_(made.dw, factor)
            made = made._replace(dw=None)
        pairs = zip(made, inputs[:3], strict=True)
        grads = Grads(*(None if g is None else _product(g, factor, of.dtype) for g, of in pairs))
    if any(missing):
        kept = state, live_x, exp_logits
        late = Grads(*_bwd_op(grad_loss, *row_grads, *kept, *inputs, *options, missing))
        if dw_out is not None and late.dw is not None:
            dw_out.add_(late.dw)
            late = late._replace(dw=None)
        grads = grads.and_also(late)
    return *_in_shape(grads, inputs.input.shape), *(None,) * (5 + len(ctx.args))


torch.library.register_autograd(
    "quackish::linear_cross_entropy_fwd", _op_backward, setup_context=_setup_context, lib=_lib
)
