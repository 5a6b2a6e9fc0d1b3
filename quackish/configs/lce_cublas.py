"""Linear cross entropy on the cuBLAS path: problems and configs of the kernels around the GEMMs, and buffer sizes.

This path is for Blackwell. It was neither measured nor run on a Blackwell GPU.
"""

import dataclasses
from typing import Any, NamedTuple

from quackish.configs.arguments import ALIGNED_F32, F32, I32, Ptr, optional
from quackish.configs.gemm import logits_args

TILE_N = 256  # classes per partial sum of the softmax
# Buffer for the fp32 result of a GEMM: logits, or rows of the input gradient.
PRODUCT_BYTES = 1 << 28


class ExpArgs(NamedTuple):
    """z are columns [first, first + n) of the GEMM of the logits that `epilogue` describes."""

    z: Any = ALIGNED_F32  # (rows, n): GEMM result, with columns up to the end of the last tile
    out: Any = None  # (rows, n) bf16 or fp16, written: exp_logits or dlogits; absent without out_dtype
    # SoftmaxArgs or DlogitsArgs. Rows of part_sum have tiles / 2 sums, then their shifts; the other sums, then zeros.
    epilogue: Any = None
    num_live: Any = I32  # (1,)
    z_stride: Any = "int64"
    out_stride: Any = "int64"
    first: Any = "int32"  # a multiple of TILE_N
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceExpProblem:
    """`kind`: "softmax", exp_logits and the row statistics; or "dlogits", the gradient of the logits."""

    kind: str
    out_dtype: str | None = None  # None: only statistics are stored
    bias_dtype: str | None = None
    softcap: bool = False
    smoothing: bool = False
    weighted: bool = False  # class weights, with smoothing
    logit_scale: bool = False
    return_stats: bool = False  # softmax: also sums of e * log2(e) and the argmax
    entropy: bool = False  # dlogits: the entropy has a gradient

    @property
    def args(self) -> ExpArgs:
        return ExpArgs(out=optional(self.out_dtype, aligned=True), epilogue=logits_args(self.kind, self))


class RescaleArgs(NamedTuple):
    state: Any = I32  # address of the RowState
    exp_logits: Any = None  # (rows, n) bf16, rescaled; absent unless stored
    part_sum: Any = F32  # (rows, tiles), rescaled: sums, shifts
    part_elog: Any = None  # (rows, tiles) fp32, rescaled; with return_stats
    exp_logits_stride: Any = "int64"
    first: Any = "int32"  # the class of the first column, a multiple of TILE_N
    tiles: Any = "int32"  # twice the tiles of a row
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"
    logit_scale: Any = None  # 0-dim fp32


@dataclasses.dataclass(frozen=True)
class LceRescaleProblem:
    stored: bool  # whether exp_logits is kept
    logit_scale: bool = False
    return_stats: bool = False  # also sums of e * log2(e)

    @property
    def args(self) -> RescaleArgs:
        return RescaleArgs(
            exp_logits=Ptr("bfloat16", aligned=True) if self.stored else None,
            part_elog=F32 if self.return_stats else None,
            logit_scale=F32 if self.logit_scale else None,
        )


class ClearArgs(NamedTuple):
    out: Any = None  # (rows, h) bf16 or fp16, ignored rows are zeroed
    num_live: Any = I32  # (1,)
    start: Any = "int32"
    rows: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceClearProblem:
    h: int  # a multiple of 8
    dtype: str

    @property
    def args(self) -> ClearArgs:
        return ClearArgs(out=Ptr(self.dtype, aligned=True))


def logit_columns(rows: int) -> int:
    """Classes whose logits fit in the buffer: whole tiles, at least one."""
    return max(PRODUCT_BYTES // (4 * rows * TILE_N), 1) * TILE_N


def product_rows(h: int) -> int:
    """Rows of the input gradient that fit in the buffer."""
    return max(PRODUCT_BYTES // (4 * h), 1)
