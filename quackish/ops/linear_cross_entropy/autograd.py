"""Linear cross entropy on kernels, for autograd and torch.compile.

In plain eager a torch.autograd.Function runs the schedules. `chunked` has its gradients ready before backward knows
what arrives; backward hands these buffers out once, scaled in place, and makes them anew when it is asked again.
torch.compile and dispatch modes use the custom operators at the end of this file: the same schedules, with copies.
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
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import LceKernels, RowState, padded, padded_strides
from quackish.ops.linear_cross_entropy.schedules import (
    Call,
    Forward,
    Grads,
    GradsNeeded,
    KernelPlan,
    made_in_forward,
    scale_grads,
)
from quackish.ops.modes import as_plain, check_memory

_NO_SECOND_DERIVATIVES = "linear_cross_entropy: create_graph=True (double backward) is not supported"
_NONE = GradsNeeded(None, None, False)
_NOTHING = Forward(None)


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


def call_of(
    inputs: Inputs, plan: KernelPlan, k, state: RowState | None = None, grad_loss: Tensor | None = None,
    grad_lse: Tensor | None = None,
) -> Call:  # fmt: skip
    """With the user's tensors in the dtypes, strides and alignment that the kernels `k` take."""
    x, w, bias, target, class_weight, num_items, dw_out = inputs
    dtype, (v, h) = plan.compute_dtype, w.shape
    check_memory(
        "linear_cross_entropy", input=x, linear_weight=w, linear_bias=bias, target=target, weight=class_weight,
        num_items=num_items if isinstance(num_items, Tensor) else None,
    )  # fmt: skip
    if x.dim() != 2:
        x = x.reshape(-1, h)
    if x.dtype != dtype:
        x = x.to(dtype)
    if x.stride(1) != 1:
        x = x.contiguous()
    if w.dtype != dtype:
        w = w.to(dtype)
    if not w.is_contiguous():
        w = w.contiguous()
    if w.stride(0) != h:  # a single class is contiguous with any stride
        w = w.clone(memory_format=torch.contiguous_format).view(-1).view(w.shape)
    if w.data_ptr() % 16:
        w = w.clone()
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
        k, plan, state or RowState.new(x), x.shape[0], h, v, x, w, target, bias, class_weight, total_weight, num_items,
        plan.softcap or 0.0, dw_out, grad_loss, grad_lse,
    )  # fmt: skip


def grads_needed(inputs: Inputs, plan: KernelPlan, needs: Sequence[bool]) -> GradsNeeded:
    """Gradients are computed in their own dtypes if a GEMM can, else in fp32."""
    x, w, dtype, fp32 = inputs.input.dtype, inputs.linear_weight.dtype, plan.compute_dtype, torch.float32
    dw_out = inputs.grad_weight_out
    if dw_out is not None and dw_out.dtype in (dtype, fp32):
        w = dw_out.dtype
    dx, dw = x if x == dtype else fp32, w if w == dtype else fp32
    return GradsNeeded(dx if needs[0] else None, dw if needs[1] else None, needs[2])


def loss_of(out: Forward, plan: KernelPlan, target: Tensor) -> Tensor:
    return _shaped(out.loss, target.shape) if plan.reduction == "none" else out.loss.sum()


def lse_of(call: Call, target: Tensor) -> Tensor:
    """A copy: users may write to theirs."""
    state = call.state
    return _shaped(state.tensor(state.lse, call.m, torch.float32).clone(), target.shape)


