"""The epilogue of the dx GEMM: rows of D, scaled, to rows of the output given by index."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from quackish.configs.lce_args import RowsOutArgs
from quackish.kernels.common.epilogues import Epilogue
from quackish.kernels.common.tile_store import Block, Output, RowStore, row_of, thread_rows


class RowsOut(Epilogue):
    """Stores row i < live, times row_scale[i], to row order[start + i] of the output."""

    def __init__(self, problem, config):
        super().__init__(problem, config, RowStore(problem.out_dtype, config))

    def begin(self):
        """The factors of the thread's two rows of the accumulator, and the output rows of the four that it stores."""
        return cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((4,), Int32)

    @cute.jit
    def prepare(self, kept, args: RowsOutArgs, block: Block):
        factors, rows = kept
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            factors[r] = (args.row_scale + cutlass.min(i, block.m - 1)).load()
        for k in cutlass.range_constexpr(4):
            i = block.row0 + block.thread // 8 + 16 * k
            rows[k] = Int32(-1)
            if i < block.live:
                rows[k] = (args.order + (block.start + i)).load()

    @cute.jit
    def __call__(self, acc, kept, args: RowsOutArgs, out: Output, block: Block):
        factors, rows = kept
        for v in cutlass.range_constexpr(cute.size(acc)):
            acc[v] = acc[v] * factors[row_of(v)]
        self.output(acc, out, rows, block)
