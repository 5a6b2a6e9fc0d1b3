"""Matrix products of the portable paths, which round no more than kernels do."""

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of everything except GEMM operands: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand_dtype(dtype: torch.dtype, device_type: str) -> torch.dtype:
    """The dtype of GEMM operands: only CUDA's GEMMs return fp32 results of 16-bit operands."""
    return dtype if device_type == "cuda" and torch.version.hip is None else accumulate_dtype(dtype)


def mm(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b, of matrices or of batches of them, rounded only to out's dtype."""
    product = torch.mm if a.dim() == 2 else torch.bmm
    if a.dtype == out.dtype:
        product(a, b, out=out)
    elif a.device.type == "cpu":  # without out_dtype
        product(a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        product(a, b, out_dtype=out.dtype, out=out)
