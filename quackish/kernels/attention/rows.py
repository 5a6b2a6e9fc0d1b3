"""Backward of attention: per row, shift = log2(e) * lse and delta = sum of do * o, minus lse's gradient."""

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.attention import AttentionRowsConfig, AttentionRowsProblem, RowsArgs
from quackish.kernels.common.arguments import fake_args
from quackish.kernels.common.dependent_launch import after_previous
from quackish.kernels.common.math import LOG2_E
from quackish.kernels.common.memory import load_at, vector_at


class AttentionRows:
    def __init__(self, problem: AttentionRowsProblem, config: AttentionRowsConfig):
        self.problem, self.config = problem, config

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: RowsArgs, stream: CUstream):
        tiles = cute.ceil_div(args.num_q, self.config.threads // self.config.lanes)
        self.kernel(args, tiles).launch(
            grid=[tiles * args.heads * args.batch, 1, 1], block=[self.config.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, args: RowsArgs, tiles: Int32):
        lanes = self.config.lanes
        cta, _, _ = cute.arch.block_idx()
        tile, of_head = cta % tiles, Int64(cta // tiles)
        batch, head = cta // tiles // args.heads, cta // tiles % args.heads
        tid, _, _ = cute.arch.thread_idx()
        row, column = tile * (self.config.threads // lanes) + tid // lanes, tid % lanes * 8
        after_previous()

        delta = Float32(0.0)
        if (row < args.num_q) & (column < args.d):
            o, do = (
                vector_at(t.base, Int64(batch) * t.batch + Int64(head) * t.head + Int64(row) * t.row + column, 8)
                .load().to(Float32)
                for t in (args.o, args.do)
            )  # fmt: skip
            delta = (o * do).reduce(cute.ReductionOp.ADD, Float32(0.0), 0)
        delta = cute.arch.warp_reduction_sum(delta, threads_in_group=lanes)
        if column == 0 and row < args.num_q:
            heads = Int64(args.heads) * args.batch
            lse = load_at(args.lse, of_head * args.num_q + row)
            shift = Float32(0.0) if lse == -Float32.inf else lse * LOG2_E
            if const_expr(args.dlse is not None):
                delta = delta - load_at(args.dlse, of_head * args.num_q + row)
            (args.stats + (of_head * args.stats_row + row)).store(shift)
            (args.stats + ((heads + of_head) * args.stats_row + row)).store(delta)
