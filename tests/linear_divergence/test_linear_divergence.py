"""linear_divergence against fp64: the portable path, and kernels in the emulator."""

import contextlib
import itertools
import re

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor

import quackish
from quackish import linear_divergence
from quackish.ops.linear_divergence import schedule
from quackish.ops.linear_divergence.problems import ROWS_SPEC, DivergenceRowsConfig
from quackish.testing.errors import error
from tests.emulator_cases import QUICK, emulated
from tests.fake_strides import ChecksFakes
from tests.peak_memory import taken

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EVERYTHING = dict(
    temperature=1.3, softcap=7.0, teacher_softcap=9.0, logit_scale=0.8, teacher_logit_scale=1.1, return_entropy=True
)


def make(m: int, h: int, teacher_h: int, v: int, dtype: torch.dtype, bias: bool = True, mask: bool = True) -> dict:
    """Logits have standard deviation 1.5. Rows that do not count are NaN."""
    g = torch.Generator().manual_seed(0)
    x, w, teacher_x, teacher_w, b, teacher_b = (
        torch.randn(shape, generator=g) for shape in ((m, h), (v, h), (m, teacher_h), (v, teacher_h), (v,), (v,))
    )
    args = dict(input=x, linear_weight=w * 1.5 * h**-0.5, teacher_input=teacher_x)
    args["teacher_weight"] = teacher_w * 1.5 * teacher_h**-0.5
    if bias:
        args |= dict(linear_bias=b, teacher_bias=teacher_b)
    args = {name: t.to(dtype) for name, t in args.items()}
    if mask:
        args["mask"] = torch.rand(m, generator=g) > 0.4
        for name in ("input", "teacher_input"):
            args[name][~args["mask"]] = float("nan")
    return args


