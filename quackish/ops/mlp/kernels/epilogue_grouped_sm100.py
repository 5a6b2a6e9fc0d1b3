"""Blackwell's epilogues of grouped GEMMs, one per step of an MLP. epilogue_grouped*.py have the formulas.

A thread has one row, and 64 or 32 of its columns at a time: a piece, as `SliceStore` stores it.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.group_store_sm100 import GroupStoreSm100
from quackish.kernels.gemm.grouped_operands import GroupEpilogue
from quackish.kernels.gemm.slice_store import WARP_ROWS, column_value
from quackish.kernels.gemm.sm100_config import EPILOGUE_WARPS, PIECE_BYTES, SLICE
from quackish.kernels.gemm.tile_store import Output, RowBlock
from quackish.kernels.memory import vector_at
from quackish.ops.mlp.gemm_problems import DSCALES_COLUMNS, DownArgs, DownBackwardArgs, UpArgs
from quackish.ops.mlp.kernels.activations import activate_backward, activate_gate, activate_up, overflow_as_fp16
from quackish.ops.mlp.kernels.epilogue_grouped_backward import LoadedStaging
from quackish.ops.mlp.kernels.preactivation import DownBackwardMatrices, UpMatrices

HALF = SLICE // 2  # columns of z that DownBackward loads at a time; with SLICE, "geglu" and "geglu_erf" spill registers


class DownSm100(GroupEpilogue):
    """Stores D, for Down plus a bias and a residual."""

    def __init__(self, problem, config):
        super().__init__(problem, config, GroupStoreSm100(problem))

    @cute.jit
    def prepare(self, args: Optional[DownArgs], out: Output, block: RowBlock):
        """Loads the first piece of the residual."""
        if const_expr(args is not None and args.residual is not None):
            residual = cute.make_rmem_tensor((self.output.piece_n,), args.residual.dtype)
            self.load_residual(residual, args.residual, Int32(0), block)
            return residual

    @cute.jit
    def __call__(self, acc, residual, args: Optional[DownArgs], out: Output, block: RowBlock):
        pieces = const_expr(self.config.slices // self.output.per_piece)
        for piece in cutlass.range(pieces, unroll=1):
            for part in cutlass.range_constexpr(self.output.per_piece):
                j = piece * self.output.per_piece + part
                x = acc.load(j)
                if const_expr(args is not None and args.bias is not None):
                    self.add_bias(x, args.bias, block.n, Int32(0), block.col0 + j * SLICE, block)
                if const_expr(args is not None and args.residual is not None):
                    for v in cutlass.range_constexpr(SLICE):
                        x[v] = x[v] + residual[part * SLICE + v].to(Float32)
                    if const_expr(part + 1 == self.output.per_piece):
                        if piece + 1 < pieces:  # while this one is stored
                            self.load_residual(residual, args.residual, piece + 1, block)
                self.fill(x, block)
                self.output(x, piece, part, out, block)

    @cute.jit
    def fill(self, x: cute.Tensor, block: RowBlock):
        """Overwrites the values of rows that are not a product."""
        if block.group.is_filled:
            x.fill(block.group.fill)

    @cute.jit
    def add_bias(self, x: cute.Tensor, bias: cute.Pointer, width: Int32, first: Int32, col: Int32, block: RowBlock):
        """Adds bias[group, first + column], of `width` columns, to the values of the columns from col on."""
        row = Int64(cutlass.min(block.group.index, block.group.groups - 1)) * width + first
        lanes = (bias + (row + cutlass.min(col + block.thread % 32, block.n - 1))).load()
        for v in cutlass.range_constexpr(SLICE):
            x[v] = x[v] + column_value(lanes, v)

    @cute.jit
    def load_residual(self, values: cute.Tensor, residual: cute.Pointer, piece: Int32, block: RowBlock):
        """Loads a piece of the thread's row. Rows and columns out of the group's repeat its last ones."""
        row = cutlass.min(block.row0 + block.thread, block.live - 1)
        base = residual + Int64(block.start + row) * block.n
        for i in cutlass.range_constexpr(0, cute.size(values), 8):
            col = block.col0 + piece * self.output.piece_n + i
            vector = vector_at(base, cutlass.min(col, block.n - 8), 8).load()
            cute.local_tile(values, (8,), (i // 8,)).store(vector)

    @cute.jit
    def row_scale(self, scales: cute.Pointer, block: RowBlock) -> Float32:
        """The scale of the thread's row; 0 if it is not in a group."""
        s, row = Float32(0.0), block.row0 + block.thread
        if row < block.live and not block.group.is_filled:
            s = (scales + (block.start + row)).load()
        return s


