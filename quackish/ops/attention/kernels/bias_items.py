"""Items of kernels that walk over the heads and batches that share a matrix of the bias."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from quackish.ops.attention.kernels.items import Head


class BiasItem(NamedTuple):
    """A unit of work: a tile of the bias, and the heads [first, last) of those that share it."""

    head: Head  # of the bias
    tile_q: Int32
    tile_k: Int32
    part: Int32
    first: Int32
    last: Int32


class BiasItems:
    """The kernel's args have `parts`, `batches` and `heads_of_bias`; for `start_of_part` also `dbias` and `part`."""

    @cute.jit
    def items(self, args) -> Int32:
        s = args.scores
        tiles = cute.ceil_div(s.num_q, self.tile_q) * cute.ceil_div(s.num_k, self.tile_k)
        return tiles * args.batches * args.heads_of_bias * args.parts

    @cute.jit
    def bias_item(self, i: Int32, args) -> BiasItem:
        """The i-th item."""
        s = args.scores
        tiles_k, tiles_q = cute.ceil_div(s.num_k, self.tile_k), cute.ceil_div(s.num_q, self.tile_q)
        tile_k, i = i % tiles_k, i // tiles_k
        tile_q, i = i % tiles_q, i // tiles_q
        head, i = i % args.heads_of_bias, i // args.heads_of_bias
        batch, part = i % args.batches, i // args.batches
        summed = (s.batch // args.batches) * (s.heads // args.heads_of_bias)
        per_part = cute.ceil_div(summed, args.parts)  # the host chooses parts so that none is empty
        first = cutlass.min(part * per_part, summed)
        return BiasItem(
            head=Head(batch, head, Int32(0)), tile_q=tile_q, tile_k=tile_k, part=part, first=first,
            last=cutlass.min(first + per_part, summed),
        )  # fmt: skip

    @cute.jit
    def head_at(self, i: Int32, args, head: Head) -> Head:
        """The i-th of the heads that share `head` of the bias."""
        s = args.scores
        per_batch = s.heads // args.heads_of_bias
        batch = i // per_batch if args.batches == 1 else head.batch
        query_head = i % per_batch if args.heads_of_bias == 1 else head.query_head
        return Head(batch, query_head, query_head // s.group)

    @cute.jit
    def place(self, n: Int32, item: BiasItem, args):
        """The walk is over heads."""
        return self.head_at(n, args, item.head), item.tile_q * self.tile_q, item.tile_k * self.tile_k

    @cute.jit
    def start_of_part(self, args, item: BiasItem) -> cute.Pointer:
        """Where an item's head of dbias is, in its part."""
        t, head = args.dbias, item.head
        return t.base + (Int64(item.part) * args.part + Int64(head.batch) * t.batch + Int64(head.query_head) * t.head)
