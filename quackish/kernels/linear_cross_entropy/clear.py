"""Linear cross entropy: out[i] = 0 for the ignored rows of a chunk. One warp per row."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int64

from quackish.configs.lce_cublas import ClearArgs, LceClearProblem
from quackish.configs.lce_rows import LceRowsConfig
from quackish.kernels.common.memory import fill_row, load_at
from quackish.kernels.common.row_kernel import RowKernel


class LceClear(RowKernel):
    problem: LceClearProblem
    config: LceRowsConfig

    @cute.jit
    def __call__(self, a: ClearArgs, stream: CUstream):
        self.kernel(a).launch(
            grid=[cute.ceil_div(a.rows, self.num_warps), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: ClearArgs):
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        h = self.problem.h
        if i < a.rows:
            if i >= load_at(a.num_live, 0) - a.start:
                fill_row(a.out + Int64(i) * h, h, cute.arch.lane_idx(), 0.0)
