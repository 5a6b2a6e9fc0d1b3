"""Backward of attention on Hopper: dq, dk, dv, and the bias's gradient if it is not broadcast.

    p = exp2(x - shift)      dv = p^T do
    ds = p * (do v^T - delta)      dk = scale * ds^T q      dq = scale * ds k      dbias = ds

A cluster has a key head, and walks over tiles of keys; for each, over all queries of the query heads that share it.
Its CTAs take turns with pairs of 64 queries. A CTA therefore has all of dq of its queries: it adds to fp32 sums in
global memory, in the order of keys, which no other CTA touches. The CTAs' parts of dk and dv are summed through
distributed shared memory, in the order of CTAs.

Two consumer warp groups have 64 keys each. The accumulators of x and ds are transposed, so that they are operands of
dv and dk straight from registers; ds of a pair of query tiles goes through shared memory for dq and dbias. There each
warp group multiplies 64 queries by all keys.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass._mlir.dialects.nvvm import MemScopeKind
from cutlass import AddressSpace, Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from quackish.configs.attention import BLOCK, BackwardArgs, ScoreArgs, Strided
from quackish.kernels.common.arguments import DTYPES
from quackish.kernels.common.attention import AttentionSm90, Block, Head, ScoreTiles, pair_rows
from quackish.kernels.common.dependent_launch import after_previous
from quackish.kernels.common.memory import add_four, load_four, vector_at
from quackish.kernels.common.swizzled_tile import SwizzledTile

PAIR = 2 * BLOCK  # queries whose ds is in shared memory at once
SLOTS = 8  # 8 columns each of dk or dv that the CTAs of a cluster sum at once
_BOTH = 3  # the named barrier of both warp groups; 1 and 2 are those of each


class Pairs(NamedTuple):
    """The pairs of query tiles of a CTA that take part in a tile of keys: first, first + parts, ..."""

    first: Int32
    count: Int32


class Sums(NamedTuple):
    """Shared memory in which a cluster sums dk and dv, and its barriers."""

    buffer: cute.Pointer
    ready: cute.Pointer  # all CTAs of the cluster may receive
    full: cute.Pointer  # this CTA has received


class AttentionBackwardSm90(AttentionSm90):
    rows_are_queries = False

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.parts = problem.parts
        self.per_pair = PAIR // self.tile_q
        self.ds = SwizzledTile(self.dtype, BLOCK, self.tile_k)
        self.staged = None  # a tile of dbias that TMA stores
        if problem.ds_is_dbias:
            self.staged = self.ds
        elif problem.dbias and problem.bias_dtype != "float32":
            self.staged = SwizzledTile(DTYPES[problem.bias_dtype], self.tile_q, self.tile_k)

    @cute.jit
    def __call__(self, args: BackwardArgs, stream: CUstream):
        s, c = args.scores, self.config
        heads_k = s.heads // s.group
        k_atom = self.load_atom(self.own, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.own, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        q_atom = self.load_atom(self.other, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        do_atom = self.load_atom(self.other, self.tensor(args.do, s.num_q, s.d, s.heads, s.batch))
        atoms = [k_atom, v_atom, q_atom, do_atom, self.stats_atom(args.stats, args.stats_row, s)]
        outputs = []
        if const_expr(self.staged is not None):
            outputs.append(self.store_atom(self.staged, self.tensor(args.dbias, s.num_q, s.num_k, s.heads, s.batch)))
        layouts = [self.own.layout(c.num_wgs), self.other.layout(c.num_stages), self.ds.layout(2)]
        if const_expr(self.staged not in (None, self.ds)):
            layouts.append(self.staged.layout(1))
        clusters = cutlass.min(heads_k * s.batch, s.max_ctas // self.parts)
        self.kernel(atoms, self.score_atoms(s), outputs, args, layouts, self.score_layouts()).launch(
            grid=[clusters * self.parts, 1, 1], block=[c.threads, 1, 1],
            cluster=[self.parts, 1, 1] if const_expr(self.parts > 1) else None,
            min_blocks_per_mp=1, stream=stream, use_pdl=True,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, atoms: list, score_atoms: list, outputs: list, args: BackwardArgs, layouts: list, score_layouts: list
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
        sDS = sDbias = self.ds.allocate(smem, layouts[2])
        if const_expr(len(layouts) > 3):
            sDbias = self.staged.allocate(smem, layouts[3])
        sStats = self.allocate_stats(smem)
        sums = self.allocate_sums(smem, sDS)
        keys = self.pipeline(1, 2 * c.num_wgs * self.own.bytes)
        loaded = self.pipeline(c.num_stages, 2 * self.other.bytes + self.score_bytes + 8 * self.tile_q)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.parts, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(self.parts, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, sQ, sDO, tiles, sStats, loaded, s)
            elif warp == 1:
                self.produce_keys(atoms, sK, sV, keys, s)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(outputs, sK, sV, sQ, sDO, tiles, sDS, sDbias, sStats, sums, keys, loaded, args, wg - 1,
                         tid % 128)  # fmt: skip

    # The walk, by all roles

    @cute.jit
    def head_items(self, s: ScoreArgs):
        """(first, last, step) of this cluster's items, which are key heads."""
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        return cta // self.parts, s.heads // s.group * s.batch, ctas // self.parts

    @cute.jit
    def head_of(self, i: Int32, s: ScoreArgs) -> Head:
        """The key head of an item, and its first query head."""
        heads = s.heads // s.group
        return Head(i // heads, i % heads * s.group, i % heads)

    @cute.jit
    def rank(self) -> Int32:
        """This CTA's number in the cluster."""
        return cute.arch.block_idx()[0] % self.parts

    @cute.jit
    def pairs(self, tile: Int32, s: ScoreArgs) -> Pairs:
        """This CTA's pairs of query tiles for a tile of keys."""
        first, last = self.query_tiles(s, tile * self.tile_k, self.tile_k, PAIR)
        first = first + (self.rank() + self.parts - first % self.parts) % self.parts
        return Pairs(first, cutlass.max(last - first + self.parts - 1, 0) // self.parts)

    # Producers

    @cute.jit
    def produce_keys(self, atoms, sK, sV, keys, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
        begin, end, step = self.head_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            head = self.head_of(i, s)
            parts = [
                self.part(atoms[a], shared, self.of_head(atoms[a][1], head.key_head, head.batch), self.own)
                for a, shared in ((0, sK), (1, sV))
            ]
            for tile in cutlass.range(cute.ceil_div(s.num_k, self.tile_k), unroll=1):
                keys.producer_acquire(state)
                barrier = keys.producer_get_barrier(state)
                for a in cutlass.range_constexpr(2):
                    for w in cutlass.range_constexpr(self.config.num_wgs):
                        self.load(atoms[a], parts[a], tile * self.config.num_wgs + w, 0, w, barrier)
                state.advance()
        keys.producer_tail(state)

    @cute.jit
    def produce(self, atoms, score_atoms, sQ, sDO, tiles: ScoreTiles, sStats, loaded, s: ScoreArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        policies = self.score_policies(s)
        begin, end, step = self.head_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            of_item = self.head_of(i, s)
            for tile in cutlass.range(cute.ceil_div(s.num_k, self.tile_k), unroll=1):
                pairs = self.pairs(tile, s)
                for g in cutlass.range(s.group, unroll=1):
                    head = of_item._replace(query_head=of_item.query_head + g)
                    q_part = self.part(atoms[2], sQ, self.of_head(atoms[2][1], head.query_head, head.batch), self.other)
                    do_part = self.part(
                        atoms[3], sDO, self.of_head(atoms[3][1], head.query_head, head.batch), self.other
                    )
                    score_parts = self.score_parts(score_atoms, tiles, s, head)
                    for j in cutlass.range(self.per_pair * pairs.count, unroll=1):
                        n = self.per_pair * (pairs.first + j // self.per_pair * self.parts) + j % self.per_pair
                        loaded.producer_acquire(state)
                        barrier = loaded.producer_get_barrier(state)
                        self.load(atoms[2], q_part, n, 0, state.index, barrier)
                        self.load(atoms[3], do_part, n, 0, state.index, barrier)
                        for a in cutlass.range_constexpr(len(score_parts)):
                            self.load(score_atoms[a], score_parts[a], n, tile, state.index, barrier, policies[a])
                        self.load_stats(atoms[4], sStats, s, head, n, state.index, barrier)
                        state.advance()
        loaded.producer_tail(state)

    # Consumers

    @cute.jit
    def consume(
        self, outputs, sK, sV, sQ, sDO, tiles: ScoreTiles, sDS, sDbias, sStats, sums: Sums, keys, loaded,
        args: BackwardArgs, wg: Int32, thread: Int32,
    ):  # fmt: skip
        c, s = self.config, args.scores
        mmas = [self.mma_from_shared(self.tile_q, add) for add in (False, True)]
        rows_mma, dq_mmas = self.mma_from_registers(), [self.dq_mma(add) for add in (False, True)]
        part, dq_part = mmas[0].get_slice(0), dq_mmas[0].get_slice(0)
        rK, rV = (mmas[0].make_fragment_A(part.partition_A(t))[None, None, None, wg] for t in (sK, sV))
        rQ, rDO = (mmas[0].make_fragment_B(part.partition_B(t)) for t in (sQ, sDO))
        rQt, rDOt = (
            rows_mma.make_fragment_B(rows_mma.get_slice(0).partition_B(self.transposed(t, c.num_stages)))
            for t in (sQ, sDO)
        )
        rDS = dq_mmas[0].make_fragment_A(dq_part.partition_A(sDS))[None, None, None, wg]
        rKt = dq_mmas[0].make_fragment_B(dq_part.partition_B(self.transposed(sK, c.num_wgs)))
        x, dp = self.accumulator(self.tile_q), self.accumulator(self.tile_q)
        dk, dv, dq = (self.accumulator(self.d) for _ in range(3))
        p, ds = self.operand(self.tile_q), self.operand(self.tile_q)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        num_sums = Int32(0)
        begin, end, step = self.head_items(s)
        for i in cutlass.range(begin, end, step, unroll=1):
            head = self.head_of(i, s)
            self.clear_dq(args, head, wg, thread)
            for tile in cutlass.range(cute.ceil_div(s.num_k, self.tile_k), unroll=1):
                k0 = tile * self.tile_k + wg * BLOCK
                pairs = self.pairs(tile, s)
                dk.fill(0.0)
                dv.fill(0.0)
                keys.consumer_wait(own)
                for n in cutlass.range(s.group * pairs.count, unroll=1):
                    of_query = head._replace(query_head=head.query_head + n // pairs.count)
                    pair = pairs.first + n % pairs.count * self.parts
                    for h in cutlass.range(self.per_pair, unroll=1):
                        block = Block(of_query, pair * PAIR + h * self.tile_q, k0, self.tile_q, BLOCK, wg, thread)
                        loaded.consumer_wait(read)
                        self.multiply(x, mmas, rK, rQ[None, None, None, read.index])
                        self.multiply(dp, mmas, rV, rDO[None, None, None, read.index])
                        warpgroup.wait_group(1)  # x, and dk of the tile before
                        if h > 0:
                            loaded.consumer_release(previous)
                            previous.advance()
                        shift, delta = (self.per_column(sStats[None, j, read.index].iterator, thread) for j in range(2))
                        self.scores(x, s, tiles, read.index, block, shift, tanhs)
                        for v in cutlass.range_constexpr(cute.size(x)):
                            x[v] = cute.math.exp2(x[v], fastmath=True)
                        self.round_to_operand(p, x)
                        self.multiply(dv, [rows_mma], p, rDOt[None, None, None, read.index])
                        warpgroup.wait_group(1)  # dp
                        for v in cutlass.range_constexpr(cute.size(x)):
                            x[v] = x[v] * (dp[v] - delta[v])
                        if h == 0:
                            self.wait_until_stored(wg)
                        if const_expr(self.problem.dbias and not self.problem.ds_is_dbias):
                            self.store_dbias_apart(outputs, x, sDbias, args, block)
                        if const_expr(tanhs is not None):
                            for v in cutlass.range_constexpr(cute.size(x)):
                                x[v] = x[v] * (1.0 - tanhs[v] * tanhs[v])
                        self.store_transposed(x, self.ds, sDS, h * self.tile_q, wg, thread)
                        self.round_to_operand(ds, x)
                        self.multiply(dk, [rows_mma], ds, rQt[None, None, None, read.index])
                        read.advance()

                    # dq of the pair: this warp group's 64 queries
                    cute.arch.fence_view_async_shared()
                    self.sync_both()
                    if const_expr(self.problem.ds_is_dbias):
                        self.copy_dbias(outputs[0], sDS, wg, of_query, 2 * pair + wg, tile)
                    self.multiply_dq(dq, dq_mmas, rDS, rKt)
                    warpgroup.wait_group(0)
                    loaded.consumer_release(previous)
                    previous.advance()
                    self.add_dq(dq, args, of_query, pair, wg, thread)
                keys.consumer_release(own)
                own.advance()
                for v in cutlass.range_constexpr(cute.size(dk)):
                    dk[v] = dk[v] * s.scale
                for result, out in ((dk, args.dk), (dv, args.dv)):
                    num_sums = self.store_of_keys(result, out, s, head, k0, sums, num_sums, wg, thread)
            self.finish_dq(dq, args, head, wg, thread)

    @cute.jit
    def sync_both(self):
        cute.arch.barrier(barrier_id=_BOTH, number_of_threads=128 * self.config.num_wgs)

    @cute.jit
    def is_issuer(self):
        """True in the warp of a warp group that issues its stores by TMA."""
        return cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0

    @cute.jit
    def wait_until_stored(self, wg: Int32):
        """Both warp groups have read ds, and TMA has."""
        if const_expr(self.staged is not None):
            if self.is_issuer():
                cute.arch.cp_async_bulk_wait_group(0, read=True)
        self.sync_both()

    @cute.jit
    def store_transposed(
        self, acc: cute.Tensor, tile: SwizzledTile, shared: cute.Tensor, row0: Int32, wg: Int32, thread: Int32,
    ):  # fmt: skip
        """Rounds an accumulator of (keys, queries) into rows row0... of tiles (queries, keys)."""
        base = tile.columns_base(shared[None, None, row0 // tile.rows].iterator, wg * BLOCK, thread)
        base = tile.columns_at(base, row0 % tile.rows // 8)
        for j in cutlass.range_constexpr(0, self.tile_q // 8, 2):
            values = cute.make_rmem_tensor((8,), tile.dtype)
            for i in cutlass.range_constexpr(8):
                values[i] = acc[4 * j + i].to(tile.dtype)
            tile.store(tile.columns_at(base, j), values, True)

    # dbias

    @cute.jit
    def copy_dbias(self, atom, shared: cute.Tensor, index: Int32, head: Head, tile_q: Int32, tile_k: Int32):
        """A warp group stores tile number `index` in shared memory by TMA."""
        if self.is_issuer():
            part = self.part(atom, shared, self.of_head(atom[1], head.query_head, head.batch), self.staged)
            cute.copy(atom[0], part[0][None, index], part[1][None, tile_q, tile_k])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_dbias_apart(self, outputs, dbias: cute.Tensor, sDbias, args: BackwardArgs, block: Block):
        """Stores dbias where it is not ds as stored for dq."""
        s, head = args.scores, block.head
        if const_expr(self.staged is None):
            q, k = self.position(block, 0)
            at = self.start(args.dbias, head) + (Int64(q) * args.dbias.row + k)
            for i in cutlass.range_constexpr(0, cute.size(dbias), 4):  # two queries, 8 apart from the next two
                for c in cutlass.range_constexpr(2):
                    for r in cutlass.range_constexpr(2):
                        if (q + (2 * i + c) < s.num_q) & (k + 8 * r < s.num_k):
                            vector_at(at, 8 * r, 1)[0] = dbias[i + c + 2 * r]
                    at = at + (7 * args.dbias.row if const_expr(c == 1) else args.dbias.row)
        else:
            self.wait_until_stored(block.wg)
            self.store_transposed(dbias, self.staged, sDbias, Int32(0), block.wg, block.thread)
            cute.arch.fence_view_async_shared()
            self.sync_both()
            if block.wg == 0:
                self.copy_dbias(
                    outputs[0], sDbias, Int32(0), head, block.q0 // self.tile_q, block.k0 // self.tile_k
                )

    # dq: its fp32 sums are (batch, heads, pairs, warp groups, d / 8, 128 threads, 4)

    def dq_mma(self, accumulate: bool):
        """ds (64 queries, keys) @ k (keys, d), both in shared memory."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            tiler_mn=(BLOCK, self.d),
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, accumulate)
        return mma

    def multiply_dq(self, dq, mmas, rDS, rKt):
        """Issues dq = ds @ k."""
        warpgroup.fence()
        per_tile = cute.size(rKt, mode=[2])
        for kb in range(cute.size(rDS, mode=[2])):
            of_keys = rKt[None, None, kb % per_tile, kb // per_tile]
            cute.gemm(mmas[0 if kb == 0 else 1], dq, rDS[None, None, kb], of_keys, dq)
        warpgroup.commit_group()

    @cute.jit
    def dq_sums(self, args: BackwardArgs, head: Head, pair: Int32, wg: Int32, thread: Int32) -> cute.Pointer:
        s = args.scores
        num_pairs = cute.ceil_div(s.num_q, PAIR)
        block = ((Int64(head.batch) * s.heads + head.query_head) * num_pairs + pair) * 2 + wg
        return args.dq_sums + (block * (BLOCK * self.d) + thread * 4)

    @cute.jit
    def own_pairs(self, s: ScoreArgs) -> Pairs:
        """All pairs of this CTA."""
        count = cute.ceil_div(s.num_q, PAIR) - self.rank()
        return Pairs(self.rank(), cutlass.max(count + self.parts - 1, 0) // self.parts)

    @cute.jit
    def clear_dq(self, args: BackwardArgs, head: Head, wg: Int32, thread: Int32):
        s, pairs = args.scores, self.own_pairs(args.scores)
        zero = cute.make_rmem_tensor((4,), Float32)
        zero.fill(0.0)
        for n in cutlass.range(s.group * pairs.count, unroll=1):
            of_query = head._replace(query_head=head.query_head + n // pairs.count)
            sums = self.dq_sums(args, of_query, pairs.first + n % pairs.count * self.parts, wg, thread)
            for j in cutlass.range_constexpr(self.d // 8):
                vector_at(sums, j * 512, 4).store(zero.load())

    @cute.jit
    def add_dq(self, dq: cute.Tensor, args: BackwardArgs, head: Head, pair: Int32, wg: Int32, thread: Int32):
        sums = self.dq_sums(args, head, pair, wg, thread)
        for j in cutlass.range_constexpr(self.d // 8):
            add_four(sums + j * 512, [dq[4 * j + i] for i in range(4)])

    @cute.jit
    def finish_dq(self, dq: cute.Tensor, args: BackwardArgs, head: Head, wg: Int32, thread: Int32):
        """Rounds the sums of all pairs of this CTA. Each thread reads what it has added."""
        s, pairs = args.scores, self.own_pairs(args.scores)
        for n in cutlass.range(s.group * pairs.count, unroll=1):
            of_query = head._replace(query_head=head.query_head + n // pairs.count)
            pair = pairs.first + n % pairs.count * self.parts
            sums = self.dq_sums(args, of_query, pair, wg, thread)
            for j in cutlass.range_constexpr(self.d // 8):
                four = load_four(sums + j * 512)
                for i in cutlass.range_constexpr(4):
                    dq[4 * j + i] = four[i] * s.scale
            row = pair * PAIR + wg * BLOCK + pair_rows(thread)
            base = self.start(args.dq, of_query)
            for j in cutlass.range_constexpr(self.d // 8):
                self.store_slot([dq[4 * j + i] for i in range(4)], base, args.dq, row, s.num_q, 8 * j, s.d, thread)

    # dk and dv

    @cute.jit
    def store_slot(self, values: list, base, out: Strided, row: Int32, rows: Int32, column: Int32, d: Int32, thread):
        """Stores a thread's four values of 8 columns of an accumulator."""
        for r in cutlass.range_constexpr(2):
            if (row + 8 * r < rows) & (column < d):
                two = cute.make_rmem_tensor((2,), self.dtype)
                for i in cutlass.range_constexpr(2):
                    two[i] = values[2 * r + i].to(self.dtype)
                vector_at(base, Int64(row + 8 * r) * out.row + (column + thread % 4 * 2), 2).store(two.load())

    @cute.jit
    def allocate_sums(self, smem, sDS) -> Sums:
        """The sums of dk and dv use the memory of ds."""
        barriers = smem.allocate_array(Int64, 2)
        if const_expr(self.parts > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(barriers, self.parts)
                cute.arch.mbarrier_init(barriers + 1, 1)
            cute.arch.mbarrier_init_fence()
        buffer = cute.make_ptr(Float32, sDS.iterator.toint(), AddressSpace.smem, assumed_align=16)
        return Sums(buffer, barriers, barriers + 1)

    @cute.jit
    def store_of_keys(
        self, acc: cute.Tensor, out: Strided, s: ScoreArgs, head: Head, k0: Int32, sums: Sums, num_sums: Int32,
        wg: Int32, thread: Int32,
    ) -> Int32:  # fmt: skip
        """Sums dk or dv over the cluster, and stores it. Returns the number of sums so far, for the barriers' phases."""
        base = self.start(out, head._replace(query_head=head.key_head))
        row = k0 + pair_rows(thread)
        if const_expr(self.parts == 1):
            for j in cutlass.range_constexpr(self.d // 8):
                self.store_slot([acc[4 * j + i] for i in range(4)], base, out, row, s.num_k, 8 * j, s.d, thread)
        else:
            slots = const_expr(min(SLOTS, self.d // 8))
            for first in cutlass.range_constexpr(0, self.d // 8, slots):
                self.exchange(acc, first, slots, sums, num_sums, wg, thread)
                for k in cutlass.range_constexpr(slots // self.parts):
                    total = self.received(sums, k, slots, wg, thread)
                    column = 8 * (first + k * self.parts + self.rank())
                    self.store_slot([total[i] for i in range(4)], base, out, row, s.num_k, column, s.d, thread)
                num_sums = num_sums + 1
        return num_sums

    @cute.jit
    def slot(self, sums: Sums, rank: Int32, k: cutlass.Constexpr[int], slots: cutlass.Constexpr[int], wg, thread):
        """Where a CTA receives the k-th of its slots from CTA `rank`."""
        return vector_at(sums.buffer, ((wg * slots + rank * (slots // self.parts) + k) * 128 + thread) * 4, 4).iterator

    @cute.jit
    def exchange(
        self, acc: cute.Tensor, first: cutlass.Constexpr[int], slots: cutlass.Constexpr[int], sums: Sums,
        num_sums: Int32, wg: Int32, thread: Int32,
    ):  # fmt: skip
        """Sends slot first + j to CTA j % parts, for all j < slots, and waits for what the other CTAs send."""
        phase = num_sums % 2
        self.wait_until_stored(wg)
        if wg == 0:
            if thread < self.parts:
                cute.arch.mbarrier_arrive(sums.ready, thread, scope=MemScopeKind.CLUSTER)
            if thread == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(sums.full, self.config.num_wgs * slots * 128 * 16)
        cute.arch.mbarrier_wait(sums.ready, phase)
        for j in cutlass.range_constexpr(slots):
            words = tuple(acc[4 * (first + j) + i].bitcast(Int32) for i in range(4))
            to = self.slot(sums, self.rank(), j // self.parts, slots, wg, thread)
            cute.arch.store_async_dsmem(to, words, sums.full, j % self.parts)
        cute.arch.mbarrier_wait(sums.full, phase)

    @cute.jit
    def received(self, sums: Sums, k: cutlass.Constexpr[int], slots: cutlass.Constexpr[int], wg: Int32, thread: Int32):
        """The sum over the CTAs of the cluster, in their order."""
        total = cute.make_rmem_tensor((4,), Float32)
        total.fill(0.0)
        for rank in cutlass.range_constexpr(self.parts):
            total.store(total.load() + vector_at(self.slot(sums, Int32(rank), k, slots, wg, thread), 0, 4).load())
        return total
