"""Softmax: its reference, its compiled kernels, and its kernels in the emulator and on a GPU."""

import pytest
import torch

from quackish.device.choose import choose
from quackish.errors import UnsupportedError
from quackish.gpu import B200, H200
from quackish.ops.softmax.api import softmax
from quackish.ops.softmax.problems import SoftmaxBwdProblem, SoftmaxFwdProblem
from quackish.testing import assert_close_to_fp64, assert_deterministic
from tests.emulator_cases import QUICK, emulated
from tests.variants import check_compiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def torch_softmax(x):
    return torch.softmax(x, -1)


def make(m, n, dtype, device="cpu"):
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(0))
    return x.to(device, dtype).requires_grad_()


def extremes(n, dtype, device="cpu"):
    """A common offset, one element far above the rest, and some at -inf. Without grad: gradients are nearly 0."""
    x = make(3, n, dtype, device).detach()
    x[0] += 1000.0
    x[1, n // 2] += 100.0
    x[2, 1:] = -torch.inf
    return x


@pytest.mark.parametrize("dtype", [torch.float64, FP32, BF16])
def test_reference(dtype):
    assert_close_to_fp64(softmax, torch_softmax, make(5, 300, dtype), slack=2)
    assert_close_to_fp64(softmax, torch_softmax, extremes(300, dtype))
    assert softmax(torch.ones(0, 300)).shape == (0, 300)


@pytest.mark.parametrize(
    "problem, gpu", [(SoftmaxFwdProblem(2048, "bfloat16"), H200), (SoftmaxBwdProblem(1001, "float32"), B200)]
)
def test_no_register_spills(problem, gpu):
    check_compiles(problem.spec.name, problem, choose(problem, gpu).config, gpu)


@pytest.mark.parametrize("where, m, n, dtype", [(QUICK, 6, 2048, BF16), ("b200/at_once/1", 5, 1001, FP32)])
def test_kernels_in_the_emulator(where, m, n, dtype):
    with emulated(where) as report:
        assert_close_to_fp64(softmax, torch_softmax, make(m, n, dtype), slack=2)
        assert_close_to_fp64(softmax, torch_softmax, extremes(n, dtype))
    assert [launch.kernel for launch in report.launches] == ["softmax_fwd", "softmax_bwd", "softmax_fwd"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("m, n", [(1, 1), (7, 8), (130, 1000), (5, 1001), (64, 2048)])
def test_kernels_on_a_gpu(m, n, dtype):
    x = make(m, n, dtype, "cuda")
    assert_close_to_fp64(softmax, torch_softmax, x, slack=2)
    assert_close_to_fp64(softmax, torch_softmax, extremes(n, dtype, "cuda"))
    assert_deterministic(softmax, x)
    assert torch.equal(softmax(x)[m // 2 :], softmax(x[m // 2 :]))  # a row's bits do not depend on M


def test_long_rows_run_the_portable_path():
    with emulated(QUICK), pytest.raises(UnsupportedError, match="softmax: no kernel for rows of 2049 elements"):
        softmax(make(2, 2049, FP32))
