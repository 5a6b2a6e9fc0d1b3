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
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.shared.matmul import accumulate_dtype, mm, operand_dtype

GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu")
ACTIVATIONS = (*GATED, "silu", "relu2", "gelu_tanh", "gelu_erf")
LIMIT, ALPHA = 7.0, 1.702  # of "clamped_swiglu"


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
    z = groups.rows_times(x, w1)
    if w3 is not None:
        z = torch.cat([z, groups.rows_times(x, w3)], 1)
    if b1 is not None:
        z = z + groups.per_row(b1.to(z.dtype))
    if x.dtype is torch.float16:
        z = overflow_as_fp16(z)
    act = activate(z, activation)
    if scales is not None:
        act = act * scales.to(z.dtype)[:, None]
    return groups.defined(z).to(x.dtype) if keep_preactivation else None, groups.defined(act).to(x.dtype)


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
        y = y + groups.per_row(b2.to(y.dtype))
    if residual is not None:
        y = y + residual.to(y.dtype)
    return groups.defined(y).to(act.dtype)


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
    dz = act = dscales = None
    dtype, groups = accumulate_dtype(preactivation.dtype), groups_of(offs, dy.shape[0])
    z, s = preactivation.to(dtype), None if scales is None else scales.to(dtype)[:, None]
    f = activate(z, activation)
    if needs.act:
        act = groups.defined(f if s is None else f * s).to(preactivation.dtype)
    if needs.dpreactivation or needs.dscales:
        dact = groups.rows_times(dy, w2.mT)
        if needs.dscales:
            dscales = groups.defined((dact * f).sum(1)).to(scales.dtype)
        if needs.dpreactivation:
            dz = activation_gradient(dact if s is None else dact * s, z, activation)
            dz = groups.defined(dz).to(preactivation.dtype)
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
        dx = groups.rows_times(dgate, w1.mT) + groups.rows_times(dup, w3.mT)
    return groups.defined(dx).to(dpreactivation.dtype)


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


def activate(z: Tensor, activation: str) -> Tensor:
    """f(z), (R, I)."""
    if activation not in GATED:
        return _value_and_slope(z, activation)[0]
    gate, up = z.chunk(2, 1)
    return _value_and_slope(gate, activation)[0] * _factor_of(up, activation)


def activation_gradient(df: Tensor, z: Tensor, activation: str) -> Tensor:
    """The gradient of z, of its shape."""
    if activation not in GATED:
        return df * _value_and_slope(z, activation)[1]
    gate, up = z.chunk(2, 1)
    value, slope = _value_and_slope(gate, activation)
    dup = df * value
    if activation == "clamped_swiglu":
        dup = dup * ~(up.abs() >= LIMIT)
    return torch.cat([df * _factor_of(up, activation) * slope, dup], 1)


def _factor_of(up: Tensor, activation: str) -> Tensor:
    if activation != "clamped_swiglu":
        return up
    return torch.where(up.abs() >= LIMIT, up.sign() * LIMIT, up) + 1


