"""Linear cross entropy's rehearsal, which says what a first call has to compile: it asks for what the call asks for."""

import pytest
import torch
from lce_cases import OPTIONS, REDUCTIONS, SCHEDULES, make

from quackish import launch
from quackish.gpu import B200, H200
from quackish.ops import linear_cross_entropy as public
from quackish.ops import linear_cross_entropy_autograd as on_kernels
from quackish.ops import linear_cross_entropy_cublas as cublas
from quackish.ops import linear_cross_entropy_gemms as gemms
from quackish.ops import linear_cross_entropy_kernels as launches
from quackish.ops import linear_cross_entropy_prepare as preparing
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.ops.linear_cross_entropy_kernels import LceKernels

CPU = torch.device("cpu")


@pytest.fixture
def on(monkeypatch):
    """A GPU for CPU tensors, and what the operation asked `launch.prepare` for."""
    asked = []

    def set_up(gpu):
        for module in (gemms, cublas, launches):
            monkeypatch.setattr(module, "gpu_of", lambda index: gpu)
        monkeypatch.setattr(public, "no_kernel_on", lambda device: "")
        monkeypatch.setattr(public, "_plans", {})
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
    plan = public._make_plan(x, w, target, bias, weight, grad_weight_out, items, **options)
    preparing.prepare(on_kernels.Inputs(x, w, bias, target, weight, items), plan, grad_weight_out)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rehearsal_asks_for_what_a_call_asks_for(dtype, name, reduction, on, monkeypatch):
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
                    k = LceKernels(CPU)
                    monkeypatch.setattr(on_kernels, "kernels_of", lambda device, k=k: k)
                    with launch.record() as recording:
                        loss = linear_cross_entropy(x, w, target, **kw, **how, **given)
                        loss.backward(torch.rand(loss.shape))
                    assert len(recording.launches) >= 5
                    assert set(asked[-1]) == set(recording.requests)
                    asked.clear()


def test_of_the_loss_alone(on, monkeypatch):
    asked = on(H200)
    x, w, target, kw = make(300, 64, 700, torch.bfloat16)
    with torch.no_grad():
        prepare(x, w, target, kw)
        k = LceKernels(CPU)
        monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)
        with launch.record() as recording:
            linear_cross_entropy(x, w, target)
    assert set(asked[-1]) == set(recording.requests)


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
import test_lce_prepare as t
patch = pytest.MonkeyPatch()
t.on.__wrapped__(patch)(t.H200)
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
