"""Backward of attention on Hopper, stationary in keys: dk, dv, and the bias's gradient if it is not broadcast.

    p = exp2(x - shift)    dv = p^T do    ds = p * (do v^T - delta)    dk = scale * ds^T q    dbias = ds

A CTA has `num_wgs` blocks of 64 keys and walks over the queries, of all query heads that share its key head. The
accumulators of x and ds are transposed, so that they are operands of the second matmuls straight from registers. If
there are enough registers (`keys_ahead`), k q^T of the next tile is in flight together with ds^T q of this one.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.arguments import DTYPES
from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import vector_at
from quackish.ops.attention.kernels.attention_sm90 import AttentionSm90
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.scores import Block
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile
from quackish.ops.attention.problems import BLOCK, KeysArgs, ScoreArgs, keys_ahead


class KeyItem(NamedTuple):
    """A CTA's unit of work: a tile of keys, and tiles [first, last) of queries, those of one head after another."""

    head: Head  # the first query head
    tile: Int32
    first: Int32
    last: Int32
    first_of_head: Int32  # the first tile of queries
    per_head: Int32


class AttentionKeysSm90(AttentionSm90):
    rows_are_queries = False

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.ahead = keys_ahead(problem, config)
        # A step with a mask of blocks takes 3 % less time with it at d 128, and 2.5 % more at d 64 (H100).
        self.pingpong = self.d > 64 and not self.ahead
        self.staged = None  # dbias of a warp group before it is stored by TMA
        if problem.dbias and problem.bias_dtype != "float32":
            self.staged = SwizzledTile(DTYPES[problem.bias_dtype], self.tile_q, BLOCK)

    @property
    def stage_bytes(self) -> int:
        return 2 * self.other.bytes + self.score_bytes + 8 * self.tile_q

    @cute.jit
    def __call__(self, args: KeysArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        k_atom = self.load_atom(self.own, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.own, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        q_atom = self.load_atom(self.other, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.other, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        stats_atom = self.stats_atom(args.stats, args.stats_row, s)
        layouts, dbias_atom = [self.own.layout(self.num_own), self.other.layout(c.num_stages)], None
        if const_expr(self.staged is not None):
            dbias_atom = self.store_atom(self.staged, self.tensor(args.dbias, s.num_q, s.num_k, s.heads, s.batch))
            layouts.append(self.staged.layout(c.num_wgs))
        atoms = [k_atom, v_atom, q_atom, do_atom, stats_atom]
        self.kernel(atoms, self.score_atoms(s), dbias_atom, args, layouts, self.score_layouts()).launch(
            **self.launch_options(args, stream)
        )

    @cute.kernel
    def kernel(
        self, atoms: list, score_atoms: list, dbias_atom, args: KeysArgs, layouts: list, score_layouts: list
    ):  # fmt: skip
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sWalk, sItems = self.allocate_walk(smem), self.allocate_items(smem)
        sK, sV = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sQ, sDO = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        sDbias = self.staged.allocate(smem, layouts[2]) if const_expr(self.staged is not None) else None
        sStats = self.allocate_stats(smem)
        keys = self.own_pipeline(2)
        loaded = self.pipeline(c.num_stages, self.stage_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, [sQ, sDO, tiles, sStats], sWalk, loaded, args)
            elif warp == 1:
                self.produce_own([(atoms[0], sK), (atoms[1], sV)], keys, sItems, args, 0)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            shared = [sK, sV, sQ, sDO, tiles, sDbias, sStats, sWalk, sItems]
            self.consume(dbias_atom, shared, keys, loaded, args, wg - 1, tid % 128)

    @cute.jit
    def items(self, args: KeysArgs) -> Int32:
        """Items are tiles of keys."""
        s = args.scores
        return cute.ceil_div(s.num_k, self.tile_k) * (s.heads // s.group) * s.batch

    @cute.jit
    def rank_and_head(self, i: Int32, s: ScoreArgs):
        heads, tiles = s.heads // s.group, cute.ceil_div(s.num_k, self.tile_k)
        # With dbias, head after head: the next kernel finds more of it in the L2.
        if const_expr(self.problem.band or (self.problem.mask and not self.problem.dbias)):
            rank, head = i // (heads * s.batch), i % (heads * s.batch)
        else:
            rank, head = i % tiles, i // tiles
        return rank, Head(head // heads, head % heads * s.group, head % heads)

    @cute.jit
    def item_at(self, tile: Int32, head: Head, s: ScoreArgs) -> KeyItem:
        first, last = self.query_tiles(s, tile * self.tile_k, self.tile_k, self.tile_q)
        return KeyItem(head, tile, Int32(0), s.group * (last - first), first, last - first)

    @cute.jit
    def place(self, n: Int32, item: KeyItem, args: KeysArgs):
        """(batch and heads, first query, first key) of the n-th tile."""
        head = item.head._replace(query_head=item.head.query_head + n // item.per_head)
        return head, (item.first_of_head + n % item.per_head) * self.tile_q, item.tile * self.tile_k

    @cute.jit
    def produce(self, atoms, score_atoms, shared, sWalk, loaded, args: KeysArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        loads = [atoms, score_atoms, shared, self.bias_policy(args.scores)]
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            state = self.load_item(loads, item, args, loaded, state, sWalk, 0)
        loaded.producer_tail(state)

    @cute.jit
    def load_tile(self, loads, item: KeyItem, args: KeysArgs, n: Int32, loaded, state, is_full):
        """Loads the n-th tile of q and do, and of bias and mask for an item's keys."""
        atoms, score_atoms, shared, policy = loads
        sQ, sDO, tiles, sStats = shared
        barrier = loaded.producer_get_barrier(state)
        head, q0, _ = self.place(n, item, args)
        tile_q = q0 // self.tile_q
        for a, to in ((2, sQ), (3, sDO)):
            part = self.part(atoms[a], to, self.of_head(atoms[a][1], head.query_head, head.batch), self.other)
            self.load(atoms[a], part, tile_q, 0, state.index, barrier)
        parts = self.score_parts(score_atoms, tiles, args.scores, head)
        self.load_scores(score_atoms, parts, tile_q, item.tile, state.index, barrier, policy, is_full)
        self.load_stats(atoms[4], sStats, args.scores, head, tile_q, state.index, barrier)

    @cute.jit
    def consume(self, dbias_atom, shared, keys, loaded, args: KeysArgs, wg: Int32, thread: Int32):
        c, s = self.config, args.scores
        sK, sV, sQ, sDO, tiles, sDbias, sStats, sWalk, sItems = shared
        rows_mma = self.mma_from_registers()
        operands = self.own_operands(self.tile_q, [sK, sV])
        rQ, rDO = (
            mmas[0].make_fragment_B(mmas[0].get_slice(0).partition_B(t))
            for (mmas, _), t in zip(operands, (sQ, sDO), strict=True)
        )
        rQt, rDOt = (
            rows_mma.make_fragment_B(rows_mma.get_slice(0).partition_B(self.transposed(t, c.num_stages)))
            for t in (sQ, sDO)
        )
        x, dp = self.accumulator(self.tile_q), self.accumulator(self.tile_q)
        dk, dv = self.accumulator(self.d), self.accumulator(self.d)
        p, ds = self.operand(self.tile_q), self.operand(self.tile_q)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = self.own_state(wg)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(args), unroll=1):
            item = self.own_item(args, sItems, keys, own)
            of_k, of_v = self.load_own(operands, [sK, sV], own.index, thread)
            dk.fill(0.0)
            dv.fill(0.0)
            if const_expr(self.ahead):
                if item.first < item.last:
                    loaded.consumer_wait(read)
                    self.multiply(x, *of_k, rQ[None, None, None, read.index])
                    cute.nvgpu.warpgroup.wait_group(0)
            for j in cutlass.range(item.first, item.last, unroll=1):
                if const_expr(not self.ahead):
                    loaded.consumer_wait(read)
                    self.wait_to_issue(wg)
                    self.multiply(x, *of_k, rQ[None, None, None, read.index])
                self.multiply(dp, *of_v, rDO[None, None, None, read.index])
                self.let_next_issue(wg)
                n, is_full = self.loaded_tile(sWalk, read.index, j, self.problem.mask_aligned)
                of_query, q0, k0 = self.place(n, item, args)
                block = Block(of_query, q0, k0 + wg * BLOCK, self.tile_q, BLOCK, wg, thread)
                per_lane = const_expr(self.tile_q // 32)
                values, delta = (self.per_column(sStats[None, r, read.index].iterator, thread) for r in range(2))
                of_lane = vector_at(sStats[None, 0, read.index].iterator, thread % 32 * per_lane, per_lane)
                shift = self.shift(values, of_lane, n, item, args)
                if const_expr(not self.ahead):
                    cute.nvgpu.warpgroup.wait_group(1)  # x
                self.scores(x, s, tiles, read.index, block, shift, tanhs, is_full)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                self.round_to_operand(p, x)
                self.multiply(dv, [rows_mma], p, rDOt[None, None, None, read.index])
                cute.nvgpu.warpgroup.wait_group(1)  # dp
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = x[v] * (dp[v] - delta[v])
                if const_expr(self.problem.dbias and not self.problem.ds_is_dbias):
                    self.store_dbias(x, sDbias, args, block)
                if const_expr(tanhs is not None):
                    for v in cutlass.range_constexpr(cute.size(x)):
                        x[v] = x[v] * (1.0 - tanhs[v] * tanhs[v])
                self.round_to_operand(ds, x)
                if const_expr(self.problem.ds_is_dbias):
                    self.store_dbias(ds, sDbias, args, block)
                if const_expr(self.ahead):
                    # dv: with dv, dk and x in flight, ptxas waits for each WGMMA at once
                    cute.nvgpu.warpgroup.wait_group(0)
                self.multiply(dk, [rows_mma], ds, rQt[None, None, None, read.index])
                current = read.clone()
                read.advance()
                if const_expr(self.ahead):
                    if j + 1 < item.last:
                        loaded.consumer_wait(read)
                        self.multiply(x, *of_k, rQ[None, None, None, read.index])
                if const_expr(self.staged is not None):
                    self.write_dbias(dbias_atom, sDbias, block)
                # dk: in flight at the end of the loop, ptxas waits for each WGMMA at once
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(loaded, current)
            own = self.release_own(keys, own)
            for v in cutlass.range_constexpr(cute.size(dk)):
                dk[v] = dk[v] * s.scale
            k0 = item.tile * self.tile_k + wg * BLOCK
            for result, to in ((dk, args.dk), (dv, args.dv)):
                base = to.base + (Int64(item.head.batch) * to.batch + Int64(item.head.key_head) * to.head)
                self.write_rows(result, base + Int64(k0) * to.row, to.row, s.num_k - k0, s.d, thread)
        self.end_pingpong(wg)
        if const_expr(self.staged is not None):  # shared memory is read until then
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_dbias(self, dbias: cute.Tensor, sDbias, args: KeysArgs, block: Block):
        """Stores in the warp group's tile in shared memory, for `write_dbias`; in fp32 in global memory."""
        if const_expr(self.staged is None):  # whole sectors of 32 bytes, straight from registers
            s, (q, k) = args.scores, self.position(block, 0)
            at = self.start(args.dbias, block.head) + (Int64(q) * args.dbias.row + k)
            for i in cutlass.range_constexpr(0, cute.size(dbias), 4):  # two queries, of two keys each
                for c in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        if (q + (2 * i + c) < s.num_q) & (k + 8 * r < s.num_k):
                            vector_at(at, 8 * r, 1)[0] = dbias[i + c + 2 * r]
                    at = at + (7 * args.dbias.row if const_expr(c == 1) else args.dbias.row)
        else:
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)
            cute.arch.barrier(barrier_id=1 + block.wg, number_of_threads=128)
            base = self.staged.columns_base(sDbias[None, None, block.wg].iterator, Int32(0), block.thread)
            for j in cutlass.range_constexpr(0, self.tile_q // 8, 2):
                values = cute.make_rmem_tensor((8,), self.staged.dtype)
                for i in cutlass.range_constexpr(8):
                    values[i] = dbias[4 * j + i].to(self.staged.dtype)
                self.staged.store(self.staged.columns_at(base, j), values, True)

    @cute.jit
    def write_dbias(self, atom, sDbias, block: Block):
        """Copies the warp group's tile to global memory."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + block.wg, number_of_threads=128)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            of_head = self.of_head(atom[1], block.head.query_head, block.head.batch)
            part = self.part(atom, sDbias, of_head, self.staged)
            cute.copy(atom[0], part[0][None, block.wg], part[1][None, block.q0 // self.tile_q, block.k0 // BLOCK])
            cute.arch.cp_async_bulk_commit_group()
