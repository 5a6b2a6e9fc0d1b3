"""The GEMMs of grouped_mlp and moe_mlp: their epilogues and arguments, problems, config rules and description."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import F32, Ptr
from quackish.device.spec import KernelSpec, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, ceil_div
from quackish.gpu import Gpu
from quackish.kernels.gemm.grouped_problem import (
    GroupedEpilogueSpec,
    GroupedGemmProblem,
    grouped_gemm_why_illegal,
    grouped_gemm_work,
)
from quackish.kernels.gemm.grouped_sm100_config import grouped_gemm_sm100_smem_bytes, grouped_gemm_sm100_why_illegal
from quackish.kernels.gemm.problem import TILE_K
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.sm100_config import GemmSm100Config

GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu")
DSCALES_COLUMNS = 64  # per partial sum of dscales

# Epilogues ------------------------------------------------------------------------------------------------------------


class UpArgs(NamedTuple):
    preactivation: Any = None  # (r, 2i), or (r, i) without a gate, written; with `keeps`
    bias: Any = None  # (groups, 2i) or (groups, i) fp32
    scales: Any = None  # (r,) fp32


class DownArgs(NamedTuple):
    bias: Any = None  # (groups, n) fp32
    residual: Any = None  # (r, n)


class DownBackwardArgs(NamedTuple):
    preactivation: Any = None  # as UpArgs'
    act: Any = None  # (r, i), written
    scales: Any = None  # (r,) fp32
    dscales_parts: Any = None  # (ceil(i / DSCALES_COLUMNS), r) fp32, written; with scales


@dataclasses.dataclass(frozen=True)
class Down(GroupedEpilogueSpec):
    """D is A @ B[g].T + bias + residual."""

    biased: bool = False
    residual: bool = False

    def args(self, dtype: str) -> DownArgs:
        return DownArgs(F32 if self.biased else None, Ptr(dtype, aligned=True) if self.residual else None)

    def work(self, product: Work, sizes: Sizes) -> Work:
        read = sizes["rows"] * sizes["n"] * 2 * self.residual
        return dataclasses.replace(product, bytes_read=product.bytes_read + read)


@dataclasses.dataclass(frozen=True)
class Activated(GroupedEpilogueSpec):
    """Base class of epilogues that compute the activation of a preactivation: of two parts, gate and up, or of one."""

    activation: str
    scaled: bool = False

    @property
    def gated(self) -> bool:
        return self.activation in GATED


@dataclasses.dataclass(frozen=True)
class Up(Activated):
    """A @ B[g].T + bias is the preactivation, D its scaled activation. B[g] has rows [gate; up], or in two buffers."""

    biased: bool = False
    keeps: bool = False  # stores the preactivation

    @property
    def has_pairs(self) -> bool:
        return self.gated

    def args(self, dtype: str) -> UpArgs:
        preactivation = Ptr(dtype, aligned=True) if self.keeps else None
        return UpArgs(preactivation, F32 if self.biased else None, F32 if self.scaled else None)

    def piece_bytes(self, problem: Any) -> int:
        return 64 if problem.cluster_tile == "256x192" else 128  # 64 divides the 96 columns of gate and of up

    def num_stores(self, pieces: int) -> int:
        return pieces * self.keeps + pieces // (1 + self.gated)  # a tile has gate and up columns

    def why_illegal(self, problem: Any, config: Any, gpu: Gpu) -> str | None:
        if self.gated and config.tile_n % problem.piece_bytes:
            return (
                f"tile_n is {config.tile_n}; expected a multiple of {problem.piece_bytes}: half of it is the gate's, "
                f"which is stored {problem.piece_bytes // 2} columns at a time"
            )
        return None

    def work(self, product: Work, sizes: Sizes) -> Work:
        preactivation = sizes["rows"] * sizes["n"] * (1 + self.gated) * 2 * self.keeps
        return dataclasses.replace(product, bytes_written=product.bytes_written + preactivation)


@dataclasses.dataclass(frozen=True)
class DownBackward(Activated):
    """A @ B[g].T is the gradient of the scaled activation, D that of the preactivation, which is read."""

    @property
    def num_buffers(self) -> int:
        return 1 + 2 * (1 + self.gated)  # the activation's, and two sets for gate and up

    def args(self, dtype: str) -> DownBackwardArgs:
        operand, scales = Ptr(dtype, aligned=True), F32 if self.scaled else None
        return DownBackwardArgs(operand, operand, scales, scales)

    def piece_bytes(self, problem: Any) -> int:
        return 64  # leaves room for another stage

    def why_illegal(self, problem: Any, config: Any, gpu: Gpu) -> str | None:
        if isinstance(config, GemmConfig) and config.row_blocks * config.tile_n % 128:
            return f"tile_n is {config.tile_n}; expected 128, 256, or 192 with tile_m 128 and pingpong"
        return None

    def work(self, product: Work, sizes: Sizes) -> Work:
        rows, n = sizes["rows"], sizes["n"]
        preactivation, parts = rows * n * (1 + self.gated) * 2, rows * ceil_div(n, DSCALES_COLUMNS) * 4 * self.scaled
        return dataclasses.replace(
            product,
            bytes_read=product.bytes_read + preactivation,
            bytes_written=product.bytes_written + preactivation + parts,  # writes the activation and D
        )


@dataclasses.dataclass(frozen=True)
class Store(GroupedEpilogueSpec):
    """D[g] is A[rows of g].T @ B[rows of g]."""

    along = "k"
    accumulate: bool = False  # D is added to the fp32 output


# Problems and configs -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MlpGemmProblem(GroupedGemmProblem):
    cluster_tile: str = "128x256"  # input of the config rule; set by `cluster_tile_for`


# The config of each tile of a cluster, rows x columns
CONFIGS = {
    "256x192": GemmConfig(128, 192, 2, 1, num_stages=5, group=16, pingpong=True),
    "192x256": GemmConfig(192, 128, 1, 2, num_stages=5, group=16, pingpong=True),
    "128x256": GemmConfig(128, 128, 1, 2, num_stages=5, group=16, pingpong=True),
    "256x128": GemmConfig(128, 128, 2, 1, num_stages=5, group=16, pingpong=True),
    "128x512": GemmConfig(128, 256, 1, 2, num_stages=4),
}
_OVERRIDES: dict[tuple[type, str], dict[str, Any]] = {
    (Down, "128x256"): dict(num_stages=6),
    (DownBackward, "256x192"): dict(num_stages=4),
    (Store, "256x192"): dict(group=8),  # up to 8 % faster than 16 on the H100, within 2 % on the H200
}
TILES: dict[type, tuple[str, ...]] = {
    Up: ("256x192", "128x256"),
    Down: ("128x512", "256x192", "128x256"),
    DownBackward: ("256x192", "128x256", "256x128"),
    Store: ("192x256", "256x192", "128x256"),
}
# The time of small tiles (128x256, 256x128) relative to large ones that pad as much, from results/gemm_configs.md.
SMALL: dict[type, float] = {Up: 1.04, Down: 1.04, DownBackward: 1.04, Store: 1.02}
DEEP = 64 * TILE_K  # K of Down from which the cooperative tiles are 3 % faster than ping-pong (H200)


def cluster_tile_for(
    problem: MlpGemmProblem, gpu: Gpu, m: int | None, n: int, k: int | None, few_rows: bool = False
) -> str:
    """The problem's cluster_tile for products (m, n, k): the tile that pads them least.

    If groups divide m, only columns count, and on Blackwell whether a group has few rows, at most 128 in the mean.
    n includes gate's and up's columns if a tile has both.
    """
    if gpu.family != "sm_90":
        few_rows = few_rows if m is None else m <= 128
        return "128x256" if few_rows else "256x256"
    epilogue, kind = problem.epilogue, type(problem.epilogue)
    small = SMALL[kind]
    if kind is Down and gpu.fast_memory:
        small = 1.0  # H200: tiles of 128x256 that pad 3 % less than 256x192 are up to 7 % faster
    if kind is DownBackward and k <= 2048:
        small = 0.97

    def cost(tile: str) -> float:
        rows, columns = map(int, tile.split("x"))
        padded = -(-n // columns) * columns * (1 if m is None else -(-m // rows) * rows)
        return padded * (small if rows * columns == 128 * 256 else 1.0)

    tiles = TILES[kind]
    if kind is Down and k < DEEP:
        tiles = tiles[1:]
    if epilogue == DownBackward("clamped_swiglu"):
        tiles = tiles[1:]  # "256x192" spills: 10 loads and stores of local memory
    return min(tiles, key=cost)


def grouped_gemm_config(problem: MlpGemmProblem, gpu: Gpu) -> GemmConfig:
    overrides = _OVERRIDES.get((type(problem.epilogue), problem.cluster_tile), {})
    return dataclasses.replace(CONFIGS[problem.cluster_tile], **overrides)


# The same on Blackwell. Not tuned: no Blackwell GPU has run them.
SM100_CONFIGS = {"256x256": GemmSm100Config(group=16), "128x256": GemmSm100Config(ctas=1, num_stages=4, group=16)}


def grouped_gemm_sm100_config(problem: MlpGemmProblem, gpu: Gpu) -> GemmSm100Config:
    config = SM100_CONFIGS[problem.cluster_tile]
    room = gpu.smem_bytes - grouped_gemm_sm100_smem_bytes(problem, dataclasses.replace(config, num_stages=0))
    return dataclasses.replace(config, num_stages=min(config.num_stages, room // config.stage_bytes))


# Description ----------------------------------------------------------------------------------------------------------

_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="grouped_gemm",
    operation="grouped_mlp",
    problem=MlpGemmProblem,
    on={
        **on_hopper(
            "quackish.ops.mlp.kernels.gemm_sm90:MlpGemmSm90",
            GemmConfig,
            grouped_gemm_config,
            grouped_gemm_why_illegal,
            "quackish.ops.mlp.tuning:GEMM",
        ),
        **on_blackwell(
            "quackish.ops.mlp.kernels.gemm_sm100:MlpGemmSm100",
            GemmSm100Config,
            grouped_gemm_sm100_config,
            grouped_gemm_sm100_why_illegal,
            "quackish.ops.mlp.tuning:GEMM_SM100",
        ),
    },
    sizes=("rows", "m", "n", "k", "groups"),
    work=grouped_gemm_work,
    cublas="quackish.ops.mlp.tuning:cublas",
    samples=[
        MlpGemmProblem(Up("swiglu", scaled=True, keeps=True), _B, 64, _B),
        MlpGemmProblem(Down(biased=True, residual=True), _B, 64, _B),
        MlpGemmProblem(DownBackward("silu", scaled=True), _B, 64, _B, b_major="n"),
        MlpGemmProblem(Store(accumulate=True), _B, 64, "float32"),
    ],
)
