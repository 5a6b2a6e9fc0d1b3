"""Sums over all rows, within a CTA and then over the CTAs, each in a fixed order and without floating-point atomics.

Every CTA adds up the rows of its tile and writes its sums to scratch. When all CTAs have, each adds a slice of the
columns over all CTAs. All CTAs share that work, so its cost hardly depends on the number of columns. The CTAs wait for
each other, so the launch must be cooperative: all of them resident, or refused.

With several heads there is a sum for each: row r is of head r % heads. Then every row of a tile has sums of its own in
scratch, and a slice is of one head.

Passing the sums from CTA to CTA, in clusters of 8, took 23 us where this takes 10 (whole backward, 4096 x 256, bf16,
H200), and letting the last cluster to arrive add each slice was no faster either.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.experimental import primitives as prims

from quackish.kernels.common.rows import RowMap, vector_at


class ColumnSum:
    """Sums over rows of several RowMap fragments, side by side in scratch, each padded to a multiple of 4 columns."""

    def __init__(self, rows: RowMap, config, num_sums: int, heads: int, add_first: bool):
        self.rows, self.num_sums, self.heads = rows, num_sums, heads
        self.add_first = add_first  # the first output has values, which its sum is added to
        self.n_pad = -(-rows.n_cta // 4) * 4
        self.width = num_sums * self.n_pad
        # A final slice is `lanes` threads wide, 4 columns each: at least a 32-byte sector, and not many more slices
        # than there are CTAs to add them.
        self.lanes, total = 2, heads * self.width
        while self.lanes * 128 * config.ctas_per_sm // rows.split_n < total // 4 and self.lanes * 4 < self.width:
            self.lanes *= 2
        self.lanes = min(self.lanes, rows.threads)
        self.sums_bytes = rows.tile_m * self.width * 4
        self.smem_bytes = self.sums_bytes + rows.threads * 16

    @cute.jit
    def __call__(self, fragments, outputs, shared, scratch, tickets, lane, tile_row, columns, col0):
        """Adds up `fragments`, this thread's fp32 sums, over all CTAs and writes them to `outputs` in global memory.

        Overwrites the shared memory at `shared`.
        """
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rank = cta % self.rows.split_n
        member, num_members = cta // self.rows.split_n, num_ctas // self.rows.split_n
        sSums = cute.recast_ptr(shared, dtype=Float32)  # (tile_m, width)
        sSlice = cute.recast_ptr(shared + self.sums_bytes, dtype=Float32)
        parts, num_parts = scratch + rank * self.width, num_members

        if const_expr(self.heads > 1):
            # registers -> scratch
            num_parts = num_members * self.rows.tile_m
            mine = parts + (member * self.rows.tile_m + tile_row) * (self.rows.split_n * self.width)
            self.store(fragments, mine, 0, lane, columns)
        else:
            # registers -> shared memory
            cute.arch.sync_threads()
            self.store(fragments, sSums, tile_row * self.width, lane, columns)
            cute.arch.sync_threads()

            # over the rows of the tile: this CTA's sums to scratch
            mine = scratch + cta * self.width
            total = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range(tid * 4, self.width, self.rows.threads * 4, unroll=1):
                total.fill(0.0)
                for r in cutlass.range(self.rows.tile_m, unroll=4):
                    total.store(total.load() + vector_at(sSums + (r * self.width + j), 0, 4).load())
                vector_at(mine, j, 4).store(total.load())

        # over the CTAs
        self.slices(outputs, sSlice, parts, num_parts, tickets + 2 * rank, member, num_members, columns, col0)

    @cute.jit
    def store(self, fragments, base, start, lane, columns):
        for p in cutlass.range_constexpr(self.num_sums):
            for v in cutlass.range_constexpr(self.rows.num_vecs):
                if self.rows.live(v, lane, columns):
                    at = start + p * self.n_pad + self.rows.column(v, lane)
                    vector_at(base, at, self.rows.vec).store(fragments[p][None, v].load())

    @cute.jit
    def slices(self, outputs, sSlice, parts, num_parts, tickets, member, num_members, columns, col0):
        """Waits for all members, then adds this member's slices. Part i is at parts + i * split_n * width, and of head
        i % heads."""
        tid, _, _ = cute.arch.thread_idx()
        lanes, groups = const_expr(self.lanes), const_expr(self.rows.threads // self.lanes)
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.red(tickets, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
            while cute.arch.load(tickets, Int32, sem="acquire", scope="gpu") < num_members:
                pass
        cute.arch.sync_threads()
        # The last member to finish resets both tickets. Incrementing here and using the result last hides its latency.
        left = Int32(-1)
        if tid == self.rows.threads - 1:
            left = increment(tickets + 1, num_members)

        # a slice: each group of lanes adds its share of the parts; then the groups of a warp, then the warps
        group, j = tid // lanes, tid % lanes
        warp_lanes = const_expr(max(lanes, 32))
        total = cute.make_rmem_tensor((4,), Float32)
        num_slices = const_expr(-(-self.width // (4 * lanes)))  # of a head
        for s in cutlass.range(member, num_slices * self.heads, num_members, unroll=1):
            at, first, of_head = (s * lanes + j) * 4, group, col0
            if const_expr(self.heads > 1):
                head = s // num_slices
                at = (s % num_slices * lanes + j) * 4
                first, of_head = head + group * self.heads, Int64(head) * self.rows.n + col0
            total.fill(0.0)
            if at < self.width:
                self.add_parts(total, parts + at, first, num_parts, groups * self.heads)
            for k in cutlass.range_constexpr(4):
                for step in [lanes << i for i in range(5) if lanes << i < 32]:
                    total[k] = total[k] + cute.arch.shuffle_sync_bfly(total[k], offset=step)
            vector_at(sSlice, tid * 4, 4).store(total.load())
            cute.arch.sync_threads()
            if tid < lanes:
                if at < self.width:
                    total.fill(0.0)
                    for g in cutlass.range_constexpr(self.rows.threads // warp_lanes):
                        total.store(total.load() + vector_at(sSlice, (g * warp_lanes + tid) * 4, 4).load())
                    self.write(outputs, total, at, columns, of_head)
            cute.arch.sync_threads()
        if left == num_members - 1:
            cute.arch.store(tickets, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def add_parts(self, total, parts, first, end, step):
        """total += four floats of parts first, first + step, ... < end, in that order."""
        batch = const_expr(8)  # loads in flight
        stride = const_expr(self.rows.split_n * self.width)
        rParts = cute.make_rmem_tensor((4, batch), Float32)
        for c0 in cutlass.range(first, end, step * batch, unroll=1):
            rParts.fill(0.0)
            for b in cutlass.range_constexpr(batch):
                if c0 + b * step < end:
                    rParts[None, b].store(vector_at(parts, (c0 + b * step) * stride, 4).load())
            for b in cutlass.range_constexpr(batch):
                total.store(total.load() + rParts[None, b].load())

    @cute.jit
    def write(self, outputs, total, at, columns, start):
        """Writes four finished columns; `at`: the first one's position among the sums side by side; `start`: where this
        CTA's columns begin in an output."""
        for p in cutlass.range_constexpr(self.num_sums):
            for k in cutlass.range_constexpr(4):
                column = at + (k - p * self.n_pad)
                if column >= 0:
                    if column < columns:
                        out = cute.make_tensor(outputs[p] + (start + column), cute.make_layout(1))
                        value = total[k]
                        if const_expr(p == 0 and self.add_first):
                            value = value + out[0].to(Float32)
                        out[0] = value.to(outputs[p].dtype)


@cute.jit
def increment(counter: cute.Pointer, limit: Int32) -> Int32:
    """Atomic increment that returns the old value; the `limit`-th call resets the counter to 0."""
    order, scope = prims.MemOrder.RELAXED, prims.MemScope.GPU
    return Int32(
        prims.atomicrmw(prims.AtomicOp.INC, counter.to_llvm_ptr(), Uint32(limit - 1), mem_order=order, syncscope=scope)
    )
