"""Backward of attention on Hopper: dq, and the gradient of a broadcast bias.

    ds = exp2(x - shift) * (do v^T - delta)    dq = scale * ds k    dbias = sum of ds

As in the kernel for dbias alone, a CTA has a tile of the bias and walks over heads. It multiplies each ds with its
keys, and the CTAs of a cluster, which have all keys of the same queries, sum these products in a fixed order.
"""

import dataclasses

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.memory import load_at
from quackish.ops.attention.arguments import BLOCK, EMPTY, FULL, BiasArgs
from quackish.ops.attention.kernels.backward_bias_sm90 import AttentionBiasSm90
from quackish.ops.attention.kernels.base_sm90 import Tiles
from quackish.ops.attention.kernels.bias_items import BiasItem
from quackish.ops.attention.kernels.cluster_sum import ClusterSum, received_sum, send_to_owner
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.mask_walk import WalkTiles
from quackish.ops.attention.kernels.scores import ScoreBlock


class AttentionQueriesBiasSm90(AttentionBiasSm90):
    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.cluster = problem.ctas

    def tile_sizes(self) -> tuple[int, int]:
        return self.config.num_wgs * BLOCK, self.problem.blocks * BLOCK

    def shared_tiles(self) -> dict[str, Tiles]:
        of_q, of_k = (Tiles(self.own, n * self.config.num_stages) for n in (self.config.num_wgs, self.problem.blocks))
        return {"q": of_q, "do": of_q, "k": of_k, "v": of_k, "bias": Tiles(self.bias, self.config.own_stages)}

    def pipeline(self, num_stages: int, num_bytes: int, num_wgs: int):
        """A pipeline of this CTA alone. CUTLASS would let only the first CTA of a cluster release stages."""
        made = super().pipeline(num_stages, num_bytes, num_wgs)
        return dataclasses.replace(made, is_signaling_thread=cute.arch.lane_idx() == 0)

    def allocate_exchange(self, smem):
        if self.cluster == 1:
            return None
        return ClusterSum.allocate(smem, self.cluster, self.config.num_wgs, self.d // 2)

    def wait_at_end(self):
        """Waits for the cluster, whose CTAs use each other's shared memory."""
        if self.cluster > 1:
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

    def ctas(self, args: BiasArgs) -> Int32:
        """One per item, because the number of resident clusters is unknown on the host."""
        return self.items(args)

    @cute.jit
    def tiles_at(self, start: Int32, item: BiasItem, args) -> WalkTiles:
        """The CTAs of a cluster take every step together, so a tile to do is a head of which some key takes part."""
        # A loop, because `class_of` is unrolled over all keys, which spills registers of the producer.
        t, n = args.scores.classes, start + cute.arch.lane_idx()
        base = self.start(t, self.head_at(cutlass.min(n, item.last - 1), args, item.head))
        least, most = Int32(FULL), Int32(EMPTY)
        for block in cutlass.range(cute.ceil_div(args.scores.num_k, BLOCK), unroll=2):
            found = load_at(base, Int64(block) * t.column).to(Int32)
            least, most = cutlass.min(least, found), cutlass.max(most, found)
        to_do = cute.arch.vote_ballot_sync((most != EMPTY) & (n < item.last))
        return WalkTiles(start, to_do, cute.arch.vote_ballot_sync(least == FULL))

    @cute.jit
    def load_tile(self, cta: Cta, item: BiasItem, n: Int32, state, is_full):
        """Loads an item's tiles of the n-th head."""
        barrier, head = cta.loaded.producer_get_barrier(state), self.head_at(n, cta.args, item.head)
        for names, count, tile, of_head in (
            (("q", "do"), self.config.num_wgs, item.tile_q, head.query_head),
            (("k", "v"), self.problem.blocks, item.tile_k, head.key_head),
        ):
            for name in names:
                part = self.part(cta, name, of_head, head.batch)
                for b in cutlass.range_constexpr(count):
                    self.load(part, tile * count + b, 0, state.index * count + b, barrier)
        self.load_stats(cta, head, item.tile_q, state.index, barrier)

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        args, shared, loaded, num_blocks = cta.args, cta.shared, cta.loaded, self.problem.blocks
        mmas, dq_mma = [self.mma_of_scores(BLOCK, add) for add in (False, True)], self.mma_of_rows()
        rQ, rDO = (self.fragments_a(mmas[0], t) for t in (shared.q, shared.do))
        rK, rV = (self.fragments_b(mmas[0], t) for t in (shared.k, shared.v))
        rKt = self.fragments_b(dq_mma, self.transposed(shared.k))
        x, dp, ds, dq = self.accumulator(BLOCK), self.accumulator(BLOCK), self.operand(BLOCK), self.accumulator(self.d)
        totals = [self.accumulator(BLOCK) for _ in range(num_blocks)]
        stats = cute.make_rmem_tensor((2, 2), Float32)
        shifts, delta = stats[None, 0], self.per_row(stats[None, 1])
        read, item, kept = self.loaded_state(), self.item(Int32(0), args), self.bias_state(Int32(0))
        blocks = self.score_blocks(item, wg, thread)
        for b in cutlass.range_constexpr(num_blocks):
            totals[b].fill(0.0)
        dq.fill(0.0)
        steps = self.write_zeros_and_count(dq, args, item, blocks[0])
        before = two_before = Int32(0)  # heads of these steps
        cta.biases.consumer_wait(kept)
        for step in cutlass.range(steps, unroll=1):
            loaded.consumer_wait(read)
            n, _, kept_keys = self.loaded_tile(cta.walk, read.index, item.first + step)
            q = (None, None, None, read.index * self.config.num_wgs + wg)
            self.read_stats(stats, shared.stats[None, None, read.index], wg * BLOCK, thread)
            for b in cutlass.range_constexpr(num_blocks):
                k = (None, None, None, read.index * num_blocks + b)
                self.multiply(x, mmas, rQ[q], rK[k])
                self.multiply(dp, mmas, rDO[q], rV[k])
                if const_expr(b == 0):
                    # Overlaps with these matmuls.
                    self.receive_dq(cta, two_before, step - 2, item, blocks[0])
                    self.send_dq(dq, cta, before, step - 1, item, blocks[0])
                    dq.fill(0.0)
                cute.nvgpu.warpgroup.wait_group(0)
                shift = self.shift(self.per_row(shifts), shifts, n, item)
                words = BLOCK // 32
                kept_of_block = kept_keys[words * b :][:words] if const_expr(kept_keys is not None) else None
                self.scores(x, self.of_block(cta, b), read.index, blocks[b], shift, None, None, kept_of_block)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True) * (dp[v] - delta[v])
                    totals[b][v] = totals[b][v] + x[v]
                self.round_to_operand(ds, x)
                self.multiply(dq, [dq_mma], ds, rKt[k])
            cute.nvgpu.warpgroup.wait_group(0)
            self.release(loaded, read)
            read.advance()
            before, two_before = n, before
        self.receive_dq(cta, two_before, steps - 2, item, blocks[0])
        self.send_dq(dq, cta, before, steps - 1, item, blocks[0])
        self.receive_dq(cta, before, steps - 1, item, blocks[0])
        for b in cutlass.range_constexpr(num_blocks):
            self.write_total(totals[b], args, item, blocks[b])

    def score_blocks(self, item: BiasItem, wg: Int32, thread: Int32) -> list[ScoreBlock]:
        q0, k0 = item.tile_q * self.tile_q + wg * BLOCK, item.tile_k * self.tile_k
        return [ScoreBlock(item.head, q0, k0 + b * BLOCK, wg, thread) for b in range(self.problem.blocks)]

    def of_block(self, cta: Cta, b: int) -> Cta:
        """cta with the b-th block of columns of the bias's tile."""
        bias = cta.shared.bias
        bias = cute.make_tensor(bias.iterator + b * self.bias.block // self.bias.itemsize, bias.layout)
        return cta._replace(shared=cta.shared._replace(bias=bias), bias_stage=0)

    @cute.jit
    def write_zeros_and_count(self, zeros: cute.Tensor, args: BiasArgs, item: BiasItem, block: ScoreBlock) -> Int32:
        """Stores zeros as dq of the heads that the walk leaves out, and returns how many it has, for a whole warp."""
        if const_expr(not self.walks):
            return item.last - item.first
        steps, rank = Int32(0), cute.arch.block_idx_in_cluster()
        for start in cutlass.range(item.first, item.last, 32, unroll=1):
            to_do = self.tiles_at(start, item, args).to_do
            steps = steps + cute.arch.popc(to_do)
            for n in cutlass.range(start, cutlass.min(start + 32, item.last), unroll=1):
                if ((to_do >> (n - start)) & 1 == 0) & (n % self.cluster == rank):
                    of_head = block._replace(head=self.head_at(n, args, item.head))
                    self.write_queries(zeros, args.dq, args.scores, of_head)
        return steps

    # dq of a step and its head n, which the CTAs of the cluster own in turn. There is none for a negative step.

    @cute.jit
    def send_dq(self, dq: cute.Tensor, cta: Cta, n: Int32, step: Int32, item: BiasItem, block: ScoreBlock):
        """Sends the products of a CTA to the one that owns their sum. One CTA alone stores them."""
        if step >= 0:
            if const_expr(self.cluster == 1):
                self.write_dq(dq, cta.args, n, item, block)
            else:
                send_to_owner(cta.exchange, dq, step, block.wg, block.wg * 128 + block.thread)

    @cute.jit
    def receive_dq(self, cta: Cta, n: Int32, step: Int32, item: BiasItem, block: ScoreBlock):
        """Stores the sum in its owner."""
        if const_expr(self.cluster > 1):
            if (step >= 0) & (step % self.cluster == cute.arch.block_idx_in_cluster()):
                dq = self.accumulator(self.d)
                received_sum(cta.exchange, dq, step, block.wg, block.wg * 128 + block.thread)
                self.write_dq(dq, cta.args, n, item, block)

    @cute.jit
    def write_dq(self, dq: cute.Tensor, args: BiasArgs, n: Int32, item: BiasItem, block: ScoreBlock):
        for v in cutlass.range_constexpr(cute.size(dq)):
            dq[v] = dq[v] * args.scores.scale
        block = block._replace(head=self.head_at(n, args, item.head))
        self.write_queries(dq, args.dq, args.scores, block)
