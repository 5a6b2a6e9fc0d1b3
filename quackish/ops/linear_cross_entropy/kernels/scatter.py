"""Linear cross entropy: dx[order[start + i]] = acc[i] for the live rows of a chunk. One warp per row."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import convert_row, load_at
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import LceRowsConfig, LceScatterProblem, ScatterArgs


class LceScatter(RowKernel):
    problem: LceScatterProblem
    config: LceRowsConfig

    @cute.jit
    def __call__(self, args: ScatterArgs, stream: CUstream):
        args = with_row_state(args, args.start)
        self.kernel(args).launch(**self.launch_options(cute.ceil_div(args.rows, self.num_warps), stream))

    @cute.kernel
    def kernel(self, args: ScatterArgs):
        after_previous()
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        h = self.problem.h
        if i < args.rows:
            if args.start + i < load_at(args.state.num_live, 0):
                row, out = args.acc + Int64(i) * h, args.dx + Int64(load_at(args.state.order, args.start + i)) * h
                convert_row(row, out, h, cute.arch.lane_idx(), Float32(1.0), self.config.vectors)
