"""Self-tests of `doctor` and `doctor --check`: calls that launch every kernel, and how fast the large ones are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish import grouped_mlp, linear_cross_entropy, profile, rms_norm
from quackish.testing import inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tensors = dict[str, Tensor]  # arguments or results, by name


class Case(NamedTuple):
    """A call, forward and backward."""

    make: Callable[[torch.device], Tensors]
    call: Callable[[Tensors, str], Tensors]  # by a backend
    kernel: str  # where the table of kernels lacks it, the portable path runs


def _norm(m: int, n: int, dtype: torch.dtype = BF16, *also: str, heads: int = 1, **options: Any) -> Case:
    """`also`: residual, bias."""

    def make(device: torch.device) -> Tensors:
        how, shape = dict(dtype=dtype, device=device), (m // heads, heads, n)
        weight, bias = (inputs.weights(heads * n, seed=seed, **how).view(heads, n) for seed in (1, 4))
        given = {"residual": inputs.rows(shape, seed=3, **how), "bias": bias}
        x, dy = inputs.rows(shape, **how), inputs.rows(shape, seed=2, **how)
        return {"dy": dy, "x": x, "weight": weight} | {name: given[name] for name in also}

    def call(given: Tensors, backend: str) -> Tensors:
        leaves = {name: t.detach().requires_grad_() for name, t in given.items() if name != "dy"}
        out = rms_norm(**leaves, eps=1e-6, backend=backend, **options)
        y = out[0] if "residual" in leaves else out
        return {"y": y.detach()} | _grads(y, leaves, given["dy"])

    return Case(make, call, "rms_norm_fwd")


def _cross_entropy(m: int, h: int, v: int, dtype: torch.dtype = BF16, *also: str, **options: Any) -> Case:
    """`also`: linear_bias, weight, grad_weight_out. Every ninth row is ignored."""

    def make(device: torch.device) -> Tensors:
        how = dict(dtype=dtype, device=device)
        x, w = inputs.rows((m, h), **how), inputs.rows((v, h), seed=1, **how) / h**0.5
        target = torch.arange(m, device=device) * 7 % v
        target[::9] = -100
        bias, class_weight = inputs.rows((v,), seed=3, **how), inputs.weights(v, device=device)
        buffer = torch.zeros(v, h, device=device)
        given = {"linear_bias": bias, "weight": class_weight, "grad_weight_out": buffer}
        return {"input": x, "linear_weight": w, "target": target} | {name: given[name] for name in also}

    def call(given: Tensors, backend: str) -> Tensors:
        wanted = ("input", "linear_weight", "linear_bias")
        leaves = {name: given[name].detach().requires_grad_() for name in wanted if name in given}
        buffers = {name: given[name].clone() for name in ("grad_weight_out",) if name in given}
        out = linear_cross_entropy(**{**given, **leaves, **buffers}, backend=backend, **options)
        results = dict(zip(("loss", "lse"), out if isinstance(out, tuple) else (out,), strict=False))
        # another gradient for each row
        total = sum((t * torch.linspace(0.5, 1.5, t.numel(), device=t.device)).sum() for t in results.values())
        grads = _grads(total, leaves)
        return {name: t.detach() for name, t in (results | grads | buffers).items() if t is not None}

    return Case(make, call, "lce_rows")


def _grouped_mlp(
    rows: int, h: int, i: int, dtype: torch.dtype = BF16, *also: str, activation: str = "swiglu", **options: Any
) -> Case:
    """`also`: w3, b1, b2, scales, grad_w1_out, grad_w2_out. One of five experts is idle, as are some rows."""
    experts, width = 5, i if activation in ("silu", "relu2") else 2 * i
    shapes = dict(
        x=(rows, h), w1=(experts, i if "w3" in also else width, h), w3=(experts, i, h), w2=(experts, h, i),
        b1=(experts, width), b2=(experts, h), scales=(rows,),
    )  # fmt: skip
    names = [name for name in shapes if name in ("x", "w1", "w2", *also)]

    def make(device: torch.device) -> Tensors:
        how = dict(dtype=dtype, device=device)
        given = {name: inputs.rows(shapes[name], seed=seed, **how) for seed, name in enumerate(names)}
        for name in {"w1", "w2", "w3"} & given.keys():
            given[name] /= shapes[name][-1] ** 0.5
        ends = [rows // 2, rows // 2, rows * 3 // 4, rows * 7 // 8, rows * 15 // 16]
        outs = {f"grad_{name}_out": torch.zeros(shapes[name], device=device) for name in ("w1", "w2")}
        given |= {name: out for name, out in outs.items() if name in also}
        dy = inputs.rows((rows, h), seed=9, **how)
        return {"dy": dy, "offs": torch.tensor(ends, dtype=torch.int32, device=device), **given}

    def call(given: Tensors, backend: str) -> Tensors:
        leaves = {name: given[name].detach().requires_grad_() for name in names}
        buffers = {name: t.clone() for name, t in given.items() if name.startswith("grad_")}
        y = grouped_mlp(**leaves, **buffers, offs=given["offs"], activation=activation, backend=backend, **options)
        results = {"y": y.detach()} | _grads(y, leaves, given["dy"]) | buffers
        return {name: t for name, t in results.items() if t is not None}

    return Case(make, call, "grouped_gemm")


def _grads(y: Tensor, leaves: Tensors, dy: Tensor | None = None) -> Tensors:
    grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


SELF_TESTS: dict[str, Case] = {
    "rms_norm": _norm(257, 1024),
    "rms_norm, many rows": _norm(5000, 256),
    "rms_norm, odd": _norm(37, 257, FP32, "residual", "bias"),
    "rms_norm, residual and bias": _norm(300, 4096, BF16, "residual", "bias"),
    "rms_norm, fp16, wide": _norm(20, 16_384, FP16),
    "rms_norm, split over a cluster": _norm(5, 65_536),
    "rms_norm, a weight per head": _norm(3000, 128, BF16, "residual", heads=12, residual_dtype=FP32),
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
    "linear_cross_entropy, a buffer": _cross_entropy(300, 256, 1003, BF16, "grad_weight_out"),
    "linear_cross_entropy, smoothing": _cross_entropy(300, 256, 1003, BF16, "weight", label_smoothing=0.1),
    "linear_cross_entropy, fp16": _cross_entropy(300, 256, 1003, FP16, "linear_bias"),
    "linear_cross_entropy, many rows of few classes": _cross_entropy(20_000, 64, 100),
    "grouped_mlp": _grouped_mlp(700, 256, 128, BF16, "scales"),
    "grouped_mlp, two weights and biases": _grouped_mlp(
        700, 128, 200, BF16, "w3", "b1", "b2", "scales", activation="clamped_swiglu"
    ),
    "grouped_mlp, buffers and recompute": _grouped_mlp(
        700, 256, 128, FP16, "grad_w1_out", "grad_w2_out", activation="geglu", recompute=True
    ),
    "grouped_mlp, deep": _grouped_mlp(300, 512, 4096, BF16, "scales", activation="relu2"),
}
TIMED: dict[str, Case] = {
    "rms_norm 16384x4096": _norm(16_384, 4096),
    "linear_cross_entropy 4096x2048x32000": _cross_entropy(4096, 2048, 32_000),
}


def speeds(devices: list[torch.device]) -> dict[str, str]:
    """Each launch of the timed calls, the mean of ten, on these GPUs."""
    rows = {}
    for device in devices:
        for name, case in TIMED.items():
            given = case.make(device)
            for _ in range(3):
                case.call(given, "cute")
            with profile() as p:
                for _ in range(10):
                    case.call(given, "cute")
            rows |= {f"{name} on {device}, {row['kernel']} {row['problem']}": speed_of(row) for row in p.rows()}
    return rows


def speed_of(row: dict[str, Any]) -> str:
    """Of a row of a profile: its time, and what is known of its speed."""
    units = {"mean_us": "{:.1f} us", "gb_per_s": "{:.0f} GB/s", "tflop_per_s": "{:.1f} TFLOP/s"}
    return ", ".join(form.format(row[name]) for name, form in units.items() if row[name] is not None)
