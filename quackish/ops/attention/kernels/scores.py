"""The scores of attention's kernels: accumulators of q k^T with scale, softcap, bias, mask, causality and window.

Scores are x = softcap(scale * q k^T) + bias, and -inf for keys that take no part. With a shift, as in backward, they
are in units of log2: log2(e) * x - shift. If lse is large, this difference has lost too many digits. The shift of such
a row is infinite, and its scores are log2(e) * (x - lse - residual), with x rounded as in forward.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quackish.kernels.math import LOG2_E, tanh
from quackish.kernels.memory import load_at, vector_at
from quackish.ops.attention.arguments import BLOCK, ScoreArgs
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile


class ScoreBlock(NamedTuple):
    """A warp group's (block_q, block_k) part of a tile of scores, and a thread of the warp group."""

    head: Head
    q0: Int32  # first query of the part
    k0: Int32  # first key
    wg: Int32  # from 0
    thread: Int32


class Shift(NamedTuple):
    """What backward subtracts from scores."""

    values: cute.Tensor  # like an accumulator
    any_large: Boolean  # True if one of the warp's rows has an infinite shift: see `AttentionRows`
    n: Int32  # the block's tile is the n-th one of `item`
    item: NamedTuple


@cute.jit
def pair_rows(thread: Int32) -> Int32:
    """The first of the thread's two rows of an accumulator, which are 8 apart."""
    return thread // 32 * 16 + thread % 32 // 4


