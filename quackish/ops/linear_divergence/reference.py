"""The divergence of a student from a teacher in plain PyTorch: the specification, and the portable path.

With s and t the softmax over all V classes of the student's and the teacher's logits / temperature, where logits are
softcap(logit_scale * (x @ w.T + bias)) and softcap(z) = c * tanh(z / c):

    beta = 0        D = sum of t * log(t / s) = KL(t || s)             g = s - t
    beta = 1        D = sum of s * log(s / t) = KL(s || t)             g = s * (log(s / t) - D)
    between         m = (1 - beta) * s + beta * t                      g = (1 - beta) * s * (log(s / m) - KL(s || m))
                    D = beta * KL(t || m) + (1 - beta) * KL(s || m)

    dlogits = g * (derivative of the student's logits) / temperature
    dx = dlogits @ w          dw = dlogits.T @ x          dbias = sum of dlogits over rows

That is the generalized Jensen-Shannon divergence of "On-Policy Distillation of Language Models" (Agarwal et al., 2023),
as TRL computes it. A class of probability 0 adds 0 to a sum that it weights. Logits, divergences and gradients of
logits are fp32 (fp64 for fp64); gradients of logits are rounded once, to x's dtype.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.shared.matmul import accumulate_dtype, mm, operand_dtype


class Side(NamedTuple):
    """How logits follow from a matrix product, for the student or the teacher."""

    bias: Tensor | None  # (V,)
    scale: float
    softcap: float | None


class RowOptions(NamedTuple):
    beta: float
    temperature: float
    entropy: bool  # the student's entropy is computed
    dlogits: bool  # the gradient is computed
    boost: float = 1.0  # dlogits are multiplied by it: fp16's range is small


class RowResults(NamedTuple):
    loss: Tensor  # (R,) fp32 or fp64
    entropy: Tensor | None  # (R,)
    dlogits: Tensor | None  # (R, V) in x's dtype


# Steps ----------------------------------------------------------------------------------------------------------------


def logits(x: Tensor, w: Tensor, num_live: Tensor | None, start: int) -> Tensor:
    """x @ w.T in fp32 (fp64)."""
    out = x.new_empty((x.shape[0], w.shape[0]), dtype=accumulate_dtype(x.dtype))
    dtype = operand_dtype(x.dtype, x.device.type)
    mm(x.to(dtype), w.to(dtype).t(), out)
    return out


def rows(
    student: Tensor,  # (R, V) from `logits`
    teacher: Tensor,
    student_side: Side,
    teacher_side: Side,
    options: RowOptions,
    row_grads: Tensor | None,  # (R,) factors of the rows of dlogits
    num_live: Tensor | None,  # (1,) int32: rows from num_live - start on have no loss and no gradient
    start: int,
    out: Tensor | None,  # (R, V): memory for dlogits
) -> RowResults:
    size = _rows_of_piece(student.shape[1], student.device.type)
    parts = [
        _rows(
            student[i : i + size], teacher[i : i + size], student_side, teacher_side, options,
            None if row_grads is None else row_grads[i : i + size], num_live, start + i,
            None if out is None else out[i : i + size],
        )
        for i in range(0, len(student), size)
    ]  # fmt: skip
    losses, entropies, _ = zip(*parts, strict=True)
    return RowResults(torch.cat(losses), torch.cat(entropies) if options.entropy else None, out)


def bytes_of_rows(rows: int, v: int, itemsize: int, device: str) -> int:
    """Memory that `rows` takes: 15 matrices of a few rows."""
    return 15 * min(rows, _rows_of_piece(v, device)) * v * itemsize


def _rows_of_piece(v: int, device: str) -> int:
    """As fit in fp32 matrices of 4 MB, which a CPU's caches hold, or 16 MB: a GPU starts some 30 kernels per piece.

    device: its type
    """
    return max(1, (1 << (20 if device == "cpu" else 22)) // v)


def _rows(
    student: Tensor, teacher: Tensor, student_side: Side, teacher_side: Side, options: RowOptions,
    row_grads: Tensor | None, num_live: Tensor | None, start: int, out: Tensor | None,
) -> RowResults:  # fmt: skip
    log_s, derivative = _log_softmax(student, student_side, options.temperature)
    log_t, _ = _log_softmax(teacher, teacher_side, options.temperature)
    s, t, beta = log_s.exp(), log_t.exp(), options.beta
    if beta == 0:
        loss = _product(t, log_t - log_s).sum(-1)
        g = s - t
    elif beta == 1:
        to_teacher = log_s - log_t
        loss = _product(s, to_teacher).sum(-1)
        g = _product(s, to_teacher - loss[:, None])
    else:
        # equal where both are 0: -inf - -inf is NaN
        ratio = torch.where(log_t == log_s, 0, log_t - log_s).clamp(-80, 80)
        s_to_mixture = -torch.log1p(beta * torch.expm1(ratio))
        from_student = _product(s, s_to_mixture).sum(-1)
        loss = (1 - beta) * from_student + beta * _product(t, s_to_mixture + ratio).sum(-1)
        g = (1 - beta) * _product(s, s_to_mixture - from_student[:, None])
    entropy = -_product(s, log_s).sum(-1) if options.entropy else None
    g = _product(g, derivative * options.boost)
    if row_grads is not None:
        g = g * row_grads[:, None]
    if num_live is not None:
        dead = torch.arange(start, start + len(loss), device=loss.device) >= num_live
        loss, entropy = loss.masked_fill(dead, 0), None if entropy is None else entropy.masked_fill(dead, 0)
        g = g.masked_fill(dead[:, None], 0)
    return RowResults(loss, entropy, out.copy_(g) if options.dlogits and out is not None else None)


def dx(
    dlogits: Tensor, w: Tensor, num_live: Tensor | None, start: int, factor: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """factor * dlogits @ w; any values in rows that are not live."""
    found = dlogits.new_empty((dlogits.shape[0], w.shape[1]), dtype=accumulate_dtype(dlogits.dtype))
    operands = operand_dtype(dlogits.dtype, dlogits.device.type)
    mm(dlogits.to(operands), w.to(operands), found)
    return (found if factor is None else found.mul_(factor)).to(dtype)


def dw(
    dlogits: Tensor,
    x: Tensor,
    num_live: Tensor | None,
    start: int,
    factor: Tensor | None,
    out: Tensor,
    accumulate: bool,
) -> None:
    """out = (+= with `accumulate`) factor * dlogits.T @ x."""
    wide = accumulate_dtype(x.dtype)
    found = out if out.dtype == wide and not accumulate else x.new_empty(out.shape, dtype=wide)
    operands = operand_dtype(x.dtype, x.device.type)
    mm(dlogits.t().to(operands), x.to(operands), found)
    if factor is not None:
        found.mul_(factor)
    if found is not out:
        out.add_(found) if accumulate else out.copy_(found)


def matrix(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for `rows`' dlogits."""
    return torch.empty((rows, columns), dtype=dtype, device=device)


def _log_softmax(z: Tensor, side: Side, temperature: float) -> tuple[Tensor, Tensor | float]:
    """(log of the softmax, derivative of its argument by z)"""
    if side.bias is not None:
        z = z + side.bias.to(z.dtype)
    z, derivative = z * side.scale, side.scale / temperature
    if side.softcap is None:
        return torch.log_softmax(z / temperature, -1), derivative
    tanh = torch.tanh(z / side.softcap)
    return torch.log_softmax(tanh * (side.softcap / temperature), -1), derivative * (1 - tanh * tanh)


def _product(p: Tensor, x: Tensor | float) -> Tensor:
    """p * x, and 0 where p is 0, whatever x is."""
    return torch.where(p == 0, 0, p * x)
