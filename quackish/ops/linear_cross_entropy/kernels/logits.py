"""Shared by the epilogues of Hopper's logits GEMMs: bias, softcap, the end of the classes, values per class."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.tile_store import RowBlock, TileStore, column_of
from quackish.kernels.math import tanh


@cute.jit
def load_columns(vector: cute.Pointer, col0: Int32, n: Int32, thread: Int32):
    """One value per column of a piece, distributed over the warp, for `column_value`.

    If each thread loaded the values of all its columns, ptxas would issue all loads at once, and up to 250 bytes of
    accumulators would spill.
    """
    values = cute.make_rmem_tensor((2,), Float32)
    for c in cutlass.range_constexpr(2):
        col = col0 + 8 * (thread % 32 // 4) + thread % 4 * 2 + c
        values[c] = (vector + cutlass.min(col, n - 1)).load().to(Float32)
    return values


@cute.jit
def column_value(values, i: cutlass.Constexpr[int], thread: Int32) -> Float32:
    """The value of the column of accumulator value i."""
    return cute.arch.shuffle_sync(values[i % 2], 4 * (i // 4 % 8) + thread % 4)  # four values span 8 columns


class LogitsSm90(Epilogue):
    """Base class: applies bias and softcap and masks the columns past the last class."""

    def __init__(self, problem, config):
        super().__init__(problem, config, None if problem.out_dtype is None else TileStore(problem.out_dtype, config))
        self.num_pieces = config.tile_n // 64  # processed one at a time, to save registers

    def values(self, piece: int) -> range:
        """Indices of a thread's accumulator values in a piece of 64 columns, as in TileStore."""
        return range(32 * piece, 32 * (piece + 1))

    def columns(self, vector: cute.Pointer | None, j: int, col0, n, thread):
        """The values per class of piece j, for `column_value`; None if `vector` is."""
        return None if vector is None else load_columns(vector, col0 + 64 * j, n, thread)

    @cute.jit
    def make_logits(self, acc, j: cutlass.Constexpr[int], bias, softcap: Float32, block: RowBlock):
        """Replaces piece j of the accumulator by logits, -inf past the last class. `bias` is from `columns`."""
        if const_expr(bias is not None):
            for v in self.values(j):
                acc[v] = acc[v] + column_value(bias, v, block.thread)
        if const_expr(self.spec.softcap):
            inverse = 1.0 / softcap
            for v in self.values(j):
                acc[v] = tanh(acc[v] * inverse) * softcap
        if block.col0 + self.config.tile_n > block.n:
            for v in cutlass.range_constexpr(cute.size(acc)):
                if const_expr(v in self.values(j)):
                    if block.col0 + column_of(v, block.thread) >= block.n:
                        acc[v] = -Float32.inf
