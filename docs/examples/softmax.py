"""Softmax forward, the worked example of docs/adding_a_kernel.md. In the package each section would be its own file."""

import dataclasses

import cutlass
import cutlass.cute as cute
import torch
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32
from torch import Tensor

from quackish.device import launch
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu, gpu_of
from quackish.kernels.arguments import fake_pointer
from quackish.kernels.rows import RowMap

# quackish/reference/softmax.py ---------------------------------------------------------------------------------------


def softmax_reference(x: Tensor) -> Tensor:
    """softmax over the last dimension, computed in fp32 (fp64 for fp64) and rounded once."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    exp = (wide - wide.amax(-1, keepdim=True)).exp()
    return (exp / exp.sum(-1, keepdim=True)).to(x.dtype)


# quackish/configs/softmax.py -----------------------------------------------------------------------------------------

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_N = 2048  # one warp per row: 64 fp32 registers per thread


@dataclasses.dataclass(frozen=True)
class SoftmaxProblem:
    """What to compute. M, the number of rows, is a run-time argument: one compiled kernel serves every M."""

    n: int
    dtype: str

    @property
    def vec(self) -> int:
        """Elements per load: 16 bytes where every row starts on a 16-byte boundary, else one element."""
        itemsize = ITEMSIZE[self.dtype]
        return 16 // itemsize if self.n * itemsize % 16 == 0 else 1


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    """How to compute it."""

    threads: int


def softmax_config(problem: SoftmaxProblem, gpu: Gpu) -> SoftmaxConfig:
    """Four rows per CTA on every GPU (not tuned). Raises UnsupportedError for n > MAX_N."""
    if problem.n > MAX_N:
        raise UnsupportedError(f"softmax: no kernel for rows of {problem.n} elements; at most {MAX_N}")
    return SoftmaxConfig(threads=128)


# quackish/kernels/softmax_fwd.py -------------------------------------------------------------------------------------


class SoftmaxFwd:
    """One warp per row: load the row once, reduce its maximum and its sum in registers, store."""

    def __init__(self, problem: SoftmaxProblem, config: SoftmaxConfig):
        self.problem = problem
        self.rows = RowMap(problem.n, problem.vec, config.threads, threads_per_row=32, split_n=1)

    def fake_args(self):
        x, y = (fake_pointer(self.problem.dtype, aligned=self.problem.vec > 1) for _ in range(2))
        return x, y, Int32(1), cute.runtime.make_fake_stream()

    @cute.jit
    def __call__(self, x: cute.Pointer, y: cute.Pointer, m: Int32, stream: CUstream):
        self.kernel(x, y, m).launch(
            grid=[cute.ceil_div(m, self.rows.tile_m), 1, 1],
            block=[self.rows.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, m: Int32):
        rows = self.rows
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = cute.arch.block_idx()[0] * rows.tile_m + warp
        source = cutlass.min(row, m - 1)  # rows past the last one repeat it and store nothing

        # load: the whole row is in flight before the first use
        rX = rows.load(x + cutlass.Int64(source) * rows.n, lane, rows.n)

        # maximum of the row
        row_max = -Float32.inf
        for v in cutlass.range_constexpr(rows.num_vecs):
            if rows.live(v, lane, rows.n):
                row_max = cute.arch.fmax(row_max, rX[None, v].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        row_max = cute.arch.warp_reduction_max(row_max)

        # exponentials and their sum
        total = Float32(0.0)
        for v in cutlass.range_constexpr(rows.num_vecs):
            rX[None, v].store(cute.math.exp(rX[None, v].load() - row_max))
            if rows.live(v, lane, rows.n):
                total += rX[None, v].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total)

        # normalize and store
        rX.store(rX.load() / total)
        if row < m:
            self.rows.store(rX, y + cutlass.Int64(row) * rows.n, lane, rows.n)


# quackish/ops/softmax.py ---------------------------------------------------------------------------------------------


def softmax(x: Tensor) -> Tensor:
    """softmax over the last dimension: the kernel on a GPU, the reference on a CPU."""
    if not x.is_cuda or x.numel() == 0:
        return softmax_reference(x)
    x = x.contiguous()
    x = x.clone() if x.data_ptr() % 16 else x
    gpu = gpu_of(x.device.index)
    problem = SoftmaxProblem(x.shape[-1], str(x.dtype).removeprefix("torch."))
    kernel = launch.get(SoftmaxFwd, problem, softmax_config(problem, gpu), gpu.target)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        kernel(x.data_ptr(), y.data_ptr(), x.numel() // problem.n, torch.cuda.current_stream().cuda_stream)
    return y
