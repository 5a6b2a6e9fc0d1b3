"""Backward of attention: per row, the shift of its scores and delta = sum of do * o, minus lse's gradient.

The shift is log2(e) * lse, and 0 for a row without keys. If |lse| > LARGE, where this product has lost digits, the
shift is infinite, and a pair of numbers is stored: lse, and log2(e) times its residual.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import fake_args
from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.math import LOG2_E
from quackish.kernels.memory import load_at, vector_at
from quackish.ops.attention.arguments import LARGE, RowsArgs
from quackish.ops.attention.config import AttentionRowsConfig
from quackish.ops.attention.problems import AttentionRowsProblem


class AttentionRows:
    def __init__(self, problem: AttentionRowsProblem, config: AttentionRowsConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: RowsArgs, stream: CUstream):
        tiles = cute.ceil_div(args.num_q, self.config.threads // self.lanes(args) * self.config.rows_per_thread)
        self.kernel(args, tiles).launch(
            grid=[tiles * args.heads * args.batch, 1, 1], block=[self.config.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.jit
    def lanes(self, args: RowsArgs) -> Int32:
        """Lanes per row. Each has 8 columns."""
        lanes = Int32(8) if args.d <= 64 else Int32(16)
        return Int32(4) if args.d <= 32 else lanes

    @cute.kernel
    def kernel(self, args: RowsArgs, tiles: Int32):
        lanes, rows_per_thread = self.lanes(args), self.config.rows_per_thread
        cta, _, _ = cute.arch.block_idx()
        tile, of_head = cta % tiles, Int64(cta // tiles)
        batch, head = cta // tiles // args.heads, cta // tiles % args.heads
        tid, _, _ = cute.arch.thread_idx()
        step = self.config.threads // lanes
        first, column = tile * (step * rows_per_thread) + tid // lanes, tid % lanes * 8
        after_previous()

        # All of a thread's loads are in flight together. Rows past the end are read as the last one.
        deltas = [Float32(0.0)] * rows_per_thread
        if column < args.d:
            vectors = []
            for i in cutlass.range_constexpr(rows_per_thread):
                row = Int64(cutlass.min(first + i * step, args.num_q - 1))
                for t in (args.o, args.do):
                    at = Int64(batch) * t.batch + Int64(head) * t.head + row * t.row + column
                    vectors.append(vector_at(t.base, at, 8).load())
            for i in cutlass.range_constexpr(rows_per_thread):
                products = vectors[2 * i].to(Float32) * vectors[2 * i + 1].to(Float32)
                deltas[i] = products.reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        plane = Int64(args.heads) * args.batch * args.stats_row
        for i in cutlass.range_constexpr(rows_per_thread):
            row, delta = first + i * step, deltas[i]
            for offset in (4, 2, 1, 8):
                added = cute.arch.shuffle_sync_bfly(delta, offset=offset)
                delta = delta + (added if offset < lanes else Float32(0.0))
            if column == 0 and row < args.num_q:
                lse = load_at(args.lse, of_head * args.num_q + row)
                shift, at = lse * LOG2_E, args.stats + (of_head * args.stats_row + row)
                if lse == -Float32.inf:
                    shift = Float32(0.0)
                elif (lse > LARGE) | (lse < -LARGE):
                    residual = load_at(args.lse_residual, of_head * args.num_q + row)
                    pair = args.stats + 2 * (plane + of_head * args.stats_row + row)
                    pair.store(lse)
                    (pair + 1).store(residual * LOG2_E)
                    shift = Float32.inf
                if const_expr(args.dlse is not None):
                    delta = delta - load_at(args.dlse, of_head * args.num_q + row)
                at.store(shift)
                (at + plane).store(delta)
