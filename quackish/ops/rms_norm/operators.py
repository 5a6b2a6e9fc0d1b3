"""RMSNorm's gradient in plain eager mode, and its operators for every other mode. Both run plans (plans.py)."""

from typing import Any

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.kernel_device import check_same_device, refuse_portable, report_portable
from quackish.device.modes import functorch_level, is_plain, is_transformed, num_dispatch_modes
from quackish.errors import UnsupportedError
from quackish.ops.operator import Operator, fast_apply
from quackish.ops.rms_norm import reference
from quackish.ops.rms_norm.checks import check_backward, check_forward
from quackish.ops.rms_norm.plans import BackwardPlan, ForwardPlan, add_to, plan_for, resolve_eps
from quackish.ops.shared.buffers import check_buffer

# Autograd in eager mode -----------------------------------------------------------------------------------------------


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, residual, plan, dweight_out):
        y, res, rstd = plan.run(x, weight, bias, residual)
        # rstd is internal, so it is an attribute: save_for_backward would cost 0.35 us more. It lives as long as the
        # graph, 4 bytes per row, and saved-tensor hooks do not see it.
        ctx.plan, ctx.rstd = plan, rstd
        ctx.dweight_out = dweight_out  # not a saved tensor: another graph's backward may legally add to it first
        if residual is None:
            ctx.save_for_backward(x, weight)
            return y
        ctx.set_materialize_grads(False)  # y or res may be unused
        ctx.save_for_backward(res, weight)
        return y, res

    @staticmethod
    def backward(ctx, dy, dres=None):
        x, weight = ctx.saved_tensors
        forward, rstd = ctx.plan, ctx.rstd
        needs = ctx.needs_input_grad[:4]
        dweight_out = ctx.dweight_out if needs[1] else None
        # Saved-tensor hooks and assignments to .data may change types, dtypes and strides.
        is_unchanged = (
            type(dy) is Tensor and dy.is_contiguous()
            and (dres is None or (type(dres) is Tensor and dres.is_contiguous()))
            and type(x) is forward.res_type and x.dtype is forward.res_dtype and x.is_contiguous()
            and (weight is None or (
                type(weight) is forward.weight_type and weight.dtype is forward.weight_dtype and weight.is_contiguous()
            ))
        )  # fmt: skip
        key = choose.epoch, needs, dres is None
        plan = forward.backward.get(key) if is_unchanged else None
        if plan is None or is_grad_enabled() or num_dispatch_modes() or _is_batched(dy, dres):
            plan, *grads = _gradients(needs, dy, x, weight, rstd, dres, dweight_out, forward)
            if is_unchanged and plan is not None:
                forward.backward[key] = plan
        else:
            grads = assign_grads(needs[0], needs[3], *plan.run(dy, x, weight, rstd, dres, dweight_out))
        return *grads, None, None


apply = fast_apply(_RmsNorm)  # (x, weight, bias, residual, plan, dweight_out) -> y or (y, res)


def _gradients(needs, dy, x, weight, rstd, dres, dweight_out, forward) -> tuple:
    """Backward in all cases: (the plan that ran or None, dx, dweight, dbias, dresidual).

    needs: whether x, weight, bias and residual need gradients; later entries are ignored.
    dweight_out: dweight is added to it and returned as None. None if weight needs no gradient.
    forward: the ForwardPlan, or the operator's ctx, which has the same options.
    """
    check_same_device("rms_norm", forward.device, x.device)
    dx_dtypes = dx_dtypes_of(needs[0], needs[3], forward.x_dtype, forward.residual_dtype)
    plan = None
    if dy is None:  # y is unused
        grads = *(dres.to(dtype) if dtype and dres is not None else None for dtype in dx_dtypes), None, None
    else:
        dweight_dtype = None if not needs[1] else weight.dtype if dweight_out is None else rstd.dtype
        dtypes = (*dx_dtypes, dweight_dtype, forward.bias_dtype if needs[2] else None)
        if torch.is_grad_enabled() or _is_batched(dy, dres):
            # create_graph=True, which must differentiate rstd with respect to x; or vmap over gradients
            if forward.backend == "auto":
                refuse_portable(_SECOND_DERIVATIVES, x.device, forward.backend)
            rstd = reference.rms_norm_rstd(x, forward.eps, rstd.dtype)
            grads = reference.rms_norm_bwd(dy, x, weight, rstd, dres, forward.weight_offset, *dtypes)
        else:
            tensors, options = (dy, x, weight, rstd, dres), (forward.weight_offset, *dtypes, forward.backend)
            plan = plan_for(BackwardPlan, (*tensors, dweight_out), options) if is_plain() else None
            grads = backward(*tensors, *options) if plan is None else plan.run(*tensors, dweight_out)
        grads = *grads[:2], add_to(dweight_out, grads[2]), grads[3]
    return plan, *assign_grads(needs[0], needs[3], *grads)


