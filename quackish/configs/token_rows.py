"""Copies of tokens for their experts, and sums of them: what to compute (Problem) and how (Config)."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TokenRowsProblem:
    """The numbers of tokens and of rows per token are runtime arguments."""

    op: str  # "copy" or "sum"
    n: int  # columns, a multiple of 8
    dtype: str


@dataclasses.dataclass(frozen=True)
class TokenRowsConfig:
    """A thread has 8 columns of a token: 16 bytes of a 16-bit row."""

    threads: int  # per CTA, which has one token

    def ctas_per_token(self, n: int) -> int:
        return -(-n // (8 * self.threads))


def token_rows_config(problem: TokenRowsProblem) -> TokenRowsConfig:
    """CTAs of equal size, as few per token as 256 threads allow. 64 to 512 threads are equally fast (sums, H100)."""
    vectors = problem.n // 8
    ctas = -(-vectors // 256)
    return TokenRowsConfig(threads=-(-vectors // (32 * ctas)) * 32)
