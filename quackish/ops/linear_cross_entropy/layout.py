"""Linear cross entropy: what to compute (Problem) and how (Config), by a rule that depends only on shapes.

The portable path and the kernels have separate rules, because they allocate different buffers.
"""

import dataclasses
import functools
from typing import NamedTuple

SCHEDULES = ("stored", "chunked", "recompute")

# Portable path: bytes for the logits of a chunk, 2048 rows of a 128k vocabulary. The weight gradient's fp32 accumulator
# is read and written once per chunk, so fewer rows cost time and more rows cost memory. Not tuned on any GPU.
CHUNK_BYTES = 3 << 29
ROW_MULTIPLE = 128  # a chunk's rows are a multiple of a GEMM tile


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropyProblem:
    """The inputs of both rules, except M."""

    v: int
    h: int
    dtype: str  # "bfloat16", ...: of the GEMMs' operands
    reduction: str  # "none", "mean" or "sum"
    softcap: bool = False
    return_lse: bool = False
    grad_weight_out: bool = False
    label_smoothing: bool = False
    on_kernels: bool = True

    @property
    def has_exp_logits(self) -> bool:
        """Whether dlogits are exp_logits times one factor per row, except at the target. Not with label smoothing,
        which changes every class, nor in fp16, which lacks the range of exp(a - row_shift)."""
        return self.dtype == "bfloat16" and not self.label_smoothing

    @property
    def known_in_forward(self) -> bool:
        """Whether forward can compute gradients up to a scalar factor, on kernels."""
        return self.has_exp_logits and self.reduction != "none"


class LinearCrossEntropyConfig(NamedTuple):
    """`stored`: logits are kept for backward. `chunked`: forward computes the gradients, chunk by chunk.
    `recompute`: no logits are kept; backward recomputes them."""

    schedule: str
    chunk_rows: int
    # `recompute` on kernels:
    dx_in_forward: bool = False  # forward computes the input's gradient, chunk by chunk
    dw_in_chunks: bool = False  # backward computes the weight's gradient in chunks of chunk_rows
    keeps_first: bool = False  # exp_logits of the first chunk are kept for backward


