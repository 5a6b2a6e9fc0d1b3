"""The epilogue of the logits GEMM in a backward pass that recomputes the logits: their gradient."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_args import DlogitsArgs
from quackish.kernels.common.lce import LEAST_LOG2, log2_scale
from quackish.kernels.common.logits import Logits, shared_column
from quackish.kernels.common.rows import vector_at
from quackish.kernels.common.tile_store import Block, Output, column_of, row_of, thread_rows


class Dlogits(Logits):
    """The gradient of the logits a, for classes c of row i with target t:

        (coef_softmax / sum * exp(a - row_shift) - coef_smooth * class_weight[c] - (c == t) * coef_target) * d

    coefs (rows, 4) holds row_shift, coef_softmax / sum, coef_target and coef_smooth of each row. With a logit_scale the
    exponential is exp(logit_scale * (a - row_shift)), and the coefficients include the logit_scale. With a gradient of
    the entropy, coef_entropy * log2(the exponential) is added to coef_softmax / sum.
    """

    def begin(self):
        """Numbers and targets as in Logits, and coef_entropy."""
        return *super().begin(), cute.make_rmem_tensor((2,), Float32)

    @cute.jit
    def prepare(self, kept, args: DlogitsArgs, block: Block):
        rC, target, coef_entropy = kept
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            rC[None, r].fill(0.0)
            target[r], coef_entropy[r] = Int32(-1), Float32(0.0)
            if i < block.m:
                rC[None, r].store(vector_at(args.coefs, Int64(i) * 4, 4).load())
                target[r] = (args.slot_target + i).load() - args.v0 - block.col0
                if const_expr(args.coef_entropy is not None):
                    coef_entropy[r] = (args.coef_entropy + i).load()

    @cute.jit
    def __call__(self, acc, kept, args: DlogitsArgs, out: Output, block: Block):
        col0, n, thread = block.col0, block.n, block.thread
        rC, target, coef_entropy = kept
        scale_log2 = log2_scale(args.logit_scale)
        for j in cutlass.range_constexpr(self.num_pieces):
            self.logits(acc, j, self.columns(args.bias, j, col0, n, thread), args.softcap, block)
            weights = self.columns(args.class_weight, j, args.v0 + col0, args.v0 + n, thread)
            for v in self.values(j):
                self.value(acc, v, rC, target, coef_entropy, weights, scale_log2, 1.0 / args.softcap, thread)
            self.output(acc, j, out, block)

    @cute.jit
    def value(
        self, acc, v: cutlass.Constexpr[int], rC, target, coef_entropy, weights, scale_log2, inverse: Float32,
        thread: Int32,
    ):  # fmt: skip
        """In place: accumulator value v, a logit, becomes its gradient."""
        r = row_of(v)
        a = acc[v]
        coef, log2 = rC[1, r], (a - rC[0, r]) * scale_log2
        if const_expr(self.problem.entropy):
            coef = coef + coef_entropy[r] * cute.arch.fmax(log2, LEAST_LOG2)
        z = coef * cute.math.exp2(log2, fastmath=True)
        if const_expr(self.problem.smoothing):
            w = Float32(1.0)
            if const_expr(weights is not None):
                w = shared_column(weights, v, thread)
            z = z - rC[3, r] * w
        if column_of(v, thread) == target[r]:
            z = z - rC[2, r]
        if const_expr(self.problem.softcap):
            z = z * (1.0 - (a * inverse) * (a * inverse))
        acc[v] = z
