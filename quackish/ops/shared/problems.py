"""Kernels that operations share: arguments, problems, configs, descriptions. Imports neither torch nor the DSL."""

import dataclasses
import functools
from typing import Any, NamedTuple

from quackish.device.arguments import F32, Ptr
from quackish.device.spec import KernelSpec, on_all, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, ceil_div, returns_at_once
from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import GemmProblem, Store, gemm_work
from quackish.kernels.gemm.sm90_config import GemmConfig, splits_tails
from quackish.kernels.gemm.sm100_config import GemmSm100Config

# Matrix products whose result is stored -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StoreGemmProblem(GemmProblem):
    """Operations name their products as in the loss: logits (A and B k-major), dx (B n-major), dw (A m-major)."""


# dw: sums over rows. For M 8192, H 4096, V 128256 in ms, on an H100 and an H200: 11.73 and 12.22; in groups of 8 tiles
# 12.92 and 12.52; cooperative 12.44 and 12.68; cuBLAS 12.65 and 12.69.
DW_PINGPONG = GemmConfig(tile_m=192, tile_n=128, num_stages=5, group=16, group_along="n", pingpong=True)
MAX_IDLE = 0.06  # fraction of the clusters' time, which is the gain of ping-pong for dw


FEW_WAVES = 8


@functools.lru_cache(maxsize=1024)
def splits_dw_tail(m: int, n: int, gpu: Gpu) -> bool:
    """True if split-K in the tail of dw (m, n) is faster than ping-pong, as for few tiles. Independent of K."""
    tiles, clusters = _dw_tiles(m, n, gpu)
    return splits_tails(gpu) and -tiles % clusters > MAX_IDLE * tiles


@functools.lru_cache(maxsize=1024)
def is_dw_cooperative(m: int, n: int, gpu: Gpu) -> bool:
    """True if dw (m, n) of an MLP or a distillation head takes `splits_dw_tail`, or has less than FEW_WAVES waves.

    With few waves, cooperative tiles with a split tail are faster than ping-pong.
    """
    tiles, clusters = _dw_tiles(m, n, gpu)
    return splits_dw_tail(m, n, gpu) or (splits_tails(gpu) and tiles < FEW_WAVES * clusters)


def _dw_tiles(m: int, n: int, gpu: Gpu) -> tuple[int, int]:
    """(tiles of clusters with DW_PINGPONG, clusters in a wave)"""
    c = DW_PINGPONG
    return ceil_div(m, c.cluster_rows) * ceil_div(n, c.cluster_columns), c.max_clusters(gpu.sm_count)


def gemm_config(problem: StoreGemmProblem, gpu: Gpu) -> GemmConfig:
    if problem.a_major == "m" and not problem.split_k_tail:
        return DW_PINGPONG
    if problem.b_major == "k":  # logits: ping-pong overlaps their stores in fp32 with the next tile
        return GemmConfig(tile_n=192, num_stages=5, pingpong=True)
    # dw of an MLP (8192, 2048) over 16,384 rows: 840 us, along n 907; (2048, 8192): 945 both, ping-pong 1185 (H100)
    return GemmConfig(group_along="m" if problem.a_major == "m" else "n")


def gemm_sm100_config(problem: StoreGemmProblem, gpu: Gpu) -> GemmSm100Config:
    return GemmSm100Config(group_along="m" if problem.b_major == "k" else "n")


_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="gemm",
    operation="linear_divergence",
    problem=StoreGemmProblem,
    on={
        **on_hopper("quackish.ops.shared.kernels.gemm_sm90:StoreGemmSm90", GemmConfig, gemm_config),
        **on_blackwell("quackish.ops.shared.kernels.gemm_sm100:StoreGemmSm100", GemmSm100Config, gemm_sm100_config),
    },
    sizes=("m", "n", "k"),
    work=gemm_work,
    samples=[
        StoreGemmProblem(Store(), _B, "float32", live="m"),
        StoreGemmProblem(Store(scaled=True), _B, _B, b_major="n"),
        StoreGemmProblem(Store(scaled=True), _B, _B, a_major="m", b_major="n", live="k"),
        StoreGemmProblem(Store(scaled=True, accumulate=True), _B, "float32", a_major="m", b_major="n"),
    ],
)

# Scaling in place -----------------------------------------------------------------------------------------------------


class ScaleArgs(NamedTuple):
    out: Any = None  # (n,) bf16, fp16 or fp32, scaled in place
    out2: Any = None  # (n2,) as out
    factor: Any = F32  # (1,)
    n: Any = "int64"
    n2: Any = "int64"
    num_ctas: Any = "int32"


@dataclasses.dataclass(frozen=True)
class ScaleProblem:
    dtype: str

    @property
    def args(self) -> ScaleArgs:
        out = Ptr(self.dtype, aligned=True)
        return ScaleArgs(out=out, out2=out)


@dataclasses.dataclass(frozen=True)
class ScaleConfig:
    threads: int = 256
    vectors: int = 4  # 16-byte vectors in flight per thread

    def num_ctas(self, bytes: int, sm_count: int) -> int:
        """Persistent CTAs, so that few are launched for nothing if the factor is 1."""
        return max(1, min(-(-bytes // (self.threads * self.vectors * 16)), sm_count * 4))


def _scale_work(p: ScaleProblem, s: Sizes) -> Work:
    return returns_at_once("returns at once if the factor is 1; otherwise it reads and writes the tensors")


SCALE_SPEC = KernelSpec(
    name="scale",
    operation="linear_cross_entropy",
    problem=ScaleProblem,
    on=on_all("quackish.ops.shared.kernels.scale:Scale", ScaleConfig, lambda problem, gpu: ScaleConfig()),
    sizes=("n", "n2"),
    work=_scale_work,
    samples=[ScaleProblem("bfloat16")],
)
SPECS = GEMM_SPEC, SCALE_SPEC
