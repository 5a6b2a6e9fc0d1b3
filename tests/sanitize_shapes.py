"""Small shapes, forward and backward, for scripts/sanitize.sh (compute-sanitizer).

    python -m tests.sanitize_shapes [part of a shape's name]

They are `small` of every operation of the tools, and those below. Inputs are made on the CPU, so that few kernels
besides quackish's run. Other tests check the results.
"""

import sys

import pytest
import torch

from quackish import grouped_mlp, rms_norm
from quackish.device.kernel_device import device_of
from quackish.ops.linear_cross_entropy import launches
from quackish.ops.linear_cross_entropy import layout as configs
from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from quackish.ops.mlp import kernel_steps
from quackish.ops.mlp.reference import GATED
from quackish.ops.shared.for_tools import Operation, operations
from quackish.testing.inputs import rows, weights
from tests.attention.cases import LARGE, case, large_case, step
from tests.linear_cross_entropy.cases import make, run
from tests.rotary.cases import KERNELS as ROTARY
from tests.rotary.cases import case as rotary_case
from tests.rotary.cases import step as rotary_step

GPU = "cuda"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# name: m, n, dtypes of x, weight, bias and residual[, heads]
RMS_NORM = {
    "one element": (1, 1, FP32, FP32, None, None),
    "odd": (5, 3, BF16, BF16, FP32, None),
    "ragged": (37, 257, BF16, FP32, None, FP32),
    "several rows per CTA": (300, 256, BF16, BF16, None, None),
    "ragged vectors": (70, 1000, FP16, FP16, FP16, FP16),
    "plain": (64, 1024, BF16, BF16, None, None),
    "fp32": (33, 1024, FP32, FP32, FP32, FP32),
    "more rows than CTAs": (1500, 512, BF16, FP32, None, None),
    "wide": (20, 4096, BF16, BF16, BF16, FP32),
    "odd and wide": (9, 4097, BF16, BF16, None, None),
    "widest in one launch": (6, 16384, BF16, BF16, None, None),
    "split over a cluster": (3, 65536, BF16, FP32, FP32, None),
    "no weight": (40, 768, BF16, None, None, BF16),
    "a weight per head": (3000, 128, BF16, FP32, BF16, BF16, 12),
}

# name: m, h, v, dtype, schedule and chunk_size, options. Every fifth row is ignored, and one row has such large logits
# that its tile is recomputed. `alone`: do not return the lse.
LINEAR_CROSS_ENTROPY = {
    "lce one row, two classes": (1, 8, 2, BF16, dict(schedule="chunked"), {}),
    "lce one chunk": (300, 64, 700, BF16, dict(schedule="chunked"), {}),
    "lce exp_logits in dW's storage": (130, 256, 1500, BF16, dict(schedule="chunked"), {}),
    "lce chunks": (300, 64, 1003, BF16, dict(schedule="chunked", chunk_size=128), dict(bias=True, reduction="sum")),
    "lce chunks with options": (
        260, 72, 515, BF16, dict(schedule="chunked", chunk_size=128),
        dict(bias=True, class_weight=True, softcap=30.0, z_loss=0.01),
    ),
    "lce stored": (300, 64, 700, BF16, dict(schedule="stored"), dict(reduction="none", bias=True, softcap=30.0)),
    "lce stored and lse": (129, 136, 257, BF16, dict(schedule="stored"), dict(reduction="none", lse=True)),
    "lce recompute": (300, 64, 700, BF16, dict(schedule="recompute"), dict(bias=True, reduction="none")),
    "lce recompute in blocks": (3000, 64, 9001, BF16, dict(schedule="recompute", chunk_size=1024), {}),
    "lce recompute with a chunk size": (
        300, 256, 4004, BF16, dict(schedule="recompute", chunk_size=128), dict(bias=True, alone=True),
    ),
    "lce classes with many rows": (300, 520, 20, BF16, dict(schedule="chunked"), {}),
    "lce rows that PyTorch sorts": (300, 520, 20, BF16, dict(schedule="chunked"), {}),
    "lce recompute, dW in forward": (260, 256, 1101, BF16, dict(schedule="recompute"), dict(alone=True, narrow=True)),
    "lce several tiles per cluster": (300, 264, 25_000, BF16, dict(schedule="chunked"), {}),
    "lce smoothing": (140, 64, 1000, BF16, dict(schedule="auto"), dict(label_smoothing=0.1, class_weight=True)),
    "lce smoothing with options": (
        260, 72, 515, BF16, dict(schedule="auto", chunk_size=128),
        dict(bias=True, class_weight=True, label_smoothing=0.1, softcap=30.0, z_loss=0.01, lse=True),
    ),
    "lce fp16": (200, 64, 700, FP16, dict(schedule="auto"), dict(bias=True)),
    "lce every row ignored": (140, 64, 700, BF16, dict(schedule="chunked", chunk_size=128), dict(live=False)),
    "lce grad_weight_out": (140, 64, 700, BF16, dict(schedule="stored"), dict(buffer=True)),
}  # fmt: skip

