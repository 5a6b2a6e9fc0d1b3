"""Linear cross entropy on a GPU's kernels: bits, memory, streams, sizes past 2^31; and the errors at real widths.

What each option computes is tested in test_lce_schedules.py, on this device too.
"""

import gc
import re

import pytest
import torch
import torch.nn.functional as F

from quackish.device.kernel_device import why_unsupported
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from quackish.ops.linear_cross_entropy.calls import RowState
from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
from quackish.ops.linear_cross_entropy.layout import first_classes
from quackish.testing import assert_deterministic
from quackish.testing.errors import same_bits
from tests.cuda_graphs import captured
from tests.linear_cross_entropy.cases import IGNORED, SCHEDULES, norm_error, truth

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
ALL = dict(label_smoothing=0.1)  # runs the kernels without exp_logits
in_every_way = pytest.mark.parametrize(
    "schedule, chunk_size",
    [("chunked", None), ("chunked", 384), ("stored", None), ("recompute", None), ("recompute", 384)],
)


@pytest.fixture(autouse=True)
def _hopper():
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := why_unsupported("linear_cross_entropy", GEMM_SPEC, device):
        pytest.skip(reason)
    yield
    torch.cuda.empty_cache()


def make(m, h, v, dtype=BF16, ignored=5, seed=0, scale=1.0):
    """Logits with standard deviation `scale`; every `ignored`-th row is ignored."""
    g = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(m, h, generator=g, device="cuda").to(dtype).requires_grad_()
    w = (torch.randn(v, h, generator=g, device="cuda") * (scale * h**-0.5)).to(dtype).requires_grad_()
    target = torch.randint(0, v, (m,), generator=g, device="cuda")
    if ignored:
        target[1::ignored] = IGNORED
    return x, w, target


def step(x, w, target, grad=None, **kw):
    """[loss, dx, dw] of a forward and a backward."""
    loss = linear_cross_entropy(x, w, target, backend="cute", **kw)
    grads = torch.autograd.grad(loss, [x, w], torch.ones_like(loss) if grad is None else grad)
    return [loss.detach(), *grads]


def assert_same_bits(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bits(a, b), i


# --- bits ---


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "smoothing"])
@in_every_way
def test_20_runs_give_the_same_bits_with_another_stream_busy(schedule, chunk_size, options, dtype):
    assert_20_runs_are_equal(*make(1100, 512, 5000, dtype), schedule=schedule, chunk_size=chunk_size, **options)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)  # fp32: parameters, under autocast
def test_20_runs_with_dw_in_forward(dtype, narrow):
    x, w, target = make(1100, 512, 5000, dtype)
    with torch.autocast("cuda", dtype=BF16, enabled=dtype != BF16):
        assert_forward_begins_dw(x, w, target)
        assert_20_runs_are_equal(x, w, target, grad=0.37, schedule="recompute")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_20_runs_of_statistics_and_their_gradients(schedule, poisoned):
    x, w, target = make(1100, 512, 20_000, scale=4.0)
    x.data[3::100] *= 16  # logits far above their target's

    def run(x, w):
        loss, stats = linear_cross_entropy(
            x, w, target, return_stats=True, schedule=schedule, chunk_size=512, backend="cute"
        )
        return loss + (stats.log_prob - 2 * stats.entropy).mean(), stats

    assert_deterministic(run, x, w)


def assert_20_runs_are_equal(x, w, target, grad=1.0, **kw):
    assert_deterministic(lambda x, w: linear_cross_entropy(x, w, target, backend="cute", **kw) * grad, x, w)


def assert_forward_begins_dw(x, w, target):
    first = first_classes(x.shape[0], *w.shape, w.itemsize)
    assert first is not None
    loss = linear_cross_entropy(x, w, target, schedule="recompute", backend="cute")
    assert loss.grad_fn.computed.dw_classes == first[0]


@pytest.mark.parametrize("options", [{}, dict(softcap=20.0, z_loss=1e-4), ALL], ids=["plain", "softcap", "smoothing"])
def test_row_loss_is_independent_of_other_rows_and_chunks(options):
    x, w, target = make(3000, 1024, 7001, ignored=0)
    with torch.no_grad():
        want = linear_cross_entropy(x, w, target, reduction="none", backend="cute", **options)
        for m in (1, 5, 128, 129, 1000, 2999):
            for first in (0, 3000 - m):
                rows = slice(first, first + m)
                got = linear_cross_entropy(x[rows], w, target[rows], reduction="none", backend="cute", **options)
                assert same_bits(got, want[rows])
        for chunk_size in (128, 1024, 2944):
            got = linear_cross_entropy(x, w, target, reduction="none", chunk_size=chunk_size, backend="cute", **options)
            assert same_bits(got, want)
        ignored = target.clone()
        ignored[::3] = IGNORED
        got = linear_cross_entropy(x, w, ignored, reduction="none", backend="cute", **options)
        assert same_bits(got[ignored != IGNORED], want[ignored != IGNORED])


# --- the host ---


