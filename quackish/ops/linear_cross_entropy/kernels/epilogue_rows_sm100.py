"""Blackwell's epilogue of the dx GEMM: scales the rows of D and scatters them to the rows of the output."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from quackish.kernels.arguments import DTYPES
from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.slice_store import store_columns
from quackish.kernels.gemm.sm100_config import SLICE
from quackish.kernels.gemm.tile_store import Block, Output
from quackish.ops.linear_cross_entropy.gemm_problems import RowsOutArgs


class RowsOutSm100(Epilogue):
    """out[order[start + i]] = row_scale[i] * D[i] for rows i < live."""

    def __init__(self, problem, config):
        super().__init__(problem, config, None)
        self.dtype = DTYPES[problem.out_dtype]

    @cute.jit
    def prepare(self, args: RowsOutArgs, out: Output, block: Block):
        """The scale of the thread's row, and the row of the output; -1: it is not stored."""
        row, to = block.row0 + block.thread, Int32(-1)
        scale = (args.row_scale + cutlass.min(row, block.m - 1)).load()
        if row < block.live:
            to = (args.order + (block.start + row)).load()
        return scale, to

    @cute.jit
    def __call__(self, acc, prefetched, args: RowsOutArgs, out: Output, block: Block):
        scale, to = prefetched
        for j in cutlass.range(self.config.slices, unroll=1):
            x = acc.load(j)
            if to >= 0:
                rounded = cute.make_rmem_tensor((SLICE,), self.dtype)
                rounded.store((x.load() * scale).to(self.dtype))
                store_columns(rounded, out.d, Int64(to) * out.ldd, j, block)