def truth(
    input, linear_weight, teacher_input, teacher_weight, linear_bias=None, teacher_bias=None, mask=None, beta=0.0,
    temperature=1.0, softcap=None, teacher_softcap=None, logit_scale=None, teacher_logit_scale=None, **ignored,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(divergence, entropy) of each row in fp64."""

    def log_softmax(x, w, bias, scale, cap):
        z = x.nan_to_num(0.0) @ w.T
        z = (z if bias is None else z + bias) * (scale or 1)
        return ((z if cap is None else cap * torch.tanh(z / cap)) / temperature).log_softmax(-1)

    log_s = log_softmax(input, linear_weight, linear_bias, logit_scale, softcap)
    log_t = log_softmax(teacher_input, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap)
    s, t = log_s.exp(), log_t.exp()
    if beta in (0, 1):
        loss = (t * (log_t - log_s)).sum(-1) if beta == 0 else (s * (log_s - log_t)).sum(-1)
    else:
        log_m = ((1 - beta) * s + beta * t).log()
        loss = beta * (t * (log_t - log_m)).sum(-1) + (1 - beta) * (s * (log_s - log_m)).sum(-1)
    live = torch.ones_like(loss) if mask is None else mask
    return loss * live, -(s * log_s).sum(-1) * live


def compare(args: dict, reduction: str = "mean", tolerance: float | None = None, **options) -> None:
    """Compares losses, entropies and gradients with fp64."""
    dtype = args["input"].dtype
    leaves = [name for name in ("input", "linear_weight", "linear_bias") if name in args]
    results = []
    for is_truth in (False, True):
        cast = {n: t.double() if is_truth and t.is_floating_point() else t for n, t in args.items()}
        cast |= {name: cast[name].detach().requires_grad_() for name in leaves}
        if is_truth:
            losses, entropy = truth(**cast, **options)
            count = args["mask"].sum() if "mask" in args else len(losses)
            loss = losses if reduction == "none" else losses.sum() / (count if reduction == "mean" else 1)
        else:
            found = linear_divergence(**cast, reduction=reduction, **options)
            loss, entropy = found if options.get("return_entropy") else (found, None)
        weights = torch.linspace(-1, 2, loss.numel()).view(loss.shape) if reduction == "none" else torch.tensor(1.7)
        grads = torch.autograd.grad(loss, [cast[name] for name in leaves], weights.to(loss))
        results.append([loss.detach(), entropy, *grads])
    names = "loss", "entropy", *leaves
    for name, got, want in zip(names, *results, strict=True):
        if got is None:
            continue
        is_result = name in ("loss", "entropy")  # these are not in 16 bits
        info = torch.finfo(FP32 if is_result and dtype != FP64 else dtype)
        bound = tolerance or info.eps * (20 if is_result or dtype in (FP32, FP64) else 2)
        subnormals = info.smallest_normal * info.eps * want.numel() ** 0.5 / want.norm()  # what rounding them costs
        assert error(got, want).norm <= bound + subnormals, name


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_portable_path(dtype, beta, reduction):
    compare(make(37, 24, 40, 301, dtype), reduction, beta=beta, **EVERYTHING)
    compare(make(37, 24, 40, 301, dtype, bias=False, mask=False), reduction, beta=beta)


CASES = [  # where, dtype, v, beta, reduction
    (QUICK, BF16, 301, 0.3, "mean"),
    ("h200/at_once/1", FP16, 296, 0.0, "none"),
    ("h200/late/2", BF16, 296, 1.0, "sum"),
    ("b200/late/0", BF16, 301, 0.5, "none"),
    ("b300/at_once/1", FP16, 520, 1.0, "mean"),
    ("b200/at_once/2", BF16, 301, 0.0, "sum"),
]


@pytest.mark.parametrize(
    "where, dtype, v, beta, reduction",
    [pytest.param(*case, marks=[] if case[0] == QUICK else pytest.mark.exhaustive) for case in CASES],
)
def test_kernels_in_the_emulator(where, dtype, v, beta, reduction):
    with emulated(where) as report:
        compare(make(70, 64, 72, v, dtype), reduction, beta=beta, **EVERYTHING)
        if where != QUICK:
            compare(make(70, 64, 72, v, dtype, bias=False, mask=False), reduction, beta=beta)
    scaled = {"scale"} if reduction != "none" else set()
    assert {launch.kernel for launch in report.launches} == {"gemm", "divergence_rows"} | scaled


@pytest.mark.exhaustive
@pytest.mark.parametrize("where", [QUICK, "b200/at_once/1"])
def test_a_row_over_a_cluster(where, monkeypatch):
    for family, variant in ROWS_SPEC.on.items():
        rule = variant._replace(rule=lambda problem, gpu: DivergenceRowsConfig(64, 4, 1))
        monkeypatch.setitem(ROWS_SPEC.on, family, rule)
    with emulated(where, sm_count=8) as report:
        compare(make(5, 64, 64, 1003, BF16), "none", beta=0.4, temperature=0.7, return_entropy=True)
    assert [launch.cluster for launch in report.launches if launch.kernel == "divergence_rows"] == [(4, 1, 1)]


@pytest.mark.parametrize("path", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_blocks_and_chunks(path, reduction, monkeypatch):
    """Of 128 rows; dw is summed over blocks, and "none" computes logits again."""
    for name in ("BLOCKS", "CHUNKS"):
        monkeypatch.setattr(schedule, name, (128,))
    with contextlib.nullcontext() if path == "portable" else emulated(path):
        compare(make(300, 32, 40, 301, FP32 if path == "portable" else BF16), reduction, beta=0.5)


@pytest.mark.parametrize("path", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_close_to_its_teacher(path, beta):
    """Logits differ by 1 %; divergences are 1e-4 or less."""
    g = torch.Generator().manual_seed(0)
    dtype = FP32 if path == "portable" else BF16
    teacher_x, teacher_w = (torch.randn(shape, generator=g).to(dtype) for shape in ((40, 64), (296, 64)))
    x = (teacher_x + 0.01 * torch.randn(40, 64, generator=g)).to(dtype)
    args = dict(input=x, linear_weight=teacher_w / 4, teacher_input=teacher_x, teacher_weight=teacher_w / 4)
    with contextlib.nullcontext() if path == "portable" else emulated(path):
        compare(args, tolerance=1e-3 if path == "portable" else 6e-3, beta=beta)
        args["input"] = teacher_x
        loss = linear_divergence(**args, beta=beta, reduction="none")
    assert loss.abs().max() <= 1e-6


@pytest.mark.parametrize("path", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
def test_classes_of_probability_0(path):
    """Masked by a bias of -inf, in both models or in the student alone."""
    args = make(9, 64, 64, 296, FP32 if path == "portable" else BF16, mask=False)
    for name in ("linear_bias", "teacher_bias"):
        args[name][200:] = -torch.inf
    with contextlib.nullcontext() if path == "portable" else emulated(path):
        for beta in (0.0, 0.5, 1.0) if path == "portable" else (0.5,):
            x = args["input"].clone().requires_grad_()
            loss = linear_divergence(**args | dict(input=x), beta=beta)
            (dx,) = torch.autograd.grad(loss, x)
            short = {name: t[:200] if t.shape[0] == 296 else t for name, t in args.items()}
            torch.testing.assert_close(loss, linear_divergence(**short, beta=beta))
            assert dx.isfinite().all()
    args["teacher_bias"][200:] = 0
    assert linear_divergence(**args).isinf()  # KL(t || s)


@pytest.mark.parametrize("path", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_that_is_not_finite(beta, path):
    """Its row gets NaN gradients; all other rows stay finite."""
    args = make(6, 64, 64, 301, FP32 if path == "portable" else BF16, mask=False)
    args["teacher_input"][1], args["teacher_input"][4] = torch.nan, torch.inf
    x = args["input"].requires_grad_()
    with contextlib.nullcontext() if path == "portable" else emulated(path):
        (dx,) = torch.autograd.grad(linear_divergence(**args, beta=beta, reduction="sum"), x)
    assert dx.isnan().all(1).tolist() == [False, True, False, False, True, False]
    assert dx[[0, 2, 3, 5]].isfinite().all()


@pytest.mark.parametrize("name", ["temperature", "softcap", "teacher_softcap", "logit_scale", "teacher_logit_scale"])
def test_numbers_that_fp32_cannot_hold(name):
    for number in (1e39, 1e-46):
        with pytest.raises(
            ValueError, match=re.escape(f"{name} is {number}, expected a number from 1.2e-38 to 3.4e+38")
        ):
            linear_divergence(**make(4, 16, 16, 33, FP32), **{name: number})


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_results_are_as_compiled_code_expects(m, reduction):
    """With a weight that is the transpose of a parameter."""
    args = make(m, 16, 24, 64, FP32)
    args["linear_weight"] = args["linear_weight"].T.contiguous().T
    leaves = [args[name].requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
    with ChecksFakes() as fakes:
        linear_divergence(**args, reduction=reduction).sum().backward()
    assert fakes.checked == ["linear_divergence_fwd"] + ["linear_divergence_bwd"] * (reduction == "none")
    assert all(leaf.grad.shape == leaf.shape for leaf in leaves)


def test_nan_and_no_rows():
    args = make(6, 16, 16, 33, FP32, mask=False)
    args["input"][2] = float("nan")
    leaves = [args["input"].requires_grad_(), args["linear_weight"].requires_grad_()]
    loss = linear_divergence(**args, reduction="none")
    assert loss.isnan().tolist() == [False, False, True, False, False, False]
    dead = torch.zeros(6, dtype=torch.bool)
    loss, entropy = linear_divergence(**args, mask=dead, return_entropy=True)
    assert loss == 0
    assert not entropy.any()
    assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves))
    args["input"], args["teacher_input"] = torch.ones(2, 0, 16, requires_grad=True), torch.ones(2, 0, 16)
    loss = linear_divergence(**args)
    assert loss == 0
    loss.backward()
    assert linear_divergence(**args, reduction="none", memory_limit=10**6).shape == (2, 0)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_second_backward_and_buffers(reduction):
    args = make(12, 16, 24, 65, FP32, mask=False)
    x, w = args["input"].requires_grad_(), args["linear_weight"].requires_grad_()
    loss = linear_divergence(**args, reduction=reduction, beta=0.5).sum()
    first, second = (torch.autograd.grad(loss, [x, w], retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    buffer = torch.ones(65, 16)
    loss = linear_divergence(**args, reduction=reduction, beta=0.5, grad_weight_out=buffer).sum()
    w.grad = None
    loss.backward()
    assert w.grad is None
    torch.testing.assert_close(buffer, 1 + first[1])
    torch.testing.assert_close(x.grad, first[0])


@pytest.mark.exhaustive
def test_hooks_that_copy_saved_tensors():
    """A copy of what kernels saved has other strides, if V is no multiple of 8."""
    args = make(12, 32, 24, 301, BF16)
    leaves = [args["input"].requires_grad_(), args["linear_weight"].requires_grad_()]
    results = []
    for copied in (lambda t: t, lambda t: t.clone()):
        with emulated(QUICK):
            with torch.autograd.graph.saved_tensors_hooks(copied, lambda t: t):
                loss = linear_divergence(**args, reduction="none")
            results.append(torch.autograd.grad(loss.sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_small_gradients_in_fp16(beta, reduction):
    """A loss that AMP scales, of many rows and classes at a high temperature: gradients of logits are small."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(512, 32, generator=g), torch.randn(8000, 32, generator=g) / 6
    teacher_x = x + 0.3 * torch.randn(512, 32, generator=g)
    grads = []
    for dtype in (FP16, FP64):
        tensors = [t.half().to(dtype).requires_grad_(i < 2) for i, t in enumerate((x, w, teacher_x, w.detach()))]
        loss = linear_divergence(*tensors, beta=beta, temperature=4.0, reduction=reduction)
        scale = 65536.0 if reduction == "mean" else 128.0
        grads.append(torch.autograd.grad(loss, tensors[:2], torch.full_like(loss, scale)))
    for got, want in zip(*grads, strict=True):
        assert error(got, want).norm <= 2e-3


def test_num_items_shapes_and_autocast():
    args = make(12, 16, 24, 65, FP32, mask=False)
    total = linear_divergence(**args, reduction="sum")
    for items in (5, torch.tensor(5)):
        torch.testing.assert_close(linear_divergence(**args, num_items=items), total / 5)
    cubes = args | {name: args[name].view(3, 4, -1) for name in ("input", "teacher_input")}
    assert linear_divergence(**cubes, reduction="none").shape == (3, 4)
    args["input"].requires_grad_()
    with torch.autocast("cpu", BF16):
        loss = linear_divergence(**args)
    (dx,) = torch.autograd.grad(loss, args["input"])
    assert loss.dtype == dx.dtype == FP32
    assert error(loss, linear_divergence(**args).double()).norm <= 0.01


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_compiles(reduction):
    args = make(12, 16, 24, 65, FP32)
    leaves = [args["input"].requires_grad_(), args["linear_weight"].requires_grad_()]

    def call(**args):
        return linear_divergence(**args, reduction=reduction, beta=0.5, return_entropy=True)

    results = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        loss, entropy = function(**args)
        results.append([loss, entropy, *torch.autograd.grad(loss.sum(), leaves)])
        assert not entropy.requires_grad
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [FP32, BF16, FP64])
def test_memory_of_the_portable_path(dtype, reduction):
    """Beside what PyTorch's profiler counts, with one block of rows and with the least limit."""
    m, v, h, teacher_h = 400, 1203, 64, 40
    for masked, several in itertools.product((False, True), repeat=2):
        args = make(m, h, teacher_h, v, dtype, mask=masked)
        leaves = [args[name].requires_grad_() for name in ("input", "linear_weight", "linear_bias")]
        sizes = schedule.Sizes(
            m, v, h, dtype, schedule.Needed(dtype, dtype, dtype), reduction == "none", masked, portable="cpu"
        )
        limit = schedule.memory_of(schedule.Layout(128, 128), sizes) if several else 1 << 40
        layout = schedule.layout_within(limit, sizes)
        assert layout.block == (128 if several else 8192)

        def step(args=args, limit=limit, leaves=leaves):
            loss = linear_divergence(**args, **EVERYTHING, beta=0.3, reduction=reduction, memory_limit=limit)
            return loss, torch.autograd.grad(loss[0], leaves, torch.ones_like(loss[0]))

        copies = 4 * (v + layout.chunk) * h if dtype == BF16 else 0  # in fp32, for products on a CPU
        copies += m * (h + teacher_h) * dtype.itemsize if masked else 0
        excess = taken(step) - sum(t.nbytes for t in leaves)
        assert excess - copies <= schedule.memory_of(layout, sizes) <= 1.35 * excess