@in_every_way
def test_cuda_graph_of_forward_and_backward_with_new_data(schedule, chunk_size, request, states):
    if chunk_size is None:
        request.getfixturevalue("few_rows_counted")
    # at least two waves of tiles, so that wave_sync runs
    check_replays(states, *make(1100, 1024, 8000), schedule=schedule, chunk_size=chunk_size)


def test_cuda_graph_with_dw_in_forward(narrow, states):
    x, w, target = make(1100, 1024, 8000)  # two chunks of 96 tiles
    assert_forward_begins_dw(x, w, target)
    check_replays(states, x, w, target, schedule="recompute", grad=torch.tensor(0.37, device="cuda"))


@pytest.mark.parametrize("schedule", ["auto", "recompute"])
def test_cuda_graph_of_backward_alone(schedule):
    """Replays have equal results, though a first backward scales the gradients that forward has computed."""
    x, w, target = make(1100, 1024, 8000)
    grad, stream = torch.tensor(3.0, device="cuda"), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def gradients(loss):
        return torch.autograd.grad(loss, (x, w), grad, retain_graph=True)

    with torch.cuda.stream(stream):  # backward runs where forward did
        losses = [linear_cross_entropy(x, w, target, schedule=schedule) for _ in range(2)]
        want = gradients(losses[0])
        gradients(losses[0])  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = gradients(losses[1])
    for _ in range(2):
        graph.replay()
        assert_same_bits(got, want)


def check_replays(states, x, w, target, **kw):
    graph, static = captured(lambda: step(x, w, target, **kw))
    for seed, ignored in ((1, 0), (2, 2), (3, 1)):  # no row ignored, half, all but row 0
        new = make(*x.shape, w.shape[0], seed=seed, ignored=ignored)
        with torch.no_grad():
            for old, t in zip((x, w, target), new, strict=True):
                old.copy_(t)
            x[5] *= 300  # flagged rows
        graph.replay()
        replayed = [t.clone() for t in static]
        assert_same_bits(replayed, step(x, w, target, **kw))
    assert_nothing_is_left_counted(states)


def test_two_concurrent_streams(states):
    given = [make(1100, 1024, 8000, seed=seed) for seed in (0, 1)]
    want = [step(*inputs) for inputs in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(10):
        got = []
        for inputs, stream in zip(given, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(step(*inputs))
        torch.cuda.synchronize()
        for one, other in zip(got, want, strict=True):
            assert_same_bits(one, other)
    assert_nothing_is_left_counted(states)


def test_rows_wait_for_recomputed_tiles():
    """Few, deep tiles, all flagged: while they are recomputed most SMs are idle, and `lce_rows` must wait."""
    x, w, target = make(200, 8192, 1500, ignored=0, scale=40.0)
    want, _, _ = truth(x, w, target, {"reduction": "none"})
    with torch.no_grad():
        for _ in range(5):  # the first run compiles kernels
            torch.cuda._sleep(5_000_000)  # queues all launches before one runs
            loss = linear_cross_entropy(x, w, target, reduction="none", backend="cute")
            assert norm_error(loss, want) <= 1e-4


@pytest.fixture
def states(monkeypatch):
    """The RowStates of all later calls."""
    made, new = [], RowState.new
    monkeypatch.setattr(RowState, "new", lambda *args: made.append(new(*args)) or made[-1])
    return made


def assert_nothing_is_left_counted(states):
    torch.cuda.synchronize()
    assert states
    assert not any(state.memory[:NUM_TICKETS].any() for state in states if state.memory.is_cuda)  # meta: dry runs


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_device_other_than_the_current_one(schedule):
    case = make(1100, 512, 5000)
    x, w = (t.detach().to("cuda:1").requires_grad_() for t in case[:2])
    target = case[2].to("cuda:1")
    torch.cuda.synchronize("cuda:1")  # the copies are on its default stream
    with torch.cuda.stream(torch.cuda.Stream("cuda:1")):  # sets the current device too
        with torch.cuda.device(0):
            got = step(x, w, target, schedule=schedule)
    torch.cuda.synchronize("cuda:1")
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in got)
    assert_same_bits([t.cpu() for t in got], [t.cpu() for t in step(*case, schedule=schedule)])


@pytest.mark.parametrize("options", [{}, dict(reduction="none"), ALL], ids=["plain", "none", "smoothing"])
def test_compiled_by_inductor_equals_eager(options):
    pytest.importorskip("triton")
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, target: linear_cross_entropy(x * 2, w, target, backend="cute", **options), fullgraph=True
    )
    for m in (300, 700, 129):
        x, w, target = make(m, 256, 3000)
        results = []
        for f in (lambda x, w, t: linear_cross_entropy(x * 2, w, t, backend="cute", **options), compiled):
            loss = f(x, w, target)
            results.append([loss.detach(), *torch.autograd.grad(loss, [x, w], torch.full_like(loss, 0.5))])
        assert_same_bits(results[1], results[0])


