"""Backward of attention on Hopper, stationary in keys: dk and dv.

    p = exp2(x - shift)    dv = p^T do    ds = p * (do v^T - delta)    dk = scale * ds^T q

A CTA has `num_wgs` blocks of 64 keys and walks over the queries, of all query heads that share its key head. The
accumulators of x and ds are transposed, so that they are operands of the second matmuls straight from registers.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, const_expr, pipeline

from quackish.configs.attention import BLOCK, KeysArgs, ScoreArgs
from quackish.kernels.common.attention import AttentionSm90, Block, Head, Item, ScoreTiles
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
        items = cute.ceil_div(s.num_k, self.tile_k) * heads_k * s.batch
        atoms = [k_atom, v_atom, q_atom, do_atom, stats_atom]
        self.kernel(atoms, self.score_atoms(s), [dk_atom, dv_atom], args, layouts, self.score_layouts()).launch(
            **self.launch_options(items, s, stream)
        )

    @cute.kernel
    def kernel(
        self, atoms: list, score_atoms: list, outputs: list, args: KeysArgs, layouts: list, score_layouts: list
    ):  # fmt: skip
        c, s = self.config, args.scores
        tid, _, _ = cute.arch.thread_idx()
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

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, sQ, sDO, tiles, sStats, loaded, s)
            elif warp == 1:
                self.produce_keys(atoms, sK, sV, keys, s)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(outputs, sK, sV, sQ, sDO, tiles, sStats, keys, loaded, args, wg - 1, tid % 128)

    @cute.jit
    def key_items(self, s: ScoreArgs):
        """(first, last, step) of this CTA's items, which are tiles of keys."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return cta, cute.ceil_div(s.num_k, self.tile_k) * (s.heads // s.group) * s.batch, ctas

    @cute.jit
    def key_item(self, i: Int32, s: ScoreArgs) -> Item:
        heads = s.heads // s.group
        tile, head = self.tile_and_head(i, cute.ceil_div(s.num_k, self.tile_k), heads * s.batch)
        first, last = self.query_tiles(s, tile * self.tile_k, self.tile_k, self.tile_q)
        return Item(Head(head // heads, head % heads * s.group, head % heads), tile, first, last)

    @cute.jit
    def produce_keys(self, atoms, sK, sV, keys, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        begin, end, step = self.key_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.key_item(i, s)
            keys.producer_acquire(state)
            barrier = keys.producer_get_barrier(state)
            for a, shared in ((0, sK), (1, sV)):
                part = self.part(
                    atoms[a], shared, self.of_head(atoms[a][1], item.head.key_head, item.head.batch), self.own
                )
                for w in cutlass.range_constexpr(self.config.num_wgs):
                    self.load(atoms[a], part, item.tile * self.config.num_wgs + w, 0, w, barrier)
            state.advance()
        keys.producer_tail(state)

    @cute.jit
    def produce(self, atoms, score_atoms, sQ, sDO, tiles: ScoreTiles, sStats, loaded, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        policies = self.score_policies(s)
        begin, end, step = self.key_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.key_item(i, s)
            for g in cutlass.range(s.group, unroll=1):
                head = item.head._replace(query_head=item.head.query_head + g)
                q_part = self.part(atoms[2], sQ, self.of_head(atoms[2][1], head.query_head, head.batch), self.other)
                do_part = self.part(atoms[3], sDO, self.of_head(atoms[3][1], head.query_head, head.batch), self.other)
                score_parts = self.score_parts(score_atoms, tiles, s, head)
                for n in cutlass.range(item.first, item.last, unroll=1):
                    loaded.producer_acquire(state)
                    barrier = loaded.producer_get_barrier(state)
                    self.load(atoms[2], q_part, n, 0, state.index, barrier)
                    self.load(atoms[3], do_part, n, 0, state.index, barrier)
                    for a in cutlass.range_constexpr(len(score_parts)):
                        self.load(score_atoms[a], score_parts[a], n, item.tile, state.index, barrier, policies[a])
                    self.load_stats(atoms[4], sStats, s, head, n, state.index, barrier)
                    state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(
        self, outputs, sK, sV, sQ, sDO, tiles: ScoreTiles, sStats, keys, loaded, args: KeysArgs, wg: Int32,
        thread: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_from_shared(self.tile_q, add) for add in (False, True)]
        rows_mma = self.mma_from_registers()
        part = mmas[0].get_slice(0)
        rK, rV = (mmas[0].make_fragment_A(part.partition_A(t))[None, None, None, wg] for t in (sK, sV))
        rQ, rDO = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sQ, sDO))
        rQt, rDOt = (
            rows_mma.make_fragment_B(rows_mma.get_slice(0).partition_B(self.transposed(t, c.num_stages)))
            for t in (sQ, sDO)
        )
        x, dp = self.accumulator(self.tile_q), self.accumulator(self.tile_q)
        dk, dv = self.accumulator(self.d), self.accumulator(self.d)
        p, ds = self.operand(self.tile_q), self.operand(self.tile_q)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        begin, end, step = self.key_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.key_item(i, s)
            head, k0 = item.head, item.tile * self.tile_k + wg * BLOCK
            dk.fill(0.0)
            dv.fill(0.0)
            keys.consumer_wait(own)
            steps = item.last - item.first
            for n in cutlass.range(s.group * steps, unroll=1):
                of_query = head._replace(query_head=head.query_head + n // steps)
                q0 = (item.first + n % steps) * self.tile_q
                block = Block(of_query, q0, k0, self.tile_q, BLOCK, wg, thread)
                loaded.consumer_wait(read)
                self.multiply(x, mmas, rK, rQ[None, None, None, read.index])
                self.multiply(dp, mmas, rV, rDO[None, None, None, read.index])
                cute.nvgpu.warpgroup.wait_group(1)  # x, and dk and dv of the tile before
                if n > 0:
                    loaded.consumer_release(previous)
                    previous.advance()
                shift, delta = (self.per_column(sStats[None, j, read.index].iterator, thread) for j in range(2))
                self.scores(x, s, tiles, read.index, block, shift, tanhs)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                self.round_to_operand(p, x)
                self.multiply(dv, [rows_mma], p, rDOt[None, None, None, read.index])
                cute.nvgpu.warpgroup.wait_group(1)  # dp
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = x[v] * (dp[v] - delta[v])
                    if const_expr(tanhs is not None):
                        x[v] = x[v] * (1.0 - tanhs[v] * tanhs[v])
                self.round_to_operand(ds, x)
                self.multiply(dk, [rows_mma], ds, rQt[None, None, None, read.index])
                read.advance()
            cute.nvgpu.warpgroup.wait_group(0)
            loaded.consumer_release(previous)
            previous.advance()
            for v in cutlass.range_constexpr(cute.size(dk)):
                dk[v] = dk[v] * s.scale
            for j, (result, shared) in enumerate(((dk, sK), (dv, sV))):
                self.store_rows(result, shared[None, None, wg].iterator, thread)
                self.write(outputs[j], shared, wg, k0 // BLOCK, head.key_head, head.batch, wg)
            keys.consumer_release(own)  # the warp that issued the stores waited until they were read
            own.advance()