def test_memory_limits_in_compiled_calls():
    """Two graphs for any number of rows and any limit."""
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    args = make(4, 16, 24, 65, FP32, mask=False)

    def call(x, teacher_x, limit):
        return linear_divergence(**args | dict(input=x, teacher_input=teacher_x), memory_limit=limit)

    compiled = torch.compile(call, fullgraph=True, backend=frames)
    for rows in (300, 200, 500, 129):
        x, teacher_x = torch.randn(rows, 16), torch.randn(rows, 24)
        torch.testing.assert_close(compiled(x, teacher_x, 10**9 + rows), call(x, teacher_x, 10**9))
    assert frames.frame_count <= 2


def test_memory_is_as_computed():
    """At least the peak of a dry run, in 16 bits, with one block and with several."""
    from quackish.gpu import H100
    from quackish.ops.linear_divergence.tools import LINEAR_DIVERGENCE
    from quackish.ops.shared.dry_run import dry_run

    m, teacher_h, v = 1000, 256, 32_003
    for h, limit in ((128, 1 << 40), (128, 80_000_000), (1024, 98_000_000)):  # the last: with dw's scratch
        args = LINEAR_DIVERGENCE.arguments((m, h, teacher_h, v), BF16, torch.device("meta"))
        found = dry_run(LINEAR_DIVERGENCE, args | dict(memory_limit=limit), H100, ("forward", "backward"), "")
        peak = found.peak_bytes - 2 * h * (v + m)
        assert peak <= found.limited_bytes <= min(limit, peak + (20 << 20))
        assert ("8192 rows" in found.plan["Blocks"]) == (limit != 80_000_000)
    with pytest.raises(ValueError, match="memory_limit is 5 bytes, expected at least"):
        linear_divergence(**make(300, 16, 16, 33, FP32), memory_limit=5)


@pytest.mark.exhaustive
def test_bits_do_not_depend_on_other_rows():
    args = make(40, 64, 64, 301, BF16, mask=False)
    some = args | {name: args[name][7:19] for name in ("input", "teacher_input")}
    with emulated(QUICK):
        whole, part = (linear_divergence(**a, beta=0.3, reduction="none") for a in (args, some))
    assert torch.equal(whole[7:19], part)


def test_teachers_get_no_gradient():
    args = make(4, 16, 16, 33, FP32)
    args["teacher_weight"].requires_grad_()
    with pytest.raises(
        ValueError, match=r"teacher_weight requires grad, but only the student .* teacher_weight.detach"
    ):
        linear_divergence(**args)
    with torch.no_grad():
        linear_divergence(**args)
    with pytest.raises(quackish.UnsupportedError, match="no kernel for cpu tensors"):
        linear_divergence(**make(4, 16, 16, 33, BF16), backend="cute")
