"""Epilogue of Hopper's logits GEMM in a backward pass: the gradient of the logits."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.tile_store import Output, RowBlock, column_of, row_of, thread_rows
from quackish.kernels.memory import vector_at
from quackish.ops.linear_cross_entropy.gemm_problems import DlogitsArgs
from quackish.ops.linear_cross_entropy.kernels.dlogits_rows import DlogitsRows
from quackish.ops.linear_cross_entropy.kernels.exponents import log2_scale
from quackish.ops.linear_cross_entropy.kernels.logits import LogitsSm90, column_value


class DlogitsSm90(DlogitsRows, LogitsSm90):
    """The gradient of logit a of class c, in a row with target t; d is the softcap's derivative:

        (coef_softmax / sum * e - coef_smooth * class_weight[c] - (c == t) * coef_target) * d,  e = exp(a - row_shift)

    coefs (rows, 4) holds row_shift, coef_softmax / sum, coef_target and coef_smooth of each row. With a logit_scale,
    e = exp(logit_scale * (a - row_shift)), and the coefficients include the logit_scale. If the entropy has a gradient,
    coef_entropy * log2(e) is added to coef_softmax / sum.
    """

    @cute.jit
    def prepare(self, args: DlogitsArgs, out: Output, block: RowBlock):
        """The coefficients of the thread's two rows, the columns of their targets in the tile, and coef_entropy."""
        rCoefs, target = cute.make_rmem_tensor((4, 2), Float32), cute.make_rmem_tensor((2,), Int32)
        coef_entropy = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            i = block.row0 + thread_rows(block.thread) + 8 * r
            rCoefs[None, r].fill(0.0)
            target[r], coef_entropy[r] = Int32(-1), Float32(0.0)
            if i < block.m:
                rCoefs[None, r].store(vector_at(args.coefs, Int64(i) * 4, 4).load())
                target[r] = (args.slot_target + i).load() - args.v0 - block.col0
                if const_expr(args.coef_entropy is not None):
                    coef_entropy[r] = (args.coef_entropy + i).load()
        return rCoefs, target, coef_entropy

    @cute.jit
    def __call__(self, acc, prefetched, args: DlogitsArgs, out: Output, block: RowBlock):
        col0, n, thread = block.col0, block.n, block.thread
        rCoefs, target, coef_entropy = prefetched
        scale_log2 = log2_scale(args.logit_scale)
        for j in cutlass.range_constexpr(self.num_pieces):
            self.make_logits(acc, j, self.columns(args.bias, j, col0, n, thread), args.softcap, block)
            weights = self.columns(args.class_weight, j, args.v0 + col0, args.v0 + n, thread)
            inverse = 1.0 / args.softcap
            for v in self.values(j):
                r = row_of(v)
                w = None if weights is None else functools.partial(column_value, weights, v, thread)
                column = column_of(v, thread)
                acc[v] = self.gradient(acc[v], rCoefs, coef_entropy[r], r, column, target[r], w, scale_log2, inverse)
            self.output(acc, j, out, block)
