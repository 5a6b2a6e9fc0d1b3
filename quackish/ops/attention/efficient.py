"""The steps of `reference.py` by PyTorch's memory-efficient attention: 16-bit calls on GPUs that no kernel covers.

Bias, mask, causality and window are one additive bias in q's dtype, made for some rows of queries at a time. Two things
differ from what F.scaled_dot_product_attention does with it:

- A row without a key gets equal biases, so that nothing is NaN, and then o = 0, lse = -inf and gradients 0.
- A row whose largest bias is beyond LARGE is shifted by it, which changes no softmax: fp32 keeps the digits of lse, and
  the smallest finite number does not overflow.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.gpu import gpu_of
from quackish.ops.attention.reference import LARGE, Gradients, Inputs, Options, empty_like, taking_part

MAX_SCORES = 1 << 26  # elements of an additive bias in memory
_MIN_ROWS = 64  # queries of a block of PyTorch's kernels
_MAX_D = 256  # larger ones were not tried
_MAX_GRID = 65_535  # batch and heads are dimensions y and z of its grids
_FAMILIES = range(80, 121)  # compute capabilities, times 10; PyTorch's kernels do nothing on 12.1
_ALIGNED = 16  # columns: rows of the additive bias start at multiples


def covers(inputs: Inputs, options: Options) -> bool:
    """True on NVIDIA GPUs of `_FAMILIES`, for the dtypes and sizes that the functions take."""
    q, k, v, bias, _ = inputs
    if not q.is_cuda or torch.version.hip or int(gpu_of(q.device.index).family.removeprefix("sm_")) not in _FAMILIES:
        return False
    # The gradient of a bias that is the same for all keys is a sum of terms that cancel, too coarse in 16 bits.
    if bias is not None and (bias.dtype != q.dtype or bias.shape[3] != k.shape[2]):
        return False
    sizes_fit = all(t.shape[3] % 8 == 0 and t.shape[3] <= _MAX_D for t in (q, v)) and max(q.shape[:2]) <= _MAX_GRID
    return q.dtype in (torch.bfloat16, torch.float16) and options.softcap is None and sizes_fit


def forward(inputs: Inputs, options: Options) -> tuple[Tensor, Tensor, Tensor]:
    """As in `reference.py`."""
    q, k, v = _operands(inputs)
    out = empty_like(inputs.q, v.shape[3])
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    residual = torch.empty_like(lse)
    for part in _parts(inputs, options, need_ds=False):
        o, of_rows = attend(q[:, :, part.rows], k, v, part.bias, options.scale)
        out[:, :, part.rows] = o.masked_fill_(part.is_dead, 0.0)
        shift, is_dead = part.shift.squeeze(-1), part.is_dead.squeeze(-1)
        total = of_rows + shift
        lse[:, :, part.rows] = total.masked_fill(is_dead, -torch.inf)
        dropped = (shift - total).add_(of_rows)
        residual[:, :, part.rows] = dropped.masked_fill_((total.abs() <= LARGE) | is_dead, 0.0)
    return out, lse, residual


def backward(
    do: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, residual: Tensor, inputs: Inputs, options: Options,
    need_dbias: bool = True,
) -> Gradients:  # fmt: skip
    """As in `reference.py`. Sums over rows, heads and batch are in fp32 and in a fixed order, of terms in 16 bits.

    dlse too has 16 bits, twice: in fp16 it must be below 65,520.
    """
    (q, k, v), bias, columns = _operands(inputs), inputs.bias, inputs.v.shape[3]
    k_heads = inputs.k.shape[1]
    if dlse is not None:  # ds = p * (do v^T + dlse - sum of do * o): dlse in two columns where v is 1 and o is 0
        high = dlse.to(do.dtype)
        do = torch.cat([do, F.pad(torch.stack([high, (dlse - high).to(do.dtype)], -1), (0, 6))], -1)
        v, out = F.pad(v, (0, 8), value=1.0), F.pad(out, (0, 8))
    dq = empty_like(inputs.q, q.shape[3])
    dk, dv = (empty_like(t, t.shape[3], torch.float32).zero_() for t in (inputs.k, inputs.v))
    need_dbias = need_dbias and bias is not None
    dbias = None
    if need_dbias:  # a part has all terms of its rows
        dbias = torch.zeros_like(bias, dtype=torch.float32 if bias.shape[2] == 1 else None)
    for part in _parts(inputs, options, need_dbias):
        rows = part.rows
        of_rows = (lse[:, :, rows, None] - part.shift).add_(residual[:, :, rows, None])
        of_rows = of_rows.masked_fill_(part.is_dead, torch.inf).squeeze(-1)
        grad = do[:, :, rows].masked_fill(part.is_dead, 0.0)
        dq[:, :, rows], dk_part, dv_part, ds = differentiate(
            grad, q[:, :, rows], k, v, part.bias, out[:, :, rows], of_rows, options.scale, need_dbias
        )
        for total, of_part in ((dk, dk_part), (dv, dv_part[..., :columns])):  # of heads of queries
            total += of_part.unflatten(1, (k_heads, -1)).sum(2, dtype=torch.float32)
        if need_dbias:
            where = dbias if bias.shape[2] == 1 else dbias[:, :, rows]
            summed = [dim for dim in range(4) if where.shape[dim] == 1]
            where += ds.sum(summed, keepdim=True, dtype=torch.float32) if summed else ds
    return Gradients(dq, dk.to(k.dtype), dv.to(v.dtype), None if dbias is None else dbias.to(bias.dtype))


# Some rows of queries -------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    rows: slice
    bias: Tensor  # (B, Hq, rows, Lk), q's dtype, finite in a row without a key
    shift: Tensor  # (B or 1, Hq or 1, rows or 1, 1) fp32: what was subtracted from the row
    is_dead: Tensor  # as shift: the row has no key


def _parts(inputs: Inputs, options: Options, need_ds: bool) -> Iterator[_Part]:
    """need_ds: a part's gradient of scores is in memory too, one matrix per head and batch."""
    q, k, _, bias, mask = inputs
    (batch, heads, num_rows, _), num_keys = q.shape, k.shape[2]
    shapes = [t.shape[:2] for t in (bias, mask) if t is not None]
    matrices = batch * heads if need_ds else math.prod(torch.broadcast_shapes((1, 1), *shapes))
    per_part = max(_MIN_ROWS, MAX_SCORES // (matrices * num_keys) // _MIN_ROWS * _MIN_ROWS)
    for start in range(0, num_rows, per_part):
        rows = slice(start, min(start + per_part, num_rows))
        x = q.new_zeros(1, 1, 1, 1) if bias is None else _of_rows(bias, rows)
        for keep in (None if mask is None else _of_rows(mask, rows), taking_part(rows, num_keys, options, q.device)):
            x = x if keep is None else x.masked_fill(~keep, -torch.inf)
        top = x.amax(-1, keepdim=True)
        is_dead = top == -torch.inf
        shift = torch.where((top.abs() > LARGE) & ~is_dead, top, 0.0)
        padded = -(-num_keys // _ALIGNED) * _ALIGNED
        memory = q.new_empty(*x.shape[:3], padded)[..., :num_keys]
        memory.copy_((x - shift).masked_fill_(is_dead, 0.0))
        yield _Part(rows, memory.expand(batch, heads, rows.stop - start, num_keys), shift.float(), is_dead)


def _of_rows(t: Tensor, rows: slice) -> Tensor:
    return t if t.shape[2] == 1 else t[:, :, rows]


def _operands(inputs: Inputs) -> list[Tensor]:
    """q, k and v as PyTorch's function takes them, k and v with a head for each of q's."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    q, k, v = (t if _is_aligned(t) else t.clone(memory_format=torch.contiguous_format) for t in inputs[:3])
    return [q, *(t if group == 1 else t.repeat_interleave(group, 1) for t in (k, v))]


def _is_aligned(t: Tensor) -> bool:
    return t.data_ptr() % 16 == 0 and t.stride(3) == 1 and all(stride % 8 == 0 for stride in t.stride()[:3])


# PyTorch's functions --------------------------------------------------------------------------------------------------

# F.scaled_dot_product_attention neither returns lse nor takes num_splits_key, with which the sums of dq have one order.


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse); all are (B, H, L, ..)."""
    run = torch.ops.aten._efficient_attention_forward
    o, lse, *_ = run(*_by_rows(q, k, v), bias, None, None, None, None, 0.0, 0, True, scale=scale)
    return o.transpose(1, 2), lse[:, :, : q.shape[2]]


def differentiate(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor, scale: float, need_ds: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dv, ds if needed)"""
    num_q, num_k = q.shape[2], k.shape[2]
    lse = F.pad(lse, (0, -num_q % 32), value=torch.inf)  # as forward returns it
    unused = torch.zeros((), dtype=torch.int64)  # of dropout
    do, out = (t.contiguous() for t in _by_rows(do, out))
    *grads, ds = torch.ops.aten._efficient_attention_backward(
        do, *_by_rows(q, k, v), bias, out, None, None, num_q, num_k, lse, 0.0, unused, unused, 0, need_ds,
        scale=scale, num_splits_key=1,
    )  # fmt: skip
    return *_by_rows(*grads), ds


def _by_rows(*tensors: Tensor) -> list[Tensor]:
    """(B, L, H, ..) of (B, H, L, ..), and back."""
    return [t.transpose(1, 2) for t in tensors]
