"""The calls of `doctor` and `doctor --check`: small ones that launch every kernel, and large ones to time."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.operations import ATTENTION, GROUPED_MLP, LINEAR_CROSS_ENTROPY, MOE_MLP, OPERATIONS, RMS_NORM
from quackish.operations.table import Args, Operation
from quackish.types import Backend

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# Bounds on norm-wise errors: 1 to 4 times bf16's unit roundoff for bf16 results. The loss is fp32.
_BOUNDS = {"y": 0.004, "o": 0.004, "loss": 1e-4, "lse": 1e-4}
_GRAD_BOUND = 0.008


def bound_of(result: str) -> float:
    """The norm-wise error that a result or gradient may have."""
    return _BOUNDS.get(result, _GRAD_BOUND)


class Case(NamedTuple):
    """A call, forward and backward."""

    make: Callable[[torch.device], Args]  # the arguments
    call: Callable[[Args, Backend], dict[str, Tensor]]  # (arguments, backend) -> results and gradients
    kernel: str  # a GPU without this kernel runs the portable path
    timed: bool = False  # large: its GEMMs are timed beside cuBLAS's, and truth is computed on the GPU
    only_timed: bool = False  # too large for truth


def _case(op: Operation, *shape: int, dtype: torch.dtype = BF16, **options: Any) -> Case:
    return Case(lambda device: op.arguments(shape, dtype, device, options), op.call, op.kernel)


_rms_norm, _lce, _grouped_mlp, _moe_mlp, _attention = (
    functools.partial(_case, op) for op in (RMS_NORM, LINEAR_CROSS_ENTROPY, GROUPED_MLP, MOE_MLP, ATTENTION)
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
    "scaled_dot_product_attention, shared bias and mask": _attention(
        2, 3, 300, 128, attn_bias="1,H", attn_mask="half", return_lse=True
    ),
    "scaled_dot_product_attention, causal": _attention(2, 2, 257, 40, dtype=FP16, causal=True, softcap=30.0),
    "scaled_dot_product_attention, fp32 bias of a batch entry": _attention(
        3, 2, 200, 96, attn_bias="B,1", bias_dtype="float32", attn_mask="blocks"
    ),
    "scaled_dot_product_attention, mask alone": _attention(2, 2, 520, 128, attn_bias="none", attn_mask="top"),
}
# They need 40 GB of memory. The losses have the GEMMs of "chunked", and with "recompute" all epilogues.
_LARGE = {
    "rms_norm 16384x4096": _rms_norm(16_384, 4096),
    "linear_cross_entropy 4096x2048x32000": _lce(4096, 2048, 32_000),
    "linear_cross_entropy 4096x2048x32000, recompute": _lce(4096, 2048, 32_000, schedule="recompute"),
    "linear_cross_entropy 8192x4096x128256": _lce(8192, 4096, 128_256)._replace(only_timed=True),
    "grouped_mlp 32768x2048x768x32": _grouped_mlp(32_768, 2048, 768, 32, scales=True),
    "scaled_dot_product_attention 4x16x2048x64": _attention(4, 16, 2048, 64),
}
TIMED: dict[str, Case] = {name: case._replace(timed=True) for name, case in _LARGE.items()}


def load(name: str) -> Case:
    return (SELF_TESTS | TIMED)[name]