class AttentionScores:
    @cute.jit
    def position(self, block: ScoreBlock, i: cutlass.Constexpr[int]):
        """(query, key) of value i of an accumulator."""
        row = pair_rows(block.thread) + i // 2 % 2 * 8
        column = block.thread % 4 * 2 + (i // 4 * 8 + i % 2)
        if const_expr(self.rows_are_queries):
            return block.q0 + row, block.k0 + column
        return block.q0 + column, block.k0 + row

    @cute.jit
    def scores(
        self, acc: cute.Tensor, cta: Cta, stage: Int32, block: ScoreBlock, shift: Shift | None, tanhs, is_full=None,
        kept=None,
    ):  # fmt: skip
        """acc = log2(e) * x - shift for acc = q k^T; or x / `unit_of_scores` without a shift.

        tanhs, for the softcap's tanh, is a tensor like acc, or None. is_full: 1 if the mask leaves all keys, else 0;
        None if unknown. kept: as in `LoadedTile`.
        """
        args = cta.args.scores
        factor = args.scale
        if const_expr(self.problem.softcap):
            inner, factor = args.scale / args.softcap, args.softcap
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = tanh(acc[i] * inner)
                if const_expr(tanhs is not None):
                    tanhs[i] = acc[i]
        if const_expr(shift is None):
            self.add_terms(acc, factor, cta, stage, block, None)
        elif not shift.any_large:
            self.add_terms(acc, factor, cta, stage, block, shift.values)
        else:
            block = self.opaque(block)
            self.add_terms(acc, factor, cta, stage, block, None)
            self.subtract(acc, cta, block, shift)
        if const_expr(self.masks_scores and is_full is None):
            self.mask_out(acc, cta, stage, block, kept)
        elif const_expr(self.masks_scores):
            if is_full == 0:
                self.mask_out(acc, cta, stage, block, kept)
        if self.cuts(args, block):
            for i in cutlass.range_constexpr(cute.size(acc)):
                if not self.takes_part(args, *self.position(block, i)):
                    acc[i] = -Float32.inf

    def opaque(self, block: ScoreBlock) -> ScoreBlock:
        """The same block. Addresses that are the same for all tiles of an item were computed before it, and spilled."""
        thread = cute.arch.shuffle_sync_bfly(block.thread, offset=0)
        return block._replace(q0=cute.arch.make_warp_uniform(block.q0), thread=thread)

    @cute.jit
    def add_terms(self, acc: cute.Tensor, factor: Float32, cta: Cta, stage: Int32, block: ScoreBlock, shift):
        """acc = log2(e) * x - shift for a shift like acc; x / `unit_of_scores` for None. factor: of q k^T."""
        args, of_bias = cta.args.scores, stage if cta.bias_stage is None else cta.bias_stage
        if const_expr(self.are_scaled_later and shift is None):
            if args.scale <= 0.0:
                for i in cutlass.range_constexpr(cute.size(acc)):
                    acc[i] = acc[i] * factor
        elif const_expr(self.problem.bias_dtype is None):
            for i in cutlass.range_constexpr(cute.size(acc)):
                self.add(acc, i, factor, None, shift)
        elif const_expr(self.bias is None):
            self.add_global_bias(acc, factor, args, block, shift)
        elif const_expr(self.bias.itemsize == 2):
            self.add_bias(acc, factor, cta.shared.bias[None, None, of_bias].iterator, block, shift)
        else:
            self.add_fp32_bias(acc, factor, cta.shared.bias[None, None, of_bias].iterator, block, shift)

    @cute.jit
    def subtract(self, acc: cute.Tensor, cta: Cta, block: ScoreBlock, shift: Shift):
        """acc = `scores` with a shift, for acc = x / `unit_of_scores`.

        Two values per row are selected, not two scores, and x is computed before they are read: otherwise up to 32
        bytes spill.
        """
        args = cta.args.scores
        head, _, _ = self.place(shift.n, shift.item, cta.args)
        of_head = cute.arch.make_warp_uniform(head.batch * args.heads + head.query_head)
        pairs = self.pairs_of_head(cta.args, of_head)
        unit = self.unit_of_scores(args)
        for i in cutlass.range_constexpr(cute.size(acc)):
            row = cutlass.min(self.position(block, i)[0], args.num_q - 1)
            pair = self.pair_of_row(cta.args, pairs, row)  # garbage in another row
            is_large = shift.values[i] == Float32.inf
            above = cute.math.fma(acc[i], unit, -(pair[0] if is_large else Float32(0.0)))
            acc[i] = cute.math.fma(above, Float32(LOG2_E), -(pair[1] if is_large else shift.values[i]))

    def pairs_of_head(self, args, of_head: Int32):
        """Where the pairs of a head's rows are, for `pair_of_row`."""
        return args.stats + Int64(2 * args.scores.batch * args.scores.heads + 2 * of_head) * args.stats_row

    def pair_of_row(self, args, pairs, row: Int32):
        """(lse, log2(e) * its residual) of a row whose shift is infinite."""
        return vector_at(pairs, 2 * row, 2)

    @cute.jit
    def shift(self, values: cute.Tensor, of_lane: cute.Tensor, n: Int32, item) -> Shift:
        """of_lane: shifts, in all lanes together those of all rows of the warp."""
        largest = of_lane[0]
        for i in cutlass.range_constexpr(1, cute.size(of_lane)):
            largest = cute.arch.fmax(largest, of_lane[i])
        return Shift(values, cute.arch.vote_any_sync(largest == Float32.inf), n, item)

    @property
    def are_scaled_later(self) -> bool:
        """True if forward multiplies by the scale where it multiplies by log2(e), which takes no instructions."""
        return self.problem.bias_dtype is None and not self.problem.softcap

    @cute.jit
    def unit_of_scores(self, args: ScoreArgs) -> Float32:
        """Positive, so that a row's largest value is that of its largest score."""
        if const_expr(not self.are_scaled_later):
            return Float32(1.0)
        return Float32(1.0) if args.scale <= 0.0 else args.scale

    @cute.jit
    def cuts(self, args: ScoreArgs, block: ScoreBlock) -> Boolean:
        """True if some keys of the block take no part for another reason than the mask."""
        last_k = block.k0 + self.block_k - 1
        cut = last_k >= args.num_k
        if const_expr(self.problem.band):
            last_q = block.q0 + self.block_q - 1
            cut = cut | (block.k0 + args.left < last_q) | (last_k > block.q0 + args.right)
        return cut

    @cute.jit
    def takes_part(self, args: ScoreArgs, q: Int32, k: Int32) -> Boolean:
        part = k < args.num_k
        if const_expr(self.problem.band):
            part = part & (k + args.left >= q) & (k <= q + args.right)
        return part

    def fragment(self, tile: SwizzledTile, pointer, block: ScoreBlock):
        """A function from an even j to the address of columns 8 j to 8 j + 15 of the accumulator."""
        if self.rows_are_queries:
            base = tile.rows_base(pointer, block.wg * BLOCK, block.thread)
            return lambda j: tile.rows_at(base, j)
        base = tile.columns_base(pointer, block.wg * BLOCK, block.thread)
        return lambda j: tile.columns_at(base, j)

    @cute.jit
    def add(self, acc: cute.Tensor, i: cutlass.Constexpr[int], factor: Float32, bias, shift):
        """Value i of acc becomes a score; bias: None for none."""
        has_bias = const_expr(bias is not None)
        if const_expr(shift is None):
            acc[i] = acc[i] * factor + (bias if has_bias else 0.0)
        else:
            added = bias * LOG2_E - shift[i] if has_bias else -shift[i]
            acc[i] = acc[i] * (factor * LOG2_E) + added

    @cute.jit
    def add_bias(self, acc: cute.Tensor, factor: Float32, bias: cute.Pointer, block: ScoreBlock, shift):
        address = self.fragment(self.bias, bias, block)
        for j in cutlass.range_constexpr(0, cute.size(acc) // 4, 2):
            load = self.bias.load_fp32 if self.d == 32 else self.bias.load  # at d 128 `load_fp32` costs 1.5 % (H200)
            values = load(address(j), not self.rows_are_queries).to(Float32)
            for i in cutlass.range_constexpr(8):
                self.add(acc, 4 * j + i, factor, values[i], shift)

    @cute.jit
    def add_fp32_bias(self, acc: cute.Tensor, factor: Float32, bias: cute.Pointer, block: ScoreBlock, shift):
        row, column = pair_rows(block.thread), block.thread % 4 * 2
        for i in cutlass.range_constexpr(0, cute.size(acc), 2):
            r, c = row + i // 2 % 2 * 8 + block.wg * BLOCK, column + i // 4 * 8
            if const_expr(self.rows_are_queries):
                values = self.bias.element(bias, r, c, 2)
                for n in cutlass.range_constexpr(2):
                    self.add(acc, i + n, factor, values[n], shift)
            else:
                for n in cutlass.range_constexpr(2):
                    self.add(acc, i + n, factor, self.bias.element(bias, c + n, r, 1)[0], shift)

    @cute.jit
    def add_global_bias(self, acc: cute.Tensor, factor: Float32, args: ScoreArgs, block: ScoreBlock, shift):
        base = self.start(args.bias, block.head)
        for i in cutlass.range_constexpr(cute.size(acc)):
            q, k = self.position(block, i)
            bias = Float32(0.0)
            if (q < args.num_q) & (k < args.num_k):
                bias = load_at(base, Int64(q) * args.bias.row + Int64(k) * args.bias.column).to(Float32)
            self.add(acc, i, factor, bias, shift)

    @cute.jit
    def read_stats(self, stats: cute.Tensor, shared: cute.Tensor, row0: Int32, thread: Int32):
        """stats (2, 2) = (shift, delta) of the thread's two rows. shared: (rows, 2), and row0 is the accumulator's."""
        for r in cutlass.range_constexpr(2):
            for n in cutlass.range_constexpr(2):
                stats[r, n] = shared[row0 + pair_rows(thread) + 8 * r, n]

    def per_row(self, values: cute.Tensor):
        """(2,) values of the thread's two rows, as a tensor like an accumulator."""
        return cute.make_tensor(values.iterator, cute.make_layout((2, 2, self.config.tile // 8), stride=(0, 1, 0)))

    def per_column(self, values: cute.Pointer, thread: Int32):
        """Values of an accumulator's columns, as a tensor like an accumulator."""
        layout = cute.make_layout((2, 2, self.config.tile // 8), stride=(1, 0, 8))
        return cute.make_tensor(values + thread % 4 * 2, layout)

    @cute.jit
    def mask_out(self, acc: cute.Tensor, cta: Cta, stage: Int32, block: ScoreBlock, kept):
        args = cta.args.scores
        if const_expr(self.problem.mask_of_keys):
            self.mask_out_keys(acc, kept, block)
        elif const_expr(self.mask is None):
            base = self.start(args.mask, block.head)
            for i in cutlass.range_constexpr(cute.size(acc)):
                q, k = self.position(block, i)
                keep = Int32(0)
                if (q < args.num_q) & (k < args.num_k):
                    keep = load_at(base, Int64(q) * args.mask.row + Int64(k) * args.mask.column).to(Int32)
                if keep == 0:
                    acc[i] = -Float32.inf
        else:
            mask = cta.shared.mask[None, None, stage].iterator
            row, column = pair_rows(block.thread), block.thread % 4 * 2
            for i in cutlass.range_constexpr(0, cute.size(acc), 2):
                r, c = row + i // 2 % 2 * 8 + block.wg * BLOCK, column + i // 4 * 8
                if const_expr(self.rows_are_queries):
                    pair = cute.recast_tensor(self.mask.element(mask, r, c, 2), cutlass.Uint16)[0].to(Int32)
                    keeps = [pair & 0xFF, pair & 0xFF00]
                else:
                    keeps = [self.mask.element(mask, c + n, r, 1)[0] for n in range(2)]
                for n in cutlass.range_constexpr(2):
                    if keeps[n] == 0:
                        acc[i + n] = -Float32.inf

    @cute.jit
    def loaded_block(self, block: ScoreBlock, cta: Cta, stage: Int32, n: Int32):
        """(block with the keys of a loaded tile, the `LoadedTile`), for kernels that walk over keys."""
        tile = self.loaded_tile(cta.walk, stage, n)
        block = block._replace(k0=tile.n * self.tile_k)
        if const_expr(not self.tells_keys):
            tile = tile._replace(kept=self.kept_by_lane(cta.args.scores, block, tile.is_full))
        return block, tile

    @cute.jit
    def kept_by_lane(self, args: ScoreArgs, block: ScoreBlock, is_full=None):
        """A lane's part of a mask of keys, 0 where it leaves out a key; None without one. is_full: as in `scores`.

        It is loaded before the scores are waited for.
        """
        if const_expr(not (self.masks_scores and self.problem.mask_of_keys)):
            return None
        kept = cute.make_rmem_tensor((self.block_k // 32,), Int32)
        kept.fill(1)
        if const_expr(is_full is None):
            self.load_kept_keys(kept, args, block)
        else:
            if is_full == 0:
                self.load_kept_keys(kept, args, block)
        return kept

    @cute.jit
    def load_kept_keys(self, kept: cute.Tensor, args: ScoreArgs, block: ScoreBlock):
        for j in cutlass.range_constexpr(cute.size(kept)):
            kept[j] = self.keep(args, block.head, block.k0 + (32 * j + block.thread % 32))

    @cute.jit
    def mask_out_keys(self, acc: cute.Tensor, kept, block: ScoreBlock):
        """`mask_out` for a mask of keys. kept: words of bits if `tells_keys`, else a value per lane."""
        words = kept
        if const_expr(not self.tells_keys):
            words = [cute.arch.vote_ballot_sync(kept[j] != 0) for j in range(cute.size(kept))]
        common = words[0]
        for j in cutlass.range_constexpr(1, len(words)):
            common = common & words[j]
        if common != -1:
            for j in cutlass.range_constexpr(len(words)):
                bits = words[j] >> block.thread % 4 * 2
                for i in cutlass.range_constexpr(16):
                    if (bits >> (i // 4 * 8 + i % 2)) & 1 == 0:
                        acc[16 * j + i] = -Float32.inf

    @cute.jit
    def keep(self, args: ScoreArgs, head: Head, k: Int32) -> Int32:
        """Not 0 if key k takes part by a mask of keys. A k past the last key counts as the last one."""
        at = Int64(cutlass.min(k, args.num_k - 1)) * args.mask.column
        return load_at(self.start(args.mask, head), at).to(Int32)

    def kept_rows(self, s: ScoreArgs, head: Head, k0: Int32, thread: Int32) -> list | None:
        """A mask of keys for the thread's two rows of keys k0..., 0 where it leaves one out; None without a mask."""
        if not self.problem.mask_of_keys:
            return None
        return [self.keep(s, head, k0 + pair_rows(thread) + 8 * r) for r in range(2)]

    @cute.jit
    def zero_rows(self, acc: cute.Tensor, kept):
        """acc = 0 in rows of keys that the mask of keys leaves out, where it is garbage. kept: of `kept_rows`."""
        if const_expr(kept is not None):
            for i in cutlass.range_constexpr(cute.size(acc)):
                acc[i] = acc[i] if kept[i // 2 % 2] != 0 else Float32(0.0)
