"""Linear cross entropy: dx[order[start + i]] = acc[i], times a factor, for the live rows of a chunk, in dx's dtype.

A warp has a row.
"""

from typing import Optional

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import LceRowsConfig, LceScatterProblem
from quackish.kernels.common.lce import after_previous, convert_row, fake_count, load_at
from quackish.kernels.common.rows import fake_pointer


class LceScatter:
    def __init__(self, problem: LceScatterProblem, config: LceRowsConfig):
        self.h, self.dx_dtype, self.row_scale, self.config = problem.h, problem.dx_dtype, problem.row_scale, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        row_scale = fake_pointer("float32" if self.row_scale else None, aligned=False)
        order, dx = fake_pointer("int32", aligned=False), fake_pointer(self.dx_dtype)
        stream = cute.runtime.make_fake_stream()
        return (fake_pointer("float32"), row_scale, order, dx, fake_count(), Int32(0), Int32(1), stream)

    @cute.jit
    def __call__(
        self,
        acc: cute.Pointer,  # (rows, h)
        row_scale: Optional[cute.Pointer],  # (rows,)
        order: cute.Pointer,  # (m,)
        dx: cute.Pointer,  # (m, h)
        num_live: cute.Pointer,  # (1,)
        start: Int32,
        rows: Int32,
        stream: CUstream,
    ):
        self.kernel(acc, row_scale, order, dx, num_live, start, rows).launch(
            grid=[cute.ceil_div(rows, self.num_warps), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=65_536 // (self.config.threads * 64),
            preferred_smem_carveout=10,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        acc: cute.Pointer,
        row_scale: Optional[cute.Pointer],
        order: cute.Pointer,
        dx: cute.Pointer,
        num_live: cute.Pointer,
        start: Int32,
        rows: Int32,
    ):
        after_previous()
        cta, _, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        if i < rows:
            if start + i < load_at(num_live, 0):
                row, out = acc + Int64(i) * self.h, dx + Int64(load_at(order, start + i)) * self.h
                factor = Float32(1.0)
                if const_expr(row_scale is not None):
                    factor = load_at(row_scale, i)
                convert_row(row, out, self.h, cute.arch.lane_idx(), factor, self.config.vectors)
