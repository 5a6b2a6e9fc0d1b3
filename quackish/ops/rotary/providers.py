"""Providers of rotary: quackish, PyTorch with the formula of Transformers, and Liger.

A provider takes q (b, h, l, d), k (b, k, l, d), cos and sin (1, l, d) full tables, and returns q and k rotated by the
layout "halves", for autograd.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quackish import rotary
from quackish.bench.cells import OURS
from quackish.bench.measure import imported

Rotary = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def eager(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` of Llama in Transformers."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return (q * cos) + (_rotate_half(q) * sin), (k * cos) + (_rotate_half(k) * sin)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


class Liger:
    """Writes into q and k, and in backward into the gradients, so every call has other data."""

    in_place = True
    note = "in place; errors not measured"

    def __init__(self):
        from liger_kernel.ops.rope import LigerRopeFunction

        self.function = LigerRopeFunction

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.function.apply(q, k, cos, sin)


PROVIDERS: dict[str, Callable[[], Rotary]] = {
    OURS: lambda: rotary,
    "torch": lambda: eager,
    "torch-compile": lambda: torch.compile(eager),
    "liger": Liger,
}


def load(name: str) -> Rotary:
    """The provider `name`, or the user's "module:attribute"."""
    return imported(name) if ":" in name else PROVIDERS[name]()
