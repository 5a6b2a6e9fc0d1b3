"""Shared by the row kernels: the columns of each thread, row offsets, vector access, and the sum over a row."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.memory import vector_at
from quackish.kernels.row_layout import columns_per_cta


@cute.jit
def row_start(row: Int32, strides, n: cutlass.Constexpr[int]) -> Int64:
    """Offset of a row in elements: row * n without strides. With (m1, s0, s1): (row // m1) * s0 + (row % m1) * s1."""
    start = Int64(row) * n
    if const_expr(strides is not None):
        outer = row // strides[0]
        start = Int64(outer) * strides[1] + Int64(row - outer * strides[0]) * strides[2]
    return start


class RowMap:
    """The columns of each thread. A row is split over `split_n` CTAs of a cluster, `threads_per_row` threads in each.

    Vector v < num_vecs of lane l starts at column (v * threads_per_row + l) * vec of the CTA's `n_cta` columns.
    """

    def __init__(self, n: int, vec: int, threads: int, threads_per_row: int, split_n: int):
        self.n, self.vec, self.threads, self.threads_per_row, self.split_n = n, vec, threads, threads_per_row, split_n
        self.n_cta = columns_per_cta(n, vec, split_n)
        self.tile_m = threads // threads_per_row
        self.num_vecs = -(-self.n_cta // (threads_per_row * vec))
        self.num_warps = threads // 32
        self.warps_per_row = -(-threads_per_row // 32)

    def columns_of(self, rank):
        """Number of columns of CTA `rank` of the cluster; a Python int if all CTAs have the same number."""
        if self.n_cta * self.split_n == self.n:
            return self.n_cta
        return cutlass.max(cutlass.min(self.n - rank * self.n_cta, self.n_cta), 0)

    def column(self, v: int, lane):
        return (v * self.threads_per_row + lane) * self.vec

    def live(self, v: int, lane, columns):
        """Whether the lane's vector v is inside the row; the Python constant True if that is known at compile time."""
        if isinstance(columns, int) and (v + 1) * self.threads_per_row * self.vec <= columns:
            return True
        return self.column(v, lane) < columns

    def fragment(self, dtype=Float32) -> cute.Tensor:
        """This thread's part of a row, in registers."""
        return cute.make_rmem_tensor((self.vec, self.num_vecs), dtype)

    @cute.jit
    def load(self, row: cute.Pointer, lane, columns) -> cute.Tensor:
        """Loads this thread's part of a row as fp32. All loads are issued before the first use."""
        raw, out = self.fragment(row.dtype), self.fragment()
        for v in cutlass.range_constexpr(self.num_vecs):
            if self.live(v, lane, columns) is not True:
                raw[None, v].fill(0.0)
            if self.live(v, lane, columns):
                raw[None, v].store(vector_at(row, self.column(v, lane), self.vec).load())
        out.store(raw.load().to(Float32))
        return out

    @cute.jit
    def store(self, values: cute.Tensor, row: cute.Pointer, lane, columns):
        for v in cutlass.range_constexpr(self.num_vecs):
            if self.live(v, lane, columns):
                vector_at(row, self.column(v, lane), self.vec).store(values[None, v].load().to(row.dtype))


class RowSum:
    """Sums one fp32 per thread over all threads of a row, in an order fixed by RowMap. All threads get the same bits.

    Consecutive calls alternate between two buffers, so one barrier per call is enough.
    """

    def __init__(self, rows: RowMap):
        self.rows = rows
        self.num_slots = rows.num_warps * rows.split_n
        self.syncs_cta = rows.warps_per_row > 1 or rows.split_n > 1

    @cute.jit
    def allocate(self, smem):
        """(slots, mbarriers) in shared memory. With split_n > 1 the cluster must synchronize before the first call."""
        slots = smem.allocate_tensor(Float32, cute.make_layout(2 * self.num_slots), byte_alignment=16)
        mbars = smem.allocate_array(Int64, 2)
        if const_expr(self.rows.split_n > 1):
            if cute.arch.thread_idx()[0] == 0:
                cute.arch.mbarrier_init(mbars, 1)
                cute.arch.mbarrier_init(mbars + 1, 1)
            cute.arch.mbarrier_init_fence()
        return slots, mbars

    @cute.jit
    def __call__(self, value: Float32, slots: cute.Tensor, mbars: cute.Pointer, step: Int32) -> Float32:
        """step: number of earlier calls. Synchronizes the CTA if `syncs_cta`."""
        rows = self.rows
        total = cute.arch.warp_reduction_sum(value, threads_in_group=min(rows.threads_per_row, 32))
        if const_expr(rows.split_n > 1):
            total = self.over_cluster(total, slots, mbars, step)
        elif const_expr(rows.warps_per_row > 1):
            warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
            buffer = (step % 2) * self.num_slots
            if lane == 0:
                slots[buffer + warp] = total
            cute.arch.sync_threads()
            first = warp - warp % rows.warps_per_row
            total = Float32(0.0)
            for w in cutlass.range_constexpr(rows.warps_per_row):
                total += slots[buffer + first + w]
        return total

    @cute.jit
    def over_cluster(self, value: Float32, slots: cute.Tensor, mbars: cute.Pointer, step: Int32) -> Float32:
        """Each warp sends its sum to all CTAs of the cluster. Each CTA adds them in the order of (CTA, warp)."""
        num_warps, split_n = const_expr(self.rows.num_warps), const_expr(self.rows.split_n)
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        rank = cute.arch.block_idx_in_cluster()
        buffer = (step % 2) * self.num_slots
        mbar = mbars + step % 2
        if cute.arch.thread_idx()[0] == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(mbar, self.num_slots * 4)
        if lane < split_n:
            slot = slots.iterator + (buffer + rank * num_warps + warp)
            cute.arch.store_async_dsmem(slot, value.bitcast(Int32), mbar, lane)
        cute.arch.mbarrier_wait(mbar, (step // 2) % 2)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(-(-self.num_slots // 32)):
            if const_expr((i + 1) * 32 <= self.num_slots):
                total += slots[buffer + i * 32 + lane]
            else:
                total += slots[buffer + i * 32 + lane] if i * 32 + lane < self.num_slots else Float32(0.0)
        # A peer needs this warp's next sum to finish its next call, so it cannot overwrite this buffer yet. Warps of
        # this CTA may still be reading, hence the barrier.
        cute.arch.sync_threads()
        return cute.arch.warp_reduction_sum(total)
