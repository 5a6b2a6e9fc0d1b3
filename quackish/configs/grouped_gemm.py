"""The GEMMs of grouped_mlp on Hopper: what to compute (Problem) and how (Config)."""

import dataclasses
from typing import Any, NamedTuple

from quackish.configs.gemm import STAGED_BYTES, TILE_K, GemmConfig, fields_why_illegal, space_why_illegal
from quackish.configs.lce_args import F32, I32, Ptr
from quackish.gpu import Gpu

GATED = ("swiglu", "clamped_swiglu", "geglu")
MAX_GROUPS = 1024
MAX_ROWS = 2**30  # which the coordinates of TMA can count
DSCALES_COLUMNS = 64  # per partial sum of dscales


class UpArgs(NamedTuple):
    preactivation: Any = None  # (r, 2i) or, not gated, (r, i), written; with `keeps`
    bias: Any = None  # (groups, 2i) or (groups, i) fp32
    scales: Any = None  # (r,) fp32


class DownArgs(NamedTuple):
    bias: Any = None  # (groups, n) fp32


class DownBackwardArgs(NamedTuple):
    preactivation: Any = None  # as UpArgs'
    act: Any = None  # (r, i), written
    scales: Any = None  # (r,) fp32
    dscales_parts: Any = None  # (r, ceil(i / DSCALES_COLUMNS)) fp32, written; with scales


class GroupedGemmArgs(NamedTuple):
    """Matrices are contiguous unless a stride, in elements, is given. r rows, with those after the last group."""

    a: Any = None
    b: Any = None
    second: Any = None  # B's second buffer; with b_in_two
    d: Any = None  # written
    offs: Any = I32  # (groups,): where each group ends
    epilogue: Any = None
    a_stride: Any = "int64"  # with along "k"
    rows: Any = "int32"
    m: Any = "int32"  # columns of A; with along "k"
    n: Any = "int32"  # columns of D; of gate and up, of each
    k: Any = "int32"  # with along "m"; of each of B's two buffers
    groups: Any = "int32"
    max_clusters: Any = "int32"


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """Rows are sorted by group; group g has rows [offs[g - 1], offs[g]).

    `epilogue`:
    - "up": D is the scaled activation of A @ B[g].T + bias, rows of g at a time. B[g] has rows [gate; up], or the
      gate's and in `second` the up projection's.
    - "down": D is A @ B[g].T + bias, as are B[g]'s layouts: (n, k) or (k, n) in memory.
    - "down_backward": A @ B[g].T is the gradient of the scaled activation, D that of the preactivation.
    - "store": D[g] = A[rows of g].T @ B[rows of g], a sum along the rows. A (r, m), B (r, n).
    Other rows of D are 0.
    """

    epilogue: str
    dtype: str  # of A and B: "bfloat16" or "float16"
    max_groups: int  # a power of two
    out_dtype: str
    b_major: str = "k"  # B's contiguous dimension: "n" or "k"
    b_in_two: bool = False  # B has two buffers: up: gate's and up's rows; down: along k
    activation: str | None = None
    biased: bool = False
    scaled: bool = False
    keeps: bool = False  # up: stores the preactivation
    accumulate: bool = False  # along "k": D is added to the fp32 output
    deep: bool = False  # down: K is at least DEEP
    cluster_n: int = 1  # along "k": the dimension with two tiles per cluster; `cluster_n_for`

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def along(self) -> str:
        """The dimension that groups divide: "m", or "k" of sums."""
        return "k" if self.epilogue == "store" else "m"

    @property
    def args(self) -> GroupedGemmArgs:
        operand = Ptr(self.dtype, aligned=True)
        scales, bias = F32 if self.scaled else None, F32 if self.biased else None
        epilogue = {
            "up": UpArgs(operand if self.keeps else None, bias, scales),
            "down": DownArgs(bias),
            "down_backward": DownBackwardArgs(operand, operand, scales, scales),
            "store": None,
        }[self.epilogue]
        rows = self.along == "m"
        return GroupedGemmArgs(
            a=operand, b=operand, second=operand if self.b_in_two else None, d=Ptr(self.out_dtype, aligned=True),
            epilogue=epilogue, a_stride=None if rows else "int64", m=None if rows else "int32",
            k="int32" if rows else None,
        )  # fmt: skip


def grouped_gemm_config(problem: GroupedGemmProblem, gpu: Gpu) -> GemmConfig:
    """Clusters along n, so that a group is padded to one tile of rows, not to two."""
    if problem.along == "k":
        along_n = problem.cluster_n == 2
        return GemmConfig(192, 128, 1 if along_n else 2, 2 if along_n else 1, num_stages=5, group=16, pingpong=True)
    if problem.deep:  # the epilogue is short beside the products: wide tiles, which load less
        return GemmConfig(cluster_m=1, cluster_n=2)
    if problem.epilogue == "down_backward" and problem.scaled and problem.activation == "clamped_swiglu":
        return GemmConfig(tile_n=192, cluster_m=1, cluster_n=2)  # with tile_n 128 or 256 registers spill
    if problem.epilogue == "down_backward":  # clusters along m: 4 to 7 % faster (H200), as fewer weights are loaded
        return GemmConfig(128, 128, 2, 1, num_stages=5, group=16, pingpong=True)
    stages = 6 if problem.epilogue == "down" else 5
    return GemmConfig(128, 128, 1, 2, num_stages=stages, group=16, pingpong=True)


DEEP = 64 * TILE_K  # of K: from here on cooperative tiles are 3 % faster than ping-pong (H200)


def cluster_n_for(m: int, n: int) -> int:
    """Of the problem along k: clusters of 192 x 256 or of 384 x 128, whichever covers (m, n) with less left over."""
    areas = [-(-m // rows) * rows * (-(-n // cols) * cols) for rows, cols in ((384, 128), (192, 256))]
    return 1 + (areas[1] < areas[0])


def grouped_gemm_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    """Output buffers per warp group: as many as fit, and a divisor of the number of stores per block of 64 rows."""
    pieces = -(-config.tile_n * (4 if problem.out_dtype == "float32" else 2) // 128)
    outputs = {"up": 1.5 if problem.gated else 2, "down_backward": 3 if problem.gated else 2}.get(problem.epilogue, 1)
    if problem.epilogue == "up" and not problem.keeps:
        outputs -= 1
    stores = round(pieces * outputs)
    room = MAX_SMEM - _bytes_without_buffers(problem, config)
    return next(b for b in (3, 2, 1) if stores % b == 0 and (b == 1 or b * config.num_wgs * STAGED_BYTES <= room))


def max_groups_for(groups: int) -> int:
    """The problem's max_groups: one kernel serves up to 64, 128, 256... groups."""
    return max(64, 1 << (groups - 1).bit_length())


MAX_SMEM = 232_448  # per CTA on Hopper


def _bytes_without_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    return stages + 8 * (problem.max_groups + 2) + 1024 + 256  # barriers and alignment


def grouped_gemm_smem_bytes(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    buffers = grouped_gemm_buffers(problem, config) * config.num_wgs * STAGED_BYTES
    return _bytes_without_buffers(problem, config) + buffers


def grouped_gemm_why_illegal(problem: GroupedGemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    if reason := fields_why_illegal(config):
        return reason
    if problem.epilogue == "up" and problem.gated and config.tile_n % 128:
        return f"tile_n is {config.tile_n}; expected 128 or 256: half of it is the gate's, stored 64 columns at a time"
    return space_why_illegal(config, grouped_gemm_smem_bytes(problem, config), gpu)
