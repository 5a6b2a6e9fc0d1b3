"""The items of attention's kernels: which tile of which head a CTA has, and which tiles of the other side it needs."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from quackish.kernels.memory import load_at
from quackish.ops.attention.arguments import ScoreArgs, Strided
from quackish.ops.attention.kernels.mask_walk import MaskWalk


class Head(NamedTuple):
    """The batch and the head of a tile."""

    batch: Int32
    query_head: Int32
    key_head: Int32


class Item(NamedTuple):
    """A CTA's unit of work: its tile of a head, and the tiles [first, last) of the other side."""

    head: Head
    tile: Int32
    first: Int32
    last: Int32


class AttentionItems(MaskWalk):
    """Items are tiles of queries, unless a kernel overrides `items`, `rank_and_head` and `item_at`.

    args: the kernel's arguments
    """

    @cute.jit
    def items(self, args) -> Int32:
        s = args.scores
        return cute.ceil_div(s.num_q, self.tile_q) * s.heads * s.batch

    @cute.jit
    def turns(self, args) -> Int32:
        """How many items this CTA does."""
        items, (ctas, _, _) = self.items(args), cute.arch.grid_dim()
        return items // ctas + Int32(self.in_turn(items // ctas) < items)

    @cute.jit
    def in_turn(self, turn: Int32) -> Int32:
        """The number of this CTA's item in a turn. Every second turn goes backwards, because items may get shorter."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return turn * ctas + (cta if turn % 2 == 0 else ctas - 1 - cta)

    @cute.jit
    def item(self, turn: Int32, args):
        rank, head = self.rank_and_head(self.in_turn(turn), args.scores)
        return self.item_at(self.tile_of(rank, head, args.scores), head, args.scores)

    @cute.jit
    def rank_and_head(self, i: Int32, s: ScoreArgs):
        """(rank of the tile in its head, head) of the i-th item, where the first ranks have most work.

        If work differs, all heads of a rank come before the next rank.
        """
        tiles, heads = cute.ceil_div(s.num_q, self.tile_q), s.heads * s.batch
        if const_expr(self.problem.band or self.problem.mask):
            rank, head = i // heads, i % heads
        else:
            rank, head = i % tiles, i // tiles
        # dq = ds k starts with the heads whose ds is still in the L2 (H100, d 64: 0.884 to 0.876 ms of a whole step).
        head = heads - 1 - head
        return rank, Head(head // s.heads, head % s.heads, head % s.heads // s.group)

    @cute.jit
    def tile_of(self, rank: Int32, head: Head, s: ScoreArgs) -> Int32:
        if const_expr(self.problem.ordered):
            return load_at(self.start(s.order, head), Int64(rank) * s.order.row)
        if const_expr(self.problem.band and self.rows_are_queries):
            return cute.ceil_div(s.num_q, self.tile_q) - 1 - rank  # with causality, the last tiles have most keys
        return rank

    @cute.jit
    def start(self, t: Strided, head: Head) -> cute.Pointer:
        """Where a query head of t is."""
        return t.base + (Int64(head.batch) * t.batch + Int64(head.query_head) * t.head)

    @cute.jit
    def item_at(self, tile: Int32, head: Head, s: ScoreArgs) -> Item:
        first, last = self.key_tiles(s, tile * self.tile_q, self.tile_q, self.tile_k)
        return Item(head=head, tile=tile, first=first, last=last)

    @cute.jit
    def key_tiles(self, args: ScoreArgs, q0: Int32, queries: cutlass.Constexpr[int], tile: cutlass.Constexpr[int]):
        """[first, last) tile of keys with keys that take part in queries q0...; at least one."""
        first, end = Int32(0), args.num_k
        if const_expr(self.problem.band):
            first = cutlass.max(q0 - args.left, 0)
            end = cutlass.min(cutlass.min(q0 + queries, args.num_q) + args.right, args.num_k)
        first = cutlass.min(first, args.num_k - 1) // tile
        return first, cutlass.max(cute.ceil_div(cutlass.max(end, 0), tile), first + 1)

    @cute.jit
    def query_tiles(self, args: ScoreArgs, k0: Int32, keys: cutlass.Constexpr[int], tile: cutlass.Constexpr[int]):
        """The same for tiles of queries, but maybe none."""
        first, end = Int32(0), args.num_q
        if const_expr(self.problem.band):
            first = cutlass.max(k0 - args.right, 0)
            end = cutlass.max(cutlass.min(cutlass.min(k0 + keys, args.num_k) + args.left, args.num_q), first)
        return first // tile, first // tile if end == first else cute.ceil_div(end, tile)
