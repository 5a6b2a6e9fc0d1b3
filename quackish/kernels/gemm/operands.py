"""The matrices of GEMMs without groups. Shared by the kernels of all GPUs."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from quackish.kernels.gemm.problem import GemmArgs


class Operands:
    """Methods of a kernel whose problem is a GemmProblem."""

    in_atoms = ("a", "second", "b", "a_stride", "second_stride", "b_stride", "max_clusters")

    @property
    def majors(self) -> tuple[str, str]:
        """The contiguous dimension of A ("k" or "m") and of B ("k" or "n")."""
        return self.problem.a_major, self.problem.b_major

    @cute.jit
    def matrices(self, args: GemmArgs):
        """A's and B's matrices, those that the epilogue stores by TMA, and those that it loads."""
        p, m, n, k, split = self.problem, args.m, args.n, args.k, args.split
        mAs = [matrix(args.a, m, split if p.a_in_two else k, args.a_stride, p.a_major == "k")]
        if const_expr(p.a_in_two):
            mAs.append(matrix(args.second, m, k - split, args.second_stride, p.a_major == "k"))
        mBs = [matrix(args.b, n, k, args.b_stride, p.b_major == "k")]
        mDs = []
        if const_expr(self.epilogue.stores_by_tma):
            mDs.append(matrix(args.d, m, split if p.d_in_two else n, args.d_stride, True))
            if const_expr(p.d_in_two):
                mDs.append(matrix(args.second, m, n - split, args.second_stride, True))
        return mAs, mBs, mDs, []

    @cute.jit
    def num_clusters(self, args: GemmArgs) -> Int32:
        """Clusters of the grid: with split-K in the tail all that are resident, otherwise at most one per tile."""
        c, clusters = self.config, args.max_clusters
        if const_expr(not self.problem.split_k_tail):
            tiles = cute.ceil_div(args.m, c.cluster_rows) * cute.ceil_div(args.n, c.cluster_columns)
            clusters = cutlass.min(tiles, clusters)
        return clusters


@cute.jit
def matrix(base: cute.Pointer, rows: Int32, cols: Int32, ld: Int64, cols_contiguous: cutlass.Constexpr[bool]):
    """A (rows, cols) tensor with leading dimension `ld`, a multiple of 8."""
    if const_expr(cols_contiguous):
        return cute.make_tensor(base, cute.make_layout((rows, cols), stride=(cute.assume(ld, divby=8), 1)))
    return cute.make_tensor(base, cute.make_layout((rows, cols), stride=(1, cute.assume(ld, divby=8))))
