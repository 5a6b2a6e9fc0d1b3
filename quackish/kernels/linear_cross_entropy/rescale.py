"""Linear cross entropy around cuBLAS, after LceExp: brings all tiles of a row to the same shift, the row's maximum.

In rows that LceExp flagged (128 at a time) a tile's exp_logits and sum are multiplied by
exp(the tile's shift - decode(row_max_bits)). In other rows these two are equal bit for bit, and exp_logits is not
touched. The shifts stored after the sums become 0, so that summing all of a row of part_sum gives the row's sum.
One warp per row and 32 tiles.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_cublas import TILE_N, LceRedoProblem, LceWarpsConfig
from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.lce import LOG2_E, decode, fake_count, load_at, store_at
from quackish.kernels.common.rows import fake_pointer, vector_at

_VEC = TILE_N // 32


class LceRedo:
    def __init__(self, problem: LceRedoProblem, config: LceWarpsConfig):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        int32 = fake_pointer("int32", aligned=False)
        e = fake_pointer("bfloat16" if self.problem.stored else None)
        stream = cute.runtime.make_fake_stream()
        ints = Int32(0), Int32(1), Int32(0), Int32(1), Int32(1)
        return (e, fake_pointer("float32", aligned=False), int32, int32, fake_count(), Int64(8), *ints, stream)

    @cute.jit
    def __call__(
        self,
        e: Optional[cute.Pointer],  # (rows, n)
        part_sum: cute.Pointer,  # (rows, 2 * tiles): sums, references
        row_max_bits: cute.Pointer,  # (rows,)
        flags: cute.Pointer,  # (1 + ceil(rows / 128),)
        num_live: cute.Pointer,  # (1,)
        e_stride: Int64,
        tile0: Int32,  # the tile of e's first column
        tiles: Int32,
        start: Int32,
        rows: Int32,
        n: Int32,
        stream: CUstream,
    ):
        self.kernel(e, part_sum, row_max_bits, flags, num_live, e_stride, tile0, tiles, start, rows, n).launch(
            grid=[cute.ceil_div(rows, self.num_warps), cute.ceil_div(n, 32 * TILE_N), 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        e: Optional[cute.Pointer],
        part_sum: cute.Pointer,
        row_max_bits: cute.Pointer,
        flags: cute.Pointer,
        num_live: cute.Pointer,
        e_stride: Int64,
        tile0: Int32,
        tiles: Int32,
        start: Int32,
        rows: Int32,
        n: Int32,
    ):
        cta, part, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        if i < cutlass.min(load_at(num_live, 0) - start, rows):
            # a lane has a tile's numbers
            tile = part * 32 + lane
            at = Int64(i) * (2 * tiles) + (tile0 + tile)
            is_there = tile < cute.ceil_div(n, TILE_N)
            reference = decode(load_at(row_max_bits, i))
            mine = reference
            if is_there:
                mine = load_at(part_sum, at + tiles)
                store_at(part_sum, at + tiles, Float32(0.0))
            if load_at(flags, 1 + i // ROW_TILE) != 0:
                factor = Float32(1.0)
                if mine != reference:
                    factor = cute.math.exp2((mine - reference) * LOG2_E, fastmath=True)
                    store_at(part_sum, at, load_at(part_sum, at) * factor)

                # the warp has a tile's classes, eight a lane
                if const_expr(e is not None):
                    for k in cutlass.range(32, unroll=1):
                        f = cute.arch.shuffle_sync(factor, k)
                        if f != 1.0:
                            self.scale(e + Int64(i) * e_stride, f, (part * 32 + k) * TILE_N + lane * _VEC, n)

    @cute.jit
    def scale(self, row: cute.Pointer, factor: Float32, col: Int32, n: Int32):
        if col + _VEC <= n:
            values = vector_at(row, col, _VEC)
            values.store((values.load().to(Float32) * factor).to(row.dtype))
        else:
            for k in cutlass.range_constexpr(_VEC):
                if col + k < n:
                    store_at(row, col + k, load_at(row, col + k).to(Float32) * factor)
