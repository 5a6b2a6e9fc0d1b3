"""Measuring one cell in this process: timing, truth, memory, failures, interruption."""

import math

import pytest
import torch

from quackish.bench import host
from quackish.bench.cells import A_LAUNCH, AGAIN, Cell, data_of
from quackish.bench.measure import Memory, Record, Run
from quackish.bench.table import BENCHES, ERRORS
from quackish.device import compile as compiling
from quackish.gpu import Roofs
from quackish.ops.attention import measure as measure_attention
from quackish.ops.attention import providers as attentions
from quackish.ops.linear_cross_entropy.measure import CONFIDENCE, NONE_IGNORED, Data, Truth, dlogits_of
from quackish.ops.linear_cross_entropy.tools import IGNORED
from quackish.ops.mlp import providers as mlps
from quackish.ops.rms_norm import measure as measure_rms_norm
from quackish.ops.rms_norm.providers import Provider, load
from quackish.testing.timing import Times, bursts, interleave, prepare, take_turns

CPU = torch.device("cpu")
LCE = BENCHES["linear_cross_entropy"]


@pytest.fixture(autouse=True)
def one_thread():
    """Many threads on a busy machine make small work very slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measure(
    op: str, shape: tuple[int, ...], direction: str, providers: dict[str, object], data: str = "normal", **options
) -> dict[str, Record]:
    """The last record of each provider. Providers that are strings are loaded by that name."""
    records: dict[str, Record] = {}
    cell = Cell(op, shape, "bfloat16", direction, data, ignored=options.pop("ignored", 0.0))

    def provider(name: str) -> object:
        found = providers.get(name, name)
        if isinstance(found, Exception):
            raise found
        return BENCHES[op].load(found) if isinstance(found, str) else found

    BENCHES[op].measure(cell, tuple(providers), Run(CPU, provider, records.__setitem__, **{"rounds": 2, **options}))
    return records


def test_a_cell_of_grouped_mlp_has_times_errors_and_the_roof():
    def off(x, w1, w2, scales, offs):
        return 1.5 * mlps.ours()(x, w1, w2, scales, offs)

    for direction, errors, roof in (("forward", 1, "two-gemms"), ("forward+backward", 5, "six-gemms")):
        records = measure(
            "grouped_mlp", (50, 64, 32, 4), direction, {"quackish": "quackish", "torch": "torch", "off": off}
        )
        assert records.keys() == {"quackish", "torch", "off", AGAIN, roof}
        for name in ("quackish", "torch"):
            found = [records[name][column] for column in ERRORS if column in records[name]]
            assert len(found) == errors
            assert max(found) < 0.01
        assert "wrong: err_y " in records["off"]["note"]
        assert all(found["roof_ms"] == records[roof]["median_ms"] for found in records.values())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_a_cell_of_attention_has_times_and_errors_of_all_gradients():
    """Every broadcast of the bias and a mask, also through FlexAttention's score_mod and BlockMask."""

    def off(query, key, value, attn_bias, attn_mask, is_causal):
        return 1.5 * attentions.ours()(query, key, value, attn_bias, attn_mask, is_causal)

    providers = {"quackish": "quackish", "torch-math": "torch-math", "off": off}
    of_keys = {"attn_bias": "B,1", "key_mask": True}
    for options in (of_keys, {"attn_bias": "1,1", "bias_dtype": "float32"}, {"attn_mask": "half"}):
        cell = dict(op="scaled_dot_product_attention", shape=(2, 2, 40, 16), data=data_of(options | {"causal": True}))
        records = measure(direction="forward+backward", providers=providers, **cell)
        assert records.keys() == {*providers, AGAIN}
        for name in ("quackish", "torch-math"):
            found = [records[name][column] for column in ERRORS if column in records[name]]
            assert len(found) == 5
            assert max(found) < 0.01
        assert "wrong: err_y 0.5" in records["off"]["note"]
        forward = {"quackish": "quackish", "flex": "flex"}
        forward |= {"flex-block-mask": "flex-block-mask"} if "mask" in str(options) else {}
        records = measure(direction="forward", providers=forward, **cell)
        assert all(records[name]["err_y"] < 0.01 for name in forward)


