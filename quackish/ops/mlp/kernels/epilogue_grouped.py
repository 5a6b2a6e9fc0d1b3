"""Hopper's epilogues of grouped GEMMs, one per step of an MLP, on tiles of one group."""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.gemm.group_store import GroupStore
from quackish.kernels.gemm.grouped_operands import GroupEpilogue
from quackish.kernels.gemm.tile_store import Group, Output, RowBlock, column_of, row_of, thread_rows
from quackish.kernels.memory import vector_at
from quackish.ops.mlp.gemm_problems import DownArgs, UpArgs
from quackish.ops.mlp.kernels.activations import activate_gate, activate_up, overflow_as_fp16
from quackish.ops.mlp.kernels.preactivation import UpMatrices


class DownSm90(GroupEpilogue):
    """Stores D, for Down plus a bias and a residual."""

    def __init__(self, problem, config):
        super().__init__(problem, config, GroupStore(problem, config))
        self.prefetches_residual = config.row_blocks * config.tile_n <= 256  # with more accumulators, registers spill

    @cute.jit
    def prepare(self, args: Optional[DownArgs], out: Output, block: RowBlock):
        """Loads the first piece of the residual."""
        if const_expr(args is not None and args.residual is not None):
            if const_expr(self.prefetches_residual):
                return self.load_residual(args.residual, 0, block)

    @cute.jit
    def __call__(self, acc, residual, args: Optional[DownArgs], out: Output, block: RowBlock):
        per_piece = const_expr(self.output.piece_n // 2)
        for j in cutlass.range_constexpr(self.output.num_pieces):
            values = range(j * per_piece, (j + 1) * per_piece)
            if const_expr(
                args is not None and args.bias is not None
            ):  # by pieces: registers spill where all of the bias is loaded first
                piece = block._replace(col0=block.col0 + j * self.output.piece_n)
                self.add_bias(acc, values, args.bias, block.n, 0, piece)
            if const_expr(args is not None and args.residual is not None):
                if const_expr(not self.prefetches_residual):
                    residual = self.load_residual(args.residual, j, block)
                for i in cutlass.range_constexpr(per_piece // 2):
                    two = cute.make_rmem_tensor((2,), args.residual.dtype)
                    cute.recast_tensor(two, Int32)[0] = residual[i]
                    for c in cutlass.range_constexpr(2):
                        v = j * per_piece + 2 * i + c
                        acc[v] = acc[v] + two[c].to(Float32)
                if const_expr(self.prefetches_residual and j + 1 < self.output.num_pieces):  # while this one is stored
                    residual = self.load_residual(args.residual, j + 1, block)
            self.fill(acc, values, block.group)
            self.output(acc, j, out, block)

    @cute.jit
    def fill(self, acc, values: cutlass.Constexpr[range], group: Group):
        """Overwrites these values of rows that are not a product."""
        if group.is_filled:
            for v in cutlass.range_constexpr(values.start, values.stop):
                acc[v] = group.fill

    @cute.jit
    def add_bias(
        self, acc, values: cutlass.Constexpr[range], bias: cute.Pointer, width: Int32, first: Int32, block: RowBlock
    ):
        """Adds bias[group, first + column], of `width` columns, to these values of acc, whose first column is col0."""
        row = Int64(cutlass.min(block.group.index, block.group.groups - 1)) * width + first
        base = bias + (row + block.col0 + column_of(0, block.thread))
        columns = block.n - block.col0
        for i in cutlass.range_constexpr(values.start, values.stop, 4):
            col = const_expr((i - values.start) * 2)
            if col < columns:  # both are multiples of 8
                two = vector_at(base, col, 2).load()
                for v in cutlass.range_constexpr(4):
                    acc[i + v] = acc[i + v] + two[v % 2]

    @cute.jit
    def load_residual(self, residual: cute.Pointer, j: cutlass.Constexpr[int], block: RowBlock):
        """Piece j of the thread's rows, two values per word. Rows past the group's repeat its last one."""
        words, columns, bases = [], block.n - block.col0, []
        for r in cutlass.range_constexpr(2):
            row = cutlass.min(block.row0 + thread_rows(block.thread) + 8 * r, block.live - 1)
            bases.append(residual + (Int64(block.start + row) * block.n + block.col0 + column_of(0, block.thread)))
        for i in cutlass.range_constexpr(self.output.piece_n // 4):
            col, word = const_expr(j * self.output.piece_n + i // 2 * 8), Int32(0)
            if col < columns:  # both are multiples of 8
                word = cute.recast_tensor(vector_at(bases[i % 2], col, 2), Int32)[0]
            words.append(word)
        return words

    @cute.jit
    def row_scales(self, scales: cute.Pointer, block: RowBlock):
        """The scales of the thread's two rows; 0 for rows that are not in a group."""
        s = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            s[r] = Float32(0.0)
            row = block.row0 + thread_rows(block.thread) + 8 * r
            if row < block.live and not block.group.is_filled:
                s[r] = (scales + (block.start + row)).load()
        return s


class UpSm90(UpMatrices, DownSm90):
    """Stores the preactivation, with `keeps`, and its scaled activation."""

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.pieces_per_part = self.output.num_pieces // self.num_parts

    @cute.jit
    def prepare(self, args: UpArgs, out: Output, block: RowBlock):
        return self.row_scales(args.scales, block) if const_expr(self.spec.scaled) else None

    @cute.jit
    def finish_piece(self, acc, args: UpArgs, block: RowBlock, j: cutlass.Constexpr[int]):
        """Makes piece j of the products the preactivation."""
        part, per_piece = j // self.pieces_per_part, self.output.piece_n // 2
        values = range(j * per_piece, (j + 1) * per_piece)
        if const_expr(self.spec.biased):
            first = block._replace(col0=block.col0 + (j - part * self.pieces_per_part) * self.output.piece_n)
            self.add_bias(acc, values, args.bias, block.n * self.num_parts, block.n * part, first)
        if const_expr(self.problem.dtype == "float16"):  # backward reads it in fp16
            for v in cutlass.range_constexpr(values.start, values.stop):
                acc[v] = overflow_as_fp16(acc[v])
        self.fill(acc, values, block.group)

    @cute.jit
    def __call__(self, acc, scales, args: UpArgs, out: Output, block: RowBlock):
        p = self.spec
        per_part, per_piece = const_expr(cute.size(acc) // self.num_parts), self.output.piece_n // 2  # of a thread

        # the preactivation
        if const_expr(p.keeps):
            for j in cutlass.range_constexpr(self.output.num_pieces):
                part = const_expr(j // self.pieces_per_part)
                of_part = block._replace(col0=block.col0 - part * self.tile_cols)
                self.finish_piece(acc, args, block, j)
                self.output(acc, j, out.only(1 + part), of_part, j)

        # the activation
        stored = const_expr(self.output.num_pieces if p.keeps else 0)
        for j in cutlass.range_constexpr(self.pieces_per_part):
            if const_expr(not p.keeps):  # here, as registers spill where all of the bias is loaded first
                for part in cutlass.range_constexpr(self.num_parts):
                    self.finish_piece(acc, args, block, part * self.pieces_per_part + j)
            for v in cutlass.range_constexpr(j * per_piece, (j + 1) * per_piece):
                a, _ = activate_gate(acc[v], p.activation)
                if const_expr(p.gated):
                    u, _ = activate_up(acc[per_part + v], p.activation)
                    a = a * u
                if const_expr(p.scaled):
                    a = a * scales[row_of(v)]
                acc[v] = a
            self.output(acc, j, out.only(0), block, stored + j)
