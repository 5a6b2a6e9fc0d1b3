"""Backward of attention on Hopper: the gradient of a bias that is broadcast over batch, heads or both.

    dbias = sum over these of ds,    ds = exp2(x - shift) * (do v^T - delta)

A CTA has a tile of dbias, (num_wgs blocks of 64 queries) x (tile keys), and sums ds over the heads of its part in a
fixed order. It loads its tile of the bias once. The host sums the parts with PyTorch.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.memory import vector_at
from quackish.ops.attention.arguments import BLOCK, BiasArgs, ScoreArgs
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90, Tiles
from quackish.ops.attention.kernels.bias_items import BiasItem, BiasItems
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.scores import ScoreBlock


class AttentionBiasSm90(BiasItems, AttentionSm90):
    rows_are_queries = True
    stats_of = "loaded"

    @property
    def keeps_bias(self) -> bool:
        return self.bias is not None

    @property
    def knows_full(self) -> bool:
        return self.problem.mask_aligned

    def shared_tiles(self) -> dict[str, Tiles]:
        of_wgs = Tiles(self.own, self.config.num_wgs * self.config.num_stages)  # loaded, for each warp group
        of_bias = {"bias": Tiles(self.bias, self.config.own_stages)} if self.keeps_bias else {}
        return {"q": of_wgs, "do": of_wgs, **of_bias, **super().shared_tiles()}

    @cute.jit
    def __call__(self, args: BiasArgs, stream: CUstream):
        s = args.scores
        tensors = dict(
            q=self.like_q(s.q, s), do=self.like_q(args.do, s), k=self.like_k(s.k, s), v=self.like_k(s.v, s)
        )  # fmt: skip
        self.launch(tensors, args, stream)

    @cute.jit
    def item(self, turn: Int32, args: BiasArgs) -> BiasItem:
        s, item = args.scores, self.bias_item(self.in_turn(turn), args)
        if const_expr(self.problem.band):  # tiles without keys that take part are 0
            q0, k0, last = item.tile_q * self.tile_q, item.tile_k * self.tile_k, item.last
            if (k0 + self.tile_k - 1 + s.left < q0) | (k0 > q0 + self.tile_q - 1 + s.right):
                last = item.first
            item = item._replace(last=last)
        return item

    def bias_policy(self, args: ScoreArgs):
        """None: other CTAs read the same bias."""
        return None

    def bias_state(self, turn: Int32, produces: bool = False):
        """The state of an item in `Cta.biases`."""
        stages = self.config.own_stages
        return pipeline.PipelineState(stages, turn, turn % stages, turn // stages % 2 ^ int(produces))

    @cute.jit
    def load_kept_bias(self, cta: Cta, item: BiasItem, turn: Int32):
        if const_expr(self.keeps_bias):
            state = self.bias_state(turn, produces=True)
            cta.biases.producer_acquire(state)
            part = self.part_of_scores(cta, "bias", cta.args.scores.bias, item.head)
            self.load(part, item.tile_q, item.tile_k, state.index, cta.biases.producer_get_barrier(state))

    @cute.jit
    def load_tile(self, cta: Cta, item: BiasItem, n: Int32, state, is_full):
        """Loads an item's tiles of the n-th head."""
        wgs, barrier = self.config.num_wgs, cta.loaded.producer_get_barrier(state)
        head = self.head_at(n, cta.args, item.head)
        for name in ("q", "do"):
            part = self.part(cta, name, head.query_head, head.batch)
            for w in cutlass.range_constexpr(wgs):
                self.load(part, item.tile_q * wgs + w, 0, state.index * wgs + w, barrier)
        for name in ("k", "v"):
            self.load(self.part(cta, name, head.key_head, head.batch), item.tile_k, 0, state.index, barrier)
        self.load_scores(cta, head, item.tile_q, item.tile_k, state, is_full)
        self.load_stats(cta, head, item.tile_q, state.index, barrier)

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        c, args, shared, loaded = self.config, cta.args, cta.shared, cta.loaded
        mmas = [self.mma_of_scores(self.tile_k, add) for add in (False, True)]
        rQ, rDO = (self.fragments_a(mmas[0], t) for t in (shared.q, shared.do))
        rK, rV = (self.fragments_b(mmas[0], t) for t in (shared.k, shared.v))
        x, dp, total = (self.accumulator(self.tile_k) for _ in range(3))
        stats = cute.make_rmem_tensor((2, 2), Float32)
        shifts, delta = stats[None, 0], self.per_row(stats[None, 1])
        read = self.loaded_state()
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            q0 = item.tile_q * self.tile_q + wg * BLOCK
            block = ScoreBlock(item.head, q0=q0, k0=item.tile_k * self.tile_k, wg=wg, thread=thread)
            total.fill(0.0)
            if const_expr(self.keeps_bias):
                kept = self.bias_state(turn)
                cta.biases.consumer_wait(kept)
            for m in cutlass.range(item.first, self.last_of(item, args), unroll=1):
                loaded.consumer_wait(read)
                tile = self.loaded_tile(cta.walk, read.index, m)
                own = read.index * c.num_wgs + wg
                self.multiply(x, mmas, rQ[None, None, None, own], rK[None, None, None, read.index])
                self.multiply(dp, mmas, rDO[None, None, None, own], rV[None, None, None, read.index])
                self.read_stats(stats, shared.stats[None, None, read.index], wg * BLOCK, thread)
                at = block
                if const_expr(self.problem.has_unaligned):
                    at = block._replace(head=self.head_at(tile.n, args, item.head))
                cute.nvgpu.warpgroup.wait_group(0 if self.waits_once else 1)
                shift = self.shift(self.per_row(shifts), shifts, tile.n, item)
                of_scores = cta._replace(bias_stage=kept.index) if const_expr(self.keeps_bias) else cta
                self.scores(x, of_scores, read.index, at, shift, None, tile.is_full, tile.kept)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                if const_expr(not self.waits_once):
                    cute.nvgpu.warpgroup.wait_group(0)
                for v in cutlass.range_constexpr(cute.size(x)):
                    total[v] = total[v] + x[v] * (dp[v] - delta[v])
                self.release(loaded, read)
                read.advance()
            if const_expr(self.keeps_bias):
                self.release(cta.biases, kept)
            self.write_total(total, args, item, block)

    @cute.jit
    def write_total(self, total: cute.Tensor, args: BiasArgs, item: BiasItem, block: ScoreBlock):
        s, t, base = args.scores, args.dbias, self.start_of_part(args, item)
        for v in cutlass.range_constexpr(0, cute.size(total), 2):
            q, k = self.position(block, v)
            if (q < s.num_q) & (k < s.num_k):  # rows have room for a multiple of 8 columns
                pair = cute.make_rmem_tensor((2,), t.base.dtype)
                pair[0], pair[1] = (total[v + i].to(t.base.dtype) for i in range(2))
                vector_at(base, Int64(q) * t.row + k, 2).store(pair.load())
