"""Small steps of linear cross entropy, replayed: the launches of a call that is not, with the same arguments."""

import functools
import itertools
import random

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make, parameters, run

import quackish
from quackish import launch
from quackish.configs import linear_cross_entropy as configs
from quackish.configs.gemm import GemmConfig
from quackish.gpu import B200, H200
from quackish.launch import compile as compiling
from quackish.ops import linear_cross_entropy as public
from quackish.ops import linear_cross_entropy_autograd as on_kernels
from quackish.ops import linear_cross_entropy_cublas as cublas
from quackish.ops import linear_cross_entropy_replay as replay
from quackish.ops import linear_cross_entropy_schedules as schedules
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.ops.linear_cross_entropy_cublas import CublasGemms
from quackish.ops.linear_cross_entropy_gemms import GemmLaunches
from quackish.ops.linear_cross_entropy_kernels import LceKernels

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
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
    use(on_cpu(), monkeypatch)
    return seen


def on_cpu(replays=True):
    k = LceKernels(CPU, GemmLaunches(CPU, H200))
    if not replays:
        k.programs = None
    return k


def use(k, monkeypatch):
    monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)


def programs():
    k = on_kernels.kernels_of(torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else CPU)
    return [one for one in (k.programs or {}).values() if isinstance(one, replay.Program)]


# The same launches ---------------------------------------------------------------------------------------------------


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

    for name in ("new_empty", "new_empty_strided", "new_zeros"):
        monkeypatch.setattr(torch.Tensor, name, keeping(getattr(torch.Tensor, name)))
    return storages


class Step:
    """A forward and backward: what was launched, where the inputs of kernels lay, and where the results do."""

    def __init__(self, k, x, w, target, kw, launched, monkeypatch):
        calls, prepare = [], on_kernels.Plan.call
        use(k, monkeypatch)
        monkeypatch.setattr(on_kernels.Plan, "call", lambda *args: calls.append(prepare(*args)) or calls[-1])
        launched.clear()
        out = linear_cross_entropy(x, w, target, backend="cute", **kw)
        loss, *lse = out if kw["return_lse"] else (out,)
        outputs = [loss, loss, *lse]  # the second time from what forward kept
        results, arrive = [loss, *lse], [torch.ones_like(t) for t in outputs]
        if loss.requires_grad:
            wanted = [t for t in parameters(x, w, kw) if t.requires_grad and not (t is w and "grad_weight_out" in kw)]
            for output, grad in zip(outputs, arrive, strict=True):
                results += torch.autograd.grad(output, wanted, grad, retain_graph=True)
        monkeypatch.setattr(on_kernels.Plan, "call", prepare)
        self.launches, self.results, self.alive = list(launched), results, (calls, arrive)
        self.inputs = {}  # address -> field of a Call
        for call in calls:
            self.inputs |= {t.data_ptr(): name for name, t in call._asdict().items() if isinstance(t, torch.Tensor)}


def flat(args):
    return [leaf for arg in args for leaf in (arg if isinstance(arg, tuple) else (arg,))]


def check_the_same(direct, replayed, storages):
    """Kernels and numbers are the same, inputs stay inputs, and what was allocated lies elsewhere as it did: each
    tensor in one piece, aligned, and no two over each other. Results are what kernels wrote as results."""
    assert [request for request, _ in direct.launches] == [request for request, _ in replayed.launches]
    kept = {storage.data_ptr(): storage.nbytes() for storage in storages}
    starts = {}  # where a storage was -> where it is

    def moved(a, b, where):
        start = max((at for at, size in kept.items() if at <= a < at + size), default=None)
        if start is not None:  # else torch made it: what arrives in backward
            assert starts.setdefault(start, b - (a - start)) == b - (a - start), where

    for (request, old), (_, new) in zip(direct.launches, replayed.launches, strict=True):
        assert [type(arg) for arg in old] == [type(arg) for arg in new]
        for a, b in zip(flat(old), flat(new), strict=True):
            assert type(a) is type(b), request
            if not isinstance(a, int) or a < ADDRESSES:
                assert a == b, request
            elif a in direct.inputs:
                assert direct.inputs[a] == replayed.inputs[b], request
            else:
                moved(a, b, request)
    for old, new in zip(direct.results, replayed.results, strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
        moved(old.data_ptr(), new.data_ptr(), "results")
    assert all(new % 64 == 0 for new in starts.values())
    ranges = sorted((new, new + kept[old]) for old, new in starts.items())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))
    assert all(any(at <= start and end <= at + size for at, size in kept.items()) for start, end in ranges)


