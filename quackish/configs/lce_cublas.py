"""Linear cross entropy with cuBLAS's GEMMs: what is asked of the kernels around them, and what is in flight between.

None of it has been measured, nor run on a Blackwell GPU, which it is for.
"""

import dataclasses

TILE_N = 256  # how many classes a partial sum of the softmax runs over
# fp32 products of a GEMM that a kernel has yet to read: logits, or rows of the input gradient.
PRODUCT_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class LceExpProblem:
    """`kind`: "softmax", E and what goes with it; or "dlogits", the gradient of the logits. As in GemmProblem."""

    kind: str
    out_dtype: str | None = None  # None: nothing is stored but statistics
    bias_dtype: str | None = None
    softcap: bool = False
    smoothing: bool = False
    weighted: bool = False  # class weights, where there is smoothing


@dataclasses.dataclass(frozen=True)
class LceRedoProblem:
    stored: bool  # whether there is an E


@dataclasses.dataclass(frozen=True)
class LceClearProblem:
    h: int  # a multiple of 8
    dtype: str


@dataclasses.dataclass(frozen=True)
class LceWarpsConfig:
    """A warp a row, or a row's tile."""

    threads: int = 256


def logit_columns(rows: int) -> int:
    """How many classes' logits are in flight: whole tiles, one at least."""
    return max(PRODUCT_BYTES // (4 * rows * TILE_N), 1) * TILE_N


def product_rows(h: int) -> int:
    """How many rows of the input gradient are in flight."""
    return max(PRODUCT_BYTES // (4 * h), 1)
