"""Linear cross entropy's rehearsal, which says what a first call has to compile: it asks for what the call asks for."""

import functools

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quackish import launch
from quackish.configs.lce_rows import LceSortProblem
from quackish.gpu import B200, H200
from quackish.ops.kernel_for import Kernel, request_for
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.ops.linear_cross_entropy import warm_up as preparing
from quackish.ops.linear_cross_entropy.checks import Inputs, Options
from quackish.ops.linear_cross_entropy.launches import LceKernels

CPU = torch.device("cpu")


class Recorder:
    """Kernels that do nothing, and what is asked for and launched."""

    def __init__(self):
        self.requests, self.launches = set(), []

    def kernel_for(self, name, problem, gpu):
        request = request_for(name, problem, gpu)
        self.requests.add(request)
        return Kernel(lambda *args: self.launches.append(name), request.config)


RECORDERS = []  # of calls that are under way


@pytest.fixture
def on(monkeypatch, run_on):
    """A GPU for CPU tensors, and what the operation asked `launch.prepare` for."""
    asked = []

    def set_up(gpu):
        run_on(lambda device: on_kernels.kernels_on(device, gpu, RECORDERS[-1].kernel_for))
        monkeypatch.setattr(on_kernels, "gpu_of", lambda index: gpu)
        monkeypatch.setattr(preparing, "_prepared", set())
        monkeypatch.setattr(preparing.launch, "prepare", asked.append)
        return asked

    return set_up


def prepare(x, w, target, kw, grad_weight_out=None, **how):
    options = dict(
        reduction="mean", ignore_index=-100, label_smoothing=0.0, softcap=None, z_loss=0.0, return_lse=False,
        schedule="auto", chunk_size=None, backend="auto", num_items=None,
    ) | {name: value for name, value in {**kw, **how}.items() if name not in ("linear_bias", "weight")}  # fmt: skip
    items, bias, weight = options.pop("num_items"), kw.get("linear_bias"), kw.get("weight")
    inputs = Inputs(x, w, bias, target, weight, items, grad_weight_out)
    preparing.prepare(inputs, public.make_plan(inputs, Options(**options), public.no_kernel_on))


def called(x, w, target, kw, **how):
    """What a call asks for, forward and backward."""
    RECORDERS.append(Recorder())
    loss = linear_cross_entropy(x, w, target, **kw, **how)
    if loss.requires_grad:
        loss.backward(torch.rand(loss.shape))
    recorder = RECORDERS.pop()
    assert len(recorder.launches) >= 4
    return recorder.requests


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rehearsal_asks_for_what_a_call_asks_for(dtype, name, reduction, on):
    asked = on(H200)
    for schedule in SCHEDULES:
        for m, h, v, chunk_size in ((300, 8, 700, 128), (40, 64, 1000, None)):
            for frozen in (False, True):
                x, w, target, kw = make(m, h, v, dtype, **OPTIONS[name])
                w = w.detach() if frozen else w
                how = dict(reduction=reduction, schedule=schedule, chunk_size=chunk_size)
                for given in ({}, {"grad_weight_out": torch.zeros(w.shape)}) if not frozen else ({},):
                    preparing._prepared.clear()  # two schedules may come to the same
                    prepare(x, w, target, kw, **how, **given)
                    assert set(asked[-1]) == called(x, w, target, kw, **how, **given)
                    asked.clear()


def test_of_the_loss_alone(on):
    asked = on(H200)
    x, w, target, kw = make(300, 64, 700, torch.bfloat16)
    with torch.no_grad():
        prepare(x, w, target, kw)
        assert set(asked[-1]) == called(x, w, target, kw)


def test_once_for_all_m(on):
    asked = on(H200)
    for m in (300, 200, 300):
        x, w, target, kw = make(m, 64, 700, torch.bfloat16)
        prepare(x, w, target, kw)
    assert len(asked) == 1
    with torch.no_grad():
        prepare(x, w, target, kw)
    prepare(x, w, target.int(), kw)
    prepare(x.half(), w.half(), target, kw)
    assert len(asked) == 4


