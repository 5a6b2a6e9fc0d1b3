"""Errors of results, norm-wise and at the worst element, and bitwise comparison."""

from typing import NamedTuple

import torch
from torch import Tensor


class Error(NamedTuple):
    """Relative errors, to be bounded by multiples of a dtype's eps."""

    norm: float  # |got - truth| / |truth|, over the whole tensor
    worst: float  # the largest |got - truth| / (|truth| + rms of truth's row) of an element

    def within(self, norm: float, worst: float) -> bool:
        return self.norm <= norm and self.worst <= worst  # False for NaN


def error(got: Tensor, truth: Tensor, noise: Tensor | float = 0.0) -> Error:
    """Compares `got` with `truth`, which is fp64. NaN and Inf in `got` count as infinite errors.

    Rows are along the last dimension. `noise` is subtracted from each element's error: the rounding error where truth
    is a difference of larger terms.
    """
    if got.shape != truth.shape:
        raise ValueError(f"error: got is {tuple(got.shape)} but truth is {tuple(truth.shape)}; expected equal shapes")
    if truth.numel() == 0:
        return Error(0.0, 0.0)
    got, truth = got.detach(), truth.detach()
    difference = (got.double() - truth).abs()
    if not difference.isfinite().all():
        return Error(float("inf"), float("inf"))
    difference = (difference - noise).clamp(min=0)
    scale = truth.abs() + truth.square().mean(-1, keepdim=True).sqrt()
    worst = torch.where(difference == 0, 0.0, difference / scale).max()
    size = truth.norm()
    norm = difference.norm() / size if size > 0 else difference.norm()
    return Error(float(norm), float(worst))


def bits(t: Tensor) -> Tensor:
    """The tensor's bytes, for comparisons with NaN == NaN and 0.0 != -0.0."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """True if dtypes, shapes and bytes are equal, or both are None."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
