"""Linear cross entropy around cuBLAS, after LceExp: rescales all tiles of a flagged row to the row's maximum as shift.

In rows that LceExp flagged (128 at a time), a tile's exp_logits and sum are multiplied by
exp(logit_scale * (the tile's shift - row_max)), row_max = decode(row_max_bits). In other rows both shifts are equal bit
for bit, and exp_logits is not touched. Sums of e * log2(e), if given, are converted to the new shift. The shifts stored
after the sums become 0, so that summing a whole row of part_sum gives the row's sum. One warp per row and 32 tiles.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_cublas import TILE_N, LceRescaleProblem, RescaleArgs
from quackish.configs.lce_rows import ROW_TILE, LceRowsConfig
from quackish.kernels.common.exponents import LEAST_LOG2, log2_scale
from quackish.kernels.common.math import decode
from quackish.kernels.common.memory import load_at, store_at, vector_at
from quackish.kernels.common.row_kernel import RowKernel, with_row_state

_VEC = TILE_N // 32


class LceRescale(RowKernel):
    problem: LceRescaleProblem
    config: LceRowsConfig

    @cute.jit
    def __call__(self, a: RescaleArgs, stream: CUstream):
        a = with_row_state(a, a.start)
        self.kernel(a).launch(
            grid=[cute.ceil_div(a.rows, self.num_warps), cute.ceil_div(a.n, 32 * TILE_N), 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: RescaleArgs):
        cta, tile_group, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        if i < cutlass.min(load_at(a.state.num_live, 0) - a.start, a.rows):
            # sums: one tile per lane
            tile = tile_group * 32 + lane
            idx, shifts = Int64(i) * a.tiles + (a.first // TILE_N + tile), a.tiles // 2
            exists = tile < cute.ceil_div(a.n, TILE_N)
            row_max = decode(load_at(a.state.row_max_bits, i))
            shift = row_max
            if exists:
                shift = load_at(a.part_sum, idx + shifts)
                store_at(a.part_sum, idx + shifts, Float32(0.0))
            if load_at(a.state.flags, 1 + i // ROW_TILE) != 0:
                factor = Float32(1.0)
                if shift != row_max:
                    log2 = (shift - row_max) * log2_scale(a.logit_scale)
                    factor = cute.math.exp2(log2, fastmath=True)
                    if const_expr(a.part_elog is not None):
                        elog = load_at(a.part_elog, idx) + load_at(a.part_sum, idx) * cute.arch.fmax(log2, LEAST_LOG2)
                        store_at(a.part_elog, idx, elog * factor)
                    store_at(a.part_sum, idx, load_at(a.part_sum, idx) * factor)

                # exponentials: one tile at a time, eight classes per lane
                if const_expr(a.exp_logits is not None):
                    for k in cutlass.range(32, unroll=1):
                        f = cute.arch.shuffle_sync(factor, k)
                        if f != 1.0:
                            row, col = a.exp_logits + Int64(i) * a.exp_logits_stride, (tile_group * 32 + k) * TILE_N
                            self.scale(row, f, col + lane * _VEC, a.n)

    @cute.jit
    def scale(self, row: cute.Pointer, factor: Float32, col: Int32, n: Int32):
        if col + _VEC <= n:
            values = vector_at(row, col, _VEC)
            values.store((values.load().to(Float32) * factor).to(row.dtype))
        else:
            for k in cutlass.range_constexpr(_VEC):
                if col + k < n:
                    store_at(row, col + k, load_at(row, col + k).to(Float32) * factor)