def dx_dtypes_of(dx: bool, dresidual: bool, x_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> tuple:
    """The dtypes of the gradients of res to compute: one for dx and dresidual unless they differ."""
    if not dx:
        return (residual_dtype if dresidual else None), None
    return x_dtype, (residual_dtype if dresidual and residual_dtype != x_dtype else None)


def assign_grads(dx: bool, dresidual: bool, first, second, dweight, dbias) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias, dresidual); first and second are the gradients of `_dx_dtypes`."""
    return first if dx else None, dweight, dbias, None if not dresidual else first if second is None else second


# Outside eager mode ---------------------------------------------------------------------------------------------------

_SECOND_DERIVATIVES = "rms_norm: double backward (create_graph=True) and vmap over gradients run the portable path"
is_grad_enabled = torch.is_grad_enabled
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def _is_batched(dy: Tensor, dres: Tensor | None) -> bool:
    """True if gradients are batched by torch.func.vmap or is_grads_batched=True (an older vmap)."""
    return functorch_level() is not None or _is_legacy_batched(dy) or (dres is not None and _is_legacy_batched(dres))


def rms_norm_operator(x, weight, bias, residual, dweight_out, eps, *options) -> Any:
    """`rms_norm` through its operator, or through the reference under torch.func and forward-mode AD."""
    if is_transformed():
        check_forward(x, weight, bias, residual, dweight_out, eps, *options)
        backend = options[-1]
        reason = "rms_norm: torch.func transforms and forward-mode AD run the portable path"
        if backend == "cute":
            raise UnsupportedError(f'{reason} only; expected none of them with backend="cute"')
        if dweight_out is not None:
            raise UnsupportedError(f"{reason}; expected no dweight_out, which only backward() adds to")
        if backend == "auto":
            report_portable(reason, x.device, backend)
        y, res, _ = reference.rms_norm_fwd(x, weight, bias, residual, resolve_eps(x, eps), *options[:-1])
    else:
        y, res, _ = forward(x, weight, bias, residual, dweight_out, resolve_eps(x, eps), *options)
    return y if residual is None else (y, res)


# Custom operators: functional, the same implementation on every device; absent results are None -----------------------


def _run_forward(x, weight, bias, residual, dweight_out, *options):
    tensors = x, weight, bias, residual, dweight_out
    plan = plan_for(ForwardPlan, tensors, options)
    if dweight_out is not None:
        check_buffer("rms_norm", dweight_out=dweight_out, weight=weight, x=x)
    return plan.run(*tensors[:4])


def _run_backward(dy, x, weight, rstd, dres, *options):
    tensors = dy, x, weight, rstd, dres
    return plan_for(BackwardPlan, (*tensors, None), options).run(*tensors)


def _fake_forward(
    x, weight, bias, residual, dweight_out, eps, weight_offset, residual_dtype, out_dtype, backend
):  # fmt: skip
    check_forward(x, weight, bias, residual, dweight_out, eps, weight_offset, residual_dtype, out_dtype, backend)
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    res = None if residual is None else residual.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
    rstd_dtype = reference.accumulate_dtype(x, weight, bias, residual)
    return y, res, x.new_empty(x.shape[:-1], dtype=rstd_dtype)


def _fake_backward(
    dy, x, weight, rstd, dres, weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend
):  # fmt: skip
    dtypes = (dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype)
    check_backward(dy, x, weight, rstd, dres, None, weight_offset, *dtypes, backend)
    parameter = x.shape[-1:] if weight is None else weight.shape
    shapes = (x.shape, x.shape, parameter, parameter)
    return tuple(x.new_empty(s, dtype=d) if d is not None else None for s, d in zip(shapes, dtypes, strict=True))


def _setup(ctx, args, output):
    x, weight, bias, residual, ctx.dweight_out, ctx.eps, ctx.weight_offset, *_, ctx.backend = args
    _, res, ctx.rstd = output  # rstd is not saved, as in _RmsNorm: checkpointing may recompute with the other path
    ctx.x_dtype, ctx.bias_dtype, ctx.residual_dtype = (None if t is None else t.dtype for t in (x, bias, residual))
    ctx.save_for_backward(x if residual is None else res, weight)


def _operator_gradients(ctx, dy, dres):
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dweight_out = ctx.dweight_out if needs[1] else None
    _, *grads = _gradients(needs, dy, x, weight, ctx.rstd, dres, dweight_out, ctx)
    return grads


def _import_sharding():
    import quackish.ops.rms_norm.sharding  # noqa: F401


forward = Operator(
    "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? dweight_out, float eps, "
    "float weight_offset, ScalarType? residual_dtype, ScalarType? out_dtype, str backend) "
    "-> (Tensor y, Tensor res, Tensor rstd)",
    _run_forward,
    _fake_forward,
    who="rms_norm",
    sharding=_import_sharding,
)
backward = Operator(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dres, float weight_offset, "
    "ScalarType? dx_dtype, ScalarType? dresidual_dtype, ScalarType? dweight_dtype, ScalarType? dbias_dtype, "
    "str backend) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    _run_backward,
    _fake_backward,
    who="rms_norm",
    sharding=_import_sharding,
)
forward.differentiable(_setup, _operator_gradients, outputs=2, twice=True)
