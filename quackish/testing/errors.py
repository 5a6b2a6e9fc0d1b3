"""How far a result is from the truth: norm-wise, and at its worst element."""

from typing import NamedTuple

import torch
from torch import Tensor


class Error(NamedTuple):
    """Both relative, so that multiples of a dtype's eps bound them."""

    norm: float  # |got - truth| / |truth|, over the whole tensor
    worst: float  # the largest |got - truth| / (|truth| + rms of truth's row) of an element

    def within(self, norm: float, worst: float) -> bool:
        return self.norm <= norm and self.worst <= worst  # False for NaN


def error(got: Tensor, truth: Tensor, noise: Tensor | float = 0.0) -> Error:
    """`truth` is fp64; a row is the last dimension. NaN or Inf where the truth has none is an infinite error.

    `noise` comes off each element's error first: what rounding may do where the truth is a difference of larger terms.
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
    """The tensor's bytes, to compare where NaN == NaN and 0.0 != -0.0."""
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))
