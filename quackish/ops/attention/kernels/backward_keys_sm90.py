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
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import DTYPES
from quackish.kernels.memory import vector_at
from quackish.ops.attention.arguments import BLOCK, KeysArgs, ScoreArgs
from quackish.ops.attention.config import keys_ahead
from quackish.ops.attention.kernels.base_sm90 import AttentionSm90, Tiles
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.mask_walk import class_of
from quackish.ops.attention.kernels.scores import ScoreBlock
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile


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
    stats_of = "loaded"

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.ahead = keys_ahead(problem, config)
        # A step with a mask of blocks takes 3 % less time with it at d 128, and 2.5 % more at d 64 (H100).
        self.pingpong = self.d > 64 and not self.ahead

    def shared_tiles(self) -> dict[str, Tiles]:
        tiles = super().shared_tiles()
        if self.problem.dbias_by_tma:
            self.staged = SwizzledTile(DTYPES[self.problem.bias_dtype], self.tile_q, BLOCK)
            tiles["dbias"] = Tiles(self.staged, self.config.num_wgs)
        return tiles

    @property
    def knows_full(self) -> bool:
        return self.problem.mask_aligned

    @cute.jit
    def __call__(self, args: KeysArgs, stream: CUstream):
        s = args.scores
        tensors = dict(
            k=self.like_k(s.k, s), v=self.like_k(s.v, s), q=self.like_q(s.q, s), do=self.like_q(args.do, s)
        )  # fmt: skip
        self.launch(tensors, args, stream)

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
        if const_expr(self.problem.mask_of_keys):
            some, _ = class_of(s, head.batch, head.query_head, Int32(0), tile * self.tile_k, (1, self.tile_k))
            last = last if some else first
        return KeyItem(
            head=head, tile=tile, first=Int32(0), last=s.group * (last - first), first_of_head=first,
            per_head=last - first,
        )  # fmt: skip

    @cute.jit
    def place(self, n: Int32, item: KeyItem, args: KeysArgs):
        """(batch and heads, first query, first key) of the n-th tile."""
        head = item.head._replace(query_head=item.head.query_head + n // item.per_head)
        return head, (item.first_of_head + n % item.per_head) * self.tile_q, item.tile * self.tile_k

    @cute.jit
    def load_tile(self, cta: Cta, item: KeyItem, n: Int32, state, is_full):
        """Loads the n-th tile of q and do, and of bias and mask for an item's keys."""
        barrier = cta.loaded.producer_get_barrier(state)
        head, q0, _ = self.place(n, item, cta.args)
        tile_q = q0 // self.tile_q
        for name in ("q", "do"):
            self.load(self.part(cta, name, head.query_head, head.batch), tile_q, 0, state.index, barrier)
        self.load_scores(cta, head, tile_q, item.tile, state, is_full)
        self.load_stats(cta, head, tile_q, state.index, barrier)

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        s, args, shared, loaded = cta.args.scores, cta.args, cta.shared, cta.loaded
        rows_mma = self.mma_of_rows()
        operands = self.own_operands(self.tile_q, cta)
        rQ, rDO = (self.fragments_b(own.mmas[0], t) for own, t in zip(operands, (shared.q, shared.do), strict=True))
        rQt, rDOt = (self.fragments_b(rows_mma, self.transposed(t)) for t in (shared.q, shared.do))
        x, dp = self.accumulator(self.tile_q), self.accumulator(self.tile_q)
        dk, dv = (self.accumulator(self.d) for _ in range(2))
        p, ds = self.operand(self.tile_q), self.operand(self.tile_q)
        tanhs = cute.make_rmem_tensor(x.layout, Float32) if const_expr(self.problem.softcap) else None
        own = self.own_state(wg)
        read = self.loaded_state()
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(args), unroll=1):
            item = self.own_item(cta, own)
            k, v = self.load_own(operands, cta, own.index, thread)
            kept = self.kept_rows(s, item.head, item.tile * self.tile_k + wg * BLOCK, thread)
            dk.fill(0.0)
            dv.fill(0.0)
            if const_expr(self.ahead):
                if item.first < item.last:
                    loaded.consumer_wait(read)
                    self.multiply(x, *k, rQ[None, None, None, read.index])
                    cute.nvgpu.warpgroup.wait_group(0)
            for j in cutlass.range(item.first, item.last, unroll=1):
                tile = read.index
                if const_expr(not self.ahead):
                    loaded.consumer_wait(read)
                    self.wait_to_issue(wg)
                    self.multiply(x, *k, rQ[None, None, None, tile])
                self.multiply(dp, *v, rDO[None, None, None, tile])
                self.let_next_issue(wg)
                n, is_full, _ = self.loaded_tile(cta.walk, read.index, j)
                of_query, q0, k0 = self.place(n, item, args)
                block = ScoreBlock(of_query, q0=q0, k0=k0 + wg * BLOCK, wg=wg, thread=thread)
                per_lane = const_expr(self.tile_q // 32)
                values, delta = (self.per_column(shared.stats[None, r, tile].iterator, thread) for r in range(2))
                of_lane = vector_at(shared.stats[None, 0, tile].iterator, thread % 32 * per_lane, per_lane)
                shift = self.shift(values, of_lane, n, item)
                if const_expr(self.waits_once):
                    cute.nvgpu.warpgroup.wait_group(0)
                elif const_expr(not self.ahead):
                    cute.nvgpu.warpgroup.wait_group(1)  # x
                self.scores(x, cta, read.index, block, shift, tanhs, is_full)
                for i in cutlass.range_constexpr(cute.size(x)):
                    x[i] = cute.math.exp2(x[i], fastmath=True)
                self.round_to_operand(p, x)
                if const_expr(not self.waits_once):
                    self.multiply(dv, [rows_mma], p, rDOt[None, None, None, tile])
                    cute.nvgpu.warpgroup.wait_group(1)  # dp
                for i in cutlass.range_constexpr(cute.size(x)):
                    x[i] = x[i] * (dp[i] - delta[i])
                if const_expr(self.problem.dbias):
                    self.zero_rows(x, kept)
                if const_expr(self.problem.dbias and not self.problem.ds_is_dbias):
                    self.store_dbias(x, cta, block)
                if const_expr(tanhs is not None):
                    for i in cutlass.range_constexpr(cute.size(x)):
                        x[i] = x[i] * (1.0 - tanhs[i] * tanhs[i])
                self.round_to_operand(ds, x)
                if const_expr(self.problem.ds_is_dbias):
                    self.store_dbias(ds, cta, block)
                if const_expr(self.waits_once):
                    self.multiply(dv, [rows_mma], p, rDOt[None, None, None, tile])
                elif const_expr(self.ahead):
                    # dv: from d 64 on, with dv, dk and x in flight, ptxas waits for each WGMMA at once
                    cute.nvgpu.warpgroup.wait_group(0)
                self.multiply(dk, [rows_mma], ds, rQt[None, None, None, tile])
                current = read.clone()
                read.advance()
                if const_expr(self.ahead):
                    if j + 1 < item.last:
                        loaded.consumer_wait(read)
                        self.multiply(x, *k, rQ[None, None, None, read.index])
                if const_expr(self.staged is not None):
                    self.write_dbias(cta, block)
                # dk: in flight at the end of the loop, ptxas waits for each WGMMA at once
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(loaded, current)
            own = self.release_own(cta.own, own)
            for i in cutlass.range_constexpr(cute.size(dk)):
                dk[i] = dk[i] * s.scale
            k0, head = item.tile * self.tile_k + wg * BLOCK, item.head
            for result, to in ((dk, args.dk), (dv, args.dv)):
                self.zero_rows(result, kept)
                base = to.base + (Int64(head.batch) * to.batch + Int64(head.key_head) * to.head)
                self.write_rows(result, base + Int64(k0) * to.row, to.row, s.num_k - k0, s.d, thread)
        self.end_pingpong(wg)
        if const_expr(self.staged is not None):  # shared memory is read until then
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_dbias(self, dbias: cute.Tensor, cta: Cta, block: ScoreBlock):
        """Stores in the warp group's tile in shared memory, for `write_dbias`; in fp32 in global memory."""
        if const_expr(self.staged is None):  # whole sectors of 32 bytes, straight from registers
            args, s, (q, k) = cta.args, cta.args.scores, self.position(block, 0)
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
            base = self.staged.columns_base(cta.shared.dbias[None, None, block.wg].iterator, Int32(0), block.thread)
            for j in cutlass.range_constexpr(0, self.tile_q // 8, 2):
                values = cute.make_rmem_tensor((8,), self.staged.dtype)
                for i in cutlass.range_constexpr(8):
                    values[i] = dbias[4 * j + i].to(self.staged.dtype)
                self.staged.store(self.staged.columns_at(base, j), values, True)

    @cute.jit
    def write_dbias(self, cta: Cta, block: ScoreBlock):
        """Copies the warp group's tile to global memory."""
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=1 + block.wg, number_of_threads=128)
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            head = block.head
            part = self.part(cta, "dbias", head.query_head, head.batch)
            to = part.tiles[None, block.q0 // self.tile_q, block.k0 // BLOCK]
            cute.copy(part.atom, part.shared[None, block.wg], to)
            cute.arch.cp_async_bulk_commit_group()
