"""Data that tests and benchmarks share: seeded, and unkind where numerics are."""

import torch
from torch import Tensor

KINDS = ("normal", "large_mean", "outlier_channel", "tiny")


def rows(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    *,
    kind: str = "normal",
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """A tensor of `shape`, rounded to `dtype`; the same values on every run for one device type.

    "large_mean" has mean 16 and deviation 1, "outlier_channel" has every 97th column 100 times as large as the others,
    "tiny" has squares near eps.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, device=device)
    if kind == "large_mean":
        x += 16
    elif kind == "outlier_channel":
        x[..., ::97] *= 100
    elif kind == "tiny":
        x *= 1e-3
    elif kind != "normal":
        raise ValueError(f"rows: kind is {kind!r}; expected one of {', '.join(KINDS)}")
    return x.to(dtype)


def weights(n: int, dtype: torch.dtype = torch.float32, *, seed: int = 1, device: torch.device | str = "cpu") -> Tensor:
    """(n,) around 1, as a trained norm's weight."""
    generator = torch.Generator(device).manual_seed(seed)
    return (1 + 0.1 * torch.randn(n, generator=generator, device=device)).to(dtype)
