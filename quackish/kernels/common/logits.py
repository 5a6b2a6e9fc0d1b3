"""What the epilogues on logits share: bias, softcap, the columns past the last class, numbers a class."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quackish.kernels.common.lce import LOG2_E
from quackish.kernels.common.tile_store import TileStore, column_of


@cute.jit
def load_columns(vector: cute.Pointer, col0: Int32, n: Int32, thread: Int32):
    """One number a column of a piece, spread over the warp: what `shared_column` hands out.

    Loads of its own would be 2 of 4 lanes' worth for each thread, and ptxas starts them all at once: up to 250 bytes
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


class Logits:
    """What the two epilogues on logits share: bias, softcap and the columns past the last class."""

    def __init__(self, problem, config):
        self.problem, self.config = problem, config
        self.output = None if problem.out_dtype is None else TileStore(problem.out_dtype, config)
        self.stages_output = self.output is not None
        self.num_pieces = config.tile_n // 64  # worked on one after the other: fewer registers

    def values(self, piece: int) -> range:
        """Which of a thread's accumulator values belong to a piece, which is 64 columns as in TileStore."""
        return range(32 * piece, 32 * (piece + 1))

    def store_atom(self, mD):
        return self.output.store_atom(mD)

    def allocate(self, smem):
        return self.output.allocate(smem) if self.stages_output else None

    @cute.jit
    def finish(self, thread: Int32):
        if const_expr(self.stages_output):
            self.output.finish(thread)

    def begin(self):
        """Numbers of the thread's two rows, and where the rows' targets lie in the tile: what `prepare` fills."""
        return cute.make_rmem_tensor((4, 2), Float32), cute.make_rmem_tensor((2,), Int32)

    def columns(self, vector: Optional[cute.Pointer], j: int, col0, n, thread):
        """What `shared_column` takes of a number a class, for piece j; None without."""
        return None if vector is None else load_columns(vector, col0 + 64 * j, n, thread)

    @cute.jit
    def logits(self, acc, j: cutlass.Constexpr[int], bias, softcap: Float32, col0: Int32, n: Int32, thread: Int32):
        """In place: piece j of the accumulator becomes logits, -inf past the last class."""
        if const_expr(bias is not None):
            for v in self.values(j):
                acc[v] = acc[v] + shared_column(bias, v, thread)
        if const_expr(self.problem.softcap):
            inverse = 1.0 / softcap
            for v in self.values(j):
                acc[v] = tanh(acc[v] * inverse) * softcap
        if col0 + self.config.tile_n > n:
            for v in cutlass.range_constexpr(cute.size(acc)):
                if const_expr(v in self.values(j)):
                    if col0 + column_of(v, thread) >= n:
                        acc[v] = -Float32.inf


@cute.jit
def tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2x) + 1): within 2^-22 of it, which is not a relative error: a softcap of 1e4 leaves logits 1e-3."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * (2.0 * LOG2_E), fastmath=True) + 1.0)
