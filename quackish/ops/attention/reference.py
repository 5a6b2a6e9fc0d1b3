"""Attention with an additive bias and a mask in plain PyTorch: the specification, and the portable path.

    x   = softcap * tanh(scale * q k^T / softcap) + bias        without softcap: scale * q k^T + bias
    p   = softmax of x over the keys that the mask, causality and window leave
    o   = p v                      lse = log of the sum of exp(x) over these keys
    ds  = p * (do v^T - delta)     delta = sum of do * o over a row, minus lse's gradient
    backward: p = exp(x - lse - residual), where residual is what rounding lse to fp32 dropped if |lse| > LARGE, else 0
    dbias = ds, summed over the dimensions in which the bias is broadcast

Computed in fp32 (fp64 for fp64), some rows of queries at a time: scores of at most MAX_SCORES elements, or of one row
per head. A row with no key left has o = 0, lse = -inf and gradients 0.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

MAX_SCORES = 1 << 24
LARGE = 2.0**12  # as in `arguments.py`


class Inputs(NamedTuple):
    """The tensors of a call, with batch dimensions flattened to one."""

    q: Tensor  # (B, Hq, Lq, D)
    k: Tensor  # (B, Hk, Lk, D); Hq is a multiple of Hk
    v: Tensor  # (B, Hk, Lk, Dv)
    bias: Tensor | None  # (B, Hq, Lq, Lk), or 1 in any dimension
    mask: Tensor | None  # as bias, bool: True for keys that take part


class Options(NamedTuple):
    scale: float
    softcap: float | None = None
    left: int | None = None  # key j takes part in row i if i - left <= j <= i + right
    right: int | None = None  # 0: causal

    @property
    def has_band(self) -> bool:
        return self.left is not None or self.right is not None


class Gradients(NamedTuple):
    """Each gradient has the shape and dtype of its tensor."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dbias: Tensor | None


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """(o (B, Hq, Lq, Dv) in q's dtype, lse (B, Hq, Lq) in fp32, or fp64 for fp64, its residual as lse)"""
    q, k, v, _, _ = inputs
    wide = _wide(q.dtype)
    out = empty_like(q, v.shape[3]).zero_()
    lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    residual = torch.zeros_like(lse)
    if not out.numel() or not k.shape[2]:
        return out, lse, residual
    k, v = k.to(wide), v.to(wide)
    for rows in _chunks(inputs):
        x, _ = _scores(inputs, k, rows, options)
        top = x.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        e = (x - top).exp_()
        total = e.sum(-1, keepdim=True)
        o = _matmul(e, v).div_(total).masked_fill_(total == 0, 0.0)
        out[:, :, rows] = o.to(q.dtype)
        of_rows = top + total.log()
        lse[:, :, rows] = of_rows.squeeze(-1)
        dropped = (top - of_rows).add_(total.log()).masked_fill_((total == 0) | (of_rows.abs() <= LARGE), 0.0)
        residual[:, :, rows] = dropped.squeeze(-1)
    return out, lse, residual


