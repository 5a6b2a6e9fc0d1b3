"""Backward of attention on Hopper: the gradient of a bias that is broadcast over batch, heads or both.

    dbias = sum over these of ds,    ds = exp2(x - shift) * (do v^T - delta)

A CTA has a tile of dbias, (num_wgs blocks of 64 queries) x (tile keys), and sums ds over the heads of its part in a
fixed order. The parts are summed by whoever launches it.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, pipeline

from quackish.configs.attention import BLOCK, BiasArgs
from quackish.kernels.attention.scores import AttentionSm90, Block, Head, ScoreTiles, pair_rows
from quackish.kernels.common.dependent_launch import after_previous
from quackish.kernels.common.memory import vector_at


class AttentionBiasSm90(AttentionSm90):
    rows_are_queries = True
    registers = (40, 232)  # the producer needs more than in the other kernels: heads change with every tile

    @cute.jit
    def __call__(self, args: BiasArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        q_atom = self.load_atom(self.own, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.own, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.other, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        layouts = [self.own.layout(c.num_wgs * c.num_stages), self.other.layout(c.num_stages)]
        tiles = cute.ceil_div(s.num_q, self.tile_q) * cute.ceil_div(s.num_k, self.tile_k)
        ctas = tiles * args.batches * args.bias_heads * args.parts
        atoms = [q_atom, do_atom, k_atom, v_atom, self.stats_atom(args.stats, args.stats_row, s)]
        self.kernel(atoms, self.score_atoms(s), args, layouts, self.score_layouts()).launch(
            **self.launch_options(ctas, stream)
        )

    @cute.kernel
    def kernel(self, atoms: list, score_atoms: list, args: BiasArgs, layouts: list, score_layouts: list):
        c, s = self.config, args.scores
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sQ, sDO = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sK, sV = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        sStats = self.allocate_stats(smem)
        num_bytes = 2 * c.num_wgs * self.own.bytes + 2 * self.other.bytes + self.score_bytes + 8 * self.tile_q
        loaded = self.pipeline(c.num_stages, num_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        # this CTA's tile of dbias, and the heads of its part
        tiles_k, tiles_q = cute.ceil_div(s.num_k, self.tile_k), cute.ceil_div(s.num_q, self.tile_q)
        tile_k, rest = cta % tiles_k, cta // tiles_k
        tile_q, rest = rest % tiles_q, rest // tiles_q
        head, rest = rest % args.bias_heads, rest // args.bias_heads
        batch, part = rest % args.batches, rest // args.batches
        summed = (s.batch // args.batches) * (s.heads // args.bias_heads)
        first, last = part * summed // args.parts, (part + 1) * summed // args.parts
        block = Block(
            Head(batch, head, Int32(0)), tile_q * self.tile_q, tile_k * self.tile_k, BLOCK, self.tile_k, wg - 1,
            tid % 128,
        )  # fmt: skip
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        # with causality or a window, tiles without keys that take part stay 0
        if self.is_empty(args, block):
            last = first
        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, sQ, sDO, sK, sV, tiles, sStats, loaded, args, block, first, last)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            block = block._replace(q0=block.q0 + (wg - 1) * BLOCK)
            self.consume(sQ, sDO, sK, sV, tiles, sStats, loaded, args, block, first, last, part)

    @cute.jit
    def is_empty(self, args: BiasArgs, block: Block):
        empty = cutlass.Boolean(False)
        if cutlass.const_expr(self.problem.band):
            s = args.scores
            empty = (block.k0 + self.tile_k - 1 + s.left < block.q0) | (block.k0 > block.q0 + self.tile_q - 1 + s.right)
        return empty

    @cute.jit
    def head_at(self, i: Int32, args: BiasArgs, head: Head) -> Head:
        """The i-th head that is summed; `head` is that of dbias."""
        s = args.scores
        per_batch = s.heads // args.bias_heads
        batch = i // per_batch if args.batches == 1 else head.batch
        query_head = i % per_batch if args.bias_heads == 1 else head.query_head
        return Head(batch, query_head, query_head // s.group)

    @cute.jit
    def produce(
        self, atoms, score_atoms, sQ, sDO, sK, sV, tiles: ScoreTiles, sStats, loaded, args: BiasArgs, block: Block,
        first: Int32, last: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        tile_q, tile_k = block.q0 // self.tile_q, block.k0 // self.tile_k
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        for i in cutlass.range(first, last, unroll=1):
            head = self.head_at(i, args, block.head)
            loaded.producer_acquire(state)
            barrier = loaded.producer_get_barrier(state)
            for a, shared in ((0, sQ), (1, sDO)):
                part = self.part(atoms[a], shared, self.of_head(atoms[a][1], head.query_head, head.batch), self.own)
                for w in cutlass.range_constexpr(c.num_wgs):
                    self.load(atoms[a], part, tile_q * c.num_wgs + w, 0, state.index * c.num_wgs + w, barrier)
            for a, shared in ((2, sK), (3, sV)):
                part = self.part(atoms[a], shared, self.of_head(atoms[a][1], head.key_head, head.batch), self.other)
                self.load(atoms[a], part, tile_k, 0, state.index, barrier)
            parts = self.score_parts(score_atoms, tiles, s, head)
            for a in cutlass.range_constexpr(len(parts)):
                self.load(score_atoms[a], parts[a], tile_q, tile_k, state.index, barrier)
            self.load_stats(atoms[4], sStats, s, head, tile_q, state.index, barrier)
            state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(
        self, sQ, sDO, sK, sV, tiles: ScoreTiles, sStats, loaded, args: BiasArgs, block: Block, first: Int32,
        last: Int32, part_index: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_from_shared(self.tile_k, add) for add in (False, True)]
        part = mmas[0].get_slice(0)
        rQ, rDO = (mmas[0].make_fragment_A(part.partition_A(t)) for t in (sQ, sDO))
        rK, rV = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sK, sV))
        x, dp, total = (self.accumulator(self.tile_k) for _ in range(3))
        total.fill(0.0)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        row = block.wg * BLOCK + pair_rows(block.thread)
        for i in cutlass.range(first, last, unroll=1):
            loaded.consumer_wait(read)
            own = read.index * c.num_wgs + block.wg
            self.multiply(x, mmas, rQ[None, None, None, own], rK[None, None, None, read.index])
            self.multiply(dp, mmas, rDO[None, None, None, own], rV[None, None, None, read.index])
            cute.nvgpu.warpgroup.wait_group(1)
            self.scores(x, s, tiles, read.index, block._replace(head=self.head_at(i, args, block.head)), None)
            for v in cutlass.range_constexpr(cute.size(x)):
                x[v] = cute.math.exp2(x[v] - sStats[row + v // 2 % 2 * 8, 0, read.index], fastmath=True)
            cute.nvgpu.warpgroup.wait_group(0)
            for v in cutlass.range_constexpr(cute.size(x)):
                total[v] = total[v] + x[v] * (dp[v] - sStats[row + v // 2 % 2 * 8, 1, read.index])
            cute.arch.sync_warp()
            loaded.consumer_release(read)
            read.advance()
        head, t = block.head, args.dbias
        base = t.base + (Int64(part_index) * args.part + Int64(head.batch) * t.batch + Int64(head.query_head) * t.head)
        for v in cutlass.range_constexpr(0, cute.size(total), 2):
            q, k = self.position(block, v)
            if (q < s.num_q) & (k < s.num_k):  # rows have room for a multiple of 4 columns
                pair = cute.make_rmem_tensor((2,), Float32)
                pair[0], pair[1] = total[v], total[v + 1]
                vector_at(base, Int64(q) * t.row + k, 2).store(pair.load())
