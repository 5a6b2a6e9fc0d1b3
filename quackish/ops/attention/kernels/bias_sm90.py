"""Backward of attention on Hopper: the gradient of a bias that is broadcast over batch, heads or both.

    dbias = sum over these of ds,    ds = exp2(x - shift) * (do v^T - delta)

A CTA has a tile of dbias, (num_wgs blocks of 64 queries) x (tile keys), and sums ds over the heads of its part in a
fixed order. The parts are summed by whoever launches it.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import vector_at
from quackish.ops.attention.kernels.attention_sm90 import AttentionSm90
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.scores import Block, ScoreTiles, pair_rows
from quackish.ops.attention.problems import BLOCK, BiasArgs


class BiasItem(NamedTuple):
    """A CTA's unit of work: a tile of dbias, and the heads [first, last) that are summed."""

    head: Head  # of dbias
    tile_q: Int32
    tile_k: Int32
    part: Int32
    first: Int32
    last: Int32


class AttentionBiasSm90(AttentionSm90):
    rows_are_queries = True

    @property
    def stage_bytes(self) -> int:
        return 2 * self.config.num_wgs * self.own.bytes + 2 * self.other.bytes + self.score_bytes + 8 * self.tile_q

    @cute.jit
    def __call__(self, args: BiasArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        q_atom = self.load_atom(self.own, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.own, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.other, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        layouts = [self.own.layout(c.num_wgs * c.num_stages), self.other.layout(c.num_stages)]
        atoms = [q_atom, do_atom, k_atom, v_atom, self.stats_atom(args.stats, args.stats_row, s)]
        self.kernel(atoms, self.score_atoms(s), args, layouts, self.score_layouts()).launch(
            **self.launch_options(args, stream)
        )

    @cute.kernel
    def kernel(self, atoms: list, score_atoms: list, args: BiasArgs, layouts: list, score_layouts: list):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sWalk = self.allocate_walk(smem)
        sQ, sDO = self.own.allocate(smem, layouts[0]), self.own.allocate(smem, layouts[0])
        sK, sV = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        sStats = self.allocate_stats(smem)
        loaded = self.pipeline(c.num_stages, self.stage_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, sQ, sDO, sK, sV, tiles, sStats, sWalk, loaded, args)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(sQ, sDO, sK, sV, tiles, sStats, sWalk, loaded, args, wg - 1, tid % 128)

    @cute.jit
    def items(self, args: BiasArgs) -> Int32:
        s = args.scores
        tiles = cute.ceil_div(s.num_q, self.tile_q) * cute.ceil_div(s.num_k, self.tile_k)
        return tiles * args.batches * args.bias_heads * args.parts

    @cute.jit
    def item(self, turn: Int32, args: BiasArgs) -> BiasItem:
        s, i = args.scores, self.in_turn(turn)
        tiles_k, tiles_q = cute.ceil_div(s.num_k, self.tile_k), cute.ceil_div(s.num_q, self.tile_q)
        tile_k, i = i % tiles_k, i // tiles_k
        tile_q, i = i % tiles_q, i // tiles_q
        head, i = i % args.bias_heads, i // args.bias_heads
        batch, part = i % args.batches, i // args.batches
        summed = (s.batch // args.batches) * (s.heads // args.bias_heads)
        first, last = part * summed // args.parts, (part + 1) * summed // args.parts
        if const_expr(self.problem.band):  # tiles without keys that take part are 0
            q0, k0 = tile_q * self.tile_q, tile_k * self.tile_k
            if (k0 + self.tile_k - 1 + s.left < q0) | (k0 > q0 + self.tile_q - 1 + s.right):
                last = first
        return BiasItem(Head(batch, head, Int32(0)), tile_q, tile_k, part, first, last)

    @cute.jit
    def head_at(self, i: Int32, args: BiasArgs, head: Head) -> Head:
        """The i-th head that is summed; `head` is that of dbias."""
        s = args.scores
        per_batch = s.heads // args.bias_heads
        batch = i // per_batch if args.batches == 1 else head.batch
        query_head = i % per_batch if args.bias_heads == 1 else head.query_head
        return Head(batch, query_head, query_head // s.group)

    @cute.jit
    def place(self, n: Int32, item: BiasItem, args: BiasArgs):
        """The walk is over heads."""
        return self.head_at(n, args, item.head), item.tile_q * self.tile_q, item.tile_k * self.tile_k

    @cute.jit
    def produce(self, atoms, score_atoms, sQ, sDO, sK, sV, tiles: ScoreTiles, sStats, sWalk, loaded, args: BiasArgs):
        loads = [atoms, score_atoms, [sQ, sDO, sK, sV, tiles, sStats]]
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            state = self.load_item(loads, item, args, loaded, state, sWalk, 0)
        loaded.producer_tail(state)

    @cute.jit
    def load_tile(self, loads, item: BiasItem, args: BiasArgs, n: Int32, loaded, state, is_full):
        """Loads an item's tiles of the n-th head."""
        c, s = self.config, args.scores
        atoms, score_atoms, (sQ, sDO, sK, sV, tiles, sStats) = loads
        head = self.head_at(n, args, item.head)
        barrier = loaded.producer_get_barrier(state)
        for a, to in ((0, sQ), (1, sDO)):
            part = self.part(atoms[a], to, self.of_head(atoms[a][1], head.query_head, head.batch), self.own)
            for w in cutlass.range_constexpr(c.num_wgs):
                self.load(atoms[a], part, item.tile_q * c.num_wgs + w, 0, state.index * c.num_wgs + w, barrier)
        for a, to in ((2, sK), (3, sV)):
            part = self.part(atoms[a], to, self.of_head(atoms[a][1], head.key_head, head.batch), self.other)
            self.load(atoms[a], part, item.tile_k, 0, state.index, barrier)
        parts = self.score_parts(score_atoms, tiles, s, head)
        self.load_scores(score_atoms, parts, item.tile_q, item.tile_k, state.index, barrier, None, is_full)
        self.load_stats(atoms[4], sStats, s, head, item.tile_q, state.index, barrier)

    @cute.jit
    def consume(
        self, sQ, sDO, sK, sV, tiles: ScoreTiles, sStats, sWalk, loaded, args: BiasArgs, wg: Int32, thread: Int32
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_of_scores(self.tile_k, add) for add in (False, True)]
        part = mmas[0].get_slice(0)
        rQ, rDO = (mmas[0].make_fragment_A(part.partition_A(t)) for t in (sQ, sDO))
        rK, rV = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sK, sV))
        x, dp, total = (self.accumulator(self.tile_k) for _ in range(3))
        stats = cute.make_rmem_tensor((2, 2), Float32)
        shifts, delta = stats[None, 0], self.per_row(stats[None, 1])
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            q0 = item.tile_q * self.tile_q + wg * BLOCK
            block = Block(item.head, q0, item.tile_k * self.tile_k, BLOCK, self.tile_k, wg, thread)
            total.fill(0.0)
            for m in cutlass.range(item.first, self.last_of(item, args, 0), unroll=1):
                loaded.consumer_wait(read)
                # Reading a mask that is not aligned only where needed spills registers.
                j, is_full = self.loaded_tile(sWalk, read.index, m, self.problem.mask_aligned)
                own = read.index * c.num_wgs + wg
                self.multiply(x, mmas, rQ[None, None, None, own], rK[None, None, None, read.index])
                self.multiply(dp, mmas, rDO[None, None, None, own], rV[None, None, None, read.index])
                for r in cutlass.range_constexpr(2):
                    for n in cutlass.range_constexpr(2):
                        stats[r, n] = sStats[wg * BLOCK + pair_rows(thread) + 8 * r, n, read.index]
                cute.nvgpu.warpgroup.wait_group(1)
                at = block
                if const_expr(not (self.problem.bias_aligned and self.problem.mask_aligned)):
                    at = block._replace(head=self.head_at(j, args, item.head))
                shift = self.shift(self.per_row(shifts), shifts, j, item, args)
                self.scores(x, s, tiles, read.index, at, shift, None, is_full)
                for v in cutlass.range_constexpr(cute.size(x)):
                    x[v] = cute.math.exp2(x[v], fastmath=True)
                cute.nvgpu.warpgroup.wait_group(0)
                for v in cutlass.range_constexpr(cute.size(x)):
                    total[v] = total[v] + x[v] * (dp[v] - delta[v])
                self.release(loaded, read)
                read.advance()
            self.write_total(total, args, item, block)

    @cute.jit
    def write_total(self, total: cute.Tensor, args: BiasArgs, item: BiasItem, block: Block):
        s, t, head = args.scores, args.dbias, item.head
        base = t.base + (Int64(item.part) * args.part + Int64(head.batch) * t.batch + Int64(head.query_head) * t.head)
        for v in cutlass.range_constexpr(0, cute.size(total), 2):
            q, k = self.position(block, v)
            if (q < s.num_q) & (k < s.num_k):  # rows have room for a multiple of 8 columns
                pair = cute.make_rmem_tensor((2,), t.base.dtype)
                pair[0], pair[1] = (total[v + i].to(t.base.dtype) for i in range(2))
                vector_at(base, Int64(q) * t.row + k, 2).store(pair.load())
