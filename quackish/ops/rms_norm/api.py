"""RMSNorm for torch: functions, module, autograd and custom operators.

In eager mode, a call looks up its plan, allocates and launches, in a torch.autograd.Function if a gradient is needed.
torch.compile, dispatch modes and tensor subclasses use the operators of `torch.ops.quackish`, which run the same plans.
"""

import sys
from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from quackish.device import choose
from quackish.device.kernel_device import (
    check_same_device,
    device_of,
    prepare_operator,
    refuse_portable,
    report_portable,
)
from quackish.device.modes import as_plain, functorch_level, is_plain, is_transformed, num_dispatch_modes
from quackish.errors import UnsupportedError
from quackish.ops.rms_norm import reference
from quackish.ops.rms_norm.checks import check_backward, check_flags, check_forward, check_module, check_module_inputs
from quackish.ops.rms_norm.plans import BackwardPlan, ForwardPlan, add_to, plan_for, resolve_eps
from quackish.ops.shared.buffers import check_buffer
from quackish.types import Backend, Device, RmsNormOptions

# Functions -----------------------------------------------------------------------------------------------------------


@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, residual: None = None,
    **options: Unpack[RmsNormOptions],
) -> Tensor: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, residual: Tensor,
    **options: Unpack[RmsNormOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def rms_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None = None, *, residual: Tensor | None,
    **options: Unpack[RmsNormOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    dweight_out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm over the last dimension of x or of x + residual. See docs/guides/rms_norm.md.

        res = x + residual,   y = res / sqrt(mean(res^2) + eps) * (weight_offset + weight) + bias

    Args:
        x: (..., n) bf16, fp16, fp32 or fp64, any strides; most layouts are read in place.
        weight: (n,), or (heads, n) for x of shape (..., heads, n), in any of these dtypes. None: no scale.
        bias: weight's shape ((n,) without a weight), any of these dtypes, or None.
        eps: finite, not negative. None: torch.finfo(torch.float32).eps (float64's for fp64 x), as in F.rms_norm.
        weight_offset: added to weight. Use 1.0 if the checkpoint stores weight - 1, as Gemma's do.
        residual: x's shape, any of these dtypes.
        residual_dtype: dtype of `res`; None: residual's. y is the norm of the rounded res.
        out_dtype: dtype of y; None: x's. Autocast has no effect.
        dweight_out: buffer of weight's shape, fp32 or in weight's dtype. Each backward adds weight's gradient to it and
            returns None to autograd. Not supported for parameters that FSDP shards: use .grad.
        backend: "auto" runs a kernel if there is one, else the portable PyTorch path: silently on CPU, with one warning
            per reason on a GPU. "cute" runs a kernel or raises. "reference" runs the portable path.

    Returns:
        y of x's shape, contiguous; with a residual (y, res). Gradients have their arguments' dtypes. Second
        derivatives, torch.func and forward-mode AD run the portable path.

    Kernels are bitwise reproducible, and a row of y or of x's gradient does not depend on the number of rows. No input
    except `dweight_out` is written, and nothing synchronizes with the host.

    Raises:
        ValueError, TypeError: invalid shape, device, dtype or number.
        UnsupportedError: `backend="cute"` without a kernel; `dweight_out` under FSDP, DTensor or torch.func; a DTensor
            whose last dimension is sharded.
    """
    tensors, options = (
        (x, weight, bias, residual, dweight_out),
        (eps, weight_offset, residual_dtype, out_dtype, backend),
    )
    plan = plan_for(ForwardPlan, tensors, options) if is_plain() else None
    if plan is None:
        return _rms_norm_op(*tensors, *options)
    if dweight_out is not None:
        check_buffer("rms_norm", dweight_out=dweight_out, weight=weight, x=x)
    if _is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        return _apply(x, weight, bias, residual, plan, dweight_out)
    y, res, _ = plan.run(x, weight, bias, residual)
    return y if residual is None else (y, res)


class RmsNormOutput(NamedTuple):
    y: Tensor  # x's shape
    res: Tensor  # the normalized tensor: x + residual, or x without a residual
    rstd: Tensor  # x's shape without n: 1 / sqrt(mean(res^2) + eps) of each row; fp32, or fp64 if any input is


class RmsNormGrads(NamedTuple):
    dx: Tensor | None
    dweight: Tensor | None
    dbias: Tensor | None
    dresidual: Tensor | None


@torch.no_grad()
def rms_norm_forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    eps: float | None = None,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> RmsNormOutput:
    """`rms_norm` without autograd: returns (y, res, rstd) for `rms_norm_backward`.

    Arguments, promises and errors are those of `rms_norm`.
    """
    tensors, options = (x, weight, bias, residual, None), (eps, weight_offset, residual_dtype, out_dtype, backend)
    plan = plan_for(ForwardPlan, tensors, options) if is_plain() else None
    if plan is None:
        _prepare_operator(x)
        y, res, rstd = _op_fwd(*tensors, resolve_eps(x, eps), *options[1:])
    else:
        y, res, rstd = plan.run(x, weight, bias, residual)
    return RmsNormOutput(y, x if residual is None else res, rstd)


@torch.no_grad()
def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    *,
    weight_offset: float = 0.0,
    dres: Tensor | None = None,
    dx: bool = True,
    dweight: bool = True,
    dbias: bool = False,
    dresidual: bool = False,
    dx_dtype: torch.dtype | None = None,
    dresidual_dtype: torch.dtype | None = None,
    dbias_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> RmsNormGrads:
    """The gradients of `rms_norm` without autograd, in one kernel launch.

        g = dy * (weight_offset + weight),   xhat = x * rstd
        dx = dresidual = rstd * (g - xhat * mean(xhat * g)) + dres
        dweight = sum over rows of dy * xhat,   dbias = sum over rows of dy

    Args:
        dy: (..., n), the gradient of y.
        x, rstd: `res` and `rstd` of `rms_norm_forward`.
        weight, weight_offset, backend: as in forward.
        dres: (..., n), the gradient of res, or None.
        dx, dweight, dbias, dresidual: which gradients to compute. The others are None; dweight is None without weight.
        dx_dtype, dresidual_dtype: None: x's dtype. With a residual, pass the dtypes of forward's x and residual.
        dbias_dtype: None: weight's dtype, or x's without a weight.

    Returns (dx, dweight, dbias, dresidual). dx and dresidual are the same tensor if their dtypes are equal. Promises
    and errors are those of `rms_norm`.
    """
    check_flags(x, weight, dx=dx, dweight=dweight, dbias=dbias, dresidual=dresidual)
    dtypes = (
        *_dx_dtypes(dx, dresidual, dx_dtype or x.dtype, dresidual_dtype or x.dtype),
        weight.dtype if dweight and weight is not None else None,
        (dbias_dtype or (x if weight is None else weight).dtype) if dbias else None,
    )
    tensors, options = (dy, x, weight, rstd, dres), (weight_offset, *dtypes, backend)
    plan = plan_for(BackwardPlan, (*tensors, None), options) if is_plain() else None
    if plan is None:
        _prepare_operator(x)
        grads = _op_bwd(*tensors, *options)
    else:
        grads = plan.run(*tensors)
    return RmsNormGrads(*_assign_grads(dx, dresidual, *grads))


# Module ---------------------------------------------------------------------------------------------------------------


class _NormCall(Protocol):
    """The type of RMSNorm's call and forward."""

    @overload
    def __call__(self, x: Tensor, residual: None = None, *, dweight_out: Tensor | None = None) -> Tensor: ...
    @overload
    def __call__(self, x: Tensor, residual: Tensor, *, dweight_out: Tensor | None = None) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, x: Tensor, residual: Tensor | None, *, dweight_out: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]: ...


def _with_overloads(forward: Any) -> _NormCall:
    return forward


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` on `rms_norm`, with its arguments and state dict, and additional arguments.

    Args:
        normalized_shape: n, or the shape of the last dimensions, which are normalized together.
        elementwise_affine: whether to have a weight.
        device, dtype: of the parameters.
        bias: whether to have a bias, initialized to zero.
        weight_offset: as in `rms_norm`; the weight is initialized to 1 - weight_offset.
        eps, out_dtype, backend: as in `rms_norm`.
        residual_dtype: as in `rms_norm`, for calls with a residual.
    """

    bias: nn.Parameter | None
    __call__: _NormCall  # nn.Module's returns Any

    def __init__(
        self,
        normalized_shape: int | list[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = False,
        weight_offset: float = 0.0,
        residual_dtype: torch.dtype | None = None,
        out_dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        check_module(
            normalized_shape, elementwise_affine, bias, eps, weight_offset, backend,
            residual_dtype=residual_dtype, out_dtype=out_dtype,
        )  # fmt: skip
        self.weight_offset = weight_offset  # before super().__init__, whose reset_parameters reads it
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        self.residual_dtype, self.out_dtype, self.backend = residual_dtype, out_dtype, backend
        self.register_parameter(
            "bias", nn.Parameter(torch.zeros(self.normalized_shape, device=device, dtype=dtype)) if bias else None
        )

    def reset_parameters(self) -> None:
        if self.elementwise_affine:
            nn.init.constant_(self.weight, 1.0 - self.weight_offset)
        bias = getattr(self, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)

    @_with_overloads
    def forward(
        self, x: Tensor, residual: Tensor | None = None, *, dweight_out: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x, residual: (..., *normalized_shape). dweight_out: as in `rms_norm`. Returns y, or (y, res)."""
        weight, bias, ndim = self.weight, self.bias, len(self.normalized_shape)
        check_module_inputs(x, residual, dweight_out, self.normalized_shape)
        options: RmsNormOptions = {
            "eps": self.eps, "weight_offset": self.weight_offset, "out_dtype": self.out_dtype,
            "dweight_out": dweight_out, "backend": self.backend,
        }  # fmt: skip
        if residual is not None:
            options["residual_dtype"] = self.residual_dtype
        if ndim == 1:
            return rms_norm(x, weight, bias, residual=residual, **options)
        # Flatten several normalized dimensions into one: views, unless x's strides do not allow it.
        weight, bias, flat_residual = (None if t is None else t.flatten(-ndim) for t in (weight, bias, residual))
        if dweight_out is not None:
            options["dweight_out"] = dweight_out.view(-1)
        out = rms_norm(x.flatten(-ndim), weight, bias, residual=flat_residual, **options)
        return out.view(x.shape) if isinstance(out, Tensor) else (out[0].view(x.shape), out[1].view(x.shape))

    def extra_repr(self) -> str:
        text = super().extra_repr()
        defaults = dict(weight_offset=0.0, residual_dtype=None, out_dtype=None, backend="auto")
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text + ", bias=True" if self.bias is not None else text


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
        if plan is None or _is_grad_enabled() or num_dispatch_modes() or _is_batched(dy, dres):
            plan, *grads = _gradients(needs, dy, x, weight, rstd, dres, dweight_out, forward)
            if is_unchanged and plan is not None:
                forward.backward[key] = plan
        else:
            grads = _assign_grads(needs[0], needs[3], *plan.run(dy, x, weight, rstd, dres, dweight_out))
        return *grads, None, None


# Skip two Python frames of torch: Function.apply checks for functorch, which is_plain() has done, and the node's apply
# checks for a `vjp`. Saves 1.3 and 0.4 us of 14 for both directions (on a CPU, with kernels that do nothing).
_apply = super(torch.autograd.Function, _RmsNorm).apply
_RmsNorm._backward_cls.apply = _RmsNorm.backward


def _gradients(needs, dy, x, weight, rstd, dres, dweight_out, forward) -> tuple:
    """Backward in all cases: (the plan that ran or None, dx, dweight, dbias, dresidual).

    needs: whether x, weight, bias and residual need gradients; later entries are ignored.
    dweight_out: dweight is added to it and returned as None. None if weight needs no gradient.
    forward: the ForwardPlan, or the operator's ctx, which has the same options.
    """
    check_same_device("rms_norm", forward.device, x.device)
    dx_dtypes = _dx_dtypes(needs[0], needs[3], forward.x_dtype, forward.residual_dtype)
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
            grads = _op_bwd(*tensors, *options) if plan is None else plan.run(*tensors, dweight_out)
        grads = *grads[:2], add_to(dweight_out, grads[2]), grads[3]
    return plan, *_assign_grads(needs[0], needs[3], *grads)


def _dx_dtypes(dx: bool, dresidual: bool, x_dtype: torch.dtype, residual_dtype: torch.dtype | None) -> tuple:
    """The dtypes of the gradients of res to compute: one for dx and dresidual unless they differ."""
    if not dx:
        return (residual_dtype if dresidual else None), None
    return x_dtype, (residual_dtype if dresidual and residual_dtype != x_dtype else None)


def _assign_grads(dx: bool, dresidual: bool, first, second, dweight, dbias) -> tuple[Tensor | None, ...]:
    """(dx, dweight, dbias, dresidual); first and second are the gradients of `_dx_dtypes`."""
    return first if dx else None, dweight, dbias, None if not dresidual else first if second is None else second


# Outside eager mode ---------------------------------------------------------------------------------------------------

_SECOND_DERIVATIVES = "rms_norm: double backward (create_graph=True) and vmap over gradients run the portable path"
_is_grad_enabled = torch.is_grad_enabled
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


def _is_batched(dy: Tensor, dres: Tensor | None) -> bool:
    """True if gradients are batched by torch.func.vmap or is_grads_batched=True (an older vmap)."""
    return functorch_level() is not None or _is_legacy_batched(dy) or (dres is not None and _is_legacy_batched(dres))


def _rms_norm_op(x, weight, bias, residual, dweight_out, eps, *options) -> Any:
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
        _prepare_operator(x)
        y, res, _ = _op_fwd(x, weight, bias, residual, dweight_out, resolve_eps(x, eps), *options)
    return y if residual is None else (y, res)


def _prepare_operator(x: Tensor) -> None:
    """Registers DTensor's sharding rules if DTensor is loaded. `import quackish` does not load it, which is slow."""
    prepare_operator("rms_norm", x.device)
    if "torch.distributed.tensor" in sys.modules:
        import quackish.ops.rms_norm.sharding  # noqa: F401


# Custom operators: functional, the same implementation on every device; absent results are None -----------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_lib.define(
    "rms_norm_fwd(Tensor x, Tensor? weight, Tensor? bias, Tensor? residual, Tensor? dweight_out, float eps, "
    "float weight_offset, ScalarType? residual_dtype, ScalarType? out_dtype, str backend) "
    "-> (Tensor y, Tensor res, Tensor rstd)",
    tags=_TAGS,
)
_lib.define(
    "rms_norm_bwd(Tensor dy, Tensor x, Tensor? weight, Tensor rstd, Tensor? dres, float weight_offset, "
    "ScalarType? dx_dtype, ScalarType? dresidual_dtype, ScalarType? dweight_dtype, ScalarType? dbias_dtype, "
    "str backend) -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    tags=_TAGS,
)
_op_fwd = torch.ops.quackish.rms_norm_fwd.default
_op_bwd = torch.ops.quackish.rms_norm_bwd.default


def _fwd_impl(x, weight, bias, residual, dweight_out, *options):
    tensors = tuple(as_plain("rms_norm", t) for t in (x, weight, bias, residual, dweight_out))
    plan = plan_for(ForwardPlan, tensors, options)
    if dweight_out is not None:
        check_buffer("rms_norm", dweight_out=dweight_out, weight=weight, x=x)
    return plan.run(*tensors[:4])


def _bwd_impl(dy, x, weight, rstd, dres, *options):
    tensors = tuple(as_plain("rms_norm", t) for t in (dy, x, weight, rstd, dres))
    return plan_for(BackwardPlan, (*tensors, None), options).run(*tensors)


_lib.impl("rms_norm_fwd", _fwd_impl, "CompositeExplicitAutograd")
_lib.impl("rms_norm_bwd", _bwd_impl, "CompositeExplicitAutograd")


@torch.library.register_fake("quackish::rms_norm_fwd", lib=_lib)
def _(x, weight, bias, residual, dweight_out, eps, weight_offset, residual_dtype, out_dtype, backend):
    check_forward(x, weight, bias, residual, dweight_out, eps, weight_offset, residual_dtype, out_dtype, backend)
    y = x.new_empty(x.shape, dtype=out_dtype or x.dtype)
    res = None if residual is None else residual.new_empty(x.shape, dtype=residual_dtype or residual.dtype)
    rstd_dtype = reference.accumulate_dtype(x, weight, bias, residual)
    return y, res, x.new_empty(x.shape[:-1], dtype=rstd_dtype)


@torch.library.register_fake("quackish::rms_norm_bwd", lib=_lib)
def _(dy, x, weight, rstd, dres, weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend):
    dtypes = (dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype)
    check_backward(dy, x, weight, rstd, dres, None, weight_offset, *dtypes, backend)
    parameter = x.shape[-1:] if weight is None else weight.shape
    shapes = (x.shape, x.shape, parameter, parameter)
    return tuple(x.new_empty(s, dtype=d) if d is not None else None for s, d in zip(shapes, dtypes, strict=True))


def _setup_context(ctx, inputs, output):
    x, weight, bias, residual, ctx.dweight_out, ctx.eps, ctx.weight_offset, *_, ctx.backend = inputs
    _, res, rstd = output
    ctx.x_dtype, ctx.bias_dtype, ctx.residual_dtype = (None if t is None else t.dtype for t in (x, bias, residual))
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.device = device_of(x.device)
    ctx.rstd = rstd  # not saved, as in _RmsNorm: checkpointing may run one path first and recompute with the other
    ctx.save_for_backward(x if residual is None else res, weight)


def _op_backward(ctx, dy, dres, _):
    x, weight = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dweight_out = ctx.dweight_out if needs[1] else None
    _, *grads = _gradients(needs, dy, x, weight, ctx.rstd, dres, dweight_out, ctx)
    return *grads, *(None,) * 6


torch.library.register_autograd("quackish::rms_norm_fwd", _op_backward, setup_context=_setup_context, lib=_lib)
