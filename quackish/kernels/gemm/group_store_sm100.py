"""Stores a grouped GEMM's tiles on Blackwell, to a group's rows or to its matrix, and loads such tiles."""

import cutlass.cute as cute
from cutlass import Int32
from cutlass.cute.nvgpu import cpasync

from quackish.kernels.gemm.grouped_operands import rows_of_group
from quackish.kernels.gemm.grouped_sm100_config import grouped_gemm_sm100_buffers
from quackish.kernels.gemm.slice_store import WARP_ROWS, SliceStore
from quackish.kernels.gemm.tile_store import Output, RowBlock


class GroupStoreSm100(SliceStore):
    """Stores tiles of a group's rows, or of its matrix D[group]."""

    def __init__(self, problem):
        super().__init__(problem.out_dtype, problem.epilogue.accumulate, grouped_gemm_sm100_buffers(problem))
        self.along_m = problem.along == "m"

    @cute.jit
    def copy_out(self, out: Output, buffer: Int32, block: RowBlock, piece):
        (atom,) = out.atoms
        sD, gD = self.partition(atom, out.staging, block, piece)
        cute.copy(atom[0], sD[None, buffer], gD)

    def load_atom(self, mD):
        return self.atom(cpasync.CopyBulkTensorTileG2SOp(), mD)

    def partition(self, atom: tuple, staging, block: RowBlock, piece):
        """The buffers, and a piece of the warp's rows, as TMA copies them."""
        row, col = block.row0 + block.thread // 32 * WARP_ROWS, block.col0 + piece * self.piece_n
        rows = rows_of_group(atom[1], block, row, col, self.along_m)
        g = cute.local_tile(rows, (WARP_ROWS, self.piece_n), (0, 0))
        return cpasync.tma_partition(
            atom[0], 0, cute.make_layout(1), cute.group_modes(staging, 0, 2), cute.group_modes(g, 0, 2)
        )
