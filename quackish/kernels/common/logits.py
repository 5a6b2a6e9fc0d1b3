"""Shared by the epilogues on logits: bias, softcap, the columns past the last class, numbers per class."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quackish.kernels.common.epilogues import Epilogue
from quackish.kernels.common.lce import LOG2_E
from quackish.kernels.common.tile_store import Block, TileStore, column_of


@cute.jit
def load_columns(vector: cute.Pointer, col0: Int32, n: Int32, thread: Int32):
    """One number per column of a piece, distributed over the warp, for `shared_column`.

    If each thread loaded the numbers of all its columns, ptxas would issue these loads all at once, and up to 250 bytes
    of accumulators spill.
    """
    shared = cute.make_rmem_tensor((2,), Float32)
    for c in cutlass.range_constexpr(2):
        col = col0 + 8 * (thread % 32 // 4) + thread % 4 * 2 + c
        shared[c] = (vector + cutlass.min(col, n - 1)).load().to(Float32)
    return shared


@cute.jit
def shared_column(shared, i: cutlass.Constexpr[int], thread: Int32) -> Float32:
    """The number of the column that accumulator value i is in."""
    return cute.arch.shuffle_sync(shared[i % 2], 4 * (i // 4 % 8) + thread % 4)  # 8 columns in four values


class Logits(Epilogue):
    """Base of the two epilogues on logits: bias, softcap and the columns past the last class."""

    def __init__(self, problem, config):
        super().__init__(problem, config, None if problem.out_dtype is None else TileStore(problem.out_dtype, config))
        self.num_pieces = config.tile_n // 64  # one after the other, which takes fewer registers

    def values(self, piece: int) -> range:
        """Indices of a thread's accumulator values in a piece, which is 64 columns as in TileStore."""
        return range(32 * piece, 32 * (piece + 1))

    def begin(self):
        """Up to four numbers for each of the thread's two rows, and the columns of the rows' targets in the tile."""
        return cute.make_rmem_tensor((4, 2), Float32), cute.make_rmem_tensor((2,), Int32)

    def columns(self, vector: Optional[cute.Pointer], j: int, col0, n, thread):
        """The numbers per class of piece j, for `shared_column`; None without."""
        return None if vector is None else load_columns(vector, col0 + 64 * j, n, thread)

    @cute.jit
    def logits(self, acc, j: cutlass.Constexpr[int], bias, softcap: Float32, block: Block):
        """In place: piece j of the accumulator becomes logits, -inf past the last class. `bias`: of `columns`."""
        if const_expr(bias is not None):
            for v in self.values(j):
                acc[v] = acc[v] + shared_column(bias, v, block.thread)
        if const_expr(self.problem.softcap):
            inverse = 1.0 / softcap
            for v in self.values(j):
                acc[v] = tanh(acc[v] * inverse) * softcap
        if block.col0 + self.config.tile_n > block.n:
            for v in cutlass.range_constexpr(cute.size(acc)):
                if const_expr(v in self.values(j)):
                    if block.col0 + column_of(v, block.thread) >= block.n:
                        acc[v] = -Float32.inf


@cute.jit
def tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2x) + 1). The absolute error is below 2^-22: with a softcap of 1e4, logits are off by up to 1e-3."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * (2.0 * LOG2_E), fastmath=True) + 1.0)
