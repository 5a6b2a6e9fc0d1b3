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
    def __call__(self, a: ScatterArgs, stream: CUstream):
        a = with_row_state(a, a.start)
        self.kernel(a).launch(**self.launch_options(cute.ceil_div(a.rows, self.num_warps), stream))

    @cute.kernel
    def kernel(self, a: ScatterArgs):
        after_previous()
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        h = self.problem.h
        if i < a.rows:
            if a.start + i < load_at(a.state.num_live, 0):
                row, out = a.acc + Int64(i) * h, a.dx + Int64(load_at(a.state.order, a.start + i)) * h
                convert_row(row, out, h, cute.arch.lane_idx(), Float32(1.0), self.config.vectors)