def test_of_a_weight_gradient_that_forward_begins(on, narrow):
    asked = on(H200)
    x, w, target, kw = make(600, 512, 4000, torch.bfloat16)
    prepare(x, w, target, kw, schedule="recompute")
    launched = called(x, w, target, kw, schedule="recompute")
    assert any(isinstance(request.problem, LceSortProblem) for request in launched)
    assert set(asked[-1]) == launched


def test_once_for_all_batches_and_lengths(on):
    asked = on(H200)
    for batch, length in ((2, 100), (2, 101), (3, 50), (1, 7)):
        x, w, target, kw = make(batch * length, 64, 700, torch.bfloat16)
        prepare(x.detach().view(batch, length, 64).requires_grad_(), w, target.view(batch, length), kw)
    assert len(asked) == 1
    assert set(asked[0]) == called(x, w, target, kw)
    prepare(x.detach()[0].requires_grad_(), w, target[0], kw)  # no batch at all
    assert len(asked) == 1


def test_once_for_all_numbers(on):
    """But not for whether there is one."""
    asked = on(H200)
    x, w, target, kw = make(100, 64, 700, torch.bfloat16)
    for z_loss, softcap, ignore_index in ((0.0, 20.0, -100), (1e-4, 30.0, -1)):
        prepare(x, w, target, kw, z_loss=z_loss, softcap=softcap, ignore_index=ignore_index)
    assert len(asked) == 1
    prepare(x, w, target, kw)
    assert len(asked) == 2
    for num_items in (80, 90, torch.tensor(80)):
        prepare(x, w, target, kw, num_items=num_items)
    assert len(asked) == 3


def test_one_chunk_and_several(on):
    asked = on(H200)
    for m in (100, 128, 129, 1000):
        x, w, target, kw = make(m, 64, 700, torch.bfloat16, bias=True)
        prepare(x, w, target, kw, chunk_size=128)
        assert set(asked[-1]) == called(x, w, target, kw, chunk_size=128)
    assert len(asked) == 2