KINDS = dict(
    schedule=SCHEDULES,
    chunk_size=[None, 128],
    reduction=["mean", "none"],
    return_lse=[False, True],
    target=[torch.int32, torch.int64],
    bias=[None, BF16, FP32],
    weighted=[False, True],
    label_smoothing=[0.0, 0.1],
    softcap=[None, 3.0],
    z_loss=[0.0, 0.01],
    ignore_index=[-100, -1],
    x=["plain", "padded", "one row"],
    h=[128, 512],
    v=[704, 640],
    dtype=[BF16, FP16],
)
GRADS = ["both", "x", "w", "none", "buffer", "16-bit buffer"]


def of_kind(k, grad):
    m, h, v, dtype = 1 if k["x"] == "one row" else 60, k["h"], k["v"], k["dtype"]
    x = torch.randn(m, h + 8 * (k["x"] == "padded")).to(dtype)[:, :h].requires_grad_(grad not in ("w", "none"))
    w = torch.randn(v, h).to(dtype).requires_grad_(grad not in ("x", "none"))
    not_options = "target", "bias", "weighted", "x", "h", "v", "dtype"
    kw = {name: value for name, value in k.items() if name not in not_options}
    if k["bias"] is not None:
        bias = torch.randn(v).to(dtype if k["bias"] is BF16 else FP32)
        kw["linear_bias"] = bias.requires_grad_(grad in ("both", "buffer"))
    if k["weighted"]:
        kw["weight"] = torch.rand(v)
    if "buffer" in grad:
        kw["grad_weight_out"] = torch.zeros(w.shape, dtype=FP32 if grad == "buffer" else dtype)
    return x, w, torch.zeros(m, dtype=k["target"]), kw


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_launches(seed, begun, launched, kept, monkeypatch, request):
    """Of calls of many kinds that meet the same programs, and differ from each other in a few things each."""
    if begun:  # "recompute" of small shapes begins the weight's gradient in forward too
        request.getfixturevalue("narrow")
    direct, replaying = on_cpu(replays=False), on_cpu()
    rng = random.Random(seed)
    kind = {name: rng.choice(values) for name, values in KINDS.items()}
    for _ in range(30):
        for name in rng.sample(list(KINDS), 2):
            kind[name] = rng.choice(KINDS[name])
        for grad in rng.sample(GRADS, len(GRADS)):
            x, w, target, kw = of_kind(kind, grad)
            kept.clear()
            want = Step(direct, x, w, target, kw, launched, monkeypatch)
            for _ in range(2):
                check_the_same(want, Step(replaying, x, w, target, kw, launched, monkeypatch), kept)
    assert len(programs()) > 20


@pytest.mark.parametrize(
    "how, grads",
    [
        (dict(schedule="chunked"), ["both", "x", "w", "none"]),
        # works in the weight's gradient only where one is to be returned
        (dict(schedule="recompute", chunk_size=128, h=512), ["both", "16-bit buffer"]),
    ],
)
def test_other_gradients_are_another_kind(how, grads, launched, kept, monkeypatch):
    direct, replaying = on_cpu(replays=False), on_cpu()
    for grad in grads * 3:
        x, w, target, kw = of_kind({name: values[0] for name, values in KINDS.items()} | how, grad)
        kept.clear()
        want = Step(direct, x, w, target, kw, launched, monkeypatch)
        check_the_same(want, Step(replaying, x, w, target, kw, launched, monkeypatch), kept)
    assert len(programs()) == len(grads)


