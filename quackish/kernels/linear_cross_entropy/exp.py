"""Linear cross entropy around cuBLAS: from the fp32 GEMM result z to exp_logits or the gradient of the logits.

Logit a = z + bias and d = 1, or with a softcap a = softcap * tanh((z + bias) / softcap) and d = 1 - (a / softcap)^2.
For live chunk rows i, with e = exp(a - row_shift), or exp(logit_scale * (a - row_shift)):
- "softmax": out = e * d, the exp_logits; per tile of TILE_N classes the sums of e and of class_weight * a; and a at the
  target. A tile with a logit more than HEADROOM above row_shift[i] uses its own maximum as its shift, updates
  row_max_bits[i], and flags the row's 128-row tile. Each tile's shift is stored after the sums, for LceRescale. With
  `return_stats` also the sum of e * log2(e), and each row's encoded argmax in argmax_bits.
- "dlogits": out = (coef_softmax / sum * e - coef_smooth * class_weight - onehot * coef_target) * d. coefs[i] holds
  row_shift, coef_softmax / sum, coef_target, coef_smooth. If the entropy has a gradient, coef_entropy[i] * log2(e) is
  added to coef_softmax / sum.
In ignored rows out = 0, because cuBLAS also reads them.

One warp per row and tile, eight neighboring classes per lane. So a tile's sums depend on nothing else.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_cublas import TILE_N, ExpArgs, LceExpProblem
from quackish.configs.lce_rows import ROW_TILE, LceRowsConfig
from quackish.kernels.common.exponents import HEADROOM, LEAST_LOG2, log2_scale, shift_in_log2
from quackish.kernels.common.math import LOG2_E, encode, encode_argmax
from quackish.kernels.common.memory import load_at, store_at, vector_at
from quackish.kernels.common.row_kernel import RowKernel

_VEC = TILE_N // 32


class LceExp(RowKernel):
    problem: LceExpProblem
    config: LceRowsConfig

    @cute.jit
    def __call__(self, a: ExpArgs, stream: CUstream):
        self.kernel(a).launch(
            grid=[cute.ceil_div(a.rows, self.num_warps), cute.ceil_div(a.n, TILE_N), 1],
            block=[self.config.threads, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: ExpArgs):
        args = a.epilogue
        cta, tile, _ = cute.arch.block_idx()
        i = cta * self.num_warps + cute.arch.warp_idx()
        col = tile * TILE_N + cute.arch.lane_idx() * _VEC
        if i < a.rows:
            rOut = cute.make_rmem_tensor((_VEC,), Float32)
            rOut.fill(0.0)
            if i < load_at(a.num_live, 0) - a.start:
                rA = self.logits(a, i, col)
                target = load_at(args.slot_target, i) - self.class_of(a, 0)
                if const_expr(self.problem.kind == "softmax"):
                    self.softmax(a, rA, rOut, target, i, tile, col)
                else:
                    self.dlogits(a, rA, rOut, target, i, col)
                if const_expr(self.problem.softcap):
                    for k in cutlass.range_constexpr(_VEC):
                        capped = rA[k] / args.softcap
                        rOut[k] = rOut[k] * (1.0 - capped * capped)
            if const_expr(a.out is not None):
                self.store(rOut, a.out + Int64(i) * a.out_stride, col, a.n)

    def class_of(self, a: ExpArgs, col):
        return a.first + col + (a.epilogue.v0 if self.problem.kind == "dlogits" else 0)

    @cute.jit
    def logits(self, a: ExpArgs, i: Int32, col: Int32) -> cute.Tensor:
        """This lane's logits. Past the last class, where z is uninitialized, -softcap or -inf."""
        args = a.epilogue
        rA = cute.make_rmem_tensor((_VEC,), Float32)
        rA.store(vector_at(a.z + Int64(i) * a.z_stride, col, _VEC).load())
        for k in cutlass.range_constexpr(_VEC):
            if col + k >= a.n:
                rA[k] = -Float32.inf
            elif const_expr(args.bias is not None):
                rA[k] = rA[k] + load_at(args.bias, a.first + col + k).to(Float32)
            if const_expr(self.problem.softcap):
                rA[k] = args.softcap * cute.math.tanh(rA[k] / args.softcap)
        return rA

    @cute.jit
    def softmax(self, a: ExpArgs, rA, rOut, target: Int32, i: Int32, tile: Int32, col: Int32):
        args, lane = a.epilogue, cute.arch.lane_idx()

        # use the tile's maximum as shift if it is far above row_shift; fmax ignores NaN
        tile_max, argmax = -Float32.inf, self.class_of(a, col)
        for k in cutlass.range_constexpr(_VEC):
            if col + k < a.n:
                if const_expr(self.problem.return_stats):
                    argmax = self.class_of(a, col + k) if rA[k] > tile_max else argmax
                tile_max = cute.arch.fmax(tile_max, rA[k])
        if const_expr(self.problem.return_stats):
            code = cute.arch.warp_reduction(encode_argmax(tile_max, argmax), cutlass.max)
            if lane == 0:
                cute.arch.atomic_max(args.argmax_bits + i, code)
        tile_max = cute.arch.warp_reduction(tile_max, cute.arch.fmax)
        shift, scale_log2 = load_at(args.row_shift, i), log2_scale(args.logit_scale)
        if tile_max * scale_log2 > shift * scale_log2 + HEADROOM * LOG2_E:
            shift = tile_max
            if lane == 0:
                cute.arch.atomic_max(args.row_max_bits + i, encode(tile_max))
                store_at(args.flags, 1 + i // ROW_TILE, Int32(1))
                store_at(args.flags, 0, Int32(1))

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
                    if const_expr(args.class_weight is not None):
                        w = load_at(args.class_weight, self.class_of(a, col + k))
                    if not (w == 0.0 and rA[k] == -Float32.inf):  # a masked class of weight 0
                        weighted += w * rA[k]
                if col + k == target:
                    store_at(args.target_logit, i, rA[k])
        total = cute.arch.warp_reduction_sum(total)
        offset, shifts = Int64(i) * args.tiles + (a.first // TILE_N + tile), args.tiles // 2
        if lane == 0:
            store_at(args.part_sum, offset, total)
            store_at(args.part_sum, offset + shifts, shift)
        if const_expr(self.problem.smoothing):
            weighted = cute.arch.warp_reduction_sum(weighted)
            if lane == 0:
                store_at(args.part_wsum, offset, weighted)
                store_at(args.part_wsum, offset + shifts, Float32(0.0))
        if const_expr(self.problem.return_stats):
            elog = cute.arch.warp_reduction_sum(elog)
            if lane == 0:
                store_at(args.part_elog, offset, elog)
                store_at(args.part_elog, offset + shifts, Float32(0.0))

    @cute.jit
    def dlogits(self, a: ExpArgs, rA, rOut, target: Int32, i: Int32, col: Int32):
        args, rCoefs = a.epilogue, cute.make_rmem_tensor((4,), Float32)
        rCoefs.store(vector_at(args.coefs, Int64(i) * 4, 4).load())
        row_shift, coef_softmax, coef_target, coef_smooth = rCoefs[0], rCoefs[1], rCoefs[2], rCoefs[3]
        scale_log2 = log2_scale(args.logit_scale)
        coef_entropy = Float32(0.0)
        if const_expr(self.problem.entropy):
            coef_entropy = load_at(args.coef_entropy, i)
        for k in cutlass.range_constexpr(_VEC):
            if col + k < a.n:
                coef, log2 = coef_softmax, (rA[k] - row_shift) * scale_log2
                if const_expr(self.problem.entropy):
                    coef += coef_entropy * cute.arch.fmax(log2, LEAST_LOG2)
                value = coef * cute.math.exp2(log2, fastmath=True)
                if const_expr(self.problem.smoothing):
                    w = Float32(1.0)
                    if const_expr(args.class_weight is not None):
                        w = load_at(args.class_weight, self.class_of(a, col + k))
                    value -= coef_smooth * w
                if col + k == target:
                    value -= coef_target
                rOut[k] = value

    @cute.jit
    def store(self, rOut, row: cute.Pointer, col: Int32, n: Int32):
        """Stores nothing past the last class, where another buffer may start."""
        if col + _VEC <= n:
            vector_at(row, col, _VEC).store(rOut.load().to(row.dtype))
        else:
            for k in cutlass.range_constexpr(_VEC):
                if col + k < n:
                    store_at(row, col + k, rOut[k])
