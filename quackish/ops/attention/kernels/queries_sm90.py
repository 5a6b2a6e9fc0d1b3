"""Backward of attention on Hopper, stationary in queries: dq, where the kernel for dk and dv stored no ds.

    p = exp2(x - shift)    ds = p * (do v^T - delta)    dq = scale * ds k

A CTA has `num_wgs` blocks of 64 queries and walks over the keys, like forward.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at
from quackish.ops.attention.kernels.attention_sm90 import AttentionSm90
from quackish.ops.attention.kernels.items import Head, Item
from quackish.ops.attention.kernels.scores import Block, pair_rows
from quackish.ops.attention.problems import BLOCK, QueriesArgs, ScoreArgs


class AttentionQueriesSm90(AttentionSm90):
    rows_are_queries = True
    pingpong = True

    @property
    def stage_bytes(self) -> int:
        return 2 * self.other.bytes + self.score_bytes

    @cute.jit
    def __call__(self, args: QueriesArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        q_atom = self.load_atom(self.own, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.own, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.other, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        layouts = [self.own.layout(self.num_own), self.other.layout(c.num_stages)]
        atoms = [q_atom, do_atom, k_atom, v_atom]
        self.kernel(atoms, self.score_atoms(s), args, layouts, self.score_layouts()).launch(
            **self.launch_options(args, stream)
        )

    @cute.kernel
    def kernel(self, atoms: list, score_atoms: list, args: QueriesArgs, layouts: list, score_layouts: list):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sWalk, sItems = self.allocate_walk(smem), self.allocate_items(smem)
        sQ, sDO = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sK, sV = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        queries = self.own_pipeline(2)
        loaded = self.pipeline(c.num_stages, self.stage_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        # The kernel for dk and dv, launched right before, waited for all that this one reads. So CTAs start where CTAs
        # of that kernel have ended, and wait for it before they write.
        cute.arch.fence_acq_rel_gpu()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, [sK, sV, tiles], sWalk, loaded, args)
            elif warp == 1:
                self.produce_own([(atoms[0], sQ), (atoms[1], sDO)], queries, sItems, args, 0)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            shared = [sQ, sDO, sK, sV, tiles, sWalk, sItems]
            self.consume(shared, queries, loaded, args, wg - 1, tid % 128)
        after_previous()

    @cute.jit
    def produce(self, atoms, score_atoms, shared, sWalk, loaded, args: QueriesArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        policy = self.bias_policy(args.scores)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            loads = [atoms, score_atoms, self.parts(atoms, score_atoms, shared, args.scores, item.head), policy]
            state = self.load_item(loads, item, args, loaded, state, sWalk, 0)
        loaded.producer_tail(state)

    def parts(self, atoms, score_atoms, shared, s: ScoreArgs, head: Head) -> list:
        sK, sV, tiles = shared
        k_part, v_part = (
            self.part(atoms[a], to, self.of_head(atoms[a][1], head.key_head, head.batch), self.other)
            for a, to in ((2, sK), (3, sV))
        )
        return [k_part, v_part, *self.score_parts(score_atoms, tiles, s, head)]

    @cute.jit
    def load_tile(self, loads, item: Item, args: QueriesArgs, n: Int32, loaded, state, is_full):
        """Loads tile n of k and v, and of bias and mask for an item's queries."""
        atoms, score_atoms, parts, policy = loads
        barrier = loaded.producer_get_barrier(state)
        self.load(atoms[2], parts[0], n, 0, state.index, barrier)
        self.load(atoms[3], parts[1], n, 0, state.index, barrier)
        self.load_scores(score_atoms, parts[2:], item.tile, n, state.index, barrier, policy, is_full)

    @cute.jit
    def statistics(self, args: QueriesArgs, block: Block):
        """(shift, delta) of the thread's two rows."""
        s, head = args.scores, block.head
        shifts, deltas = (cute.make_rmem_tensor((2,), Float32) for _ in range(2))
        of_head, heads = Int64(head.batch) * s.heads + head.query_head, Int64(s.batch) * s.heads
        for r in cutlass.range_constexpr(2):
            row = block.q0 + pair_rows(block.thread) + 8 * r
            shifts[r], deltas[r] = Float32(0.0), Float32(0.0)
            if row < s.num_q:
                shifts[r] = load_at(args.stats, of_head * args.stats_row + row)
                deltas[r] = load_at(args.stats, (heads + of_head) * args.stats_row + row)
        return shifts, self.per_row(deltas)

    @cute.jit
    def consume(self, shared, queries, loaded, args: QueriesArgs, wg: Int32, thread: Int32):
        c, s = self.config, args.scores
        sQ, sDO, sK, sV, tiles, sWalk, sItems = shared
        dq_mma = self.mma_from_registers()
        operands = self.own_operands(self.tile_k, [sQ, sDO])
        rK, rV = (
            mmas[0].make_fragment_B(mmas[0].get_slice(0).partition_B(t))
            for (mmas, _), t in zip(operands, (sK, sV), strict=True)
        )
        rKt = dq_mma.make_fragment_B(dq_mma.get_slice(0).partition_B(self.transposed(sK, c.num_stages)))
        x, dp = self.accumulator(self.tile_k), self.accumulator(self.tile_k)
        dq, ds = self.accumulator(self.d), self.operand(self.tile_k)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = self.own_state(wg)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(args), unroll=1):
            item = self.own_item(args, sItems, queries, own)
            of_q, of_do = self.load_own(operands, [sQ, sDO], own.index, thread)
            head, q0 = item.head, item.tile * self.tile_q + wg * BLOCK
            block = Block(head, q0, Int32(0), BLOCK, self.tile_k, wg, thread)
            shifts, delta = self.statistics(args, block)
            dq.fill(0.0)
            for j in cutlass.range(item.first, item.last, unroll=1):
                loaded.consumer_wait(read)
                self.wait_to_issue(wg)
                self.multiply(x, *of_q, rK[None, None, None, read.index])
                self.multiply(dp, *of_do, rV[None, None, None, read.index])
                self.let_next_issue(wg)
                cute.nvgpu.warpgroup.wait_group(1)  # x, and dq of the tile before
                if j > item.first:
                    self.release(loaded, previous)
                    previous.advance()
                n, is_full = self.loaded_tile(sWalk, read.index, j)
                at = block._replace(k0=n * self.tile_k)
                shift = self.shift(self.per_row(shifts), shifts, n, item, args)
                self.scores(x, s, tiles, read.index, at, shift, tanhs, is_full)
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
            own = self.release_own(queries, own)
            for v in cutlass.range_constexpr(cute.size(dq)):
                dq[v] = dq[v] * s.scale
            cute.arch.griddepcontrol_wait()
            self.write_queries(dq, args.dq, s, block)
        self.end_pingpong(wg)