def backward(
    do: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    residual: Tensor,
    inputs: Inputs,
    options: Options,
    need_dbias: bool = True,
) -> Gradients:
    q, k, v, bias, _ = inputs
    wide = _wide(q.dtype)
    need_dbias = need_dbias and bias is not None
    dq = empty_like(q, q.shape[3]).zero_()
    dk, dv = (empty_like(t, t.shape[3], wide).zero_() for t in (k, v))
    dbias = torch.zeros(bias.shape, dtype=bias.dtype, device=bias.device) if need_dbias else None
    of_one_row = torch.zeros_like(dbias, dtype=wide) if need_dbias and bias.shape[2] == 1 else None
    if not q.numel() or not k.numel():
        return Gradients(dq, dk.to(k.dtype), dv.to(v.dtype), dbias)
    wide_k, wide_v = k.to(wide), v.to(wide)
    for rows in _chunks(inputs):
        x, tanh = _scores(inputs, wide_k, rows, options)
        shift = lse[:, :, rows, None].to(wide)
        p = (x - shift.masked_fill(shift == -torch.inf, 0.0)).sub_(residual[:, :, rows, None]).exp_()
        grad, o = do[:, :, rows].to(wide), out[:, :, rows].to(wide)
        delta = (grad * o).sum(-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[:, :, rows, None].to(wide)
        dv += _matmul_transposed(p, grad, dv)
        ds = _matmul(grad, wide_v.mT).sub_(delta).mul_(p)
        ds.masked_fill_(p == 0, 0.0)  # also where the gradient of a row without keys is not finite
        if need_dbias:
            if of_one_row is None:
                dbias[:, :, rows] = ds.sum_to_size((*bias.shape[:2], ds.shape[2], bias.shape[3])).to(bias.dtype)
            else:
                of_one_row += ds.sum_to_size(bias.shape)
        if tanh is not None:
            ds = ds * (1 - tanh * tanh)
        ds = ds * options.scale
        dq[:, :, rows] = _matmul(ds, wide_k).to(q.dtype)
        dk += _matmul_transposed(ds, q[:, :, rows].to(wide), dk)
    if of_one_row is not None:
        dbias = of_one_row.to(bias.dtype)
    return Gradients(dq, dk.to(k.dtype), dv.to(v.dtype), dbias)


def strides_like(t: Tensor, columns: int) -> tuple[int, ...]:
    """Strides for (B, H, L, columns), with heads inside rows if t (B, H, L, ..) has them there."""
    _, heads, rows, _ = t.shape
    if t.stride(1) < t.stride(2):
        return rows * heads * columns, columns, heads * columns, 1
    return heads * rows * columns, rows * columns, columns, 1


def empty_like(t: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    shape = (*t.shape[:3], columns)
    return torch.empty_strided(shape, strides_like(t, columns), dtype=dtype or t.dtype, device=t.device)


def taking_part(rows: slice, num_keys: int, options: Options, device: torch.device) -> Tensor | None:
    """(rows, keys) bool: what causality and window leave; None if that is all."""
    if options.left is None and options.right is None:
        return None
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    j = torch.arange(num_keys, device=device)[None]
    part = torch.ones((), dtype=torch.bool, device=device)
    if options.left is not None:
        part = part & (j >= i - options.left)
    if options.right is not None:
        part = part & (j <= i + options.right)
    return part


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(inputs: Inputs) -> Iterator[slice]:
    batch, heads, num_rows, _ = inputs.q.shape
    per_chunk = max(1, MAX_SCORES // (batch * heads * inputs.k.shape[2]))
    for start in range(0, num_rows, per_chunk):
        yield slice(start, min(start + per_chunk, num_rows))


def _scores(inputs: Inputs, k: Tensor, rows: slice, options: Options) -> tuple[Tensor, Tensor | None]:
    """(x with -inf for keys that take no part, tanh of the softcap); k is wide."""
    q, _, _, bias, mask = inputs
    x = _matmul(q[:, :, rows].to(k.dtype), k.mT).mul_(options.scale)
    tanh = None
    if options.softcap is not None:
        tanh = (x / options.softcap).tanh_()
        x = tanh * options.softcap
    if bias is not None:
        x = x + _of_rows(bias, rows).to(x.dtype)
    if mask is not None:
        x = x.masked_fill(~_of_rows(mask, rows), -torch.inf)
    band = taking_part(rows, k.shape[2], options, k.device)
    return (x if band is None else x.masked_fill(~band, -torch.inf)), tanh


def _of_rows(t: Tensor, rows: slice) -> Tensor:
    return t if t.shape[2] == 1 else t[:, :, rows]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """(B, Hq, R, K) @ (B, Hk, K, N): each head of b serves Hq / Hk heads of a."""
    batch, heads, rows, _ = a.shape
    a = a.reshape(batch, b.shape[1], -1, a.shape[3])
    return (a @ b).view(batch, heads, rows, b.shape[3])


def _matmul_transposed(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """(B, Hq, R, M)^T @ (B, Hq, R, N), summed over the heads of a that share a head of `like` (B, Hk, M, N)."""
    batch, heads = like.shape[:2]
    a, b = (t.reshape(batch, heads, -1, t.shape[3]) for t in (a, b))
    return a.mT @ b
