"""What a grouped GEMM computes, on any GPU, and which configs are legal on Hopper."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import I32, Ptr
from quackish.device.work import Sizes, Work, bytes_of
from quackish.gpu import H100, Gpu
from quackish.kernels.gemm.problem import TILE_K, EpilogueSpec
from quackish.kernels.gemm.sm90_config import BLOCK_M, GemmConfig, fields_why_illegal, space_why_illegal

MAX_GROUPS = 1024
MAX_ROWS = 2**30  # TMA's coordinates can count these


class GroupedGemmArgs(NamedTuple):
    """Matrices are contiguous unless a stride, in elements, is given. r counts rows after the last group too."""

    a: Any = None  # (r, k), or (r, m) with along "k"
    b: Any = None  # (groups, n, k) or (groups, k, n), or (r, n) with along "k"
    second: Any = None  # B's second buffer; with b_in_two
    d: Any = None  # written
    offs: Any = None  # (groups,) int32: where each group ends; without it, all rows are in one group
    epilogue: Any = None  # `EpilogueSpec.args`
    a_stride: Any = "int64"  # with along "k"
    rows: Any = "int32"
    m: Any = "int32"  # columns of A; with along "k"
    n: Any = "int32"  # columns of D; counts those of a pair as one
    k: Any = "int32"  # with along "m"; counts B's two buffers separately
    groups: Any = "int32"
    max_clusters: Any = "int32"


class GroupedEpilogueSpec(EpilogueSpec):
    """Base class of the epilogues of grouped GEMMs."""

    along = "m"  # the dimension that groups divide; "k" for a sum along the rows

    @property
    def has_pairs(self) -> bool:
        """Whether D has a column for two of the product. Half of a tile's columns are from each of B's two matrices."""
        return False

    @property
    def num_buffers(self) -> int | None:
        """Buffers of the output, per warp group on Hopper and per warp on Blackwell; None: as many as fit."""
        return None

    def piece_bytes(self, problem: Any) -> int:
        """Bytes of each row in a buffer, on Hopper."""
        return 128

    def num_stores(self, pieces: int) -> int:
        """Pieces that are stored per block of `pieces` pieces of the product."""
        return pieces


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """Products of all groups. Rows are sorted by group; group g has rows [offs[g - 1], offs[g]).

    If groups divide m, D is A @ B[g].T, rows of g at a time; B[g] is (n, k) or (k, n) in memory. Other rows of D are 0.
    If they divide k, D[g] is A[rows of g].T @ B[rows of g], a sum along the rows, of A (r, m) and B (r, n).
    """

    epilogue: GroupedEpilogueSpec
    dtype: str  # of A and B: "bfloat16" or "float16"
    max_groups: int  # a power of two; 1: all rows are in one group
    out_dtype: str
    b_major: str = "k"  # B's contiguous dimension: "n" or "k"
    b_in_two: bool = False  # B has two buffers: the two matrices of pairs, or else two parts along k

    @property
    def along(self) -> str:
        return self.epilogue.along

    @property
    def piece_bytes(self) -> int:
        return self.epilogue.piece_bytes(self)

    @property
    def k_parts(self) -> int:
        """Matrices of B along k."""
        return 2 if self.b_in_two and not self.epilogue.has_pairs else 1

    @property
    def args(self) -> GroupedGemmArgs:
        operand, rows = Ptr(self.dtype, aligned=True), self.along == "m"
        return GroupedGemmArgs(
            a=operand, b=operand, second=operand if self.b_in_two else None, d=Ptr(self.out_dtype, aligned=True),
            offs=I32 if self.max_groups > 1 else None, epilogue=self.epilogue.args(self.dtype),
            a_stride=None if rows else "int64", m=None if rows else "int32", k="int32" if rows else None,
        )  # fmt: skip


def max_groups_for(groups: int | None) -> int:
    """The problem's max_groups: one kernel serves up to 64, 128, 256... groups. None: all rows are in one group."""
    return 1 if groups is None else max(64, 1 << (groups - 1).bit_length())


def grouped_gemm_work(p: GroupedGemmProblem, sizes: Sizes) -> Work:
    rows, n, groups = (sizes[name] for name in ("rows", "n", "groups"))
    if p.along == "k":
        m = sizes["m"]
        read, written, products = rows * (m + n), groups * m * n, m * n
    else:
        k, columns = sizes["k"] * p.k_parts, n * (1 + p.epilogue.has_pairs)
        read, written, products = (rows + groups * columns) * k, rows * n, columns * k
    product = Work(read * bytes_of(p.dtype), written * bytes_of(p.out_dtype), 2 * rows * products)
    return p.epilogue.work(product, sizes)


# Legality on Hopper ---------------------------------------------------------------------------------------------------


def grouped_gemm_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    """The epilogue's buffers per warp group: as many as fit, and a divisor of the number of stores per block."""
    if problem.epilogue.num_buffers is not None:
        return problem.epilogue.num_buffers
    pieces = config.tile_n * bytes_of(problem.out_dtype) // problem.piece_bytes
    stores = problem.epilogue.num_stores(pieces)
    room = H100.smem_bytes - _bytes_without_buffers(problem, config)  # the kernel, which has no Gpu, asks too
    return next(
        b
        for b in (3, 2, 1)
        if stores % b == 0 and (b == 1 or b * config.num_wgs * BLOCK_M * problem.piece_bytes <= room)
    )


def _bytes_without_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    return stages + 8 * (problem.max_groups + 2) + 1024 + 256  # barriers and alignment


def grouped_gemm_smem_bytes(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    buffers = grouped_gemm_buffers(problem, config) * config.num_wgs * BLOCK_M * problem.piece_bytes
    return _bytes_without_buffers(problem, config) + buffers


def grouped_gemm_why_illegal(problem: GroupedGemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    if reason := fields_why_illegal(config):
        return reason
    if reason := problem.epilogue.why_illegal(problem, config, gpu):
        return reason
    return space_why_illegal(config, grouped_gemm_smem_bytes(problem, config), gpu)
