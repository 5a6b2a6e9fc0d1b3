"""Small steps of linear cross entropy, replayed: the launches of a call that is not, with the same arguments."""

import functools
import itertools

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make, run

import quackish
from quackish import launch
from quackish.configs.gemm import GemmConfig
from quackish.gpu import B200, H200
from quackish.launch import compile as compiling
from quackish.ops import linear_cross_entropy as public
from quackish.ops import linear_cross_entropy_autograd as on_kernels
from quackish.ops import linear_cross_entropy_cublas as cublas
from quackish.ops import linear_cross_entropy_e as of_e
from quackish.ops import linear_cross_entropy_replay as replay
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.ops.linear_cross_entropy_cublas import CublasGemms
from quackish.ops.linear_cross_entropy_gemms import GemmLaunches
from quackish.ops.linear_cross_entropy_kernels import LceKernels

CPU = torch.device("cpu")
ADDRESSES = 1 << 32  # no size or stride here is as large


@pytest.fixture
def launched(monkeypatch):
    """What kernels are given, in order; nothing is computed. Calls are recorded at once."""
    seen = []

    def get(*request):
        recording = compiling._recording.get()
        if recording is not None:
            return recording.kernel(launch.Request(*request))
        return lambda *args: seen.append((launch.Request(*request), args))

    monkeypatch.setattr(launch, "get", get)
    monkeypatch.setattr(public, "no_kernel_on", lambda device: "")
    monkeypatch.setattr(public, "_plans", {})
    monkeypatch.setattr(replay, "RECORDED_AFTER", 0)
    use(LceKernels(CPU, GemmLaunches(CPU, H200)), monkeypatch)
    return seen


def use(k, monkeypatch):
    monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)
    return k


@pytest.fixture
def kept(monkeypatch):
    """All storages that are allocated, which are not freed: no two tensors get one address."""
    storages = []

    def keeping(allocate):
        @functools.wraps(allocate)
        def allocated(*args, **kwargs):
            t = allocate(*args, **kwargs)
            if t.device.type == "cpu":
                storages.append(t.untyped_storage())
            return t

        return allocated

    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, keeping(getattr(torch.Tensor, name)))
    return storages


def flat(args):
    return [leaf for arg in args for leaf in (arg if isinstance(arg, tuple) else (arg,))]


def same_launches(direct, replayed, storages, inputs):
    """Kernels and numbers are the same, inputs stay where they are, and what was allocated lies elsewhere as it did:
    each tensor in one piece, and no two over each other."""
    assert [request for request, _ in direct] == [request for request, _ in replayed]
    starts, kept = {}, {storage.data_ptr(): storage.nbytes() for storage in storages}
    given = {t.data_ptr() for t in inputs}
    for (request, old), (_, new) in zip(direct, replayed, strict=True):
        assert [type(arg) for arg in old] == [type(arg) for arg in new]
        for a, b in zip(flat(old), flat(new), strict=True):
            assert type(a) is type(b), request
            if not isinstance(a, int) or a < ADDRESSES or a in given:
                assert a == b, request
                continue
            start = max((at for at, size in kept.items() if at <= a < at + size), default=None)
            assert start is not None, request
            assert starts.setdefault(start, b - (a - start)) == b - (a - start), request
    ranges = sorted((new, new + kept[old]) for old, new in starts.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(any(at <= start and end <= at + size for at, size in kept.items()) for start, end in ranges)


def programs():
    return [one for one in on_kernels.kernels_of(CPU).programs.values() if isinstance(one, replay.Program)]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("e_in_two", [False, True])
def test_the_same_launches(name, reduction, e_in_two, launched, kept, monkeypatch):
    if e_in_two:
        monkeypatch.setattr(of_e, "SHARED_FROM", 0)
    replayed = 0
    for schedule, (m, h, v, chunk_size) in itertools.product(SCHEDULES, ((300, 8, 704, 128), (40, 64, 1000, None))):
        for how in (dict(), dict(grad_weight_out=True), dict(return_lse=True), dict(grad=False), dict(frozen=True)):
            x, w, target, kw = make(m, h, v, torch.bfloat16, **OPTIONS[name], reduction=reduction)
            kw |= {"weight": kw["weight"].float()} if "weight" in kw else {}
            w.requires_grad_("frozen" not in how)
            kw["grad_weight_out"] = torch.zeros(w.shape) if "grad_weight_out" in how else None
            kw["return_lse"] = "return_lse" in how
            calls = []
            for _ in range(2):
                launched.clear()
                with torch.set_grad_enabled("grad" not in how):
                    linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=chunk_size, backend="cute", **kw)
                calls.append(list(launched))
            tensors = [x, w, target, *(t for t in (kw.get("linear_bias"), kw.get("weight")) if t is not None)]
            if "smoothing" not in name and name != "all":  # whose sum of weights is allocated where nobody looks
                same_launches(*calls, kept, tensors)
            else:
                assert [request for request, _ in calls[0]] == [request for request, _ in calls[1]]
        replayed += len(programs())
    assert replayed > 0


def test_recorded_after_several_calls(launched, monkeypatch):
    monkeypatch.setattr(replay, "RECORDED_AFTER", 3)
    forward, worked_out = on_kernels.Plan.forward, []
    monkeypatch.setattr(on_kernels.Plan, "forward", lambda *args: worked_out.append(args) or forward(*args))
    x, w, target, _ = make(40, 64, 1000, torch.bfloat16)
    counts = []
    for _ in range(6):
        linear_cross_entropy(x, w, target, backend="cute")
        counts.append(len(worked_out))
    assert counts == [1, 2, 3, 5, 5, 5]  # the fourth call works it out and is recorded
    linear_cross_entropy(x[:39], w, target[:39], backend="cute")
    assert len(worked_out) == 6


