"""An operation's GEMM with an epilogue of its own, as `quackish.kernels.gemm.epilogues` says: D plus a bias per row."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute

from quackish.device.arguments import F32
from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.problem import EpilogueSpec
from quackish.kernels.gemm.slice_store import SliceStore
from quackish.kernels.gemm.sm90 import GemmSm90
from quackish.kernels.gemm.sm100 import GemmSm100
from quackish.kernels.gemm.tile_store import Output, RowBlock, TileStore, row_of, thread_rows


class RowBiasArgs(NamedTuple):
    bias: Any = F32  # (m,)


@dataclasses.dataclass(frozen=True)
class RowBias(EpilogueSpec):
    def args(self, dtype: str) -> RowBiasArgs:
        return RowBiasArgs()


class RowBiasSm90(Epilogue):
    def __init__(self, problem, config):
        super().__init__(problem, config, TileStore(problem.out_dtype, config))

    @cute.jit
    def __call__(self, acc, prefetched, args: RowBiasArgs, out: Output, block: RowBlock):
        for v in cutlass.range_constexpr(cute.size(acc)):
            row = block.row0 + thread_rows(block.thread) + 8 * row_of(v)
            acc[v] = acc[v] + (args.bias + cutlass.min(row, block.m - 1)).load()
        for j in cutlass.range_constexpr(self.output.num_pieces):
            self.output(acc, j, out, block)


class RowBiasSm100(Epilogue):
    def __init__(self, problem, config):
        super().__init__(problem, config, SliceStore(problem.out_dtype))

    @cute.jit
    def __call__(self, acc, prefetched, args: RowBiasArgs, out: Output, block: RowBlock):
        bias = (args.bias + cutlass.min(block.row0 + block.thread, block.m - 1)).load()
        for piece in cutlass.range(self.config.slices // self.output.per_piece, unroll=1):
            for part in cutlass.range_constexpr(self.output.per_piece):
                x = acc.load(piece * self.output.per_piece + part)
                x.store(x.load() + bias)
                self.output(x, piece, part, out, block)


class ToyGemmSm90(GemmSm90):
    epilogues: ClassVar = {**GemmSm90.epilogues, RowBias: RowBiasSm90}


class ToyGemmSm100(GemmSm100):
    epilogues: ClassVar = {**GemmSm100.epilogues, RowBias: RowBiasSm100}
