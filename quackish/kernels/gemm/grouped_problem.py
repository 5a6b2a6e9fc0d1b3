"""The GEMMs of grouped_mlp: what to compute (Problem), and how on Hopper (Config)."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import F32, I32, Ptr
from quackish.gpu import H100, Gpu
from quackish.kernels.gemm.problem import BLOCK_M, TILE_K, GemmConfig, fields_why_illegal, space_why_illegal

GATED = ("swiglu", "clamped_swiglu", "geglu")
MAX_GROUPS = 1024
MAX_ROWS = 2**30  # TMA's coordinates can count these
DSCALES_COLUMNS = 64  # per partial sum of dscales


class UpArgs(NamedTuple):
    preactivation: Any = None  # (r, 2i), or (r, i) without a gate, written; with `keeps`
    bias: Any = None  # (groups, 2i) or (groups, i) fp32
    scales: Any = None  # (r,) fp32


class DownArgs(NamedTuple):
    bias: Any = None  # (groups, n) fp32


class DownBackwardArgs(NamedTuple):
    preactivation: Any = None  # as UpArgs'
    act: Any = None  # (r, i), written
    scales: Any = None  # (r,) fp32
    dscales_parts: Any = None  # (ceil(i / DSCALES_COLUMNS), r) fp32, written; with scales


class GroupedGemmArgs(NamedTuple):
    """Matrices are contiguous unless a stride, in elements, is given. r counts rows after the last group too."""

    a: Any = None
    b: Any = None
    second: Any = None  # B's second buffer; with b_in_two
    d: Any = None  # written
    offs: Any = I32  # (groups,): where each group ends
    epilogue: Any = None
    a_stride: Any = "int64"  # with along "k"
    rows: Any = "int32"
    m: Any = "int32"  # columns of A; with along "k"
    n: Any = "int32"  # columns of D; counts gate and up separately
    k: Any = "int32"  # with along "m"; counts B's two buffers separately
    groups: Any = "int32"
    max_clusters: Any = "int32"


@dataclasses.dataclass(frozen=True)
class GroupedGemmProblem:
    """Rows are sorted by group; group g has rows [offs[g - 1], offs[g]).

    `epilogue`:
    - "up": D is the scaled activation of A @ B[g].T + bias, rows of g at a time. B[g] has rows [gate; up], or the
      gate's and in `second` the up projection's.
    - "down": D is A @ B[g].T + bias. B[g] is (n, k) or (k, n) in memory.
    - "down_backward": A @ B[g].T is the gradient of the scaled activation, D that of the preactivation.
    - "store": D[g] = A[rows of g].T @ B[rows of g], a sum along the rows. A (r, m), B (r, n).
    Other rows of D are 0.
    """

    epilogue: str
    dtype: str  # of A and B: "bfloat16" or "float16"
    max_groups: int  # a power of two
    out_dtype: str
    b_major: str = "k"  # B's contiguous dimension: "n" or "k"
    b_in_two: bool = False  # B has two buffers: for "up" the gate's and up's rows, for "down" two parts along k
    activation: str | None = None
    biased: bool = False
    scaled: bool = False
    keeps: bool = False  # up: stores the preactivation
    accumulate: bool = False  # along "k": D is added to the fp32 output
    cluster_tile: str = "128x256"  # input of the config rule; set by `cluster_tile_for`

    @property
    def gated(self) -> bool:
        return self.activation in GATED

    @property
    def along(self) -> str:
        """The dimension that groups divide: "m", or "k" for a sum along the rows."""
        return "k" if self.epilogue == "store" else "m"

    @property
    def piece_bytes(self) -> int:
        """Bytes of each row in a buffer of the epilogue.

        64 leaves "down_backward" room for another stage, and divides the 96 columns of gate and of up in "256x192".
        """
        narrow = self.epilogue == "down_backward" or (self.epilogue == "up" and self.cluster_tile == "256x192")
        return 64 if narrow else 128

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


# The config of each tile of a cluster, rows x columns
CONFIGS = {
    "256x192": GemmConfig(128, 192, 2, 1, num_stages=5, group=16, pingpong=True),
    "192x256": GemmConfig(192, 128, 1, 2, num_stages=5, group=16, pingpong=True),
    "128x256": GemmConfig(128, 128, 1, 2, num_stages=5, group=16, pingpong=True),
    "256x128": GemmConfig(128, 128, 2, 1, num_stages=5, group=16, pingpong=True),
    "128x512": GemmConfig(128, 256, 1, 2, num_stages=4),
}
_OVERRIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("down", "128x256"): dict(num_stages=6),
    ("down_backward", "256x192"): dict(num_stages=4),
    ("store", "256x192"): dict(group=8),  # up to 8 % faster than 16 on the H100, within 2 % on the H200
}
TILES = {
    "up": ("256x192", "128x256"),
    "down": ("128x512", "256x192", "128x256"),
    "down_backward": ("256x192", "128x256", "256x128"),
    "store": ("192x256", "256x192", "128x256"),
}
# The time of small tiles (128x256, 256x128) relative to large ones that pad as much, from results/gemm_configs.md.
SMALL = {"up": 1.04, "down": 1.04, "down_backward": 1.04, "store": 1.02}
DEEP = 64 * TILE_K  # K of "down" from which the cooperative tiles are 3 % faster than ping-pong (H200)


def cluster_tile_for(
    problem: GroupedGemmProblem, gpu: Gpu, m: int | None, n: int, k: int | None, few_rows: bool = False
) -> str:
    """The problem's cluster_tile for products (m, n, k): the tile that pads them least.

    If groups divide m, only columns count, and on Blackwell whether a group has few rows, at most 128 in the mean.
    n includes gate's and up's columns if a tile has both.
    """
    if gpu.family != "sm_90":
        few_rows = few_rows if m is None else m <= 128
        return "128x256" if few_rows else "256x256"
    small = SMALL[problem.epilogue]
    if problem.epilogue == "down" and gpu.fast_memory:
        small = 1.0  # H200: tiles of 128x256 that pad 3 % less than 256x192 are up to 7 % faster
    if problem.epilogue == "down_backward" and k <= 2048:
        small = 0.97

    def cost(tile: str) -> float:
        rows, columns = map(int, tile.split("x"))
        padded = -(-n // columns) * columns * (1 if m is None else -(-m // rows) * rows)
        return padded * (small if rows * columns == 128 * 256 else 1.0)

    tiles = TILES[problem.epilogue]
    if problem.epilogue == "down" and k < DEEP:
        tiles = tiles[1:]
    if problem.epilogue == "down_backward" and problem.activation == "clamped_swiglu" and not problem.scaled:
        tiles = tiles[1:]  # "256x192" spills: 10 loads and stores of local memory
    return min(tiles, key=cost)


def grouped_gemm_config(problem: GroupedGemmProblem, gpu: Gpu) -> GemmConfig:
    overrides = _OVERRIDES.get((problem.epilogue, problem.cluster_tile), {})
    return dataclasses.replace(CONFIGS[problem.cluster_tile], **overrides)


def grouped_gemm_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    """The epilogue's buffers per warp group: as many as fit, and a divisor of the number of stores per block."""
    if problem.epilogue == "down_backward":  # the activation's, and two sets for gate and up
        return 1 + 2 * (1 + problem.gated)
    stores = config.tile_n * (4 if problem.out_dtype == "float32" else 2) // problem.piece_bytes
    if problem.epilogue == "up":  # a tile has gate and up columns; the activation is one of them
        stores = stores * problem.keeps + stores // (1 + problem.gated)
    room = H100.smem_bytes - _bytes_without_buffers(problem, config)  # the kernel, which has no Gpu, asks too
    return next(
        b
        for b in (3, 2, 1)
        if stores % b == 0 and (b == 1 or b * config.num_wgs * BLOCK_M * problem.piece_bytes <= room)
    )


