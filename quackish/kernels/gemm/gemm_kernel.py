"""Shared by all GEMM kernels: the launch, loads of tiles by TMA, the order of tiles."""

from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync
from cutlass.tensor_utils import LayoutEnum

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.kernels.gemm.epilogues import Epilogue
from quackish.kernels.gemm.problem import TILE_K, GemmArgs
from quackish.kernels.memory import load_at

MAJOR = {"k": OperandMajorMode.K, "m": OperandMajorMode.MN, "n": OperandMajorMode.MN}
LAYOUT = {"k": LayoutEnum.ROW_MAJOR, "m": LayoutEnum.COL_MAJOR, "n": LayoutEnum.COL_MAJOR}


class Stage(NamedTuple):
    """A stage of the pipeline that is being loaded."""

    index: Int32
    barrier: cute.Pointer


@cute.jit
def live_rows(args: GemmArgs, along: cutlass.Constexpr) -> Int32:
    """The number of live rows, which is the size of D or of the sum along m or k; m if all rows are live."""
    if const_expr(along is None):
        return args.m
    live = load_at(args.num_live, 0) - args.start
    live = cutlass.max(cutlass.min(live, args.m if const_expr(along == "m") else args.k), 0)
    return cute.arch.make_warp_uniform(live)


class GemmKernel:
    """Base class of the GEMMs.

    A kernel is a subclass for a GPU family (wgmma.py, umma.py: `operands`, `a_atom`, `b_atom`, `launch_options`), with
    the matrices of its arguments (operands.py, grouped_operands.py: `majors`, `matrices`, `num_clusters`), and a
    `kernel`. An operation's kernel class adds its `epilogues`.
    """

    epilogues: ClassVar[Mapping[type, type[Epilogue]]] = {}  # class of the problem's EpilogueSpec -> its device code
    has_pairs = False  # the columns of a tile are from two matrices B, half of them from each

    def __init__(self, problem, config):
        self.problem, self.config = problem, config
        self.dtype = DTYPES[problem.dtype]
        self.epilogue = self.epilogues[type(problem.epilogue)](problem, config)

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args, stream: CUstream):
        mAs, mBs, mDs, mZs = self.matrices(args)
        mma, a, b = self.operands(*self.majors)
        a_atoms, b_atoms = [self.a_atom(mA, a) for mA in mAs], [self.b_atom(mB, b) for mB in mBs]
        atoms = [*(self.epilogue.store_atom(mD) for mD in mDs), *(self.epilogue.load_atom(mZ) for mZ in mZs)]
        clusters = self.num_clusters(args)
        args = args._replace(**dict.fromkeys(self.in_atoms))
        self.kernel(a_atoms, b_atoms, atoms, args, mma, a, b).launch(**self.launch_options(clusters, stream))

    def load_op(self, num_multicast: int):
        """The TMA instruction that loads a tile into the shared memory of `num_multicast` CTAs."""
        if num_multicast > 1:
            return cpasync.CopyBulkTensorTileG2SMulticastOp()
        return cpasync.CopyBulkTensorTileG2SOp()

    def load_atom(self, tensor, smem_layout, tile, num_multicast):
        """(TMA atom, tensor of coordinates) to load a tile into one stage of `num_multicast` CTAs."""
        stage = cute.slice_(smem_layout, (None, None, 0))
        atom, coordinates = cpasync.make_tiled_tma_atom(
            self.load_op(num_multicast), tensor, stage, tile, num_multicast=num_multicast
        )
        return atom, coordinates

    def partition(self, atom, tensor, shared, rank, num_multicast):
        """(shared memory per stage, `tensor` per tile and step along k), for `load`.

        tensor: the atom's coordinates, or a part of them.
        """
        tiles = cute.local_tile(tensor, (cute.size(shared, mode=[0]), TILE_K), (None, None))
        shared, tiles = cute.group_modes(shared, 0, 2), cute.group_modes(tiles, 0, 2)
        return cpasync.tma_partition(atom[0], rank, cute.make_layout(num_multicast), shared, tiles)

    def load(self, atom, part, tile, kt, stage: Stage, mask, cache_policy=None):
        """Starts to load step kt of a tile. part: a result of `partition`."""
        shared, tiles = part
        cute.copy(
            atom[0], tiles[None, tile, kt], shared[None, stage.index], tma_bar_ptr=stage.barrier, mcast_mask=mask,
            cache_policy=cache_policy,
        )  # fmt: skip

    @cute.jit
    def raster(self, index: Int32, tiles_m: Int32, tiles_n: Int32):
        """(m, n) of the index-th cluster tile."""
        along_m = const_expr(self.config.group_along == "m")
        inner, outer = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
        group = index // (self.config.group * outer)
        first = group * self.config.group
        width = cutlass.min(inner - first, self.config.group)
        index -= first * outer
        i, o = first + index % width, index // width
        return (i, o) if along_m else (o, i)
