"""The kernel of rows: arguments, problem, config and description. Imports neither torch nor the DSL."""

import dataclasses
import itertools
from typing import Any, NamedTuple

from quackish.device.arguments import F32, I32, Ptr, optional
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.kernels.row_layout import columns_per_cta

KINDS = "forward", "reverse", "between"  # beta 0, 1, and any other: see reference.py
CLUSTERS = 1, 2, 4, 8, 16
COLUMNS = 32  # of a row per thread, each two fp32 numbers, in registers
MAX_CLASSES = CLUSTERS[-1] * 512 * COLUMNS


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
    ctas_per_sm: int  # at least, which limits registers


def rows_config(problem: DivergenceRowsProblem, gpu: Gpu) -> DivergenceRowsConfig:
    """The fewest CTAs per row that keep it in registers while two of them fit an SM, else while one does.

    UnsupportedError for more than MAX_CLASSES classes.
    """
    two_fit = 256 if problem.softcap else 320  # threads per CTA, of which an SM has two; with more, registers spill
    limits = [(COLUMNS, two_fit), (COLUMNS, 512)]
    if problem.softcap and problem.kind == "between":
        two_fit, limits = 192, [(24, 192), (24, 512), (COLUMNS, 512)]
    for (columns, most), split_n in itertools.product(limits, CLUSTERS):
        threads = max(1, ceil_div(columns_per_cta(padded(problem.v), 4, split_n), 32 * columns)) * 32
        if threads <= most:
            return DivergenceRowsConfig(threads, split_n, max(1, 2 * two_fit // threads))
    raise UnsupportedError(
        f"linear_divergence: no kernel for {problem.v} classes; expected at most {MAX_CLASSES}. "
        'backend="auto" runs the portable path.'
    )


def _rows_work(p: DivergenceRowsProblem, s: Sizes) -> Work:
    elements = s["rows"] * p.v
    vectors = 4 * s["rows"] * (1 + p.entropy + p.row_grads)
    written = elements * bytes_of(p.dlogits_dtype) + vectors
    return Work(8 * elements + 4 * p.v * (p.bias + p.teacher_bias), written, 20 * elements)


_B = "bfloat16"
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
SPECS = (ROWS_SPEC,)
