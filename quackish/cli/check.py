"""Self-tests of `doctor` and `doctor --check`: calls that launch every kernel, and timed calls."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish import profile
from quackish.operations import GROUPED_MLP, LINEAR_CROSS_ENTROPY, MOE_MLP, OPERATIONS, RMS_NORM
from quackish.operations.table import Args, Operation
from quackish.types import Backend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Bounds on norm-wise errors: 1 to 4 times bf16's unit roundoff for bf16 results. The loss is fp32.
_BOUNDS = {"y": 0.004, "loss": 1e-4, "lse": 1e-4}
_GRAD_BOUND = 0.008


def bound_of(result: str) -> float:
    """The norm-wise error that a result or gradient may have."""
    return _BOUNDS.get(result, _GRAD_BOUND)


class Case(NamedTuple):
    """A call, forward and backward."""

    make: Callable[[torch.device], Args]  # the arguments
    call: Callable[[Args, Backend], dict[str, Tensor]]  # (arguments, backend) -> results and gradients
    kernel: str  # a GPU without this kernel runs the portable path


def _case(op: Operation, *shape: int, dtype: torch.dtype = BF16, **options: Any) -> Case:
    return Case(lambda device: op.arguments(shape, dtype, device, options), op.call, op.kernel)


_rms_norm, _lce, _grouped_mlp, _moe_mlp = (
    functools.partial(_case, op) for op in (RMS_NORM, LINEAR_CROSS_ENTROPY, GROUPED_MLP, MOE_MLP)
)
SELF_TESTS: dict[str, Case] = {op.name: _case(op, *op.small) for op in OPERATIONS.values()} | {
    "rms_norm": _rms_norm(257, 1024),
    "rms_norm, many rows": _rms_norm(5000, 256),
    "rms_norm, odd": _rms_norm(37, 257, dtype=FP32, residual="same", bias=True),
    "rms_norm, residual and bias": _rms_norm(300, 4096, residual="same", bias=True),
    "rms_norm, fp16, wide": _rms_norm(20, 16_384, dtype=FP16),
    "rms_norm, split over a cluster": _rms_norm(5, 65_536),
    "rms_norm, a weight per head": _rms_norm(3000, 128, heads=12, residual="same", residual_dtype="float32"),
    "linear_cross_entropy": _lce(200, 256, 1000),
    "linear_cross_entropy, chunks": _lce(
        300, 256, 1003, bias=True, schedule="chunked", chunk_size=128, softcap=30.0, z_loss=1e-3
    ),
    "linear_cross_entropy, class weights": _lce(300, 256, 1003, class_weight=True, reduction="sum"),
    "linear_cross_entropy, stored": _lce(
        300, 256, 1003, bias=True, schedule="stored", reduction="none", return_lse=True
    ),
    "linear_cross_entropy, recompute": _lce(2000, 256, 9001, schedule="recompute"),
    "linear_cross_entropy, recompute in chunks": _lce(2000, 256, 9001, schedule="recompute", chunk_size=512),
    "linear_cross_entropy, loss per row": _lce(2000, 256, 9001, schedule="recompute", reduction="none"),
    "linear_cross_entropy, a buffer": _lce(300, 256, 1003, grad_weight_out=True),
    "linear_cross_entropy, smoothing": _lce(300, 256, 1003, class_weight=True, label_smoothing=0.1),
    "linear_cross_entropy, fp16": _lce(300, 256, 1003, dtype=FP16, bias=True),
    "linear_cross_entropy, many rows of few classes": _lce(20_000, 64, 100),
    "grouped_mlp": _grouped_mlp(700, 256, 192, 5, scales=True),
    "grouped_mlp, two weights and biases": _grouped_mlp(
        700, 128, 200, 5, w3=True, bias=True, scales=True, activation="clamped_swiglu"
    ),
    "grouped_mlp, buffers and recompute": _grouped_mlp(
        700, 256, 128, 5, dtype=FP16, grad_weight_out=True, activation="geglu", recompute=True
    ),
    "grouped_mlp, deep": _grouped_mlp(300, 512, 4096, 5, scales=True, activation="relu2"),
    "moe_mlp": _moe_mlp(300, 256, 192, 8, 2),
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
