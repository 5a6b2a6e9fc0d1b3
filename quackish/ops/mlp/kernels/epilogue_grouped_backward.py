"""Hopper's epilogue of dact = dy @ w2.T, the gradient of the scaled activation of z, which is read again:

    dz = dact * scale * activation'(z)        act = scale * activation(z)        dscale = sum of dact * activation(z)

z has one part, or two: gate and up. A block is processed in pieces. TMA loads a piece of each part of z into buffers in
shared memory, where dz takes its place, and stores these buffers. There are two sets of them: the first two pieces of a
tile are loaded while its products are computed, each later piece while the one before it is stored. (Loading it earlier
spills registers with tiles of 192 columns.)
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.sm90_config import BLOCK_M
from quackish.kernels.gemm.tile_store import Output, RowBlock, row_of, thread_rows
from quackish.ops.mlp.gemm_problems import DSCALES_COLUMNS, DownBackwardArgs
from quackish.ops.mlp.kernels.activations import activate_backward
from quackish.ops.mlp.kernels.epilogue_grouped import DownSm90
from quackish.ops.mlp.kernels.preactivation import DownBackwardMatrices


class LoadedStaging(NamedTuple):
    buffers: cute.Tensor
    loaded: cute.Pointer  # mbarriers, per warp group and set of buffers


class DownBackwardSm90(DownBackwardMatrices, DownSm90):
    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.pieces_per_tile = config.row_blocks * self.output.num_pieces

    @cute.jit
    def allocate(self, smem):
        buffers = self.output.allocate(smem)  # first: they are aligned
        loaded = smem.allocate_array(Int64, self.config.num_wgs * 2)
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(self.config.num_wgs * 2):
                cute.arch.mbarrier_init(loaded + i, 1)
        return LoadedStaging(buffers, loaded)

    def buffers(self, piece: int, wg: Int32):
        """Indices of the buffers of act and of z's parts."""
        act = (wg - 1) * self.output.num_buffers
        return [act, *(act + 1 + piece % 2 * self.num_parts + part for part in range(self.num_parts))]

    def barrier(self, piece: int, staging: LoadedStaging, wg: Int32):
        return staging.loaded + (wg - 1) * 2 + piece % 2

    @cute.jit
    def prepare(self, args: DownBackwardArgs, out: Output, block: RowBlock):
        if const_expr(block.index == 0):
            if self.output.issues(block.thread):
                cute.arch.cp_async_bulk_wait_group(0, read=True)
                for piece in cutlass.range_constexpr(2):
                    self.load(piece, out, block)
        return self.row_scales(args.scales, block) if const_expr(self.spec.scaled) else None

    @cute.jit
    def load(self, piece: cutlass.Constexpr[int], out: Output, block: RowBlock):
        """Starts to load a piece of the tile, of this block or of one below it."""
        barrier = self.barrier(piece, out.staging, block.wg)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.num_parts * BLOCK_M * self.problem.piece_bytes)
        below, j = const_expr(piece // self.output.num_pieces - block.index), piece % self.output.num_pieces
        block, buffers = block._replace(row0=block.row0 + BLOCK_M * below), self.buffers(piece, block.wg)
        for part in cutlass.range_constexpr(self.num_parts):
            atom = out.atoms[1 + self.num_parts + part]
            s, g = self.output.partition(atom, out.staging.buffers, block, j)
            cute.copy(atom[0], g, s[None, buffers[1 + part]], tma_bar_ptr=barrier)

    @cute.jit
    def __call__(self, acc, scales, args: DownBackwardArgs, out: Output, block: RowBlock):
        p, staging, wg, thread = self.spec, out.staging, block.wg, block.thread
        self.fill(acc, range(cute.size(acc)), block.group)
        sums = cute.make_rmem_tensor((2,), Float32)  # of dact * activation(z), for the thread's two rows
        sums.fill(0.0)
        r2s, values, destinations, shape = self.output.parts(acc, staging.buffers, thread)
        act = cute.make_rmem_tensor(shape, self.output.dtype)
        for j in cutlass.range_constexpr(self.output.num_pieces):
            piece = const_expr(block.index * self.output.num_pieces + j)
            buffers = self.buffers(piece, wg)
            # A tile has a multiple of 4 pieces (`DownBackward.why_illegal`), so all tiles have the same phases.
            cute.arch.mbarrier_wait(self.barrier(piece, staging, wg), piece // 2 % 2)

            # dz, in place of z: 16 columns at a time, as more registers spill
            for k in cutlass.range_constexpr(shape[2]):
                z = [self.output.read(staging.buffers, buffer, shape, k, thread) for buffer in buffers[1:]]
                for v in cutlass.range_constexpr(cute.size(z[0])):
                    i = const_expr(k * cute.size(z[0]) + v)  # in the piece
                    r, dact = const_expr(row_of(i)), values[j * cute.size(act) + i]
                    scaled = dact * scales[r] if const_expr(p.scaled) else dact
                    f = activate_backward(scaled, z, v, p.activation)
                    if const_expr(p.scaled):
                        sums[r] = sums[r] + dact * f
                        f = f * scales[r]
                    act[i] = f.to(self.output.dtype)
                for part in cutlass.range_constexpr(self.num_parts):
                    cute.copy(r2s, z[part][None, None, 0], destinations[None, None, k, buffers[1 + part]])

            # dscale
            columns = const_expr((j + 1) * self.output.piece_n)
            if const_expr(p.scaled and columns % DSCALES_COLUMNS == 0):
                self.store_sums(sums, args.dscales_parts, block, block.col0 + columns - DSCALES_COLUMNS)
                sums.fill(0.0)

            # stores, and the next load once the stores of the piece before have read its buffers
            self.output.wait_until_free(0, wg, thread)
            if const_expr(2 <= piece + 1 < self.pieces_per_tile):
                if self.output.issues(thread):
                    self.load(piece + 1, out, block)
            cute.copy(r2s, act, destinations[None, None, None, buffers[0]])
            if self.output.wait_until_full(wg, thread):
                self.store(buffers, out, block, j)

    @cute.jit
    def store(self, buffers: list, out: Output, block: RowBlock, j: cutlass.Constexpr[int]):
        """Starts to store a piece of act and of dz's parts."""
        out = out._replace(staging=out.staging.buffers)
        for i in cutlass.range_constexpr(1 + self.num_parts):
            self.output.copy_out(out.only(i), buffers[i], block, j)
        cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_sums(self, sums, parts: cute.Pointer, block: RowBlock, col: Int32):
        """Stores the sums over the DSCALES_COLUMNS columns from `col` on, for which four threads share a row."""
        for r in cutlass.range_constexpr(2):
            total = sums[r]
            for offset in (1, 2):
                total = total + cute.arch.shuffle_sync_bfly(total, offset=offset)
            row = block.row0 + thread_rows(block.thread) + 8 * r
            if block.thread % 4 == 0 and row < block.live and col < block.n:
                at = Int64(col // DSCALES_COLUMNS) * block.m + block.start + row
                (parts + at).store(total)
