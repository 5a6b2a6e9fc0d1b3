"""Small shapes of every kind, forward and backward against fp64, for scripts/sanitize.sh (compute-sanitizer).

    python tests/sanitize_shapes.py [part of a shape's name]

Inputs and true results are computed on the CPU, so that few kernels besides quackish's run.
"""

import math
import sys

import torch
from lce_cases import make, norm_error, parameters, run, truth, unit_roundoff

from quackish import grouped_mlp
from quackish.configs import linear_cross_entropy as configs
from quackish.configs.lce_rows import MOST_ROWS_COUNTED
from quackish.ops.grouped_mlp import kernel_steps
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import linear_cross_entropy, steps
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.rms_norm import rms_norm_backward, rms_norm_forward
from quackish.reference import grouped_mlp as grouped
from quackish.reference import rms_norm as reference
from quackish.testing.errors import error
from quackish.testing.inputs import rows, weights

GPU = "cuda"
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

# name: m, n, dtypes of x, weight, bias and residual[, heads]
SHAPES = {
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
    "lce cublas chunks": (300, 64, 1003, BF16, dict(schedule="chunked", chunk_size=128), dict(bias=True)),
    "lce cublas recompute": (140, 64, 1000, BF16, dict(schedule="recompute"), dict(label_smoothing=0.1)),
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


def set_constants(constants: dict) -> None:
    vars(configs).update(constants)
    for cache in configs.choose_layout, configs.first_classes:
        cache.cache_clear()


def check_linear_cross_entropy(name: str) -> bool:
    m, h, v, dtype, schedule, options = LINEAR_CROSS_ENTROPY[name]
    options = dict(options)
    lse, live, buffer = options.pop("lse", False), options.pop("live", True), options.pop("buffer", False)
    alone, narrow = options.pop("alone", buffer), options.pop("narrow", False)

    def make_inputs(device: str):
        x, w, target, kw = make(m, h, v, dtype, device, **options)
        with torch.no_grad():
            w *= h**-0.5
            x[m // 2] *= 300
        if not live:
            target[:] = -100
        grad_lse = torch.linspace(-1, 1, m, device=device) if lse else None
        return x, w, target, kw, grad_lse

    constants = dict(SHARED_FROM=0)  # share memory as for large exp_logits
    kernels_of = on_kernels.kernels_of
    steps.MOST_ROWS_COUNTED = 100 if "PyTorch sorts" in name else MOST_ROWS_COUNTED
    if "cublas" in name:
        on_kernels.kernels_of = lambda device: CublasKernels(device)
    if narrow:  # as conftest.py's `narrow`
        constants |= dict(scratch_columns=lambda *how: 256, MIN_DX_ELEMENTS=1)
    before = {name: getattr(configs, name) for name in constants}
    set_constants(constants)
    assert not narrow or configs.first_classes(m, v, h, dtype.itemsize) is not None
    x, w, target, kw, grad_lse = make_inputs(GPU)
    if alone:
        dw = torch.zeros(w.shape, device=GPU) if buffer else None
        loss = linear_cross_entropy(x, w, target, grad_weight_out=dw, backend="cute", **kw, **schedule)
        loss.backward()
        got = [loss.detach(), x.grad, dw if buffer else w.grad, *(t.grad for t in parameters(x, w, kw)[2:])]
    else:
        loss, _, grads = run(x, w, target, kw, grad_lse=grad_lse, backend="cute", **schedule)
        got = [loss, *grads]
    on_kernels.kernels_of = kernels_of
    set_constants(before)

    x, w, target, kw, grad_lse = make_inputs("cpu")
    loss, _, grads = truth(x, w, target, kw, grad_lse=grad_lse)
    good = True
    names = "loss", "dinput", "dlinear_weight", "dlinear_bias"
    for what, one, other in zip(names, got, [loss, *grads], strict=False):
        e, bound = norm_error(one.cpu(), other), 1e-4 if what == "loss" else 4 * unit_roundoff(dtype)
        if not e <= bound:
            good = False
            print(f"  {what} is wrong: {e:.3g}, at most {bound:.3g}")
    print(f"{'ok' if good else 'WRONG'}: {name} ({m} x {h} x {v})", flush=True)
    return good


def check_grouped_mlp(name: str) -> bool:
    sizes, tail, h, i, dtype, options = GROUPED_MLP[name]
    activation, biases, split = options.get("activation", "swiglu"), options.get("biases"), options.get("split")
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    e, r, width = len(sizes), sum(map(abs, sizes)) + tail, 2 * i if activation in grouped.GATED else i
    x, dy, scales = normal(r, h), normal(r, h), normal(r)
    w1, w2 = normal(e, width, h, scale=h**-0.5), normal(e, h, i, scale=i**-0.5)
    b1, b2 = (normal(e, width), normal(e, h)) if biases else (None, None)
    w1, w3 = w1.chunk(2, 1) if split else (w1, None)
    arguments = dict(x=x, w1=w1, w2=w2, w3=w3, b1=b1, b2=b2, scales=scales)
    offs = torch.tensor(sizes).cumsum(0, dtype=torch.int32)

    def step(device, dtype, backend):
        how = dict(offs=offs.to(device), activation=activation, backend=backend)
        given = {n: t.to(device, dtype).requires_grad_() for n, t in arguments.items() if t is not None}
        y = grouped_mlp(**given, **how)
        return [y.detach(), *torch.autograd.grad(y, list(given.values()), dy.to(device, dtype))], ["y", *given]

    got, names = step(GPU, dtype, "cute")
    if min(sizes) < 0:
        good = all(t.isnan().all() for t in got)
    else:
        truths, _ = step("cpu", FP64, "reference")
        errors = [norm_error(t.cpu(), truth) for t, truth in zip(got, truths, strict=True)]
        wrong = [f"{n} {e:.3g}" for n, e in zip(names, errors, strict=True) if not e <= 4 * unit_roundoff(dtype)]
        good = not wrong
        if wrong:
            print(f"  wrong: {', '.join(wrong)}")
    print(f"{'ok' if good else 'WRONG'}: {name} ({r} x {h} x {i})", flush=True)
    return good


def check_token_rows(name: str) -> bool:
    tokens, n, k = TOKEN_ROWS[name]
    x = rows((tokens, n), BF16)
    of_experts = torch.randperm(tokens * k, generator=torch.Generator().manual_seed(0)).view(tokens, k)
    copies = kernel_steps.copy_rows(x.to(GPU), of_experts.to(GPU))
    total = kernel_steps.sum_rows(copies, of_experts.to(GPU)).cpu()
    good = torch.equal(copies.cpu()[of_experts], x[:, None].expand(-1, k, -1))
    good &= torch.equal(total, sum(x.float() for _ in range(k)).to(BF16))
    print(f"{'ok' if good else 'WRONG'}: {name} ({tokens} x {n} x {k})", flush=True)
    return good


def check_rms_norm(name: str) -> bool:
    """Forward and backward of one shape."""
    m, n, x_dtype, w_dtype, b_dtype, r_dtype, *heads = SHAPES[name]
    shape, parameter = (m // math.prod(heads), *heads, n), (*heads, n)
    x, dy = rows(shape, x_dtype), rows(shape, x_dtype, seed=1)
    w = weights(math.prod(parameter), w_dtype, seed=2).view(parameter) if w_dtype else None
    b = rows(parameter, b_dtype, seed=3) if b_dtype else None
    r, dres = (rows(shape, r_dtype, seed=seed) if r_dtype else None for seed in (4, 5))
    gpu = [None if t is None else t.cuda() for t in (x, w, b, r, dy, dres)]

    y, res, rstd = rms_norm_forward(*gpu[:3], residual=gpu[3], backend="cute")
    asked = dict(dresidual=r is not None, dbias=b is not None, dx_dtype=x_dtype, dbias_dtype=b_dtype)
    grads = rms_norm_backward(gpu[4], res, gpu[1], rstd, dres=gpu[5], **asked, backend="cute")

    x, w, b, dy, dres = (None if t is None else t.double() for t in (res.cpu(), w, b, dy, dres))
    y_true, _, rstd_true = reference.rms_norm_fwd(x, w, b, None, 1e-6)
    dx, _, dw, db = reference.rms_norm_bwd(dy, x, w, rstd_true, dres, 0.0, FP64, None, FP64, FP64)
    truths = dict(y=y_true, dx=dx, dweight=dw, dbias=db, dresidual=dx)
    good = True
    for what, got in dict(y=y, **grads._asdict()).items():
        if got is not None:
            # n = 1 and 3 have dx as a difference of nearly equal terms
            e = error(got.cpu(), truths[what], noise=1e-3 if n < 8 else 1e-5)
            if not e.within(4 * torch.finfo(got.dtype).eps, 8 * torch.finfo(got.dtype).eps):
                good = False
                print(f"  {what} is wrong: {e}")
    print(f"{'ok' if good else 'WRONG'}: {name} ({m} x {n})", flush=True)
    return good


def main() -> int:
    if not torch.cuda.is_available():
        sys.exit("sanitize_shapes.py: needs an NVIDIA GPU")
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    results = []
    results += [check_rms_norm(name) for name in SHAPES if wanted in name]
    results += [check_linear_cross_entropy(name) for name in LINEAR_CROSS_ENTROPY if wanted in name]
    results += [check_grouped_mlp(name) for name in GROUPED_MLP if wanted in name]
    results += [check_token_rows(name) for name in TOKEN_ROWS if wanted in name]
    torch.cuda.synchronize()
    return 0 if results and all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
