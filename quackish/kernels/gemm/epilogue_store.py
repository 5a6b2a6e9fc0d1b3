"""Hopper's GEMM epilogue that stores D."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.problem import ScaledArgs
from quackish.kernels.gemm.tile_store import Output, RowBlock, TileStore


class StoreSm90(Epilogue):
    """Stores D, times a factor if `scaled`, or adds it to an fp32 output; each element is written by one CTA."""

    def __init__(self, problem, config):
        super().__init__(problem, config, TileStore(problem.out_dtype, config, problem.epilogue.accumulate))

    @cute.jit
    def __call__(self, acc, prefetched, args: Optional[ScaledArgs], out: Output, block: RowBlock):
        if const_expr(self.spec.scaled):
            factor = args.factor.load()
            for v in cutlass.range_constexpr(cute.size(acc)):
                acc[v] = acc[v] * factor
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, out, block)
