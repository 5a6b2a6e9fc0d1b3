"""Linear cross entropy: what to compute (Problem) and how (Config), by a written rule on shapes alone.

The portable path and the kernels have a rule each, as they keep different buffers.
"""

import dataclasses
import functools
from typing import NamedTuple

SCHEDULES = ("stored", "chunked", "recompute")

# Portable path: bytes that the logits in flight may take, 2048 rows of a 128k vocabulary. The weight gradient's fp32
# accumulator is read and written once a chunk, so fewer rows cost time and more rows cost memory. Not tuned on any GPU.
CHUNK_BYTES = 3 << 29
ROW_MULTIPLE = 128  # a chunk's rows are a multiple of a GEMM tile


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyProblem:
    """What the portable path's rule depends on, except M, which `linear_cross_entropy_config` also takes."""

    v: int
    x_dtype: str  # "bfloat16", ...: what the logits GEMM multiplies
    reduction: str  # "none", "mean" or "sum"
    softcap: bool = False
    return_lse: bool = False


class LinearCrossEntropyConfig(NamedTuple):
    """`stored`: backward starts from the kept logits. `chunked`: forward computes the gradients, chunk by chunk.
    `recompute`: no logits are kept; backward computes them again."""

    schedule: str
    chunk_rows: int
    # `recompute` on kernels:
    dx_in_forward: bool = False  # forward computes the input's gradient, chunk by chunk
    dw_in_chunks: bool = False  # ... and backward the weight's, chunk by chunk if there are several


def bytes_per_logit(problem: LinearCrossEntropyProblem) -> int:
    """Bytes in flight for one logit of a chunk: itself, its gradient where that is narrower, and softcap's tanh."""
    wide = 8 if problem.x_dtype == "float64" else 4
    narrow = 2 if problem.x_dtype in ("bfloat16", "float16") else 0
    return wide + narrow + (wide if problem.softcap else 0)


