"""The matrices of grouped GEMMs, as TMA tensors that serve all groups. Shared by the kernels of all GPUs."""

import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.grouped_problem import GroupedGemmArgs
from quackish.kernels.gemm.ragged import EXTENT, ragged
from quackish.kernels.gemm.tile_store import RowBlock


class GroupedOperands:
    """Methods of a kernel whose problem is a GroupedGemmProblem and whose epilogue is a GroupEpilogue."""

    in_atoms = ("a", "b", "second", "d", "a_stride", "max_clusters")

    @property
    def has_pairs(self) -> bool:
        return self.problem.epilogue.has_pairs

    @property
    def majors(self) -> tuple[str, str]:
        """The contiguous dimension of A ("k" or "m") and of B ("k" or "n")."""
        p = self.problem
        return ("k", p.b_major) if p.along == "m" else ("m", "n")

    @cute.jit
    def num_clusters(self, args: GroupedGemmArgs) -> Int32:
        """Clusters of the grid: the host does not know the number of tiles."""
        return args.max_clusters

    @cute.jit
    def matrices(self, args: GroupedGemmArgs):
        """A's and B's matrices, and the epilogue's outputs and inputs."""
        return self.divided_rows(args) if const_expr(self.problem.along == "m") else self.divided_k(args)

    @cute.jit
    def b_matrix(self, base: cute.Pointer, n: Int32, k: Int32, group_stride: Int64, groups: Int32):
        """(n, k, groups)"""
        group_stride = cute.assume(group_stride, divby=8)
        if const_expr(self.problem.b_major == "k"):
            ld = cute.assume(Int64(k), divby=8)
            return cute.make_tensor(base, cute.make_layout((n, k, groups), stride=(ld, 1, group_stride)))
        ld = cute.assume(Int64(n), divby=8)
        return cute.make_tensor(base, cute.make_layout((n, k, groups), stride=(1, ld, group_stride)))

    @cute.jit
    def divided_rows(self, args: GroupedGemmArgs):
        """`matrices` if groups divide m."""
        p, n, k = self.problem, args.n, args.k
        ld = cute.assume(Int64(k) * p.k_parts, divby=8)
        mA = cute.make_tensor(args.a, cute.make_layout((args.rows, k * p.k_parts), stride=(ld, 1)))
        bases, group_stride = [args.b], Int64(n) * k
        if const_expr(p.b_in_two):
            bases = [args.b, args.second]
        elif const_expr(self.has_pairs):
            bases, group_stride = [args.b, args.b + group_stride], group_stride * 2
        mBs = [self.b_matrix(base, n, k, group_stride, args.groups) for base in bases]
        outputs, inputs = self.epilogue.outputs(args.epilogue, args.d, n), self.epilogue.inputs(args.epilogue, n)
        mDs = [ragged(base, n, Int64(width), True) for base, width in outputs]
        mZs = [ragged(base, n, Int64(width), True) for base, width in inputs]
        return [mA], mBs, mDs, mZs

    @cute.jit
    def divided_k(self, args: GroupedGemmArgs):
        """`matrices` if groups divide k."""
        m, n = args.m, args.n
        ld, group_stride = cute.assume(Int64(n), divby=8), cute.assume(Int64(m) * n, divby=8)
        mD = cute.make_tensor(args.d, cute.make_layout((m, n, args.groups), stride=(ld, 1, group_stride)))
        return [ragged(args.a, m, args.a_stride, False)], [ragged(args.b, n, Int64(n), False)], [mD], []


class GroupEpilogue(Epilogue):
    """Base class of the epilogues of grouped GEMMs."""

    def __init__(self, problem, config, output):
        super().__init__(problem, config, output)
        self.tile_cols = config.tile_n // (2 if self.spec.has_pairs else 1)  # of D

    @cute.jit
    def outputs(self, args, d: cute.Pointer, n: Int32):
        """The matrices (rows, n) that are stored along m: [(base, leading dimension)]."""
        return [(d, n)]

    @cute.jit
    def inputs(self, args, n: Int32):
        """The matrices (rows, n) that are loaded by TMA, as `outputs`."""
        return []

    def load_atom(self, mZ: cute.Tensor) -> tuple:
        """(TMA atom, tensor of coordinates) that loads from an input."""
        return self.output.load_atom(mZ)


def rows_of_group(coordinates, block: RowBlock, row, col, along_m: bool):
    """A TMA tensor of D from (row, col) of the block's group on: of its rows, clipped at its end, or of D[group]."""
    if along_m:
        rows = coordinates[None, None, EXTENT, block.start + block.live]
        row += EXTENT - block.live
    else:
        rows = coordinates[None, None, block.group.index]
    return cute.domain_offset((row, col), rows)
