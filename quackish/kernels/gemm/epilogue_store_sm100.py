"""Blackwell's epilogues that store D: unchanged, times a factor, with its rounding residual, or to rows by index."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int16, Int32, Int64, const_expr

from quackish.kernels.arguments import DTYPES
from quackish.kernels.gemm.epilogue_store import rounding_residual
from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.problem import ResidualArgs, RowsOutArgs, ScaledArgs
from quackish.kernels.gemm.slice_store import SliceStore
from quackish.kernels.gemm.sm100_config import SLICE
from quackish.kernels.gemm.tile_store import Block, Output
from quackish.kernels.memory import vector_at
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT


class StoreSm100(Epilogue):
    """Stores D, times a factor if `scaled`, or adds it to an fp32 output; each element is written by one CTA."""

    def __init__(self, problem, config):
        super().__init__(problem, config, SliceStore(problem.out_dtype, problem.accumulate))

    @cute.jit
    def __call__(self, acc, prefetched, args: Optional[ScaledArgs], out: Output, block: Block):
        for piece in cutlass.range(self.config.slices // self.output.per_piece, unroll=1):
            for part in cutlass.range_constexpr(self.output.per_piece):
                x = acc.load(piece * self.output.per_piece + part)
                if const_expr(self.problem.scaled):
                    x.store(x.load() * args.factor.load())
                self.output(x, piece, part, out, block)


class StoreWithResidualSm100(StoreSm100):
    """Stores D, and the bf16 rounding residual of each row that has a slot."""

    @cute.jit
    def prepare(self, args: ResidualArgs, out: Output, block: Block):
        """The slot of the thread's row."""
        row, slot = block.row0 + block.thread, Int32(NO_SLOT)
        if row < block.m:
            slot = (args.first_slot_of_class + row).load()
        return slot

    @cute.jit
    def __call__(self, acc, slot, args: ResidualArgs, out: Output, block: Block):
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


@cute.jit
def store_columns(values: cute.Tensor, base: cute.Pointer, row: Int64, j: Int32, block: Block):
    """Stores the values of slice j to a row that begins at base + row, 16 bytes at a time."""
    vec = const_expr(128 // base.dtype.width)
    for i in cutlass.range_constexpr(0, SLICE, vec):
        col = block.col0 + (j * SLICE + i)
        if col < block.n:  # both are multiples of 8
            vector_at(base, row + col, vec).store(cute.local_tile(values, (vec,), (i // vec,)).load())
