"""Seeded inputs for tests and benchmarks, including numerically difficult ones."""

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
    """A random tensor, rounded to `dtype`: the same in every run on one device type. "meta" has no values.

    "normal": mean 0 and standard deviation 1; "large_mean": mean 16; "outlier_channel": every 97th column is 100 times
    larger; "tiny": squares near eps.
    """
    x = _normal(shape, seed, device)
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
    """Random weights (n,) around 1, like those of a trained norm."""
    return (1 + 0.1 * _normal((n,), seed, device)).to(dtype)


def _normal(shape: tuple[int, ...], seed: int, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "meta":  # has no generator
        return torch.empty(shape, device=device)
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)
