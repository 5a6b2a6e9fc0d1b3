"""The kernels around the GEMMs of linear cross entropy: what to compute (Problem) and how (Config).

The numbers of rows, classes and tiles are runtime arguments.
"""

import dataclasses

from quackish.configs.arguments import ALIGNED_F32, ALIGNED_I16, BF16, F32, I32, I64, Ptr, optional
from quackish.configs.lce_args import (
    BiasArgs,
    CompactArgs,
    GatherArgs,
    RowsArgs,
    ScaleArgs,
    ScatterArgs,
    SortArgs,
    TargetsArgs,
)

WIDE_BIAS = 32_768  # columns from which LceBiasProblem.wide is set
ROW_TILE = 128  # rows per GEMM tile; buffers are zero from the last live row to the end of its tile
NO_SLOT = (1 << 31) - 1  # in first_slot_of_class: no row has this class
MOST_ROWS_COUNTED = 1 << 14  # largest chunk that `lce_sort` sorts itself, in quadratic time
MANY_ROWS = 8  # a class with at least this many rows is summed by all warps of a CTA of `lce_targets`


@dataclasses.dataclass(frozen=True)
class LceCompactProblem:
    target_dtype: str  # "int32" or "int64"
    class_weight_dtype: str | None = None
    divisor: str = "one"  # "one", "weights" (sum of the targets' class weights), "float" or "tensor" (num_items)

    @property
    def args(self) -> CompactArgs:
        return CompactArgs(
            target=Ptr(self.target_dtype), class_weight=optional(self.class_weight_dtype),
            num_items_at=F32 if self.divisor == "tensor" else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LceGatherProblem:
    h: int  # a multiple of 8
    dtype: str  # of x, w and live_x
    target_dtype: str
    bias_dtype: str | None = None
    dx_dtype: str | None = None
    softcap: bool = False
    rows_out: bool = True  # zero loss and lse of ignored rows
    x_aligned: bool = True  # every row of x starts on 16 bytes
    return_stats: bool = False

    @property
    def args(self) -> GatherArgs:
        rows_out, stats = F32 if self.rows_out else None, F32 if self.return_stats else None
        return GatherArgs(
            x=Ptr(self.dtype, self.x_aligned), w=Ptr(self.dtype, aligned=True), bias=optional(self.bias_dtype),
            target=Ptr(self.target_dtype), live_x=Ptr(self.dtype, aligned=True),
            dx=optional(self.dx_dtype, aligned=True), loss=rows_out, lse=rows_out, log_prob=stats, entropy=stats,
            predicted=stats and I32, argmax_bits=stats and I64,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LceRowsProblem:
    stats: bool  # loss, lse and the sum of exponentials
    # "none", "coefs" (four numbers), or "scale" (of rows of exp_logits and live_x): not with smoothing or grad_entropy
    grads: str = "none"
    h: int = 0  # a multiple of 8; 0: rows of live_x are not scaled
    dtype: str | None = None  # of live_x and scaled_x
    class_weight_dtype: str | None = None
    label_smoothing: bool = False
    softcap: bool = False  # used by "scale" only
    grad_loss: str = "one"  # "one", "scalar" or "rows"
    grad_lse: bool = False
    exp_logits_split: bool = False  # exp_logits is in two buffers
    first_slot_of_class: bool = False  # filled with NO_SLOT, for `lce_sort`
    logit_scale: bool = False
    return_stats: bool = False  # with stats: also log_prob, entropy and predicted
    grad_log_prob: bool = False
    grad_entropy: bool = False

    @property
    def args(self) -> RowsArgs:
        scale, coefs, smoothing = self.grads == "scale", self.grads == "coefs", self.label_smoothing
        grads, x = scale or coefs, optional(self.dtype, aligned=True)
        stats = F32 if self.stats and self.return_stats else None
        grad_entropy = F32 if coefs and self.grad_entropy else None
        return RowsArgs(
            part_sum=F32 if self.stats else None, part_wsum=F32 if self.stats and smoothing else None,
            part_elog=stats, argmax_bits=stats and I64, log_prob=stats, entropy=stats or grad_entropy,
            predicted=stats and I32, grad_log_prob=F32 if grads and self.grad_log_prob else None,
            grad_entropy=grad_entropy, coef_entropy=grad_entropy,
            target_logit=F32 if self.stats or scale else None, class_weight=optional(self.class_weight_dtype),
            total_weight=F32 if smoothing and self.class_weight_dtype is not None else None,
            loss=F32 if self.stats else None, grad_loss=F32 if grads and self.grad_loss != "one" else None,
            grad_lse=F32 if grads and self.grad_lse else None, exp_logits=BF16 if scale else None,
            exp_logits2=BF16 if scale and self.exp_logits_split else None, live_x=x, scaled_x=x,
            row_scale=F32 if scale else None, coefs=ALIGNED_F32 if coefs else None,
            first_slot_of_class=I32 if self.first_slot_of_class else None,
            logit_scale=F32 if self.logit_scale else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LceSortProblem:
    exp_logits_split: bool  # exp_logits is in two buffers
    first_slot_of_class: bool = False  # written
    presorted: bool = False  # `index` is given

    @property
    def args(self) -> SortArgs:
        return SortArgs(
            exp_logits2=BF16 if self.exp_logits_split else None,
            first_slot_of_class=I32 if self.first_slot_of_class else None,
            index=Ptr("int64") if self.presorted else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LceTargetsProblem:
    h: int  # a multiple of 8
    dtype: str  # of x
    dw_dtype: str
    x_aligned: bool = True  # every row of x starts on 16 bytes
    rounding_residual: bool = False  # dw is bf16, and the fp32 bits that rounding dropped are given

    @property
    def args(self) -> TargetsArgs:
        return TargetsArgs(
            x=Ptr(self.dtype, self.x_aligned), dw=Ptr(self.dw_dtype, aligned=True),
            rounding_residual=ALIGNED_I16 if self.rounding_residual else None,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class LceBiasProblem:
    dtype: str  # of exp_logits
    row_scale: bool
    accumulate: bool
    wide: bool = False  # at least WIDE_BIAS columns

    @property
    def args(self) -> BiasArgs:
        return BiasArgs(exp_logits=Ptr(self.dtype, aligned=True), row_scale=F32 if self.row_scale else None)


@dataclasses.dataclass(frozen=True)
class LceScatterProblem:
    h: int  # a multiple of 8
    dx_dtype: str
    row_scale: bool = False

    @property
    def args(self) -> ScatterArgs:
        return ScatterArgs(row_scale=F32 if self.row_scale else None, dx=Ptr(self.dx_dtype, aligned=True))


@dataclasses.dataclass(frozen=True)
class LceScaleProblem:
    dtype: str

    @property
    def args(self) -> ScaleArgs:
        out = Ptr(self.dtype, aligned=True)
        return ScaleArgs(out=out, out2=out)


@dataclasses.dataclass(frozen=True)
class LceCompactConfig:
    threads: int = 1024  # one CTA
    batch: int = 8  # targets in flight per thread


@dataclasses.dataclass(frozen=True)
class LceRowsConfig:
    """One warp per row, so the order of a row's sums depends only on its length; `lce_exp`: one per tile of a row."""

    threads: int = 256
    vectors: int = 4  # 16-byte vectors in flight per thread and tensor


@dataclasses.dataclass(frozen=True)
class LceSortConfig:
    threads: int = 1024  # per CTA of 32 rows
    tile: int = 4096  # targets in shared memory; a multiple of 4 * threads


@dataclasses.dataclass(frozen=True)
class LceTargetsConfig:
    threads: int = 256
    rows: int = 4  # in flight
    slots: int = 2  # per warp


@dataclasses.dataclass(frozen=True)
class LceBiasConfig:
    """A CTA sums `lanes * 8` columns over all rows. Each group of lanes sums every (threads / lanes)-th row in order;
    then the groups' sums are added in order."""

    lanes: int
    threads: int = 512


@dataclasses.dataclass(frozen=True)
class LceScaleConfig:
    threads: int = 256
    vectors: int = 4  # 16-byte vectors in flight per thread

    def num_ctas(self, bytes: int, sm_count: int) -> int:
        """Persistent CTAs, so that few are launched for nothing if the factor is 1."""
        return max(1, min(-(-bytes // (self.threads * self.vectors * 16)), sm_count * 4))


def lce_gather_config(problem: LceGatherProblem) -> LceRowsConfig:
    # Unaligned rows are loaded element by element; four vectors in flight would spill registers.
    return LceRowsConfig(vectors=4 if problem.x_aligned else 2)


def lce_bias_config(problem: LceBiasProblem) -> LceBiasConfig:
    """More columns per CTA if there are enough columns for all SMs. Not measured."""
    return LceBiasConfig(lanes=32 if problem.wide else 8)
