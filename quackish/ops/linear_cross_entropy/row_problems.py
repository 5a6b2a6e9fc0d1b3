"""The kernels around the GEMMs of linear cross entropy: arguments, problems, configs, and their descriptions.

The numbers of rows, classes and tiles are runtime arguments. The whole call has m rows and v classes; a launch handles
`rows` chunk rows, starting at slot `start`. Matrices are contiguous unless a stride, in elements, is given.
"""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import ALIGNED_F32, ALIGNED_I16, BF16, F32, I32, I64, Ptr, optional
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of
from quackish.gpu import Gpu

WIDE_BIAS = 32_768  # columns from which LceBiasProblem.wide is set
NO_SLOT = (1 << 31) - 1  # in first_slot_of_class: no row has this class
MOST_ROWS_COUNTED = 1 << 14  # largest chunk that `lce_sort` sorts itself, in quadratic time
ROW_TILE = 128  # buffers are zero from the last live row to the end of its tile of ROW_TILE rows
MANY_ROWS = 8  # a class with at least this many rows is summed by all warps of a CTA of `lce_targets`


class CompactArgs(NamedTuple):
    target: Any = None  # (m,) int32 or int64
    class_weight: Any = None  # (v,) fp32, bf16 or fp16; absent without class weights or with another divisor
    num_items_at: Any = None  # 0-dim fp32; with divisor "tensor"
    state: Any = I32  # address of the RowState; order, inv_divisor, tickets and num_live are written
    num_items: Any = "float32"  # used with divisor "float"
    ignore_index: Any = "int64"
    v: Any = "int32"
    m: Any = "int32"


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


class GatherArgs(NamedTuple):
    state: Any = I32  # address of the RowState
    x: Any = None  # (m, h) bf16 or fp16
    live_x: Any = None  # (rows, h) as x, written: the live rows of x
    # All tensors below are absent with only_live_x.
    w: Any = None  # (v, h) as x
    bias: Any = None  # (v,) fp32, bf16 or fp16; absent without bias
    target: Any = None  # (m,) int32 or int64
    dx: Any = None  # (m, h), ignored rows are zeroed; absent without dx_dtype
    loss: Any = None  # (m,) fp32, ignored rows are zeroed
    argmax_bits: Any = None  # (rows,) int64, written: less than the code of any argmax; with return_stats
    x_stride: Any = "int64"
    softcap: Any = "float32"
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"
    v: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceGatherProblem:
    h: int  # a multiple of 8
    dtype: str  # of x, w and live_x
    target_dtype: str | None = None
    bias_dtype: str | None = None
    dx_dtype: str | None = None
    softcap: bool = False
    only_live_x: bool = False  # write only live_x: for backward, which has the rest of the RowState
    x_aligned: bool = True  # every row of x starts on 16 bytes
    return_stats: bool = False

    @property
    def args(self) -> GatherArgs:
        matrix = Ptr(self.dtype, aligned=True)
        return GatherArgs(
            x=Ptr(self.dtype, self.x_aligned), live_x=matrix, w=None if self.only_live_x else matrix,
            bias=optional(self.bias_dtype), target=optional(self.target_dtype),
            dx=optional(self.dx_dtype, aligned=True), loss=None if self.only_live_x else F32,
            argmax_bits=I64 if self.return_stats else None,
        )  # fmt: skip


class ExpLogitsArgs(NamedTuple):
    first: Any = BF16  # (rows, split or v)
    second: Any = None  # (rows, v - split) bf16; with exp_logits_split
    first_stride: Any = "int64"
    second_stride: Any = "int64"
    split: Any = "int32"


class StatsArgs(NamedTuple):
    """The sums that the statistics are computed from, over the classes of each tile: (rows, tiles). Also the loss."""

    part_sum: Any = F32  # of exponentials
    part_wsum: Any = None  # fp32, of class weight * logit; with label smoothing
    part_elog: Any = None  # fp32, of e * log2(e); with return_stats
    argmax_bits: Any = None  # (rows,) int64; with return_stats
    loss: Any = F32  # (m,), written


class GradsArgs(NamedTuple):
    """Gradients of the outputs, fp32."""

    loss: Any = None  # 0-dim or (m,); absent for 1
    lse: Any = None  # (m,); if lse has one, as for the next two
    log_prob: Any = None  # (m,)
    entropy: Any = None  # (m,); with "coefs"


class LossArgs(NamedTuple):
    class_weight: Any = None  # (v,) fp32, bf16 or fp16; absent without class weights
    total_weight: Any = None  # 0-dim fp32: sum of the class weights; with class weights and label smoothing
    logit_scale: Any = None  # 0-dim fp32; absent for 1
    softcap: Any = "float32"
    z_loss: Any = "float32"
    label_smoothing: Any = "float32"
    inv_divisor: Any = F32  # (1,): the RowState's, or what replaces it (`common_factor`)


