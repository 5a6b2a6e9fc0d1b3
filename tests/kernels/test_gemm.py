"""The GEMM without live rows, and with another operation's epilogue."""

import pytest
import torch

from quackish import emulation, emulator
from quackish.device.compile import Request
from quackish.gpu import B200, H200
from quackish.kernels.gemm.problem import GemmArgs, GemmProblem, Store
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.sm100_config import GemmSm100Config

toy = pytest.importorskip("tests.kernels.toy_gemm", reason="needs nvidia-cutlass-dsl")


@pytest.mark.parametrize(
    "kernel, gpu, config, epilogue",
    [
        (toy.ToyGemmSm90, H200, GemmConfig(tile_n=128, pingpong=True), toy.RowBias()),
        (toy.ToyGemmSm100, B200, GemmSm100Config(), toy.RowBias()),
        pytest.param(toy.GemmSm90, H200, GemmConfig(tile_n=128), Store(), marks=pytest.mark.exhaustive),
        pytest.param(toy.GemmSm100, B200, GemmSm100Config(), Store(), marks=pytest.mark.exhaustive),
    ],
)
def test_all_rows_are_live(kernel, gpu, config, epilogue):
    m, n, k = 300, 136, 72
    a, b = (torch.randint(-3, 4, (rows, k)).bfloat16() for rows in (m, n))  # sums are exact in any order
    bias, d, ticket = torch.randn(m), torch.full((m, n), torch.nan), torch.zeros(1, dtype=torch.int32)
    problem = GemmProblem(epilogue, "bfloat16", "float32")
    args = GemmArgs(
        a=a.data_ptr(), b=b.data_ptr(), d=d.data_ptr(), ticket=ticket.data_ptr(), m=m, n=n, k=k, split=0, a_stride=k,
        second_stride=0, b_stride=k, d_stride=n, max_clusters=2,
        epilogue=None if isinstance(epilogue, Store) else toy.RowBiasArgs(bias.data_ptr()),
    )  # fmt: skip
    run = emulation.load(Request(kernel, problem, config, gpu.target), gpu, "toy_gemm")
    with emulator.record("late", 0):
        run(args, 0)
    product = a.float() @ b.float().T
    assert torch.equal(d, product if isinstance(epilogue, Store) else product + bias[:, None])
