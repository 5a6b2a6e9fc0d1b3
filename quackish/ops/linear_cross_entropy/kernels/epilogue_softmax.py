"""Epilogue of Hopper's logits GEMM: exp_logits, stats of exponentials per row and tile, the targets' logits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.tile_store import Output, RowBlock, column_of, row_of, thread_rows
from quackish.kernels.math import encode_argmax, tanh
from quackish.ops.linear_cross_entropy.gemm_problems import SoftmaxArgs
from quackish.ops.linear_cross_entropy.kernels.exponents import log2_scale
from quackish.ops.linear_cross_entropy.kernels.logits import LogitsSm90, column_value
from quackish.ops.linear_cross_entropy.kernels.softmax_rows import RowStats, RowSums, SoftmaxRows


class SoftmaxSm90(SoftmaxRows, LogitsSm90):
    """exp_logits = e * d with e = exp(a - row_shift), of a tile of logits a, and each row's sum of e over the tile.

    With a logit_scale, e = exp(logit_scale * (a - row_shift)). d is the softcap's derivative.

    Also stores the target's logit if the tile contains it. A row with a logit more than HEADROOM above row_shift
    updates its row_max_bits and flags its tile; its exp_logits and stats may overflow. A second launch, with
    `recompute_flagged`, recomputes flagged tiles, shifted by row_max_bits, which equals row_shift in other rows.

    With `return_stats` also stores each row's sum of e * log2(e) and updates argmax_bits, which encode the maximum of
    the row and its first class.
    """

    @cute.jit
    def prepare(self, args: SoftmaxArgs, out: Output, block: RowBlock):
        """row_shift of the thread's two rows, in log2 units, and the columns of their targets in the tile."""
        shift_log2, target = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Int32)
        scale_log2 = log2_scale(args.logit_scale)
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            shift_log2[r], target[r] = Float32(0.0), Int32(-1)
            if i < block.m:
                shift_log2[r] = self.row_shift_log2(args, i, scale_log2)
                target[r] = (args.slot_target + i).load() - block.col0
        return shift_log2, target

    @cute.jit
    def __call__(self, acc, prefetched, args: SoftmaxArgs, out: Output, block: RowBlock):
        col0, m, n, thread = block.col0, block.m, block.n, block.thread
        row, (shift_log2, target) = block.row0 + thread_rows(thread), prefetched
        scale_log2 = log2_scale(args.logit_scale)
        self.store_target_logits(acc, target, args, row, col0, thread)
        stats = self.empty_stats(2)
        # With exp_logits, load the bias of all pieces first, or 16 to 24 bytes spill. Without, that would spill 32.
        stored = const_expr(self.output is not None)
        biases = [self.columns(args.bias, j, col0, n, thread) for j in range(self.num_pieces if stored else 0)]
        for j in cutlass.range_constexpr(self.num_pieces):
            if const_expr(stored):
                self.piece(acc, j, biases[j], args, scale_log2, shift_log2, stats, block)
                self.output(acc, j, out, block)
            else:
                # Always true for j = 0. Without this branch ptxas interleaves all pieces, and 200 bytes spill.
                if col0 + 2 * self.values(j)[0] < n:
                    bias = self.columns(args.bias, j, col0, n, thread)
                    self.piece(acc, j, bias, args, scale_log2, shift_log2, stats, block)
        for r in cutlass.range_constexpr(2):
            i = row + 8 * r
            at = Int64(i) * args.tiles + col0 // self.config.tile_n
            sums = RowSums(stats.max[r], *(self.quad_sum(x[r]) for x in (stats.sum, stats.wsum, stats.elog)))
            code = None
            if const_expr(self.updates_argmax):
                code = encode_argmax(sums.max, col0 + column_of(0, thread) + stats.argmax[r])
                code = cute.arch.warp_reduction(code, cutlass.max, threads_in_group=4)
            is_writer = (i < m) & (col0 < n) & (thread % 4 == 0)  # a cluster's second tile may be past the last class
            self.store_sums(args, i, at, sums, code, is_writer)
            self.flag(args, i, sums.max, m, scale_log2, shift_log2[r])

    @cute.jit
    def piece(
        self, acc, j: cutlass.Constexpr[int], bias, args: SoftmaxArgs, scale_log2, shift_log2, stats: RowStats,
        block: RowBlock,
    ):  # fmt: skip
        """Replaces piece j of the accumulator by exp_logits and updates the stats."""
        weights = self.columns(args.class_weight, j, block.col0, block.n, block.thread)
        self.make_logits(acc, j, bias, args.softcap, block)
        if const_expr(self.spec.smoothing):
            columns = block.n - block.col0
            for v in cutlass.range_constexpr(cute.size(acc)):
                if const_expr(v in self.values(j)):
                    w = None if const_expr(weights is None) else column_value(weights, v, block.thread)
                    if column_of(v, block.thread) < columns:  # -inf past the last class
                        self.add_weighted(acc[v], w, row_of(v), stats)
        inverse = 1.0 / args.softcap
        for v in self.values(j):
            r = row_of(v)
            acc[v] = self.exponential(acc[v], r, column_of(v, 0), stats, scale_log2, shift_log2[r], inverse)

    @cute.jit
    def store_target_logits(self, acc, target, args: SoftmaxArgs, row: Int32, col0: Int32, thread: Int32):
        """Stores the logits of the targets in this tile.

        Searching each piece while it is computed instead took 2 to 4 % of the GEMM with h 2048, 1 % with 4096.
        """
        for r in cutlass.range_constexpr(2):
            is_owner = (target[r] >> 1) % 4 == thread % 4  # one of the four threads that share the row
            if (target[r] >= 0) & (target[r] < self.config.tile_n) & is_owner:
                a = Float32(0.0)
                for v in cutlass.range_constexpr(cute.size(acc)):
                    if const_expr(row_of(v) == r):
                        a = acc[v] if column_of(v, thread) == target[r] else a
                if const_expr(args.bias is not None):
                    a = a + (args.bias + (col0 + target[r])).load().to(Float32)
                if const_expr(self.spec.softcap):
                    a = tanh(a * (1.0 / args.softcap)) * args.softcap
                (args.target_logit + (row + 8 * r)).store(a)

    def quad_sum(self, x):
        """The sum over the four threads that share a row."""
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
        return x + cute.arch.shuffle_sync_bfly(x, offset=2)
