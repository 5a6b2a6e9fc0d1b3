"""The kernels of linear_divergence: arguments, problems, configs, descriptions. Imports neither torch nor the DSL."""

import dataclasses
import itertools
from typing import Any, NamedTuple

from quackish.device.arguments import F32, I32, Ptr, optional
from quackish.device.spec import KernelSpec, on_all, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, bytes_of
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import GemmProblem, Store, gemm_work
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.sm100_config import GemmSm100Config
from quackish.kernels.row_layout import columns_per_cta

# Matrix products ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DivergenceGemmProblem(GemmProblem):
    """Logits: A k-major, B k-major. dx: B n-major. dw: A m-major, B n-major; `live` is "k" there."""


def gemm_config(problem: DivergenceGemmProblem, gpu: Gpu) -> GemmConfig:
    """Not measured: the configs of linear_cross_entropy for the same products."""
    if problem.a_major == "m":  # dw
        return GemmConfig(tile_m=192, tile_n=128, num_stages=5, group=16, group_along="n", pingpong=True)
    if problem.b_major == "k":  # logits: ping-pong overlaps their stores in fp32 with the next tile
        return GemmConfig(tile_n=192, num_stages=5, pingpong=True)
    return GemmConfig(group_along="n")


def gemm_sm100_config(problem: DivergenceGemmProblem, gpu: Gpu) -> GemmSm100Config:
    return GemmSm100Config(group_along="m" if problem.b_major == "k" else "n")


_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="divergence_gemm",
    operation="linear_divergence",
    problem=DivergenceGemmProblem,
    on={
        **on_hopper(
            "quackish.ops.linear_divergence.kernels.gemm_sm90:DivergenceGemmSm90", GemmConfig, gemm_config
        ),
        **on_blackwell(
            "quackish.ops.linear_divergence.kernels.gemm_sm100:DivergenceGemmSm100", GemmSm100Config, gemm_sm100_config
        ),
    },
    sizes=("m", "n", "k"),
    work=gemm_work,
    samples=[
        DivergenceGemmProblem(Store(), _B, "float32", live="m"),
        DivergenceGemmProblem(Store(scaled=True), _B, _B, b_major="n"),
        DivergenceGemmProblem(Store(scaled=True), _B, _B, a_major="m", b_major="n", live="k"),
        DivergenceGemmProblem(Store(scaled=True, accumulate=True), _B, "float32", a_major="m", b_major="n"),
    ],
)  # fmt: skip

# Rows -----------------------------------------------------------------------------------------------------------------

KINDS = "forward", "reverse", "between"  # beta 0, 1, and any other: see reference.py
CLUSTERS = 1, 2, 4, 8, 16
MAX_CLASSES = CLUSTERS[-1] * 512 * 32  # 32 columns of a row per thread, each two fp32 numbers, in registers


def padded(classes: int) -> int:
    """The row stride of logits and their gradients, in elements."""
    return -(-classes // 8) * 8


class Side(NamedTuple):
    """How logits of the student or the teacher become u = log2(e) * (logits after scale and softcap) / temperature.

    u = (logit + bias) * factor, or with a softcap u = limit * tanh((logit + bias) * factor).
    """

    logits: Any = Ptr("float32", aligned=True)  # (rows, v) with row stride padded(v)
    bias: Any = None  # (padded(v),) fp32
    factor: Any = "float32"
    limit: Any = "float32"  # not used without a softcap


class RowsArgs(NamedTuple):
    student: Any = Side()
    teacher: Any = Side()
    row_grads: Any = None  # (rows,) fp32: factors of the rows of dlogits
    num_live: Any = None  # (1,) int32: the live rows of all rows
    loss: Any = F32  # (rows,), written
    entropy: Any = None  # (rows,) fp32, written
    dlogits: Any = None  # (rows, v) with row stride padded(v), written up to the stride
    beta: Any = "float32"
    grad_factor: Any = "float32"  # derivative of the student's logits / temperature
    start: Any = "int32"  # the first row among all rows
    rows: Any = "int32"


@dataclasses.dataclass(frozen=True)
class DivergenceRowsProblem:
    """The divergence of each row from both models' logits, its gradient, and the student's entropy."""

    v: int
    kind: str  # one of KINDS
    dlogits_dtype: str | None = None  # None: no gradient
    bias: bool = False
    teacher_bias: bool = False
    softcap: bool = False
    teacher_softcap: bool = False
    entropy: bool = False
    row_grads: bool = False
    live: bool = False  # only the first num_live rows count

    @property
    def num_sums(self) -> int:
        """Sums over a row that need its log-sum-exps."""
        return 1 + (self.kind == "between") + self.entropy

    @property
    def args(self) -> RowsArgs:
        vector = Ptr("float32", aligned=True)
        student, teacher = (Side(bias=vector if bias else None) for bias in (self.bias, self.teacher_bias))
        return RowsArgs(
            student=student, teacher=teacher, row_grads=F32 if self.row_grads else None,
            num_live=I32 if self.live else None, entropy=F32 if self.entropy else None,
            dlogits=optional(self.dlogits_dtype, aligned=True),
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DivergenceRowsConfig:
    threads: int  # per CTA
    split_n: int  # CTAs of a cluster that share a row


def rows_config(problem: DivergenceRowsProblem, gpu: Gpu) -> DivergenceRowsConfig:
    """The fewest CTAs per row that keep it in registers, of 256 threads, two of which fit an SM. Not measured.

    UnsupportedError for more than MAX_CLASSES classes.
    """
    fewer = problem.kind == "between" and problem.softcap  # with 32, 8 to 32 bytes spill
    for columns, threads, split_n in itertools.product((24, 32) if fewer else (32,), (256, 512), CLUSTERS):
        if columns_per_cta(padded(problem.v), 4, split_n) <= threads * columns:
            return DivergenceRowsConfig(threads, split_n)
    raise UnsupportedError(
        f"linear_divergence: no kernel for {problem.v} classes; expected at most {MAX_CLASSES}. "
        'backend="auto" runs the portable path.'
    )


def _rows_work(p: DivergenceRowsProblem, s: Sizes) -> Work:
    elements = s["rows"] * p.v
    vectors = 4 * s["rows"] * (1 + p.entropy + p.row_grads)
    written = elements * bytes_of(p.dlogits_dtype) + vectors
    return Work(8 * elements + 4 * p.v * (p.bias + p.teacher_bias), written, 20 * elements)


ROWS_SPEC = KernelSpec(
    name="divergence_rows",
    operation="linear_divergence",
    problem=DivergenceRowsProblem,
    on=on_all("quackish.ops.linear_divergence.kernels.rows:DivergenceRows", DivergenceRowsConfig, rows_config),
    sizes=("rows",),
    work=_rows_work,
    samples=[
        DivergenceRowsProblem(128_256, "forward", _B),
        DivergenceRowsProblem(151_936, "between", _B, entropy=True, live=True),
        DivergenceRowsProblem(262_144, "reverse", "float16", bias=True, teacher_bias=True, row_grads=True),
        DivergenceRowsProblem(32_000, "between", _B, softcap=True, teacher_softcap=True),
        DivergenceRowsProblem(300, "forward"),
    ],
)
SPECS = GEMM_SPEC, ROWS_SPEC