def max_groups_for(groups: int) -> int:
    """The problem's max_groups: one kernel serves up to 64, 128, 256... groups."""
    return max(64, 1 << (groups - 1).bit_length())


def _bytes_without_buffers(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    return stages + 8 * (problem.max_groups + 2) + 1024 + 256  # barriers and alignment


def grouped_gemm_smem_bytes(problem: GroupedGemmProblem, config: GemmConfig) -> int:
    buffers = grouped_gemm_buffers(problem, config) * config.num_wgs * BLOCK_M * problem.piece_bytes
    return _bytes_without_buffers(problem, config) + buffers


def grouped_gemm_why_illegal(problem: GroupedGemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    if reason := fields_why_illegal(config):
        return reason
    if problem.epilogue == "up" and problem.gated and config.tile_n % problem.piece_bytes:
        return (
            f"tile_n is {config.tile_n}; expected a multiple of {problem.piece_bytes}: half of it is the gate's, which "
            f"is stored {problem.piece_bytes // 2} columns at a time"
        )
    if problem.epilogue == "down_backward" and config.row_blocks * config.tile_n % 128:
        return f"tile_n is {config.tile_n}; expected 128, 256, or 192 with tile_m 128 and pingpong"
    return space_why_illegal(config, grouped_gemm_smem_bytes(problem, config), gpu)
