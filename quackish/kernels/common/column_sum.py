"""Sums over all rows, from registers: within a CTA, then over the CTAs, each in a fixed order, with no atomic add.

Every CTA first adds up the row groups of its tile. Over the CTAs there are two ways:
- "slices": every CTA leaves its sums in scratch and waits until all have; then each adds its own slice of the columns
  over all CTAs. The cost hardly depends on the number of columns, because all CTAs share it.
- "turnstile": in turn, each cluster adds its sums to scratch by a bulk reduce from shared memory, and the last
  finishes. Before its turn a cluster combines through distributed shared memory, a slice of the columns a CTA.
CTAs wait for each other in both, so the launch must be cooperative: resident all at once, or refused.

Slices is faster in every shape measured, so the heuristics always take it. Whole backward (H200, bf16, us), slices /
turnstile with clusters of 8 / turnstile without: 4096 x 256 10 / 23 / 171, 4096 x 1024 15 / 33 / 197, 4096 x 8192 60 /
70 / 222, 65536 x 8192 740 / 801 / 907. A turn without clusters costs 0.6 us at n = 256 and 1.3 us at n = 8192. A third
way, in which the last cluster to arrive adds each slice and nobody waits, was up to 3 us slower than slices at
n <= 2048 and, as clusters of 4 do not fill the GPU, up to 1.8 times as slow above (measured once, and not kept).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.experimental import primitives as prims

from quackish.kernels.common.rows import RowMap, vector_at


class ColumnSum:
    """Several sums of a RowMap's fragments, laid side by side, each padded to a multiple of four columns."""

    def __init__(self, rows: RowMap, config, num_sums: int):
        self.rows, self.num_sums, self.combine, self.peers = rows, num_sums, config.combine, config.cluster
        self.cluster = max(config.cluster, rows.split_n)
        self.n_pad = -(-rows.n_cta // 4) * 4
        self.slice = -(-num_sums * self.n_pad // (4 * self.peers)) * 4  # columns a CTA is left with
        self.width = self.slice * self.peers
        # "slices": a final slice is `lanes` threads wide, four columns each: at least a 32-byte sector, and not many
        # more slices than there are CTAs for them.
        self.lanes = 2
        while self.lanes * 128 * config.ctas_per_sm // rows.split_n < self.width // 4:
            self.lanes *= 2
        self.lanes = min(self.lanes, rows.threads)
        self.sums_bytes = rows.tile_m * self.width * 4
        self.smem_bytes = self.sums_bytes + (rows.threads * 4 if self.combine == "slices" else self.slice) * 4

    @cute.jit
    def __call__(self, fragments, outputs, shared, scratch, tickets, lane, tile_row, columns, col0):
        """fragments: this thread's fp32 sums; outputs: where each goes in global memory. `shared` is free to use."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        rank, member, num_members = cta % self.cluster, cta // self.cluster, num_ctas // self.cluster
        sSums = cute.recast_ptr(shared, dtype=Float32)  # (tile_m, width)
        sSlice = cute.recast_ptr(shared + self.sums_bytes, dtype=Float32)

        # this thread's sums to shared memory
        cute.arch.sync_threads()
        for p in cutlass.range_constexpr(self.num_sums):
            for v in cutlass.range_constexpr(self.rows.num_vecs):
                if self.rows.live(v, lane, columns):
                    at = tile_row * self.width + p * self.n_pad + self.rows.column(v, lane)
                    vector_at(sSums, at, self.rows.vec).store(fragments[p][None, v].load())
        if const_expr(self.peers > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()

        # a slice of the columns, over the CTAs that combine and the rows of their tiles
        mine = scratch + (cta if const_expr(self.combine == "slices") else rank) * self.slice
        first = rank * self.slice if const_expr(self.peers > 1) else Int32(0)
        total = cute.make_rmem_tensor((4,), Float32)
        for j in cutlass.range(tid * 4, self.slice, self.rows.threads * 4, unroll=1):
            total.fill(0.0)
            for peer in cutlass.range_constexpr(self.peers):
                for r in cutlass.range(self.rows.tile_m, unroll=4):
                    at = sSums + (r * self.width + first + j)
                    part = load_peer(at, peer) if const_expr(self.peers > 1) else vector_at(at, 0, 4)
                    total.store(total.load() + part.load())
            vector_at(mine if const_expr(self.combine == "slices") else sSlice, j, 4).store(total.load())
        if const_expr(self.peers > 1):
            cute.arch.cluster_arrive()  # waited for at the very end: no CTA leaves while a peer reads from it

        if const_expr(self.combine == "slices"):
            parts = scratch + rank * self.slice
            self.slices(outputs, sSlice, parts, tickets + 2 * rank, member, num_members, columns, col0)
        else:
            self.turnstile(outputs, sSlice, mine, tickets + rank, member, num_members, first, columns, col0)
        if const_expr(self.peers > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def slices(self, outputs, sSlice, parts, tickets, member, num_members, columns, col0):
        """parts: the sums of member c at c * cluster * width."""
        tid, _, _ = cute.arch.thread_idx()
        lanes, groups = const_expr(self.lanes), const_expr(self.rows.threads // self.lanes)
        cute.arch.sync_threads()
        if tid == 0:
            cute.arch.red(tickets, Int32(1), op="add", dtype="s32", sem="release", scope="gpu")
            while cute.arch.load(tickets, Int32, sem="acquire", scope="gpu") < num_members:
                pass
        cute.arch.sync_threads()
        # The last one out makes both tickets zero again. Asked for here and used at the end, its latency is hidden.
        left = Int32(-1)
        if tid == self.rows.threads - 1:
            left = increment(tickets + 1, num_members)

        # a slice: every group of lanes adds its share of the members, then the groups of a warp, then the warps
        group, j = tid // lanes, tid % lanes
        warp_lanes = const_expr(max(lanes, 32))
        total = cute.make_rmem_tensor((4,), Float32)
        for s in cutlass.range(member, -(-self.width // (4 * lanes)), num_members, unroll=1):
            at = (s * lanes + j) * 4
            total.fill(0.0)
            if at < self.width:
                self.add_parts(total, parts + at, group, num_members, groups)
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
                    self.write(outputs, total, at, columns, col0)
            cute.arch.sync_threads()
        if left == num_members - 1:
            cute.arch.store(tickets, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def add_parts(self, total, parts, first, end, step):
        """total += four floats of members first, first + step, ... < end, in this order."""
        batch = const_expr(8)  # loads in flight at once
        rParts = cute.make_rmem_tensor((4, batch), Float32)
        for c0 in cutlass.range(first, end, step * batch, unroll=1):
            rParts.fill(0.0)
            for b in cutlass.range_constexpr(batch):
                if c0 + b * step < end:
                    rParts[None, b].store(vector_at(parts, (c0 + b * step) * (self.cluster * self.width), 4).load())
            for b in cutlass.range_constexpr(batch):
                total.store(total.load() + rParts[None, b].load())

    @cute.jit
    def turnstile(self, outputs, sSlice, mine, turn, member, num_members, first, columns, col0):
        """mine: where the slices of all members are added up; turn: whose turn it is."""
        tid, _, _ = cute.arch.thread_idx()
        cute.arch.fence_view_async_shared()
        cute.arch.sync_threads()
        if tid == 0:
            while cute.arch.load(turn, Int32, sem="acquire", scope="gpu") != member:
                pass
            cute.arch.fence_proxy("async.global")
            if member < num_members - 1:
                if member == 0:  # scratch holds anything: the first one overwrites it
                    prims.cp_async_bulk_global_shared_cta(mine.to_llvm_ptr(), sSlice.to_llvm_ptr(), self.slice * 4)
                else:
                    prims.cp_reduce_async_bulk_global_shared_cta(
                        mine.to_llvm_ptr(),
                        sSlice.to_llvm_ptr(),
                        self.slice * 4,
                        op=prims.CpReduceOp.ADD,
                        type=prims.CpReduceType.F32,
                    )
                cute.arch.cp_async_bulk_commit_group()
                cute.arch.cp_async_bulk_wait_group(0, read=False)
                cute.arch.fence_proxy("async.global")
                cute.arch.store(turn, member + 1, sem="release", scope="gpu")
        if member == num_members - 1:
            cute.arch.sync_threads()
            total = cute.make_rmem_tensor((4,), Float32)
            for j in cutlass.range(tid * 4, self.slice, self.rows.threads * 4, unroll=1):
                total.store(vector_at(sSlice, j, 4).load())
                if num_members > 1:
                    total.store(vector_at(mine, j, 4).load() + total.load())
                self.write(outputs, total, first + j, columns, col0)
            if tid == 0:
                cute.arch.store(turn, Int32(0), sem="relaxed", scope="gpu")

    @cute.jit
    def write(self, outputs, total, at, columns, col0):
        """Four finished columns, from `at` in the sums laid side by side."""
        for p in cutlass.range_constexpr(self.num_sums):
            for k in cutlass.range_constexpr(4):
                column = at + (k - p * self.n_pad)
                if column >= 0:
                    if column < columns:
                        out = cute.make_tensor(outputs[p] + (col0 + column), cute.make_layout(1))
                        out[0] = total[k].to(outputs[p].dtype)


@cute.jit
def increment(counter: cute.Pointer, limit: Int32) -> Int32:
    """Counts up and returns the count before, atomically; the `limit`-th call makes it 0 again."""
    order, scope = prims.MemOrder.RELAXED, prims.MemScope.GPU
    return Int32(
        prims.atomicrmw(prims.AtomicOp.INC, counter.to_llvm_ptr(), Uint32(limit - 1), mem_order=order, syncscope=scope)
    )


@cute.jit
def load_peer(ptr: cute.Pointer, rank: cutlass.Constexpr[int]) -> cute.Tensor:
    """Four floats at the same place in the shared memory of CTA `rank` of the cluster."""
    values = cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[cute.arch.map_dsmem_ptr(ptr, rank).toint()],
    )
    out = cute.make_rmem_tensor((4,), Float32)
    for k in cutlass.range_constexpr(4):
        out[k] = values[k]
    return out