class UpSm100(UpMatrices, DownSm100):
    """Stores the preactivation, with `keeps`, and its scaled activation."""

    @cute.jit
    def prepare(self, args: UpArgs, out: Output, block: RowBlock):
        return self.row_scale(args.scales, block) if const_expr(self.spec.scaled) else None

    @cute.jit
    def preactivation(self, acc, args: UpArgs, block: RowBlock, j: Int32, part: cutlass.Constexpr[int]) -> cute.Tensor:
        """Slice j of the gate's (part 0) or up's columns."""
        x = acc.load(part * (self.tile_cols // SLICE) + j)
        if const_expr(self.spec.biased):
            width, col = block.n * self.num_parts, block.col0 + j * SLICE
            self.add_bias(x, args.bias, width, block.n * part, col, block)
        if const_expr(self.problem.dtype == "float16"):  # backward reads it in fp16
            for v in cutlass.range_constexpr(SLICE):
                x[v] = overflow_as_fp16(x[v])
        self.fill(x, block)
        return x

    @cute.jit
    def __call__(self, acc, scale, args: UpArgs, out: Output, block: RowBlock):
        p, per_piece, stored = self.spec, self.output.per_piece, 1 + self.num_parts * self.spec.keeps
        for piece in cutlass.range(self.tile_cols // SLICE // per_piece, unroll=1):
            turn = piece * stored  # counts the pieces that are stored
            z = [
                [self.preactivation(acc, args, block, piece * per_piece + i, of) for i in range(per_piece)]
                for of in range(self.num_parts)
            ]
            if const_expr(p.keeps):
                for of in cutlass.range_constexpr(self.num_parts):
                    for i in cutlass.range_constexpr(per_piece):
                        self.output(z[of][i], piece, i, out.only(1 + of), block, turn + of)
            for i in cutlass.range_constexpr(per_piece):
                act = z[0][i]
                for v in cutlass.range_constexpr(SLICE):
                    a, _ = activate_gate(act[v], p.activation)
                    if const_expr(p.gated):
                        u, _ = activate_up(z[1][i][v], p.activation)
                        a = a * u
                    act[v] = a * scale if const_expr(p.scaled) else a
                self.output(act, piece, i, out.only(0), block, turn + stored - 1)


class DownBackwardSm100(DownBackwardMatrices, DownSm100):
    """As DownBackwardSm90, whose module has the formula. A warp loads its rows of z into buffers of its own."""

    @cute.jit
    def allocate(self, smem):
        buffers = self.output.allocate(smem)  # first: they are aligned
        loaded = smem.allocate_array(cutlass.Int64, EPILOGUE_WARPS * 2)
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(EPILOGUE_WARPS * 2):
                cute.arch.mbarrier_init(loaded + i, 1)
        return LoadedStaging(buffers, loaded)

    @property
    def pieces(self) -> int:
        return self.config.tile_n // self.output.piece_n

    def buffers(self, piece: int, thread: Int32):
        """Indices of the buffers of act and of z's parts: two sets, which the pieces alternate between."""
        act = thread // 32 * self.output.num_buffers
        return [act, *(act + 1 + piece % 2 * self.num_parts + part for part in range(self.num_parts))]

    def barrier(self, piece: int, staging: LoadedStaging, thread: Int32):
        return staging.loaded + thread // 32 * 2 + piece % 2

    @cute.jit
    def prepare(self, args: DownBackwardArgs, out: Output, block: RowBlock):
        self.output.wait_until_free(0)
        for piece in cutlass.range_constexpr(2):
            self.load(piece, out, block)
        return self.row_scale(args.scales, block) if const_expr(self.spec.scaled) else None

    @cute.jit
    def load(self, piece: cutlass.Constexpr[int], out: Output, block: RowBlock):
        """Starts to load a piece of z's parts."""
        barrier, buffers = self.barrier(piece, out.staging, block.thread), self.buffers(piece, block.thread)
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(barrier, self.num_parts * WARP_ROWS * PIECE_BYTES)
        for part in cutlass.range_constexpr(self.num_parts):
            atom = out.atoms[1 + self.num_parts + part]
            s, g = self.output.partition(atom, out.staging.buffers, block, piece)
            cute.copy(atom[0], g, s[None, buffers[1 + part]], tma_bar_ptr=barrier)

    @cute.jit
    def __call__(self, acc, scale, args: DownBackwardArgs, out: Output, block: RowBlock):
        p, output, staging, thread = self.spec, self.output, out.staging, block.thread
        stores = out._replace(staging=staging.buffers)
        for piece in cutlass.range_constexpr(self.pieces):
            buffers = self.buffers(piece, thread)
            # A tile has a multiple of 4 pieces (`grouped_gemm_sm100_why_illegal`), so all tiles have the same phases.
            cute.arch.mbarrier_wait(self.barrier(piece, staging, thread), piece // 2 % 2)
            acts, total = [], Float32(0.0)  # of dact * activation(z)
            for i in cutlass.range_constexpr(output.per_piece):
                dact = acc.load(const_expr(piece * output.per_piece + i))
                self.fill(dact, block)
                act = cute.make_rmem_tensor((SLICE,), Float32)
                rows = [output.row(staging.buffers, buffer, i, thread) for buffer in buffers[1:]]
                for half in cutlass.range_constexpr(2):
                    halves = [cute.local_tile(row, (HALF,), (half,)) for row in rows]
                    z = [cute.make_rmem_tensor((HALF,), output.dtype) for _ in rows]
                    for part in cutlass.range_constexpr(self.num_parts):
                        cute.autovec_copy(halves[part], z[part])
                    for v in cutlass.range_constexpr(HALF):
                        column = half * HALF + v
                        x = dact[column]
                        scaled = x * scale if const_expr(p.scaled) else x
                        a = activate_backward(scaled, z, v, p.activation)
                        if const_expr(p.scaled):
                            total = total + x * a
                            a = a * scale
                        act[column] = a
                    for part in cutlass.range_constexpr(self.num_parts):  # dz, in place of z
                        cute.autovec_copy(z[part], halves[part])
                acts.append(act)
            if const_expr(p.scaled):
                self.store_sum(total, args.dscales_parts, block, block.col0 + piece * DSCALES_COLUMNS)

            # stores, and the next load once the stores of the piece before have read its buffers
            output.wait_until_free(0)
            if const_expr(2 <= piece + 1 < self.pieces):
                self.load(piece + 1, out, block)
            for i in cutlass.range_constexpr(output.per_piece):
                output.write(acts[i], staging.buffers, buffers[0], i, thread)
            output.wait_until_full()
            for i in cutlass.range_constexpr(1 + self.num_parts):
                output.copy_out(stores.only(i), buffers[i], block, piece)
            cute.arch.cp_async_bulk_commit_group()

    @cute.jit
    def store_sum(self, total: Float32, parts: cute.Pointer, block: RowBlock, col: Int32):
        """Stores the sum of the thread's row over the DSCALES_COLUMNS columns from `col` on."""
        row = block.row0 + block.thread
        if row < block.live and col < block.n:
            (parts + (Int64(col // DSCALES_COLUMNS) * block.m + block.start + row)).store(total)
