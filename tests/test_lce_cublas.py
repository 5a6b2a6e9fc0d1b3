"""Linear cross entropy with cuBLAS's GEMMs, for GPUs without one of ours; the kernels between them run on Hopper too.

Compiled for both on any host. Else each test runs twice: with the kernels emulated, and on whatever GPU is there.
"""

import itertools

import pytest
import torch
from emulated_kernels import CPU, addmm, decode, encode, kernel_for, lce_kernels, mm
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make, norm_error, parameters, run, truth, unit_roundoff

from quackish import kernels, launch
from quackish.configs import lce_cublas
from quackish.configs.lce_cublas import LceClearProblem, LceExpProblem, LceRescaleProblem, LceWarpsConfig
from quackish.configs.lce_rows import LceRowsConfig, LceScatterProblem
from quackish.gpu import B200, H200
from quackish.ops import cuda
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import cublas, linear_cross_entropy
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import DlogitsCall, LceKernels, LogitsCall
from quackish.testing.errors import error, same_bits
from tests.variants import some

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAN = float("nan")
LOGITS = "logits", "recompute_flagged"
CALLS = {**dict.fromkeys(LOGITS, LogitsCall), "dlogits": DlogitsCall}


# Compiled -----------------------------------------------------------------------------------------------------------


def problems():
    everything = dict(bias_dtype="float32", softcap=True, smoothing=True, weighted=True)
    for out in ("bfloat16", None):
        yield "lce_exp", LceExpProblem("softmax", out), LceWarpsConfig()
        yield "lce_exp", LceExpProblem("softmax", out, **everything), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("softmax", "bfloat16", "bfloat16"), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("softmax", "bfloat16", "float32", softcap=True), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("dlogits", "bfloat16"), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("dlogits", "bfloat16", **everything), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("softmax", None, "float16"), LceWarpsConfig()
    yield "lce_exp", LceExpProblem("dlogits", "float16", "float16", smoothing=True), LceWarpsConfig()
    for stored in (True, False):
        yield "lce_rescale", LceRescaleProblem(stored), LceWarpsConfig()
    for h, dtype in (8, "bfloat16"), (1000, "float16"), (4096, "bfloat16"):
        yield "lce_clear", LceClearProblem(h, dtype), LceWarpsConfig()
        yield "lce_scatter", LceScatterProblem(h, dtype, row_scale=True), LceRowsConfig()
    yield "lce_scatter", LceScatterProblem(4096, "float32", row_scale=True), LceRowsConfig()


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.target)
@pytest.mark.parametrize("name, problem, config", list(some(problems(), 12)), ids=str)
def test_compiles(name, problem, config, gpu):
    used = launch.resources(kernels.find(name, gpu), problem, config, gpu.target)
    assert used.stack_bytes == used.local_loads == used.local_stores == 0, used
    assert 4 * config.threads * used.registers <= 65_536, used


@pytest.mark.parametrize("gpu, chosen", [(H200, LceKernels), (B200, CublasKernels)], ids=["H200", "B200"])
def test_which_gemms(gpu, chosen, monkeypatch):
    monkeypatch.setattr(public, "gpu_of", lambda index: gpu)
    device = torch.device("cuda", 0)
    assert public._no_kernel_on.__wrapped__(device) == ""
    assert type(on_kernels.kernels_on(device, gpu)) is chosen


@pytest.mark.parametrize("kind", [LceKernels, CublasKernels])
def test_launches_are_on_the_current_stream_of_their_device(kind, monkeypatch):
    k = kind(torch.device("cuda", 3), H200)
    for current in (7, 8):
        monkeypatch.setattr(cuda, "stream_of", lambda index, current=current: 1000 * index + current)
        assert k.stream() == 3000 + current


# Launchers against the emulation of ours ----------------------------------------------------------------------------


