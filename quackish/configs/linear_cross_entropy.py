"""Linear cross entropy: what is asked (Problem) and how it is done (Config), by a written rule on shapes alone.

The portable path and the kernels have a rule each: they hold different things.
"""

import dataclasses

SCHEDULES = ("stored", "chunked", "recompute")

# Portable path: bytes that the logits in flight may take, 2048 rows of a 128k vocabulary. The weight gradient's fp32
# accumulator is read and written once a chunk, so fewer rows cost time and more rows cost memory. Not tuned on any GPU.
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


# Kernels -------------------------------------------------------------------------------------------------------------

# Bytes that E, the exponentials that both gradients start from, may take in flight, and that "auto" keeps until
# backward: 8192 rows of a 128k vocabulary. From 4096 rows a chunk up, adding to the weight gradient's fp32 sums costs
# under 2 % of its GEMM, and 15 % at 2048 rows (H200, bf16, H 4096, V 128256).
E_BYTES = 1 << 31
E_ITEMSIZE = 2
# "recompute" has dlogits of so many bytes at a time, but of at least MIN_BLOCK classes: each block reads and writes the
# input gradient's fp32 sums once. Not tuned yet.
BLOCK_BYTES = 1 << 25
MIN_BLOCK = 2048
COLUMN_MULTIPLE = 256  # a block's columns are a multiple of a GEMM tile, and so is a split of E's
OFFSET_MULTIPLE = 1024  # bytes: where a buffer may start in another one's storage


@dataclasses.dataclass(frozen=True)
class KernelProblem:
    """What the kernels' rule looks at; M comes beside it."""

    v: int
    dtype: str  # "bfloat16" or "float16": what the GEMMs multiply
    reduction: str
    return_lse: bool = False
    grad_weight_out: bool = False
    label_smoothing: bool = False

    @property
    def has_e(self) -> bool:
        """Whether dlogits are E times one factor a row, but at the target. A smoothed target changes every class, and
        exp(a - ref) needs fp32's range, which bf16 has and fp16 has not."""
        return self.dtype == "bfloat16" and not self.label_smoothing


def kernel_config(
    problem: KernelProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The kernels' schedule and the rows of a chunk. Free memory is never looked at.

    - rows: as many as keep E within E_BYTES, in whole tiles of 128; M has no say. A `chunk_size` is rounded up.
    - "auto" is `chunked`, unless the weight gradient is better made in backward: where rows may get gradients of their
      own (reduction "none", or an lse that is returned), or where it is added to the user's buffer, which forward may
      not touch. Then `stored` where E of all rows stays within E_BYTES, else `recompute`.
    - `chunked` with reduction "none" is `recompute`; and so is everything that has no E.
    """
    if chunk_size is None:
        chunk_size = max(E_BYTES // (E_ITEMSIZE * problem.v) // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if schedule == "auto":
        schedule = "chunked"
        if problem.reduction == "none" or problem.return_lse or problem.grad_weight_out:
            schedule = "stored" if m * problem.v * E_ITEMSIZE <= E_BYTES else "recompute"
    if not problem.has_e or (schedule == "chunked" and problem.reduction == "none"):
        schedule = "recompute"
    return LinearCrossEntropyConfig(schedule, _round_up(chunk_size, ROW_MULTIPLE))


def block_columns(m: int) -> int:
    """How many classes `recompute`'s backward does at a time."""
    return _round_up(max(BLOCK_BYTES // (2 * m), MIN_BLOCK), COLUMN_MULTIPLE)


@dataclasses.dataclass(frozen=True)
class SharedStorage:
    """E[:, :columns] of a chunk of all rows, `offset` bytes into the storage of the weight gradient, to its end.

    The gradient of classes [0, columns) is written first, before `offset`; then that of the other classes, over this
    part of E, which nobody reads any more. So they are two GEMMs, and the input gradient comes before both.
    """

    columns: int
    offset: int


def shared_storage(rows: int, v: int, h: int, itemsize: int) -> SharedStorage | None:
    """How much of E (rows, v) fits into the weight gradient's (v, h) storage; None where not one tile of columns does.

    A column takes rows * 2 bytes as E, and h * itemsize as the gradient in front of it: v * h * itemsize / (the sum of
    both) columns fit, a third of all where rows are 2 h and the gradient is bf16. At M 8192, H 4096, V 128256 that
    leaves 1.40 GB of 2.10 outside.
    """
    size = v * h * itemsize
    columns = size // (rows * E_ITEMSIZE + h * itemsize)
    while columns >= COLUMN_MULTIPLE:
        columns = columns // COLUMN_MULTIPLE * COLUMN_MULTIPLE
        offset = (size - rows * columns * E_ITEMSIZE) // OFFSET_MULTIPLE * OFFSET_MULTIPLE
        if offset >= columns * h * itemsize:
            return SharedStorage(columns, offset)
        columns -= 1
    return None


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
