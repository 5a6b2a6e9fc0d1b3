"""Items of the kernels that sum the gradient of a bias over the heads and batches that share it."""

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32, Int64

from quackish.ops.attention.kernels.items import Head


class BiasItem(NamedTuple):
    """A unit of work: a tile of dbias, and the heads [first, last) that are summed."""

    head: Head  # of dbias
    tile_q: Int32
    tile_k: Int32
    part: Int32
    first: Int32
    last: Int32


class BiasItems:
    """args: the kernel's, with `dbias`, `part`, `parts`, `batches` and `bias_heads`."""

    @cute.jit
    def items(self, args) -> Int32:
        s = args.scores
        tiles = cute.ceil_div(s.num_q, self.tile_q) * cute.ceil_div(s.num_k, self.tile_k)
        return tiles * args.batches * args.bias_heads * args.parts

    @cute.jit
    def bias_item(self, i: Int32, args) -> BiasItem:
        """The i-th item."""
        s = args.scores
        tiles_k, tiles_q = cute.ceil_div(s.num_k, self.tile_k), cute.ceil_div(s.num_q, self.tile_q)
        tile_k, i = i % tiles_k, i // tiles_k
        tile_q, i = i % tiles_q, i // tiles_q
        head, i = i % args.bias_heads, i // args.bias_heads
        batch, part = i % args.batches, i // args.batches
        summed = (s.batch // args.batches) * (s.heads // args.bias_heads)
        first, last = part * summed // args.parts, (part + 1) * summed // args.parts
        return BiasItem(
            head=Head(batch, head, Int32(0)), tile_q=tile_q, tile_k=tile_k, part=part, first=first, last=last
        )

    @cute.jit
    def head_at(self, i: Int32, args, head: Head) -> Head:
        """The i-th head that is summed; `head` is that of dbias."""
        s = args.scores
        per_batch = s.heads // args.bias_heads
        batch = i // per_batch if args.batches == 1 else head.batch
        query_head = i % per_batch if args.bias_heads == 1 else head.query_head
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
