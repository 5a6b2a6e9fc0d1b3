"""What the schedules of linear cross entropy are given, and what they return."""

from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.linear_cross_entropy.launches import (
    ExpLogits,
    RowKernels,
    RowState,
)


class Plan(NamedTuple):
    """Options of a call that are not tensors; schedule to dw_in_chunks are a LinearCrossEntropyConfig."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_stats: bool
    compute_dtype: torch.dtype
    schedule: str
    chunk_rows: int
    dx_in_forward: bool
    dw_in_chunks: bool
    why_portable: str | None  # None: kernels run; else the portable path, and what it warns of once ("": nothing)


class Call(NamedTuple):
    """What is the same for all launches of a forward or a backward."""

    k: RowKernels  # LceKernels or CublasKernels
    plan: Plan
    state: RowState  # filled by forward, read by backward
    m: int
    h: int
    v: int
    x: Tensor  # (m, h) compute dtype, unit stride along h
    w: Tensor  # (v, h) compute dtype, contiguous
    target: Tensor  # (m,) contiguous
    bias: Tensor | None  # (v,) contiguous, compute dtype or fp32
    class_weight: Tensor | None  # (v,) contiguous, fp32
    total_weight: Tensor | None  # 0-dim: its sum; with label smoothing
    num_items: float | Tensor | None  # 0-dim
    softcap: float  # 0: none
    logit_scale: Tensor | None  # 0-dim fp32
    dw_out: Tensor | None  # (v, h): dw is added to it instead of returned
    # What arrives in backward; None in forward, whose gradients are those of a loss gradient of 1.
    grad_loss: Tensor | None = None  # 0-dim, or (m,) contiguous; fp32; None is 1
    grad_lse: Tensor | None = None  # (m,) contiguous fp32; None is 0, as for the next two
    grad_log_prob: Tensor | None = None
    grad_entropy: Tensor | None = None

    def has_row_grads(self) -> bool:
        """Whether rows have gradients that are not the loss's."""
        return any(grad is not None for grad in (self.grad_lse, self.grad_log_prob, self.grad_entropy))


class Chunk(NamedTuple):
    """Slots [start, start + rows)."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): their rows of x
    exp_logits: ExpLogits


class GradsNeeded(NamedTuple):
    """The dtypes of the gradients to compute, None for those not needed; dbias is fp32."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: bool

    def any(self) -> bool:
        return self.dx is not None or self.dw is not None or self.db

    def but(self, other: "GradsNeeded") -> "GradsNeeded":
        """Without those that `other` has."""
        return GradsNeeded(None if other.dx else self.dx, None if other.dw else self.dw, self.db and not other.db)


class Grads(NamedTuple):
    dx: Tensor | None = None  # (m, h)
    dw: Tensor | None = None  # (v, h)
    db: Tensor | None = None  # (v,) fp32

    def and_also(self, other: "Grads") -> "Grads":
        return Grads(*(mine if mine is not None else its for mine, its in zip(self, other, strict=True)))


class Forward(NamedTuple):
    """What forward computes, beside the state of the rows. Backward needs all but the loss."""

    loss: Tensor | None  # (m,) fp32, divided for `mean`: the loss is their sum
    grads: Grads = Grads()
    live_x: Tensor | None = None  # (m, h): `stored` keeps the live rows of x, and exp_logits
    exp_logits: Tensor | None = None  # (m, v), row stride padded
    dw: Tensor | None = None  # (v, h): with `recompute` the first `classes` rows may be computed
    classes: int = 0
