"""The matrices of grouped GEMMs, as TMA tensors that serve all groups. Shared by the kernels of all GPUs."""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.tensor_utils import LayoutEnum

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.grouped_problem import GroupedGemmArgs
from quackish.kernels.gemm.ragged import EXTENT, ragged
from quackish.kernels.gemm.tile_store import Block


class GroupedOperands:
    """Methods of a kernel with `problem` and `epilogue`, a GroupMatrices."""

    @property
    def majors(self) -> tuple[str, str]:
        """The contiguous dimension of A ("k" or "m") and of B ("k" or "n")."""
        p = self.problem
        return ("k", p.b_major) if p.along == "m" else ("m", "n")

    @property
    def k_parts(self) -> int:
        """Matrices of B along k: w1 and w3."""
        return 2 if self.problem.b_in_two and self.problem.epilogue == "down" else 1

    def layouts(self):
        """(A's, B's)"""
        return tuple(LayoutEnum.ROW_MAJOR if major == "k" else LayoutEnum.COL_MAJOR for major in self.majors)

    @cute.jit
    def weights(self, base: cute.Pointer, n: Int32, k: Int32, group_stride: Int64, groups: Int32):
        """(n, k, groups)"""
        group_stride = cute.assume(group_stride, divby=8)
        if const_expr(self.problem.b_major == "k"):
            ld = cute.assume(Int64(k), divby=8)
            return cute.make_tensor(base, cute.make_layout((n, k, groups), stride=(ld, 1, group_stride)))
        ld = cute.assume(Int64(n), divby=8)
        return cute.make_tensor(base, cute.make_layout((n, k, groups), stride=(1, ld, group_stride)))

    @cute.jit
    def divided_rows(self, args: GroupedGemmArgs):
        """A, B's matrices, and the epilogue's outputs and inputs, if groups divide m."""
        p, n, k = self.problem, args.n, args.k
        ld = cute.assume(Int64(k) * self.k_parts, divby=8)
        mA = cute.make_tensor(args.a, cute.make_layout((args.rows, k * self.k_parts), stride=(ld, 1)))
        bases, group_stride = [args.b], Int64(n) * k
        if const_expr(p.b_in_two):
            bases = [args.b, args.second]
        elif const_expr(self.epilogue.has_pairs):
            bases, group_stride = [args.b, args.b + group_stride], group_stride * 2
        mBs = [self.weights(base, n, k, group_stride, args.groups) for base in bases]
        outputs, inputs = self.epilogue.outputs(args.epilogue, args.d, n), self.epilogue.inputs(args.epilogue, n)
        mDs = [ragged(base, n, Int64(width), True) for base, width in outputs]
        mZs = [ragged(base, n, Int64(width), True) for base, width in inputs]
        return mA, mBs, mDs, mZs

    @cute.jit
    def divided_k(self, args: GroupedGemmArgs):
        """The same as `divided_rows`, if groups divide k."""
        m, n = args.m, args.n
        ld, group_stride = cute.assume(Int64(n), divby=8), cute.assume(Int64(m) * n, divby=8)
        mD = cute.make_tensor(args.d, cute.make_layout((m, n, args.groups), stride=(ld, 1, group_stride)))
        return ragged(args.a, m, args.a_stride, False), [ragged(args.b, n, Int64(n), False)], [mD], []


class GroupMatrices(Epilogue):
    """Base class of the epilogues of grouped GEMMs."""

    def __init__(self, problem, config, output):
        super().__init__(problem, config, output)
        self.num_parts = 2 if problem.gated else 1  # of the preactivation: gate and up
        self.has_pairs = problem.epilogue == "up" and problem.gated  # gate and up columns, each half of a tile
        self.tile_cols = config.tile_n // (2 if self.has_pairs else 1)  # of D

    @cute.jit
    def outputs(self, args, d: cute.Pointer, n: Int32):
        """The matrices (rows, n) that are stored along m: [(base, leading dimension)]."""
        if const_expr(self.problem.epilogue == "down_backward"):
            return [(args.act, n), *self.parts(d, n)]
        if const_expr(self.problem.keeps):
            return [(d, n), *self.parts(args.preactivation, n)]
        return [(d, n)]

    @cute.jit
    def inputs(self, args, n: Int32):
        """The matrices (rows, n) that are loaded by TMA."""
        if const_expr(self.problem.epilogue == "down_backward"):
            return self.parts(args.preactivation, n)
        return []

    @cute.jit
    def parts(self, z: cute.Pointer, n: Int32):
        """gate and up of a matrix like the preactivation, as `outputs`."""
        return [(z + part * n, n * self.num_parts) for part in range(self.num_parts)]


def rows_of_group(coordinates, block: Block, row, col, along_m: bool):
    """A TMA tensor of D from (row, col) of the block's group on: of its rows, clipped at its end, or of D[group]."""
    if along_m:
        rows = coordinates[None, None, EXTENT, block.start + block.live]
        row += EXTENT - block.live
    else:
        rows = coordinates[None, None, block.group.index]
    return cute.domain_offset((row, col), rows)