class RowsArgs(NamedTuple):
    state: Any = I32  # address of the RowState
    options: Any = LossArgs()
    stats: Any = None  # StatsArgs; with stats
    grads: Any = None  # GradsArgs; if any output has a gradient
    exp_logits: Any = None  # ExpLogitsArgs, target entries are overwritten; with "scale"
    live_x: Any = None  # (rows, h) bf16 or fp16; with "scale" and h
    scaled_x: Any = None  # as live_x, and may be the same memory, written: row_scale * live_x
    coefs: Any = None  # (rows, 4) fp32, written; with "coefs"
    coef_entropy: Any = None  # (rows,) fp32, written; with grad_entropy
    first_slot_of_class: Any = None  # (v,) int32, filled with NO_SLOT; with first_slot_of_class
    v: Any = "int32"
    tiles: Any = "int32"
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


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
        scale, coefs, weighted = self.grads == "scale", self.grads == "coefs", self.class_weight_dtype is not None
        x, returned = optional(self.dtype, aligned=True), F32 if self.return_stats else None
        grad_entropy = F32 if coefs and self.grad_entropy else None
        options = LossArgs(
            class_weight=optional(self.class_weight_dtype),
            total_weight=F32 if self.label_smoothing and weighted else None,
            logit_scale=F32 if self.logit_scale else None,
        )
        stats = StatsArgs(
            part_wsum=F32 if self.label_smoothing else None, part_elog=returned, argmax_bits=returned and I64
        )
        grads = GradsArgs(
            loss=F32 if self.grad_loss != "one" else None, lse=F32 if self.grad_lse else None,
            log_prob=F32 if self.grad_log_prob else None, entropy=grad_entropy,
        )  # fmt: skip
        return RowsArgs(
            options=options, stats=stats if self.stats else None,
            grads=grads if (scale or coefs) and any(grads) else None,
            exp_logits=ExpLogitsArgs(second=BF16 if self.exp_logits_split else None) if scale else None, live_x=x,
            scaled_x=x, coefs=ALIGNED_F32 if coefs else None, coef_entropy=grad_entropy,
            first_slot_of_class=I32 if self.first_slot_of_class else None,
        )  # fmt: skip


class SortArgs(NamedTuple):
    state: Any = I32  # address of the RowState; sorted_target, sorted_row and sorted_grad are written
    exp_logits: Any = None  # ExpLogitsArgs, target entries are zeroed
    first_slot_of_class: Any = None  # (v,) int32, NO_SLOT before, updated; with first_slot_of_class
    index: Any = None  # (rows,) int64: the chunk row of each sorted slot; with presorted
    v: Any = "int32"
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceSortProblem:
    exp_logits_split: bool  # exp_logits is in two buffers
    first_slot_of_class: bool = False  # written
    presorted: bool = False  # `index` is given

    @property
    def args(self) -> SortArgs:
        return SortArgs(
            exp_logits=ExpLogitsArgs(second=BF16 if self.exp_logits_split else None),
            first_slot_of_class=I32 if self.first_slot_of_class else None,
            index=Ptr("int64") if self.presorted else None,
        )  # fmt: skip


class TargetsArgs(NamedTuple):
    state: Any = I32  # address of the RowState
    x: Any = None  # (m, h) bf16 or fp16
    dw: Any = None  # (v1 - v0, h) bf16, fp16 or fp32, added to
    rounding_residual: Any = None  # (rows, h) int16: bits of dw that rounding dropped, at a class's first sorted slot
    x_stride: Any = "int64"
    v0: Any = "int32"
    v1: Any = "int32"
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


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


class BiasArgs(NamedTuple):
    exp_logits: Any = None  # (rows, >= n) bf16 or fp16: exp_logits, or gradients of the logits
    row_scale: Any = None  # (rows,) fp32; absent: 1
    db: Any = F32  # (n,), written or added to
    num_live: Any = I32  # (1,)
    exp_logits_stride: Any = "int64"  # a multiple of 8
    start: Any = "int32"
    rows: Any = "int32"
    n: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceBiasProblem:
    dtype: str  # of exp_logits
    row_scale: bool
    accumulate: bool
    wide: bool = False  # at least WIDE_BIAS columns

    @property
    def args(self) -> BiasArgs:
        return BiasArgs(exp_logits=Ptr(self.dtype, aligned=True), row_scale=F32 if self.row_scale else None)


class ScatterArgs(NamedTuple):
    state: Any = I32  # address of the RowState
    acc: Any = ALIGNED_F32  # (rows, h)
    dx: Any = None  # (m, h) bf16, fp16 or fp32, written
    m: Any = "int32"
    start: Any = "int32"
    rows: Any = "int32"


@dataclasses.dataclass(frozen=True)
class LceScatterProblem:
    h: int  # a multiple of 8
    dx_dtype: str

    @property
    def args(self) -> ScatterArgs:
        return ScatterArgs(dx=Ptr(self.dx_dtype, aligned=True))


@dataclasses.dataclass(frozen=True)
class LceCompactConfig:
    threads: int = 1024  # one CTA
    batch: int = 8  # targets in flight per thread


@dataclasses.dataclass(frozen=True)
class LceRowsConfig:
    """One warp per row, so the order of a row's sums depends only on its length."""

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


