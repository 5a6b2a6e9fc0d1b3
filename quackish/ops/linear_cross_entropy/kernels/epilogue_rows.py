"""Hopper's epilogue of the dx GEMM: scales the rows of D and scatters them to the rows of the output."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.tile_store import Output, RowBlock, RowStore, row_of, thread_rows
from quackish.ops.linear_cross_entropy.gemm_problems import RowsOutArgs


class RowsOutSm90(Epilogue):
    """out[order[start + i]] = row_scale[i] * D[i] for rows i < live."""

    def __init__(self, problem, config):
        super().__init__(problem, config, RowStore(problem.out_dtype, config))

    @cute.jit
    def prepare(self, args: RowsOutArgs, out: Output, block: RowBlock):
        """The scales of the thread's two accumulator rows, and the output rows of the four rows that it stores."""
        scales, out_rows = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Int32)
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            scales[r] = (args.row_scale + cutlass.min(i, block.m - 1)).load()
        for k in cutlass.range_constexpr(4):
            i = block.row0 + block.thread // 8 + 16 * k
            out_rows[k] = Int32(-1)
            if i < block.live:
                out_rows[k] = (args.order + (block.start + i)).load()
        return scales, out_rows

    @cute.jit
    def __call__(self, acc, prefetched, args: RowsOutArgs, out: Output, block: RowBlock):
        scales, out_rows = prefetched
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = acc[v] * scales[row_of(v)]
        self.output(acc, out, out_rows, block)
