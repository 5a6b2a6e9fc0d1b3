"""The whole backward of attention on Hopper for d 32 and at most 128 queries and keys: dq, dk, dv and dbias.

    p = exp2(x - shift)    dv = p^T do    ds = p * (do v^T - delta)    dk = scale * ds^T q    dq = scale * ds k

Accumulators of x and ds are transposed, as in the kernel for dk and dv; ds is an operand of dq from shared memory. The
gradient of a bias is ds, or the sum of ds over an item in a fixed order: then the host sums the parts with PyTorch.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.math import LOG2_E
from quackish.kernels.memory import load_at, store_at, vector_at
from quackish.ops.attention.arguments import BLOCK, LARGE, SmallBackwardArgs
from quackish.ops.attention.kernels.base_sm90 import Tiles
from quackish.ops.attention.kernels.bias_items import BiasItem
from quackish.ops.attention.kernels.cta import Cta
from quackish.ops.attention.kernels.items import Head
from quackish.ops.attention.kernels.scores import ScoreBlock
from quackish.ops.attention.kernels.small_sm90 import SmallAttentionSm90
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile

WORKER = 1  # the first of the named barriers of workers


class AttentionSmallBackwardSm90(SmallAttentionSm90):
    rows_are_queries = False

    def shared_tiles(self) -> dict[str, Tiles]:
        self.ds = SwizzledTile(self.dtype, BLOCK, self.problem.blocks * BLOCK)
        self.staged = self.ds if self.problem.ds_is_dbias else None
        name = "dbias" if self.problem.ds_is_dbias else "ds"
        return {**super().shared_tiles(), name: Tiles(self.ds, self.config.num_wgs)}

    @cute.jit
    def __call__(self, args: SmallBackwardArgs, stream: CUstream):
        s = args.scores
        tensors = dict(
            q=self.like_q(s.q, s), do=self.like_q(args.do, s), o=self.like_q(args.o, s), k=self.like_k(s.k, s),
            v=self.like_k(s.v, s),
        )  # fmt: skip
        self.launch(tensors, args, stream)

    def score_blocks(self, head: Head, row_wg: Int32, thread: Int32) -> list[ScoreBlock]:
        k0 = row_wg * BLOCK
        return [ScoreBlock(head, q0=Int32(b * BLOCK), k0=k0, wg=row_wg, thread=thread) for b in range(self.blocks)]

    @cute.jit
    def consume(self, cta: Cta, wg: Int32, thread: Int32):
        s, args, shared, loaded = cta.args.scores, cta.args, cta.shared, cta.loaded
        worker, row_wg = self.worker_of(wg), self.rows_of_wg(wg)
        mmas = [self.mma_of_scores(BLOCK, add) for add in (False, True)]
        rows_mma, dq_mma = self.mma_of_rows(), self.mma_of_rows(in_registers=False)
        rK, rV = (self.fragments_a(mmas[0], t) for t in (shared.k, shared.v))
        rQ, rDO = (self.fragments_b(mmas[0], t) for t in (shared.q, shared.do))
        rQt, rDOt, rKt = (self.fragments_b(rows_mma, self.transposed(t)) for t in (shared.q, shared.do, shared.k))
        all_ds = shared.dbias if const_expr(self.problem.ds_is_dbias) else shared.ds
        rDS = self.fragments_a(dq_mma, all_ds)
        x, dp, p, ds = *(self.accumulator(BLOCK) for _ in range(2)), *(self.operand(BLOCK) for _ in range(2))
        dq, dk, dv = (self.accumulator(self.d) for _ in range(3))
        totals = [self.accumulator(BLOCK) for _ in range(self.blocks)] if const_expr(self.problem.sums) else []
        first_wg = worker * self.blocks
        tid, read = wg * 128 + thread, self.worker_state(worker)
        for i in cutlass.range(self.first_item(worker), self.items(args), self.num_workers(), unroll=1):
            item = self.bias_item(i, args)
            self.keep_bias(cta, item, row_wg, thread, tid)
            for b in cutlass.range_constexpr(len(totals)):
                totals[b].fill(0.0)
            for n in cutlass.range(item.first, item.last, unroll=1):
                head = self.head_at(n, args, item.head)
                blocks, tile0 = self.score_blocks(head, row_wg, thread), read.index * self.blocks
                kept = self.kept_rows(s, head, row_wg * BLOCK, thread)
                dk.fill(0.0)
                dv.fill(0.0)
                stats = self.load_stats_of_row(args, head, row_wg, thread)
                loaded.consumer_wait(read)
                for b in cutlass.range_constexpr(self.blocks):
                    own, other = (None, None, None, tile0 + row_wg), (None, None, None, tile0 + b)
                    self.multiply(x, mmas, rK[own], rQ[other])
                    self.multiply(dp, mmas, rV[own], rDO[other])
                    if const_expr(b == 0):
                        self.find_stats(cta, *stats, tile0 + row_wg, wg, thread)
                        self.wait_for_stores()
                        self.sync_worker(worker)
                    of_rows = shared.stats[None, None, first_wg + b]
                    values, delta = (self.per_column(of_rows[None, r].iterator, thread) for r in range(2))
                    of_lane = vector_at(of_rows[None, 0].iterator, thread % 32 * 2, 2)
                    shift = self.shift(values, of_lane, n, item)
                    cute.nvgpu.warpgroup.wait_group(0)
                    self.scores(x, self.of_block(cta, b, tid), read.index, blocks[b], shift, None)
                    for v in cutlass.range_constexpr(cute.size(x)):
                        x[v] = cute.math.exp2(x[v], fastmath=True)
                    self.round_to_operand(p, x)
                    self.multiply(dv, [rows_mma], p, rDOt[other])
                    for v in cutlass.range_constexpr(cute.size(x)):
                        x[v] = x[v] * (dp[v] - delta[v])
                    self.zero_rows(x, kept)
                    if const_expr(self.problem.sums):
                        for v in cutlass.range_constexpr(cute.size(x)):
                            totals[b][v] = totals[b][v] + x[v]
                    self.round_to_operand(ds, x)
                    self.store_ds(ds, all_ds[None, None, first_wg + b], row_wg, thread)
                    self.multiply(dk, [rows_mma], ds, rQt[other])
                cute.arch.fence_view_async_shared()
                self.sync_worker(worker)
                dq.fill(0.0)
                tiles_of_k = [rKt[None, None, None, tile0 + b] for b in range(self.blocks)]
                self.multiply_tiles(dq, dq_mma, rDS[None, None, None, wg], tiles_of_k)
                if const_expr(self.problem.ds_is_dbias):
                    self.write_ds(cta, head, row_wg, wg)
                cute.nvgpu.warpgroup.wait_group(0)
                self.release(loaded, read)
                read = self.advanced(read)
                self.write_results(dq, dk, dv, args, blocks[0]._replace(q0=row_wg * BLOCK), kept)
            for b in cutlass.range_constexpr(len(totals)):
                self.write_total(totals[b], args, item, self.score_blocks(item.head, row_wg, thread)[b])
        self.wait_for_stores()

    @cute.jit
    def sync_worker(self, worker: Int32):
        cute.arch.barrier(barrier_id=WORKER + worker, number_of_threads=128 * self.blocks)

    # Statistics

    @cute.jit
    def load_stats_of_row(self, args: SmallBackwardArgs, head: Head, row_wg: Int32, thread: Int32):
        """(shift of a row's scores, gradient of its lse) as of `AttentionRows`. Two threads have a row."""
        s, shift, dlse = args.scores, Float32(0.0), Float32(0.0)
        q = row_wg * BLOCK + thread // 2
        if q < s.num_q:
            at = self.pairs_of_head(args, head.batch * s.heads + head.query_head) + q
            lse = load_at(args.lse, at)
            shift = lse * LOG2_E
            if (lse > LARGE) | (lse < -LARGE):
                shift = Float32(0.0) if lse == -Float32.inf else Float32.inf
            if const_expr(args.dlse is not None):
                dlse = load_at(args.dlse, at)
        return shift, dlse

    @cute.jit
    def find_stats(self, cta: Cta, shift: Float32, dlse: Float32, tile: Int32, wg: Int32, thread: Int32):
        """Stores shift and delta of the warp group's block of queries in shared memory."""
        shared, row, half = cta.shared, thread // 2, thread % 2
        o, do = (t[None, None, tile].iterator for t in (shared.o, shared.do))
        delta = Float32(0.0)
        for j in cutlass.range_constexpr(0, self.d // 2, 8):
            both = [self.own.element(t, row, half * (self.d // 2) + j, 8).load().to(Float32) for t in (o, do)]
            delta = delta + (both[0] * both[1]).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = delta + cute.arch.shuffle_sync_bfly(delta, offset=1) - dlse
        if half == 0:
            shared.stats[row, 0, wg] = shift
            shared.stats[row, 1, wg] = delta

    def pairs_of_head(self, args: SmallBackwardArgs, of_head: Int32) -> Int64:
        return Int64(of_head) * args.scores.num_q

    def pair_of_row(self, args: SmallBackwardArgs, pairs: Int64, row: Int32):
        return load_at(args.lse, pairs + row), load_at(args.lse_residual, pairs + row) * LOG2_E

    # Results

    @cute.jit
    def store_ds(self, ds: cute.Tensor, tile: cute.Tensor, row_wg: Int32, thread: Int32):
        """Stores in shared memory, as queries by keys."""
        base = self.ds.columns_base(tile.iterator, row_wg * BLOCK, thread)
        for j in cutlass.range_constexpr(0, BLOCK // 8, 2):
            values = cute.make_rmem_tensor((8,), self.dtype)
            for i in cutlass.range_constexpr(8):
                values[i] = ds[4 * j + i]
            self.ds.store(self.ds.columns_at(base, j), values, True)

    @cute.jit
    def write_ds(self, cta: Cta, head: Head, row_wg: Int32, wg: Int32):
        """Copies the warp group's block of queries to dbias."""
        if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
            part = self.part(cta, "dbias", head.query_head, head.batch)
            cute.copy(part.atom, part.shared[None, wg], part.tiles[None, row_wg, 0])
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_for_stores(self):
        """Waits until `write_ds` has read shared memory."""
        if const_expr(self.problem.ds_is_dbias):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) % 4 == 0:
                cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def write_results(self, dq, dk, dv, args: SmallBackwardArgs, block: ScoreBlock, kept):
        """Stores the block's rows of dq, dk and dv."""
        s, head = args.scores, block.head
        for result in (dq, dk):
            for v in cutlass.range_constexpr(cute.size(result)):
                result[v] = result[v] * s.scale
        for result, to in ((dk, args.dk), (dv, args.dv)):
            self.zero_rows(result, kept)
            base = to.base + (Int64(head.batch) * to.batch + Int64(head.key_head) * to.head)
            rows = s.num_k - block.k0
            self.write_rows(result, base + Int64(block.k0) * to.row, to.row, rows, s.d, block.thread)
        self.write_queries(dq, args.dq, s, block)

    @cute.jit
    def write_total(self, total: cute.Tensor, args: SmallBackwardArgs, item: BiasItem, block: ScoreBlock):
        s, base = args.scores, self.start_of_part(args, item)
        block = self.opaque(block)
        for v in cutlass.range_constexpr(cute.size(total)):
            q, k = self.position(block, v)
            if (q < s.num_q) & (k < s.num_k):
                store_at(base, Int64(q) * args.dbias.row + k, total[v])
