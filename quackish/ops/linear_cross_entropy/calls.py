"""Arguments and results of the schedules of linear cross entropy."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.ops.linear_cross_entropy.launches import ExpLogits, RowState


class Plan(NamedTuple):
    """Options of a call that are not tensors. `schedule` to `dw_in_chunks` are the LinearCrossEntropyConfig."""

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
    why_portable: str | None  # None: kernels run. Else the reason to warn of once; "": no warning


class Call(NamedTuple):
    """Arguments shared by all launches of a forward or a backward pass."""

    kernels: Any  # LceKernels or CublasKernels
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
    total_weight: Tensor | None  # 0-dim, the sum of class_weight; with label smoothing
    num_items: float | Tensor | None  # 0-dim
    softcap: float  # 0: none
    logit_scale: Tensor | None  # 0-dim fp32
    dw_out: Tensor | None  # (v, h): dw is added to it instead of returned
    # Gradients of the outputs, in backward. All None in forward, which computes gradients for grad_loss = 1.
    grad_loss: Tensor | None = None  # 0-dim, or (m,) contiguous; fp32; None: 1
    grad_lse: Tensor | None = None  # (m,) contiguous fp32; None: 0, as for the next two
    grad_log_prob: Tensor | None = None
    grad_entropy: Tensor | None = None

    def has_row_grads(self) -> bool:
        """Whether lse, log_prob or entropy has a gradient."""
        return any(grad is not None for grad in (self.grad_lse, self.grad_log_prob, self.grad_entropy))


class Chunk(NamedTuple):
    """Slots [start, start + rows)."""

    start: int
    rows: int
    live_x: Tensor | None  # (rows, h): the rows of x in these slots
    exp_logits: ExpLogits


class GradsNeeded(NamedTuple):
    """The dtypes of the gradients to compute, None for those not needed; dbias is fp32."""

    dx: torch.dtype | None
    dw: torch.dtype | None
    db: bool

    def any(self) -> bool:
        return self.dx is not None or self.dw is not None or self.db

    def without(self, other: "GradsNeeded") -> "GradsNeeded":
        """The gradients that are not in `other`."""
        return GradsNeeded(None if other.dx else self.dx, None if other.dw else self.dw, self.db and not other.db)


class Grads(NamedTuple):
    dx: Tensor | None = None  # (m, h)
    dw: Tensor | None = None  # (v, h)
    db: Tensor | None = None  # (v,) fp32

    def fill_missing(self, other: "Grads") -> "Grads":
        return Grads(*(theirs if ours is None else ours for ours, theirs in zip(self, other, strict=True)))


class ForwardResult(NamedTuple):
    """Results of forward besides the RowState. Backward needs all of them except the loss."""

    loss: Tensor | None  # (m,) fp32, already divided for `mean`: the reduced loss is their sum
    grads: Grads = Grads()
    live_x: Tensor | None = None  # (m, h), the live rows of x; `stored`
    exp_logits: Tensor | None = None  # (m, v) with padded row stride; `stored`
    dw: Tensor | None = None  # (v, h) with its first `dw_classes` rows computed; `recompute`
    dw_classes: int = 0
