"""Edge cases of linear cross entropy's row kernels in the emulator: small ones of tests/test_lce_kernels.py."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from quackish.ops.device import device_of
from quackish.ops.linear_cross_entropy.launches import LceKernels
from tests import test_lce_kernels as on_gpu
from tests.emulator_cases import BLACKWELL, QUICK, emulated

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


@pytest.mark.parametrize("m", [1, 127, 129])
def test_gather(lce, m):
    for ignored in (0.0, 0.4, 1.0):
        x, w = (on_gpu.random(n, 264, dtype=torch.bfloat16, seed=n) for n in (m, 30))
        on_gpu.check_gather(lce, x, w, on_gpu.targets(m, 30, ignored, torch.int32))
