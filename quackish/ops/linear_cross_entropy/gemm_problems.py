"""The GEMMs of linear cross entropy: their epilogues and arguments, problems, config rules and description."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import ALIGNED_F32, ALIGNED_I16, F32, I32, I64, optional
from quackish.device.spec import KernelSpec, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, ceil_div, returns_at_once
from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import EpilogueSpec, GemmProblem, Store, gemm_work
from quackish.kernels.gemm.sm90_config import GemmConfig, gemm_why_illegal
from quackish.kernels.gemm.sm100_config import GemmSm100Config, gemm_sm100_why_illegal
from quackish.ops.linear_cross_entropy.row_problems import ROW_TILE
from quackish.ops.shared.problems import DW_PINGPONG

SOFTMAX_TILE_N = {"sm_90": 192, "sm_100": 256, "sm_103": 256}  # classes per partial sum of the softmax

# Epilogues ------------------------------------------------------------------------------------------------------------


class SoftmaxArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (n,) fp32; with class weights and label smoothing
    row_shift: Any = F32  # (m,); not used with recompute_flagged
    slot_target: Any = I32  # (m,)
    row_max_bits: Any = I32  # (m,), updated; only read with recompute_flagged
    flags: Any = I32  # (1 + ceil(m / 128),), set; only read with recompute_flagged
    part_sum: Any = F32  # (m, tiles), written
    target_logit: Any = F32  # (m,), written
    part_wsum: Any = None  # (m, tiles) fp32, written; with label smoothing
    part_elog: Any = None  # (m, tiles) fp32, written; with return_stats
    argmax_bits: Any = None  # (m,) int64, updated unless recompute_flagged; with return_stats
    softcap: Any = "float32"
    tiles: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


class DlogitsArgs(NamedTuple):
    bias: Any = None  # (n,) fp32, bf16 or fp16; absent without bias
    class_weight: Any = None  # (v0 + n,) fp32; with class weights and label smoothing
    coefs: Any = ALIGNED_F32  # (m, 4)
    slot_target: Any = I32  # (m,)
    coef_entropy: Any = None  # (m,) fp32; if the entropy has a gradient
    softcap: Any = "float32"
    v0: Any = "int32"  # the class of the first column
    logit_scale: Any = None  # 0-dim fp32


class RowsOutArgs(NamedTuple):
    row_scale: Any = F32  # (m,)
    order: Any = I32  # (start + m,)


class ResidualArgs(NamedTuple):
    first_slot_of_class: Any = I32  # (m,), NO_SLOT for classes without a slot
    rounding_residual: Any = ALIGNED_I16  # (slots, n), written: row first_slot_of_class[i] for row i of D


@dataclasses.dataclass(frozen=True)
class Logits(EpilogueSpec):
    """Base class: D are logits."""

    bias_dtype: str | None = None
    softcap: bool = False
    smoothing: bool = False  # Softmax: also row sums of class weight * logit; Dlogits: the smoothed target
    weighted: bool = False  # class weights, with smoothing
    logit_scale: bool = False

    @property
    def _shared_args(self) -> dict[str, Any]:
        return dict(
            bias=optional(self.bias_dtype), class_weight=F32 if self.weighted else None,
            logit_scale=F32 if self.logit_scale else None,
        )  # fmt: skip

    def has_registers(self, stored: bool) -> bool:
        """Whether ping-pong leaves enough registers; otherwise 8 to 264 bytes spill. stored: D has a dtype."""
        if self.smoothing and stored:
            return False
        return not ((self.softcap or self.logit_scale) and self.bias_dtype and stored)

    def why_illegal(self, problem: Any, config: Any, gpu: Gpu) -> str | None:
        rows = config.cluster_rows
        if rows % ROW_TILE:  # on Hopper; Blackwell's tiles have 128 or 256 rows
            return (
                f"tile_m is {config.tile_m} with cluster_m {config.cluster_m}, {rows} rows per cluster; expected a "
                f"multiple of {ROW_TILE}, the number of rows that are flagged and cleared together"
            )
        return None


@dataclasses.dataclass(frozen=True)
class Softmax(Logits):
    """Stores exp_logits, sums of exp(logit - row_shift) per row and tile, and the targets' logits."""

    return_stats: bool = False  # also sums of e * log2(e) and the argmax
    recompute_flagged: bool = False  # only tiles that a first launch flagged, shifted by the rows' maxima

    def args(self, dtype: str) -> SoftmaxArgs:
        return SoftmaxArgs(
            **self._shared_args, part_wsum=F32 if self.smoothing else None,
            part_elog=F32 if self.return_stats else None, argmax_bits=I64 if self.return_stats else None,
        )  # fmt: skip

    @property
    def selects_tiles(self) -> bool:
        return self.recompute_flagged

    def has_registers(self, stored: bool) -> bool:
        if self.return_stats and self.bias_dtype and (stored or self.weighted):
            return False
        return super().has_registers(stored)

    def why_illegal(self, problem: Any, config: Any, gpu: Gpu) -> str | None:
        expected = SOFTMAX_TILE_N[gpu.family]
        if config.tile_n != expected:
            return (
                f"tile_n is {config.tile_n}; expected {expected}, the number of classes per partial sum of the "
                "softmax, which other kernels add up"
            )
        return super().why_illegal(problem, config, gpu)

    def work(self, product: Work, sizes: Sizes) -> Work:
        if self.recompute_flagged:
            return returns_at_once("returns at once if no row was flagged")
        # sums per row and tile of Hopper; Blackwell's are wider
        tiles = ceil_div(sizes["n"], SOFTMAX_TILE_N["sm_90"])
        sums = sizes["m"] * tiles * 4 * (1 + self.smoothing + self.return_stats)
        return dataclasses.replace(product, bytes_written=product.bytes_written + sums)


