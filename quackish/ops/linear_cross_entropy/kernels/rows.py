"""Linear cross entropy, between a chunk's logits and its gradients: statistics and coefficients of each live row.

For chunk row i and r = order[start + i], with a_t = target_logit[i], row_shift = decode(row_max_bits[i]), w_t the
target's class weight (1 without class weights, NaN if the target is not a class), s the label smoothing, and W the sum
of all class weights (V without):
- stats: sum = row_sum[i] = sum of part_sum[i, :], per lane over tiles 32 apart, then over lanes;
  lse[r] = row_shift + ln(sum);
  loss[r] = inv_divisor * ((1 - s) * w_t * (lse - a_t) + s / V * (W * lse - sum of part_wsum[i, :]) + z_loss * lse^2).
- return_stats: with mean = sum of part_elog[i, :] / sum, the mean of log2(e) for e = exp(a - row_shift),
  log_prob[r] = a_t - lse, NaN if the target is not a class; entropy[r] = (log2(sum) - mean) * ln(2);
  predicted[r] = the class in argmax_bits[i], or -1 if lse is NaN.
- gradients: g = grad_loss * inv_divisor, coef_target = g * (1 - s) * w_t, coef_smooth = g * s / V,
  coef_softmax = g * ((1 - s) * w_t + s / V * W + 2 * z_loss * lse) + grad_lse. grad_log_prob is subtracted from
  coef_target and coef_softmax.
  "coefs": coefs[i] = (row_shift, coef_softmax / sum, coef_target, coef_smooth), so that the dlogits epilogue computes
  coef_softmax * exp(a - lse) without the rounding of lse. With grad_entropy the gradient of the logits is
  (coef_softmax - grad_entropy * (log2(e) - mean) * ln(2)) * e / sum: coefs include the terms that are constant in a
  row, and coef_entropy[i] = -grad_entropy * ln(2) / sum.
  "scale": the gradient of the logits is row_scale[i] * exp_logits[i, :], with exp_logits[i, t] overwritten by
  (exp(a_t - row_shift) - coef_target * sum / coef_softmax) * d_t. row_scale[i] is coef_softmax / sum, times the
  relative rounding error of that element. scaled_x[i] = live_x[i] * row_scale[i], if given.
- logit_scale: row_shift, a_t and part_wsum are of unscaled logits, lse and loss of scaled ones. Exponents and part_wsum
  are multiplied by logit_scale. So are g and the rows' gradients, because the result is a gradient of unscaled logits.
- first_slot_of_class = NO_SLOT, if given; `lce_sort` then writes the slots of classes that have rows.
Past the last live row, up to the end of its GEMM tile: scaled_x = row_scale = coef_entropy = 0 and
coefs = (HUGE, 0, 0, 0), so that the GEMM computes exp(a - row_shift) = 0.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.math import LN_2, LOG2_E, decode, decode_argmax
from quackish.kernels.memory import convert_row, fill_row, load_at, store_at, vector_at
from quackish.ops.linear_cross_entropy.kernels.exponents import HUGE, log2_scale, shift_in_log2
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, rounded_up, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import NO_SLOT, LceRowsConfig, LceRowsProblem, RowsArgs

# |coef_softmax| is at least 2^-20 * |coef_target|, so that coef_target * sum / coef_softmax fits bf16.
SMALLEST_RATIO = 2.0**-20


class LceRows(RowKernel):
    def __init__(self, problem: LceRowsProblem, config: LceRowsConfig):
        super().__init__(problem, config)
        self.scale, self.coefs = problem.grads == "scale", problem.grads == "coefs"
        self.smoothing = problem.label_smoothing

    @cute.jit
    def __call__(self, args: RowsArgs, stream: CUstream):
        args = with_row_state(args, args.start)
        self.kernel(args).launch(**self.launch_options(cute.ceil_div(args.rows, self.num_warps), stream))

    @cute.kernel
    def kernel(self, args: RowsArgs):
        after_previous()
        h = self.problem.h
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        i = cta * self.num_warps + warp
        live = load_at(args.state.num_live, 0) - args.start  # rows of this chunk
        if const_expr(args.first_slot_of_class is not None):
            num_ctas, _, _ = cute.arch.grid_dim()
            threads = const_expr(self.config.threads)
            for c in cutlass.range(cta * threads + warp * 32 + lane, args.v, num_ctas * threads, unroll=1):
                store_at(args.first_slot_of_class, c, Int32(NO_SLOT))
        if i < args.rows:
            if i < live:
                self.live_row(
                    args, i, load_at(args.state.order, args.start + i), load_at(args.state.slot_target, i), lane
                )
            elif i < rounded_up(live):
                if const_expr(args.scaled_x is not None):
                    fill_row(args.scaled_x + Int64(i) * h, h, lane, 0.0)
                if const_expr(self.scale):
                    if lane == 0:
                        store_at(args.state.row_scale, i, Float32(0.0))
                if const_expr(self.coefs):
                    if lane == 0:
                        self.store_coefs(args.coefs, i, Float32(HUGE), Float32(0.0), Float32(0.0), Float32(0.0))
                        if const_expr(self.problem.grad_entropy):
                            store_at(args.coef_entropy, i, Float32(0.0))

    @cute.jit
    def live_row(self, args: RowsArgs, i: Int32, r: Int32, t: Int32, lane: Int32):
        """Processes chunk row i, which is row r of the call and has target t."""
        weights = self.weights(args, t)
        row_shift = decode(load_at(args.state.row_max_bits, i))
        scale_log2 = log2_scale(args.options.logit_scale)
        shift_log2 = shift_in_log2(row_shift, scale_log2)
        if const_expr(self.problem.stats or self.scale):
            # In log2 units with shift_log2 rounded, as in the logits GEMM: exp_logits, its sums and the target's term
            # have the same error, so a confident row, whose sum is mostly that term, loses no digits.
            target_logit = load_at(args.state.target_logit, i)
            target_log2 = cute.math.fma(target_logit, Float32(scale_log2), -shift_log2)
        if const_expr(self.problem.stats):
            row_lse, row_sum = self.statistics(args, i, r, t, lane, weights, shift_log2, target_logit, target_log2)
        else:
            row_lse, row_sum = load_at(args.state.lse, r), load_at(args.state.row_sum, i)
        if const_expr(self.scale or self.coefs):
            g, coef_softmax, coef_target = self.coefficients(args, r, weights, row_lse)
        if const_expr(self.coefs):
            # The dlogits GEMM rounds a - row_shift, the sum rounds shift_log2: a relative difference of 2^-11 at 1e4.
            correction = cute.math.fma(row_shift, Float32(scale_log2), -shift_log2)
            if const_expr(self.problem.grad_entropy):
                grad_entropy = self.row_gradient(args, args.grads.entropy, r) * LN_2
                mean = cute.math.log2(row_sum) - load_at(args.state.entropy, r) * LOG2_E
                coef_softmax = coef_softmax + grad_entropy * (mean - correction)
                if lane == 0:
                    coef_entropy = -grad_entropy * cute.math.exp2(correction, fastmath=True) / row_sum
                    store_at(args.coef_entropy, i, coef_entropy)
            coef_softmax = coef_softmax * cute.math.exp2(correction, fastmath=True)
            if lane == 0:
                coef_smooth = g * weights[1] if const_expr(self.smoothing) else Float32(0.0)
                self.store_coefs(args.coefs, i, row_shift, coef_softmax / row_sum, coef_target, coef_smooth)
        if const_expr(self.scale):
            self.scale_row(args, i, t, lane, coef_softmax, coef_target, row_sum, target_logit, target_log2)

    @cute.jit
    def weights(self, args: RowsArgs, t: Int32):
        """((1 - s) * w_t, s / V, W)"""
        weight = Float32(1.0)
        if const_expr(args.options.class_weight is not None):
            weight = load_at(args.options.class_weight, cutlass.max(t, 0)).to(Float32)
        if t < 0:
            weight = Float32(float("nan"))
        total_weight = args.v.to(Float32)
        if const_expr(self.smoothing):
            weight = weight * (Float32(1.0) - args.options.label_smoothing)
            if const_expr(args.options.total_weight is not None):
                total_weight = load_at(args.options.total_weight, 0)
        return weight, args.options.label_smoothing / args.v.to(Float32), total_weight

    @cute.jit
    def statistics(
        self, args: RowsArgs, i: Int32, r: Int32, t: Int32, lane: Int32, weights, shift_log2, target_logit, target_log2
    ):  # fmt: skip
        """Stores the loss and the statistics of row r; returns (lse, row_sum)."""
        weight, smooth_weight, total_weight = weights
        row_sum = self.total(args.stats.part_sum + Int64(i) * args.tiles, args.tiles, lane)
        sum_log2 = cute.math.log2(row_sum)
        row_lse = (shift_log2 + sum_log2) * LN_2
        nll = (sum_log2 - target_log2) * LN_2  # lse - a_t without the rounding of lse
        if target_log2 == -Float32.inf:  # maybe only in log2 units: the target is masked by the smallest finite number
            scale = (
                Float32(1.0) if const_expr(args.options.logit_scale is None) else load_at(args.options.logit_scale, 0)
            )
            nll = row_lse - target_logit * scale
        row_loss = weight * nll
        if weight == 0.0:
            if nll == nll:  # an infinite loss with weight 0 is 0; NaN stays NaN
                row_loss = Float32(0.0)
        if const_expr(self.smoothing):
            weighted = self.total(args.stats.part_wsum + Int64(i) * args.tiles, args.tiles, lane)
            if const_expr(args.options.logit_scale is not None):
                weighted = weighted * load_at(args.options.logit_scale, 0)
            row_loss += smooth_weight * (total_weight * row_lse - weighted)
        row_loss += args.options.z_loss * row_lse * row_lse
        if lane == 0:
            store_at(args.stats.loss, r, row_loss * load_at(args.options.inv_divisor, 0))
            store_at(args.state.lse, r, row_lse)
            store_at(args.state.row_sum, i, row_sum)
        if const_expr(self.problem.return_stats):
            mean = self.total(args.stats.part_elog + Int64(i) * args.tiles, args.tiles, lane) / row_sum
            row_entropy = (sum_log2 - mean) * LN_2
            if row_entropy < 0.0:  # by rounding
                row_entropy = Float32(0.0)
            if lane == 0:
                store_at(args.state.log_prob, r, -nll if t >= 0 else Float32(float("nan")))
                store_at(args.state.entropy, r, row_entropy)
                predicted = decode_argmax(load_at(args.stats.argmax_bits, i))
                store_at(args.state.predicted, r, predicted if row_lse == row_lse else Int32(-1))
        return row_lse, row_sum

    @cute.jit
    def coefficients(self, args: RowsArgs, r: Int32, weights, row_lse: Float32):
        """(g, coef_softmax, coef_target)"""
        weight, smooth_weight, total_weight = weights
        g = load_at(args.options.inv_divisor, 0)
        if const_expr(self.problem.grad_loss == "scalar"):
            g = g * load_at(args.grads.loss, 0)
        elif const_expr(self.problem.grad_loss == "rows"):
            g = g * load_at(args.grads.loss, r)
        if const_expr(args.options.logit_scale is not None):
            g = g * load_at(args.options.logit_scale, 0)
        coef_target = g * weight
        coef_softmax = weight + 2.0 * args.options.z_loss * row_lse
        if const_expr(self.smoothing):
            coef_softmax = coef_softmax + smooth_weight * total_weight
        coef_softmax = g * coef_softmax
        if const_expr(self.problem.grad_lse):
            coef_softmax = coef_softmax + self.row_gradient(args, args.grads.lse, r)
        if const_expr(self.problem.grad_log_prob):
            grad_log_prob = self.row_gradient(args, args.grads.log_prob, r)
            coef_softmax, coef_target = coef_softmax - grad_log_prob, coef_target - grad_log_prob
        return g, coef_softmax, coef_target

    @cute.jit
    def row_gradient(self, args: RowsArgs, grads: cute.Pointer, r: Int32) -> Float32:
        """grads[r], a gradient with respect to scaled logits."""
        grad = load_at(grads, r)
        if const_expr(args.options.logit_scale is not None):
            grad = grad * load_at(args.options.logit_scale, 0)
        return grad

    @cute.jit
    def scale_row(
        self, args: RowsArgs, i, t: Int32, lane: Int32, coef_softmax, coef_target, row_sum, target_logit, target_log2
    ):
        """Writes row_scale, the target's entry of exp_logits, and scaled_x."""
        smallest = Float32(SMALLEST_RATIO) * (coef_target if coef_target >= 0 else -coef_target)
        if (coef_softmax if coef_softmax >= 0 else -coef_softmax) < smallest:
            coef_softmax = smallest if coef_softmax >= 0 else -smallest
        scale = coef_softmax / row_sum
        if t >= 0:
            ratio = (
                Float32(0.0) if coef_softmax == 0.0 else coef_target / coef_softmax
            )  # 1 if only the loss has a gradient
            entry = cute.math.exp2(target_log2, fastmath=True) - ratio * row_sum
            if const_expr(self.problem.softcap):
                entry = entry * (
                    Float32(1.0) - (target_logit / args.options.softcap) * (target_logit / args.options.softcap)
                )
            # The target's entry dominates the row's gradient. row_scale undoes its bf16 rounding error and passes it on
            # to the other entries: dx's norm-wise error is 1.4 times lower on random data.
            rounded = entry.to(cutlass.BFloat16).to(Float32)
            if ratio != 0.0 and rounded != 0.0:
                correction = entry / rounded
                if correction == correction:  # NaN if the sum is infinite
                    scale = scale * correction
            if lane == 0:
                e, first = args.exp_logits, Int64(i) * args.exp_logits.first_stride + t
                if const_expr(self.problem.exp_logits_split):
                    if t < e.split:
                        store_at(e.first, first, rounded)
                    else:
                        store_at(e.second, Int64(i) * e.second_stride + (t - e.split), rounded)
                else:
                    store_at(e.first, first, rounded)
        if lane == 0:
            store_at(args.state.row_scale, i, scale)
        if const_expr(args.scaled_x is not None):
            h = self.problem.h
            convert_row(args.live_x + Int64(i) * h, args.scaled_x + Int64(i) * h, h, lane, scale, self.config.vectors)

    @cute.jit
    def total(self, partials: cute.Pointer, tiles: Int32, lane: Int32) -> Float32:
        """The sum of a row of partial sums, with the same bits in each lane."""
        batch = const_expr(8)  # loads in flight
        rPartials = cute.make_rmem_tensor((batch,), Float32)
        total = Float32(0.0)
        for first in cutlass.range(lane, tiles, 32 * batch, unroll=1):
            rPartials.fill(0.0)
            for b in cutlass.range_constexpr(batch):
                if first + 32 * b < tiles:
                    rPartials[b] = load_at(partials, first + 32 * b)
            for b in cutlass.range_constexpr(batch):
                total += rPartials[b]
        return cute.arch.warp_reduction_sum(total)

    @cute.jit
    def store_coefs(self, coefs: cute.Pointer, i: Int32, row_shift, coef_softmax, coef_target, coef_smooth):
        row = cute.make_rmem_tensor((4,), Float32)
        row[0], row[1], row[2], row[3] = row_shift, coef_softmax, coef_target, coef_smooth
        vector_at(coefs, Int64(i) * 4, 4).store(row.load())