def test_e_in_one_buffer_and_in_two(on, limits):
    asked = on(H200)
    limits(SHARED_FROM=1 << 20)
    for m in (100, 600, 700):
        x, w, target, kw = make(m, 512, 1400, torch.bfloat16)
        prepare(x, w, target, kw)
        assert set(asked[-1]) == called(x, w, target, kw)
    assert len(asked) == 2
    assert set(asked[0]) != set(asked[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_start_anywhere(schedule, on):
    asked = on(H200)
    x, w, target, kw = make(100, 72, 700, torch.bfloat16)
    w = w.detach()[:, :64].requires_grad_()
    flat = x.detach().view(-1)
    shifted, far_apart = flat[1 : 1 + 99 * 64].view(99, 64), x.detach()[:99, 8:]
    odd, transposed = flat[: 99 * 65].view(99, 65)[:, :64], flat[: 99 * 64].view(64, 99).t()
    for given, n in ((far_apart, 1), (odd, 2), (shifted, 2), (transposed, 2), (odd.view(9, 11, 64), 2)):
        given = given.requires_grad_()
        prepare(given, w, target[:99].view(given.shape[:-1]), kw, schedule=schedule)
        assert len(asked) == n
    for given, requests in ((far_apart, asked[0]), (odd, asked[1]), (shifted, asked[1]), (transposed, asked[0])):
        assert set(requests) == called(given, w, target[:99], kw, schedule=schedule)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_chunks_stand_for_many(schedule, dtype, on, monkeypatch):
    on(H200)
    launches = []
    for m in (256, 128 * 40):
        preparing._prepared.clear()
        k = Recorder()
        kernels_on = functools.partial(on_kernels.kernels_on, CPU, None, k.kernel_for)
        monkeypatch.setattr(preparing, "kernels_on", lambda *device, kernel_for, made=kernels_on: made())
        x, w, target, kw = make(m, 8, 700, dtype, bias=True)
        prepare(x, w, target, kw, schedule=schedule, chunk_size=128)
        launches.append(len(k.launches))
    assert launches[0] == launches[1] > 0


@pytest.mark.parametrize(
    "m, v, dtype", [(3000, 6000, torch.float16), (600, 33_000, torch.bfloat16), (600, 33_000, torch.float16)], ids=str
)
def test_blocks_of_classes_are_those_of_all_rows(m, v, dtype, on):
    """How many there are, and how wide, depends on the rows."""
    asked = on(H200)
    x, w, target, kw = make(m, 8, v, dtype, bias=True)
    how = dict(schedule="recompute", chunk_size=128)
    prepare(x, w, target, kw, **how)
    assert set(asked[-1]) == called(x, w, target, kw, **how)


def test_what_is_remembered_has_an_end(on, monkeypatch):
    asked = on(H200)
    monkeypatch.setattr(preparing, "_MAX_PREPARED", 3)
    for v in range(500, 510):
        x, w, target, kw = make(20, 8, v, torch.bfloat16)
        prepare(x, w, target, kw)
        assert len(preparing._prepared) <= 3
    prepare(x, w, target, kw)
    assert len(asked) == 10


@pytest.mark.parametrize("name", ["all", "unsmoothed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rehearsal_takes_no_memory_and_sets_no_device(schedule, name, on, monkeypatch):
    """A default device is also what compiled code looks at, and may be left behind by threads that overlap."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            devices.update(t.device.type for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            return out

    asked, devices, defaults, rows = on(H200), set(), set(), LceKernels.rows

    def noted(*args, **kwargs):
        defaults.add(torch.get_default_device().type)
        return rows(*args, **kwargs)

    monkeypatch.setattr(LceKernels, "rows", noted)
    for chunk_size in (None, 128):
        x, w, target, kw = make(300, 64, 700, torch.bfloat16, **OPTIONS[name])
        with Watch():
            prepare(x, w, target, kw, schedule=schedule, chunk_size=chunk_size)
    assert asked
    assert (devices, defaults) == ({"meta"}, {"cpu"})


def test_nothing_around_cublas(on):
    asked = on(B200)
    x, w, target, kw = make(300, 64, 700, torch.bfloat16)
    prepare(x, w, target, kw)
    assert asked == []


def test_rehearsal_imports_nothing(on):
    """PyTorch imports 500 modules for some operations on meta tensors, 250 ms: none of these are used."""
    import subprocess
    import sys
    from pathlib import Path

    code = """
import sys
import pytest
sys.path.insert(0, "tests")
import conftest
import test_lce_prepare as t
patch = pytest.MonkeyPatch()
t.on.__wrapped__(patch, conftest.run_on.__wrapped__(patch))(t.H200)
before = set(sys.modules)
for schedule in t.SCHEDULES:
    x, w, target, kw = t.make(300, 64, 700, t.torch.bfloat16)
    t.prepare(x, w, target, kw, schedule=schedule)
print(len(set(sys.modules) - before))
"""
    cwd = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_first_call_finds_its_kernels(schedule, monkeypatch, tmp_path):
    """Compiled by other processes, loaded by this one, which compiles nothing."""
    from quackish.launch import compile as compiling

    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUACKISH_COMPILE_JOBS", "4")
    monkeypatch.setattr(compiling, "_ready", {})
    monkeypatch.setattr(public, "_plans", {})
    monkeypatch.setattr(preparing, "_prepared", set())
    on_kernels.kernels_of.cache_clear()
    alone = []
    monkeypatch.setattr(compiling, "compile_kernel", lambda *request: alone.append(request))
    before = vars(launch.counters).copy()
    x, w, target, kw = make(300, 64, 1000, torch.bfloat16, "cuda")
    linear_cross_entropy(x, w, target, schedule=schedule, **kw).backward()
    on_kernels.kernels_of.cache_clear()
    assert alone == []
    compiles, loads = (getattr(launch.counters, name) - before[name] for name in ("compiles", "disk_loads"))
    assert compiles == loads >= 8
