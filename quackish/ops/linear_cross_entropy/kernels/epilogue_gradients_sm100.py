"""Blackwell's epilogues of the dx and dw GEMMs: rows to the output by index, and D with its rounding residual."""

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64

from quackish.kernels.arguments import DTYPES
from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.slice_store import SliceStore, store_columns
from quackish.kernels.gemm.sm100_config import SLICE
from quackish.kernels.gemm.tile_store import Output, RowBlock
from quackish.ops.linear_cross_entropy.gemm_problems import ResidualArgs, RowsOutArgs
from quackish.ops.linear_cross_entropy.kernels.epilogue_residual import rounding_residual
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT


class RowsOutSm100(Epilogue):
    """out[order[start + i]] = row_scale[i] * D[i] for rows i < live."""

    def __init__(self, problem, config):
        super().__init__(problem, config, None)
        self.dtype = DTYPES[problem.out_dtype]

    @cute.jit
    def prepare(self, args: RowsOutArgs, out: Output, block: RowBlock):
        """The scale of the thread's row, and the row of the output; -1: it is not stored."""
        row, to = block.row0 + block.thread, Int32(-1)
        scale = (args.row_scale + cutlass.min(row, block.m - 1)).load()
        if row < block.live:
            to = (args.order + (block.start + row)).load()
        return scale, to

    @cute.jit
    def __call__(self, acc, prefetched, args: RowsOutArgs, out: Output, block: RowBlock):
        scale, to = prefetched
        for j in cutlass.range(self.config.slices, unroll=1):
            x = acc.load(j)
            if to >= 0:
                rounded = cute.make_rmem_tensor((SLICE,), self.dtype)
                rounded.store((x.load() * scale).to(self.dtype))
                store_columns(rounded, out.d, Int64(to) * out.ldd, j, block)


class StoreWithResidualSm100(Epilogue):
    """Stores D, and the bf16 rounding residual of each row that has a slot."""

    def __init__(self, problem, config):
        super().__init__(problem, config, SliceStore(problem.out_dtype))

    @cute.jit
    def prepare(self, args: ResidualArgs, out: Output, block: RowBlock):
        """The slot of the thread's row."""
        row, slot = block.row0 + block.thread, Int32(NO_SLOT)
        if row < block.m:
            slot = (args.first_slot_of_class + row).load()
        return slot

    @cute.jit
    def __call__(self, acc, slot, args: ResidualArgs, out: Output, block: RowBlock):
        for piece in cutlass.range(self.config.slices // self.output.per_piece, unroll=1):
            for part in cutlass.range_constexpr(self.output.per_piece):
                j = piece * self.output.per_piece + part
                x = acc.load(j)
                self.output(x, piece, part, out, block)
                if slot != NO_SLOT:
                    residual = cute.make_rmem_tensor((SLICE,), Int16)
                    for v in cutlass.range_constexpr(SLICE):
                        residual[v] = rounding_residual(x[v])
                    store_columns(residual, args.rounding_residual, Int64(slot) * block.n, j, block)
