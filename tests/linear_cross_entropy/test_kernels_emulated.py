"""Edge cases of linear cross entropy's row kernels in the emulator: small ones of test_kernels.py."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import quackish
from quackish.device.kernel_device import device_of
from quackish.ops.linear_cross_entropy.launches import LceKernels
from tests.emulator_cases import BLACKWELL, QUICK, emulated
from tests.linear_cross_entropy import test_kernels as on_gpu

SETTINGS = [QUICK, pytest.param(BLACKWELL[1], marks=pytest.mark.exhaustive)]


class CpuGenerator(torch.Generator):
    """The CPU's, whatever the code says."""

    def __new__(cls, device):
        return super().__new__(cls, "cpu")


class OnCpu(TorchFunctionMode):
    """Makes tensors on the CPU where the code says "cuda"."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


@pytest.fixture(params=SETTINGS)
def lce(request, monkeypatch):
    monkeypatch.setattr(torch, "Generator", CpuGenerator)
    with emulated(request.param), OnCpu():
        yield LceKernels(device_of(torch.device("cpu")))


@pytest.mark.parametrize("m", [0, 1, 33, 1025])
def test_compact(lce, m):
    for ignored in (0.0, 0.3, 1.0):
        on_gpu.check_compact(lce, on_gpu.targets(m, 100, ignored, seed=m))


@pytest.mark.parametrize("ignore_index", [-100, 0, 10**6])
def test_compact_with_invalid_targets(lce, ignore_index):
    target = on_gpu.targets(300, 100, 0.2, ignore_index=ignore_index)
    target[::7], target[1::7], target[2::70], target[3::70] = -1, 100, 2**40, -(2**40) + 5
    on_gpu.check_compact(lce, target, ignore_index=ignore_index)
    on_gpu.check_compact(lce, torch.full((300,), 100))  # no row has a class


@pytest.mark.parametrize("m", [129, *(pytest.param(m, marks=pytest.mark.exhaustive) for m in (1, 127))])
def test_gather(lce, m):
    for ignored in (0.0, 0.4, 1.0):
        x, w = (on_gpu.random(n, 264, dtype=torch.bfloat16, seed=n) for n in (m, 30))
        on_gpu.check_gather(lce, x, w, on_gpu.targets(m, 30, ignored, torch.int32))


@pytest.mark.parametrize(
    "where", [pytest.param(QUICK, marks=pytest.mark.exhaustive), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_large_logits(where):
    """A bias of 1e6 for all classes; then one of the smallest finite number, and targets on its classes."""
    device, context = ("cuda", contextlib.nullcontext()) if where == "cuda" else ("cpu", emulated(where))
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, 64, generator=generator).bfloat16().to(device) for n in (8, 128))
    target, bias = torch.randint(0, 128, (8,), generator=generator).to(device), torch.full((128,), 1e6, device=device)
    masked = torch.zeros_like(bias).masked_fill_(torch.arange(128, device=device) < 64, torch.finfo(torch.float32).min)
    target[:2] = 3
    logits = x.double() @ w.double().T
    with context:
        for b in (bias, masked):
            loss = quackish.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none", backend="cute")
            want = F.cross_entropy((logits + b.double()).float().double(), target, reduction="none")
            torch.testing.assert_close(loss, want.float(), rtol=1e-5, atol=1e-5)
