"""The kernels of softmax: arguments, problems, their config, and their descriptions. Neither torch nor the DSL."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import Ptr
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

DTYPES = ("bfloat16", "float16", "float32")
MAX_N = 2048  # one warp per row: 64 fp32 registers per thread

# Problems -------------------------------------------------------------------------------------------------------------


class ForwardArgs(NamedTuple):
    x: Any = None  # (m, n)
    y: Any = None  # (m, n), written
    m: Any = "int32"


class BackwardArgs(NamedTuple):
    dy: Any = None  # (m, n)
    y: Any = None  # (m, n)
    dx: Any = None  # (m, n), written
    m: Any = "int32"


@dataclasses.dataclass(frozen=True)
class _Rows:
    n: int
    dtype: str  # of all tensors

    @property
    def vec(self) -> int:
        """Elements per load: 16 bytes where every row starts on a 16-byte boundary, else one element."""
        itemsize = bytes_of(self.dtype)
        return 16 // itemsize if self.n * itemsize % 16 == 0 else 1

    @property
    def tensor(self) -> Ptr:
        return Ptr(self.dtype, aligned=self.vec > 1)


@dataclasses.dataclass(frozen=True)
class SoftmaxFwdProblem(_Rows):
    """M, the number of rows, is a run-time argument: one compiled kernel serves every M."""

    @property
    def args(self) -> ForwardArgs:
        return ForwardArgs(x=self.tensor, y=self.tensor)


@dataclasses.dataclass(frozen=True)
class SoftmaxBwdProblem(_Rows):
    @property
    def args(self) -> BackwardArgs:
        return BackwardArgs(dy=self.tensor, y=self.tensor, dx=self.tensor)


# Config ---------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SoftmaxConfig:
    threads: int  # per CTA; a warp has one row


def softmax_config(problem: SoftmaxFwdProblem | SoftmaxBwdProblem, gpu: Gpu) -> SoftmaxConfig:
    """Four rows per CTA on every GPU (not tuned). UnsupportedError for other dtypes and for n > MAX_N."""
    why = ""
    if problem.dtype not in DTYPES:
        why = f"{problem.dtype}; supported: {', '.join(DTYPES)}"
    elif problem.n > MAX_N:
        why = f"rows of {problem.n} elements; at most {MAX_N}"
    if why:
        raise UnsupportedError(f'softmax: no kernel for {why}. backend="auto" runs the portable path.')
    return SoftmaxConfig(threads=128)


# Descriptions ---------------------------------------------------------------------------------------------------------


def _forward_work(p: SoftmaxFwdProblem, s: Sizes) -> Work:
    tensor = s["m"] * p.n * bytes_of(p.dtype)
    return Work(bytes_read=tensor, bytes_written=tensor, flops=4 * s["m"] * p.n)


def _backward_work(p: SoftmaxBwdProblem, s: Sizes) -> Work:
    tensor = s["m"] * p.n * bytes_of(p.dtype)
    return Work(bytes_read=2 * tensor, bytes_written=tensor, flops=4 * s["m"] * p.n)


FORWARD_SPEC = KernelSpec(
    name="softmax_fwd",
    operation="softmax",
    problem=SoftmaxFwdProblem,
    on=on_all("quackish.ops.softmax.kernels.forward:SoftmaxFwd", SoftmaxConfig, softmax_config),
    sizes=("m",),
    work=_forward_work,
    samples=[SoftmaxFwdProblem(2048, "bfloat16"), SoftmaxFwdProblem(1001, "float32")],
)
BACKWARD_SPEC = KernelSpec(
    name="softmax_bwd",
    operation="softmax",
    problem=SoftmaxBwdProblem,
    on=on_all("quackish.ops.softmax.kernels.backward:SoftmaxBwd", SoftmaxConfig, softmax_config),
    sizes=("m",),
    work=_backward_work,
    samples=[SoftmaxBwdProblem(2048, "bfloat16"), SoftmaxBwdProblem(1001, "float32")],
)
SPECS = FORWARD_SPEC, BACKWARD_SPEC
