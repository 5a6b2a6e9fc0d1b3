"""Linear cross entropy on the cuBLAS path: problems and configs of the kernels around the GEMMs, and buffer sizes.

This path is for Blackwell. It was neither measured nor run on a Blackwell GPU.
"""

import dataclasses

from quackish.configs.arguments import ALIGNED_F32, F32, I32, I64, Ptr, optional
from quackish.configs.lce_args import ClearArgs, ExpArgs, RescaleArgs

TILE_N = 256  # classes per partial sum of the softmax
# Buffer for the fp32 result of a GEMM: logits, or rows of the input gradient.
PRODUCT_BYTES = 1 << 28


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
        softmax, stats = self.kind == "softmax", F32 if self.return_stats else None
        ints, floats = (I32, F32) if softmax else (None, None)
        return ExpArgs(
            out=optional(self.out_dtype, aligned=True), bias=optional(self.bias_dtype),
            class_weight=F32 if self.weighted else None, row_shift=floats, row_max_bits=ints, flags=ints,
            part_sum=floats, part_wsum=floats if self.smoothing else None, part_elog=stats,
            argmax_bits=stats and I64, target_logit=floats, coefs=None if softmax else ALIGNED_F32,
            coef_entropy=F32 if self.entropy else None, logit_scale=F32 if self.logit_scale else None,
        )  # fmt: skip


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
