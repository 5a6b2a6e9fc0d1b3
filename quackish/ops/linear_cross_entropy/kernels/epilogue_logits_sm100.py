"""Blackwell's epilogues of the logits GEMMs: exp_logits with statistics, and the gradient of the logits."""

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.slice_store import SliceStore, column_value
from quackish.kernels.gemm.sm100_config import SLICE
from quackish.kernels.gemm.tile_store import Output, RowBlock
from quackish.kernels.math import encode_argmax, tanh
from quackish.kernels.memory import vector_at
from quackish.ops.linear_cross_entropy.gemm_problems import DlogitsArgs, SoftmaxArgs
from quackish.ops.linear_cross_entropy.kernels.dlogits_rows import DlogitsRows
from quackish.ops.linear_cross_entropy.kernels.exponents import log2_scale
from quackish.ops.linear_cross_entropy.kernels.softmax_rows import RowSums, SoftmaxRows


class LogitsSm100(Epilogue):
    """Base class: applies bias and softcap and masks the columns past the last class. A thread has one row.

    Loops over pieces are not unrolled: ptxas would interleave them, and up to 176 bytes would spill.
    """

    def __init__(self, problem, config):
        super().__init__(problem, config, None if problem.out_dtype is None else SliceStore(problem.out_dtype))
        self.per_piece = 1 if self.output is None else self.output.per_piece  # slices
        self.num_pieces = config.slices // self.per_piece

    @cute.jit
    def columns(self, vector: cute.Pointer | None, first: Int32, end: Int32, thread: Int32):
        """One value per column of a slice, distributed over the warp, for `column_value`; None if `vector` is."""
        if const_expr(vector is None):
            return None
        return (vector + cutlass.min(first + thread % 32, end - 1)).load().to(Float32)

    @cute.jit
    def logits(self, x: cute.Tensor, first: Int32, bias, softcap: Float32, block: RowBlock):
        """Makes the products of the columns from `first` on logits, -inf past the last class. bias: of `columns`."""
        for v in cutlass.range_constexpr(SLICE):
            if const_expr(bias is not None):
                x[v] = x[v] + column_value(bias, v)
            if const_expr(self.spec.softcap):
                x[v] = tanh(x[v] * (1.0 / softcap)) * softcap
        if first + SLICE > block.n:
            for v in cutlass.range_constexpr(SLICE):
                x[v] = -Float32.inf if first + v >= block.n else x[v]


class SoftmaxSm100(SoftmaxRows, LogitsSm100):
    """As SoftmaxSm90, which documents what is stored."""

    @cute.jit
    def prepare(self, args: SoftmaxArgs, out: Output, block: RowBlock):
        """row_shift of the thread's row, in log2 units, and the column of its target in the tile."""
        i, shift_log2, target = block.row0 + block.thread, Float32(0.0), Int32(-1)
        if i < block.m:
            shift_log2 = self.row_shift_log2(args, i, log2_scale(args.logit_scale))
            target = (args.slot_target + i).load() - block.col0
        return shift_log2, target

    @cute.jit
    def __call__(self, acc, prefetched, args: SoftmaxArgs, out: Output, block: RowBlock):
        (shift_log2, target), col0, n, thread = prefetched, block.col0, block.n, block.thread
        scale_log2, stats, i = log2_scale(args.logit_scale), self.empty_stats(1), block.row0 + thread
        inverse = 1.0 / args.softcap
        for piece in cutlass.range(self.num_pieces, unroll=1):
            for part in cutlass.range_constexpr(self.per_piece):
                j = piece * self.per_piece + part
                column, first = j * SLICE, col0 + j * SLICE
                bias = self.columns(args.bias, first, n, thread)
                weights = self.columns(args.class_weight, first, n, thread)
                x = acc.load(j)
                self.logits(x, first, bias, args.softcap, block)
                if (target >= column) & (target < column + SLICE):
                    a = Float32(0.0)
                    for v in cutlass.range_constexpr(SLICE):
                        a = x[v] if target == column + v else a
                    (args.target_logit + i).store(a)
                for v in cutlass.range_constexpr(SLICE):
                    if const_expr(self.spec.smoothing):
                        w = None if const_expr(weights is None) else column_value(weights, v)
                        if first + v < n:  # -inf past the last class
                            self.add_weighted(x[v], w, 0, stats)
                    x[v] = self.exponential(x[v], 0, column + v, stats, scale_log2, shift_log2, inverse)
                if const_expr(self.output is not None):
                    self.output(x, piece, part, out, block)
        code = None
        if const_expr(self.updates_argmax):
            code = encode_argmax(stats.max[0], col0 + stats.argmax[0])
        sums = RowSums(stats.max[0], stats.sum[0], stats.wsum[0], stats.elog[0])
        at = Int64(i) * args.tiles + col0 // self.config.tile_n
        self.store_sums(args, i, at, sums, code, i < block.m)
        self.flag(args, i, sums.max, block.m, scale_log2, shift_log2)


class DlogitsSm100(DlogitsRows, LogitsSm100):
    """As DlogitsSm90, which has the formula."""

    @cute.jit
    def prepare(self, args: DlogitsArgs, out: Output, block: RowBlock):
        """The coefficients of the thread's row, the column of its target in the tile, and coef_entropy."""
        coefs, target, coef_entropy = cute.make_rmem_tensor((4, 1), Float32), Int32(-1), Float32(0.0)
        coefs.fill(0.0)
        i = block.row0 + block.thread
        if i < block.m:
            coefs[None, 0].store(vector_at(args.coefs, Int64(i) * 4, 4).load())
            target = (args.slot_target + i).load() - args.v0 - block.col0
            if const_expr(args.coef_entropy is not None):
                coef_entropy = (args.coef_entropy + i).load()
        return coefs, target, coef_entropy

    @cute.jit
    def __call__(self, acc, prefetched, args: DlogitsArgs, out: Output, block: RowBlock):
        (coefs, target, coef_entropy), n, thread = prefetched, block.n, block.thread
        scale_log2, inverse = log2_scale(args.logit_scale), 1.0 / args.softcap
        for piece in cutlass.range(self.num_pieces, unroll=1):
            for part in cutlass.range_constexpr(self.per_piece):
                j = piece * self.per_piece + part
                column, first = j * SLICE, block.col0 + j * SLICE
                bias = self.columns(args.bias, first, n, thread)
                weights = self.columns(args.class_weight, args.v0 + first, args.v0 + n, thread)
                x = acc.load(j)
                self.logits(x, first, bias, args.softcap, block)
                for v in cutlass.range_constexpr(SLICE):
                    w = None if const_expr(weights is None) else functools.partial(column_value, weights, v)
                    x[v] = self.gradient(x[v], coefs, coef_entropy, 0, column + v, target, w, scale_log2, inverse)
                self.output(x, piece, part, out, block)
