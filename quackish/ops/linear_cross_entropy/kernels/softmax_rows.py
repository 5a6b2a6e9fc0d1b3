"""The softmax of a row of logits, one value at a time: shared by the epilogues of the logits GEMMs of all GPUs."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quackish.kernels.math import LOG2_E, decode, encode
from quackish.ops.linear_cross_entropy.gemm_problems import SoftmaxArgs
from quackish.ops.linear_cross_entropy.kernels.exponents import HEADROOM, LEAST_LOG2, shift_in_log2
from quackish.ops.linear_cross_entropy.row_problems import ROW_TILE


class RowStats(NamedTuple):
    """Statistics of each of a thread's rows, over its columns of a tile."""

    max: cute.Tensor  # of the logits
    argmax: cute.Tensor  # first column with that logit, relative to the thread's first column; with return_stats
    sum: cute.Tensor  # of exponentials e
    wsum: cute.Tensor  # of class weight * logit; with smoothing
    elog: cute.Tensor  # of e * log2(e); with return_stats


class RowSums(NamedTuple):
    """Statistics of a row over all columns of a tile."""

    max: Float32
    sum: Float32
    wsum: Float32
    elog: Float32


class SoftmaxRows:
    """Methods of an epilogue. Its spec is a Softmax."""

    @property
    def updates_argmax(self) -> bool:
        return self.spec.return_stats and not self.spec.recompute_flagged

    @cute.jit
    def num_tiles(self, args: SoftmaxArgs, total: Int32) -> Int32:
        if const_expr(self.spec.recompute_flagged):
            if args.flags.load() == 0:
                total = Int32(0)
        return total

    @cute.jit
    def is_selected(self, args: SoftmaxArgs, tm: Int32, m: Int32):
        selected = True
        if const_expr(self.spec.recompute_flagged):
            per_cluster = const_expr(self.config.cluster_rows // ROW_TILE)
            flagged, last = Int32(0), cute.ceil_div(m, ROW_TILE)
            for i in cutlass.range_constexpr(per_cluster):
                flagged = flagged | (args.flags + cutlass.min(1 + tm * per_cluster + i, last)).load()
            selected = flagged != 0
        return selected

    @cute.jit
    def row_shift_log2(self, args: SoftmaxArgs, i: Int32, scale_log2) -> Float32:
        """row_shift of row i in log2 units."""
        if const_expr(self.spec.recompute_flagged):
            shift = decode((args.row_max_bits + i).load())
        else:
            shift = (args.row_shift + i).load()
        return shift_in_log2(shift, scale_log2)

    def empty_stats(self, rows: int) -> RowStats:
        stats = RowStats(
            *(cute.make_rmem_tensor((rows,), dtype) for dtype in (Float32, Int32, Float32, Float32, Float32))
        )
        stats.max.fill(-Float32.inf)
        stats.argmax.fill(0)
        for zeros in (stats.sum, stats.wsum, stats.elog):
            zeros.fill(0.0)
        return stats

    @cute.jit
    def exponential(
        self, a: Float32, r: cutlass.Constexpr[int], column, stats: RowStats,
        scale_log2, shift_log2: Float32, inverse: Float32,
    ):  # fmt: skip
        """exp_logit of logit a, which joins the stats of the thread's row r.

        column: relative to the thread's first. inverse: 1 / softcap.
        """
        if const_expr(self.updates_argmax):
            stats.argmax[r] = Int32(column) if a > stats.max[r] else stats.argmax[r]
        if const_expr(not self.spec.recompute_flagged):
            stats.max[r] = cute.arch.fmax(stats.max[r], a)
        # Rounded once, as the target's term in rows.py. With a negative shift instead, 32 bytes spill.
        log2 = -cute.math.fma(-a, Float32(scale_log2), shift_log2)
        e = cute.math.exp2(log2, fastmath=True)
        stats.sum[r] = stats.sum[r] + e
        if const_expr(self.spec.return_stats):
            stats.elog[r] = stats.elog[r] + e * cute.arch.fmax(log2, LEAST_LOG2)
        if const_expr(self.spec.softcap):
            e = e * (1.0 - (a * inverse) * (a * inverse))
        return e

    @cute.jit
    def add_weighted(self, a: Float32, w, r: cutlass.Constexpr[int], stats: RowStats):
        """Adds class weight w (None: 1) times logit a to the row's sum, for label smoothing."""
        weighted = a
        if const_expr(w is not None):
            weighted = w * a
            if (w == 0.0) & (a == -Float32.inf):  # a masked class of weight 0
                weighted = Float32(0.0)
        stats.wsum[r] = stats.wsum[r] + weighted

    @cute.jit
    def store_sums(self, args: SoftmaxArgs, i: Int32, at: Int64, sums: RowSums, code, is_writer: Boolean):
        """Stores row i's sums over a tile of classes at index `at`. code: of encode_argmax, with updates_argmax."""
        if is_writer:
            (args.part_sum + at).store(sums.sum)
            if const_expr(self.spec.smoothing):
                (args.part_wsum + at).store(sums.wsum)
            if const_expr(self.spec.return_stats):
                (args.part_elog + at).store(sums.elog)
            if const_expr(self.updates_argmax):
                cute.arch.atomic_max(args.argmax_bits + i, code)

    @cute.jit
    def flag(self, args: SoftmaxArgs, i: Int32, row_max: Float32, m: Int32, scale_log2, shift_log2: Float32):
        """Flags the tile of row i if a logit is far above its row_shift."""
        if const_expr(not self.spec.recompute_flagged):
            # false if row_shift is NaN or inf
            if (i < m) & (row_max * scale_log2 > shift_log2 + HEADROOM * LOG2_E):
                cute.arch.atomic_max(args.row_max_bits + i, encode(row_max))
                (args.flags + (1 + i // ROW_TILE)).store(Int32(1))
                args.flags.store(Int32(1))
