"""Stores a Blackwell GEMM's fp32 accumulator to global memory, through shared memory, a slice of columns at a time.

A thread of the epilogue has one row. A warp has buffers of its own, for pieces of its 32 rows x 128 bytes, so that no
barrier between warps is needed.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import blackwell_helpers as sm100

from quackish.kernels.arguments import DTYPES
from quackish.kernels.gemm.sm100_config import BUFFERS, EPILOGUE_WARPS, PIECE_BYTES, SLICE
from quackish.kernels.gemm.tile_store import Output, RowBlock
from quackish.kernels.memory import vector_at

WARP_ROWS = 32


class SliceStore:
    """Stores slices by TMA, or adds them to the output, which may be in two buffers.

    num_buffers: per warp; every tile must have a multiple of that many pieces.
    """

    def __init__(self, dtype: str, accumulate: bool = False, num_buffers: int = BUFFERS):
        self.dtype, self.accumulate, self.num_buffers = DTYPES[dtype], accumulate, num_buffers
        self.piece_n = PIECE_BYTES * 8 // self.dtype.width
        self.per_piece = self.piece_n // SLICE  # slices

    def layout(self):
        piece = (WARP_ROWS, self.piece_n)
        return sm100.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, piece, EPILOGUE_WARPS * self.num_buffers)

    def allocate(self, smem):
        layout = self.layout()
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def store_atom(self, mD):
        """(TMA atom, tensor of coordinates) that stores to D."""
        op = cpasync.CopyBulkTensorTileS2GOp()
        if self.accumulate:
            op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        return self.atom(op, mD)

    def atom(self, op, mD):
        piece = (WARP_ROWS, self.piece_n)
        atom, coordinates = cpasync.make_tiled_tma_atom(op, mD, cute.slice_(self.layout(), (None, None, 0)), piece)
        return atom, coordinates

    @cute.jit
    def __call__(self, x: cute.Tensor, piece, part: cutlass.Constexpr[int], out: Output, block: RowBlock, turn=None):
        """Rounds a slice, SLICE fp32 values per thread, and stores it: part `part` of the block's piece `piece`.

        Call for all slices in order. turn: counts the pieces of a tile, where more than D's are stored.
        """
        turn = piece if const_expr(turn is None) else turn
        buffer = block.thread // 32 * self.num_buffers + turn % self.num_buffers
        if const_expr(part == 0):
            self.wait_until_free(self.num_buffers - 1)
        self.write(x, out.staging, buffer, part, block.thread)
        if const_expr(part == self.per_piece - 1):
            self.wait_until_full()
            self.copy_out(out, buffer, block, piece)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def wait_until_free(self, pending: cutlass.Constexpr[int]):
        """Waits until TMA has read the warp's buffers of all but the last `pending` commit groups."""
        cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.sync_warp()

    @cute.jit
    def write(self, x: cute.Tensor, staging, buffer: Int32, part: cutlass.Constexpr[int], thread: Int32):
        """Writes a slice to part `part` of a buffer."""
        rounded = cute.make_rmem_tensor((SLICE,), self.dtype)
        rounded.store(x.load().to(self.dtype))
        cute.autovec_copy(rounded, self.row(staging, buffer, part, thread))

    def row(self, staging, buffer: Int32, part: int, thread: Int32):
        """The thread's SLICE values in part `part` of a buffer."""
        return cute.local_tile(staging[thread % 32, None, buffer], (SLICE,), (part,))

    @cute.jit
    def wait_until_full(self):
        """Waits until all threads of the warp have written, before TMA reads."""
        cute.arch.fence_view_async_shared()
        cute.arch.sync_warp()

    @cute.jit
    def copy_out(self, out: Output, buffer: Int32, block: RowBlock, piece):
        """Starts the store of a buffer to a piece of the block."""
        at = block.col0 // self.piece_n + piece
        if const_expr(len(out.atoms) == 1):
            self.copy_to(out.atoms[0], out.staging, buffer, block, at)
        elif at < out.split // self.piece_n:
            self.copy_to(out.atoms[0], out.staging, buffer, block, at)
        else:
            self.copy_to(out.atoms[1], out.staging, buffer, block, at - out.split // self.piece_n)

    def copy_to(self, d_atom, staging, buffer, block: RowBlock, piece):
        row = (block.row0 + block.thread // 32 * WARP_ROWS) // WARP_ROWS
        gD = cute.local_tile(d_atom[1], (WARP_ROWS, self.piece_n), (row, None))
        sD, gD = cpasync.tma_partition(
            d_atom[0], 0, cute.make_layout(1), cute.group_modes(staging, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(d_atom[0], sD[None, buffer], gD[None, piece])

    @cute.jit
    def finish(self, thread: Int32):
        """Waits until TMA has read the shared memory. Call before the CTA exits."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_columns(values: cute.Tensor, base: cute.Pointer, row: Int64, j: Int32, block: RowBlock):
    """Stores the values of slice j to a row that begins at base + row, 16 bytes at a time."""
    vec = const_expr(128 // base.dtype.width)
    for i in cutlass.range_constexpr(0, SLICE, vec):
        col = block.col0 + (j * SLICE + i)
        if col < block.n:  # both are multiples of 8
            vector_at(base, row + col, vec).store(cute.local_tile(values, (vec,), (i // vec,)).load())


@cute.jit
def column_value(values: Float32, v: cutlass.Constexpr[int]) -> Float32:
    """The value of column v of a slice, from values per column that are distributed over the warp."""
    return cute.arch.shuffle_sync(values, v)
