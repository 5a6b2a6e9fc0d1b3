"""Blackwell's GEMM epilogue that stores D."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.problem import ScaledArgs
from quackish.kernels.gemm.slice_store import SliceStore
from quackish.kernels.gemm.tile_store import Output, RowBlock


class StoreSm100(Epilogue):
    """Stores D, times a factor if `scaled`, or adds it to an fp32 output; each element is written by one CTA."""

    def __init__(self, problem, config):
        super().__init__(problem, config, SliceStore(problem.out_dtype, problem.epilogue.accumulate))

    @cute.jit
    def __call__(self, acc, prefetched, args: Optional[ScaledArgs], out: Output, block: RowBlock):
        for piece in cutlass.range(self.config.slices // self.output.per_piece, unroll=1):
            for part in cutlass.range_constexpr(self.output.per_piece):
                x = acc.load(piece * self.output.per_piece + part)
                if const_expr(self.spec.scaled):
                    x.store(x.load() * args.factor.load())
                self.output(x, piece, part, out, block)