def lce_gather_config(problem: LceGatherProblem, gpu: Gpu) -> LceRowsConfig:
    # Unaligned rows are loaded element by element; four vectors in flight would spill registers.
    return LceRowsConfig(vectors=4 if problem.x_aligned else 2)


def lce_bias_config(problem: LceBiasProblem, gpu: Gpu) -> LceBiasConfig:
    """More columns per CTA if there are enough columns for all SMs. Not measured."""
    return LceBiasConfig(lanes=32 if problem.wide else 8)


# Descriptions --------------------------------------------------------------------------------------------------------


def _compact_work(p: LceCompactProblem, s: Sizes) -> Work:
    note = "one CTA, which reads the targets a second time from the L2"
    return Work(s["m"] * bytes_of(p.target_dtype), s["m"] * 4, s["m"], note)


def _gather_work(p: LceGatherProblem, s: Sizes) -> Work:
    rows, row_bytes = s["rows"], p.h * bytes_of(p.dtype)
    targets = 0 if p.only_live_x else min(rows, s["v"])  # the most rows of w
    return Work((rows + targets) * row_bytes, rows * row_bytes, 0 if p.only_live_x else 2 * rows * p.h)


def _rows_work(p: LceRowsProblem, s: Sizes) -> Work:
    rows, row_bytes = s["rows"], p.h * bytes_of(p.dtype)  # h is 0 if no rows are scaled
    sums = rows * s["tiles"] * (1 + p.label_smoothing + p.return_stats) if p.stats else 0
    written = rows * (row_bytes + 3 * 4 * p.stats + 16 * (p.grads == "coefs"))  # with stats: loss, lse, row_sum
    return Work(4 * sums + rows * row_bytes, written, sums + rows * p.h)


def _sort_work(p: LceSortProblem, s: Sizes) -> Work:
    note = "" if p.presorted else "compares the classes of all pairs of rows, from the L2"
    return Work(s["rows"] * 14, s["rows"] * 14, s["rows"], note)  # class, row, scale, exp_logits at the target


def _targets_work(p: LceTargetsProblem, s: Sizes) -> Work:
    rows, classes = s["rows"], min(s["rows"], s["v1"] - s["v0"])  # classes: the most rows of dw
    read = p.h * (rows * bytes_of(p.dtype) + classes * (bytes_of(p.dw_dtype) + 2 * p.rounding_residual))
    return Work(read, p.h * classes * bytes_of(p.dw_dtype), 2 * rows * p.h, "fewer bytes if rows share a target")


def _bias_work(p: LceBiasProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    return Work(n * (rows * bytes_of(p.dtype) + 4 * p.accumulate), n * 4, rows * n * (1 + p.row_scale))


def _scatter_work(p: LceScatterProblem, s: Sizes) -> Work:
    elements = s["rows"] * p.h
    return Work(elements * 4, elements * bytes_of(p.dx_dtype), 0)


def _spec(kernel: str, config: type, rule: Any, sizes: tuple[str, ...], work: Any, sample: Any) -> KernelSpec:
    """A kernel of all GPUs with one config per problem. kernel: "module:class" in `kernels`."""
    return KernelSpec(
        name=f"lce_{kernel.partition(':')[0]}",
        operation="linear_cross_entropy",
        problem=type(sample),
        on=on_all(f"quackish.ops.linear_cross_entropy.kernels.{kernel}", config, rule),
        sizes=sizes,
        work=work,
        samples=[sample],
    )


def _default(config: type) -> Any:
    """The rule of a kernel with one config."""
    return lambda problem, gpu: config()


ROW_SPECS = (
    _spec(
        "compact:LceCompact",
        LceCompactConfig,
        _default(LceCompactConfig),
        ("v", "m"),
        _compact_work,
        LceCompactProblem("int64"),
    ),
    _spec(
        "gather:LceGather",
        LceRowsConfig,
        lce_gather_config,
        ("rows", "v"),
        _gather_work,
        LceGatherProblem(64, "bfloat16", "int64"),
    ),
    _spec(
        "rows:LceRows",
        LceRowsConfig,
        _default(LceRowsConfig),
        ("v", "tiles", "rows"),
        _rows_work,
        LceRowsProblem(True, "scale", 64, "bfloat16"),
    ),
    _spec("sort:LceSort", LceSortConfig, _default(LceSortConfig), ("rows",), _sort_work, LceSortProblem(False)),
    _spec(
        "targets:LceTargets",
        LceTargetsConfig,
        _default(LceTargetsConfig),
        ("v0", "v1", "rows"),
        _targets_work,
        LceTargetsProblem(4096, "bfloat16", "bfloat16"),
    ),
    _spec(
        "bias:LceBias",
        LceBiasConfig,
        lce_bias_config,
        ("rows", "n"),
        _bias_work,
        LceBiasProblem("bfloat16", True, False),
    ),
    _spec(
        "scatter:LceScatter",
        LceRowsConfig,
        _default(LceRowsConfig),
        ("rows",),
        _scatter_work,
        LceScatterProblem(64, "bfloat16"),
    ),
)
