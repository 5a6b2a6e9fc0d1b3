"""Backward of attention on Hopper: dq = scale * ds k, for ds that the kernel for dk and dv stored as dbias.

A CTA has `num_wgs` blocks of 64 queries and walks over the keys, like forward.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from quackish.ops.attention.arguments import BLOCK, ProductArgs
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90, Tiles
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Item
from quackish.ops.attention.kernels.loads import EVICT_FIRST
from quackish.ops.attention.kernels.scores import ScoreBlock
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile


class AttentionProductSm90(AttentionSm90):
    rows_are_queries = True
    tells_keys = False  # ds is 0 where a key takes no part

    def shared_tiles(self) -> dict[str, Tiles]:
        self.ds = SwizzledTile(self.dtype, BLOCK, self.tile_k)
        return {"ds": Tiles(self.ds, self.config.num_wgs * self.config.num_stages), **super().shared_tiles()}

    @cute.jit
    def __call__(self, args: ProductArgs, stream: CUstream):
        s = args.scores
        self.launch(dict(ds=self.like_scores(args.ds, s), k=self.like_k(s.k, s)), args, stream)

    @cute.jit
    def load_tile(self, cta: Cta, item: Item, n: Int32, state, is_full):
        """Loads tile n of ds and k."""
        head, wgs, barrier = item.head, self.config.num_wgs, cta.loaded.producer_get_barrier(state)
        ds = self.part(cta, "ds", head.query_head, head.batch)
        for w in cutlass.range_constexpr(wgs):
            self.load(ds, item.tile * wgs + w, n, state.index * wgs + w, barrier, Int64(EVICT_FIRST))
        k = self.part(cta, "k", head.key_head, head.batch)
        self.load(k, n, 0, state.index, barrier)

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        c, args, s, loaded = self.config, cta.args, cta.args.scores, cta.loaded
        mma = self.mma_of_rows(in_registers=False)
        rDS = self.fragments_a(mma, cta.shared.ds)
        rK = self.fragments_b(mma, self.transposed(cta.shared.k))
        dq = self.accumulator(self.d)
        read = self.loaded_state()
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            dq.fill(0.0)
            for _ in cutlass.range(item.first, self.last_of(item, args), unroll=1):
                loaded.consumer_wait(read)
                of_ds = rDS[None, None, None, read.index * c.num_wgs + wg]
                self.multiply(dq, [mma], of_ds, rK[None, None, None, read.index])
                warpgroup.wait_group(0)
                loaded.consumer_release(read)
                read.advance()
            q0 = item.tile * self.tile_q + wg * BLOCK
            block = ScoreBlock(item.head, q0=q0, k0=Int32(0), wg=wg, thread=thread)
            for v in cutlass.range_constexpr(cute.size(dq)):
                dq[v] = dq[v] * s.scale
            self.write_queries(dq, args.dq, s, block)
