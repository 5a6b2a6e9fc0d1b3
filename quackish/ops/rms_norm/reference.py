"""RMSNorm in plain PyTorch, forward and backward: the specification, and what portable.py does not cover.

    res  = x + residual                         (x itself without a residual), rounded to residual_dtype
    rstd = 1 / sqrt(mean(res^2) + eps)          over the last dimension
    xhat = res * rstd
    y    = xhat * (weight_offset + weight) + bias

weight and bias are (n,), or (heads, n) for x of shape (..., heads, n).

Computes in fp32, or in fp64 if any input is fp64. All operations are differentiable, so autograd through `rms_norm_bwd`
gives second derivatives.
"""

import torch
from torch import Tensor


def accumulate_dtype(*tensors: Tensor | None) -> torch.dtype:
    """The dtype to compute in: fp64 if any of the tensors is fp64, else fp32. Absent tensors are None."""
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def rms_norm_rstd(res: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """1 / sqrt(mean(res^2) + eps) over the last dimension, in `dtype`."""
    return torch.rsqrt(res.to(dtype).square().mean(-1) + eps)


def rms_norm_fwd(
    x: Tensor,  # (..., n)
    weight: Tensor | None,  # (n,) or (heads, n)
    bias: Tensor | None,  # weight's shape; (n,) without a weight
    residual: Tensor | None,  # x.shape
    eps: float,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, res, rstd). y is in out_dtype (None: x's dtype), res in residual_dtype (None: residual's) or None."""
    dtype = accumulate_dtype(x, weight, bias, residual)
    # y is the norm of res after rounding, because backward has only the rounded one.
    res = None if residual is None else (x.to(dtype) + residual.to(dtype)).to(residual_dtype or residual.dtype)
    normed = x if res is None else res
    rstd = rms_norm_rstd(normed, eps, dtype)
    y = normed.to(dtype) * rstd.unsqueeze(-1)
    if weight is not None:
        y = y * (weight.to(dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(dtype)
    return y.to(out_dtype or x.dtype), res, rstd


def rms_norm_bwd(
    dy: Tensor,  # (..., n)
    x: Tensor,  # (..., n): the normalized tensor, which is res if there was a residual
    weight: Tensor | None,  # (n,) or (heads, n)
    rstd: Tensor,  # (...)
    dres: Tensor | None,  # (..., n): the gradient of res
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
    dresidual_dtype: torch.dtype | None = None,
    dweight_dtype: torch.dtype | None = None,
    dbias_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dresidual, dweight, dbias), each in its dtype, or None if its dtype is None.

    g = dy * (weight_offset + weight); dx = dresidual = rstd * (g - xhat * mean(xhat * g)) + dres;
    dweight = sum over rows of dy * xhat; dbias = sum over rows of dy.
    """
    dtype = accumulate_dtype(dy, x, weight, rstd)
    dy = dy.to(dtype)
    rstd = rstd.to(dtype).unsqueeze(-1)
    xhat = x.to(dtype) * rstd
    dx = dresidual = dweight = dbias = None
    if dx_dtype or dresidual_dtype:
        g = dy if weight is None else dy * (weight.to(dtype) + weight_offset)
        d = rstd * (g - xhat * (xhat * g).mean(-1, keepdim=True))
        if dres is not None:
            d = d + dres.to(dtype)
        dx = d.to(dx_dtype) if dx_dtype else None
        dresidual = d.to(dresidual_dtype) if dresidual_dtype else None
    shape = x.shape[-1:] if weight is None else weight.shape
    if dweight_dtype:
        dweight = (dy * xhat).reshape(-1, *shape).sum(0).to(dweight_dtype)
    if dbias_dtype:
        dbias = dy.reshape(-1, *shape).sum(0).to(dbias_dtype)
    return dx, dresidual, dweight, dbias
