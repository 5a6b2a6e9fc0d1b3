"""What `doctor --check` adds: every kernel of a GPU against the formulas in fp64, and how fast the large ones are."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quackish import linear_cross_entropy, profile, rms_norm
from quackish.testing import inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Case = tuple[Callable[[torch.device], tuple[Tensor, ...]], Callable[..., dict[str, Tensor]]]


def _norm(m: int, n: int, dtype: torch.dtype = BF16, *also: str) -> Case:
    """`also`: residual, bias."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        how = dict(dtype=dtype, device=device)
        x, weight, dy = inputs.rows((m, n), **how), inputs.weights(n, **how), inputs.rows((m, n), seed=2, **how)
        given = {"residual": inputs.rows((m, n), seed=3, **how), "bias": inputs.weights(n, seed=4, **how)}
        return dy, *(t.requires_grad_() for t in (x, weight, *(given[name] for name in also)))

    def call(dy: Tensor, x: Tensor, weight: Tensor, *more: Any) -> dict[str, Tensor]:
        *given, backend = more
        out = rms_norm(x, weight, eps=1e-6, backend=backend, **dict(zip(also, given, strict=True)))
        y = out[0] if "residual" in also else out
        grads = torch.autograd.grad(y, (x, weight, *given), dy)
        return {"y": y.detach()} | dict(zip(("dx", "dweight", *(f"d{name}" for name in also)), grads, strict=True))

    return make, call


def _cross_entropy(m: int, h: int, v: int, dtype: torch.dtype = BF16, *also: str, **options: Any) -> Case:
    """`also`: linear_bias, weight; buffer, for grad_weight_out. Every ninth row is ignored."""

    def make(device: torch.device) -> tuple[Tensor, ...]:
        how = dict(dtype=dtype, device=device)
        x, w = inputs.rows((m, h), **how), inputs.rows((v, h), seed=1, **how) / h**0.5
        target = torch.arange(m, device=device) * 7 % v
        target[::9] = -100
        bias = inputs.rows((v,), seed=3, **how).requires_grad_()
        given = {"linear_bias": bias, "weight": inputs.weights(v, device=device)}
        return target, x.requires_grad_(), w.requires_grad_(), *(given[name] for name in also if name in given)

    def call(target: Tensor, x: Tensor, w: Tensor, *more: Any) -> dict[str, Tensor]:
        *given, backend = more
        named = dict(zip((name for name in also if name != "buffer"), given, strict=True))
        dw = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, FP32)) if "buffer" in also else None
        out = linear_cross_entropy(x, w, target, grad_weight_out=dw, backend=backend, **named, **options)
        results = dict(zip(("loss", "lse"), out if isinstance(out, tuple) else (out,), strict=False))
        # another gradient for each row
        total = sum((t * torch.linspace(0.5, 1.5, t.numel(), device=t.device)).sum() for t in results.values())
        wanted = {"dx": x, "dweight": w}
        if "linear_bias" in named:
            wanted["dbias"] = named["linear_bias"]
        grads = dict(zip(wanted, torch.autograd.grad(total, list(wanted.values()), allow_unused=True), strict=True))
        if dw is not None:
            grads["dweight"] = dw
        return {name: t.detach() for name, t in (results | grads).items()}

    return make, call


SELF_TESTS: dict[str, Case] = {
    "rms_norm": _norm(257, 1024),
    "rms_norm, many rows": _norm(5000, 256),
    "rms_norm, odd": _norm(37, 257, FP32, "residual", "bias"),
    "rms_norm, residual and bias": _norm(300, 4096, BF16, "residual", "bias"),
    "rms_norm, fp16, wide": _norm(20, 16_384, FP16),
    "rms_norm, split over a cluster": _norm(5, 65_536),
    "linear_cross_entropy": _cross_entropy(200, 256, 1000),
    "linear_cross_entropy, chunks": _cross_entropy(
        300, 256, 1003, BF16, "linear_bias", schedule="chunked", chunk_size=128, softcap=30.0, z_loss=1e-3
    ),
    "linear_cross_entropy, class weights": _cross_entropy(300, 256, 1003, BF16, "weight", reduction="sum"),
    "linear_cross_entropy, stored": _cross_entropy(
        300, 256, 1003, BF16, "linear_bias", schedule="stored", reduction="none", return_lse=True
    ),
    "linear_cross_entropy, recompute": _cross_entropy(2000, 256, 9001, schedule="recompute"),
    "linear_cross_entropy, recompute in chunks": _cross_entropy(2000, 256, 9001, schedule="recompute", chunk_size=512),
    "linear_cross_entropy, a row each": _cross_entropy(2000, 256, 9001, schedule="recompute", reduction="none"),
    "linear_cross_entropy, a buffer": _cross_entropy(300, 256, 1003, BF16, "buffer"),
    "linear_cross_entropy, smoothing": _cross_entropy(300, 256, 1003, BF16, "weight", label_smoothing=0.1),
    "linear_cross_entropy, fp16": _cross_entropy(300, 256, 1003, FP16, "linear_bias"),
    "linear_cross_entropy, many rows of few classes": _cross_entropy(20_000, 64, 100),
}
TIMED: dict[str, Case] = {
    "rms_norm 16384x4096": _norm(16_384, 4096),
    "linear_cross_entropy 4096x2048x32000": _cross_entropy(4096, 2048, 32_000),
}


def speeds(devices: list[torch.device]) -> dict[str, str]:
    """Each launch of the timed calls, the mean of ten, on these GPUs."""
    rows = {}
    for device in devices:
        for name, (make, call) in TIMED.items():
            args = make(device)
            for _ in range(3):
                call(*args, "cute")
            with profile() as p:
                for _ in range(10):
                    call(*args, "cute")
            for row in p.rows():
                speed = f"{row['mean_us']:.1f} us, {row['gb_per_s']:.0f} GB/s, {row['tflop_per_s']:.1f} TFLOP/s"
                rows[f"{name} on {device}, {row['kernel']} {row['problem']}"] = speed
    return rows