def linear_cross_entropy_config(
    problem: LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The schedule and the rows per chunk. Free memory does not matter, because the bits depend on the chunks.

    - Rows per chunk: as many as CHUNK_BYTES hold, in multiples of 128. Independent of M, so that a row's logits come
      from a GEMM of the same shape for any batch, except in the last chunk.
    - "auto" is `chunked`, except when gradients are known only in backward (reduction "none", or a returned lse). Then
      it is `stored` if all logits fit in CHUNK_BYTES, else `recompute`.
    """
    wide = 8 if problem.dtype == "float64" else 4
    if chunk_size is None:
        # per logit: the logit, its gradient if that is narrower, and softcap's tanh
        narrow = 2 if problem.dtype in ("bfloat16", "float16") else 0
        rows = CHUNK_BYTES // ((wide + narrow + (wide if problem.softcap else 0)) * problem.v)
        chunk_size = max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    if schedule == "auto":
        schedule = "chunked"
        if problem.reduction == "none" or problem.return_lse:
            schedule = "stored" if m * problem.v * wide <= CHUNK_BYTES else "recompute"
    return LinearCrossEntropyConfig(schedule, chunk_size)


# Kernels -------------------------------------------------------------------------------------------------------------

# Maximum bytes of exp_logits per chunk. With a single chunk, each gradient is one GEMM. Several chunks accumulate dW in
# fp32, which costs memory and 1 to 3 % of dW's GEMM from 8192 rows per chunk up, 15 % at 2048 (H200, bf16, H 4096,
# V 128256).
MAX_CHUNK_BYTES = 1 << 32
# Calls with at most this many rows use a single chunk.
ONE_CHUNK_ROWS = 1 << 13
# So do calls with at most this many times H rows: two chunks with their fp32 dW take more memory (16-bit dW).
ONE_CHUNK_PER_H = 3.5
# So do calls with at most this many bytes of exp_logits and gathered rows of x. Chunks of larger calls have at least
# this many bytes.
ONE_CHUNK_BYTES = 1 << 30
# Minimum rows per chunk of larger calls, absolute and per H. More rows cost memory but save little: a training step of
# a 1B Llama with 16,384 rows (H 2048, V 128256, H100) took 266.0 ms and 36.4 GB in one chunk, 265.9 and 35.2 in chunks
# of 8192 rows, 267.3 and 34.1 in chunks of 4096. benchmarks/results/H200/schedules.md has the head alone.
CHUNK_ROWS = 1 << 12
CHUNK_ROWS_PER_H = 2.5
# Maximum bytes of exp_logits that "auto" keeps until backward.
STORED_BYTES = 1 << 31
E_ITEMSIZE = 2  # of exp_logits
# Size of the scratch for the dlogits of `recompute`: larger if dX's fp32 sums are not in memory (NO_DX) or dW is not
# allocated (NO_DW), at least MIN_BLOCK classes. M 8192, H 4096, V 128256 always stays within 1.30 GB with gradients.
SCRATCH_BYTES = 1 << 25
SCRATCH_BYTES_NO_DX = 3 << 25
SCRATCH_BYTES_NO_DW = 1 << 28
MIN_BLOCK = 2816
# Classes per block of a dW that is summed over chunks: 13 MB of fp32 sums at H 4096. With chunks of 4096 rows, 768
# classes make 64 cluster tiles per GEMM, one wave; 1024 classes make 96, almost two. Relative to `recompute` without
# chunk_size that took 1.32 to 1.57 of the time (H200, M 8192, H 4096, V 128256, three runs).
DW_BLOCK = 768
# `recompute` keeps exp_logits of at least an eighth of the rows, 3 % of the GEMMs' time, or of none.
KEPT_FROM = 8
# Maximum classes per block if exp_logits of some rows are kept: 268 MB of fp32 sums of dW at H 4096. Not tuned:
# M 16384, H 4096, V 128256, "none" took 93.4 ms, without kept rows 104.9 (H200, benchmarks/results/H200/schedules.md).
KEPT_BLOCK = 1 << 14
KEPT_SCRATCH = 1 << 27  # bytes of partial sums, of GEMMs and rows
COLUMN_MULTIPLE = 256  # of the classes of a block, and of the class where exp_logits are split
OFFSET_MULTIPLE = 1024  # bytes, of a buffer's offset in another buffer's storage


def kernel_config(
    problem: LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The kernels' schedule and rows per chunk, from shapes and options; free memory does not matter.

    - Rows per chunk: a multiple of 128, such that exp_logits fit in MAX_CHUNK_BYTES. One chunk up to ONE_CHUNK_ROWS or
      ONE_CHUNK_PER_H * H rows, else CHUNK_ROWS or CHUNK_ROWS_PER_H * H; as many as ONE_CHUNK_BYTES hold if that is
      more. A `chunk_size` is rounded up. `even_chunks` then makes the chunks of a call equal.
    - "auto" is `chunked`, except when gradients are known only in backward (reduction "none", a returned lse) or dW is
      added to the user's buffer, which forward must not write. Then it is `stored` if exp_logits of all rows fit in
      STORED_BYTES, else `recompute`, which keeps those of `rows_to_keep` rows if forward can compute no gradient.
    - `chunked` with reduction "none", and every problem without exp_logits, is `recompute`.
    - `recompute` computes dX in forward if possible, chunk by chunk, with exp_logits in the future storage of dW. So by
      default a chunk has at most H rows, or fewer if forward also computes dW of some classes (`first_classes`). If dW
      is added to the user's buffer, exp_logits fit in SCRATCH_BYTES_NO_DW instead. With a `chunk_size` below M,
      backward sums dW in fp32 over chunks of that size, DW_BLOCK classes at a time.
    """
    is_auto = schedule == "auto"
    if is_auto:
        schedule = "chunked"
        if problem.reduction == "none" or problem.return_lse or problem.grad_weight_out:
            schedule = "stored" if m * problem.v * E_ITEMSIZE <= STORED_BYTES else "recompute"
    if not problem.has_exp_logits or (schedule == "chunked" and not problem.known_in_forward):
        schedule = "recompute"
    dx_in_forward = schedule == "recompute" and problem.known_in_forward and not problem.return_lse
    dw_in_chunks = dx_in_forward and chunk_size is not None
    if chunk_size is None:
        least = rows_that_fit(ONE_CHUNK_BYTES, problem.v + problem.h)
        most = rows_that_fit(MAX_CHUNK_BYTES, problem.v)
        chunk_size = min(max(ONE_CHUNK_ROWS, int(ONE_CHUNK_PER_H * problem.h), least), most)
        if m > chunk_size:
            chunk_size = min(max(CHUNK_ROWS, int(CHUNK_ROWS_PER_H * problem.h), least), most)
        if dx_in_forward:
            room = SCRATCH_BYTES_NO_DW if problem.grad_weight_out else E_ITEMSIZE * problem.v * problem.h
            chunk_size = min(chunk_size, rows_that_fit(room, problem.v))
    chunk_size = round_up(chunk_size, ROW_MULTIPLE)
    if is_auto and schedule == "recompute" and problem.has_exp_logits and not dx_in_forward:
        kept = rows_to_keep(m, problem.v, problem.h, chunk_size)
        if kept * KEPT_FROM >= m:
            return LinearCrossEntropyConfig(schedule, kept, keeps_first=True)
    return LinearCrossEntropyConfig(schedule, chunk_size, dx_in_forward, dw_in_chunks)


def rows_to_keep(m: int, v: int, h: int, chunk_rows: int) -> int:
    """The rows whose exp_logits `recompute` keeps: a chunk of "mean", or fewer, so that it takes no more memory.

    In addition to the gradients, "mean" takes exp_logits of a chunk and the bytes of a 16-bit dW, because it sums dW in
    fp32; with a single chunk, the part of exp_logits that dW's storage does not hold. Backward of `recompute` also
    takes fp32 sums of dX and of a block of dW, rows of x, and the scratch for dlogits.
    """
    if m <= chunk_rows:
        room = m * m * v * E_ITEMSIZE // (m + h)
    else:
        chunk_rows = even_chunks(m, chunk_rows)
        room = (chunk_rows + h) * v * E_ITEMSIZE
    room -= (4 * min(KEPT_BLOCK, v) + 6 * m) * h + 2 * MIN_BLOCK * m + KEPT_SCRATCH
    return min(chunk_rows, room // (E_ITEMSIZE * v) // ROW_MULTIPLE * ROW_MULTIPLE)


def config_of(
    problem: LinearCrossEntropyProblem, m: int, schedule: str = "auto", chunk_size: int | None = None
) -> LinearCrossEntropyConfig:
    """The config by the rule of the problem's path."""
    rule = kernel_config if problem.on_kernels else linear_cross_entropy_config
    return rule(problem, m, schedule, chunk_size)


# With a memory limit -------------------------------------------------------------------------------------------------

# The numbers of chunks that a call may be split into. More cost too much time.
SPLITS = (*range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32)


def by_speed(
    problem: LinearCrossEntropyProblem, m: int, h: int, schedule: str, chunk_size: int | None
) -> list[LinearCrossEntropyConfig]:
    """The candidates of a call with a memory limit, fastest first by `expected_time`. The first that fits is used.

    - `schedule` "auto": `chunked` or `recompute`; `stored` or `recompute` if gradients are known only in backward; all
      three if dW is added to the user's buffer. `stored` takes more memory than `chunked` in one chunk.
    - `chunk_size` None: the default, or M / n for each n in SPLITS. Such a chunk may be kept, as in `kernel_config`.
    """
    names = (schedule,)
    if schedule == "auto":
        only_in_backward = problem.reduction == "none" or problem.return_lse
        names = ("stored", "recompute") if only_in_backward else ("chunked", "recompute")
        if not only_in_backward and problem.on_kernels and problem.grad_weight_out:
            names = SCHEDULES
    sizes = [None, *(-(-m // n) or 1 for n in SPLITS)] if chunk_size is None else [chunk_size]
    configs = [config_of(problem, m, name, size) for name in names for size in sizes]
    if names == ("stored", "recompute") and problem.on_kernels and problem.has_exp_logits:
        rows = [n for name, n, *_ in configs if name == "recompute" and n < m <= n * KEPT_FROM]
        configs += [LinearCrossEntropyConfig("recompute", n, keeps_first=True) for n in rows]
    return sorted(dict.fromkeys(configs), key=lambda config: expected_time(config, m, h))


def expected_time(config: LinearCrossEntropyConfig, m: int, h: int) -> float:
    """Time of forward and backward with the gradients of input and weight in bf16, relative to the three GEMMs alone.

    Measured at M 8192, V 128256 on an H100 and an H200, chunks of 4096, 2048 and 1024 rows. H 4096: `stored` 0.98,
    `chunked` 0.99, 1.03, 1.07 to 1.09, 1.22 to 1.24, `recompute` 1.22 to 1.24, with chunks 1.80 and (1024) 3.4. H 2048:
    `chunked` 0.97, 1.02, 1.15, 1.23, `recompute` 1.33, with chunks 2.3 and 5.9.
    """
    if config.schedule == "stored":
        return 0.98
    rows = even_chunks(max(m, 1), config.chunk_rows)
    if config.schedule == "chunked":
        # The fp32 sums of dW are read and written once per chunk.
        return 0.99 if m <= config.chunk_rows else 0.99 + 0.26 * (1024 / rows) ** 1.5
    if config.keeps_first:  # their part of the fourth GEMM: 0.90 of `recompute` with half of the rows; measured: 0.88
        return 1.24 - 0.24 * rows / m
    sums = 9.5e6 / (rows * h) if config.dw_in_chunks and m > config.chunk_rows else 0.0
    return 1.24 + sums


def rows_that_fit(size: int, v: int) -> int:
    """The rows of v exp_logits that fit in `size` bytes, in whole tiles; at least one tile."""
    return max(size // (E_ITEMSIZE * v) // ROW_MULTIPLE, 1) * ROW_MULTIPLE


def even_chunks(m: int, chunk_rows: int) -> int:
    """Rows per chunk if m rows are divided evenly, in the same number of chunks: a short last chunk is a slow GEMM."""
    return round_up(-(-m // -(-m // chunk_rows)), ROW_MULTIPLE)


def scratch_columns(m: int, has_dw: bool, has_dx_sums: bool) -> int:
    """The classes that the scratch for `recompute`'s dlogits holds; has_dw: dW is allocated too."""
    size = SCRATCH_BYTES_NO_DW if not has_dw else SCRATCH_BYTES if has_dx_sums else SCRATCH_BYTES_NO_DX
    return round_up(max(size // (2 * m), MIN_BLOCK), COLUMN_MULTIPLE)


# Widths that `recompute_blocks` compares; more are possible only in blocks of more than 524,288 classes.
WIDTHS = 1024


class ClassBlock(NamedTuple):
    """Classes [v0, v1), and the location of their exp_logits or dlogits: all m rows, contiguous."""

    v0: int
    v1: int
    offset: int | None  # in bytes in dW's storage; None: in the scratch


@functools.lru_cache(maxsize=1024)
def recompute_blocks(
    m: int, v: int, h: int, itemsize: int | None, scratch: int, most: int = 1 << 31
) -> tuple[ClassBlock, ...]:
    """Divides the classes into few ascending blocks, because each block reads and writes dX's fp32 sums once.

    itemsize: of dW (v, h); None if its storage is the user's. A block's rows of dW follow those of earlier blocks, and
    its dlogits are at the end of dW's remaining storage. With R classes left, a block of n fits if
    n * h * itemsize + m * n * 2 <= R * h * itemsize bytes: n = R / 3 if m = 2 h and dW has 16 bits. So blocks shrink
    until they have `scratch` classes (a multiple of 256), whose dlogits fit in the scratch.

    A block's width, in whole tiles, minimizes the cost per class among the widths from half of the widest that fits,
    at most WIDTHS of them. No block has more than `most` classes, a multiple of 256 that is at least `scratch`.
    """
    blocks, v0 = [], 0
    while v - v0 > scratch:
        fit = 0 if itemsize is None else min(_tail_tiles(m, v, v0, h * itemsize), most // COLUMN_MULTIPLE)
        tiles = _block_tiles(m, h, max(fit, scratch // COLUMN_MULTIPLE))
        v1 = v0 + tiles * COLUMN_MULTIPLE
        blocks.append(ClassBlock(v0, v1, _tail_offset(m, v, v0, v1, h * itemsize) if tiles <= fit else None))
        v0 = v1
    return *blocks, ClassBlock(v0, v, None)


# Minimum elements of dX per chunk, a wave of tiles. With chunks of half a wave, `recompute` took 1.75 times the three
# GEMMs instead of 1.42 (H200, M 4096, H 2048, V 32000, chunks of 1024 rows).
MIN_DX_ELEMENTS = 1 << 22


@functools.lru_cache(maxsize=1024)
def first_classes(m: int, v: int, h: int, itemsize: int) -> tuple[int, int, int] | None:
    """(columns, offset, part_rows): `recompute` computes dW of the classes [0, columns), the first block, in forward.

    Their exp_logits of all rows start at byte `offset` of dW's storage. The storage before that holds the other
    classes' exp_logits of `part_rows` rows, which are the rows of a chunk. None if there is no room for chunks of
    MIN_DX_ELEMENTS, or for any block of exp_logits.

    A third of all classes if m = 2 h and dW has 16 bits, which saves backward a third of its logits.
    """
    first = recompute_blocks(m, v, h, itemsize, scratch_columns(m, True, False))[0]
    if first.offset is None:
        return None
    part_rows = first.offset // (E_ITEMSIZE * round_up(v - first.v1, 64)) // ROW_MULTIPLE * ROW_MULTIPLE
    if min(part_rows, m) * h < min(m * h, MIN_DX_ELEMENTS):
        return None
    return first.v1, first.offset, part_rows


def _tail_tiles(m: int, v: int, v0: int, row_bytes: int) -> int:
    """How many tiles of classes from v0 on fit in dW's storage: their rows of dW, then exp_logits of m rows."""
    tiles = (v - v0) * row_bytes // (row_bytes + m * E_ITEMSIZE) // COLUMN_MULTIPLE
    v1 = v0 + tiles * COLUMN_MULTIPLE
    return tiles if _tail_offset(m, v, v0, v1, row_bytes) >= v1 * row_bytes else tiles - 1


def _tail_offset(m: int, v: int, v0: int, v1: int, row_bytes: int) -> int:
    return (v * row_bytes - m * E_ITEMSIZE * (v1 - v0)) // OFFSET_MULTIPLE * OFFSET_MULTIPLE


# Clusters that run at a time on 132 SMs, with tiles of 256 x 256.
WAVE = 66
# Elements of dX's fp32 sums that a block reads and writes in the time that a wave takes per unit of K: 0.3 ms per block
# of 2048 classes (H200, M 8192, H 4096, V 128256), the time of a wave with K = 24,000.
SUMS_PER_STEP = 1400


@functools.lru_cache(maxsize=1024)
def _block_tiles(m: int, h: int, widest: int) -> int:
    narrowest = max((widest + 1) // 2, widest - WIDTHS + 1)
    return min(range(widest, narrowest - 1, -1), key=lambda tiles: _block_cost(m, h, tiles) / tiles)


def _block_cost(m: int, h: int, tiles: int) -> int:
    """The sum of waves * K over the GEMMs for dlogits, dW and dX, plus the cost of dX's sums."""
    m_tiles, h_tiles = -(-m // 256), -(-h // 256)
    waves = [-(-n // WAVE) for n in (m_tiles * tiles, h_tiles * tiles, m_tiles * h_tiles)]
    depths = h, m, tiles * COLUMN_MULTIPLE
    return sum(n * depth for n, depth in zip(waves, depths, strict=True)) + m * h // SUMS_PER_STEP


# exp_logits of a single chunk share dW's storage if they have more bytes than this; sharing takes another launch. At
# M 4096, H 2048, V 32000 (262 MB) sharing saves 87 MB and costs 0.5 % of a step (H200). Smaller ones are not measured.
SHARED_FROM = 1 << 26


def shared_storage(m: int, v: int, h: int, itemsize: int) -> ClassBlock | None:
    """The classes [0, v1) whose exp_logits fit at the end of the storage of dW (v, h); None if less than a tile.

    First dX is computed, then dW of these classes, before their exp_logits, then dW of the other classes, which
    overwrites these exp_logits. So dW takes two GEMMs.

    A third of all classes fits if m = 2 h and dW is bf16. At M 8192, H 4096, V 128256, 1.40 GB of the 2.10 GB of
    exp_logits remain outside.
    """
    columns = _tail_tiles(m, v, 0, h * itemsize) * COLUMN_MULTIPLE
    return ClassBlock(0, columns, _tail_offset(m, v, 0, columns, h * itemsize)) if columns else None


class Layout(NamedTuple):
    """The rows and classes that a call processes at a time, and which buffers share the storage of dW (v, h)."""

    chunk_rows: int  # of forward's chunks
    # exp_logits of the classes [0, columns) start at byte `offset` of dW's storage. `chunked`: of the only chunk;
    # `recompute`: of all rows, and forward computes dW of these classes.
    columns: int = 0
    offset: int = 0
    blocks: tuple[ClassBlock, ...] = ()  # of backward of `recompute`
    dw_block: int = 0  # classes per block if backward of `recompute` sums dW over forward's chunks; 0: no sums
    kept: int = 0  # the first slots, whose exp_logits are kept for backward: all of `stored`


@functools.lru_cache(maxsize=4096)
def choose_layout(
    schedule: str, chunk_rows: int, dx_in_forward: bool, dw_in_chunks: bool, keeps_first: bool, m: int, v: int, h: int,
    dx: bool, dw: int | None, owns_dw: bool, dw_in_forward: bool,
) -> Layout:  # fmt: skip
    """The layout of a call on kernels. The first five arguments are a LinearCrossEntropyConfig.

    dx: whether the input has a gradient. dw: the itemsize of the weight's gradient, None without one. owns_dw: dW is
    allocated, not added to the user's buffer. dw_in_forward: `recompute` may compute dW of the first classes in
    forward.
    """
    if schedule == "chunked":
        shared = None
        if dw and m <= chunk_rows and m * v * E_ITEMSIZE > SHARED_FROM:
            shared = shared_storage(m, v, h, dw)
        return Layout(even_chunks(m, chunk_rows), *(shared[1:] if shared else (0, 0)))
    kept = rows_kept(schedule, chunk_rows, keeps_first, m)
    if schedule == "stored":
        return Layout(even_chunks(m, chunk_rows), kept=kept)
    if kept:
        scratch = scratch_columns(m - kept, bool(dw and owns_dw), dx)
        blocks = recompute_blocks(m - kept, v, h, dw if owns_dw else None, scratch, max(KEPT_BLOCK, scratch))
        return Layout(kept, blocks=blocks, kept=kept)
    if dw_in_chunks and owns_dw and dw and m > chunk_rows:
        return Layout(even_chunks(m, chunk_rows), dw_block=min(DW_BLOCK, v))
    scratch = scratch_columns(m, bool(dw and owns_dw), dx and not dx_in_forward)
    blocks = recompute_blocks(m, v, h, dw if owns_dw else None, scratch)
    if dw_in_forward:
        first = first_classes(m, v, h, dw)
        if first is not None:
            columns, offset, part_rows = first
            return Layout(even_chunks(m, part_rows), columns, offset, blocks[1:])
    if dx and dx_in_forward and not dw and not dw_in_chunks:  # there is no storage of dW for exp_logits
        chunk_rows = min(chunk_rows, rows_that_fit(SCRATCH_BYTES_NO_DW, v))
    return Layout(even_chunks(m, chunk_rows), blocks=blocks)


def rows_kept(schedule: str, chunk_rows: int, keeps_first: bool, m: int) -> int:
    """The slots whose exp_logits forward keeps for backward."""
    if schedule == "stored":
        return m
    return chunk_rows if keeps_first and m > chunk_rows else 0


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
