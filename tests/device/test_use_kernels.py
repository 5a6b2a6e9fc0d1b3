"""The switch quackish.use_kernels, and the warning about kernels that only the emulator has run."""

import warnings

import pytest
import torch

import quackish
from quackish import errors
from quackish.device import kernel_device as devices
from quackish.device.kernel_device import KernelDevice, device_of
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.device.spec import EMULATED_ONLY
from quackish.errors import UnsupportedError
from quackish.gpu import B200, B300, H200
from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC as LCE_GEMM
from quackish.ops.mlp.problems import GEMM_SPEC as GROUPED_GEMM
from quackish.testing.errors import same_bits
from tests import emulated_kernels

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda", 3), torch.bfloat16


@pytest.fixture
def warned(monkeypatch):
    """The warnings of a process that has given none yet."""
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield given


@pytest.fixture
def as_gpu(monkeypatch):
    """Returns a function that makes the CPU a GPU: its tensors have a real KernelDevice, which has an index."""
    launched = []

    def be(gpu, kernel_for=None):
        def record(problem, gpu):
            kernel = (kernel_for or request_for)(problem, gpu)
            launch = kernel.launch if kernel_for else lambda *args: launched.append(problem.spec.name)
            return CompiledKernel(launch, kernel.config)

        monkeypatch.setattr(devices, "kernel_for", record)
        found = KernelDevice(gpu, record, index=0, current=lambda: 0)
        if gpu.family in EMULATED_ONLY:
            found = KernelDevice(gpu, devices._emulated_only_kernel_for, index=0, current=lambda: 0)
        monkeypatch.setattr(devices, "_devices", {CPU: found})
        with devices.choose.changing():
            pass  # no plan of another device is used
        return launched

    yield be
    quackish.use_kernels(True)


def loss_of(backend="auto"):
    make = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 16, generator=make).to(BF16).requires_grad_() for rows in (8, 24))
    return quackish.linear_cross_entropy(x, w, torch.arange(8), backend=backend), (x, w)


def calls():
    """A call of each operation."""
    x, w1, w2 = (torch.ones(shape, dtype=BF16) for shape in ((8, 16), (2, 32, 16), (2, 16, 16)))
    q = torch.ones(1, 2, 8, 16, dtype=BF16)
    quackish.rms_norm(x, None)
    quackish.grouped_mlp(x, w1, w2, torch.tensor([3, 8]).int())
    quackish.scaled_dot_product_attention(q, q, q, attn_bias=torch.ones(1, 2, 8, 8, dtype=BF16))
    loss_of()


# The switch -----------------------------------------------------------------------------------------------------------


def test_without_kernels_everything_is_portable(as_gpu, warned):
    launched = as_gpu(H200)
    calls()
    assert {"rms_norm_fwd", "grouped_gemm", "attention_small_fwd", "lce_gemm"} <= set(launched)
    launched.clear()
    quackish.use_kernels(False)
    calls()
    assert launched == []
    assert [str(one.message) for one in warned] == []  # the user asked for it
    with pytest.raises(UnsupportedError, match=r"entropy: quackish.use_kernels\(False\) turned kernels off"):
        loss_of("cute")
    quackish.use_kernels(True)
    calls()
    assert "lce_gemm" in launched


def test_results_are_those_of_the_portable_path(as_gpu):
    quackish.use_kernels(False)
    as_gpu(H200)
    loss, leaves = loss_of()
    other, others = loss_of("reference")
    got, want = torch.autograd.grad(loss, leaves), torch.autograd.grad(other, others)
    assert all(map(same_bits, (loss, *got), (other, *want)))


def test_backward_after_the_switch_has_the_kernels_of_its_forward(as_gpu):
    as_gpu(H200, emulated_kernels.kernel_for)
    want = torch.autograd.grad(*loss_of())
    loss, leaves = loss_of()
    quackish.use_kernels(False)
    assert all(map(same_bits, torch.autograd.grad(loss, leaves), want))


def test_a_patched_model_obeys(as_gpu):
    """Code that passes no backend, such as a module's forward."""
    launched, norm = as_gpu(H200), quackish.RMSNorm(16, dtype=BF16)
    quackish.use_kernels(False)
    norm(torch.ones(8, 16, dtype=BF16)).sum().backward()
    assert launched == []


def test_an_emulate_block_works_as_before(as_gpu):
    as_gpu(H200)
    quackish.use_kernels(False)
    with quackish.emulate() as report:
        quackish.rms_norm(torch.ones(2, 64, dtype=BF16), None)
        assert isinstance(device_of(CPU), KernelDevice)
    assert [launch.kernel for launch in report.launches] == ["rms_norm_fwd"]
    assert isinstance(device_of(CPU), str)


# Kernels that only the emulator has run -------------------------------------------------------------------------------


def test_one_warning_on_blackwell(as_gpu, warned):
    for gpu in (B200, B200, H200):
        launched = as_gpu(gpu)
        loss_of()[0].backward()
    assert "lce_gemm" in launched
    (one,) = [one for one in warned if one.category is RuntimeWarning]
    for words in ("B200", "emulator", "hang", "quackish doctor --check", "quackish.use_kernels(False)"):
        assert words in str(one.message)
    assert one.filename == __file__


def test_emulated_gpus_give_no_warning(warned):
    with quackish.emulate("b300"):
        quackish.rms_norm(torch.ones(2, 64, dtype=BF16), None)
    assert [str(one.message) for one in warned] == []


@pytest.mark.parametrize("gpu", [B200, B300, H200], ids=lambda gpu: gpu.name)
def test_every_family_has_all_gemms(gpu):
    assert {gpu.family for gpu in (B200, B300)} == set(EMULATED_ONLY)
    assert all(gpu.family in spec.on for spec in (LCE_GEMM, GROUPED_GEMM))
