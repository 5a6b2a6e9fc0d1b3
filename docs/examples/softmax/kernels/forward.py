"""Softmax forward: y = exp(x - max(x)) / sum(exp(x - max(x))) of each row.

One warp per row: it loads the row once, reduces its maximum and its sum in registers, and stores y.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from quackish.kernels.arguments import fake_args
from quackish.kernels.math import LOG2_E
from quackish.kernels.rows import RowMap
from quackish.ops.softmax.problems import ForwardArgs, SoftmaxConfig, SoftmaxFwdProblem


class SoftmaxFwd:
    def __init__(self, problem: SoftmaxFwdProblem, config: SoftmaxConfig):
        self.problem = problem
        self.rows = RowMap(problem.n, problem.vec, config.threads, threads_per_row=32, split_n=1)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: ForwardArgs, stream: CUstream):
        self.kernel(args.x, args.y, args.m).launch(
            grid=[cute.ceil_div(args.m, self.rows.tile_m), 1, 1], block=[self.rows.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, x: cute.Pointer, y: cute.Pointer, m: Int32):
        rows = self.rows
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = cute.arch.block_idx()[0] * rows.tile_m + warp
        source = cutlass.min(row, m - 1)  # rows past the last one repeat it and store nothing

        # load: the whole row is in flight before the first use
        rX = rows.load(x + Int64(source) * rows.n, lane, rows.n)

        # maximum of the row
        row_max = -Float32.inf
        for v in cutlass.range_constexpr(rows.num_vecs):
            if rows.live(v, lane, rows.n):
                row_max = cute.arch.fmax(row_max, rX[None, v].load().reduce(cute.ReductionOp.MAX, -Float32.inf, 0))
        row_max = cute.arch.warp_reduction_max(row_max)

        # exponentials and their sum
        total = Float32(0.0)
        for v in cutlass.range_constexpr(rows.num_vecs):
            rX[None, v].store(cute.math.exp2((rX[None, v].load() - row_max) * LOG2_E, fastmath=True))
            if rows.live(v, lane, rows.n):
                total += rX[None, v].load().reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total)

        # normalize and store
        rX.store(rX.load() / total)
        if row < m:
            self.rows.store(rX, y + Int64(row) * rows.n, lane, rows.n)