@pytest.fixture(params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Memory that nobody has written holds NaN; columns and rows come in blocks where there are more than a few."""
    if request.param == "cuda":
        if reason := public.no_kernel_on(torch.device("cuda", torch.cuda.current_device())):
            pytest.skip(reason)
    monkeypatch.setattr(lce_cublas, "PRODUCT_BYTES", 1 << 19)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    if request.param == "emulated":
        monkeypatch.setattr(cublas, "mm", mm)
        monkeypatch.setattr(cublas, "addmm", addmm)
        yield CPU
    else:
        monkeypatch.setattr(cuda, "empty", cuda._empty)  # the shorter way is not PyTorch's to fill
        yield torch.device("cuda", torch.cuda.current_device())
    torch.use_deterministic_algorithms(before)


class Case:
    """Rows [start, start + rows) of those there are, `live` of them live; NaN behind these."""

    def __init__(self, rows=300, h=264, v=1000, live=None, start=0, dtype=BF16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rows, self.h, self.v, self.start, self.dtype = rows, h, v, start, dtype
        self.live = live = rows if live is None else live
        self.x = torch.randn(rows, h, generator=g).to(dtype)
        self.w = (torch.randn(v, h, generator=g) * 2 / h**0.5).to(dtype)
        self.slot_target = torch.randint(0, v, (rows,), generator=g, dtype=torch.int32)
        self.order = torch.randperm(start + rows, generator=g).int()
        self.num_live = torch.tensor([start + live], dtype=torch.int32)
        self.row_shift = (self.x.float() * self.w[self.slot_target.long()].float()).sum(1)
        self.e = torch.randn(rows, -(-v // 64) * 64, generator=g).to(dtype)[:, :v]
        self.row_scale = torch.rand(rows, generator=g) + 0.5
        self.bias = torch.randn(v, generator=g)
        self.weight = torch.rand(v, generator=g)
        self.x[live:], self.row_shift[live:], self.row_scale[live:], self.slot_target[live:] = NAN, 2e38, NAN, -1
        self.e[live:] = 0

    def blank(self, *shape, dtype=FP32):
        return torch.full(shape, NAN, dtype=dtype)


SHAPES = [
    dict(),
    dict(rows=1, v=2, h=8),
    dict(rows=129, v=257, h=72, live=100, start=64),
    dict(rows=640, v=2056, h=136, live=200),
    dict(rows=200, live=0, start=128),
    dict(rows=500, v=5003, h=96, live=385),
]
SOFTMAX = {
    "plain": {},
    "softcap": dict(softcap=3.0),
    "bias": dict(bias=BF16),
    "fp32 bias": dict(bias=FP32, softcap=2.0),
    "statistics": dict(stored=False),
    "smoothing": dict(stored=False, wsum=True, bias=FP32),
    "weighted": dict(stored=False, wsum=True, weighted=True),
}


def moved(t, device):
    """With the same strides: a matrix may be columns of a larger one."""
    if not isinstance(t, torch.Tensor):
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


def with_cublas(device):
    return CublasKernels(device, B200, kernel_for) if device.type == "cpu" else CublasKernels(device)


def call(k, names, args):
    """The arguments after launches by these names."""
    args = [moved(a, k.device) for a in args]
    for name in names:
        getattr(k, name)(*([CALLS[name](*args)] if name in CALLS else args))
    return [moved(a, "cpu") for a in args]


def softmax_args(c, k, softcap=None, bias=None, stored=True, wsum=False, weighted=False, v_split=0):
    tiles, first = k.num_tiles(c.v), v_split or c.v
    row_shift = c.row_shift if softcap is None else softcap * torch.tanh(c.row_shift / softcap)
    row_shift[c.live :] = 2e38
    return (
        c.x, c.w, None if bias is None else c.bias.to(bias), c.weight if weighted else None,
        row_shift, c.slot_target, c.num_live, c.start, softcap or 0.0,
        c.blank(c.rows, -(-first // 64) * 64, dtype=BF16)[:, :first] if stored else None,
        c.blank(c.rows, -(-(c.v - first) // 64) * 64, dtype=BF16)[:, : c.v - first] if stored and v_split else None,
        v_split, c.blank(c.rows, tiles),
        c.blank(c.rows, tiles) if wsum else None, c.blank(c.rows), encode(row_shift),
        torch.zeros(1 + -(-c.rows // 128), dtype=torch.int32),
    )  # fmt: skip


def softmax(c, device, names=LOGITS, **given):
    """(E, row sums, weighted row sums, target_logit, row_max_bits, flags), and the same as emulated."""
    found = []
    for k in (with_cublas(device), lce_kernels()):
        *_, e, _, _, part_sum, part_wsum, target_logit, row_max_bits, flags = call(
            k, names, softmax_args(c, k, **given)
        )
        sums = (None if t is None else t[: c.live].sum(1) for t in (part_sum, part_wsum))
        found.append((e, *sums, target_logit[: c.live], row_max_bits[: c.live], flags))
    return found


def close(got, truth, eps):
    return error(got, truth.double()).within(eps, 16 * eps)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", SOFTMAX)
def test_softmax(shape, options, device):
    c = Case(**shape)
    got, want = softmax(c, device, **SOFTMAX[options])
    for one, other, eps in zip(got[1:4], want[1:4], (2e-5, 2e-4, 2e-5), strict=True):
        assert one is None or close(one, other, eps)
    if got[0] is not None:
        assert close(got[0][: c.live], want[0][: c.live], 0.004)
        assert (got[0][c.live :] == 0).all()
    assert same_bits(got[4], want[4])
    assert got[5].sum() == 0


@pytest.mark.parametrize("options", ["plain", "weighted"])
def test_softmax_into_two_buffers(options, device):
    c, given = Case(v=1500), SOFTMAX[options]
    far = torch.tensor([3, 130, 250])
    c.x[far] = c.x[far] * 60
    k = with_cublas(device)
    *_, whole, _, _, sums, wsums, target_logit, _, flags = call(
        k, ["logits", "recompute_flagged"], softmax_args(c, k, **given)
    )
    *_, e, e2, _, sums2, wsums2, zt2, _, flags2 = call(
        k, ["logits", "recompute_flagged"], softmax_args(c, k, v_split=512, **given)
    )
    assert flags[0] == 1
    assert same_bits(flags, flags2)
    for one, other in (sums, sums2), (wsums, wsums2), (target_logit, zt2):
        assert one is None or close(one[: c.live], other[: c.live], 1e-4)
    if whole is not None:
        assert close(torch.cat([e, e2], 1)[: c.live], whole[: c.live], 0.004)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("softcap", [None, 500.0])
def test_rows_far_above_their_reference_and_others_keep_their_bits(softcap, stored, device):
    c = Case(rows=400, v=3000, h=128)
    before, _ = softmax(c, device, softcap=softcap, stored=stored)
    far = torch.tensor([3, 130, 131, 399])
    c.x[far] = c.x[far] * 60
    c.row_shift = (c.x.float() * c.w[c.slot_target.long()].float()).sum(1)
    got, want = softmax(c, device, softcap=softcap, stored=stored)
    assert same_bits(got[5], want[5])
    assert got[5][0] == 1
    row_max_bits, true_top = decode(got[4]), decode(want[4])
    assert close(row_max_bits, true_top, 1e-5)
    a = c.x.double() @ c.w.double().T
    a = a if softcap is None else softcap * torch.tanh(a / softcap)
    grown = torch.exp(a - row_max_bits.double()[:, None])
    # a few units in the last place of logits of some thousands
    assert close(got[1], grown.sum(1), 1e-3)
    if stored:
        d = 1.0 if softcap is None else 1 - (a / softcap).square()
        assert close(got[0], grown * d, 0.008)
    near = torch.ones(400, dtype=torch.bool)
    near[far] = False
    for one, other in zip(got[:5], before[:5], strict=True):
        assert one is None or same_bits(one[near], other[near])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "fp16", "softcap", "bias", "smoothing", "weighted"])
def test_dlogits(shape, options, device):
    c = Case(**shape, dtype=FP16 if options == "fp16" else BF16)
    coefs = torch.rand(c.rows, 4, generator=torch.Generator().manual_seed(7))
    coefs[: c.live, 0] = torch.logsumexp(c.x[: c.live].float() @ c.w.float().T, 1)
    coefs[c.live :] = NAN
    softcap = 3.0 if options == "softcap" else 0.0
    bias = c.bias.to(BF16) if options == "bias" else None
    smoothing = options in ("smoothing", "weighted")
    weight = c.weight if options == "weighted" else None
    e = c.blank(c.rows, -(-c.v // 64) * 64, dtype=c.dtype)[:, : c.v]
    args = c.x, c.w, bias, coefs, c.slot_target, c.num_live, c.start, weight, softcap, smoothing, 0, e
    got, want = (call(k, ["dlogits"], args)[-1] for k in (with_cublas(device), lce_kernels()))
    assert close(got[: c.live], want[: c.live], 0.005)
    assert (got[c.live :] == 0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", [BF16, FP32], ids=str)
def test_dx_to_the_rows_of_order(shape, out, device):
    c = Case(**shape)
    for v_split in (0, 64):
        if v_split < c.v:
            e, e2 = (c.e, None) if v_split == 0 else (c.e[:, :v_split].contiguous(), c.e[:, v_split:])
            dx = c.blank(c.start + c.rows, c.h, dtype=out)
            args = e, e2, v_split, c.w, c.row_scale, c.order, c.num_live, c.start, dx, False
            got, want = (call(k, ["dx"], args)[8] for k in (with_cublas(device), lce_kernels()))
            rows = c.order[c.start : c.start + c.live].long()
            assert close(got[rows], want[rows], 0.004 if out == BF16 else 1e-5)
            others = torch.ones(len(dx), dtype=torch.bool)
            others[rows] = False
            assert got[others].isnan().all()


@pytest.mark.parametrize("accumulate", [False, True])
def test_dx_in_fp32_rows_of_the_chunk(accumulate, device):
    c = Case(live=257, start=100)
    out = torch.randn(c.rows, c.h) if accumulate else c.blank(c.rows, c.h)
    args = c.e, None, 0, c.w, None, None, c.num_live, c.start, out, accumulate
    got, want = (call(k, ["dx"], args)[8] for k in (with_cublas(device), lce_kernels()))
    assert close(got[: c.live], want[: c.live], 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out, accumulate", [(BF16, False), (FP16, False), (FP32, False), (FP32, True)], ids=str)
def test_dw(shape, out, accumulate, device):
    c = Case(**shape, dtype=FP16 if out == FP16 else BF16)
    dw = torch.randn(c.v, c.h) if accumulate else c.blank(c.v, c.h, dtype=out)
    x = c.x.clone()
    x[c.live : -(-c.live // 128) * 128] = 0
    got = call(with_cublas(device), ["dw"], (c.e, c.x, c.num_live, c.start, dw, accumulate))[4]
    want = call(lce_kernels(), ["dw"], (c.e, x, c.num_live, c.start, dw, accumulate))[4]
    assert close(got, want, 1e-5 if out == FP32 else 0.008)


# All of it ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def on_cublas(device, run_on, limits):
    """linear_cross_entropy runs with cuBLAS's GEMMs, on this device."""
    k = with_cublas(device)
    run_on(lambda device: k)
    limits(SHARED_FROM=0)  # exp_logits in two blocks
    return device


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_equals_truth(dtype, name, reduction, on_cublas):
    for m, h, v, chunk_size in ((300, 8, 700, 128), (200, 72, 1001, None)):
        x, w, target, kw = make(m, h, v, dtype, on_cublas, **OPTIONS[name])
        w = (w.detach() * h**-0.5).requires_grad_()
        with torch.no_grad():
            x[7] *= 300  # logits hundreds apart
        target[8:250] = -100  # of the second chunk, some rows are live; of the third, none
        kw = {key: t.float() if key == "weight" else t for key, t in kw.items()} | dict(reduction=reduction)
        true_loss, true_lse, true_grads = truth(x, w, target, kw)
        for schedule in SCHEDULES:
            loss, lse, grads = run(x, w, target, kw, schedule=schedule, chunk_size=chunk_size, backend="cute")
            torch.testing.assert_close(lse.double(), true_lse, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(loss.double(), true_loss, rtol=1e-4, atol=1e-4)
            for got, want, of in zip(grads, true_grads, parameters(x, w, kw), strict=True):
                assert got.dtype == of.dtype
                assert norm_error(got, want) <= 4 * unit_roundoff(dtype)


def test_nothing_is_read_where_no_row_is_live(on_cublas):
    x, w, target, kw = make(300, 16, 700, BF16, on_cublas)
    target[:] = -100
    with torch.no_grad():
        x[:] = NAN
    for schedule in SCHEDULES:
        loss = linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=128, backend="cute", **kw)
        dx, dw = torch.autograd.grad(loss, [x, w])
        assert loss == 0
        assert (dx == 0).all()
        assert (dw == 0).all()


def test_the_gradient_is_added_to_a_buffer(on_cublas):
    x, w, target, kw = make(300, 16, 9000, BF16, on_cublas)
    want = truth(x, w, target, kw)[2][1]
    for schedule, dtype in itertools.product(SCHEDULES, (FP32, BF16)):
        buffer = torch.ones(w.shape, device=on_cublas, dtype=dtype)
        loss = linear_cross_entropy(x, w, target, schedule=schedule, grad_weight_out=buffer, backend="cute", **kw)
        loss.backward()
        assert w.grad is None
        assert norm_error(buffer, want + 1) <= (1e-4 if dtype == FP32 else 0.004)


@pytest.mark.gpu
def test_no_host_synchronisation_and_a_graph(on_cublas):
    if on_cublas.type == "cpu":
        pytest.skip("streams and graphs are a GPU's")
    x, w, target, kw = make(300, 64, 5000, BF16, on_cublas)

    def step(schedule):
        loss = linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=128, backend="cute", **kw)
        return [loss.detach(), *torch.autograd.grad(loss, [x, w])]

    for schedule in SCHEDULES:
        want = step(schedule)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step(schedule)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = step(schedule)
        graph.replay()
        for got, eager in zip(static, want, strict=True):
            assert norm_error(got, eager.double()) <= 1e-4
