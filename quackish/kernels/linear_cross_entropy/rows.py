"""Linear cross entropy, between the logits of a chunk and its gradients: statistics and coefficients of each live row.

For chunk row i and r = order[start + i], with a_t = target_logit[i], row_shift = decode(row_max_bits[i]), w_t the
target's class weight (1 without class weights, NaN if the target is no class), s the label smoothing and W the sum of
all class weights (V without):
- stats: sum = row_sum[i] = sum of part_sum[i, :], first over tiles 32 apart, then over lanes;
  lse[r] = row_shift + ln(sum);
  loss[r] = inv_divisor * ((1 - s) * w_t * (lse - a_t) + s / V * (W * lse - sum of part_wsum[i, :]) + z_loss * lse^2).
- gradients: g = grad_loss * inv_divisor, coef_target = g * (1 - s) * w_t, coef_smooth = g * s / V,
  coef_softmax = g * ((1 - s) * w_t + s / V * W + 2 * z_loss * lse) + grad_lse.
  "coefs": coefs[i] = (row_shift, coef_softmax / sum, coef_target, coef_smooth), so that the dlogits epilogue computes
  coef_softmax * exp(a - lse) without the rounding of lse.
  "scale": the gradient of the logits is row_scale[i] * exp_logits[i, :], where exp_logits[i, t] is overwritten with
  (exp(a_t - row_shift) - coef_target * sum / coef_softmax) * d_t. row_scale[i] is coef_softmax / sum, times the
  relative rounding error of that one element. xs[i] = xc[i] * row_scale[i] where xs is given.
- places, where given, are set to NO_PLACE; `lce_sort` then writes those of classes with rows.
After the last live row, up to the end of its GEMM tile: xs = row_scale = 0 and coefs = (HUGE, 0, 0, 0), so that the
GEMM computes exp(a - row_shift) = 0.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import NO_PLACE, LceRowsConfig, LceRowsProblem
from quackish.kernels.common.lce import (
    HUGE,
    LN_2,
    LOG2_E,
    after_previous,
    convert_row,
    decode,
    fake_count,
    fill_row,
    load_at,
    rounded_up,
    store_at,
)
from quackish.kernels.common.rows import fake_pointer, vector_at

# |coef_softmax| is at least 2^-20 * |coef_target|, so that coef_target * sum / coef_softmax fits bf16.
SMALLEST_RATIO = 2.0**-20


class LceRows:
    def __init__(self, problem: LceRowsProblem, config: LceRowsConfig):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32
        self.scale, self.coefs = problem.grads == "scale", problem.grads == "coefs"
        self.smoothing = problem.label_smoothing

    def fake_args(self):
        p = self.problem
        grads = self.scale or self.coefs

        def fp32(present: bool, aligned: bool = False):
            return fake_pointer("float32" if present else None, aligned)

        int32 = fake_pointer("int32", aligned=False)
        e = "bfloat16" if self.scale else None
        return (
            fp32(p.stats),
            fp32(p.stats and self.smoothing),
            fp32(p.stats or self.scale),
            int32,
            int32,
            int32,
            fake_count(),
            fake_pointer(p.class_weight_dtype, aligned=False),
            fp32(self.smoothing and p.class_weight_dtype is not None),
            fp32(p.stats),
            fp32(True),
            fp32(True),
            fp32(grads and p.grad_loss != "one"),
            fp32(True),
            fp32(grads and p.grad_lse),
            fake_pointer(e, aligned=False),
            fake_pointer(e if p.e_split else None, aligned=False),
            fake_pointer(p.dtype),
            fake_pointer(p.dtype),
            fp32(self.scale),
            fp32(self.coefs, aligned=True),
            int32 if p.places else None,
            Int64(8),
            Int64(8),
            Int32(8),
            Float32(1),
            Float32(0),
            Float32(0),
            Int32(1),
            Int32(1),
            Int32(0),
            Int32(1),
            cute.runtime.make_fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        part_sum: Optional[cute.Pointer],  # (rows, tiles)
        part_wsum: Optional[cute.Pointer],  # (rows, tiles): of class weight * a
        target_logit: Optional[cute.Pointer],  # (rows,)
        row_max_bits: cute.Pointer,  # (rows,)
        slot_target: cute.Pointer,  # (rows,)
        order: cute.Pointer,  # (m,)
        num_live: cute.Pointer,  # (1,)
        class_weight: Optional[cute.Pointer],  # (v,)
        total_weight: Optional[cute.Pointer],  # 0-dim: W, where there are class weights
        loss: Optional[cute.Pointer],  # (m,) written
        lse: cute.Pointer,  # (m,) written with stats, else read
        row_sum: cute.Pointer,  # (rows,) as lse
        grad_loss: Optional[cute.Pointer],  # 0-dim or (m,)
        inv_divisor: cute.Pointer,  # (1,)
        grad_lse: Optional[cute.Pointer],  # (m,)
        e: Optional[cute.Pointer],  # (rows, v_split) columns
        e2: Optional[cute.Pointer],  # those from v_split on
        xc: Optional[cute.Pointer],  # (rows, h)
        xs: Optional[cute.Pointer],  # (rows, h), may be xc
        row_scale: Optional[cute.Pointer],  # (rows,)
        coefs: Optional[cute.Pointer],  # (rows, 4)
        places: Optional[cute.Pointer],  # (v,)
        e_stride: Int64,
        e2_stride: Int64,
        v_split: Int32,
        softcap: Float32,
        z_loss: Float32,
        label_smoothing: Float32,
        v: Int32,
        tiles: Int32,
        start: Int32,
        rows: Int32,
        stream: CUstream,
    ):
        stats = part_sum, part_wsum, target_logit, row_max_bits, class_weight, total_weight, loss, lse, row_sum
        grads = grad_loss, inv_divisor, grad_lse, e, e2, xc, xs, row_scale, coefs
        floats = softcap, z_loss, label_smoothing
        ints = e_stride, e2_stride, v_split, v, tiles
        self.kernel(slot_target, order, num_live, stats, grads, places, floats, ints, start, rows).launch(
            grid=[cute.ceil_div(rows, self.num_warps), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=65_536 // (self.config.threads * 64),
            preferred_smem_carveout=10,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        slot_target: cute.Pointer,
        order: cute.Pointer,
        num_live: cute.Pointer,
        stats: tuple,
        grads: tuple,
        places: Optional[cute.Pointer],
        floats: tuple,
        ints: tuple,
        start: Int32,
        rows: Int32,
    ):
        after_previous()
        *_, xs, row_scale, coefs = grads
        h = self.problem.h
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        i = cta * self.num_warps + warp
        live_here = load_at(num_live, 0) - start
        if const_expr(places is not None):
            num_ctas, _, _ = cute.arch.grid_dim()
            threads = const_expr(self.config.threads)
            for at in cutlass.range(cta * threads + warp * 32 + lane, ints[3], num_ctas * threads, unroll=1):
                store_at(places, at, Int32(NO_PLACE))
        if i < rows:
            if i < live_here:
                self.live_row(i, load_at(order, start + i), load_at(slot_target, i), lane, stats, grads, floats, ints)
            elif i < rounded_up(live_here):
                if const_expr(xs is not None):
                    fill_row(xs + Int64(i) * h, h, lane, 0.0)
                if const_expr(self.scale):
                    if lane == 0:
                        store_at(row_scale, i, Float32(0.0))
                if const_expr(self.coefs):
                    if lane == 0:
                        self.store_coefs(coefs, i, Float32(HUGE), Float32(0.0), Float32(0.0), Float32(0.0))

    @cute.jit
    def live_row(self, i: Int32, r: Int32, t: Int32, lane: Int32, stats, grads, floats, ints):
        p = self.problem
        part_sum, part_wsum, target_logit, row_max_bits, class_weight, total_weight, loss, lse, row_sum = stats
        grad_loss, inv_divisor, grad_lse, e, e2, xc, xs, row_scale, coefs = grads
        softcap, z_loss, label_smoothing = floats
        e_stride, e2_stride, v_split, v, tiles = ints

        # the row's own weights: (1 - s) * w_t of the target, s / V of every class
        weight = Float32(1.0)
        if const_expr(class_weight is not None):
            weight = load_at(class_weight, cutlass.max(t, 0)).to(Float32)
        if t < 0:
            weight = Float32(float("nan"))
        total_of_weights = v.to(Float32)
        if const_expr(self.smoothing):
            weight = weight * (Float32(1.0) - label_smoothing)
            if const_expr(total_weight is not None):
                total_of_weights = load_at(total_weight, 0)
        spread = label_smoothing / v.to(Float32)
        row_shift = decode(load_at(row_max_bits, i))
        ref_log2 = row_shift * LOG2_E
        if const_expr(p.stats or self.scale):
            # As the logits GEMM has it, in log2 units and with ref_log2 rounded: what that does to E and its sums it
            # does to the target too, and a confident row, whose sum is little else, loses no digits.
            a_t = load_at(target_logit, i)
            at_log2 = cute.math.fma(a_t, Float32(LOG2_E), -ref_log2)

        # stats
        if const_expr(p.stats):
            total = self.total(part_sum + Int64(i) * tiles, tiles, lane)
            total_log2 = cute.math.log2(total)
            row_lse = (ref_log2 + total_log2) * LN_2
            nll = (total_log2 - at_log2) * LN_2  # lse - a_t, without lse's rounding
            row_loss = weight * nll
            if weight == 0.0:
                if nll == nll:  # an infinite loss that does not count is 0; NaN stays
                    row_loss = Float32(0.0)
            if const_expr(self.smoothing):
                weighted = self.total(part_wsum + Int64(i) * tiles, tiles, lane)
                row_loss += spread * (total_of_weights * row_lse - weighted)
            row_loss += z_loss * row_lse * row_lse
            if lane == 0:
                store_at(loss, r, row_loss * load_at(inv_divisor, 0))
                store_at(lse, r, row_lse)
                store_at(row_sum, i, total)
        else:
            row_lse, total = load_at(lse, r), load_at(row_sum, i)

        # gradients
        if const_expr(self.scale or self.coefs):
            g = load_at(inv_divisor, 0)
            if const_expr(p.grad_loss == "scalar"):
                g = g * load_at(grad_loss, 0)
            elif const_expr(p.grad_loss == "rows"):
                g = g * load_at(grad_loss, r)
            coef_target = g * weight
            coef_softmax = weight + 2.0 * z_loss * row_lse
            if const_expr(self.smoothing):
                coef_softmax = coef_softmax + spread * total_of_weights
            coef_softmax = g * coef_softmax
            if const_expr(p.grad_lse):
                coef_softmax = coef_softmax + load_at(grad_lse, r)
        if const_expr(self.coefs):
            # dlogits rounds a - row_shift, the sum rounds ref_log2: a relative 2^-11 apart where row_shift is 1e4
            coef_softmax = coef_softmax * cute.math.exp2(
                cute.math.fma(row_shift, Float32(LOG2_E), -ref_log2), fastmath=True
            )
            if lane == 0:
                coef_smooth = g * spread if const_expr(self.smoothing) else Float32(0.0)
                self.store_coefs(coefs, i, row_shift, coef_softmax / total, coef_target, coef_smooth)
        if const_expr(self.scale):
            smallest = Float32(SMALLEST_RATIO) * (coef_target if coef_target >= 0 else -coef_target)
            if (coef_softmax if coef_softmax >= 0 else -coef_softmax) < smallest:
                coef_softmax = smallest if coef_softmax >= 0 else -smallest
            scale = coef_softmax / total
            if t >= 0:
                ratio = (
                    Float32(0.0) if coef_softmax == 0.0 else coef_target / coef_softmax
                )  # exactly 1 where only the loss has a gradient
                at_target = cute.math.exp2(at_log2, fastmath=True) - ratio * total
                if const_expr(p.softcap):
                    at_target = at_target * (Float32(1.0) - (a_t / softcap) * (a_t / softcap))
                # This element is most of the row's gradient, and bf16 rounds it like any other. The factor of the row
                # takes that back, and leaves it to the others: norm-wise 1.4 times less error of dx on random data.
                rounded = at_target.to(cutlass.BFloat16).to(Float32)
                if ratio != 0.0 and rounded != 0.0:
                    correction = at_target / rounded
                    if correction == correction:  # not of an infinite sum
                        scale = scale * correction
                if lane == 0:
                    if const_expr(p.e_split):
                        if t < v_split:
                            store_at(e, Int64(i) * e_stride + t, rounded)
                        else:
                            store_at(e2, Int64(i) * e2_stride + (t - v_split), rounded)
                    else:
                        store_at(e, Int64(i) * e_stride + t, rounded)
            if lane == 0:
                store_at(row_scale, i, scale)
            if const_expr(xs is not None):
                convert_row(xc + Int64(i) * p.h, xs + Int64(i) * p.h, p.h, lane, scale, self.config.vectors)

    @cute.jit
    def total(self, parts: cute.Pointer, tiles: Int32, lane: Int32) -> Float32:
        """The sum of a row of parts, the same bits in each lane."""
        batch = const_expr(8)  # loads in flight
        rParts = cute.make_rmem_tensor((batch,), Float32)
        total = Float32(0.0)
        for first in cutlass.range(lane, tiles, 32 * batch, unroll=1):
            rParts.fill(0.0)
            for b in cutlass.range_constexpr(batch):
                if first + 32 * b < tiles:
                    rParts[b] = load_at(parts, first + 32 * b)
            for b in cutlass.range_constexpr(batch):
                total += rParts[b]
        return cute.arch.warp_reduction_sum(total)

    @cute.jit
    def store_coefs(
        self,
        coefs: cute.Pointer,
        i: Int32,
        row_shift: Float32,
        coef_softmax: Float32,
        coef_target: Float32,
        coef_smooth: Float32,
    ):
        row = cute.make_rmem_tensor((4,), Float32)
        row[0], row[1], row[2], row[3] = row_shift, coef_softmax, coef_target, coef_smooth
        vector_at(coefs, Int64(i) * 4, 4).store(row.load())
