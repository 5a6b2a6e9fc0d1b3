"""Softmax backward: dx = y * (dy - sum(y * dy)) of each row, by one warp, which holds y and dy in registers."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64

from quackish.kernels.arguments import fake_args
from quackish.kernels.rows import RowMap
from quackish.ops.softmax.problems import BackwardArgs, SoftmaxBwdProblem, SoftmaxConfig


class SoftmaxBwd:
    def __init__(self, problem: SoftmaxBwdProblem, config: SoftmaxConfig):
        self.problem = problem
        self.rows = RowMap(problem.n, problem.vec, config.threads, threads_per_row=32, split_n=1)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: BackwardArgs, stream: CUstream):
        self.kernel(args.dy, args.y, args.dx, args.m).launch(
            grid=[cute.ceil_div(args.m, self.rows.tile_m), 1, 1], block=[self.rows.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, dy: cute.Pointer, y: cute.Pointer, dx: cute.Pointer, m: Int32):
        rows = self.rows
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        row = cute.arch.block_idx()[0] * rows.tile_m + warp
        source = Int64(cutlass.min(row, m - 1)) * rows.n  # rows past the last one repeat it and store nothing

        # load
        rY, rDy = rows.load(y + source, lane, rows.n), rows.load(dy + source, lane, rows.n)

        # sum of y * dy; elements past the end of the row are loaded as 0
        total = (rY.load() * rDy.load()).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        total = cute.arch.warp_reduction_sum(total)

        # store
        rY.store(rY.load() * (rDy.load() - total))
        if row < m:
            self.rows.store(rY, dx + Int64(row) * rows.n, lane, rows.n)