@pytest.mark.parametrize("name", KINDS)
def test_another_value_of_one_option_is_another_kind(name, launched, kept, monkeypatch):
    direct, replaying = on_cpu(replays=False), on_cpu()
    usual = {name: values[0] for name, values in KINDS.items()}
    for value in KINDS[name] * 2:
        x, w, target, kw = of_kind(usual | {name: value}, "both")
        kept.clear()
        want = Step(direct, x, w, target, kw, launched, monkeypatch)
        check_the_same(want, Step(replaying, x, w, target, kw, launched, monkeypatch), kept)


def test_recorded_after_several_calls(launched, monkeypatch):
    monkeypatch.setattr(replay, "RECORDED_AFTER", 3)
    forward, worked_out = on_kernels.Plan.forward, []
    monkeypatch.setattr(on_kernels.Plan, "forward", lambda *args: worked_out.append(args) or forward(*args))
    x, w, target, _ = make(40, 64, 1000, BF16)
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
        x, w, target, _ = make(m, 64, 1000, BF16)
        for _ in range(3):
            linear_cross_entropy(x, w, target, backend="cute")
        assert len(programs()) == (m - 30) % 3 + 1


@pytest.mark.parametrize(
    "unusual",
    ["num_items", "unaligned", "much scratch", "chunks", "odd classes", "ignore_index", "stride", "begun", "cuBLAS"],
)
def test_what_is_not_replayed(unusual, launched, narrow, monkeypatch):
    m, h, v, kw = 40, 64, 1000, {}
    if unusual == "chunks":
        m, kw["chunk_size"] = 300, 128
    elif unusual == "odd classes":
        v, kw["schedule"] = 1001, "stored"  # E is a part of what is allocated
    elif unusual == "begun":
        m, h, v, kw["schedule"] = 130, 256, 2000, "recompute"
        assert configs.first_classes(m, v, h, 2) is not None
    elif unusual == "num_items":
        kw["num_items"] = 7
    elif unusual == "ignore_index":
        kw["ignore_index"] = 1 << 50
    elif unusual == "much scratch":
        monkeypatch.setattr(replay, "MOST_BYTES", 1 << 20)
    x, w, target, _ = make(m, h, v, BF16)
    w.requires_grad_(unusual != "chunks")
    if unusual == "unaligned":
        x = torch.randn(m, h + 1).bfloat16()[:, 1:].requires_grad_()
    elif unusual == "stride":
        x, target = x.detach()[:1].as_strided((1, h), (1 << 49, 1)).requires_grad_(), target[:1]
    elif unusual == "cuBLAS":
        for name in ("mm", "addmm"):
            monkeypatch.setattr(cublas, name, lambda a, b, out: None)
        use(LceKernels(CPU, CublasGemms(CPU, B200)), monkeypatch)
    counts = []
    for _ in range(3):
        launched.clear()
        linear_cross_entropy(x, w, target, backend="cute", **kw)
        counts.append(len(launched))
    assert len(set(counts)) == 1
    assert not programs()


@pytest.mark.parametrize(
    "does",
    [
        lambda k, call: torch.zeros_like(call.x),
        lambda k, call: call.x.__setitem__(0, 0),
        lambda k, call: call.x.split(1),
        lambda k, call: call.x.data,
        lambda k, call: call.x.zero_(),
        lambda k, call: k.scale(call.x, torch.ones(1)),  # an address that nobody says is to be another
        lambda k, call: launch.get("a kernel", None, None, None)(call.x, 1),
    ],
)
def test_more_than_launches_is_not_replayed(does, launched, monkeypatch):
    """Whatever else a schedule might do."""
    begin = schedules.begin
    monkeypatch.setattr(schedules, "begin", lambda k, call: (does(k, call), begin(k, call))[1])
    x, w, target, _ = make(40, 64, 1000, BF16)
    for _ in range(3):
        with torch.no_grad():
            linear_cross_entropy(x, w, target, backend="cute")
    assert not programs()


