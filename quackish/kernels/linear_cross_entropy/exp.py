"""Linear cross entropy around cuBLAS: fp32 products z in, exponentials or gradients of the logits out.

With a = softcap * tanh((z + bias) / softcap), or z + bias, and d = 1 - (a / softcap)^2, or 1, for live chunk rows i:
- "softmax": exp_logits = exp(a - row_shift) * d; the sum of exp(a - row_shift) over a tile of TILE_N classes, and of
  class_weight * a; a at the target. A tile with a logit more than HEADROOM above row_shift[i] uses its own maximum as
  its shift, raises row_max_bits[i] to it and flags the 128 rows around the row. Each tile's shift is stored after the
  sums, for LceRedo.
- "dlogits": (coef_softmax / sum * exp(a - row_shift) - coef_smooth * class_weight - onehot * coef_target) * d, where
  coefs[i] holds row_shift, coef_softmax / sum, coef_target, coef_smooth.
In rows that are not live the output is 0: cuBLAS also reads ignored rows.

One warp per row and tile, so a tile's sums depend on nothing else; eight neighboring classes per lane.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_cublas import TILE_N, LceExpProblem, LceWarpsConfig
from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.lce import LOG2_E, encode, fake_count, load_at, store_at
from quackish.kernels.common.rows import fake_pointer, vector_at

# Far from overflow: exp(60) in bf16, and sums of 2^20 of them in fp32.
HEADROOM = 60.0
_VEC = TILE_N // 32


class LceExp:
    def __init__(self, problem: LceExpProblem, config: LceWarpsConfig):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        p = self.problem
        softmax = p.kind == "softmax"

        def of_softmax(dtype: str):
            return fake_pointer(dtype if softmax else None, aligned=False)

        return (
            fake_pointer("float32"),
            fake_pointer(p.out_dtype),
            fake_pointer(p.bias_dtype, aligned=False),
            fake_pointer("float32" if p.weighted else None, aligned=False),
            fake_pointer("int32", aligned=False),
            fake_count(),
            of_softmax("float32"),
            of_softmax("int32"),
            of_softmax("int32"),
            of_softmax("float32"),
            fake_pointer("float32" if softmax and p.smoothing else None, aligned=False),
            of_softmax("float32"),
            fake_pointer(None if softmax else "float32"),
            Int64(8),
            Int64(8),
            Float32(1),
            Int32(0),
            Int32(0),
            Int32(1),
            Int32(0),
            Int32(1),
            Int32(1),
            cute.runtime.make_fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        z: cute.Pointer,  # (rows, n), rows of whole tiles
        e: Optional[cute.Pointer],  # (rows, n)
        bias: Optional[cute.Pointer],  # (n,)
        class_weight: Optional[cute.Pointer],  # (n,)
        slot_target: cute.Pointer,  # (rows,)
        num_live: cute.Pointer,  # (1,)
        row_shift: Optional[cute.Pointer],  # (rows,)
        row_max_bits: Optional[cute.Pointer],  # (rows,)
        flags: Optional[cute.Pointer],  # (1 + ceil(rows / 128),)
        part_sum: Optional[cute.Pointer],  # (rows, 2 * tiles): sums, references
        part_wsum: Optional[cute.Pointer],  # (rows, 2 * tiles): sums, zeros
        target_logit: Optional[cute.Pointer],  # (rows,)
        coefs: Optional[cute.Pointer],  # (rows, 4)
        z_stride: Int64,
        e_stride: Int64,
        softcap: Float32,
        v0: Int32,  # the class of the first column
        tile0: Int32,  # the tile of the first column
        tiles: Int32,
        start: Int32,
        rows: Int32,
        n: Int32,
        stream: CUstream,
    ):
        of_softmax = row_shift, row_max_bits, flags, part_sum, part_wsum, target_logit, tile0, tiles
        self.kernel(
            z,
            e,
            bias,
            class_weight,
            slot_target,
            num_live,
            of_softmax,
            coefs,
            z_stride,
            e_stride,
            softcap,
            v0,
            start,
            rows,
            n,
        ).launch(
            grid=[cute.ceil_div(rows, self.num_warps), cute.ceil_div(n, TILE_N), 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        z: cute.Pointer,
        e: Optional[cute.Pointer],
        bias: Optional[cute.Pointer],
        class_weight: Optional[cute.Pointer],
        slot_target: cute.Pointer,
        num_live: cute.Pointer,
        of_softmax: tuple,
        coefs: Optional[cute.Pointer],
        z_stride: Int64,
        e_stride: Int64,
        softcap: Float32,
        v0: Int32,
        start: Int32,
        rows: Int32,
        n: Int32,
    ):
        cta, tile, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        col = tile * TILE_N + cute.arch.lane_idx() * _VEC
        if i < rows:
            rOut = cute.make_rmem_tensor((_VEC,), Float32)
            rOut.fill(0.0)
            if i < load_at(num_live, 0) - start:
                rA = self.logits(z + Int64(i) * z_stride, bias, softcap, col, n)
                target = load_at(slot_target, i) - v0
                if const_expr(self.problem.kind == "softmax"):
                    self.softmax(rA, rOut, class_weight, target, of_softmax, i, tile, col, n)
                else:
                    self.dlogits(rA, rOut, class_weight, target, coefs, i, col, n)
                if const_expr(self.problem.softcap):
                    for k in cutlass.range_constexpr(_VEC):
                        capped = rA[k] / softcap
                        rOut[k] = rOut[k] * (1.0 - capped * capped)
            if const_expr(e is not None):
                self.store(rOut, e + Int64(i) * e_stride, col, n)

    @cute.jit
    def logits(self, row: cute.Pointer, bias: Optional[cute.Pointer], softcap: Float32, col: Int32, n: Int32):
        """This lane's; past the last class, where anything may lie, -softcap or -inf."""
        rA = cute.make_rmem_tensor((_VEC,), Float32)
        rA.store(vector_at(row, col, _VEC).load())
        for k in cutlass.range_constexpr(_VEC):
            if col + k >= n:
                rA[k] = -Float32.inf
            elif const_expr(bias is not None):
                rA[k] = rA[k] + load_at(bias, col + k).to(Float32)
            if const_expr(self.problem.softcap):
                rA[k] = softcap * cute.math.tanh(rA[k] / softcap)
        return rA

    @cute.jit
    def softmax(self, rA, rOut, class_weight, target: Int32, of_softmax, i: Int32, tile: Int32, col: Int32, n: Int32):
        row_shift, row_max_bits, flags, part_sum, part_wsum, target_logit, tile0, tiles = of_softmax
        lane = cute.arch.lane_idx()

        # the tile's own reference, where the row's is too low; no NaN is ever the highest
        highest = -Float32.inf
        for k in cutlass.range_constexpr(_VEC):
            if col + k < n:
                highest = cute.arch.fmax(highest, rA[k])
        highest = cute.arch.warp_reduction(highest, cute.arch.fmax)
        reference = load_at(row_shift, i)
        if highest * LOG2_E > reference * LOG2_E + HEADROOM * LOG2_E:
            reference = highest
            if lane == 0:
                cute.arch.atomic_max(row_max_bits + i, encode(highest))
                store_at(flags, 1 + i // ROW_TILE, Int32(1))
                store_at(flags, 0, Int32(1))

        # exponentials and sums
        reference_log2 = reference * LOG2_E
        total, weighted = Float32(0.0), Float32(0.0)
        for k in cutlass.range_constexpr(_VEC):
            if col + k < n:
                rOut[k] = cute.math.exp2(cute.math.fma(rA[k], Float32(LOG2_E), -reference_log2), fastmath=True)
                total += rOut[k]
                if const_expr(self.problem.smoothing):
                    w = Float32(1.0)
                    if const_expr(class_weight is not None):
                        w = load_at(class_weight, col + k)
                    if not (w == 0.0 and rA[k] == -Float32.inf):  # a masked class that does not count adds nothing
                        weighted += w * rA[k]
                if col + k == target:
                    store_at(target_logit, i, rA[k])
        total = cute.arch.warp_reduction_sum(total)
        at = Int64(i) * (2 * tiles) + (tile0 + tile)
        if lane == 0:
            store_at(part_sum, at, total)
            store_at(part_sum, at + tiles, reference)
        if const_expr(self.problem.smoothing):
            weighted = cute.arch.warp_reduction_sum(weighted)
            if lane == 0:
                store_at(part_wsum, at, weighted)
                store_at(part_wsum, at + tiles, Float32(0.0))

    @cute.jit
    def dlogits(self, rA, rOut, class_weight, target: Int32, coefs: cute.Pointer, i: Int32, col: Int32, n: Int32):
        rC = cute.make_rmem_tensor((4,), Float32)
        rC.store(vector_at(coefs, Int64(i) * 4, 4).load())
        row_shift, scale, coef_target, coef_smooth = rC[0], rC[1], rC[2], rC[3]
        for k in cutlass.range_constexpr(_VEC):
            if col + k < n:
                value = scale * cute.math.exp2((rA[k] - row_shift) * LOG2_E, fastmath=True)
                if const_expr(self.problem.smoothing):
                    w = Float32(1.0)
                    if const_expr(class_weight is not None):
                        w = load_at(class_weight, col + k)
                    value -= coef_smooth * w
                if col + k == target:
                    value -= coef_target
                rOut[k] = value

    @cute.jit
    def store(self, rOut, row: cute.Pointer, col: Int32, n: Int32):
        """Nothing past the last class: that memory may be somebody else's."""
        if col + _VEC <= n:
            vector_at(row, col, _VEC).store(rOut.load().to(row.dtype))
        else:
            for k in cutlass.range_constexpr(_VEC):
                if col + k < n:
                    store_at(row, col + k, rOut[k])