def test_the_computed_minimum_of_attention():
    """Bytes at 4 TB/s or FLOPs at 1 PFLOP/s, for tiles in which a key takes part."""
    args = measure_attention.make(Cell("", (2, 4, 1024, 64), "bfloat16", "", data_of({"attn_bias": "1,H"})), CPU)[0]
    tensor, bias = 2 * 4 * 1024 * 64 * 2, 4 * 1024 * 1024 * 2
    roofs = Roofs(4e12, 4e12, 1e15, "")
    us, note = measure_attention.minimum(args, False, roofs)
    assert us == pytest.approx(1e6 * (4 * tensor + bias) / 4e12)
    assert note == f"forward {us:.0f} us (memory)"
    matmul = 2 * 2 * 4 * 1024**2 * 64
    slow = Roofs(4e14, 4e14, 1e13, "")
    assert measure_attention.minimum(args, True, slow)[0] == pytest.approx(1e6 * 7 * matmul / 1e13)
    mask = torch.zeros(2, 1, 130, 130, dtype=torch.bool)
    mask[0, 0, 129, 0] = mask[0, 0, 0, 64] = True
    q = torch.zeros(2, 4, 130, 64)
    assert measure_attention.share_of_tiles(mask, False, q, q) == pytest.approx(2 / 18)
    assert measure_attention.share_of_tiles(mask, True, q, q) == pytest.approx(1 / 18)
    assert measure_attention.share_of_tiles(None, True, q, q) == pytest.approx(6 / 9)
    of_keys = mask[:, :, :1]  # one of two entries has a key, in the second of three tiles
    assert measure_attention.share_of_tiles(of_keys, True, q, q) == pytest.approx(2 / 18)


# Timing --------------------------------------------------------------------------------------------------------------


def test_works_are_timed_in_turns():
    order = []
    times = interleave({name: lambda name=name: order.append(name) for name in "ABC"}, CPU, rounds=2, block=2)
    assert "".join(order) == 3 * "AABBCC"  # the first round is discarded
    assert times.keys() == set("ABC")
    assert Times.of(list(map(float, range(11)))) == Times(median=5.0, p20=2.0, p80=8.0)


class Works:
    """Works that take the given seconds on a fake clock; 0 raises."""

    def __init__(self, **seconds: float):
        self.now, self.order = 0.0, []
        self.works = {name: lambda name=name: self._run(name, seconds[name]) for name in seconds}

    def _run(self, name: str, seconds: float) -> None:
        self.order.append(name)
        self.now += seconds
        1 / seconds


def test_slow_works_get_fewer_samples_and_failing_ones_are_dropped():
    made, records = Works(a=0.01, slow=1.0, bad=0), []

    def after(name, times):
        records.append(set(times))
        made.now += 100  # not timed

    how = dict(repeats=10, seconds=0.5, least=3, after=after, clock=lambda: made.now)
    times = take_turns(made.works, CPU, on_error=lambda name, error: records.append({name, type(error)}), **how)
    assert {name: made.order.count(name) for name in made.works} == {"a": 10, "slow": 3, "bad": 1}
    assert times["slow"].median == pytest.approx(1e6)
    assert {"bad", ZeroDivisionError} in records
    assert records[-1] == times.keys() == {"a", "slow"}
    with pytest.raises(ZeroDivisionError):
        take_turns({"bad": made.works["bad"]}, CPU)


def test_bursts_rotate():
    """Bursts have about the same length. Works that fail are reported and dropped."""
    made, failed = Works(a=0.1, slow=0.5, bad=0), []
    how = dict(count=3, seconds=0.4, clock=lambda: made.now)
    times = bursts(made.works, CPU, on_error=lambda name, error: failed.append((name, type(error))), **how)
    assert failed == [("bad", ZeroDivisionError)]
    assert {name: found.median for name, found in times.items()} == pytest.approx({"a": 1e5, "slow": 5e5})
    assert made.order.count("bad") == 1
    order = "".join(name[0] for name in made.order if name != "bad")
    assert sorted(order[:8]) == list("aaaassss")  # two rounds of two calls, to know how long they take
    for i in range(8, len(order), 5):  # then rounds of one burst each, the first discarded
        assert order[i : i + 5] in ("aaaas", "saaaa")
    assert len(order) == 8 + 4 * 5
    with pytest.raises(ZeroDivisionError):
        bursts({"bad": made.works["bad"]}, CPU)


