"""Backward of attention on Hopper, stationary in queries: dq, and the bias's gradient if it is not broadcast.

    p = exp2(x - shift)    ds = p * (do v^T - delta)    dq = scale * ds k    dbias = ds

A CTA has `num_wgs` blocks of 64 queries and walks over the keys, like forward. It first computes shift = log2(e) * lse
and delta = sum of do * o, minus lse's gradient, per row, and stores them for the other kernels of backward.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.configs.attention import BLOCK, QueriesArgs, ScoreArgs
from quackish.kernels.common.arguments import DTYPES
from quackish.kernels.common.attention import AttentionSm90, Block, ScoreTiles, pair_rows
from quackish.kernels.common.dependent_launch import after_previous
from quackish.kernels.common.math import LOG2_E
from quackish.kernels.common.memory import load_at, vector_at
from quackish.kernels.common.swizzled_tile import SwizzledTile


class AttentionQueriesSm90(AttentionSm90):
    rows_are_queries = True

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.staged = None  # dbias before it is stored by TMA
        if problem.dbias and problem.bias_dtype != "float32":
            self.staged = SwizzledTile(DTYPES[problem.bias_dtype], BLOCK, self.tile_k)

    @cute.jit
    def __call__(self, args: QueriesArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        q_atom = self.load_atom(self.own, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.own, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.other, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        outputs = [self.store_atom(self.own, self.tensor(args.dq, s.num_q, s.d, s.heads, s.batch))]
        layouts = [self.own.layout(c.num_wgs), self.other.layout(c.num_stages)]
        if const_expr(self.staged is not None):
            outputs.append(self.store_atom(self.staged, self.tensor(args.dbias, s.num_q, s.num_k, s.heads, s.batch)))
            layouts.append(self.staged.layout(c.num_wgs))
        items = cute.ceil_div(s.num_q, self.tile_q) * s.heads * s.batch
        atoms = [q_atom, do_atom, k_atom, v_atom]
        self.kernel(atoms, self.score_atoms(s), outputs, args, layouts, self.score_layouts()).launch(
            **self.launch_options(items, s, stream)
        )

    @cute.kernel
    def kernel(
        self, atoms: list, score_atoms: list, outputs: list, args: QueriesArgs, layouts: list, score_layouts: list
    ):  # fmt: skip
        c, s = self.config, args.scores
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sQ, sDO = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sK, sV = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        sDbias = self.staged.allocate(smem, layouts[2]) if const_expr(self.staged is not None) else None
        sStats = smem.allocate_tensor(Float32, cute.make_layout((BLOCK, 2, c.num_wgs)), 16)
        queries = self.pipeline(1, 2 * c.num_wgs * self.own.bytes)
        loaded = self.pipeline(c.num_stages, 2 * self.other.bytes + self.score_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, sK, sV, tiles, loaded, s)
            elif warp == 1:
                self.produce_queries(atoms, sQ, sDO, queries, s)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(outputs, sQ, sDO, sK, sV, tiles, sDbias, sStats, queries, loaded, args, wg - 1, tid % 128)

    @cute.jit
    def produce_queries(self, atoms, sQ, sDO, queries, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        begin, end, step = self.query_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.query_item(i, s)
            queries.producer_acquire(state)
            barrier = queries.producer_get_barrier(state)
            for a, shared in ((0, sQ), (1, sDO)):
                of_head = self.of_head(atoms[a][1], item.head.query_head, item.head.batch)
                part = self.part(atoms[a], shared, of_head, self.own)
                for w in cutlass.range_constexpr(self.config.num_wgs):
                    self.load(atoms[a], part, item.tile * self.config.num_wgs + w, 0, w, barrier)
            state.advance()
        queries.producer_tail(state)

    @cute.jit
    def produce(self, atoms, score_atoms, sK, sV, tiles: ScoreTiles, loaded, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        policies = self.score_policies(s)
        begin, end, step = self.query_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.query_item(i, s)
            head = item.head
            k_part = self.part(atoms[2], sK, self.of_head(atoms[2][1], head.key_head, head.batch), self.other)
            v_part = self.part(atoms[3], sV, self.of_head(atoms[3][1], head.key_head, head.batch), self.other)
            score_parts = self.score_parts(score_atoms, tiles, s, head)
            for n in cutlass.range(item.first, item.last, unroll=1):
                loaded.producer_acquire(state)
                barrier = loaded.producer_get_barrier(state)
                self.load(atoms[2], k_part, n, 0, state.index, barrier)
                self.load(atoms[3], v_part, n, 0, state.index, barrier)
                for a in cutlass.range_constexpr(len(score_parts)):
                    self.load(score_atoms[a], score_parts[a], item.tile, n, state.index, barrier, policies[a])
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def statistics(self, sStats: cute.Tensor, args: QueriesArgs, block: Block):
        """(shift, delta) of the thread's two rows. Two threads sum a row."""
        s, head, wg = args.scores, block.head, block.wg
        at, half = block.thread // 2, block.thread % 2
        row = block.q0 + at
        shift, delta = Float32(0.0), Float32(0.0)
        if row < s.num_q:
            of_o, of_do = (t.base + (Int64(head.batch) * t.batch + Int64(head.query_head) * t.head + Int64(row) * t.row)
                           for t in (args.o, args.do))  # fmt: skip
            for v in cutlass.range_constexpr(self.d // 16):
                column = (half * (self.d // 16) + v) * 8
                if column < s.d:
                    o, do = (vector_at(base, column, 8).load().to(Float32) for base in (of_o, of_do))
                    delta = delta + (o * do).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1)
        if half == 0 and row < s.num_q:
            of_head = Int64(head.batch) * s.heads + head.query_head
            lse = load_at(args.lse, of_head * s.num_q + row)
            shift = Float32(0.0) if lse == -Float32.inf else lse * LOG2_E
            if const_expr(args.dlse is not None):
                delta = delta - load_at(args.dlse, of_head * s.num_q + row)
            (args.stats + (of_head * args.stats_row + row)).store(shift)
            (args.stats + ((Int64(s.batch) * s.heads + of_head) * args.stats_row + row)).store(delta)
        if half == 0:
            sStats[at, 0, wg] = shift
            sStats[at, 1, wg] = delta
        cute.arch.barrier(barrier_id=1 + wg, number_of_threads=128)
        shifts, deltas = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))
        for r in cutlass.range_constexpr(2):
            shifts[r] = sStats[pair_rows(block.thread) + 8 * r, 0, wg]
            deltas[r] = sStats[pair_rows(block.thread) + 8 * r, 1, wg]
        return shifts, deltas

    @cute.jit
    def consume(
        self, outputs, sQ, sDO, sK, sV, tiles: ScoreTiles, sDbias, sStats, queries, loaded, args: QueriesArgs,
        wg: Int32, thread: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_from_shared(self.tile_k, add) for add in (False, True)]
        dq_mma = self.mma_from_registers()
        part = mmas[0].get_slice(0)
        rQ, rDO = (mmas[0].make_fragment_A(part.partition_A(t))[None, None, None, wg] for t in (sQ, sDO))
        rK, rV = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sK, sV))
        rKt = dq_mma.make_fragment_B(dq_mma.get_slice(0).partition_B(self.transposed(sK, c.num_stages)))
        x, dp = self.accumulator(self.tile_k), self.accumulator(self.tile_k)
        dq, ds = self.accumulator(self.d), self.operand(self.tile_k)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        begin, end, step = self.query_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            item = self.query_item(i, s)
            head, q0 = item.head, item.tile * self.tile_q + wg * BLOCK
            block = Block(head, q0, Int32(0), BLOCK, self.tile_k, wg, thread)
            shift, delta = (self.per_row(t) for t in self.statistics(sStats, args, block))
            dq.fill(0.0)
            queries.consumer_wait(own)
            for n in cutlass.range(item.first, item.last, unroll=1):
                at = block._replace(k0=n * self.tile_k)
                loaded.consumer_wait(read)
                self.multiply(x, mmas, rQ, rK[None, None, None, read.index])
                self.multiply(dp, mmas, rDO, rV[None, None, None, read.index])
                cute.nvgpu.warpgroup.wait_group(1)  # x, and dq of the tile before
                if n > item.first:
                    loaded.consumer_release(previous)
                    previous.advance()
                self.scores(x, s, tiles, read.index, at, shift, tanhs)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                cute.nvgpu.warpgroup.wait_group(0)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = x[v] * (dp[v] - delta[v])
                if const_expr(self.problem.dbias):
                    self.store_dbias(outputs, x, sDbias, args, at)
                if const_expr(tanhs is not None):
                    for v in cutlass.range_constexpr(cute.size(x)):
                        x[v] = x[v] * (1.0 - tanhs[v] * tanhs[v])
                self.round_to_operand(ds, x)
                self.multiply(dq, [dq_mma], ds, rKt[None, None, None, read.index])
                read.advance()
            cute.nvgpu.warpgroup.wait_group(0)
            loaded.consumer_release(previous)
            previous.advance()
            for v in cutlass.range_constexpr(cute.size(dq)):
                dq[v] = dq[v] * s.scale
            self.store_rows(dq, sQ[None, None, wg].iterator, thread)
            self.write(outputs[0], sQ, wg, q0 // BLOCK, head.query_head, head.batch, wg)
            queries.consumer_release(own)  # the warp that issued the store of dq waited until it was read
            own.advance()

    @cute.jit
    def store_dbias(self, outputs, ds: cute.Tensor, sDbias, args: QueriesArgs, block: Block):
        head, s = block.head, args.scores
        if const_expr(self.staged is None):  # fp32: whole sectors of 32 bytes, straight from registers
            base = args.dbias.base + (Int64(head.batch) * args.dbias.batch + Int64(head.query_head) * args.dbias.head)
            for i in cutlass.range_constexpr(0, cute.size(ds), 2):
                q, k = self.position(block, i)
                if (q < s.num_q) & (k < s.num_k):  # rows have room for a multiple of 8 columns
                    pair = cute.make_rmem_tensor((2,), Float32)
                    pair[0], pair[1] = ds[i], ds[i + 1]
                    vector_at(base, Int64(q) * args.dbias.row + k, 2).store(pair.load())
        else:
            issues = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0
            if issues:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1 + block.wg, number_of_threads=128)
            base = self.staged.rows_base(sDbias[None, None, block.wg].iterator, Int32(0), block.thread)
            for j in cutlass.range_constexpr(0, self.tile_k // 8, 2):
                values = cute.make_rmem_tensor((8,), self.staged.dtype)
                for i in cutlass.range_constexpr(8):
                    values[i] = ds[4 * j + i].to(self.staged.dtype)
                self.staged.store(self.staged.rows_at(base, j), values)
            cute.arch.fence_view_async_shared()
            cute.arch.barrier(barrier_id=1 + block.wg, number_of_threads=128)
            if issues:
                atom = outputs[1]
                part = self.part(atom, sDbias, self.of_head(atom[1], head.query_head, head.batch), self.staged)
                cute.copy(atom[0], part[0][None, block.wg], part[1][None, block.q0 // BLOCK, block.k0 // self.tile_k])
                cute.arch.cp_async_bulk_commit_group()
