"""Types of the public functions' options: for annotations in programs, for type checkers, and for argument checks."""

from typing import TypedDict

import torch
from torch import Tensor

from quackish.literals import Activation, Backend, Reduction, RotaryLayout, Schedule  # noqa: F401 (public here too)

Device = torch.device | str | int | None

# Options that do not change the type of the result. Overloads name the others.


class RmsNormOptions(TypedDict, total=False):
    """The options of `rms_norm`, except residual."""

    eps: float | None
    weight_offset: float
    residual_dtype: torch.dtype | None
    out_dtype: torch.dtype | None
    dweight_out: Tensor | None
    backend: Backend


class LossOptions(TypedDict, total=False):
    """The options that `linear_cross_entropy` and `LinearCrossEntropyLoss` share."""

    weight: Tensor | None
    reduction: Reduction
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    logit_scale: float | Tensor | None
    z_loss: float
    schedule: Schedule
    chunk_size: int | None
    memory_limit: int | None
    backend: Backend


class LossCallOptions(TypedDict, total=False):
    """The options of `LinearCrossEntropyLoss.forward`, except return_lse and return_stats."""

    num_items: int | Tensor | None
    grad_weight_out: Tensor | None


class LinearCrossEntropyOptions(LossOptions, LossCallOptions, total=False):
    """The options of `linear_cross_entropy`, except return_lse and return_stats."""

    linear_bias: Tensor | None


class DivergenceOptions(TypedDict, total=False):
    """The options of `linear_divergence`, except return_entropy."""

    mask: Tensor | None
    beta: float
    temperature: float
    reduction: Reduction
    linear_bias: Tensor | None
    teacher_bias: Tensor | None
    softcap: float | None
    teacher_softcap: float | None
    logit_scale: float | None
    teacher_logit_scale: float | None
    num_items: int | Tensor | None
    grad_weight_out: Tensor | None
    memory_limit: int | None
    backend: Backend


class LossModuleOptions(LossOptions, total=False):
    """The options of `LinearCrossEntropyLoss`."""

    out_features: tuple[int, ...]
    bias: bool
    device: Device
    dtype: torch.dtype | None
    options: None
