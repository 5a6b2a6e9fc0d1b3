"""Deterministic column sums over all rows: within each CTA, then over CTAs, without floating-point atomics.

Each CTA sums the rows of its tile and writes these partial sums to scratch. After all CTAs have arrived, each CTA sums
a slice of the columns over all partial sums. The CTAs wait for each other, so the launch must be cooperative.

With several heads, row r belongs to head r % heads, and each head has its own sum. Each row of a tile then has its own
partial sums in scratch, and a slice covers one head.

Passing the sums from CTA to CTA in clusters of 8 took 23 us instead of 10 (whole backward, 4096 x 256, bf16, H200).
Letting the last cluster to arrive sum each slice was no faster.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.memory import increment, vector_at
from quackish.kernels.rows import RowMap


class ColumnSum:
    """Sums several RowMap fragments over rows. Their sums are adjacent in scratch, each padded to 4 columns."""

    def __init__(self, rows: RowMap, config, num_sums: int, heads: int, accumulate_first: bool):
        self.rows, self.num_sums, self.heads = rows, num_sums, heads
        self.accumulate_first = accumulate_first  # add to the first output
        self.n_pad = -(-rows.n_cta // 4) * 4
        self.width = num_sums * self.n_pad
        # A slice is `lanes` threads wide, 4 columns each: at least a 32-byte sector, and about one slice per CTA.
        self.lanes, total = 2, heads * self.width
        while self.lanes * 128 * config.ctas_per_sm // rows.split_n < total // 4 and self.lanes * 4 < self.width:
            self.lanes *= 2
        self.lanes = min(self.lanes, rows.threads)
        self.sums_bytes = rows.tile_m * self.width * 4
        self.smem_bytes = self.sums_bytes + rows.threads * 16

    @cute.jit
    def __call__(self, fragments, outputs, shared, scratch, tickets, lane, tile_row, columns, col0):
        """Sums `fragments`, this thread's fp32 sums, and writes the results to `outputs`. Overwrites `shared`."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rank = cta % self.rows.split_n
        cluster, num_clusters = cta // self.rows.split_n, num_ctas // self.rows.split_n
        sSums = cute.recast_ptr(shared, dtype=Float32)  # (tile_m, width)
        sSlice = cute.recast_ptr(shared + self.sums_bytes, dtype=Float32)
        partials, num_partials = scratch + rank * self.width, num_clusters

        if const_expr(self.heads > 1):
            # registers -> scratch
            num_partials = num_clusters * self.rows.tile_m
            partial = partials + (cluster * self.rows.tile_m + tile_row) * (self.rows.split_n * self.width)
            self.store(fragments, partial, 0, lane, columns)
        else:
            # registers -> shared memory
            cute.arch.sync_threads()
            self.store(fragments, sSums, tile_row * self.width, lane, columns)
            cute.arch.sync_threads()

            # shared memory -> scratch: sums over the rows of the tile
            partial = scratch + cta * self.width
            total = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range(tid * 4, self.width, self.rows.threads * 4, unroll=1):
                if j % self.n_pad < columns:  # else padding of a cluster's last CTA, which nobody wrote
                    total.fill(0.0)
                    for r in cutlass.range(self.rows.tile_m, unroll=4):
                        total.store(total.load() + vector_at(sSums + (r * self.width + j), 0, 4).load())
                    vector_at(partial, j, 4).store(total.load())

        # scratch -> outputs: sums over the CTAs
        tickets += 2 * rank
        self.sum_slices(outputs, sSlice, partials, num_partials, tickets, cluster, num_clusters, columns, col0)

    @cute.jit
    def store(self, fragments, base, start, lane, columns):
        for f in cutlass.range_constexpr(self.num_sums):
            for v in cutlass.range_constexpr(self.rows.num_vecs):
                if self.rows.live(v, lane, columns):
                    offset = start + f * self.n_pad + self.rows.column(v, lane)
                    vector_at(base, offset, self.rows.vec).store(fragments[f][None, v].load())

    @cute.jit
    def sum_slices(self, outputs, sSlice, partials, num_partials, tickets, cluster, num_clusters, columns, col0):
        """Waits for all clusters, then sums this cluster's slices.

        The i-th partial sum is at partials + i * split_n * width and belongs to head i % heads.
        """
        tid, _, _ = cute.arch.thread_idx()
        lanes, groups = const_expr(self.lanes), const_expr(self.rows.threads // self.lanes)
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.red(tickets, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
            while cute.arch.load(tickets, Int32, sem="acquire", scope="gpu") < num_clusters:
                pass
        cute.arch.sync_threads()
        # The last cluster past the wait resets both tickets. Using the result at the end hides its latency.
        num_past = Int32(-1)
        if tid == self.rows.threads - 1:
            num_past = increment(tickets + 1, num_clusters)

        # a slice: each group of lanes sums its share of the partial sums, then over groups of a warp, then over warps
        group, j = tid // lanes, tid % lanes
        warp_lanes = const_expr(max(lanes, 32))
        total = cute.make_rmem_tensor((4,), Float32)
        num_slices = const_expr(-(-self.width // (4 * lanes)))  # per head
        for s in cutlass.range(cluster, num_slices * self.heads, num_clusters, unroll=1):
            col, first, out_start = (s * lanes + j) * 4, group, col0
            if const_expr(self.heads > 1):
                head = s // num_slices
                col = (s % num_slices * lanes + j) * 4
                first, out_start = head + group * self.heads, Int64(head) * self.rows.n + col0
            total.fill(0.0)
            if col < self.width:
                self.add_partials(total, partials + col, first, num_partials, groups * self.heads)
            for k in cutlass.range_constexpr(4):
                for step in [lanes << i for i in range(5) if lanes << i < 32]:
                    total[k] = total[k] + cute.arch.shuffle_sync_bfly(total[k], offset=step)
            vector_at(sSlice, tid * 4, 4).store(total.load())
            cute.arch.sync_threads()
            if tid < lanes:
                if col < self.width:
                    total.fill(0.0)
                    for g in cutlass.range_constexpr(self.rows.threads // warp_lanes):
                        total.store(total.load() + vector_at(sSlice, (g * warp_lanes + tid) * 4, 4).load())
                    self.write(outputs, total, col, columns, out_start)
            cute.arch.sync_threads()
        if num_past == num_clusters - 1:
            cute.arch.store(tickets, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def add_partials(self, total, partials, first, end, step):
        """total += four floats of the partial sums first, first + step, ... < end, in that order."""
        batch = const_expr(8)  # loads in flight
        stride = const_expr(self.rows.split_n * self.width)
        rPartials = cute.make_rmem_tensor((4, batch), Float32)
        for i in cutlass.range(first, end, step * batch, unroll=1):
            rPartials.fill(0.0)
            for b in cutlass.range_constexpr(batch):
                if i + b * step < end:
                    rPartials[None, b].store(vector_at(partials, (i + b * step) * stride, 4).load())
            for b in cutlass.range_constexpr(batch):
                total.store(total.load() + rPartials[None, b].load())

    @cute.jit
    def write(self, outputs, total, col, columns, out_start):
        """Writes four sums, from column `col` of the adjacent sums. This CTA's part of outputs starts at out_start."""
        for f in cutlass.range_constexpr(self.num_sums):
            for k in cutlass.range_constexpr(4):
                column = col + (k - f * self.n_pad)
                if column >= 0:
                    if column < columns:
                        out = cute.make_tensor(outputs[f] + (out_start + column), cute.make_layout(1))
                        value = total[k]
                        if const_expr(f == 0 and self.accumulate_first):
                            value = value + out[0].to(Float32)
                        out[0] = value.to(outputs[f].dtype)
