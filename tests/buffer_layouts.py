"""Gradient buffers of every layout, as views of larger memory."""

import math

import torch
from torch import Tensor

NAMES = ("transposed", "padded", "every other", "half", "unaligned")


def ones_in(
    layout: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """(a view of `shape`, the memory around it), all ones."""

    def ones(*sizes):
        return torch.ones(sizes, dtype=dtype, device=device)

    first, *rest = shape
    *outer, n = shape
    if layout == "transposed":
        whole = ones(*reversed(shape))
        return whole.permute(*reversed(range(len(shape)))), whole
    if layout == "padded":
        whole = ones(*outer, n + 8)
        return whole[..., :n], whole
    if layout == "every other":
        whole = ones(2 * first, *rest)
        return whole[::2], whole
    if layout == "half":  # as gate and up of one buffer
        dim = max(len(shape) - 2, 0)
        whole = ones(*shape[:dim], 2 * shape[dim], *shape[dim + 1 :])
        return whole.chunk(2, dim)[1], whole
    assert layout == "unaligned"
    whole = ones(1 + math.prod(shape))
    return whole[1:].view(shape), whole


def overlapping(shape: tuple[int, ...]) -> list[Tensor]:
    """fp32 tensors whose elements share memory: expanded ones, and sliding windows."""
    expanded = torch.zeros([1] * len(shape)).expand(shape)
    windows = torch.zeros(sum(shape)).as_strided(shape, [1] * len(shape))
    return [expanded, windows] if len(shape) > 1 else [expanded]


def are_neighbours_unchanged(view: Tensor, whole: Tensor) -> bool:
    """True if the memory around the view is still 1. Overwrites the view."""
    view.fill_(1.0)
    return bool((whole == 1).all())
