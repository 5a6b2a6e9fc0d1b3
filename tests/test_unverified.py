"""quackish.use_unverified_kernels: which kernels run on Blackwell with each setting, errors, and the warning."""

import warnings

import pytest
import torch

import quackish
from quackish import errors, kernels
from quackish.configs import choose
from quackish.configs.gemm import GemmProblem
from quackish.configs.gemm_sm100 import GemmSm100Config
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.gpu import B200, B300, H200
from quackish.ops import device as devices
from quackish.ops.device import Device, device_of, substitute, unverified_kernels
from quackish.ops.kernel_for import Kernel, request_for
from quackish.testing.errors import same_bits
from tests import idle_kernels
from tests.emulator_cases import emulated

CPU, GPU, BF16 = torch.device("cpu"), torch.device("cuda", 3), torch.bfloat16


def linear_cross_entropy(schedule="stored"):
    make = torch.Generator().manual_seed(0)
    x, w = (torch.randn(rows, 16, generator=make).to(BF16).requires_grad_() for rows in (8, 24))
    return quackish.linear_cross_entropy(x, w, torch.arange(8), schedule=schedule), (x, w)


def launched(gpu, call, **fields):
    """The names of the kernels that a call launches on a GPU whose kernels do nothing."""
    names = []

    def kernel_for(name, problem, gpu):
        config = request_for(name, problem, gpu).config
        return Kernel(lambda *args: names.append(name), config)

    with substitute("cpu", Device(gpu, kernel_for, **fields)):
        call()
    return set(names)


def step():
    loss, _ = linear_cross_entropy()
    loss.backward()


@pytest.mark.parametrize("gpu", [B200, B300], ids=lambda gpu: gpu.name)
def test_ours_or_cublas(gpu):
    assert not kernels.allow_unverified  # the default
    without = launched(gpu, step)
    with unverified_kernels():
        ours = launched(gpu, step)
    assert launched(gpu, step) == without
    assert "lce_gemm" in ours - without
    assert {"lce_exp", "lce_rescale", "lce_clear"} <= without - ours


def test_kernels_that_ran_do_not_depend_on_the_setting():
    before = launched(H200, step)
    with unverified_kernels():
        assert launched(H200, step) == before


def test_each_setting_has_its_device_and_its_caches():
    epoch = choose.epoch
    with substitute("cpu", Device(B200, idle_kernels.device()[0].kernel_for)), substitute("cuda", Device(H200, None)):
        without, hopper = device_of(CPU), device_of(GPU)
        with unverified_kernels():
            ours = device_of(CPU)
            assert ours is not without
            assert ours.cache is not without.cache
            assert device_of(GPU) is hopper
        assert device_of(CPU) is without
        with unverified_kernels():
            assert device_of(CPU) is ours
    assert choose.epoch == epoch + 8  # two blocks of `substitute`, four changes of the setting: no old plan is used
    with unverified_kernels(), substitute("cpu", ours):
        assert device_of(CPU) is ours  # not a copy: a block gets the Device that it was given


def test_the_devices_of_gpus(monkeypatch):
    monkeypatch.setattr(devices.toolchain, "find", lambda: None)
    for gpu, is_affected in ((B200, True), (H200, False)):
        monkeypatch.setattr(devices, "gpu_of", lambda index, gpu=gpu: gpu)
        for cache in (devices._find, devices._create):
            cache.cache_clear()
        without = device_of(GPU)
        with unverified_kernels():
            assert (device_of(GPU) is not without) == is_affected
        assert device_of(GPU) is without
    for cache in (devices._find, devices._create):
        cache.cache_clear()


@pytest.mark.parametrize("forward", [False, True])
def test_backward_needs_the_setting_of_its_forward(forward):
    on = Device(B200, lambda name, problem, gpu: Kernel(lambda *args: None, request_for(name, problem, gpu).config))
    with substitute("cpu", on):
        with unverified_kernels(forward):
            loss, _ = linear_cross_entropy()
        with unverified_kernels(not forward), pytest.raises(RuntimeError, match="the same setting of use_unverified"):
            loss.backward(retain_graph=True)
        with unverified_kernels(forward):
            loss.backward()


def test_find_names_the_operation_and_what_to_do():
    with pytest.raises(UnsupportedError, match=r"^lce_gemm: no kernel that a B200 \(sm_100\) has run\. ") as found:
        kernels.find("lce_gemm", B200)
    assert "doctor --check` tests them" in str(found.value)
    assert "quackish.use_unverified_kernels(True) allows them." in str(found.value)
    assert kernels.find("lce_gemm", B200, unverified=True).__name__ == "GemmSm100"
    with unverified_kernels():
        assert kernels.find("lce_gemm", B200).__name__ == "GemmSm100"
        with pytest.raises(UnsupportedError, match="has run"):
            kernels.find("lce_gemm", B200, unverified=False)
        problem = GemmProblem("softmax", "bfloat16", "bfloat16")
        assert request_for("lce_gemm", problem, B200).config == GemmSm100Config()


def grouped_mlp(backend="auto"):
    x, w1, w2 = (torch.ones(shape, dtype=BF16) for shape in ((8, 16), (2, 32, 16), (2, 16, 16)))
    return quackish.grouped_mlp(x, w1, w2, torch.tensor([3, 8]).int(), backend=backend)


def test_cute_raises_without_it_where_only_ours_exists():
    with pytest.raises(UnsupportedError, match=r"grouped_mlp: no kernel that a B200 .*use_unverified"):
        launched(B200, lambda: grouped_mlp("cute"))
    with unverified_kernels():
        assert "grouped_gemm" in launched(B200, lambda: grouped_mlp("cute"))


# The warning ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def warned(monkeypatch):
    """The warnings of a process that has given none yet."""
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield given


REAL = dict(index=0, current=lambda: 0)  # as the Device of a GPU


def test_one_warning_per_process(warned):
    for gpu in (B200, B300):
        for _ in range(2):
            launched(gpu, step, **REAL)
    launched(B200, grouped_mlp)
    (one,) = warned
    assert one.category is PortablePathWarning
    assert str(one.message) == kernels.WHY_UNVERIFIED
    assert one.filename == __file__
    for words in ("cuBLAS", "portable path", "quackish doctor --check", "use_unverified_kernels(True)"):
        assert words in str(one.message)


def test_no_warning_without_a_reason(warned):
    with unverified_kernels():
        launched(B200, step, **REAL)
    launched(H200, step, **REAL)
    launched(B200, step)  # a dry run, as `explain` makes
    with quackish.emulate("b200"):
        assert type(quackish.ops.linear_cross_entropy.autograd.kernels_on(CPU)).__name__ == "CublasKernels"
    assert [str(one.message) for one in warned] == []


# In the emulator ------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_both_settings_in_the_emulator():
    """Each setting's bits are its own, whatever ran before."""

    def run(expected):
        report.launches.clear()
        loss, leaves = linear_cross_entropy(schedule="recompute")
        grads = torch.autograd.grad(loss, leaves)
        names = {launch.kernel for launch in report.launches}
        assert expected in names
        assert {"lce_gemm", "lce_exp"} - names
        return [loss.detach(), *grads]

    with emulated("b200/late/0") as report:
        without = run("lce_exp")
        with unverified_kernels():
            ours = run("lce_gemm")
        again = run("lce_exp")
    assert all(map(same_bits, without, again))
    for one, other in zip(without, ours, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=0.02, atol=1e-4)