@dataclasses.dataclass(frozen=True)
class Dlogits(Logits):
    """Stores the gradient of the logits, from known statistics."""

    entropy: bool = False  # the entropy has a gradient

    def args(self, dtype: str) -> DlogitsArgs:
        return DlogitsArgs(**self._shared_args, coef_entropy=F32 if self.entropy else None)

    def has_registers(self, stored: bool) -> bool:
        return super().has_registers(stored) and not (self.entropy and (self.softcap or self.bias_dtype))


@dataclasses.dataclass(frozen=True)
class RowsOut(EpilogueSpec):
    """output[order[start + i]] = row_scale[i] * D[i]."""

    stores_by_tma = False
    can_pingpong = False

    def args(self, dtype: str) -> RowsOutArgs:
        return RowsOutArgs()


@dataclasses.dataclass(frozen=True)
class StoreWithResidual(EpilogueSpec):
    """Stores D in bf16, and the rounding residual of rows that have a slot."""

    def args(self, dtype: str) -> ResidualArgs:
        return ResidualArgs()

    def work(self, product: Work, sizes: Sizes) -> Work:
        residual = min(sizes["m"], sizes["k"]) * sizes["n"] * 2  # for at most min(m, k) rows
        return dataclasses.replace(product, bytes_written=product.bytes_written + residual)


# Problems and configs -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class LceGemmProblem(GemmProblem):
    """Softmax and Dlogits: the logits. RowsOut and Store with live "m": dx. Store and StoreWithResidual: dw."""

    live: str | None = "m"


def gemm_config(problem: LceGemmProblem, gpu: Gpu) -> GemmConfig:
    """Independent of the shape, so that a row's partial sums and loss do not depend on M."""
    # bf16, M 8192, H 4096, V 128256, in ms (in parentheses cuBLAS's GEMM without epilogue):
    #                    H100            H200
    # logits ping-pong   11.88 (12.37)   12.43 (12.81)
    # dx cooperative     12.01 (11.96)   12.46 (12.25)
    # dw                 11.73 (12.65)   12.22 (12.69)
    # Logits: exponentials take as long as a mainloop with K = 256, and ping-pong overlaps them. dx: the loads of
    # ping-pong's narrower tiles cost more than it gains. Groups are 2048 rows or columns wide: dw takes up to 5 %
    # longer in groups of 4096 columns, and 44 % in groups of 1024 with 16,384 rows (H100).
    epilogue = problem.epilogue
    if isinstance(epilogue, Logits):
        pingpong = epilogue.has_registers(problem.out_dtype is not None) and not epilogue.selects_tiles
        return GemmConfig(tile_n=SOFTMAX_TILE_N[gpu.family], num_stages=5, pingpong=pingpong)
    if problem.live == "k" and not problem.split_k_tail:
        return DW_PINGPONG
    return GemmConfig(group_along="n")


def gemm_sm100_config(problem: LceGemmProblem, gpu: Gpu) -> GemmSm100Config:
    """Independent of the shape, so that a row's partial sums and loss do not depend on M: always tiles of two CTAs.

    With one CTA, up to 128 rows would use twice as many SMs.
    """
    return GemmSm100Config(group_along="m" if isinstance(problem.epilogue, Logits) else "n")


# Description ----------------------------------------------------------------------------------------------------------

_NAMES = {Softmax: "lce_logits", Dlogits: "lce_dlogits"}


def _public_name(problem: LceGemmProblem) -> str:
    return "lce_dw" if problem.live == "k" else _NAMES.get(type(problem.epilogue), "lce_dx")


_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="lce_gemm",
    operation="linear_cross_entropy",
    problem=LceGemmProblem,
    on={
        **on_hopper(
            "quackish.ops.linear_cross_entropy.kernels.gemm_sm90:LceGemmSm90",
            GemmConfig,
            gemm_config,
            gemm_why_illegal,
            "quackish.ops.linear_cross_entropy.tuning:GEMM",
        ),
        **on_blackwell(
            "quackish.ops.linear_cross_entropy.kernels.gemm_sm100:LceGemmSm100",
            GemmSm100Config,
            gemm_sm100_config,
            gemm_sm100_why_illegal,
            "quackish.ops.linear_cross_entropy.tuning:GEMM_SM100",
        ),
    },
    sizes=("m", "n", "k"),
    work=gemm_work,
    samples=[
        LceGemmProblem(Softmax(), _B, _B),
        LceGemmProblem(Dlogits(smoothing=True), _B, _B),
        LceGemmProblem(RowsOut(), _B, _B, b_major="n"),
        LceGemmProblem(Store(), _B, "float32", live="k"),
    ],
    cublas="quackish.ops.linear_cross_entropy.tuning:cublas",
    public_name=_public_name,
    public_names=("lce_logits", "lce_dlogits", "lce_dx", "lce_dw"),
)
