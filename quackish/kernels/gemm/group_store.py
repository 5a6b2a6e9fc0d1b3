"""Stores a grouped GEMM's tiles on Hopper, to a group's rows or to its matrix, and loads such tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from quackish.kernels.gemm.grouped_operands import rows_of_group
from quackish.kernels.gemm.grouped_problem import grouped_gemm_buffers
from quackish.kernels.gemm.sm90_config import BLOCK_M
from quackish.kernels.gemm.tile_store import Output, RowBlock, TileStore


class GroupStore(TileStore):
    """Stores tiles of a group's rows, or of its matrix D[group]."""

    def __init__(self, problem, config):
        super().__init__(problem.out_dtype, config, problem.epilogue.accumulate, problem.piece_bytes)
        self.along_m = problem.along == "m"
        self.num_buffers = grouped_gemm_buffers(problem, config)

    @cute.jit
    def copy_out(self, out: Output, buffer: Int32, block: RowBlock, j: cutlass.Constexpr[int]):
        (atom,) = out.atoms
        sD, gD = self.partition(atom, out.staging, block, j)
        cute.copy(atom[0], sD[None, buffer], gD)

    def load_atom(self, mD):
        op = cpasync.CopyBulkTensorTileG2SOp()
        piece = (BLOCK_M, self.piece_n)
        return cpasync.make_tiled_tma_atom(op, mD, cute.slice_(self.layout(), (None, None, 0)), piece)

    def partition(self, atom: tuple, staging, block: RowBlock, j: int):
        """The buffers, and piece j of the block, as TMA copies them."""
        rows = rows_of_group(atom[1], block, block.row0, block.col0 + j * self.piece_n, self.along_m)
        g = cute.local_tile(rows, (BLOCK_M, self.piece_n), (0, 0))
        return cpasync.tma_partition(
            atom[0], 0, cute.make_layout(1), cute.group_modes(staging, 0, 2), cute.group_modes(g, 0, 2)
        )
