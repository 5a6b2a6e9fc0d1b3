"""Rotary position embeddings in PyTorch: the specification, and the portable path."""

import torch
from torch import Tensor

from quackish.ops.rotary.problems import LAYOUTS


def rotary(
    x: Tensor,  # (..., heads, length, D)
    cos: Tensor,  # (length, W), or (batch or 1, length, W)
    sin: Tensor,  # as cos
    out: Tensor,  # as x, written
    rotary_dim: int,
    layout: str,
    transpose: bool,
) -> None:
    """Rotates each pair (x0, x1) of the first `rotary_dim` elements; copies the other elements.

        y0 = x0 * c0 - x1 * s0        transposed: dx0 = dy0 * c0 + dy1 * s1
        y1 = x1 * c1 + x0 * s1                    dx1 = dy1 * c1 - dy0 * s0

    c0, c1, s0 and s1 are at the positions of y0 and y1 in a full table, and c0 = c1, s0 = s1 in a half one. Computed in
    fp32 (fp64 for fp64) and rounded once.
    """
    of_argument, of_result = LAYOUTS[layout]
    read, written = (of_result, of_argument) if transpose else (of_argument, of_result)
    wide = torch.float64 if torch.float64 in (x.dtype, cos.dtype) else torch.float32
    tables = [_by_head(table.to(wide), x) for table in (cos, sin)]
    is_half = cos.shape[-1] == rotary_dim // 2
    (c0, c1), (s0, s1) = [(table, table) if is_half else _pairs(table, of_result) for table in tables]
    x0, x1 = _pairs(x[..., :rotary_dim].to(wide), read)
    y0, y1 = _pairs(out[..., :rotary_dim], written)
    if transpose:
        s0, s1 = -s1, -s0
    y0.copy_(x0 * c0 - x1 * s0)
    y1.copy_(x1 * c1 + x0 * s1)
    out[..., rotary_dim:].copy_(x[..., rotary_dim:])


def _pairs(t: Tensor, adjacent: bool) -> tuple[Tensor, Tensor]:
    """Views of the first and of the second elements of all pairs."""
    half = t.shape[-1] // 2
    return (t[..., ::2], t[..., 1::2]) if adjacent else (t[..., :half], t[..., half:])


def _by_head(table: Tensor, x: Tensor) -> Tensor:
    """The table with x's batch dimensions and 1 head."""
    if table.dim() == 2:
        return table
    return table[0] if table.shape[0] == 1 else table.reshape(*x.shape[:-3], 1, *table.shape[1:])
