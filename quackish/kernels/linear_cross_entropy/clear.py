"""Linear cross entropy: out[i] = 0 for the rows of a chunk that are not live. A warp a row."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64

from quackish.configs.lce_cublas import LceClearProblem, LceWarpsConfig
from quackish.kernels.common.lce import fake_count, fill_row, load_at
from quackish.kernels.common.rows import fake_pointer


class LceClear:
    def __init__(self, problem: LceClearProblem, config: LceWarpsConfig):
        self.h, self.dtype, self.config = problem.h, problem.dtype, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        stream = cute.runtime.make_fake_stream()
        return fake_pointer(self.dtype), fake_count(), Int32(0), Int32(1), stream

    @cute.jit
    def __call__(
        self,
        out: cute.Pointer,  # (rows, h)
        num_live: cute.Pointer,  # (1,)
        start: Int32,
        rows: Int32,
        stream: CUstream,
    ):
        self.kernel(out, num_live, start, rows).launch(
            grid=[cute.ceil_div(rows, self.num_warps), 1, 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, out: cute.Pointer, num_live: cute.Pointer, start: Int32, rows: Int32):
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        if i < rows:
            if i >= load_at(num_live, 0) - start:
                fill_row(out + Int64(i) * self.h, self.h, cute.arch.lane_idx(), 0.0)
