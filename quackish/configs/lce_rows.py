"""Linear cross entropy's kernels around its GEMMs: what is asked (Problem) and how it is done (Config).

Numbers of rows, classes and tiles are in none of them: kernels get these at run time.
"""

import dataclasses
from typing import Any

from quackish.gpu import Gpu

WIDE_BIAS = 32_768  # columns, and more
ROW_TILE = 128  # rows of a GEMM tile: up to the end of the last one with live rows, buffers hold zeros, not garbage
NO_PLACE = (1 << 31) - 1  # in place of a class's first place: no row has it
MOST_ROWS_COUNTED = 1 << 14  # of a chunk that `lce_sort` sorts itself, in a time that grows with their square
MANY_ROWS = 8  # of a class, and more: all warps of a CTA of `lce_targets` sum them


@dataclasses.dataclass(frozen=True)
class LceCompactProblem:
    target_dtype: str  # "int32" or "int64"
    class_weight_dtype: str | None = None
    divisor: str = "one"  # "one", "weights" (sum of the class weights of rows), "float" or "tensor" (num_items)


@dataclasses.dataclass(frozen=True)
class LceGatherProblem:
    h: int  # a multiple of 8
    dtype: str  # of x, w and xc
    target_dtype: str
    bias_dtype: str | None = None
    dx_dtype: str | None = None
    softcap: bool = False
    rows_out: bool = True  # loss and lse of ignored rows are written
    x_aligned: bool = True  # every row of x starts on 16 bytes


@dataclasses.dataclass(frozen=True)
class LceRowsProblem:
    stats: bool  # loss, lse and the sum of exponentials
    grads: str = "none"  # "none", "scale" (of rows of E and xc) or "coefs" (four numbers)
    h: int = 0  # a multiple of 8, where rows of xc are scaled
    dtype: str | None = None  # of xc and xs
    class_weight_dtype: str | None = None
    label_smoothing: bool = False
    softcap: bool = False  # matters to "scale" alone
    grad_loss: str = "one"  # "one", "scalar" or "rows"
    grad_lse: bool = False
    e_split: bool = False  # E lies in two buffers
    places: bool = False  # a number a class is set to NO_PLACE, for `sort`

    def __post_init__(self):
        if self.grads == "scale" and self.label_smoothing:
            raise ValueError('LceRowsProblem: grads is "scale" with label_smoothing; expected "coefs"')


@dataclasses.dataclass(frozen=True)
class LceSortProblem:
    e_split: bool  # E lies in two buffers
    places: bool = False  # where each class's first row is, is listed
    presorted: bool = False  # the order is given


@dataclasses.dataclass(frozen=True)
class LceTargetsProblem:
    h: int  # a multiple of 8
    dtype: str  # of x
    dw_dtype: str
    x_aligned: bool = True  # every row of x starts on 16 bytes
    rest: bool = False  # dw in bf16: the bits that rounding cut off count as well


@dataclasses.dataclass(frozen=True)
class LceBiasProblem:
    dtype: str  # of E
    row_scale: bool
    accumulate: bool
    wide: bool = False  # WIDE_BIAS columns, or more


@dataclasses.dataclass(frozen=True)
class LceScatterProblem:
    h: int  # a multiple of 8
    dx_dtype: str
    row_scale: bool = False


@dataclasses.dataclass(frozen=True)
class LceScaleProblem:
    dtype: str


@dataclasses.dataclass(frozen=True)
class LceCompactConfig:
    threads: int = 1024  # one CTA
    each: int = 8  # targets of a thread in flight