# name: rows of each group, rows past the last group, H, I, dtype, options
GROUPED_MLP = {
    "grouped one row": ((1,), 0, 8, 8, BF16, {}),
    "grouped empty groups": ((0, 63, 0, 65, 130, 0), 9, 72, 88, BF16, {}),
    "grouped several tiles per cluster": ([17 * g % 301 for g in range(40)], 5, 520, 136, BF16, {}),
    "grouped deep": ((130, 70), 0, 512, 2056, FP16, {}),
    "grouped odd tiles": ((130, 0, 70), 9, 200, 136, BF16, {}),
    "grouped square tiles": ((130, 0, 70), 9, 64, 256, BF16, {}),
    "grouped options": ((100, 0, 40), 3, 64, 72, BF16, dict(activation="clamped_swiglu", biases=True, split=True)),
    "grouped without a gate": ((100, 0, 40), 3, 64, 72, FP16, dict(activation="relu2", biases=True)),
    "grouped illegal offsets": ((100, -50, 40), 60, 64, 72, BF16, {}),
}
TOKEN_ROWS = {
    "token rows": (37, 264, 3),
    "token rows, two CTAs per token": (5, 2880, 4),
}  # tokens, columns, rows of each

# name: the arguments of tests.attention.cases.case
ATTENTION = {
    "attention bias": dict(batch=2, num_q=129, bias=(2, 2, 129, 129)),
    "attention broadcast bias and mask": dict(
        batch=2, num_q=200, num_k=264, bias=(1, 2, 200, 264), mask=(2, 1, 200, 264)
    ),
    "attention fp32 bias": dict(num_q=63, num_k=65, d=128, bias=(1, 1, 63, 65), bias_dtype=FP32),
    "attention unaligned": dict(heads=4, kv_heads=2, num_q=65, num_k=127, d=40, dtype=FP16, bias=(1, 4, 65, 127)),
    "attention window and softcap": dict(num_q=300, bias=(1, 2, 300, 300), window=(70, 20), softcap=2.0),
    "attention mask of keys": dict(num_q=70, num_k=300, mask=(1, 1, 1, 300)),
    "attention clusters": dict(batch=5, num_q=130, num_k=256, d=32, bias=(1, 2, 130, 256), mask=(5, 1, 1, 256)),
    "attention windows": dict(batch=5, num_q=49, d=24, bias=(1, 2, 49, 49)),
    "attention small": dict(heads=3, num_q=100, num_k=72, d=32, bias=(1, 3, 100, 72), mask=(1, 1, 1, 72)),
}