# --- errors against fp64 ---


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", ["peaked", "large_mean", "outlier_channel"])
def test_gradients_are_as_accurate_as_pytorchs(kind, schedule):
    x, w, target = make(1024, 1024, 8000, scale=4.0 if kind == "peaked" else 1.0)
    with torch.no_grad():
        if kind == "large_mean":
            x += 4
        elif kind == "outlier_channel":
            x[:, ::97] *= 30
    _, *grads = step(x, w, target, schedule=schedule)
    loss = F.cross_entropy(F.linear(x, w).float(), target)
    theirs = torch.autograd.grad(loss, [x, w])
    for got, their, want in zip(grads, theirs, truth(x, w, target, {})[2], strict=True):
        assert norm_error(got, want) <= norm_error(their, want)


# --- sizes ---


def need(gigabytes):
    free, _ = torch.cuda.mem_get_info()
    if free < gigabytes * 2**30:
        pytest.skip(f"needs {gigabytes} GiB of free GPU memory, has {free / 2**30:.0f}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunk_with_more_than_2_to_the_31_logits(schedule):
    need(24)
    m, h, v = 17_024, 16, 128_256
    assert m * v > 2**31
    x, w, target = make(m, h, v, scale=2.0)
    loss, dx, dw = step(x, w, target, reduction="sum", schedule=schedule, chunk_size=m)
    # rows interact only in dw: check its ends, and a sum over all of it
    part = slice(m - 100, m)
    _, _, (want_dx, _) = truth(x[part], w, target[part], {"reduction": "sum"})
    assert norm_error(dx[part], want_dx) <= 2**-7
    small = step(x, w, target, reduction="sum", schedule="recompute", chunk_size=1024)
    assert same_bits(loss, small[0])
    assert norm_error(dw, small[2].double()) <= 2**-7
    assert norm_error(dx, small[1].double()) <= 2**-7


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weight_with_more_than_2_to_the_31_elements(schedule):
    need(40)
    m, h, v = 200, 8192, 270_336
    assert v * h > 2**31
    x, w, target = make(m, h, v)
    target[:50] = torch.arange(v - 50, v, device="cuda")
    _, dx, dw = step(x, w, target, reduction="sum", schedule=schedule)
    with torch.no_grad():
        live = target != IGNORED
        logits = torch.cat([x.float() @ part.float().T for part in w.split(8192)], 1)
        dlogits = logits.softmax(1)
        dlogits[live, target[live]] -= 1
        dlogits *= live[:, None]
        want_dx = sum(d @ part.float() for d, part in zip(dlogits.split(8192, 1), w.split(8192), strict=True))
        assert norm_error(dx, want_dx.double()) <= 2**-7
        for part in (slice(0, 3000), slice(v - 3000, v)):
            assert norm_error(dw[part], (dlogits[:, part].T @ x.float()).double()) <= 2**-7


def peak_above(step):
    """Peak bytes of a step after the first, above what is allocated before it."""
    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize(
    "m, h, v, dtype, options",
    [
        pytest.param(4096, 2048, 32_000, BF16, {}, id="plain"),
        pytest.param(3000, 512, 50_257, BF16, {}, id="odd"),
        pytest.param(4096, 1024, 16_384, BF16, dict(reduction="none", softcap=20.0), id="none"),
        pytest.param(3000, 1024, 16_384, torch.float32, {}, id="autocast"),
        pytest.param(4096, 256, 32_000, BF16, dict(backend="reference"), id="portable"),
    ],
)
def test_peak_is_within_memory_limit(m, h, v, dtype, options):
    """Limits from the smallest that a schedule accepts, or 6 % of the gradients, to the default's peak."""
    x, w, target = make(m, h, v, dtype)
    shape, gradients = (m,) if options.get("reduction") == "none" else (), x.nbytes + w.nbytes
    grad = torch.ones(shape, device="cuda")
    rounded = [t.detach().bfloat16() for t in (x, w)]
    true_loss, _, true_grads = truth(*rounded, target, {k: t for k, t in options.items() if k != "backend"}, grad)

    def run(limit=None):
        with torch.autocast("cuda", dtype=BF16, enabled=dtype != BF16):
            loss = linear_cross_entropy(x, w, target, memory_limit=limit, **{"backend": "cute"} | options)
        return [loss.detach(), *torch.autograd.grad(loss, [x, w], grad)] if loss.requires_grad else [loss]

    def least():
        with pytest.raises(ValueError, match="memory_limit is 0 bytes") as error:
            run(0)
        return int(re.search(r"at least (\d+)", str(error.value))[1])

    gc.collect()  # garbage of other tests, freed during a step, would be counted
    first = max(least(), gradients * 6 // 100)
    most = max(peak_above(run) - gradients, 2 * first)
    for i in range(5):
        limit = int(first * (most / first) ** (i / 4))
        assert peak_above(lambda limit=limit: run(limit)) <= limit + gradients
        loss, *grads = run(limit)
        assert norm_error(loss, true_loss) <= 1e-5
        assert all(norm_error(*both) <= 2**-7 for both in zip(grads, true_grads, strict=True))
    with torch.no_grad():
        first = least()
        assert peak_above(lambda: run(first)) <= first
