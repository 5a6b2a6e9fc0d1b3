"""Epilogue of the logits GEMM: exp_logits, stats of exponentials per row and tile, the targets' logits."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.gemm import SoftmaxArgs
from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.exponents import HEADROOM, LEAST_LOG2, log2_scale, shift_in_log2
from quackish.kernels.common.logits import Logits, column_value
from quackish.kernels.common.math import LOG2_E, decode, encode, encode_argmax, tanh
from quackish.kernels.common.tile_store import Block, Output, column_of, row_of, thread_rows


class RowStats(NamedTuple):
    """Statistics of each of a thread's two rows, over its columns of a tile."""

    max: cute.Tensor  # of the logits
    argmax: cute.Tensor  # first column with that logit, relative to the thread's first column; with return_stats
    sum: cute.Tensor  # of exponentials e
    wsum: cute.Tensor  # of class weight * logit; with smoothing
    elog: cute.Tensor  # of e * log2(e); with return_stats


class Softmax(Logits):
    """exp_logits = e * d with e = exp(a - row_shift), of a tile of logits a, and each row's sum of e over the tile.

    With a logit_scale, e = exp(logit_scale * (a - row_shift)). d is the softcap's derivative.

    Also stores the target's logit if the tile contains it. A row with a logit more than HEADROOM above row_shift
    updates its row_max_bits and flags its tile; its exp_logits and stats may overflow. A second launch, with
    `recompute_flagged`, recomputes flagged tiles, shifted by row_max_bits, which equals row_shift in other rows.

    With `return_stats` also stores each row's sum of e * log2(e) and updates argmax_bits, which encode the maximum of
    the row and its first class.
    """

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.updates_argmax = problem.return_stats and not problem.recompute_flagged

    @cute.jit
    def num_tiles(self, args: SoftmaxArgs, total: Int32) -> Int32:
        if const_expr(self.problem.recompute_flagged):
            if args.flags.load() == 0:
                total = Int32(0)
        return total

    @cute.jit
    def is_selected(self, args: SoftmaxArgs, tm: Int32, m: Int32):
        selected = True
        if const_expr(self.problem.recompute_flagged):
            per_cluster = const_expr(self.config.tile_m * self.config.cluster_m // ROW_TILE)
            flagged, last = Int32(0), cute.ceil_div(m, ROW_TILE)
            for i in cutlass.range_constexpr(per_cluster):
                flagged = flagged | (args.flags + cutlass.min(1 + tm * per_cluster + i, last)).load()
            selected = flagged != 0
        return selected

    @cute.jit
    def prepare(self, args: SoftmaxArgs, out: Output, block: Block):
        """row_shift of the thread's two rows, in log2 units, and the columns of their targets in the tile."""
        shift_log2, target = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Int32)
        scale_log2 = log2_scale(args.logit_scale)
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            shift_log2[r], target[r] = Float32(0.0), Int32(-1)
            if i < block.m:
                if const_expr(self.problem.recompute_flagged):
                    shift_log2[r] = shift_in_log2(decode((args.row_max_bits + i).load()), scale_log2)
                else:
                    shift_log2[r] = shift_in_log2((args.row_shift + i).load(), scale_log2)
                target[r] = (args.slot_target + i).load() - block.col0
        return shift_log2, target

    @cute.jit
    def __call__(self, acc, prefetched, args: SoftmaxArgs, out: Output, block: Block):
        col0, m, n, thread = block.col0, block.m, block.n, block.thread
        row, (shift_log2, target) = block.row0 + thread_rows(thread), prefetched
        scale_log2 = log2_scale(args.logit_scale)
        self.store_target_logits(acc, target, args, row, col0, thread)
        dtypes = Float32, Int32, Float32, Float32, Float32
        stats = RowStats(*(cute.make_rmem_tensor((2,), dtype) for dtype in dtypes))
        stats.max.fill(-Float32.inf)
        stats.argmax.fill(0)
        for zeros in (stats.sum, stats.wsum, stats.elog):
            zeros.fill(0.0)
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
            row_max = stats.max[r]
            row_sum, row_wsum, row_elog = (self.quad_sum(x[r]) for x in (stats.sum, stats.wsum, stats.elog))
            if const_expr(self.updates_argmax):
                code = encode_argmax(row_max, col0 + column_of(0, thread) + stats.argmax[r])
                code = cute.arch.warp_reduction(code, cutlass.max, threads_in_group=4)
            if (i < m) & (col0 < n) & (thread % 4 == 0):  # a cluster's second tile may be past the last class
                (args.part_sum + at).store(row_sum)
                if const_expr(self.problem.smoothing):
                    (args.part_wsum + at).store(row_wsum)
                if const_expr(self.problem.return_stats):
                    (args.part_elog + at).store(row_elog)
                if const_expr(self.updates_argmax):
                    cute.arch.atomic_max(args.argmax_bits + i, code)
            if const_expr(not self.problem.recompute_flagged):
                # false if row_shift is NaN or inf
                if (i < m) & (row_max * scale_log2 > shift_log2[r] + HEADROOM * LOG2_E):
                    cute.arch.atomic_max(args.row_max_bits + i, encode(row_max))
                    (args.flags + (1 + i // ROW_TILE)).store(Int32(1))
                    args.flags.store(Int32(1))

    @cute.jit
    def piece(
        self, acc, j: cutlass.Constexpr[int], bias, args: SoftmaxArgs, scale_log2, shift_log2, stats: RowStats,
        block: Block,
    ):  # fmt: skip
        """Replaces piece j of the accumulator by exp_logits and updates the stats."""
        weights = self.columns(args.class_weight, j, block.col0, block.n, block.thread)
        self.make_logits(acc, j, bias, args.softcap, block)
        if const_expr(self.problem.smoothing):
            self.add_weighted(acc, j, weights, stats.wsum, block.n - block.col0, block.thread)
        inverse = 1.0 / args.softcap
        for v in self.values(j):
            a, r = acc[v], row_of(v)
            if const_expr(self.updates_argmax):
                stats.argmax[r] = Int32(column_of(v, 0)) if a > stats.max[r] else stats.argmax[r]
            if const_expr(not self.problem.recompute_flagged):
                stats.max[r] = cute.arch.fmax(stats.max[r], a)
            log2 = a * scale_log2 - shift_log2[r]
            e = cute.math.exp2(log2, fastmath=True)
            stats.sum[r] = stats.sum[r] + e
            if const_expr(self.problem.return_stats):
                stats.elog[r] = stats.elog[r] + e * cute.arch.fmax(log2, LEAST_LOG2)
            if const_expr(self.problem.softcap):
                e = e * (1.0 - (a * inverse) * (a * inverse))
            acc[v] = e

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
                if const_expr(self.problem.softcap):
                    a = tanh(a * (1.0 / args.softcap)) * args.softcap
                (args.target_logit + (row + 8 * r)).store(a)

    @cute.jit
    def add_weighted(self, acc, j: cutlass.Constexpr[int], weights, wsums, columns: Int32, thread: Int32):
        """Adds class weight * logit of piece j to the row's sum, for label smoothing."""
        for v in cutlass.range_constexpr(cute.size(acc)):
            if const_expr(v in self.values(j)):
                w = Float32(1.0)
                if const_expr(weights is not None):
                    w = column_value(weights, v, thread)
                if column_of(v, thread) < columns:  # -inf past the last class
                    weighted = w * acc[v]
                    if const_expr(weights is not None):
                        if (w == 0.0) & (acc[v] == -Float32.inf):  # a masked class of weight 0
                            weighted = Float32(0.0)
                    wsums[row_of(v)] = wsums[row_of(v)] + weighted

    def quad_sum(self, x):
        """The sum over the four threads that share a row."""
        x = x + cute.arch.shuffle_sync_bfly(x, offset=1)
        return x + cute.arch.shuffle_sync_bfly(x, offset=2)
