"""Backward of attention on Hopper, stationary in keys: dk and dv.

    p = exp2(x - shift)    dv = p^T do    ds = p * (do v^T - delta)    dk = scale * ds^T q

A CTA has `num_wgs` blocks of 64 keys and walks over the queries, of all query heads that share its key head. The
accumulators of x and ds are transposed, so that they are operands of the second matmuls straight from registers.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, pipeline

from quackish.configs.attention import BLOCK, KeysArgs
from quackish.kernels.attention.scores import AttentionSm90, Block, Head, ScoreTiles
from quackish.kernels.common.dependent_launch import after_previous


class AttentionKeysSm90(AttentionSm90):
    rows_are_queries = False

    @cute.jit
    def __call__(self, args: KeysArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        k_atom = self.load_atom(self.own, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.own, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        q_atom = self.load_atom(self.other, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.other, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        dk_atom = self.store_atom(self.own, self.tensor(args.dk, s.num_k, s.d, heads_k, s.batch))
        dv_atom = self.store_atom(self.own, self.tensor(args.dv, s.num_k, s.d, heads_k, s.batch))
        stats_atom = self.stats_atom(args.stats, args.stats_row, s)
        layouts = [self.own.layout(c.num_wgs), self.other.layout(c.num_stages)]
        ctas = cute.ceil_div(s.num_k, self.tile_k) * heads_k * s.batch
        atoms = [k_atom, v_atom, q_atom, do_atom, stats_atom]
        self.kernel(atoms, self.score_atoms(s), [dk_atom, dv_atom], args, layouts, self.score_layouts()).launch(
            **self.launch_options(ctas, stream)
        )

    @cute.kernel
    def kernel(
        self, atoms: list, score_atoms: list, outputs: list, args: KeysArgs, layouts: list, score_layouts: list
    ):  # fmt: skip
        c, s = self.config, args.scores
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sK, sV = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sQ, sDO = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        sStats = self.allocate_stats(smem)
        keys = self.pipeline(1, 2 * c.num_wgs * self.own.bytes)
        loaded = self.pipeline(c.num_stages, 2 * self.other.bytes + self.score_bytes + 8 * self.tile_q)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        # this CTA's tile: with causality, the first tiles have most queries
        tiles_k, heads_k = cute.ceil_div(s.num_k, self.tile_k), s.heads // s.group
        tile, head = cta % tiles_k, cta // tiles_k
        head = Head(head // heads_k, head % heads_k * s.group, head % heads_k)
        k0 = tile * self.tile_k
        first, last = self.query_tiles(s, k0, self.tile_k, self.tile_q)
        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(
                    atoms, score_atoms, sK, sV, sQ, sDO, tiles, sStats, keys, loaded, args, head, tile, first, last
                )
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            block = Block(head, Int32(0), k0 + (wg - 1) * BLOCK, self.tile_q, BLOCK, wg - 1, tid % 128)
            self.consume(outputs, sK, sV, sQ, sDO, tiles, sStats, keys, loaded, args, block, first, last)

    @cute.jit
    def produce(
        self, atoms, score_atoms, sK, sV, sQ, sDO, tiles: ScoreTiles, sStats, keys, loaded, args: KeysArgs, head: Head,
        tile: Int32, first: Int32, last: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        once = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        keys.producer_acquire(once)
        for i, shared in ((0, sK), (1, sV)):
            part = self.part(atoms[i], shared, self.of_head(atoms[i][1], head.key_head, head.batch), self.own)
            for w in cutlass.range_constexpr(c.num_wgs):
                self.load(atoms[i], part, tile * c.num_wgs + w, 0, w, keys.producer_get_barrier(once))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        for g in cutlass.range(s.group, unroll=1):
            at = head._replace(query_head=head.query_head + g)
            q_part = self.part(atoms[2], sQ, self.of_head(atoms[2][1], at.query_head, at.batch), self.other)
            do_part = self.part(atoms[3], sDO, self.of_head(atoms[3][1], at.query_head, at.batch), self.other)
            score_parts = self.score_parts(score_atoms, tiles, s, at)
            for n in cutlass.range(first, last, unroll=1):
                loaded.producer_acquire(state)
                barrier = loaded.producer_get_barrier(state)
                self.load(atoms[2], q_part, n, 0, state.index, barrier)
                self.load(atoms[3], do_part, n, 0, state.index, barrier)
                for i in cutlass.range_constexpr(len(score_parts)):
                    self.load(score_atoms[i], score_parts[i], n, tile, state.index, barrier)
                self.load_stats(atoms[4], sStats, s, at, n, state.index, barrier)
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(
        self, outputs, sK, sV, sQ, sDO, tiles: ScoreTiles, sStats, keys, loaded, args: KeysArgs, block: Block,
        first: Int32, last: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_from_shared(self.tile_q, add) for add in (False, True)]
        rows_mma = self.mma_from_registers()
        part = mmas[0].get_slice(0)
        rK, rV = (mmas[0].make_fragment_A(part.partition_A(t))[None, None, None, block.wg] for t in (sK, sV))
        rQ, rDO = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sQ, sDO))
        rQt, rDOt = (
            rows_mma.make_fragment_B(rows_mma.get_slice(0).partition_B(self.transposed(t, c.num_stages)))
            for t in (sQ, sDO)
        )
        x, dp = self.accumulator(self.tile_q), self.accumulator(self.tile_q)
        dk, dv = self.accumulator(self.d), self.accumulator(self.d)
        p, ds = self.operand(self.tile_q), self.operand(self.tile_q)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        dk.fill(0.0)
        dv.fill(0.0)
        keys.consumer_wait(pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1))
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        steps = last - first
        for i in cutlass.range(s.group * steps, unroll=1):
            head = block.head._replace(query_head=block.head.query_head + i // steps)
            at = block._replace(head=head, q0=(first + i % steps) * self.tile_q)
            loaded.consumer_wait(read)
            self.multiply(x, mmas, rK, rQ[None, None, None, read.index])
            self.multiply(dp, mmas, rV, rDO[None, None, None, read.index])
            cute.nvgpu.warpgroup.wait_group(1)  # x, and dk and dv of the tile before
            if i > 0:
                loaded.consumer_release(previous)
                previous.advance()
            self.scores(x, s, tiles, read.index, at, tanhs)
            stats = sStats[None, None, read.index]
            self.exponentials(x, stats, block.thread)
            p.store(x.load().to(self.dtype).reshape(p.shape))
            self.multiply(dv, [rows_mma], p, rDOt[None, None, None, read.index])
            cute.nvgpu.warpgroup.wait_group(1)  # dp
            self.gradients(x, dp, stats, tanhs, block.thread)
            ds.store(dp.load().to(self.dtype).reshape(ds.shape))
            self.multiply(dk, [rows_mma], ds, rQt[None, None, None, read.index])
            read.advance()
        cute.nvgpu.warpgroup.wait_group(0)
        loaded.consumer_release(previous)
        for i in cutlass.range_constexpr(cute.size(dk)):
            dk[i] = dk[i] * s.scale
        head, row_block = block.head, block.k0 // BLOCK
        for i, (result, shared) in enumerate(((dk, sK), (dv, sV))):
            self.store_rows(result, shared[None, None, block.wg].iterator, block.thread)
            self.write(outputs[i], shared, block.wg, row_block, head.key_head, head.batch, block.wg)

    @cute.jit
    def exponentials(self, x: cute.Tensor, stats: cute.Tensor, thread: Int32):
        for i in cutlass.range_constexpr(cute.size(x)):
            shift = stats[thread % 4 * 2 + (i // 4 * 8 + i % 2), 0]
            x[i] = cute.math.exp2(x[i] - shift, fastmath=True)

    @cute.jit
    def gradients(self, p: cute.Tensor, dp: cute.Tensor, stats: cute.Tensor, tanhs, thread: Int32):
        """dp = p * (dp - delta), times the softcap's derivative."""
        for i in cutlass.range_constexpr(cute.size(p)):
            delta = stats[thread % 4 * 2 + (i // 4 * 8 + i % 2), 1]
            dp[i] = p[i] * (dp[i] - delta)
            if const_expr(tanhs is not None):
                dp[i] = dp[i] * (1.0 - tanhs[i] * tanhs[i])
