"""RMSNorm backward in one launch: dx = rstd * (g*dy - xhat * mean(xhat * g*dy)) + dres, g = weight_offset + weight,
xhat = x * rstd, dweight = sum over rows of dy * xhat, dbias = sum over rows of dy.

Persistent CTAs loop over tiles of rows. Bulk copies load x, dy and dres, `num_stages` tiles deep. x and dy are read
twice from shared memory: for the row's mean, and for dx. dweight and dbias accumulate in fp32 registers, which
`ColumnSum` sums over the CTAs at the end, in a fixed order.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64, const_expr

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.kernels.memory import store_streaming, vector_at
from quackish.kernels.rows import RowMap, RowSum
from quackish.ops.rms_norm.kernels.column_sum import ColumnSum
from quackish.ops.rms_norm.kernels.row_tiles import RowTiles
from quackish.ops.rms_norm.problems import BackwardArgs, RmsNormBwdConfig, RmsNormBwdProblem


class RmsNormBwd:
    def __init__(self, problem: RmsNormBwdProblem, config: RmsNormBwdConfig):
        p = problem
        self.problem, self.config = problem, config
        self.rows = RowMap(p.n, p.vec, config.threads, config.threads_per_row, config.split_n)
        self.row_sum = RowSum(self.rows)
        inputs = [DTYPES[d] for d in (p.x_dtype, p.dy_dtype, p.dres_dtype) if d]
        self.tiles = RowTiles(self.rows, inputs, config.num_stages, p.packed)
        self.column_sum = ColumnSum(self.rows, config, p.num_sums, p.heads, p.add_dweight) if p.num_sums else None
        # The column sums start after the last tile and reuse the memory of the stages.
        self.smem_bytes = max(self.tiles.smem_bytes, self.column_sum.smem_bytes if self.column_sum else 0, 16)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: BackwardArgs, stream: CUstream):
        mRstd = cute.make_tensor(args.rstd, cute.make_layout((args.m,)))
        given = [(args.x, args.x_rows), (args.dy, args.dy_rows), (args.dres, args.dres_rows)]
        inputs = [t for t, _ in given if t is not None]
        strides = [rows for t, rows in given if t is not None]
        sums = [t for t in (args.dweight, args.dbias) if t is not None]
        self.kernel(
            inputs,
            strides,
            args.weight,
            mRstd,
            args.dx,
            args.dresidual,
            sums,
            args.scratch,
            args.tickets,
            args.weight_offset,
        ).launch(
            grid=[args.num_ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            cluster=[self.config.split_n, 1, 1] if self.config.split_n > 1 else None,
            cooperative=self.column_sum is not None,
            min_blocks_per_mp=self.config.ctas_per_sm,
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, inputs, strides, weight, rstd, dx, dresidual, sums, scratch, tickets, weight_offset):
        """inputs: x, dy and, if given, dres. sums: the requested ones of dweight and dbias."""
        rows, n, m = self.rows, self.rows.n, rstd.shape[0]
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rank = cta % rows.split_n
        worker, num_workers = cta // rows.split_n, num_ctas // rows.split_n
        lane, tile_row = tid % rows.threads_per_row, tid // rows.threads_per_row
        columns, col0 = rows.columns_of(rank), rank * rows.n_cta

        smem = cutlass.memory.SmemAllocator()
        shared = smem.allocate(self.smem_bytes, byte_alignment=128)
        full = self.tiles.allocate_barriers(smem)
        slots, mbars = self.row_sum.allocate(smem)
        if const_expr(rows.split_n > 1):  # all CTAs have initialized their mbarriers before a peer's sum arrives
            cute.arch.cluster_arrive_relaxed()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        # prologue: start loading the first tiles, load the weight
        if tid == 0:
            for i in cutlass.range_constexpr(self.tiles.num_stages - 1):
                self.tiles.fetch(inputs, strides, shared, full, i, worker + i * num_workers, m, rank)
        rG = rows.fragment()
        rG.fill(1.0)
        weight_start = col0
        if const_expr(self.problem.heads > 1):  # all rows of a thread have the same head: RmsNormBwdConfig.num_ctas
            weight_start = Int64((worker * rows.tile_m + tile_row) % self.problem.heads) * n + col0
        if const_expr(weight is not None):
            rG.store(rows.load(weight + weight_start, lane, columns).load() + weight_offset)
        acc = [rows.fragment() for _ in sums]
        for a in acc:
            a.fill(0.0)
        dot = cute.make_rmem_tensor((rows.vec,), Float32)

        num_tiles = cute.ceil_div(m, rows.tile_m)
        # 0 for a worker past the last tile; never negative, as worker < num_workers
        my_tiles = (num_tiles - worker + num_workers - 1) // num_workers
        for i in cutlass.range(my_tiles, unroll=1):
            row = (worker + i * num_workers) * self.rows.tile_m + tile_row
            source = cutlass.min(row, m - 1)  # past the end: load the last row, do not use the result
            rs = rstd[source]  # prefetching this is slower: see RowTiles.wait
            self.tiles.wait(full, i)
            row_ptrs = [
                self.tiles.row(inputs, strides, shared, j, i, source, tile_row, rank) for j in range(len(inputs))
            ]

            # the row's mean(xhat * g*dy)
            mean = Float32(0.0)
            if const_expr(dx is not None):
                dot.fill(0.0)
                for v in cutlass.range_constexpr(self.rows.num_vecs):
                    if self.rows.live(v, lane, columns):
                        col, vec = self.rows.column(v, lane), self.rows.vec
                        rX, rDY = (vector_at(row, col, vec).load().to(Float32) for row in row_ptrs[:2])
                        dot.store(dot.load() + rX * (rDY * rG[None, v].load()))
                part = dot.load().reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
                mean = self.row_sum(part, slots, mbars, i) * rs * Float32(1.0 / n)
            if const_expr(dx is None or not self.row_sum.syncs_cta):
                cute.arch.sync_threads()

            # The stage of the previous tile is free: all threads have synchronized since reading it.
            if tid == 0:
                ahead = i + self.tiles.num_stages - 1
                self.tiles.fetch(inputs, strides, shared, full, ahead, worker + ahead * num_workers, m, rank)

            # the row's gradients
            if self.rows.tile_m == 1 or row < m:
                for v in cutlass.range_constexpr(self.rows.num_vecs):
                    if self.rows.live(v, lane, columns):
                        self.gradients(row_ptrs, rG, acc, dx, dresidual, v, lane, Int64(row) * n + col0, rs, mean)

        if const_expr(len(sums) > 0):
            self.column_sum(acc, sums, shared, scratch, tickets, lane, tile_row, columns, col0)

    @cute.jit
    def gradients(self, row_ptrs, rG, acc, dx, dresidual, v: cutlass.Constexpr[int], lane, out_start, rs, mean):
        """One vector of a row: writes dx, accumulates dweight and dbias."""
        vec, col = self.rows.vec, self.rows.column(v, lane)
        dy = vector_at(row_ptrs[1], col, vec).load().to(Float32)
        xhat = vector_at(row_ptrs[0], col, vec).load().to(Float32) * rs
        if const_expr(dx is not None):
            d = (dy * rG[None, v].load() - xhat * mean) * rs
            if const_expr(len(row_ptrs) == 3):
                d = d + vector_at(row_ptrs[2], col, vec).load().to(Float32)
            store_streaming(dx, out_start + col, d.to(dx.dtype))
            if const_expr(dresidual is not None):
                vector_at(dresidual, out_start + col, vec).store(d.to(dresidual.dtype))
        if const_expr(self.problem.dweight_dtype is not None):
            acc[0][None, v].store(acc[0][None, v].load() + dy * xhat)
        if const_expr(self.problem.dbias_dtype is not None):
            acc[-1][None, v].store(acc[-1][None, v].load() + dy)
