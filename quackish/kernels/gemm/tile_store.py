"""Stores a GEMM's fp32 accumulator to global memory, through shared memory, 128 bytes of each row at a time.

The WGMMA accumulator layout: a thread has values in two rows, 8 apart, of its warp group's block of 64. Value
i = 2 * pair + c is in row pair % 2, and in column 8 * (i // 4) + c counted from the thread's first column.
"""

import enum
from typing import Any, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warp
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from quackish.kernels.arguments import DTYPES
from quackish.kernels.gemm.sm90_config import BLOCK_M
from quackish.kernels.memory import vector_at


class NamedBarrier(enum.IntEnum):
    """What a consumer warp group waits for. Each warp group has a barrier of each kind."""

    FREE = 0  # the buffers of its output may be written
    FULL = 1  # the buffers of its output are written
    TAIL = 2  # its partial sums and its ticket, see split_k_tail.py
    ORDER = 3  # the other warp group of a ping-pong pair has issued its WGMMAs

    def of(self, wg, num_wgs: int):
        """The barrier's number; wg counts from 1, and barrier 0 is for the whole CTA."""
        return wg + self.value * num_wgs


@cute.jit
def thread_rows(thread: Int32) -> Int32:
    """The first of the thread's two rows, which are 8 apart."""
    return thread // 32 * 16 + thread % 32 // 4


@cute.jit
def column_of(i: cutlass.Constexpr[int], thread: Int32) -> Int32:
    """The column of value i in the tile."""
    return thread % 4 * 2 + (i // 4 * 8 + i % 2)


def row_of(i: int) -> int:
    """Which of a thread's two rows value i is in."""
    return i // 2 % 2


class Group(NamedTuple):
    """The group that a RowBlock of a grouped GEMM belongs to."""

    index: Int32
    groups: Int32  # their number
    is_filled: Boolean  # D is `fill` instead of a product: rows of no group, or illegal offsets
    fill: Float32


class RowBlock(NamedTuple):
    """Rows of a tile that one warp group has the accumulator of, and a thread of that warp group.

    BLOCK_M rows on Hopper, one CTA's 128 on Blackwell.
    """

    index: int  # the block's number in its tile, a compile-time constant
    row0: Int32  # the first row in D, or in the group if groups divide m
    col0: Int32  # the first column in D
    m: Int32  # D's rows; if groups divide k, the rows of A and B
    n: Int32  # D's columns
    live: Int32  # the number of live rows, or of the group's
    start: Optional[Int32]  # the first of these rows; absent without live rows
    thread: Int32  # in the warp group
    wg: Optional[Int32] = None  # from 1, on Hopper
    group: Optional[Group] = None


def block_below(first: RowBlock, b: int) -> RowBlock:
    """The b-th block of the tile with this first block."""
    return first._replace(index=b, row0=first.row0 + BLOCK_M * b)


class Output(NamedTuple):
    """Where D goes, and for grouped GEMMs the epilogue's other outputs and inputs."""

    atoms: list  # of TMA, with stores_by_tma: `store_atom` of D, or of its two buffers
    staging: Any  # the result of `allocate`
    split: Optional[Int32] = None  # the first column in the second buffer
    d: Optional[cute.Pointer] = None
    ldd: Optional[Int64] = None

    def only(self, i: int) -> "Output":
        """With the i-th atom alone."""
        return self._replace(atoms=[self.atoms[i]])


class Staging:
    """Swizzled buffers in shared memory: per warp group `num_buffers` pieces of BLOCK_M rows x `piece_n` columns.

    piece_bytes: of a row of a piece, the span of the swizzle: 128 or 64.
    """

    def __init__(self, dtype: str, config, piece_bytes: int = 128):
        self.dtype, self.num_wgs, self.tile_n = DTYPES[dtype], config.num_wgs, config.tile_n
        self.num_buffers = config.num_buffers
        self.piece_n = piece_bytes * 8 // self.dtype.width
        self.num_pieces = config.tile_n // self.piece_n

    def layout(self):
        piece = (BLOCK_M, self.piece_n)
        return sm90.make_smem_layout_epi(self.dtype, LayoutEnum.ROW_MAJOR, piece, self.num_wgs * self.num_buffers)

    def allocate(self, smem):
        layout = self.layout()
        return smem.allocate_tensor(self.dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)

    def buffer(self, j, wg):
        """Index of the buffer for piece j of a warp group."""
        return (wg - 1) * self.num_buffers + j % self.num_buffers

    def tiled_copy(self, atom):
        """Copies a piece between shared memory and registers, whose layout is that of the accumulator."""
        mma = sm90.make_trivial_tiled_mma(
            cutlass.BFloat16, cutlass.BFloat16, cute.nvgpu.OperandMajorMode.K, cute.nvgpu.OperandMajorMode.K, Float32,
            (1, 1, 1), tiler_mn=(BLOCK_M, self.tile_n),
        )  # fmt: skip
        c_atom = cute.make_tiled_copy_C_atom(
            cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cutlass.BFloat16), mma
        )
        return cute.make_tiled_copy_S(atom, c_atom)

    def parts(self, acc, staging, thread):
        """(tiled copy, the thread's values of all pieces, their destinations per buffer, their shape per piece)"""
        r2s = self.tiled_copy(sm90.sm90_get_smem_store_op(LayoutEnum.ROW_MAJOR, self.dtype, Float32))
        thr = r2s.get_slice(thread)
        return r2s, r2s.retile(acc), thr.partition_D(staging), cute.shape(thr.partition_S(staging))[:3]

    @cute.jit
    def read(self, staging, buffer, shape: cutlass.Constexpr, k: cutlass.Constexpr[int], thread: Int32):
        """The thread's values of the k-th 16 columns of a buffer, of 16 bits each."""
        s2r = self.tiled_copy(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), self.dtype)).get_slice(thread)
        values = cute.make_rmem_tensor((shape[0], shape[1], 1), self.dtype)
        cute.copy(s2r, s2r.partition_S(staging)[None, None, k, buffer], s2r.retile(values)[None, None, 0])
        return values

    @cute.jit
    def rounded(self, values, shape: cutlass.Constexpr, j: cutlass.Constexpr[int]):
        """Piece j of a thread's values, rounded to the output dtype."""
        piece = cute.make_rmem_tensor(shape, self.dtype)
        for v in cutlass.range_constexpr(cute.size(piece)):
            piece[v] = values[j * cute.size(piece) + v].to(self.dtype)
        return piece