def test_launch_times_are_those_of_the_slowest_launch():
    """By the median over steps."""
    now = [0.0]

    def launch_of(us):
        def function():
            now[0] += us / 1e6

        return compiling._counted(function, None, None, None)

    launches = [launch_of(us) for us in (3, 7, 5)]

    def step():
        now[0] += 1.0  # outside of the launches
        for one in launches:
            one()

    clock = dict(clock=lambda: now[0])
    assert host.launch_times(step, CPU, repeats=3, calls=4, **clock).median == pytest.approx(7)
    assert host.launch_times(lambda: None, CPU, repeats=3, **clock) is None


@pytest.mark.gpu
def test_work_is_a_graph_unless_capture_fails():
    device = torch.device("cuda", 0)
    x = torch.ones(1000, device=device)
    work = prepare(lambda: x.add_(1), device)
    assert work.is_graph
    before = x[0].item()
    work.run()
    assert x.eq(before + 1).all()

    def refuses():
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("not while capturing")
        return torch.ones(3, device="cuda")

    work = prepare(refuses, device)
    assert not work.is_graph
    assert work.run().eq(1).all()


# Data and truth ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elements", [48 * 7, 1 << 20], ids=["with a tail", "at once"])
def test_errors_of_norms(elements):
    data, provider = measure_rms_norm.Data.make(23, 48, torch.float32, CPU), load("quackish")
    y, rstd = provider.forward(data.x, data.weight)
    dx, dweight = provider.backward(data.dy, data.x, data.weight, rstd)
    assert measure_rms_norm.errors("forward", data, (y, rstd), elements)["err_y"] < 1e-6
    assert max(measure_rms_norm.errors("backward", data, (dx, dweight), elements).values()) < 1e-6
    bad = measure_rms_norm.errors("backward", data, (dx * 1.5, dweight * 0.5), elements)
    assert bad == pytest.approx({"err_dx": 0.5, "err_dweight": 0.5})
    assert math.isnan(measure_rms_norm.errors("backward", data, (dx * math.nan, dweight))["err_dx"])


@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_errors_of_losses(ignored):
    data = Data.make(23, 16, 50, "normal", ignored, CPU, torch.bfloat16)
    truth = Truth(data, rows=5, classes=7)
    x, w = (t.detach().double().requires_grad_() for t in (data.x, data.w))
    loss = torch.nn.functional.cross_entropy(x @ w.T, data.target)
    loss.backward()
    assert max(truth.errors(loss, x.grad, w.grad).values()) < 1e-12
    wrong = truth.errors(loss * 2, x.grad * 1.5, w.grad * 0.5)
    assert wrong == pytest.approx({"err_loss": 1.0, "err_dx": 0.5, "err_dweight": 0.5})
    assert math.isnan(truth.errors(loss, x.grad * math.nan, w.grad)["err_dx"])
    assert Truth(data, grad=False).errors(loss * 2, None, None) == pytest.approx({"err_loss": 1.0})
    # the dlogits of the bare GEMMs are those of the same loss
    dlogits = dlogits_of(data)
    dw = dlogits.double().T @ data.x.detach().double()
    assert float((dw - w.grad).norm() / w.grad.norm()) < 0.02
    assert dlogits[data.target == IGNORED].abs().sum() == 0


def test_confident_and_ignored_rows():
    data = Data.make(300, 512, 4000, "confident", 0.8, CPU, torch.bfloat16)
    logits = data.x.detach().float() @ data.w.detach().float().T
    p = torch.softmax(logits, 1).gather(1, data.all_targets[:, None]).squeeze(1)
    for i, wanted in enumerate(CONFIDENCE):
        assert float(1 - p[i::3].median()) == pytest.approx(1 - wanted, rel=0.5)
    assert [int((t == IGNORED).sum()) for t in (data.target, data.all_targets)] == [240, 0]


# A cell --------------------------------------------------------------------------------------------------------------


def test_a_cell_of_linear_cross_entropy_has_times_errors_and_the_gemms():
    providers = {name: name for name in ("quackish-chunked-8", "torch")}
    records = measure("linear_cross_entropy", (24, 32, 90), "forward+backward", providers)
    assert records.keys() == {"quackish-chunked-8", "torch", "three-gemms", "gemm-logits", "gemm-dx", "gemm-dw"}
    for name in ("quackish-chunked-8", "torch"):
        errors = {of: value for of, value in records[name].items() if of in ERRORS}
        assert max(errors.values()) < 0.01
        assert errors.keys() == {"err_loss", "err_dx", "err_dweight"}
    assert all(found["roof_ms"] == records["three-gemms"]["median_ms"] for found in records.values())
    loss = measure("linear_cross_entropy", (24, 32, 90), "forward", {"quackish": "quackish"})
    assert loss.keys() == {"quackish", AGAIN, "gemm-logits"}
    assert [name for name in loss["quackish"] if name in ERRORS] == ["err_loss"]