@dataclasses.dataclass(frozen=True)
class LceRowsConfig:
    """A warp a row, so the order of a row's sums depends on its length alone."""

    threads: int = 256
    vectors: int = 4  # 16-byte vectors of a thread in flight, of each tensor

    def num_ctas(self, rows: int) -> int:
        return -(-rows // (self.threads // 32))


@dataclasses.dataclass(frozen=True)
class LceSortConfig:
    threads: int = 1024  # a CTA has 32 rows
    tile: int = 4096  # classes in shared memory; a multiple of 4 * threads


@dataclasses.dataclass(frozen=True)
class LceTargetsConfig:
    threads: int = 256
    rows: int = 4  # in flight
    places: int = 2  # of a warp


@dataclasses.dataclass(frozen=True)
class LceBiasConfig:
    """A CTA has `lanes * 8` columns of all rows: every (threads / lanes)-th row a group of lanes, in order, then the
    groups in order."""

    lanes: int
    threads: int = 512

    def num_ctas(self, n: int) -> int:
        return -(-n // (self.lanes * 8))


@dataclasses.dataclass(frozen=True)
class LceScaleConfig:
    threads: int = 256
    vectors: int = 4  # 16-byte vectors of a thread in flight

    def num_ctas(self, bytes: int, sm_count: int) -> int:
        """Persistent: where the factor is 1, few CTAs leave again."""
        return max(1, min(-(-bytes // (self.threads * self.vectors * 16)), sm_count * 4))


def lce_gather_config(problem: LceGatherProblem) -> LceRowsConfig:
    # Rows that are not aligned come in element by element, and with four vectors of them registers spill.
    return LceRowsConfig(vectors=4 if problem.x_aligned else 2)


def lce_bias_config(problem: LceBiasProblem) -> LceBiasConfig:
    """The more columns, the wider the slice of a CTA, while every SM has some. Not measured."""
    return LceBiasConfig(lanes=32 if problem.wide else 8)


# Legality: why a config cannot run a kernel, as the field, what it is and what it may be; None where it can -----------


def threads_why_illegal(problem: Any, config: Any, gpu: Gpu) -> str | None:
    if config.threads not in range(32, 1025, 32):
        return f"threads is {config.threads}; expected a multiple of 32, up to 1024"
    return None


def compact_why_illegal(problem: LceCompactProblem, config: LceCompactConfig, gpu: Gpu) -> str | None:
    if config.threads != 1024:
        return f"threads is {config.threads}; expected 1024, as a warp adds up the counts of 32"
    if config.each not in range(1, 17):
        return f"each is {config.each}; expected 1 to 16"
    return None


def rows_why_illegal(problem: Any, config: LceRowsConfig | LceScaleConfig, gpu: Gpu) -> str | None:
    if config.vectors not in (1, 2, 4, 8):
        return f"vectors is {config.vectors}; expected 1, 2, 4 or 8"
    return threads_why_illegal(problem, config, gpu)


def sort_why_illegal(problem: LceSortProblem, config: LceSortConfig, gpu: Gpu) -> str | None:
    reason = threads_why_illegal(problem, config, gpu)
    if reason is not None:
        return reason
    if config.tile < 1 or config.tile % (4 * config.threads):
        return f"tile is {config.tile}; expected a multiple of 4 * threads, {4 * config.threads}"
    smem_bytes = 4 * (config.tile + 32 * (config.threads // 32))
    if smem_bytes > gpu.smem_bytes:
        return (
            f"tile is {config.tile} with threads {config.threads}, {smem_bytes} bytes of shared memory; expected at "
            f"most {gpu.smem_bytes} on {gpu.name}"
        )
    return None


def targets_why_illegal(problem: LceTargetsProblem, config: LceTargetsConfig, gpu: Gpu) -> str | None:
    if config.rows not in range(1, 9):
        return f"rows is {config.rows}; expected 1 to 8"
    if config.places not in range(1, 17):
        return f"places is {config.places}; expected 1 to 16"
    return threads_why_illegal(problem, config, gpu)


def bias_why_illegal(problem: LceBiasProblem, config: LceBiasConfig, gpu: Gpu) -> str | None:
    if config.lanes < 1 or config.threads % config.lanes:
        return f"lanes is {config.lanes}; expected a divisor of threads {config.threads}"
    return threads_why_illegal(problem, config, gpu)
