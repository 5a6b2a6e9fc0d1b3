"""The MLP of a mixture of experts in plain PyTorch: the specification, and the portable path.

Rows are sorted by group (expert): group g is rows offs[g - 1] to offs[g]. Without offs, all rows are in one group, and
weights and biases have no dimension E. For a row of group g, with scales s:

    z   = x @ w1[g].T + b1[g]             [gate, up] of a gated activation; with w3: [x @ w1[g].T, x @ w3[g].T] + b1[g]
    act = s * f(z)                        f(z) = value(gate) * factor(up), or value(z)
    y   = act @ w2[g].T + b2[g] + residual

    dact = dy @ w2[g]          dscales = sum of dact * f(z)          dz = s * dact * f'(z)
    dx   = dz @ w1[g]          dw1[g] = dz.T @ x                     db1[g] = sum of dz over the group's rows
                               dw2[g] = dy.T @ act                   db2[g] = sum of dy over the group's rows

| activation       | value(gate)                              | factor(up)                    |
|------------------|------------------------------------------|-------------------------------|
| "swiglu"         | gate * sigmoid(gate)                     | up                            |
| "clamped_swiglu" | c * sigmoid(1.702 * c), c = min(gate, 7) | min(max(up, -7), 7) + 1       |
| "geglu"          | GELU(gate), its tanh approximation       | up                            |
| "geglu_erf"      | GELU(gate), with erf                     | up                            |
| "reglu"          | max(gate, 0)                             | up                            |
| "silu"           | z * sigmoid(z)                           |                               |
| "relu2"          | max(z, 0)**2                             |                               |
| "gelu_tanh"      | GELU(z), its tanh approximation          |                               |
| "gelu_erf"       | GELU(z), with erf                        |                               |

At a limit of "clamped_swiglu" and at 0 of "reglu" the derivative is 0: PyTorch's minimum-norm convention.

Computes in fp32 (fp64 for fp64). z is stored in x's dtype for backward; where it overflows fp16, forward too uses an
infinite z. Rows from offs[-1] on are 0 in all results and do not affect other rows. If offs decreases or exceeds the
number of rows, all results are NaN; the host never reads it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.ops.mlp.groups import groups_of, is_on_gpu
from quackish.ops.shared.matmul import accumulate_dtype

GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu")
ACTIVATIONS = (*GATED, "silu", "relu2", "gelu_tanh", "gelu_erf")
LIMIT, ALPHA = 7.0, 1.702  # of "clamped_swiglu"
_CHUNK = 2**22  # elements: 16 MB in fp32, of an A100's 40 MB. No other size was measured.


class Needs(NamedTuple):
    """Which results of `down_backward` to compute."""

    dpreactivation: bool
    act: bool
    dscales: bool


# Steps ----------------------------------------------------------------------------------------------------------------


def up(
    x: Tensor,  # (R, H)
    w1: Tensor,  # (E, 2I, H) as [gate; up]; (E, I, H) with w3, and for activations without a gate
    w3: Tensor | None,  # (E, I, H)
    b1: Tensor | None,  # (E, 2I) or (E, I): as z
    scales: Tensor | None,  # (R,)
    offs: Tensor | None,  # (E,) int32
    activation: str,
    keep_preactivation: bool,
) -> tuple[Tensor | None, Tensor]:
    """(z or None, act): (R, 2I) or (R, I), and (R, I), in x's dtype."""
    groups = groups_of(offs, x.shape[0])
    z = groups.rows_times(x, w1) if w3 is None else groups.rows_times(x, w1, w3)
    preactivation = x.new_empty(z.shape) if keep_preactivation else None
    act = x.new_empty((z.shape[0], z.shape[1] // 2 if activation in GATED else z.shape[1]))
    for rows in chunks_of(act):
        part = z[rows]
        if b1 is not None:
            part = part.add_(groups.per_row(b1.to(z.dtype), rows))
        if x.dtype is torch.float16:
            part = overflow_as_fp16(part)
        if preactivation is not None:
            preactivation[rows] = part
        _multiply(act[rows], activate(part, activation), None if scales is None else scales[rows, None].to(z.dtype))
    return None if preactivation is None else groups.defined(preactivation), groups.defined(act)


def down(
    act: Tensor,  # (R, I)
    w2: Tensor,  # (E, H, I)
    b2: Tensor | None,  # (E, H)
    offs: Tensor | None,
    residual: Tensor | None = None,  # (R, H)
) -> Tensor:
    """y (R, H) in act's dtype."""
    groups = groups_of(offs, act.shape[0])
    y = groups.rows_times(act, w2)
    if b2 is not None:
        y.add_(groups.per_row(b2.to(y.dtype)))
    if residual is not None:
        y.add_(residual)
    return groups.defined(y.to(act.dtype))


def down_backward(
    dy: Tensor,  # (R, H)
    w2: Tensor,  # (E, H, I)
    preactivation: Tensor,  # (R, 2I) or (R, I), of `up`
    scales: Tensor | None,  # (R,)
    offs: Tensor | None,
    activation: str,
    needs: Needs,
    overwrite: bool = False,  # allows dz to take preactivation's memory
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dz, act, dscales), None if not needed. dz and act are in preactivation's dtype, dscales in scales' dtype."""
    dz = act = dscales = dact = None
    dtype, groups = accumulate_dtype(preactivation.dtype), groups_of(offs, dy.shape[0])
    if needs.act:
        act = preactivation.new_empty((dy.shape[0], w2.shape[-1]))
    if needs.dpreactivation:
        # `data`, as kernels: it leaves the version alone, by which autograd would refuse a backward that runs again.
        dz = preactivation.data if overwrite else torch.empty_like(preactivation)
    if needs.dscales:
        dscales = scales.new_empty(scales.shape)
    if needs.dpreactivation or needs.dscales:
        dact = groups.rows_times(dy, w2.mT)
    for rows in chunks_of(dact if act is None else act):
        z, s = preactivation[rows], None if scales is None else scales[rows, None].to(dtype)
        at = derivatives(z, activation)
        if act is not None:
            _multiply(act[rows], at.value, at.factor, s)
        if dscales is not None:
            dscales[rows] = _product(dact[rows], _product(at.value, at.factor)).sum(1)
        if dz is not None:
            activation_gradient(_product(dact[rows], s), at, dz[rows])
    dz, act, dscales = (None if t is None else groups.defined(t) for t in (dz, act, dscales))
    return dz, act, dscales


def rows_gradient(
    dpreactivation: Tensor,  # (R, 2I) or (R, I)
    w1: Tensor,
    w3: Tensor | None,
    offs: Tensor | None,
) -> Tensor:
    """dx (R, H) in dpreactivation's dtype."""
    groups = groups_of(offs, dpreactivation.shape[0])
    if w3 is None:
        dx = groups.rows_times(dpreactivation, w1.mT)
    else:
        dgate, dup = dpreactivation.chunk(2, 1)
        dx = groups.rows_times(dgate, w1.mT).add_(groups.rows_times(dup, w3.mT))
    return groups.defined(dx.to(dpreactivation.dtype))


def weight_gradient(
    a: Tensor,  # (R, n)
    b: Tensor,  # (R, k)
    offs: Tensor | None,
    dtype: torch.dtype,
    out: Tensor | None = None,  # (E, n, k) fp32 or in the weight's dtype
) -> Tensor | None:
    """a[g].T @ b[g] of each group, (E, n, k) in `dtype`, rounded once. With `out`, adds to it and returns None.

    Groups without rows leave their part of `out` unchanged.
    """
    groups = groups_of(offs, a.shape[0])
    total = groups.sum_of_products(a, b)
    if out is None:
        return total.to(dtype)
    groups.add(total, out)
    return None


def bias_gradient(a: Tensor, offs: Tensor | None, dtype: torch.dtype) -> Tensor:  # a: (R, n)
    """Sum of a over each group's rows, (E, n) in `dtype`."""
    ones = a.new_ones((a.shape[0], 1))
    return groups_of(offs, a.shape[0]).sum_of_products(a, ones).squeeze(-1).to(dtype)


# Activations ----------------------------------------------------------------------------------------------------------


def overflow_as_fp16(z: Tensor) -> Tensor:
    """z, but infinite where it is infinite in fp16."""
    rounded = z.half()
    return torch.where(rounded.isinf(), rounded.to(z.dtype), z)


class Derivatives(NamedTuple):
    """f = value * factor, and the derivatives of both. factor and factor_slope are None where they are 1."""

    value: Tensor
    value_gradient: Callable[[Tensor], Tensor]  # d -> d * value'
    factor: Tensor | None
    factor_slope: Tensor | None


def activate(z: Tensor, activation: str) -> Tensor:
    """f(z), (R, I)."""
    gate, up = _gate_and_up(z, activation)
    return _product(_value_and_gradient(gate, activation)[0], _factor(up, activation))


def derivatives(z: Tensor, activation: str) -> Derivatives:
    """z may have 16 bits."""
    gate, up = _gate_and_up(z, activation)
    value, value_gradient = _value_and_gradient(gate.to(accumulate_dtype(z.dtype)), activation)
    factor_slope = ~(up.abs() >= LIMIT) if activation == "clamped_swiglu" and up is not None else None
    return Derivatives(value, value_gradient, _factor(up, activation), factor_slope)


def activation_gradient(df: Tensor, at: Derivatives, out: Tensor) -> None:
    """Writes the gradient of z to `out`, which may be z."""
    if at.factor is None:
        out.copy_(at.value_gradient(df))
        return
    dgate, dup = out.chunk(2, 1)
    dgate.copy_(at.value_gradient(df * at.factor))
    _multiply(dup, df, at.value, at.factor_slope)


def _gate_and_up(z: Tensor, activation: str) -> tuple[Tensor, Tensor | None]:
    gate, up = z.chunk(2, 1) if activation in GATED else (z, None)
    return gate, up


def _factor(up: Tensor | None, activation: str) -> Tensor | None:
    if up is None or activation != "clamped_swiglu":
        return up
    up = up.to(accumulate_dtype(up.dtype))
    return torch.where(up.abs() >= LIMIT, up.sign() * LIMIT, up).add_(1)


def _value_and_gradient(gate: Tensor, activation: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """value(gate), and a function that multiplies by its derivative; NaN where gate is NaN."""
    if activation in ("swiglu", "silu"):
        return F.silu(gate), lambda d: torch.ops.aten.silu_backward(d, gate)
    if activation == "relu2":
        positive = gate.relu()
        return positive.square(), lambda d: d * (2 * positive)
    if activation == "reglu":
        positive = gate.relu()
        return positive, lambda d: d * torch.where(gate > 0, 1.0, positive)
    if activation in ("geglu_erf", "gelu_erf"):
        cdf = 0.5 * torch.erfc(gate * -math.sqrt(0.5))  # 0.5 * (1 + erf) cancels far below 0
        return gate * cdf, lambda d: d * (cdf + gate * (torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)))
    if activation in ("geglu", "gelu_tanh"):
        k, square = math.sqrt(2 / math.pi), gate.square()
        t = torch.tanh(k * gate * (1 + 0.044715 * square))

        def gradient(d: Tensor) -> Tensor:
            return d * (0.5 * (1 + t) + 0.5 * gate * (1 - t.square()) * k * (1 + 3 * 0.044715 * square))

        return 0.5 * gate * (1 + t), gradient
    c = torch.where(gate >= LIMIT, LIMIT, gate)
    s = torch.sigmoid(ALPHA * c)
    return c * s, lambda d: d * (s * (1 + ALPHA * c * (1 - s)) * ~(gate >= LIMIT))


# Elementwise operations on a GPU --------------------------------------------------------------------------------------


def chunks_of(t: Tensor) -> list[slice]:
    """Slices of the rows of t, whose fp32 numbers stay in a GPU's L2 cache from one operation to the next."""
    num_rows, columns = t.shape
    size = max(1, _CHUNK // columns if is_on_gpu(t) else num_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def _product(*factors: Tensor | None) -> Tensor:
    """The factors' product from left to right. None is 1."""
    first, *others = (t for t in factors if t is not None)
    for t in others:
        first = first * t
    return first


def _multiply(out: Tensor, *factors: Tensor | None) -> None:
    """out = the factors' product from left to right, rounded once."""
    *others, last = (t for t in factors if t is not None)
    if others:
        torch.mul(_product(*others), last, out=out)
    else:
        out.copy_(last)
