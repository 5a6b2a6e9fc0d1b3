"""RMSNorm: what users call.

In plain eager mode, a call looks up its plan, which allocates and launches. See operators.py for gradients and other
modes.
"""

from typing import Any, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from quackish.device.modes import is_plain
from quackish.ops.operator import reshaped
from quackish.ops.rms_norm.checks import check_flags, check_module, check_module_inputs
from quackish.ops.rms_norm.operators import (
    apply,
    assign_grads,
    backward,
    dx_dtypes_of,
    forward,
    is_grad_enabled,
    rms_norm_operator,
)
from quackish.ops.rms_norm.plans import BackwardPlan, ForwardPlan, plan_for, resolve_eps
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
            per reason on a GPU. "cute" runs a kernel or raises. "reference" runs elementwise functions of PyTorch.

    Returns:
        y of x's shape, contiguous; with a residual (y, res). Gradients have their arguments' dtypes. Second
        derivatives, torch.func and forward-mode AD also run elementwise functions.

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
        return rms_norm_operator(*tensors, *options)
    if dweight_out is not None:
        check_buffer("rms_norm", dweight_out=dweight_out, weight=weight, x=x)
    if is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
        or (residual is not None and residual.requires_grad)
    ):
        return apply(x, weight, bias, residual, plan, dweight_out)
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
        y, res, rstd = forward(*tensors, resolve_eps(x, eps), *options[1:])
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
        *dx_dtypes_of(dx, dresidual, dx_dtype or x.dtype, dresidual_dtype or x.dtype),
        weight.dtype if dweight and weight is not None else None,
        (dbias_dtype or (x if weight is None else weight).dtype) if dbias else None,
    )
    tensors, options = (dy, x, weight, rstd, dres), (weight_offset, *dtypes, backend)
    plan = plan_for(BackwardPlan, (*tensors, None), options) if is_plain() else None
    if plan is None:
        grads = backward(*tensors, *options)
    else:
        grads = plan.run(*tensors)
    return RmsNormGrads(*assign_grads(dx, dresidual, *grads))


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
        weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
        if dweight_out is not None:
            options["dweight_out"] = dweight_out.view(-1)
        flat = x.flatten(-ndim)
        flat_residual = None if residual is None else reshaped(residual, flat.shape)  # its gradient may be x's
        out = rms_norm(flat, weight, bias, residual=flat_residual, **options)
        return out.view(x.shape) if isinstance(out, Tensor) else (out[0].view(x.shape), out[1].view(x.shape))

    def extra_repr(self) -> str:
        text = super().extra_repr()
        defaults = dict(weight_offset=0.0, residual_dtype=None, out_dtype=None, backend="auto")
        for name, default in defaults.items():
            if getattr(self, name) != default:
                text += f", {name}={getattr(self, name)}"
        return text + ", bias=True" if self.bias is not None else text
