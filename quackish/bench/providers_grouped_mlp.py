"""Providers of grouped_mlp: quackish, and torch's grouped GEMMs around an activation.

Every provider takes x (r, h), w1 (e, 2i, h) as [gate; up], w2 (e, h, i), scales (r,) and offs (e,), and returns y of
SwiGLU MLPs, for autograd.
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish import grouped_mlp
from quackish.bench.cells import OURS
from quackish.bench.measure import imported

Mlp = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def ours(**options) -> Mlp:
    return lambda x, w1, w2, scales, offs: grouped_mlp(x, w1, w2, offs, scales=scales, **options)


def torch_mlp(activation: Callable[[Tensor, Tensor], Tensor]) -> Mlp:
    product = getattr(F, "grouped_mm", torch._grouped_mm)

    def mlp(x, w1, w2, scales, offs):
        return product(activation(product(x, w1.mT, offs=offs), scales), w2.mT, offs=offs)

    return mlp


def _torch_compile() -> Mlp:
    """torch_mlp with a compiled activation."""
    torch._dynamo.config.recompile_limit = 64
    return torch_mlp(torch.compile(swiglu, dynamic=False))


def swiglu(z: Tensor, scales: Tensor) -> Tensor:
    gate, up = z.chunk(2, 1)
    return (F.silu(gate) * up * scales[:, None]).to(z.dtype)


PROVIDERS: dict[str, Callable[[], Mlp]] = {
    OURS: ours,
    f"{OURS}-recompute": functools.partial(ours, recompute=True),
    "torch": lambda: torch_mlp(swiglu),
    "torch-compile": _torch_compile,
}


def load(name: str) -> Mlp:
    """The provider `name`, or the user's "module:attribute"."""
    return imported(name) if ":" in name else PROVIDERS[name]()
