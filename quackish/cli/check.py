"""Self-tests of `doctor` and `doctor --check`: calls that launch every kernel, and timed calls."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish import grouped_mlp, linear_cross_entropy, moe_mlp, profile, rms_norm
from quackish.reference.grouped_mlp import GATED
from quackish.testing import inputs
from quackish.types import Activation, Backend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
Tensors = dict[str, Any]  # arguments or results, by name


class Case(NamedTuple):
    """A call, forward and backward."""

    make: Callable[[torch.device], Tensors]  # the arguments
    call: Callable[[Tensors, Backend], Tensors]  # (arguments, backend) -> results and gradients
    kernel: str  # a GPU without this kernel runs the portable path


def _rms_norm(m: int, n: int, dtype: torch.dtype = BF16, *extra: str, heads: int = 1, **options: Any) -> Case:
    """`extra`: residual, bias."""

    def make(device: torch.device) -> Tensors:
        shape, common = (m // heads, heads, n), dict[str, Any](dtype=dtype, device=device)
        weight, bias = (inputs.weights(heads * n, seed=seed, **common).view(heads, n) for seed in (1, 4))
        optional = {"residual": inputs.rows(shape, seed=3, **common), "bias": bias}
        x, dy = inputs.rows(shape, **common), inputs.rows(shape, seed=2, **common)
        return {"dy": dy, "x": x, "weight": weight} | {name: optional[name] for name in extra}

    def call(args: Tensors, backend: Backend) -> Tensors:
        leaves = {name: t.detach().requires_grad_() for name, t in args.items() if name != "dy"}
        out = rms_norm(**leaves, eps=1e-6, backend=backend, **options)
        y = out[0] if "residual" in leaves else out
        return {"y": y.detach()} | _grads(y, leaves, args["dy"])

    return Case(make, call, "rms_norm_fwd")


def _lce(m: int, h: int, v: int, dtype: torch.dtype = BF16, *extra: str, **options: Any) -> Case:
    """`extra`: linear_bias, weight, grad_weight_out. Every ninth row is ignored."""

    def make(device: torch.device) -> Tensors:
        common = dict[str, Any](dtype=dtype, device=device)
        x, w = inputs.rows((m, h), **common), inputs.rows((v, h), seed=1, **common) / h**0.5
        target = torch.arange(m, device=device) * 7 % v
        target[::9] = -100
        bias, class_weight = inputs.rows((v,), seed=3, **common), inputs.weights(v, device=device)
        buffer = torch.zeros(v, h, device=device)
        optional = {"linear_bias": bias, "weight": class_weight, "grad_weight_out": buffer}
        return {"input": x, "linear_weight": w, "target": target} | {name: optional[name] for name in extra}

    def call(args: Tensors, backend: Backend) -> Tensors:
        leaf_names = ("input", "linear_weight", "linear_bias")
        leaves = {name: args[name].detach().requires_grad_() for name in leaf_names if name in args}
        buffers = {name: args[name].clone() for name in ("grad_weight_out",) if name in args}
        out = linear_cross_entropy(**{**args, **leaves, **buffers}, backend=backend, **options)
        results = dict(zip(("loss", "lse"), out if isinstance(out, tuple) else (out,), strict=False))
        # each row has a different gradient
        total = sum((t * torch.linspace(0.5, 1.5, t.numel(), device=t.device)).sum() for t in results.values())
        grads = _grads(total, leaves)
        return {name: t.detach() for name, t in (results | grads | buffers).items() if t is not None}

    return Case(make, call, "lce_rows")


def _grouped_mlp(
    rows: int, h: int, i: int, dtype: torch.dtype = BF16, *extra: str, activation: Activation = "swiglu", **options: Any
) -> Case:
    """`extra`: w3, b1, b2, scales, grad_w1_out, grad_w2_out. One of five groups is empty; the last rows are in none."""
    experts, width = 5, 2 * i if activation in GATED else i
    shapes = dict(
        x=(rows, h), w1=(experts, i if "w3" in extra else width, h), w3=(experts, i, h), w2=(experts, h, i),
        b1=(experts, width), b2=(experts, h), scales=(rows,),
    )  # fmt: skip
    names = [name for name in shapes if name in ("x", "w1", "w2", *extra)]

    def make(device: torch.device) -> Tensors:
        common = dict[str, Any](dtype=dtype, device=device)
        args = {name: inputs.rows(shapes[name], seed=seed, **common) for seed, name in enumerate(names)}
        for name in {"w1", "w2", "w3"} & args.keys():
            args[name] /= shapes[name][-1] ** 0.5
        ends = [rows // 2, rows // 2, rows * 3 // 4, rows * 7 // 8, rows * 15 // 16]
        outs = {f"grad_{name}_out": torch.zeros(shapes[name], device=device) for name in ("w1", "w2")}
        args |= {name: out for name, out in outs.items() if name in extra}
        dy = inputs.rows((rows, h), seed=9, **common)
        return {"dy": dy, "offs": torch.tensor(ends, dtype=torch.int32, device=device), **args}

    def call(args: Tensors, backend: Backend) -> Tensors:
        leaves = {name: args[name].detach().requires_grad_() for name in names}
        buffers = {name: t.clone() for name, t in args.items() if name.startswith("grad_")}
        y = grouped_mlp(**leaves, **buffers, offs=args["offs"], activation=activation, backend=backend, **options)
        results = {"y": y.detach()} | _grads(y, leaves, args["dy"]) | buffers
        return {name: t for name, t in results.items() if t is not None}

    return Case(make, call, "grouped_gemm")


def _moe_mlp(tokens: int, h: int, i: int, k: int) -> Case:
    """Eight experts; every ninth choice is dropped."""

    def make(device: torch.device) -> Tensors:
        common = dict[str, Any](dtype=BF16, device=device)
        args = {"dy": inputs.rows((tokens, h), seed=9, **common), "x": inputs.rows((tokens, h), **common)}
        args["top_k_index"] = (torch.arange(tokens * k, device=device) * 7 % 9).view(tokens, k)
        args["top_k_weights"] = inputs.rows((tokens, k), seed=1, **common).abs()
        args["w1"] = inputs.rows((8, 2 * i, h), seed=2, **common) / h**0.5
        args["w2"] = inputs.rows((8, h, i), seed=3, **common) / i**0.5
        return args

    def call(args: Tensors, backend: Backend) -> Tensors:
        leaves = {name: args[name].detach().requires_grad_() for name in ("x", "top_k_weights", "w1", "w2")}
        out = moe_mlp(**leaves, top_k_index=args["top_k_index"], backend=backend)
        return {"out": out.detach()} | _grads(out, leaves, args["dy"])

    return Case(make, call, "grouped_gemm")


def _grads(y: Tensor, leaves: Tensors, dy: Tensor | None = None) -> Tensors:
    grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
    return {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}


SELF_TESTS: dict[str, Case] = {
    "rms_norm": _rms_norm(257, 1024),
    "rms_norm, many rows": _rms_norm(5000, 256),
    "rms_norm, odd": _rms_norm(37, 257, FP32, "residual", "bias"),
    "rms_norm, residual and bias": _rms_norm(300, 4096, BF16, "residual", "bias"),
    "rms_norm, fp16, wide": _rms_norm(20, 16_384, FP16),
    "rms_norm, split over a cluster": _rms_norm(5, 65_536),
    "rms_norm, a weight per head": _rms_norm(3000, 128, BF16, "residual", heads=12, residual_dtype=FP32),
    "linear_cross_entropy": _lce(200, 256, 1000),
    "linear_cross_entropy, chunks": _lce(
        300, 256, 1003, BF16, "linear_bias", schedule="chunked", chunk_size=128, softcap=30.0, z_loss=1e-3
    ),
    "linear_cross_entropy, class weights": _lce(300, 256, 1003, BF16, "weight", reduction="sum"),
    "linear_cross_entropy, stored": _lce(
        300, 256, 1003, BF16, "linear_bias", schedule="stored", reduction="none", return_lse=True
    ),
    "linear_cross_entropy, recompute": _lce(2000, 256, 9001, schedule="recompute"),
    "linear_cross_entropy, recompute in chunks": _lce(2000, 256, 9001, schedule="recompute", chunk_size=512),
    "linear_cross_entropy, loss per row": _lce(2000, 256, 9001, schedule="recompute", reduction="none"),
    "linear_cross_entropy, a buffer": _lce(300, 256, 1003, BF16, "grad_weight_out"),
    "linear_cross_entropy, smoothing": _lce(300, 256, 1003, BF16, "weight", label_smoothing=0.1),
    "linear_cross_entropy, fp16": _lce(300, 256, 1003, FP16, "linear_bias"),
    "linear_cross_entropy, many rows of few classes": _lce(20_000, 64, 100),
    "grouped_mlp": _grouped_mlp(700, 256, 192, BF16, "scales"),
    "grouped_mlp, two weights and biases": _grouped_mlp(
        700, 128, 200, BF16, "w3", "b1", "b2", "scales", activation="clamped_swiglu"
    ),
    "grouped_mlp, buffers and recompute": _grouped_mlp(
        700, 256, 128, FP16, "grad_w1_out", "grad_w2_out", activation="geglu", recompute=True
    ),
    "grouped_mlp, deep": _grouped_mlp(300, 512, 4096, BF16, "scales", activation="relu2"),
    "moe_mlp": _moe_mlp(300, 256, 192, 2),
}
TIMED: dict[str, Case] = {
    "rms_norm 16384x4096": _rms_norm(16_384, 4096),
    "linear_cross_entropy 4096x2048x32000": _lce(4096, 2048, 32_000),
}


def speeds(devices: list[torch.device]) -> dict[str, str]:
    """Mean time and speed of each launch of the timed calls, on these GPUs."""
    rows: dict[str, str] = {}
    for device in devices:
        for name, case in TIMED.items():
            args = case.make(device)
            for _ in range(3):
                case.call(args, "cute")
            with profile() as p:
                for _ in range(10):
                    case.call(args, "cute")
            rows |= {f"{name} on {device}, {row['kernel']} {row['problem']}": speed_of(row) for row in p.rows()}
    return rows


def speed_of(row: dict[str, Any]) -> str:
    """Time and known speeds of one row of a profile."""
    units = {"mean_us": "{:.1f} us", "gb_per_s": "{:.0f} GB/s", "tflop_per_s": "{:.1f} TFLOP/s"}
    return ", ".join(form.format(row[name]) for name, form in units.items() if row[name] is not None)