def incoming(plan: KernelPlan, grad_loss: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Call.grad_loss and Call.grad_lse from what arrives in backward: at least one."""
    if grad_lse is not None:
        grad_lse = grad_lse.reshape(-1).contiguous()
    if grad_loss is None:
        grad_loss = grad_lse.new_zeros(())
    elif plan.reduction == "none":
        grad_loss = grad_loss.reshape(-1)
        grad_loss = grad_loss[0] if grad_loss.stride(0) == 0 else grad_loss.contiguous()
    return grad_loss, grad_lse


def run(inputs: Inputs, plan: KernelPlan, return_lse: bool, eager: bool, k=None) -> tuple[Tensor, Tensor | None]:
    """(loss, lse) of checked arguments; `eager`: nobody but autograd has to see what is computed.

    k: other kernels than the device's, in eager only.
    """
    if not eager:
        return _run_ops(inputs, plan)
    x, w, bias = inputs[:3]
    device = x.device
    if device.type == "cuda" and cuda.current_device() != device.index:  # where memory comes from, and launches go
        with torch.cuda.device(device):
            return run(inputs, plan, return_lse, eager, k)
    k = k or kernels_of(device)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        out = _apply(x, w, bias, inputs, plan, return_lse, k)
        return out if return_lse else (out, None)
    with torch.no_grad():
        call = call_of(inputs, plan, k)
        out = schedules.forward(call, _NONE)
        return loss_of(out, plan, inputs.target), lse_of(call, inputs.target) if return_lse else None


def _shaped(t: Tensor, shape: torch.Size) -> Tensor:
    """t in another shape, no view to autograd: users may write to it."""
    return t if t.shape == shape else torch.ops.aten._unsafe_view(t, shape)


# Autograd in plain eager ---------------------------------------------------------------------------------------------


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, linear_weight, linear_bias, inputs, plan, return_lse, k):
        # autograd has to see the first three; each argument costs it time
        *tensors, items, dw_out = inputs
        needed = grads_needed(inputs, plan, ctx.needs_input_grad)
        call = call_of(inputs, plan, k)
        out, state = schedules.forward(call, needed), call.state
        loss = loss_of(out, plan, inputs.target)
        number, items = (None, items) if isinstance(items, Tensor) else (items, None)
        ctx.save_for_backward(*tensors, items, out.live_x, out.exp_logits)
        ctx.made = Forward(None, out.grads, dw=out.dw, classes=out.classes)
        # dw_out is not saved: another graph's backward may add to it first, which is no error here.
        ctx.kept = k, plan, needed, state, number, dw_out, input.shape, _dtypes(inputs)
        ctx.set_materialize_grads(False)
        return (loss, lse_of(call, inputs.target)) if return_lse else loss

    @staticmethod
    def backward(ctx, grad_loss, grad_lse=None):
        if torch.is_grad_enabled():
            raise RuntimeError(_NO_SECOND_DERIVATIVES)
        if _is_batched(grad_loss) or _is_batched(grad_lse):
            raise RuntimeError("linear_cross_entropy: vmap over gradients (is_grads_batched=True) is not supported")
        if grad_loss is None and grad_lse is None:
            return (None,) * 7
        grad_loss, grad_lse = as_plain("linear_cross_entropy", grad_loss), as_plain("linear_cross_entropy", grad_lse)
        check_memory("linear_cross_entropy", grad_loss=grad_loss, grad_lse=grad_lse)
        k, plan, needed, state, number, dw_out, shape, dtypes = ctx.kept
        grad_loss, grad_lse = incoming(plan, grad_loss, grad_lse)
        kept = ctx.__dict__.pop("made", _NOTHING)  # handed out once, to the thread that asks first
        grads = Grads()
        if grad_lse is None and any(grad is not None for grad in kept.grads):
            grads = scale_grads(k, kept, grad_loss, dw_out)
            needed = needed.but(made_in_forward(plan, needed))
        if needed.any():
            *tensors, items, live_x, exp_logits = ctx.saved_tensors
            inputs = Inputs(*tensors, number if items is None else items, dw_out)
            # without gradients: those not used make room for what follows
            kept = Forward(None, Grads(), live_x, _scratch_of(exp_logits), kept.dw, kept.classes)
            call = call_of(inputs, plan, k, _own(state, inputs.target.numel()), grad_loss, grad_lse)
            grads = grads.and_also(schedules.backward(call, kept, needed))
        return *_as_inputs(grads, dtypes, shape), None, None, None, None


# As in rms_norm: skips Python wrappers of torch that do nothing here.
_apply = super(torch.autograd.Function, _LinearCrossEntropy).apply
_LinearCrossEntropy._backward_cls.apply = _LinearCrossEntropy.backward


def _scratch_of(saved: Tensor | None) -> Tensor | None:
    """exp_logits that backward may overwrite: `saved`, or a copy if it may be read again.

    That is if the graph is retained (another backward may even run at the same time) or autograd is not running.
    """
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


def _is_batched(grad: Tensor | None) -> bool:
    return grad is not None and (
        torch._C._functorch.is_batchedtensor(grad) or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


def _dtypes(inputs: Inputs) -> tuple[torch.dtype | None, ...]:
    bias = inputs.linear_bias
    return inputs.input.dtype, inputs.linear_weight.dtype, None if bias is None else bias.dtype


def _as_inputs(grads: Grads, dtypes: tuple, shape: torch.Size) -> tuple[Tensor | None, ...]:
    """In the inputs' dtypes and shapes, which most of them have already."""
    dx, dw, db = [g if g is None or g.dtype == dtype else g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
    return dx if dx is None or dx.shape == shape else dx.view(shape), dw, db


# Operators: functional, absent results None -------------------------------------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_CALL = (  # Inputs, KernelPlan, and which of input, linear_weight and linear_bias require grad
    "Tensor input, Tensor linear_weight, Tensor? linear_bias, Tensor target, Tensor? weight, Tensor? num_items, "
    "Tensor? grad_weight_out, int ignore_index, float label_smoothing, float? softcap, float z_loss, str reduction, "
    "ScalarType compute_dtype, str schedule, SymInt chunk_rows, bool dx_in_forward, bool dw_in_chunks, bool[] needs"
)
_GRADS = "Tensor dx, Tensor dw, Tensor db"
_lib.define(
    f"linear_cross_entropy_kernels_fwd({_CALL}) -> (Tensor loss, Tensor lse, Tensor row_state, {_GRADS}, "
    "Tensor live_x, Tensor exp_logits)",
    tags=_TAGS,
)
# Backward overwrites `exp_logits` unless it is read again, see `_scratch_of`; no other operator ever reads it.
_lib.define(
    f"linear_cross_entropy_kernels_bwd(Tensor? grad_loss, Tensor? grad_lse, Tensor row_state, Tensor? live_x, "
    f"Tensor? exp_logits, {_CALL}) -> ({_GRADS})",
    tags=_TAGS,
)
_lib.define("linear_cross_entropy_kernels_scaled(Tensor grad, Tensor factor) -> Tensor", tags=_TAGS)
_fwd_op = torch.ops.quackish.linear_cross_entropy_kernels_fwd.default
_bwd_op = torch.ops.quackish.linear_cross_entropy_kernels_bwd.default
_scaled_op = torch.ops.quackish.linear_cross_entropy_kernels_scaled.default


def _run_ops(inputs: Inputs, plan: KernelPlan) -> tuple[Tensor, Tensor]:
    items, grad = inputs.num_items, torch.is_grad_enabled()
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code takes any number
        inputs = inputs._replace(num_items=torch.full((), items, dtype=torch.float32, device=inputs.input.device))
    needs = [grad and t is not None and t.requires_grad for t in inputs[:3]]
    loss, lse, *_ = _fwd_op(*inputs, *plan, needs)
    return loss, lse


def _parse(args) -> tuple[Inputs, KernelPlan, GradsNeeded]:
    """The arguments that both operators have, and which gradients those with `needs` are."""
    inputs, plan = Inputs(*args[:7]), KernelPlan(*args[7:-1])
    return inputs, plan, grads_needed(inputs, plan, args[-1])


def _fwd_impl(*args):
    inputs, plan, needed = _parse(args)
    call = call_of(inputs, plan, kernels_of(inputs.input.device))
    out, state = schedules.forward(call, needed, may_begin=False), call.state
    loss, lse = loss_of(out, plan, inputs.target), lse_of(call, inputs.target)
    return loss, lse, state.memory, *out.grads, out.live_x, out.exp_logits


def _bwd_impl(grad_loss, grad_lse, row_state, live_x, exp_logits, *args):
    inputs, plan, needed = _parse(args)
    m = inputs.target.numel()
    k, state = kernels_of(inputs.input.device), _own(RowState.of(row_state, m), m)
    call = call_of(inputs._replace(grad_weight_out=None), plan, k, state, *incoming(plan, grad_loss, grad_lse))
    return tuple(schedules.backward(call, Forward(None, Grads(), live_x, _scratch_of(exp_logits)), needed))


def _scaled_impl(grad, factor):
    grad = grad.clone()
    kernels_of(grad.device).scale(grad, factor)
    return grad


def _fake_grads(inputs: Inputs, needed: GradsNeeded) -> tuple[Tensor | None, ...]:
    x, w = inputs.input, inputs.linear_weight
    h = w.shape[1]
    return (
        x.new_empty((x.numel() // h, h), dtype=needed.dx) if needed.dx else None,
        w.new_empty(w.shape, dtype=needed.dw) if needed.dw else None,
        w.new_empty(w.shape[0], dtype=torch.float32) if needed.db else None,
    )


def _fwd_fake(*args):
    inputs, plan, needed = _parse(args)
    x, target, (v, h) = inputs.input, inputs.target, inputs.linear_weight.shape
    m, live_x, exp_logits = x.numel() // h, None, None
    if plan.schedule == "stored" and needed.any():
        live_x = x.new_empty((m, h), dtype=plan.compute_dtype)
        exp_logits = x.new_empty_strided((m, v), padded_strides(v), dtype=plan.compute_dtype)
    loss = x.new_empty(target.shape if plan.reduction == "none" else (), dtype=torch.float32)
    row_state = x.new_empty(RowState.size(m), dtype=torch.int32)
    grads = _fake_grads(inputs, made_in_forward(plan, needed))
    return loss, loss.new_empty(target.shape), row_state, *grads, live_x, exp_logits


def _bwd_fake(grad_loss, grad_lse, row_state, live_x, exp_logits, *args):
    inputs, _, needed = _parse(args)
    return _fake_grads(inputs, needed)


def _on_its_device(impl):
    """Memory comes from the current device, and launches go there; tensors are plain ones."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain("linear_cross_entropy", a) if isinstance(a, Tensor) else a for a in args]
        device = next(t for t in args if isinstance(t, Tensor) and t.dim() > 0).device
        if device.type != "cuda":
            return impl(*args)
        with torch.cuda.device(device):
            return impl(*args)

    return on_device


for _op, _impl, _fake in (
    ("fwd", _fwd_impl, _fwd_fake),
    ("bwd", _bwd_impl, _bwd_fake),
    ("scaled", _scaled_impl, lambda grad, factor: torch.empty_like(grad)),
):
    _lib.impl(f"linear_cross_entropy_kernels_{_op}", _on_its_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::linear_cross_entropy_kernels_{_op}", _fake, lib=_lib)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.grad_weight_out = inputs[:7]
    ctx.args = inputs[7:]
    kept = output[2:]
    ctx.mark_non_differentiable(*(t for t in kept if t is not None))
    ctx.save_for_backward(*tensors, *kept)
    ctx.set_materialize_grads(False)


def _op_backward(ctx, grad_loss, grad_lse, *_):
    if torch.is_grad_enabled():
        raise RuntimeError(_NO_SECOND_DERIVATIVES)
    if grad_loss is None and grad_lse is None:
        return (None,) * 18
    *given, row_state, dx, dw, db, live_x, exp_logits = ctx.saved_tensors
    needs = ctx.args[-1]
    dw_out = ctx.grad_weight_out if needs[1] else None
    inputs = Inputs(*given, dw_out)
    ready = [None if grad_lse is not None else g for g in (dx, dw, db)]
    grads = Grads(*(None if g is None else _scaled_op(g, grad_loss) for g in ready))
    missing = [need and g is None for need, g in zip(needs, ready, strict=True)]
    if any(missing):
        kept = row_state, live_x, exp_logits
        grads = grads.and_also(Grads(*_bwd_op(grad_loss, grad_lse, *kept, *inputs, *ctx.args[:-1], missing)))
    if dw_out is not None:
        dw_out.add_(grads.dw)
        grads = grads._replace(dw=None)
    return *_as_inputs(grads, _dtypes(inputs), inputs.input.shape), *(None,) * 15


torch.library.register_autograd(
    "quackish::linear_cross_entropy_kernels_fwd", _op_backward, setup_context=_setup_context, lib=_lib
)
