"""Linear cross entropy around cuBLAS: fp32 products z in, exponentials or gradients of the logits out.

With a = softcap * tanh((z + bias) / softcap), or z + bias, and d = 1 - (a / softcap)^2, or 1, for live chunk rows i:
- "softmax": out = exp(a - row_shift) * d, the exp_logits; sums of exp(a - row_shift) and of class_weight * a over a
  tile of TILE_N classes; a at the target. A tile with a logit more than HEADROOM above row_shift[i] uses its own
  maximum as its shift, raises row_max_bits[i] to it and flags the 128 rows around the row. Each tile's shift is stored
  after the sums, for LceRescale. With `return_stats` also sums of e * log2(e) for e = exp(a - shift), and each row's
  argmax_bits are raised to its encoded argmax.
- "dlogits": out = (coef_softmax / sum * exp(a - row_shift) - coef_smooth * class_weight - onehot * coef_target) * d,
  where coefs[i] holds row_shift, coef_softmax / sum, coef_target, coef_smooth. With a gradient of the entropy,
  coef_entropy[i] * log2(exp(a - row_shift)) is added to coef_softmax / sum.
With a logit_scale all exponentials are exp(logit_scale * (a - row_shift)), and the coefficients include it.
In rows that are not live out = 0: cuBLAS also reads ignored rows.

One warp per row and tile, so a tile's sums depend on nothing else; eight neighboring classes per lane.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_args import ExpArgs
from quackish.configs.lce_cublas import TILE_N, LceExpProblem, LceWarpsConfig
from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.lce import (
    LEAST_LOG2,
    LOG2_E,
    encode,
    encode_argmax,
    fake_args,
    load_at,
    log2_scale,
    shift_in_log2,
    store_at,
)
from quackish.kernels.common.rows import vector_at

# Far from overflow: exp(60) in bf16, and sums of 2^20 of them in fp32.
HEADROOM = 60.0
_VEC = TILE_N // 32


class LceExp:
    def __init__(self, problem: LceExpProblem, config: LceWarpsConfig):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, a: ExpArgs, stream: CUstream):
        self.kernel(a).launch(
            grid=[cute.ceil_div(a.rows, self.num_warps), cute.ceil_div(a.n, TILE_N), 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: ExpArgs):
        cta, tile, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        col = tile * TILE_N + cute.arch.lane_idx() * _VEC
        if i < a.rows:
            rOut = cute.make_rmem_tensor((_VEC,), Float32)
            rOut.fill(0.0)
            if i < load_at(a.num_live, 0) - a.start:
                rA = self.logits(a, i, col)
                target = load_at(a.slot_target, i) - a.v0
                if const_expr(self.problem.kind == "softmax"):
                    self.softmax(a, rA, rOut, target, i, tile, col)
                else:
                    self.dlogits(a, rA, rOut, target, i, col)
                if const_expr(self.problem.softcap):
                    for k in cutlass.range_constexpr(_VEC):
                        capped = rA[k] / a.softcap
                        rOut[k] = rOut[k] * (1.0 - capped * capped)
            if const_expr(a.out is not None):
                self.store(rOut, a.out + Int64(i) * a.out_stride, col, a.n)

    @cute.jit
    def logits(self, a: ExpArgs, i: Int32, col: Int32) -> cute.Tensor:
        """This lane's logits; past the last class, where z is uninitialized, -softcap or -inf."""
        rA = cute.make_rmem_tensor((_VEC,), Float32)
        rA.store(vector_at(a.z + Int64(i) * a.z_stride, col, _VEC).load())
        for k in cutlass.range_constexpr(_VEC):
            if col + k >= a.n:
                rA[k] = -Float32.inf
            elif const_expr(a.bias is not None):
                rA[k] = rA[k] + load_at(a.bias, col + k).to(Float32)
            if const_expr(self.problem.softcap):
                rA[k] = a.softcap * cute.math.tanh(rA[k] / a.softcap)
        return rA

    @cute.jit
    def softmax(self, a: ExpArgs, rA, rOut, target: Int32, i: Int32, tile: Int32, col: Int32):
        lane = cute.arch.lane_idx()

        # shift by the tile's own maximum if the row's shift is far below it; fmax ignores NaN
        highest, first = -Float32.inf, a.v0 + col
        for k in cutlass.range_constexpr(_VEC):
            if col + k < a.n:
                if const_expr(self.problem.return_stats):
                    first = a.v0 + col + k if rA[k] > highest else first
                highest = cute.arch.fmax(highest, rA[k])
        if const_expr(self.problem.return_stats):
            code = cute.arch.warp_reduction(encode_argmax(highest, first), cutlass.max)
            if lane == 0:
                cute.arch.atomic_max(a.argmax_bits + i, code)
        highest = cute.arch.warp_reduction(highest, cute.arch.fmax)
        shift, scale_log2 = load_at(a.row_shift, i), log2_scale(a.logit_scale)
        if highest * scale_log2 > shift * scale_log2 + HEADROOM * LOG2_E:
            shift = highest
            if lane == 0:
                cute.arch.atomic_max(a.row_max_bits + i, encode(highest))
                store_at(a.flags, 1 + i // ROW_TILE, Int32(1))
                store_at(a.flags, 0, Int32(1))

        # exponentials and sums
        shift_log2 = shift_in_log2(shift, scale_log2)
        total, weighted, elog = Float32(0.0), Float32(0.0), Float32(0.0)
        for k in cutlass.range_constexpr(_VEC):
            if col + k < a.n:
                log2 = cute.math.fma(rA[k], Float32(scale_log2), -shift_log2)
                rOut[k] = cute.math.exp2(log2, fastmath=True)
                total += rOut[k]
                if const_expr(self.problem.return_stats):
                    elog += rOut[k] * cute.arch.fmax(log2, LEAST_LOG2)
                if const_expr(self.problem.smoothing):
                    w = Float32(1.0)
                    if const_expr(a.class_weight is not None):
                        w = load_at(a.class_weight, col + k)
                    if not (w == 0.0 and rA[k] == -Float32.inf):  # 0 * -inf: a masked class without weight
                        weighted += w * rA[k]
                if col + k == target:
                    store_at(a.target_logit, i, rA[k])
        total = cute.arch.warp_reduction_sum(total)
        at = Int64(i) * (2 * a.tiles) + (a.tile0 + tile)
        if lane == 0:
            store_at(a.part_sum, at, total)
            store_at(a.part_sum, at + a.tiles, shift)
        if const_expr(self.problem.smoothing):
            weighted = cute.arch.warp_reduction_sum(weighted)
            if lane == 0:
                store_at(a.part_wsum, at, weighted)
                store_at(a.part_wsum, at + a.tiles, Float32(0.0))
        if const_expr(self.problem.return_stats):
            elog = cute.arch.warp_reduction_sum(elog)
            if lane == 0:
                store_at(a.part_elog, at, elog)
                store_at(a.part_elog, at + a.tiles, Float32(0.0))

    @cute.jit
    def dlogits(self, a: ExpArgs, rA, rOut, target: Int32, i: Int32, col: Int32):
        rC = cute.make_rmem_tensor((4,), Float32)
        rC.store(vector_at(a.coefs, Int64(i) * 4, 4).load())
        row_shift, scale, coef_target, coef_smooth = rC[0], rC[1], rC[2], rC[3]
        scale_log2 = log2_scale(a.logit_scale)
        coef_entropy = Float32(0.0)
        if const_expr(self.problem.entropy):
            coef_entropy = load_at(a.coef_entropy, i)
        for k in cutlass.range_constexpr(_VEC):
            if col + k < a.n:
                coef, log2 = scale, (rA[k] - row_shift) * scale_log2
                if const_expr(self.problem.entropy):
                    coef += coef_entropy * cute.arch.fmax(log2, LEAST_LOG2)
                value = coef * cute.math.exp2(log2, fastmath=True)
                if const_expr(self.problem.smoothing):
                    w = Float32(1.0)
                    if const_expr(a.class_weight is not None):
                        w = load_at(a.class_weight, col + k)
                    value -= coef_smooth * w
                if col + k == target:
                    value -= coef_target
                rOut[k] = value

    @cute.jit
    def store(self, rOut, row: cute.Pointer, col: Int32, n: Int32):
        """Stores nothing past the last class: that memory may be another buffer's."""
        if col + _VEC <= n:
            vector_at(row, col, _VEC).store(rOut.load().to(row.dtype))
        else:
            for k in cutlass.range_constexpr(_VEC):
                if col + k < n:
                    store_at(row, col + k, rOut[k])