def run_rms_norm(m, n, x_dtype, w_dtype, b_dtype, r_dtype, heads=1) -> None:
    shape, parameter = (m // heads, heads, n), (heads, n)
    x, residual = rows(shape, x_dtype), rows(shape, r_dtype, seed=4) if r_dtype else None
    weight = weights(heads * n, w_dtype, seed=2).view(parameter) if w_dtype else None
    bias = rows(parameter, b_dtype, seed=3) if b_dtype else None
    x, weight, bias, residual = (t if t is None else t.to(GPU).requires_grad_() for t in (x, weight, bias, residual))
    outputs = rms_norm(x, weight, bias, eps=1e-6, residual=residual, backend="cute")
    outputs = (outputs,) if residual is None else outputs
    torch.autograd.backward(outputs, [rows(shape, t.dtype, seed=1).to(GPU) for t in outputs])


def run_linear_cross_entropy(name) -> None:
    m, h, v, dtype, schedule, options = LINEAR_CROSS_ENTROPY[name]
    options = dict(options)
    lse, live, buffer = options.pop("lse", False), options.pop("live", True), options.pop("buffer", False)
    alone, narrow = options.pop("alone", buffer), options.pop("narrow", False)
    x, w, target, kw = make(m, h, v, dtype, GPU, **options)
    with torch.no_grad():
        w *= h**-0.5
        x[m // 2] *= 300
    if not live:
        target[:] = -100
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configs, "SHARED_FROM", 0)  # share memory as for large exp_logits
        if narrow:  # as conftest.py's `narrow`
            patch.setattr(configs, "scratch_columns", lambda *how: 256)
            patch.setattr(configs, "MIN_DX_ELEMENTS", 1)
        if "PyTorch sorts" in name:
            patch.setattr(launches, "MOST_ROWS_COUNTED", 100)
        clear_caches()
        assert not narrow or configs.first_classes(m, v, h, dtype.itemsize) is not None
        if alone:
            dw = torch.zeros(w.shape, device=GPU) if buffer else None
            linear_cross_entropy(x, w, target, grad_weight_out=dw, backend="cute", **kw, **schedule).backward()
        else:
            grad_lse = torch.linspace(-1, 1, m, device=GPU) if lse else None
            run(x, w, target, kw, grad_lse=grad_lse, backend="cute", **schedule)
    clear_caches()


def clear_caches() -> None:
    for cache in configs.choose_layout, configs.first_classes:
        cache.cache_clear()


def run_grouped_mlp(sizes, tail, h, i, dtype, options) -> None:
    activation, biases, split = options.get("activation", "swiglu"), options.get("biases"), options.get("split")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(GPU, dtype)

    e, r, width = len(sizes), sum(map(abs, sizes)) + tail, 2 * i if activation in GATED else i
    x, dy, scales = normal(r, h), normal(r, h), normal(r)
    w1, w2 = normal(e, width, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
    b1, b2 = (normal(e, width), normal(e, h)) if biases else (None, None)
    w1, w3 = w1.chunk(2, 1) if split else (w1, None)
    arguments = dict(x=x, w1=w1, w2=w2, w3=w3, b1=b1, b2=b2, scales=scales)
    leaves = {name: t.clone().requires_grad_() for name, t in arguments.items() if t is not None}
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32).to(GPU)
    grouped_mlp(**leaves, offs=offs, activation=activation, backend="cute").backward(dy)


def run_token_rows(tokens, n, k) -> None:
    of_experts = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(0)).view(tokens, k).to(GPU)
    steps = kernel_steps.steps_of(device_of(of_experts.device))
    steps.sum_rows(steps.copy_rows(rows((tokens, n), BF16).to(GPU), of_experts), of_experts)


def run_attention(name) -> None:
    step(large_case(GPU, **LARGE[name]) if name in LARGE else case(device=GPU, **ATTENTION[name]))


def run_small(op: Operation, device: str = GPU) -> None:
    """The shape `small` of an operation, with default options."""
    args = op.arguments(op.small, BF16, torch.device("cpu"))
    moved = {n: t.detach().to(device).requires_grad_(t.requires_grad) for n, t in args.items() if torch.is_tensor(t)}
    op.call(args | moved, "cute")


def run_rotary(sizes, options) -> None:
    inputs = rotary_case(length=37, device=GPU, **sizes)
    rotary_step(inputs, rotary_dim=sizes.get("rotary_dim"), backend="cute", **options)


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("sanitize_shapes.py: needs an NVIDIA GPU")
    calls = {f"{name}, small": lambda op=op: run_small(op) for name, op in operations().items()}
    calls |= {name: lambda name=name: run_rms_norm(*RMS_NORM[name]) for name in RMS_NORM}
    calls |= {name: lambda name=name: run_linear_cross_entropy(name) for name in LINEAR_CROSS_ENTROPY}
    calls |= {name: lambda name=name: run_grouped_mlp(*GROUPED_MLP[name]) for name in GROUPED_MLP}
    calls |= {name: lambda name=name: run_token_rows(*TOKEN_ROWS[name]) for name in TOKEN_ROWS}
    calls |= {name: lambda name=name: run_attention(name) for name in ATTENTION}
    calls |= {f"rotary, {name}": lambda name=name: run_rotary(*ROTARY[name]) for name in ROTARY}
    calls |= {f"attention, {name}": lambda name=name: run_attention(name) for name in LARGE}
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    names = [name for name in calls if wanted in name]
    if not names:
        sys.exit(f"sanitize_shapes.py: no shape's name contains {wanted!r}")
    for name in names:
        print(name, flush=True)
        calls[name]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
