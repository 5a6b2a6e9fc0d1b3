"""The devices that operations run on: what a GPU's has, reasons why there is none, and substitutes."""

import contextlib

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quackish
from quackish import kernels, toolchain
from quackish.configs import choose
from quackish.errors import UnsupportedError
from quackish.gpu import A100, B200, H200
from quackish.ops import cuda, device
from quackish.ops.device import Device, check_same_device, device_of, expects_kernels, substitute, why_unsupported
from quackish.ops.kernel_for import kernel_for
from tests import idle_kernels

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 3)
find = device._find.__wrapped__  # without its cache


@pytest.fixture
def driver(monkeypatch):
    """GPU 3 is an H200."""
    monkeypatch.setattr(device, "gpu_of", lambda index: {3: H200}[index])
    for name in ("stream_of", "current_device"):
        monkeypatch.setattr(cuda, name, lambda *index: 70 + sum(index))
    monkeypatch.setattr(toolchain, "find", lambda: None)
    return monkeypatch


def test_the_device_of_a_gpu(driver):
    found = find(GPU)
    assert (found.gpu, found.index, found.current(), found.stream()) == (H200, 3, 70, 73)
    assert found.kernel_for is kernel_for


def test_reasons_for_no_device(driver):
    assert find(CPU) == "no kernel for cpu tensors."
    assert why_unsupported("moe_mlp", "token_rows", CPU) == (
        'moe_mlp: no kernel for cpu tensors. backend="auto" runs the portable path.'
    )

    def missing():
        raise UnsupportedError("No compiler.")

    driver.setattr(toolchain, "find", missing)
    assert find(GPU) == "No compiler."
    driver.setattr(device, "gpu_of", lambda index: A100)
    assert find(GPU).gpu is A100  # which the table of kernels refuses: a compiler would not help
    driver.setattr(torch.version, "hip", "6.4")
    assert find(GPU) == "no kernel for AMD GPUs."


def test_the_table_says_which_gpus_have_a_kernel():
    with substitute("cuda:3", Device(B200, kernel_for)):
        assert why_unsupported("moe_mlp", "token_rows", GPU) == ""
        why = why_unsupported("grouped_mlp", "grouped_gemm", GPU)
    assert why.startswith("grouped_mlp: no kernel for sm_100 (B200); supported: sm_90.")
    assert "sm_100" in kernels.FAMILIES


def test_substitutes_nest_and_end():
    outer, inner, before = Device(H200, kernel_for), Device(B200, kernel_for), choose.epoch
    with substitute("cpu", outer):
        assert device_of(CPU) is device_of(torch.device("cpu", 0)) is outer
        assert expects_kernels(CPU)
        with substitute(CPU, inner), substitute("cuda", inner):
            assert device_of(CPU) is device_of(GPU) is inner
            assert isinstance(device_of(META), str)
            with pytest.raises(RuntimeError, match=r"op: cpu tensors had another device .* inside the same"):
                check_same_device("op", outer, CPU)
        check_same_device("op", outer, CPU)
    assert isinstance(device_of(CPU), str)
    assert not expects_kernels(CPU)
    assert choose.epoch == before + 6
    with contextlib.suppress(KeyError), substitute("cpu", outer):
        raise KeyError
    assert isinstance(device_of(CPU), str)


class Operators(TorchDispatchMode):
    """Makes calls use the custom operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **kwargs or {})


def linear_cross_entropy(backend="cute"):
    x, w = (torch.ones(rows, 16, dtype=torch.bfloat16, requires_grad=True) for rows in (8, 24))
    return quackish.linear_cross_entropy(x, w, torch.arange(8), schedule="stored", backend=backend)


def test_linear_cross_entropy_uses_the_device_of_its_forward():
    device, launches = idle_kernels.device()
    other, launches_of_other = idle_kernels.device()
    with substitute("cpu", device):
        loss = linear_cross_entropy()
        with Operators():
            of_operators = linear_cross_entropy()
        with substitute("cpu", other):
            linear_cross_entropy()
    forward, forward_of_other = len(launches), len(launches_of_other)
    assert forward == 2 * forward_of_other > 0
    with pytest.raises(
        UnsupportedError, match=r'linear_cross_entropy: no kernel for cpu tensors\. backend="auto" runs'
    ):
        linear_cross_entropy()
    loss.backward()
    assert len(launches) > forward
    for block in (contextlib.nullcontext(), substitute("cpu", other)):
        text = "linear_cross_entropy: cpu tensors had another device of kernels in forward"
        with block, pytest.raises(RuntimeError, match=text):
            of_operators.backward(retain_graph=True)
    assert len(launches_of_other) == forward_of_other
