"""Attention forward on Hopper: o = softmax(x) v and lse, for x of `AttentionScores`.

A CTA has `num_wgs` blocks of 64 queries, one per consumer warp group. A producer warp loads tiles of k, v, bias and
mask. The softmax is online, in fp32: q k^T of the next tile and p v of the previous one are in flight together.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from quackish.ops.attention.arguments import BLOCK, ForwardArgs
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Item
from quackish.ops.attention.kernels.scores import ScoreBlock
from quackish.ops.attention.kernels.softmax import Softmax


class AttentionForwardSm90(Softmax, AttentionSm90):
    rows_are_queries = True
    v_has_pipeline = True
    least_tiles = 1

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.pingpong = self.d > 32  # at d 32 a triangle of L 768 takes 1.5 % longer with it (H200)

    @property
    def knows_full(self) -> bool:
        return self.problem.bias_aligned or self.problem.mask_aligned

    @property
    def tells_keys(self) -> bool:
        return super().tells_keys and self.d == 32  # at d 64 it takes 6 % longer with it (H200)

    @cute.jit
    def __call__(self, args: ForwardArgs, stream: CUstream):
        s = args.scores
        tensors = dict(q=self.like_q(s.q, s), k=self.like_k(s.k, s), v=self.like_k(s.v, s))
        self.launch(tensors, args, stream)

    @cute.jit
    def load_tile(self, cta: Cta, item: Item, n: Int32, state, is_full):
        """Loads tile n of k, and of bias and mask for an item's queries, and then that of v."""
        keys, values, head = cta.loaded, cta.values, item.head
        k, v = (self.part(cta, name, head.key_head, head.batch) for name in ("k", "v"))
        self.load(k, n, 0, state.index, keys.producer_get_barrier(state))
        self.load_scores(cta, item.head, item.tile, n, state, is_full)
        values.producer_acquire(state)
        self.load(v, n, 0, state.index, values.producer_get_barrier(state))

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        s, keys, values = cta.args.scores, cta.loaded, cta.values
        pv_mma = self.mma_of_rows()
        operands = self.own_operands(self.tile_k, cta)
        rK = self.fragments_b(operands[0].mmas[0], cta.shared.k)
        rV = self.fragments_b(pv_mma, self.transposed(cta.shared.v))
        x, p, o = self.accumulator(self.tile_k), self.operand(self.tile_k), self.accumulator(self.d)
        top, total = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))  # per row
        own = self.own_state(wg)
        read, previous = self.loaded_state(), self.loaded_state()
        unit = self.unit_of_scores(s)
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(cta.args), unroll=1):
            item = self.own_item(cta, own)
            (q,) = self.load_own(operands, cta, own.index, thread)
            q0, k0 = item.tile * self.tile_q + wg * BLOCK, item.first * self.tile_k
            block = ScoreBlock(item.head, q0=q0, k0=k0, wg=wg, thread=thread)
            o.fill(0.0)
            top.fill(-Float32.inf)
            total.fill(0.0)

            # the first tile
            keys.consumer_wait(read)
            self.multiply(x, *q, rK[None, None, None, read.index])
            at, tile = self.loaded_block(block, cta, read.index, item.first)
            cute.nvgpu.warpgroup.wait_group(0)
            self.scores(x, cta, read.index, at, None, None, tile.is_full, tile.kept)
            self.release(keys, read)
            self.exponentials(x, top, total, unit)
            self.round_to_operand(p, x)
            read.advance()
            for n in cutlass.range(item.first + 1, item.last, unroll=1):
                keys.consumer_wait(read)
                values.consumer_wait(previous)
                self.wait_to_issue(wg)
                self.multiply(x, *q, rK[None, None, None, read.index])
                self.multiply(o, [pv_mma], p, rV[None, None, None, previous.index])
                self.let_next_issue(wg)
                at, tile = self.loaded_block(block, cta, read.index, n)
                cute.nvgpu.warpgroup.wait_group(1)
                self.scores(x, cta, read.index, at, None, None, tile.is_full, tile.kept)
                self.release(keys, read)
                rescale = self.exponentials(x, top, total, unit)
                cute.nvgpu.warpgroup.wait_group(0)
                values.consumer_release(previous)
                previous.advance()
                for v in cutlass.range_constexpr(cute.size(o)):
                    o[v] = o[v] * rescale[v // 2 % 2]
                self.round_to_operand(p, x)
                read.advance()
            own = self.release_own(cta.own, own)
            values.consumer_wait(previous)
            self.multiply(o, [pv_mma], p, rV[None, None, None, previous.index])
            cute.nvgpu.warpgroup.wait_group(0)
            values.consumer_release(previous)
            previous.advance()
            self.finish(o, top, total, unit, cta.args, block)
        self.end_pingpong(wg)