def test_cells_with_ignored_rows_host_time_and_steady_steps():
    records = measure("linear_cross_entropy", (24, 32, 90), "forward+backward", {"quackish": "quackish"}, ignored=0.8)
    assert records.keys() == {"quackish", AGAIN, NONE_IGNORED}
    assert records["quackish"]["roof_ms"] == records[NONE_IGNORED]["median_ms"]
    providers = {name: name for name in ("quackish", "torch")} | {"missing": ImportError("no module of that name")}
    host = measure("linear_cross_entropy", (8, 32, 90), "host", providers)
    assert [name for name, found in host.items() if "median_ms" in found] == ["quackish", "torch"]
    assert A_LAUNCH not in host  # nothing is launched on a CPU
    steady = measure("linear_cross_entropy", (8, 32, 90), "steady", providers)
    timed = {name for name, found in steady.items() if "median_ms" in found}
    assert timed == {"quackish", "torch", AGAIN, "three-gemms"}
    assert steady["torch"]["roof_ms"] == steady["three-gemms"]["median_ms"]
    assert steady["missing"]["status"] == "ImportError: no module of that name"


@pytest.mark.parametrize("factor, note", [(1.09, ""), (1.11, "wrong: err_y 0.11"), (math.nan, "wrong: err_y nan")])
def test_wrong_results_have_a_note(factor, note):
    def forward(x, weight):
        y, rstd = load("torch").forward(x.double(), weight.double())
        return y * factor, rstd

    records = measure("rms_norm", (8, 32), "forward", {"own": Provider(forward, None)})
    assert records["own"]["note"] == note


class Allocator:
    """Replaces torch.cuda's statistics."""

    def __init__(self, monkeypatch):
        self.now = self.highest = 0
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: self.now)
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.highest)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: self.allocate(0))

    def allocate(self, size: int) -> None:
        self.now += size
        self.highest = max(self.highest, self.now) if size else self.now


def test_standing_memory_is_charged_to_all_providers_of_its_library(monkeypatch):
    allocator, memory, kept = Allocator(monkeypatch), Memory(torch.device("cuda")), set()

    def provider(library, tickets, needs, fails=False):
        def call(x, w, target):
            if library not in kept:
                kept.add(library)
                allocator.allocate(tickets)
                allocator.allocate(7)  # only in the first call, like a compilation
                allocator.allocate(-7)
            allocator.allocate(needs)
            allocator.allocate(-needs)
            if fails:
                raise RuntimeError("no")
            return LCE.load("torch")(x, w, target)

        return call

    providers = {
        "one": provider("one", 40, 10),
        "one-more": provider("one", 40, 3),
        "two-broken": provider("two", 100, 1, fails=True),
        "two": provider("two", 100, 2),
        "three": provider("three", 0, 5),
    }
    for v in (90, 91):  # also if the first call was in another cell
        records = measure("linear_cross_entropy", (24, 32, v), "forward+backward", providers, memory=memory)
        found = {name: (1e6 * f["peak_mb"], 1e6 * f["standing_mb"]) for name, f in records.items() if "peak_mb" in f}
        assert found == {"one": (50, 40), "one-more": (43, 40), "two": (102, 100), "three": (5, 0)}


@pytest.mark.gpu
def test_the_peak_does_not_depend_on_earlier_measurements():
    device = torch.device("cuda", 0)
    memory, found = Memory(device), []
    for providers in (("quackish-chunked", "torch"), ("quackish-chunked",), ("torch", "quackish-chunked")):
        records = {}
        run = Run(device, LCE.load, records.__setitem__, rounds=1, memory=memory)
        LCE.measure(Cell("linear_cross_entropy", (512, 512, 4096), "bfloat16", "forward+backward"), providers, run)
        found.append({name: 1e6 * records[name]["peak_mb"] for name in providers})
    assert found[0]["quackish-chunked"] == found[1]["quackish-chunked"] == found[2]["quackish-chunked"]
    gradients = 2 * (512 + 4096) * 512
    assert gradients < found[0]["torch"] < gradients + 20e6  # logits; a cuBLAS workspace would add 33 MB
