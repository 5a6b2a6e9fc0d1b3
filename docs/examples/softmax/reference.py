"""Softmax over the last dimension and its gradient in PyTorch: the specification, and the portable path."""

import torch
from torch import Tensor


def softmax_fwd(x: Tensor) -> Tensor:
    """y = exp(x - max(x)) / sum(exp(x - max(x))), computed in fp32 (fp64 for fp64) and rounded once."""
    exp = (_wide(x) - _wide(x).amax(-1, keepdim=True)).exp()
    return (exp / exp.sum(-1, keepdim=True)).to(x.dtype)


def softmax_bwd(dy: Tensor, y: Tensor) -> Tensor:
    """dx = y * (dy - sum(y * dy)), computed in fp32 (fp64 for fp64) and rounded once."""
    y_wide, dy_wide = _wide(y), _wide(dy)
    return (y_wide * (dy_wide - (y_wide * dy_wide).sum(-1, keepdim=True))).to(y.dtype)


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.float64 if t.dtype == torch.float64 else torch.float32)
