"""Linear cross entropy: what is asked (Problem) and how it is done (Config), by a written rule on shapes alone."""

import dataclasses

SCHEDULES = ("stored", "chunked", "recompute")

# Bytes that the logits in flight may take: 2048 rows of a 128k vocabulary. The weight gradient's fp32 accumulator is
# read and written once a chunk, so fewer rows cost time and more rows cost memory. Not tuned on any GPU yet.
CHUNK_BYTES = 3 << 29
ROW_MULTIPLE = 128  # a chunk's rows are a multiple of a GEMM tile


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyProblem:
    """What the rule looks at. M is not in it: `linear_cross_entropy_config` takes it beside."""

    v: int
    x_dtype: str  # "bfloat16", ...: what the logits GEMM multiplies
    reduction: str  # "none", "mean" or "sum"
    softcap: bool = False
    return_lse: bool = False


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyConfig:
    """`stored`: backward starts from the kept logits. `chunked`: gradients are made in forward, chunk by chunk.
    `recompute`: nothing is kept, backward multiplies the logits again."""

    schedule: str
    chunk_rows: int


def bytes_per_logit(problem: LinearCrossEntropyProblem) -> int:
    """Bytes in flight for one logit of a chunk: itself, its gradient where that is narrower, and softcap's tanh."""
    wide = 8 if problem.x_dtype == "float64" else 4
    narrow = 2 if problem.x_dtype in ("bfloat16", "float16") else 0
    return wide + narrow + (wide if problem.softcap else 0)


def linear_cross_entropy_config(
    problem: LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The schedule and the rows of a chunk. Free memory is never looked at: the bits depend on the chunk.

    - rows: as many as keep the logits in flight within CHUNK_BYTES, down to a multiple of 128 and at least 128. M has
      no say, so that a row's logits come out of a GEMM of the same shape whatever the batch (the last chunk apart).
    - schedule "auto": `chunked`, unless rows may get gradients of their own, known in backward only (reduction "none",
      or an lse that is returned): then `stored` where the kept logits also stay within CHUNK_BYTES, else `recompute`.
    """
    if chunk_size is None:
        fit = CHUNK_BYTES // (bytes_per_logit(problem) * problem.v)
        chunk_size = max(fit // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if schedule == "auto":
        schedule = "chunked"
        if problem.reduction == "none" or problem.return_lse:
            wide = 8 if problem.x_dtype == "float64" else 4
            schedule = "stored" if m * problem.v * wide <= CHUNK_BYTES else "recompute"
    return LinearCrossEntropyConfig(schedule, chunk_size)