def _value_and_slope(gate: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """value(gate) and its derivative; NaN where gate is NaN."""
    if activation == "relu2":
        positive = gate.relu()
        return positive.square(), 2 * positive
    if activation == "reglu":
        positive = gate.relu()
        return positive, torch.where(gate > 0, 1.0, positive)
    if activation in ("geglu_erf", "gelu_erf"):
        cdf = 0.5 * torch.erfc(gate * -math.sqrt(0.5))  # 0.5 * (1 + erf) cancels far below 0
        density = torch.exp(-0.5 * gate.square()) / math.sqrt(2 * math.pi)
        return gate * cdf, cdf + gate * density
    if activation in ("geglu", "gelu_tanh"):
        k = math.sqrt(2 / math.pi)
        square = gate.square()
        t = torch.tanh(k * gate * (1 + 0.044715 * square))
        slope = 0.5 * (1 + t) + 0.5 * gate * (1 - t.square()) * k * (1 + 3 * 0.044715 * square)
        return 0.5 * gate * (1 + t), slope
    alpha = ALPHA if activation == "clamped_swiglu" else 1.0
    c = torch.where(gate >= LIMIT, LIMIT, gate) if activation == "clamped_swiglu" else gate
    s = torch.sigmoid(alpha * c)
    slope = s * (1 + alpha * c * (1 - s))
    if activation == "clamped_swiglu":
        slope = slope * ~(gate >= LIMIT)
    return c * s, slope


# Groups of rows, without a synchronization on a GPU -------------------------------------------------------------------


class Groups:
    """The groups of rows, split into blocks of a fixed number of rows, each within one group.

    Fixed block shapes make a row's result independent of other rows.
    """

    # Not F.grouped_mm: it rounds to 16 bits before the activation; without sm_90 or sm_100 it reads offs on the host.

    def __init__(self, offs: Tensor, num_rows: int):
        on_cpu, num_groups = offs.device.type == "cpu", offs.shape[0]
        self.block_rows = size = 32 if on_cpu else 512  # each block reads and writes a copy of its weight: not measured
        # Illegal offsets: stay within bounds, and make all results NaN.
        starts = torch.nn.functional.pad(offs, (1, 0)).long()
        is_bad = (starts.diff() < 0).any() | (starts[-1] > num_rows)
        bounds = starts.clamp(0, num_rows).cummax(0).values
        starts, ends = bounds[:-1], bounds[1:]
        row = torch.arange(num_rows, device=offs.device)
        self.of_row = torch.searchsorted(ends, row, right=True).clamp(max=num_groups - 1)
        self.is_live = (row < ends[-1]) & ~is_bad
        self.has_rows = (ends > starts) | is_bad
        self.fill = torch.zeros((), device=offs.device).masked_fill(is_bad, torch.nan)

        blocks = (ends - starts + size - 1) // size
        last_blocks = blocks.cumsum(0)
        first_blocks = last_blocks - blocks
        num_blocks = int(last_blocks[-1]) if on_cpu else num_rows // size + num_groups
        num_blocks *= num_rows > 0
        block = torch.arange(num_blocks, device=offs.device)
        of_block = torch.searchsorted(last_blocks, block, right=True).clamp(max=num_groups - 1)
        first_row = starts[of_block] + (block - first_blocks[of_block]) * size
        # the row of each slot of a block; free slots write row num_rows, and read the last one
        slots = first_row[:, None] + torch.arange(size, device=offs.device)
        is_free = slots >= ends[of_block][:, None]
        self.of_blocks, self.is_free = of_block[:, None].unbind(), is_free[:, :, None].unbind()
        self.written = slots.masked_fill(is_free, num_rows).unbind()
        self.read = slots.masked_fill(is_free, max(num_rows - 1, 0)).unbind()

    def defined(self, t: Tensor) -> Tensor:
        """t (R, ...) with 0 in rows of no group; all NaN if the offsets are illegal."""
        return torch.where(self.is_live.view(-1, *[1] * (t.dim() - 1)), t, self.fill.to(t.dtype))

    def per_row(self, b: Tensor) -> Tensor:
        """(R, n): b (E, n) of each row's group."""
        return b.index_select(0, self.of_row)

    def rows_times(self, a: Tensor, w: Tensor) -> Tensor:
        """a @ w[g].T of a (R, k) and w (E, n, k), in fp32 (fp64). Rows of no group are arbitrary."""
        dtype, wide = operand_dtype(a.dtype, a.device.type), accumulate_dtype(a.dtype)
        out = a.new_zeros((a.shape[0] + 1, w.shape[1]), dtype=wide)
        product = a.new_empty((self.block_rows, w.shape[1]), dtype=wide)
        for group, read, written in zip(self.of_blocks, self.read, self.written, strict=True):
            weight = w.index_select(0, group)[0].to(dtype)
            mm(a.index_select(0, read).to(dtype), weight.t(), product)
            out.index_copy_(0, written, product)
        return out[:-1]

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        """a[g].T @ b[g] of a (R, n) and b (R, k), (E, n, k) in fp32 (fp64), summed in row order."""
        total = a.new_zeros((*self.has_rows.shape, a.shape[1], b.shape[1]), dtype=accumulate_dtype(a.dtype))
        product, dtype = torch.empty_like(total[0]), operand_dtype(a.dtype, a.device.type)
        for group, read, is_free in zip(self.of_blocks, self.read, self.is_free, strict=True):
            rows_a, rows_b = (t.index_select(0, read).masked_fill_(is_free, 0.0).to(dtype) for t in (a, b))
            mm(rows_a.t(), rows_b, product)
            total.index_add_(0, group, product[None])
        return total + self.fill.to(total.dtype)

    def add(self, total: Tensor, out: Tensor) -> None:
        """Adds total (E, n, k) to out, but for groups without rows."""
        out.copy_(torch.where(self.has_rows[:, None, None], out + total, out))


class OneGroup:
    """All rows in one group: the methods of `Groups` that steps call. PyTorch's own matmuls."""

    def per_row(self, b: Tensor) -> Tensor:
        return b

    def defined(self, t: Tensor) -> Tensor:
        return t

    def rows_times(self, a: Tensor, w: Tensor) -> Tensor:
        dtype = operand_dtype(a.dtype, a.device.type)
        out = a.new_empty((a.shape[0], w.shape[0]), dtype=accumulate_dtype(a.dtype))
        mm(a.to(dtype), w.to(dtype).t(), out)
        return out

    def sum_of_products(self, a: Tensor, b: Tensor) -> Tensor:
        dtype = operand_dtype(a.dtype, a.device.type)
        out = a.new_empty((a.shape[1], b.shape[1]), dtype=accumulate_dtype(a.dtype))
        mm(a.to(dtype).t(), b.to(dtype), out)
        return out

    def add(self, total: Tensor, out: Tensor) -> None:
        out.copy_(out + total)


def groups_of(offs: Tensor | None, num_rows: int) -> Groups | OneGroup:
    return OneGroup() if offs is None else Groups(offs, num_rows)