def test_recorded_where_torch_functions_are_disabled(launched):
    """As in the methods of a tensor subclass, and in a backward that they start."""
    x, w, target, _ = make(40, 64, 1000, BF16)
    for _ in range(3):
        with torch._C.DisableTorchFunctionSubclass():
            linear_cross_entropy(x, w, target, backend="cute")
    assert programs()


def test_a_recording_that_fails_fails_once(launched, monkeypatch):
    def fails(*args):
        raise RuntimeError("by the test")

    monkeypatch.setattr(replay, "_recorded", fails)
    x, w, target, _ = make(40, 64, 1000, BF16)
    with pytest.raises(RuntimeError, match="by the test"):
        linear_cross_entropy(x, w, target, backend="cute")
    linear_cross_entropy(x, w, target, backend="cute")


def test_another_config_is_another_program(launched):
    x, w, target, _ = make(40, 64, 1000, BF16)

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
def kernels(monkeypatch):
    """Those that replay from the second call on, and those that never do."""
    monkeypatch.setattr(replay, "RECORDED_AFTER", 0)
    device = torch.device("cuda", torch.cuda.current_device())
    replaying, direct = LceKernels(device), LceKernels(device)
    direct.programs = None
    use(replaying, monkeypatch)
    return replaying, direct


@pytest.mark.gpu
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("m, h, v", [(300, 64, 1000), (1, 8, 2), (700, 512, 3000)], ids=str)
def test_the_same_bits(m, h, v, name, reduction, kernels, monkeypatch):
    """With and without a gradient at lse, and without grad."""
    replaying, direct = kernels
    x, w, target, kw = make(m, h, v, BF16, "cuda", **OPTIONS[name], reduction=reduction)
    grad_lse = torch.randn(m, device="cuda")

    def results(incoming, **how):
        loss, lse, grads = run(x, w, target, kw, None, incoming, **how)
        with torch.no_grad():
            return [loss, lse, *grads, linear_cross_entropy(x, w, target, **kw, **how)]

    for schedule, incoming in itertools.product(SCHEDULES, (None, grad_lse)):
        use(direct, monkeypatch)
        want = results(incoming, backend="cute", schedule=schedule)
        use(replaying, monkeypatch)
        for _ in range(3):
            got = results(incoming, backend="cute", schedule=schedule)
            assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert programs()


@pytest.mark.gpu
def test_steps_side_by_side(kernels, monkeypatch):
    """Each has its own memory: on two streams, and forwards before any backward, each of which runs twice."""
    replaying, direct = kernels
    data = [make(500, 256, 2000, BF16, "cuda", seed=seed) for seed in range(4)]
    use(direct, monkeypatch)
    want = [run(x, w, target, kw, backend="cute") for x, w, target, kw in data]
    use(replaying, monkeypatch)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs = []
    for i, (x, w, target, kw) in enumerate(data * 5):
        streams[i % 2].wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(streams[i % 2]):
            outputs.append(linear_cross_entropy(x, w, target, backend="cute", **kw))
    assert len(programs()) == 1
    for _ in range(2):
        for i, loss in enumerate(outputs):
            (x, w, _, _), (want_loss, _, want_grads) = data[i % 4], want[i % 4]
            with torch.cuda.stream(streams[i % 2]):
                dx, dw = torch.autograd.grad(loss, [x, w], retain_graph=True)
                assert torch.equal(loss, want_loss)
                assert torch.equal(dx, want_grads[0])
                assert torch.equal(dw, want_grads[1])


@pytest.mark.gpu
def test_a_graph_holds_no_replay(kernels, monkeypatch):
    """Its launches share no tickets, as it may run beside others."""
    x, w, target, _ = make(300, 64, 1000, BF16, "cuda")
    want = run(x, w, target, {}, backend="cute")
    run(x, w, target, {}, backend="cute")
    assert programs()

    def replayed(*args):
        raise AssertionError("replayed")

    graph = torch.cuda.CUDAGraph()
    with monkeypatch.context() as patch, torch.cuda.graph(graph):
        patch.setattr(replay.Program, "run", replayed)
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
