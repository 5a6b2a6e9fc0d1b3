"""Arguments and results of the schedules of linear cross entropy."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.kernel_device import KernelDevice
from quackish.ops.linear_cross_entropy.buffers import ExpLogits, RowState


class Plan(NamedTuple):
    """Options of a call that are not tensors. The fields from `schedule` on are the LinearCrossEntropyConfig."""

    ignore_index: int
    label_smoothing: float
    softcap: float | None
    z_loss: float
    reduction: str
    return_stats: bool
    compute_dtype: torch.dtype
    why_portable: str | None  # None: kernels run. Else the reason to warn of once; "": no warning
    schedule: str = ""
    chunk_rows: int = 0
    dx_in_forward: bool = False
    dw_in_chunks: bool = False
    keeps_first: bool = False

    @property
    def options(self) -> tuple:
        """The fields before the config."""
        return self[:_NUM_OPTIONS]

    @property
    def config(self) -> tuple:
        return self[_NUM_OPTIONS:]

    def with_config(self, config: tuple) -> "Plan":
        fields: Any = *self[:_NUM_OPTIONS], *config
        return Plan(*fields)


_NUM_OPTIONS = Plan._fields.index("schedule")  # torch.compile of PyTorch 2.9 cannot trace this


class GradOutputs(NamedTuple):
    """The gradients of the outputs, fp32."""

    loss: Tensor | None = None  # 0-dim, or (m,) contiguous; None: 1
    lse: Tensor | None = None  # (m,) contiguous; None: 0, as for the next two
    log_prob: Tensor | None = None
    entropy: Tensor | None = None

    def has_row_grads(self) -> bool:
        """Whether lse, log_prob or entropy has a gradient."""
        return self.lse is not None or self.log_prob is not None or self.entropy is not None


class ProblemFields(NamedTuple):
    """Fields that problems of several kernels have, with the same value in all launches of a call."""

    h: int
    dtype: torch.dtype
    target_dtype: torch.dtype
    bias_dtype: torch.dtype | None
    class_weight_dtype: torch.dtype | None
    softcap: bool
    smoothing: bool
    weighted: bool
    logit_scale: bool
    return_stats: bool
    x_aligned: bool


class Call(NamedTuple):
    """Arguments shared by all launches of a forward or a backward pass."""

    kernels: Any  # LceKernels, whose module imports this one
    device: KernelDevice  # of the kernels
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
    fields: ProblemFields
    grad_outputs: GradOutputs  # none in forward, which computes gradients for a loss's gradient of 1


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
    live_x: Tensor | None = None  # (layout.kept, h), the live rows of x
    exp_logits: Tensor | None = None  # (layout.kept, v) with padded row stride
    dw: Tensor | None = None  # (v, h) with its first `dw_classes` rows computed; `recompute`
    dw_classes: int = 0


def unpack(values: tuple, *types: Any) -> list:
    """The values as one NamedTuple of each type, and the remaining values."""
    parts, first = [], 0
    for kind in types:
        last = first + len(kind._fields)
        parts.append(kind(*values[first:last]))
        first = last
    return [*parts, values[first:]]
