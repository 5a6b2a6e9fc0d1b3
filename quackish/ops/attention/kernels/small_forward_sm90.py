"""Attention forward on Hopper for d 32 and at most 128 queries and keys: o = softmax(x) v and lse.

All keys of a row are in one accumulator, whose softmax needs no second tile.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from quackish.ops.attention.arguments import BLOCK, SmallForwardArgs
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.scores import ScoreBlock
from quackish.ops.attention.kernels.small_sm90 import SmallAttentionSm90
from quackish.ops.attention.kernels.softmax import Softmax


class AttentionSmallForwardSm90(Softmax, SmallAttentionSm90):
    rows_are_queries = True

    @cute.jit
    def __call__(self, args: SmallForwardArgs, stream: CUstream):
        s = args.scores
        self.launch(dict(q=self.like_q(s.q, s), k=self.like_k(s.k, s), v=self.like_k(s.v, s)), args, stream)

    def score_blocks(self, head: Head, row_wg: Int32, thread: Int32) -> list[ScoreBlock]:
        return [ScoreBlock(head, q0=row_wg * BLOCK, k0=Int32(0), wg=row_wg, thread=thread)]

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        s, args, shared, loaded = cta.args.scores, cta.args, cta.shared, cta.loaded
        worker, row_wg = self.worker_of(wg), self.rows_of_wg(wg)
        mmas, pv_mma = [self.mma_of_scores(BLOCK, add) for add in (False, True)], self.mma_of_rows()
        rQ, rK = self.fragments_a(mmas[0], shared.q), self.fragments_b(mmas[0], shared.k)
        rV = self.fragments_b(pv_mma, self.transposed(shared.v))
        x, p, o = self.accumulator(self.tile_k), self.operand(self.tile_k), self.accumulator(self.d)
        of_block = self.accumulator(BLOCK)
        parts = [cute.make_tensor(x.iterator + b * cute.size(of_block), of_block.layout) for b in range(self.blocks)]
        top, total = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))
        unit = self.unit_of_scores(s)
        tid, read = wg * 128 + thread, self.worker_state(worker)
        for i in cutlass.range(self.first_item(worker), self.items(args), self.num_workers(), unroll=1):
            item = self.bias_item(i, args)
            self.keep_bias(cta, item, row_wg, thread, tid)
            for n in cutlass.range(item.first, item.last, unroll=1):
                (block,) = self.score_blocks(self.head_at(n, args, item.head), row_wg, thread)
                tile0 = read.index * self.blocks
                loaded.consumer_wait(read)
                for b in cutlass.range_constexpr(self.blocks):
                    q, k = rQ[None, None, None, tile0 + row_wg], rK[None, None, None, tile0 + b]
                    self.multiply(parts[b], mmas, q, k)
                kept = self.kept_by_lane(s, block)
                o.fill(0.0)
                top.fill(-Float32.inf)
                total.fill(0.0)
                cute.nvgpu.warpgroup.wait_group(0)
                self.scores(x, self.of_block(cta, 0, tid), read.index, block, None, None, None, kept)
                self.exponentials(x, top, total, unit)
                self.round_to_operand(p, x)
                self.multiply_tiles(o, pv_mma, p, [rV[None, None, None, tile0 + b] for b in range(self.blocks)])
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(loaded, read)
                read = self.advanced(read)
                self.finish(o, top, total, unit, args, block)
