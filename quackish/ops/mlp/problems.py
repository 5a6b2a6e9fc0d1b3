"""The kernels of grouped_mlp and moe_mlp: those of their GEMMs, and the one that copies and sums rows."""

import dataclasses
from typing import Any, NamedTuple

from quackish.device.arguments import Ptr
from quackish.device.spec import KernelSpec, on_all
from quackish.device.work import Sizes, Work, bytes_of
from quackish.gpu import Gpu
from quackish.ops.mlp.gemm_problems import GEMM_SPEC


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


def _token_rows_work(p: TokenRowsProblem, s: Sizes) -> Work:
    rows = s["tokens"] * s["k"]
    of_tokens, of_rows = s["tokens"] * p.n * bytes_of(p.dtype), rows * p.n * bytes_of(p.dtype)
    read, written = (of_tokens, of_rows) if p.op == "copy" else (of_rows, of_tokens)
    return Work(read + 8 * rows, written, rows * p.n * (p.op == "sum"))


TOKEN_ROWS_SPEC = KernelSpec(
    name="token_rows",
    operation="moe_mlp",
    problem=TokenRowsProblem,
    on=on_all("quackish.ops.mlp.kernels.token_rows:TokenRows", TokenRowsConfig, token_rows_config),
    sizes=("tokens", "k"),
    work=_token_rows_work,
    samples=[TokenRowsProblem("sum", 64, "bfloat16")],
)
SPECS = GEMM_SPEC, TOKEN_ROWS_SPEC
