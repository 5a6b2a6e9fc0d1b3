"""The kernels of grouped_mlp and moe_mlp: arguments, problems, configs, and their descriptions.

The problems of the GEMMs are in quackish/kernels/gemm/grouped_problem.py.
"""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import Ptr
from quackish.device.spec import KernelSpec, on_all, on_blackwell, on_hopper
from quackish.device.work import Sizes, Work, bytes_of, ceil_div
from quackish.gpu import Gpu
from quackish.kernels.gemm.grouped_problem import (
    DSCALES_COLUMNS,
    GroupedGemmProblem,
    grouped_gemm_config,
    grouped_gemm_why_illegal,
)
from quackish.kernels.gemm.grouped_sm100_config import grouped_gemm_sm100_config, grouped_gemm_sm100_why_illegal
from quackish.kernels.gemm.problem import GemmConfig
from quackish.kernels.gemm.sm100_config import GemmSm100Config


class TokenRowsArgs(NamedTuple):
    x: Any = None  # (tokens, n) to copy, or (tokens * k, n) to sum
    rows: Any = Ptr("int64")  # (tokens, k): the index of token t's j-th row
    out: Any = None  # (tokens * k, n) or (tokens, n), written
    tokens: Any = "int32"
    k: Any = "int32"


@dataclasses.dataclass(frozen=True)
class TokenRowsProblem:
    """The numbers of tokens and of rows per token are runtime arguments."""

    op: str  # "copy" or "sum"
    n: int  # columns, a multiple of 8
    dtype: str

    @property
    def args(self) -> TokenRowsArgs:
        matrix = Ptr(self.dtype, aligned=True)
        return TokenRowsArgs(x=matrix, out=matrix)


@dataclasses.dataclass(frozen=True)
class TokenRowsConfig:
    """A thread has 8 columns of a token: 16 bytes of a 16-bit row."""

    threads: int  # per CTA, which has one token

    def ctas_per_token(self, n: int) -> int:
        return -(-n // (8 * self.threads))


def token_rows_config(problem: TokenRowsProblem, gpu: Gpu) -> TokenRowsConfig:
    """CTAs of equal size, as few per token as 256 threads allow. 64 to 512 threads are equally fast (sums, H100)."""
    vectors = problem.n // 8
    ctas = -(-vectors // 256)
    return TokenRowsConfig(threads=-(-vectors // (32 * ctas)) * 32)


# Descriptions --------------------------------------------------------------------------------------------------------


def _gemm_work(p: GroupedGemmProblem, s: Sizes) -> Work:
    rows, n = s["rows"], s["n"]
    if p.along == "k":
        d = s["groups"] * s["m"] * n * bytes_of(p.out_dtype)
        return Work(rows * (s["m"] + n) * bytes_of(p.dtype) + d * p.accumulate, d, 2 * rows * s["m"] * n)
    preactivation = n * (1 + p.gated)
    b_rows, k = n, s["k"]
    if p.epilogue == "up":
        b_rows = preactivation
    elif p.b_in_two:
        k *= 2
    read, written = rows * k + s["groups"] * b_rows * k, rows * n
    if p.epilogue == "down_backward":  # writes the activation and the preactivation's gradient
        read += rows * preactivation
        written += rows * preactivation
    elif p.keeps:
        written += rows * preactivation
    parts = rows * ceil_div(n, DSCALES_COLUMNS) * 4 if p.epilogue == "down_backward" and p.scaled else 0
    return Work(read * bytes_of(p.dtype), written * bytes_of(p.dtype) + parts, 2 * rows * b_rows * k)


def _token_rows_work(p: TokenRowsProblem, s: Sizes) -> Work:
    rows = s["tokens"] * s["k"]
    of_tokens, of_rows = s["tokens"] * p.n * bytes_of(p.dtype), rows * p.n * bytes_of(p.dtype)
    read, written = (of_tokens, of_rows) if p.op == "copy" else (of_rows, of_tokens)
    return Work(read + 8 * rows, written, rows * p.n * (p.op == "sum"))


_B = "bfloat16"
GEMM_SPEC = KernelSpec(
    name="grouped_gemm",
    operation="grouped_mlp",
    problem=GroupedGemmProblem,
    on={
        **on_hopper(
            "quackish.kernels.gemm.grouped_sm90:GroupedGemmSm90",
            GemmConfig,
            grouped_gemm_config,
            grouped_gemm_why_illegal,
            "quackish.ops.mlp.tuning:GEMM",
        ),
        **on_blackwell(
            "quackish.kernels.gemm.grouped_sm100:GroupedGemmSm100",
            GemmSm100Config,
            grouped_gemm_sm100_config,
            grouped_gemm_sm100_why_illegal,
            "quackish.ops.mlp.tuning:GEMM_SM100",
        ),
    },
    sizes=("rows", "m", "n", "k", "groups"),
    work=_gemm_work,
    cublas="quackish.ops.mlp.tuning:cublas",
    samples=[
        GroupedGemmProblem("up", _B, 64, _B, activation="swiglu", scaled=True, keeps=True),
        GroupedGemmProblem("down", _B, 64, _B, biased=True),
        GroupedGemmProblem("down_backward", _B, 64, _B, b_major="n", activation="silu", scaled=True),
        GroupedGemmProblem("store", _B, 64, "float32", accumulate=True),
    ],
)
TOKEN_ROWS_SPEC = KernelSpec(
    name="token_rows",
    operation="moe_mlp",
    problem=TokenRowsProblem,
    on=on_all("quackish.ops.mlp.kernels.token_rows:TokenRows", TokenRowsConfig, token_rows_config),
    sizes=("tokens", "k"),
    work=_token_rows_work,
    samples=[TokenRowsProblem("sum", 64, _B)],
)
SPECS = GEMM_SPEC, TOKEN_ROWS_SPEC
