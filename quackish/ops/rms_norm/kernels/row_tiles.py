"""Loads tiles of rows from global to shared memory by bulk copies, in a pipeline of stages."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.experimental import primitives as prims

from quackish.kernels.rows import RowMap, row_start


class RowTiles:
    """A stage holds a tile of `tile_m` rows of each of several tensors.

    With num_stages 0, rows are read directly from global memory: for rows that are not aligned to 16 bytes, as bulk
    copies require, and for rows so long that two stages do not fit.
    """

    def __init__(self, rows: RowMap, dtypes: list, num_stages: int, packed: bool):
        self.rows, self.dtypes, self.num_stages, self.packed = rows, dtypes, num_stages, packed
        tile_bytes = [rows.tile_m * rows.n_cta * d.width // 8 for d in dtypes]
        self.offsets = [sum(tile_bytes[:j]) for j in range(len(dtypes))]
        self.stage_bytes = sum(tile_bytes)
        self.smem_bytes = num_stages * self.stage_bytes

    @cute.jit
    def allocate_barriers(self, smem):
        """One mbarrier per stage. The CTA must synchronize once before the first wait."""
        full = smem.allocate_array(Int64, max(self.num_stages, 1))
        if cute.arch.thread_idx()[0] == 0:
            for s in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(full + s, 1)
        cute.arch.mbarrier_init_fence()
        return full

    @cute.jit
    def fetch(self, inputs, strides, shared, full, i: Int32, tile: Int32, m: Int32, rank: Int32):
        """Starts loading this CTA's i-th tile into a free stage. Called by one thread. No-op past the last tile."""
        if const_expr(self.num_stages > 0):
            first = tile * self.rows.tile_m
            if first < m:
                stage = i % self.num_stages
                count = cutlass.min(m - first, self.rows.tile_m)
                columns = self.rows.columns_of(rank)
                mbar = full + stage
                cute.arch.mbarrier_arrive_and_expect_tx(
                    mbar, count * columns * (sum(d.width for d in self.dtypes) // 8)
                )
                for j in cutlass.range_constexpr(len(self.dtypes)):
                    itemsize = const_expr(self.dtypes[j].width // 8)
                    tile_ptr = shared + (stage * self.stage_bytes + self.offsets[j])
                    if const_expr(self.packed and self.rows.split_n == 1):
                        source = inputs[j] + Int64(first) * self.rows.n
                        bulk_load(tile_ptr, source, count * columns * itemsize, mbar)
                    else:
                        for r in cutlass.range(count, unroll=1):
                            start = row_start(first + r, strides[j], self.rows.n) + rank * self.rows.n_cta
                            row_ptr = tile_ptr + r * (self.rows.n_cta * itemsize)
                            bulk_load(row_ptr, inputs[j] + start, columns * itemsize, mbar)

    @cute.jit
    def wait(self, full, i: Int32):
        """Waits for this CTA's i-th tile."""
        if const_expr(self.num_stages > 0):
            # With `mbarrier_wait` and rstd prefetched, RMSNorm backward took 791 us instead of 740 (65536 x 8192, bf16,
            # H200), for an unknown reason.
            mbar, phase = full + i % self.num_stages, (i // self.num_stages) % 2
            done = cute.arch.mbarrier_try_wait(mbar, phase)
            while not done:
                done = cute.arch.mbarrier_try_wait(mbar, phase)

    @cute.jit
    def row(
        self, inputs, strides, shared, j: cutlass.Constexpr[int], i: Int32, row: Int32, tile_row: Int32, rank: Int32
    ):
        """Pointer to this CTA's part of a row of tensor j in its i-th tile. Call after `wait`."""
        if const_expr(self.num_stages > 0):
            itemsize = const_expr(self.dtypes[j].width // 8)
            stage = (i % self.num_stages) * self.stage_bytes + self.offsets[j]
            ptr = cute.recast_ptr(shared + (stage + tile_row * (self.rows.n_cta * itemsize)), dtype=self.dtypes[j])
        else:
            ptr = inputs[j] + (row_start(row, strides[j], self.rows.n) + rank * self.rows.n_cta)
        return ptr


@cute.jit
def bulk_load(shared: cute.Pointer, source: cute.Pointer, num_bytes, mbar: cute.Pointer):
    prims.cp_async_bulk_shared_cluster_global(
        shared.to_llvm_ptr(),
        source.to_llvm_ptr(),
        mbar.to_llvm_ptr(),
        num_bytes,
    )
