"""How attention's kernels store results: accumulators of d columns, rounded, in global memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from quackish.kernels.memory import vector_at
from quackish.ops.attention.arguments import ScoreArgs, Strided
from quackish.ops.attention.kernels.scores import ScoreBlock, pair_rows


@cute.jit
def transpose(words: cute.Tensor, lane: Int32):
    """Word i of lane j becomes word j of lane i, for four lanes."""
    for bit in cutlass.range_constexpr(1, 3):
        is_upper = (lane & bit) != 0
        for a in cutlass.range_constexpr(4):
            if const_expr(a & bit == 0):
                lower, upper = words[a], words[a + bit]
                received = cute.arch.shuffle_sync_bfly(lower if is_upper else upper, offset=bit)
                words[a] = received if is_upper else lower
                words[a + bit] = upper if is_upper else received


class Results:
    @cute.jit
    def write_rows(self, acc: cute.Tensor, to: cute.Pointer, stride: Int64, num_rows: Int32, d: Int32, thread: Int32):
        """Rounds an accumulator of d columns and stores its first num_rows rows, from registers: row 0 at `to`.

        Four lanes have two columns of each 8 columns of a row. They exchange them, so that each stores 16 bytes.
        """
        lane = thread % 4
        for r in cutlass.range_constexpr(2):
            row = pair_rows(thread) + 8 * r
            for j in cutlass.range_constexpr(0, self.d // 8, 4):
                values = cute.make_rmem_tensor((8,), self.dtype)
                for i in cutlass.range_constexpr(8):
                    values[i] = acc[4 * (j + i // 2) + 2 * r + i % 2].to(self.dtype)
                words = cute.recast_tensor(values, Int32)
                transpose(words, lane)
                if (row < num_rows) & (8 * (j + lane) < d):
                    vector_at(to, row * stride + 8 * (j + lane), 8).store(values.load())

    @cute.jit
    def write_queries(self, acc: cute.Tensor, to: Strided, args: ScoreArgs, block: ScoreBlock):
        """Stores an accumulator as the block's rows of a tensor like q."""
        base = self.start(to, block.head) + Int64(block.q0) * to.row
        self.write_rows(acc, base, to.row, args.num_q - block.q0, args.d, block.thread)
