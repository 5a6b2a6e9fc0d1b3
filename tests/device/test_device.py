"""The devices that operations run on: what a GPU's has, reasons why there is none, and substitutes."""

import contextlib
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quackish
from quackish.device import choose, cuda, toolchain
from quackish.device import kernel_device as device
from quackish.device.kernel_device import (
    KernelDevice,
    check_same_device,
    device_of,
    expects_kernels,
    substitute,
    why_unsupported,
)
from quackish.device.kernel_for import kernel_for
from quackish.errors import UnsupportedError
from quackish.gpu import A100, B200, FAMILIES, H200, NAMED, gpu_of
from quackish.ops.attention.problems import FORWARD_SPEC
from quackish.ops.mlp.problems import TOKEN_ROWS_SPEC
from tests import idle_kernels

CPU, META, GPU = torch.device("cpu"), torch.device("meta"), torch.device("cuda", 3)


def find(where):
    return device._create(where)


@pytest.fixture
def driver(monkeypatch):
    """GPU 3 is an H200."""
    monkeypatch.setattr(device, "gpu_of", lambda index: {3: H200}[index])
    for name in ("stream_of", "current_device"):
        monkeypatch.setattr(cuda, name, lambda *index: 70 + sum(index))
    monkeypatch.setattr(toolchain, "find", lambda: None)
    return monkeypatch


@pytest.mark.parametrize("name", sorted(NAMED))
def test_a_query_finds_what_is_known_about_a_gpu(name, monkeypatch):
    known = NAMED[name]
    properties = types.SimpleNamespace(
        name=f"NVIDIA {known.name}", major=int(known.family[3:-1]), minor=int(known.family[-1]),
        multi_processor_count=known.sm_count, shared_memory_per_block_optin=known.smem_bytes,
        shared_memory_per_multiprocessor=known.smem_bytes_per_sm, regs_per_multiprocessor=known.registers_per_sm,
        max_threads_per_multi_processor=known.threads_per_sm,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert gpu_of.__wrapped__(0) == known


def test_the_device_of_a_gpu(driver):
    found = find(GPU)
    assert (found.gpu, found.index, found.current(), found.stream()) == (H200, 3, 70, 73)
    assert found.kernel_for is kernel_for


def test_reasons_for_no_device(driver):
    assert find(CPU) == "no kernel for cpu tensors."
    assert why_unsupported("moe_mlp", TOKEN_ROWS_SPEC, CPU) == (
        'moe_mlp: no kernel for cpu tensors. backend="auto" runs the portable path.'
    )

    def missing():
        raise UnsupportedError("No compiler.")

    driver.setattr(toolchain, "find", missing)
    assert find(GPU) == "No compiler."
    driver.setattr(device, "gpu_of", lambda index: A100)
    assert find(GPU).gpu is A100  # which the descriptions of kernels refuse: a compiler would not help
    driver.setattr(torch.version, "hip", "6.4")
    assert find(GPU) == "no kernel for AMD GPUs."


def test_the_table_says_which_gpus_have_a_kernel():
    with substitute("cuda:3", KernelDevice(B200, kernel_for)):
        assert why_unsupported("moe_mlp", TOKEN_ROWS_SPEC, GPU) == ""
        why = why_unsupported("attention", FORWARD_SPEC, GPU)
    assert why.startswith("attention: no kernel ")
    assert "B200" in why
    assert "sm_100" in FAMILIES


def test_substitutes_nest_and_end():
    outer, inner, before = KernelDevice(H200, kernel_for), KernelDevice(B200, kernel_for), choose.epoch
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


def linear_cross_entropy():
    x, w = (torch.ones(rows, 16, dtype=torch.bfloat16, requires_grad=True) for rows in (8, 24))
    return quackish.linear_cross_entropy(x, w, torch.arange(8), schedule="stored", backend="cute")


def grouped_mlp():
    shapes = (8, 16), (2, 32, 16), (2, 16, 16)
    tensors = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    return quackish.grouped_mlp(*tensors, torch.tensor([3, 8]).int(), backend="cute").sum()


def grouped_mm():
    a, b = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((8, 16), (2, 16, 16)))
    return quackish.grouped_mm(a, b, torch.tensor([3, 8]).int(), backend="cute").sum()


@pytest.mark.parametrize("call", [linear_cross_entropy, grouped_mlp, grouped_mm])
def test_nothing_leaks_into_a_substitute_or_out_of_it(call):
    (device, launches), (other, launches_of_other) = idle_kernels.device(), idle_kernels.device()
    with substitute("cpu", device):
        loss = call()
        with Operators():
            of_operators = call()
        with substitute("cpu", other):
            call()
    assert len(launches) == 2 * len(launches_of_other) > 0
    with pytest.raises(UnsupportedError, match=f"{call.__name__}: no kernel for cpu tensors"):
        call()
    forward, forward_of_other = len(launches), len(launches_of_other)
    for block in (contextlib.nullcontext(), substitute("cpu", other)):
        text = f"{call.__name__}: cpu tensors had another device of kernels in forward"
        with block, pytest.raises(RuntimeError, match=text):
            of_operators.backward(retain_graph=True)
    assert (len(launches), len(launches_of_other)) == (forward, forward_of_other)
    with substitute("cpu", device):
        loss.backward()
    assert len(launches) > forward
