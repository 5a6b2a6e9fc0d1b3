"""The epilogue of the logits GEMM: exponentials of the logits, their sum per row and tile, the targets' logits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.common.lce import LOG2_E, decode, encode
from quackish.kernels.common.logits import Logits, shared_column, tanh
from quackish.kernels.common.rows import fake_pointer
from quackish.kernels.common.tile_store import column_of, row_of, thread_rows

# A row with a logit this far above its shift is flagged: exp(60) is far from overflow, in bf16 and in the sum of
# 2^20 of them.
HEADROOM = 60.0


class Softmax(Logits):
    """exp_logits = exp(a - row_shift) * d for a tile of logits a, and each row's sum of exp(a - row_shift) in the tile.

    Also stores the target's logit if the tile contains it. A row with a logit more than HEADROOM above row_shift raises
    its row_max_bits and flags its tile. A second launch with `redo` recomputes flagged tiles, shifted by row_max_bits,
    which equals row_shift in rows that are not flagged. So exp_logits and sums may overflow here without harm.
    """

    def fake_args(self):
        p = self.problem
        weights = fake_pointer("float32" if p.weighted else None, aligned=False)
        wsum = fake_pointer("float32" if p.smoothing else None)
        row_shift = fake_pointer(None if p.redo else "float32", aligned=False)
        ints = [fake_pointer("int32", aligned=False) for _ in range(3)]
        floats = [fake_pointer("float32", aligned=False) for _ in range(2)]
        return (fake_pointer(p.bias_dtype, False), weights, row_shift, *ints, *floats, wsum, Float32(1), Int32(0))

    @cute.jit
    def tiles_to_redo(self, args, total: Int32) -> Int32:
        if args[5].load() == 0:
            total = Int32(0)
        return total

    @cute.jit
    def is_flagged(self, args, tm: Int32, m: Int32):
        per_cluster = const_expr(self.config.tile_m * self.config.cluster_m // 128)
        flags, last = args[5], cute.ceil_div(m, 128)
        flagged = Int32(0)
        for i in cutlass.range_constexpr(per_cluster):
            flagged = flagged | (flags + cutlass.min(1 + tm * per_cluster + i, last)).load()
        return flagged != 0

    @cute.jit
    def prepare(self, kept, args, row0: Int32, col0: Int32, m, live, start, thread: Int32):
        _, _, row_shift, slot_target, row_max_bits, *_ = args
        numbers, target = kept
        for r in cutlass.range_constexpr(2):
            i = row0 + thread_rows(thread) + 8 * r
            numbers[0, r], target[r] = Float32(0.0), Int32(-1)
            if i < m:
                if const_expr(self.problem.redo):
                    numbers[0, r] = decode((row_max_bits + i).load()) * LOG2_E
                else:
                    numbers[0, r] = (row_shift + i).load() * LOG2_E
                target[r] = (slot_target + i).load() - col0

    @cute.jit
    def __call__(self, acc, kept, args, out, d, row0: Int32, col0: Int32, m, n, ldd, wg: Int32, thread: Int32):
        bias, weights, _, _, row_max_bits, flags, part_sum, target_logit, part_wsum, softcap, num_tiles = args
        row, ref_log2, target = row0 + thread_rows(thread), kept[0][0, None], kept[1]
        self.take_target(acc, target, bias, softcap, target_logit, row, col0, thread)
        highest, sums, wsums = (cute.make_rmem_tensor((2,), Float32) for _ in range(3))
        highest.fill(-Float32.inf)
        sums.fill(0.0)
        wsums.fill(0.0)
        # All pieces' at once where E is stored, 16 to 24 bytes spill otherwise; where none is, 32 bytes spill so.
        biases = [self.columns(bias, j, col0, n, thread) for j in range(self.num_pieces if self.stages_output else 0)]
        for j in cutlass.range_constexpr(self.num_pieces):
            if const_expr(self.stages_output):
                self.piece(acc, j, biases[j], weights, softcap, ref_log2, highest, sums, wsums, col0, n, thread)
                self.output(acc, j, out, row0, col0, wg, thread)
            else:
                # always so for j = 0; without a branch ptxas works on all pieces at once, and 200 bytes spill
                if col0 + 2 * self.values(j)[0] < n:
                    its_bias = self.columns(bias, j, col0, n, thread)
                    self.piece(acc, j, its_bias, weights, softcap, ref_log2, highest, sums, wsums, col0, n, thread)
        for r in cutlass.range_constexpr(2):
            i = row + 8 * r
            at = Int64(i) * num_tiles + col0 // self.config.tile_n
            total, wtotal = self.quad_sum(sums[r]), self.quad_sum(wsums[r])
            if (i < m) & (col0 < n) & (thread % 4 == 0):  # a cluster's last tile may lie past the last class
                (part_sum + at).store(total)
                if const_expr(self.problem.smoothing):
                    (part_wsum + at).store(wtotal)
            if const_expr(not self.problem.redo):
                # in log2 units, as NaN and inf in row_shift must not flag: a maximum is never above either
                if (i < m) & (highest[r] * LOG2_E > ref_log2[r] + HEADROOM * LOG2_E):
                    cute.arch.atomic_max(row_max_bits + i, encode(highest[r]))
                    (flags + (1 + i // 128)).store(Int32(1))
                    flags.store(Int32(1))

    @cute.jit
    def piece(
        self, acc, j: cutlass.Constexpr[int], bias, weights, softcap: Float32, ref_log2, highest, sums, wsums,
        col0: Int32, n: Int32, thread: Int32
    ):  # fmt: skip
        """In place: piece j of the accumulator becomes E; its part of all that is said of its rows."""
        weights = self.columns(weights, j, col0, n, thread)
        self.logits(acc, j, bias, softcap, col0, n, thread)
        if const_expr(self.problem.smoothing):
            self.add_weighted(acc, j, weights, wsums, n - col0, thread)
        inverse = 1.0 / softcap
        for v in self.values(j):
            a = acc[v]
            if const_expr(not self.problem.redo):
                highest[row_of(v)] = cute.arch.fmax(highest[row_of(v)], a)
            e = cute.math.exp2(a * LOG2_E - ref_log2[row_of(v)], fastmath=True)
            sums[row_of(v)] = sums[row_of(v)] + e
            if const_expr(self.problem.softcap):
                e = e * (1.0 - (a * inverse) * (a * inverse))
            acc[v] = e

    @cute.jit
    def take_target(
        self, acc, target, bias, softcap: Float32, target_logit: cute.Pointer, row: Int32, col0: Int32, thread: Int32
    ):
        """The logits of the rows' targets, where the tile has them. Once a tile: looked for in each piece, with the
        pieces' values, they cost 2 to 4 % of the GEMM with h 2048, and 1 % with 4096."""
        for r in cutlass.range_constexpr(2):
            own = (target[r] >> 1) % 4 == thread % 4  # of the four threads that share the row
            if (target[r] >= 0) & (target[r] < self.config.tile_n) & own:
                a = Float32(0.0)
                for v in cutlass.range_constexpr(cute.size(acc)):
                    if const_expr(row_of(v) == r):
                        a = acc[v] if column_of(v, thread) == target[r] else a
                if const_expr(bias is not None):
                    a = a + (bias + (col0 + target[r])).load().to(Float32)
                if const_expr(self.problem.softcap):
                    a = tanh(a * (1.0 / softcap)) * softcap
                (target_logit + (row + 8 * r)).store(a)

    @cute.jit
    def add_weighted(self, acc, j: cutlass.Constexpr[int], weights, wsums, columns: Int32, thread: Int32):
        """Adds class weight * a of piece j: what label smoothing makes of the loss."""
        for v in cutlass.range_constexpr(cute.size(acc)):
            if const_expr(v in self.values(j)):
                w = Float32(1.0)
                if const_expr(weights is not None):
                    w = shared_column(weights, v, thread)
                if column_of(v, thread) < columns:  # what lies past the last class is -inf
                    weighted = w * acc[v]
                    if const_expr(weights is not None):
                        if (w == 0.0) & (acc[v] == -Float32.inf):  # a masked class that does not count
                            weighted = Float32(0.0)
                    wsums[row_of(v)] = wsums[row_of(v)] + weighted

    def quad_sum(self, x):
        """The sum over the four threads that share a row."""
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
        return x + cute.arch.shuffle_sync_bfly(x, offset=2)