class TileStore(Staging):
    """Stores tiles by TMA, or adds them to the output, which may be in two buffers."""

    def __init__(self, dtype: str, config, accumulate: bool = False, piece_bytes: int = 128):
        super().__init__(dtype, config, piece_bytes)
        self.accumulate = accumulate

    def store_atom(self, mD):
        op = cpasync.CopyBulkTensorTileS2GOp()
        if self.accumulate:
            op = cpasync.CopyReduceBulkTensorTileS2GOp(cute.ReductionKind.ADD)
        piece = (BLOCK_M, self.piece_n)
        atom, coordinates = cpasync.make_tiled_tma_atom(op, mD, cute.slice_(self.layout(), (None, None, 0)), piece)
        return atom, coordinates

    @cute.jit
    def __call__(self, acc, j: cutlass.Constexpr[int], out: Output, block: RowBlock, turn=None):
        """Rounds piece j of the accumulator and stores it.

        Call for all pieces in order, and compute a piece's values right before: that overlaps with the stores of the
        previous pieces. turn: counts the stores of a block, where there are more than one for each piece.
        """
        wg, thread = block.wg, block.thread
        r2s, values, destinations, shape = self.parts(acc, out.staging, thread)
        piece = self.rounded(values, shape, j)
        buffer = self.buffer(const_expr(j if turn is None else turn), wg)
        self.wait_until_free(self.num_buffers - 1, wg, thread)
        cute.copy(r2s, piece, destinations[None, None, None, buffer])
        if self.wait_until_full(wg, thread):
            self.copy_out(out, buffer, block, j)
            cute.arch.cp_async_bulk_commit_group()

    def issues(self, thread: Int32):
        """Whether the thread is in the warp that issues the warp group's TMA copies."""
        return cute.arch.make_warp_uniform(thread // 32) == 0

    @cute.jit
    def wait_until_free(self, pending: cutlass.Constexpr[int], wg: Int32, thread: Int32):
        """Waits until TMA has read the buffers of all but the last `pending` commit groups."""
        if self.issues(thread):
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
            cute.arch.barrier_arrive(barrier_id=NamedBarrier.FREE.of(wg, self.num_wgs), number_of_threads=128)
        else:
            cute.arch.barrier(barrier_id=NamedBarrier.FREE.of(wg, self.num_wgs), number_of_threads=128)

    @cute.jit
    def wait_until_full(self, wg: Int32, thread: Int32):
        """Call when the thread has written its values. True in the warp that issues, once all threads have."""
        cute.arch.fence_view_async_shared()
        issues = self.issues(thread)
        is_full = NamedBarrier.FULL.of(wg, self.num_wgs)
        if issues:
            cute.arch.barrier(barrier_id=is_full, number_of_threads=128)
        else:
            cute.arch.barrier_arrive(barrier_id=is_full, number_of_threads=128)
        return issues

    @cute.jit
    def copy_out(self, out: Output, buffer: Int32, block: RowBlock, j: cutlass.Constexpr[int]):
        """Starts the store of a buffer to piece j of the block."""
        at = block.col0 // self.piece_n + j
        if const_expr(len(out.atoms) == 1):
            self.copy_to(out.atoms[0], out.staging, buffer, block.row0, at)
        elif at < out.split // self.piece_n:
            self.copy_to(out.atoms[0], out.staging, buffer, block.row0, at)
        else:
            self.copy_to(out.atoms[1], out.staging, buffer, block.row0, at - out.split // self.piece_n)

    def copy_to(self, d_atom, staging, buffer, row0, piece):
        # The whole warp stores. With uniform operands ptxas issues one UTMASTG. To add, CuTe DSL elects a thread.
        gD = cute.local_tile(d_atom[1], (BLOCK_M, self.piece_n), (row0 // BLOCK_M, None))
        sD, gD = cpasync.tma_partition(
            d_atom[0], 0, cute.make_layout(1), cute.group_modes(staging, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(d_atom[0], sD[None, buffer], gD[None, piece])

    @cute.jit
    def finish(self, thread: Int32):
        """Waits until TMA has read the shared memory. Call before the CTA exits."""
        if cute.arch.make_warp_uniform(thread // 32) == 0:
            cute.arch.cp_async_bulk_wait_group(0, read=True)


class RowStore(Staging):
    """Stores each row of a tile to a row of the output given by index; 16 bytes per thread, 128 bytes per row."""

    @cute.jit
    def __call__(self, acc, out: Output, rows, block: RowBlock):
        """`rows`: output rows of rows thread // 8 + 16 * k, k < 4, of the block's 64; negative: do not store."""
        staging, wg, thread = out.staging, block.wg, block.thread
        r2s, values, destinations, shape = self.parts(acc, staging, thread)
        vec = const_expr(128 // self.dtype.width)
        is_free = NamedBarrier.FREE.of(wg, self.num_wgs)
        for j in cutlass.range_constexpr(self.num_pieces):
            buffer = self.buffer(j, wg)
            if const_expr(self.num_buffers == 1):
                cute.arch.barrier(barrier_id=is_free, number_of_threads=128)
            cute.copy(r2s, self.rounded(values, shape, j), destinations[None, None, None, buffer])
            # With two buffers one barrier per piece is enough: past it, all threads have read the previous piece.
            cute.arch.barrier(barrier_id=is_free, number_of_threads=128)
            col = block.col0 + j * self.piece_n + thread % 8 * vec
            for k in cutlass.range_constexpr(4):
                if (rows[k] >= 0) & (col < block.n):
                    source = cute.local_tile(staging[None, None, buffer], (1, vec), (thread // 8 + 16 * k, thread % 8))
                    vector_at(out.d, Int64(rows[k]) * out.ldd + col, vec).store(source.load().reshape((vec,)))

    @cute.jit
    def finish(self, thread: Int32):
        pass
