"""The kernels' activations and their derivatives, elementwise in the emulator."""

import sys

import pytest
import torch

from quackish import emulator
from quackish.ops.mlp import reference
from tests.mlp.cases import BF16, FP16

if sys.platform != "linux":
    pytest.skip("the compiler is for Linux", allow_module_level=True)

import cutlass.cute as cute
from cuda.bindings.driver import CUstream

from quackish.ops.mlp.kernels.activations import activate_gate

THREADS = 256


class Activate:
    def __init__(self, activation: str):
        self.activation = activation

    @cute.jit
    def __call__(self, gate: cute.Tensor, value: cute.Tensor, slope: cute.Tensor, stream: CUstream):
        grid = [cute.ceil_div(gate.shape[0], THREADS), 1, 1]
        self.kernel(gate, value, slope).launch(grid=grid, block=[THREADS, 1, 1], stream=stream)

    @cute.kernel
    def kernel(self, gate: cute.Tensor, value: cute.Tensor, slope: cute.Tensor):
        i = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if i < gate.shape[0]:
            value[i], slope[i] = activate_gate(gate[i], self.activation)


def activate(gate, activation):
    tensors = gate, torch.empty_like(gate), torch.empty_like(gate)
    emulator.compile(Activate(activation), *tensors, CUstream(0), gpu="h200")(*tensors, 0)
    return tensors[1:]


def value_and_slope(gate, activation):
    ones = torch.ones_like(gate)
    z = torch.stack([gate, ones], 1) if activation in reference.GATED else gate[:, None]
    at, dz = reference.derivatives(z, activation), torch.empty_like(z)
    reference.activation_gradient(ones[:, None], at._replace(factor=None), dz[:, :1])
    return at.value[:, 0], dz[:, 0]


def all_numbers(dtype):
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()]


def code(t):
    """Consecutive integers for consecutive numbers of a 16-bit type."""
    bits = t.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gelu_of_every_number_is_within_one_unit_in_the_last_place(dtype):
    x = all_numbers(dtype).float()
    truth = value_and_slope(x.double(), "gelu_erf")
    for got, want in zip(activate(x, "gelu_erf"), truth, strict=True):
        assert (got - want)[x <= -13].abs().max() < 1e-36  # the exponential becomes subnormal, which ex2 flushes to 0
        distance = (code(got.to(dtype)) - code(want.to(dtype))).abs()[x > -13]
        assert distance.max() <= 1
        torch.testing.assert_close(got.double(), want, rtol=6e-6, atol=1e-7)


@pytest.mark.parametrize("activation", reference.ACTIVATIONS)
def test_values_and_derivatives_are_the_references(activation):
    """Of NaN and infinities too."""
    x = torch.cat([torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 7.0]), torch.linspace(-20.0, 20.0, 2048)])
    for got, want in zip(activate(x, activation), value_and_slope(x, activation), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, equal_nan=True)
