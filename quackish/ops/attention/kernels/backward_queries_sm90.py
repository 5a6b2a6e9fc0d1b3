"""Backward of attention on Hopper, stationary in queries: dq, where the kernel for dk and dv stored no ds.

    p = exp2(x - shift)    ds = p * (do v^T - delta)    dq = scale * ds k

A CTA has `num_wgs` blocks of 64 queries and walks over the keys, like forward.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.ops.attention.arguments import BLOCK, QueriesArgs
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Item
from quackish.ops.attention.kernels.scores import ScoreBlock


class AttentionQueriesSm90(AttentionSm90):
    rows_are_queries = True
    stats_of = "own"
    pingpong = True
    tells_keys = False  # with it, the kernel takes 12 % longer (H200, L 1024)

    @cute.jit
    def __call__(self, args: QueriesArgs, stream: CUstream):
        s = args.scores
        tensors = dict(
            q=self.like_q(s.q, s), do=self.like_q(args.do, s), k=self.like_k(s.k, s), v=self.like_k(s.v, s)
        )  # fmt: skip
        self.launch(tensors, args, stream)

    def wait_at_start(self):
        """Does not wait: the kernel for dk and dv, launched right before, waited for all that this one reads.

        So CTAs start where CTAs of that kernel have ended, and wait for it before they write.
        """
        cute.arch.fence_acq_rel_gpu()

    def wait_at_end(self):
        after_previous()

    @cute.jit
    def load_tile(self, cta: Cta, item: Item, n: Int32, state, is_full):
        """Loads tile n of k and v, and of bias and mask for an item's queries."""
        head, barrier = item.head, cta.loaded.producer_get_barrier(state)
        for name in ("k", "v"):
            self.load(self.part(cta, name, head.key_head, head.batch), n, 0, state.index, barrier)
        self.load_scores(cta, item.head, item.tile, n, state, is_full)

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        s, args, shared, loaded = cta.args.scores, cta.args, cta.shared, cta.loaded
        dq_mma = self.mma_of_rows()
        operands = self.own_operands(self.tile_k, cta)
        rK, rV = (self.fragments_b(own.mmas[0], t) for own, t in zip(operands, (shared.k, shared.v), strict=True))
        rKt = self.fragments_b(dq_mma, self.transposed(shared.k))
        x, dp = self.accumulator(self.tile_k), self.accumulator(self.tile_k)
        dq, ds = self.accumulator(self.d), self.operand(self.tile_k)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        stats = cute.make_rmem_tensor((2, 2), Float32)
        shifts, delta = stats[None, 0], self.per_row(stats[None, 1])
        own = self.own_state(wg)
        read, previous = self.loaded_state(), self.loaded_state()
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(args), unroll=1):
            item = self.own_item(cta, own)
            q, do = self.load_own(operands, cta, own.index, thread)
            q0 = item.tile * self.tile_q + wg * BLOCK
            block = ScoreBlock(item.head, q0=q0, k0=Int32(0), wg=wg, thread=thread)
            self.read_stats(stats, shared.stats[None, None, own.index], Int32(0), thread)
            dq.fill(0.0)
            for j in cutlass.range(item.first, item.last, unroll=1):
                loaded.consumer_wait(read)
                self.wait_to_issue(wg)
                self.multiply(x, *q, rK[None, None, None, read.index])
                self.multiply(dp, *do, rV[None, None, None, read.index])
                self.let_next_issue(wg)
                at, tile = self.loaded_block(block, cta, read.index, j)
                cute.nvgpu.warpgroup.wait_group(1)  # x, and the dq before
                if j > item.first:
                    self.release(loaded, previous)
                    previous.advance()
                shift = self.shift(self.per_row(shifts), shifts, tile.n, item)
                self.scores(x, cta, read.index, at, shift, tanhs, tile.is_full, tile.kept)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                cute.nvgpu.warpgroup.wait_group(0)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = x[v] * (dp[v] - delta[v])
                    if const_expr(tanhs is not None):
                        x[v] = x[v] * (1.0 - tanhs[v] * tanhs[v])
                self.round_to_operand(ds, x)
                self.multiply(dq, [dq_mma], ds, rKt[None, None, None, read.index])
                read.advance()
            cute.nvgpu.warpgroup.wait_group(0)
            if item.last > item.first:
                self.release(loaded, previous)
                previous.advance()
            own = self.release_own(cta.own, own)
            for v in cutlass.range_constexpr(cute.size(dq)):
                dq[v] = dq[v] * s.scale
            cute.arch.griddepcontrol_wait()
            self.write_queries(dq, args.dq, s, block)
        self.end_pingpong(wg)
