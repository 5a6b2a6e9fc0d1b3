"""The portable path: PyTorch's fused kernels on an NVIDIA GPU, else reference.py. The same functions and arguments.

The fused kernels compute in fp32, round each result once, and sum dweight in an order that depends only on shapes. All
tensors of a call have one dtype. If the dtypes differ, or something is added before the rounding, that is fp32.
"""

import torch
from torch import Tensor

from quackish.device.cuda import dtype_of
from quackish.ops.rms_norm import reference

_fused_forward = torch.ops.aten._fused_rms_norm.default
_fused_backward = torch.ops.aten._fused_rms_norm_backward.default
_MAX_ELEMENTS = 2**32  # the kernels compute offsets in 32 bits
_MAX_ROWS = 2**16  # with more, the kernels round partial sums of dweight to its dtype


def rms_norm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    residual_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """(y, res, rstd)"""
    if not _is_covered(x, weight, bias, residual):
        return reference.rms_norm_fwd(x, weight, bias, residual, eps, weight_offset, residual_dtype, out_dtype)
    normed, res, out_dtype = x, None, out_dtype or x.dtype
    if residual is not None:
        res_dtype = residual_dtype or residual.dtype
        is_rounded_once = torch.promote_types(x.dtype, residual.dtype) == res_dtype
        normed = res = x + residual if is_rounded_once else (x.float() + residual).to(res_dtype)
    if bias is not None or weight_offset or len({normed.dtype, out_dtype, dtype_of(weight)} - {None}) > 1:
        normed, weight = normed.float(), None if weight is None else weight.float() + weight_offset
    y, rstd = _fused_forward(normed, normed.shape[-1:], weight, eps)
    if bias is not None:
        y.add_(bias)
    return y.to(out_dtype), res, rstd.squeeze(-1)


def rms_norm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    weight_offset: float = 0.0,
    dx_dtype: torch.dtype | None = None,
    dresidual_dtype: torch.dtype | None = None,
    dweight_dtype: torch.dtype | None = None,
    dbias_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dresidual, dweight, dbias)"""
    dtypes, n = (dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype), x.shape[-1]
    if not _is_covered(x, weight, dy, rstd) or (weight is None and dweight_dtype):
        return reference.rms_norm_bwd(dy, x, weight, rstd, dres, weight_offset, *dtypes)
    dbias = dy.reshape(-1, n).sum(0, dtype=torch.float32).to(dbias_dtype) if dbias_dtype else None
    needs = any(dtypes[:2]), dweight_dtype is not None
    if not any(needs):
        return None, None, None, dbias
    differ = len({x.dtype, dy.dtype, dtype_of(weight), *dtypes[:3]} - {None}) > 1
    if differ or dres is not None or weight_offset or (needs[1] and x.numel() > _MAX_ROWS * n):
        x, dy, weight = x.float(), dy.float(), None if weight is None else weight.float() + weight_offset
    d, dweight = _fused_backward(dy, x, (n,), rstd.unsqueeze(-1), weight, needs)
    if needs[0] and dres is not None:
        d.add_(dres)
    results = zip((d, d, dweight), dtypes, strict=False)
    return *(None if dtype is None else t.to(dtype) for t, dtype in results), dbias


def _is_covered(x: Tensor, weight: Tensor | None, *others: Tensor | None) -> bool:
    """Whether PyTorch has fused kernels for tensors of these dtypes and shapes on their device."""
    is_one_weight = weight is None or weight.dim() == 1
    is_fp32 = reference.accumulate_dtype(x, weight, *others) is torch.float32
    return _has_kernels(x.device) and is_one_weight and is_fp32 and 0 < x.numel() < _MAX_ELEMENTS


def _has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None