def test_programs_are_forgotten_now_and_then(launched, monkeypatch):
    monkeypatch.setattr(replay, "_MAX_PROGRAMS", 3)
    for m in range(30, 34):
        x, w, target, _ = make(m, 64, 1000, torch.bfloat16)
        for _ in range(3):
            linear_cross_entropy(x, w, target, backend="cute")
        assert len(programs()) == (m - 30) % 3 + 1


@pytest.mark.parametrize(
    "unusual",
    ["num_items", "unaligned", "scratch", "torch computes", "large ignore_index", "cuBLAS"],
)
def test_what_is_not_replayed(unusual, launched, monkeypatch):
    x, w, target, kw = make(40, 64, 1000, torch.bfloat16)
    if unusual == "num_items":
        kw["num_items"] = 7
    elif unusual == "unaligned":
        x = torch.randn(40, 65).bfloat16()[:, 1:].requires_grad_()
    elif unusual == "scratch":
        monkeypatch.setattr(replay, "MOST_BYTES", 1 << 20)
    elif unusual == "torch computes":
        x, w, target, kw = make(300, 64, 1000, torch.bfloat16, schedule="chunked", chunk_size=128)  # dw from fp32
    elif unusual == "large ignore_index":
        kw["ignore_index"] = 1 << 50
    else:
        for name in ("mm", "addmm"):
            monkeypatch.setattr(cublas, name, lambda a, b, out: None)
        use(LceKernels(CPU, CublasGemms(CPU, B200)), monkeypatch)
    counts = []
    for _ in range(3):
        launched.clear()
        linear_cross_entropy(x, w, target, backend="cute", **kw)
        counts.append(len(launched))
    assert len(set(counts)) == 1
    assert not [one for one in (on_kernels.kernels_of(CPU).programs or {}).values() if isinstance(one, replay.Program)]


def test_another_config_is_another_program(launched):
    x, w, target, _ = make(40, 64, 1000, torch.bfloat16)

    def groups():
        launched.clear()
        linear_cross_entropy(x, w, target, backend="cute")
        return [
            r.config.group for r, _ in launched if isinstance(r.config, GemmConfig) and r.problem.epilogue == "store"
        ]

    usual = groups()
    assert groups() == usual
    with quackish.config(lce_dw=dict(group=3)):
        for _ in range(3):
            assert set(groups()) == {3}
        assert programs()
    assert groups() == usual


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorded_at_once(monkeypatch):
    monkeypatch.setattr(replay, "RECORDED_AFTER", 0)
    on_kernels.kernels_of.cache_clear()
    yield
    on_kernels.kernels_of.cache_clear()


def replayed_on_gpu():
    k = on_kernels.kernels_of(torch.device("cuda", torch.cuda.current_device()))
    return [one for one in k.programs.values() if isinstance(one, replay.Program)]


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("m, h, v", [(300, 64, 1000), (1, 8, 2), (700, 512, 3000)], ids=str)
def test_the_same_bits(m, h, v, name, reduction, recorded_at_once):
    """The first call is not replayed, the others are: with and without a gradient at lse, and without grad."""
    for schedule in SCHEDULES:
        x, w, target, kw = make(m, h, v, torch.bfloat16, "cuda", **OPTIONS[name], reduction=reduction)
        how = dict(backend="cute", schedule=schedule)
        grad_lse = torch.randn(m, device="cuda")
        for incoming in (None, grad_lse):
            first, *others = (run(x, w, target, kw, None, incoming, **how) for _ in range(4))
            for other in others:
                for old, new in zip((*first[:2], *first[2]), (*other[:2], *other[2]), strict=True):
                    assert torch.equal(old, new)
        with torch.no_grad():
            assert all(torch.equal(linear_cross_entropy(x, w, target, **kw, **how), first[0]) for _ in range(3))
    assert replayed_on_gpu()


@pytest.mark.gpu
def test_steps_side_by_side(recorded_at_once):
    """Each has its own memory: on two streams, and forwards before any backward, each of which runs twice."""
    data = [make(500, 256, 2000, torch.bfloat16, "cuda", seed=seed) for seed in range(4)]
    want = [run(x, w, target, kw, backend="cute") for x, w, target, kw in data]  # the first is not replayed
    assert len(replayed_on_gpu()) == 1
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i, (x, w, target, kw) in enumerate(data * 5):
        streams[i % 2].wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(linear_cross_entropy(x, w, target, backend="cute", **kw))
    for _ in range(2):
        for i, loss in enumerate(outputs):
            (x, w, _, _), (want_loss, _, want_grads) = data[i % 4], want[i % 4]
            with torch.cuda.stream(streams[i % 2]):
                dx, dw = torch.autograd.grad(loss, [x, w], retain_graph=True)
                assert torch.equal(loss, want_loss)
                assert torch.equal(dx, want_grads[0])
                assert torch.equal(dw, want_grads[1])


@pytest.mark.gpu
def test_a_graph_is_not_a_replay(recorded_at_once):
    x, w, target, _ = make(300, 64, 1000, torch.bfloat16, "cuda")
    want = run(x, w, target, {}, backend="cute")
    run(x, w, target, {}, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = linear_cross_entropy(x, w, target, backend="cute")
        dx, dw = torch.autograd.grad(loss, [x, w])
    for _ in range(2):
        for t in (loss, dx, dw):
            t.detach().fill_(float("nan"))
        graph.replay()
        run(x, w, target, {}, backend="cute")
        assert torch.equal(loss, want[0])
        assert torch.equal(dx, want[2][0])
        assert torch.equal(dw, want[2][1])