def linear_cross_entropy_config(
    problem: LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The schedule and the rows of a chunk, independent of free memory, because the bits depend on the chunk.

    - rows: as many as keep the logits in flight within CHUNK_BYTES, down to a multiple of 128 and at least 128.
      Independent of M, so that a row's logits come from a GEMM of the same shape for any batch, the last chunk apart.
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

# Bytes of exp_logits per chunk. A single chunk computes each gradient with one GEMM. Several add dW to fp32 sums, which
# costs 1 to 3 % of dW's GEMM from 8192 rows per chunk up, 15 % at 2048 (H200, bf16, H 4096, V 128256), and the memory
# of these sums.
E_BYTES = 1 << 32
# A call of at most so many rows is one chunk.
ONE_CHUNK_ROWS = 1 << 13
# So is one of at most so many times H rows: it takes less memory than two chunks with their fp32 sums (dW of 16 bits).
ONE_CHUNK_PER_H = 3.5
# So is one whose exp_logits and gathered rows of x have at most so many bytes; chunks of larger calls have as many.
FEW_BYTES = 1 << 30
# Rows per chunk of larger calls, at least, and times H. More rows cost memory but save little: a training step of a 1B
# Llama with 16,384 rows (H 2048, V 128256, H100) took 266.0 ms and 36.4 GB in one chunk, 265.9 and 35.2 in chunks of
# 8192 rows, 267.3 and 34.1 in chunks of 4096. benchmarks/results/chunk_rows.md: the head alone.
CHUNK_ROWS = 1 << 12
CHUNK_ROWS_PER_H = 2.5
# Bytes of exp_logits that "auto" keeps until backward.
KEPT_BYTES = 1 << 31
E_ITEMSIZE = 2
# Bytes of dlogits that "recompute" holds in memory of their own, but at least MIN_BLOCK classes: ALONE_BYTES if dX's
# fp32 sums are not in memory too, ROOMY_BYTES if no dW is allocated. In all cases M 8192, H 4096, V 128256 stays
# within 1.30 GB, gradients included.
BLOCK_BYTES = 1 << 25
ALONE_BYTES = 3 << 25
ROOMY_BYTES = 1 << 28
MIN_BLOCK = 2816
# Classes per block of a dW that is summed over chunks: 13 MB of fp32 sums at H 4096. With chunks of 4096 rows each GEMM
# has 64 cluster tiles, one wave; with 1024 classes 96, almost two. Relative to `recompute` without chunk_size that took
# 1.46 of the time with 768 classes and 1.57 with 1024 (H200, M 8192, H 4096, V 128256, in two runs).
DW_BLOCK = 768
COLUMN_MULTIPLE = 256  # of a block's classes, and of those where exp_logits are split
OFFSET_MULTIPLE = 1024  # bytes: where a buffer may start in another one's storage


@dataclasses.dataclass(frozen=True)
class KernelProblem:
    """What the kernels' rule depends on, except M, which `kernel_config` also takes."""

    v: int
    h: int
    dtype: str  # "bfloat16" or "float16": what the GEMMs multiply
    reduction: str
    return_lse: bool = False
    grad_weight_out: bool = False
    label_smoothing: bool = False

    @property
    def has_e(self) -> bool:
        """Whether dlogits are exp_logits times one factor per row, except at the target. Not with label smoothing,
        which changes every class, nor in fp16, which lacks the range of exp(a - row_shift)."""
        return self.dtype == "bfloat16" and not self.label_smoothing

    @property
    def known_in_forward(self) -> bool:
        """Whether forward can compute gradients up to a scalar factor."""
        return self.has_e and self.reduction != "none"


def kernel_config(
    problem: KernelProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The kernels' schedule and rows per chunk, from shapes and options; free memory does not matter.

    - Rows per chunk: a multiple of 128, such that exp_logits fit in E_BYTES. One chunk up to ONE_CHUNK_ROWS or
      ONE_CHUNK_PER_H * H rows, else at most CHUNK_ROWS or CHUNK_ROWS_PER_H * H; in both cases as many as FEW_BYTES hold
      if that is more. A `chunk_size` is rounded up. `even_chunks` then makes the chunks of a call equal.
    - "auto" is `chunked`, except when gradients are known only in backward (reduction "none", a returned lse) or dW is
      added to the user's buffer, which forward must not write. Then it is `stored` if exp_logits of all rows fit in
      KEPT_BYTES, else `recompute`.
    - `chunked` with reduction "none", and every problem without exp_logits, is `recompute`.
    - `recompute` computes dX in forward if it can, chunk by chunk, with exp_logits in memory that dW takes later. So by
      default a chunk has at most H rows, or fewer if forward also computes dW of some classes (`first_classes`). If dW
      is added to the user's buffer, exp_logits fit in ROOMY_BYTES instead. With a `chunk_size` below M, backward
      computes dW from as many rows at a time, DW_BLOCK classes at a time, in fp32 sums.
    """
    if schedule == "auto":
        schedule = "chunked"
        if problem.reduction == "none" or problem.return_lse or problem.grad_weight_out:
            schedule = "stored" if m * problem.v * E_ITEMSIZE <= KEPT_BYTES else "recompute"
    if not problem.has_e or (schedule == "chunked" and not problem.known_in_forward):
        schedule = "recompute"
    dx_in_forward = schedule == "recompute" and problem.known_in_forward and not problem.return_lse
    dw_in_chunks = dx_in_forward and chunk_size is not None
    if chunk_size is None:
        few, fit = whole_tiles(FEW_BYTES, problem.v + problem.h), whole_tiles(E_BYTES, problem.v)
        chunk_size = min(max(ONE_CHUNK_ROWS, int(ONE_CHUNK_PER_H * problem.h), few), fit)
        if m > chunk_size:
            chunk_size = min(max(CHUNK_ROWS, int(CHUNK_ROWS_PER_H * problem.h), few), fit)
        if dx_in_forward:
            there = ROOMY_BYTES if problem.grad_weight_out else E_ITEMSIZE * problem.v * problem.h
            chunk_size = min(chunk_size, whole_tiles(there, problem.v))
    return LinearCrossEntropyConfig(schedule, round_up(chunk_size, ROW_MULTIPLE), dx_in_forward, dw_in_chunks)


def config_of(
    problem: KernelProblem | LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """By the rule for such a problem."""
    rule = kernel_config if isinstance(problem, KernelProblem) else linear_cross_entropy_config
    return rule(problem, m, schedule, chunk_size)


# With a memory limit -------------------------------------------------------------------------------------------------

# Into how many chunks a call may be split. More cost too much time.
SPLITS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)


def by_speed(
    problem: KernelProblem | LinearCrossEntropyProblem, m: int, h: int, schedule: str, chunk_size: int | None
) -> list[LinearCrossEntropyConfig]:
    """What a call with a memory limit may run, the fastest first by `expected_time`: it takes the first that fits.

    - `schedule` "auto" is `chunked` or `recompute`; `stored` or `recompute` where gradients are known in backward only;
      any for dW that is added to the user's buffer. `stored` takes more memory than `chunked` in one chunk.
    - `chunk_size` None is the default, or M / n for an n in SPLITS.
    """
    names = (schedule,)
    if schedule == "auto":
        late = problem.reduction == "none" or problem.return_lse
        names = ("stored", "recompute") if late else ("chunked", "recompute")
        if not late and isinstance(problem, KernelProblem) and problem.grad_weight_out:
            names = SCHEDULES
    sizes = [None, *(-(-m // n) or 1 for n in SPLITS)] if chunk_size is None else [chunk_size]
    found = [config_of(problem, m, name, size) for name in names for size in sizes]
    return sorted(dict.fromkeys(found), key=lambda how: expected_time(how, m, h))


def expected_time(how: LinearCrossEntropyConfig, m: int, h: int) -> float:
    """Of forward and backward with the gradients of input and weight, in bf16, relative to the three GEMMs alone.

    Measured at M 8192, V 128256 on an H100 and an H200, chunks of 4096, 2048 and 1024 rows. H 4096: `stored` 0.98,
    `chunked` 0.99, 1.03, 1.07 to 1.09, 1.22 to 1.24, `recompute` 1.22 to 1.24, with chunks 1.80 and (1024) 3.4. H 2048:
    `chunked` 0.97, 1.02, 1.15, 1.23, `recompute` 1.33, with chunks 2.3 and 5.9.
    """
    if how.schedule == "stored":
        return 0.98
    rows = even_chunks(max(m, 1), how.chunk_rows)
    if how.schedule == "chunked":
        # The fp32 sums of dW are read and written once per chunk.
        return 0.99 if m <= how.chunk_rows else 0.99 + 0.26 * (1024 / rows) ** 1.5
    sums = 9.5e6 / (rows * h) if how.dw_in_chunks and m > how.chunk_rows else 0.0
    return 1.24 + sums


def whole_tiles(size: int, v: int) -> int:
    """How many rows of exp_logits fit in `size` bytes, in whole tiles; at least one tile."""
    return max(size // (E_ITEMSIZE * v) // ROW_MULTIPLE, 1) * ROW_MULTIPLE


def even_chunks(m: int, chunk_rows: int) -> int:
    """As many chunks as `chunk_rows` make of m rows, all about as large: a short last one would be a slow GEMM."""
    return round_up(-(-m // -(-m // chunk_rows)), ROW_MULTIPLE)


def scratch_columns(m: int, roomy: bool, alone: bool) -> int:
    """How many classes' dlogits `recompute` may hold in memory of their own; `alone`: without dx's sums beside them."""
    there = ROOMY_BYTES if roomy else ALONE_BYTES if alone else BLOCK_BYTES
    return round_up(max(there // (2 * m), MIN_BLOCK), COLUMN_MULTIPLE)


class Block(NamedTuple):
    """Classes [v0, v1), and where their exp_logits or dlogits of all m rows lie, without gaps."""

    v0: int
    v1: int
    offset: int | None  # bytes into dW's storage; None: in the scratch


@functools.lru_cache(maxsize=1024)
def recompute_blocks(m: int, v: int, h: int, itemsize: int | None, scratch: int) -> tuple[Block, ...]:
    """All classes, ascending, in few blocks: each block reads and writes the input gradient's fp32 sums once.

    itemsize: of dW (v, h); None if its storage is the user's. A block's rows of dW follow those of earlier blocks, and
    its dlogits lie at the end of the storage that is left. Of R classes left, n fit if n * h * itemsize + m * n * 2
    bytes do: a third of R if m = 2 h and dW has 16 bits. So blocks shrink until they have `scratch` classes (a multiple
    of 256), whose dlogits have memory of their own.

    A block has the width that costs least per class, among those that fit and are at least half of the widest, in whole
    tiles.
    """
    blocks, v0 = [], 0
    while v - v0 > scratch:
        fit = 0 if itemsize is None else _tail_tiles(m, v, v0, h * itemsize)
        widest = max(fit, scratch // COLUMN_MULTIPLE)
        tiles = min(range(widest, (widest - 1) // 2, -1), key=lambda tiles: _block_cost(m, h, tiles) / tiles)
        v1 = v0 + tiles * COLUMN_MULTIPLE
        blocks.append(Block(v0, v1, _tail_offset(m, v, v0, v1, h * itemsize) if tiles <= fit else None))
        v0 = v1
    return *blocks, Block(v0, v, None)


class FirstClasses(NamedTuple):
    """The classes [0, columns) whose dW `recompute` computes in forward: the first of `recompute_blocks`.

    Their exp_logits, of all rows, lie `offset` bytes into dW's storage. In front of them there is room for the other
    classes' exp_logits of `part_rows` rows, the rows of a chunk.
    """

    columns: int
    offset: int
    part_rows: int


# Elements of the input's gradient, of a chunk: a wave of tiles. With chunks of half a wave `recompute` took 1.75 of the
# three GEMMs instead of 1.42 (H200, M 4096, H 2048, V 32000, chunks of 1024 rows).
LEAST_PART = 1 << 22


@functools.lru_cache(maxsize=1024)
def first_classes(m: int, v: int, h: int, itemsize: int) -> FirstClasses | None:
    """None if there is no room for chunks of LEAST_PART, or for any block of exp_logits.

    A third of all classes where m is 2 h and the gradient is 16 bits wide, which saves backward a third of its logits.
    """
    first = recompute_blocks(m, v, h, itemsize, scratch_columns(m, False, True))[0]
    if first.offset is None:
        return None
    part_rows = first.offset // (E_ITEMSIZE * round_up(v - first.v1, 64)) // ROW_MULTIPLE * ROW_MULTIPLE
    return FirstClasses(first.v1, first.offset, part_rows) if min(part_rows, m) * h >= min(m * h, LEAST_PART) else None


def _tail_tiles(m: int, v: int, v0: int, row: int) -> int:
    """How many tiles of classes from v0 on fit with m rows of exp_logits behind their own rows of dW, of `row` bytes.

    A class takes 2 * m bytes, and `row` in front of them.
    """
    tiles = (v - v0) * row // (row + m * E_ITEMSIZE) // COLUMN_MULTIPLE
    v1 = v0 + tiles * COLUMN_MULTIPLE
    return tiles if _tail_offset(m, v, v0, v1, row) >= v1 * row else tiles - 1


def _tail_offset(m: int, v: int, v0: int, v1: int, row: int) -> int:
    return (v * row - m * E_ITEMSIZE * (v1 - v0)) // OFFSET_MULTIPLE * OFFSET_MULTIPLE


# Clusters that run at a time on 132 SMs, each with a tile of 256 x 256: what all of the GEMMs had when this was chosen.
WAVE = 66
# What a block costs beside its GEMMs' waves grows with m * h, as the sums do that it reads and writes: 0.3 ms where
# each had 2048 classes (H200, M 8192, H 4096, V 128256), as long as a wave of tiles multiplies 24,000 deep.
SUMS_A_STEP = 1400


def _block_cost(m: int, h: int, tiles: int) -> int:
    """In waves, times how deep they multiply: dlogits, the weight gradient, the input gradient, its sums."""
    m_tiles, h_tiles = -(-m // 256), -(-h // 256)
    waves = [-(-n // WAVE) for n in (m_tiles * tiles, h_tiles * tiles, m_tiles * h_tiles)]
    depths = h, m, tiles * COLUMN_MULTIPLE
    return sum(n * depth for n, depth in zip(waves, depths, strict=True)) + m * h // SUMS_A_STEP


# exp_logits of a chunk of all rows share dW's storage if they have more bytes than this; below, one launch less is
# worth more than the memory. At M 4096, H 2048, V 32000 (262 MB) sharing saves 87 MB and costs 0.5 % of a step (H200).
# Smaller exp_logits are not measured.
SHARED_FROM = 1 << 26


def shared_storage(m: int, v: int, h: int, itemsize: int) -> Block | None:
    """The classes [0, v1) whose exp_logits fit into the storage of dW (v, h), up to its end; None for less than a tile.

    dW of these classes is written first, in front of their exp_logits; then that of the other classes, over these
    exp_logits, which are not read any more. So dW takes two GEMMs, and dX is computed before both.

    A third of all classes fits if m = 2 h and dW is bf16. At M 8192, H 4096, V 128256 that leaves 1.40 GB of 2.10
    outside.
    """
    columns = _tail_tiles(m, v, 0, h * itemsize) * COLUMN_MULTIPLE
    return Block(0, columns, _tail_offset(m, v, 0, columns, h * itemsize)) if columns else None


class Layout(NamedTuple):
    """The rows and classes that a call works on at a time, and which buffers share the storage of dW (v, h)."""

    chunk_rows: int  # of forward's chunks, all about as large
    # Of the classes [0, columns) exp_logits lie in dW's storage, from byte `offset` on: in `chunked`, those of the only
    # chunk; in `recompute`, those of all rows, and forward computes these classes' dW.
    columns: int = 0
    offset: int = 0
    blocks: tuple[Block, ...] = ()  # of classes, in backward of `recompute`
    dw_block: int = 0  # backward of `recompute` sums dW over forward's chunks, so many classes at a time; 0: no sums


@functools.lru_cache(maxsize=4096)
def choose_layout(
    schedule: str, chunk_rows: int, dx_in_forward: bool, dw_in_chunks: bool, m: int, v: int, h: int, dx: bool,
    dw: int | None, owns_dw: bool, dw_in_forward: bool,
) -> Layout:  # fmt: skip
    """How the kernels run a call. The first four arguments are a LinearCrossEntropyConfig.

    dx: whether the input has a gradient. dw: the itemsize of the weight's, None without one. owns_dw: it has storage of
    its own, as it is not added to the user's buffer. dw_in_forward: `recompute` may compute dW of the first classes in
    forward.
    """
    if schedule == "chunked":
        shared = None
        if dw and m <= chunk_rows and m * v * E_ITEMSIZE > SHARED_FROM:
            shared = shared_storage(m, v, h, dw)
        return Layout(even_chunks(m, chunk_rows), *(shared[1:] if shared else (0, 0)))
    if schedule == "stored":
        return Layout(even_chunks(m, chunk_rows))
    if dw_in_chunks and owns_dw and dw and m > chunk_rows:
        return Layout(even_chunks(m, chunk_rows), dw_block=min(DW_BLOCK, v))
    dx_in_backward = dx and not dx_in_forward
    blocks = recompute_blocks(
        m, v, h, dw if owns_dw else None, scratch_columns(m, not (dw and owns_dw), not dx_in_backward)
    )
    if dw_in_forward:
        first = first_classes(m, v, h, dw)
        if first is not None:
            return Layout(even_chunks(m, first.part_rows), first.columns, first.offset, blocks[1:])
    if dx and dx_in_forward and not dw and not dw_in_chunks:  # no dW whose storage exp_logits could take
        chunk_rows = min(chunk_rows, whole_tiles(ROOMY_BYTES, v))
    return Layout(even_chunks(m, chunk_rows), blocks=blocks)


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
