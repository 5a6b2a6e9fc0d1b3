"""Linear cross entropy, `recompute` with a chunk_size: where everything lies, to need little memory.

Most lies where the weight gradient, or that of classes that are still to come, will be. What has no room there any
more, towards the last classes, lies in a scratch.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from quackish.configs.linear_cross_entropy import (
    COLUMN_MULTIPLE,
    E_ITEMSIZE,
    LEAST_PART,
    OFFSET_MULTIPLE,
    ROW_MULTIPLE,
    WAVE,
    even_chunks,
    round_up,
)

SUM_ITEMSIZE = 4
LEAST_SCRATCH = 1 << 17  # bytes, beside the rows of x
LEAST_COLUMNS = 8  # rows of dlogits start on 16 bytes


class LeanBlock(NamedTuple):
    """Classes [v0, v1), by `part_rows` rows at a time; offsets are bytes into the weight gradient's storage, (v, h).

    The gradient of a block with sums (`LeanProblem.has_sums`) is added up in fp32, from the beginning of its own rows
    on and over as many of the next ones, or in the scratch.
    """

    v0: int
    v1: int
    part_rows: int
    e_at: int | None  # dlogits (part_rows, v1 - v0), without gaps; None: in the scratch, and the sums too
    x_at: int | None  # the part's rows of x; None: in the scratch


@dataclasses.dataclass(frozen=True)
class LeanProblem:
    m: int
    v: int
    h: int
    itemsize: int  # of the weight gradient
    chunk_rows: int
    tiles: int  # fp32 partial sums a row

    @property
    def forward_rows(self) -> int:
        """The rows of forward's chunks, with E, the rows of x and the partial sums of each in as much memory as the
        weight gradient will take. 0 where there are too few: then E of `chunk_rows` has memory of its own.

        Chunks of half a wave of tiles are slow (see LEAST_PART), but a quarter of what was asked for still will do.
        """
        a_row = round_up(self.v, 64) * E_ITEMSIZE + self.h * E_ITEMSIZE + self.tiles * SUM_ITEMSIZE
        fit = (self.v * self.h * self.itemsize - 2 * OFFSET_MULTIPLE) // a_row // ROW_MULTIPLE * ROW_MULTIPLE
        if fit * self.h < LEAST_PART and 4 * fit < self.scratch_rows:
            return 0
        return self.m if fit >= self.m else even_chunks(self.m, fit)

    @property
    def scratch_rows(self) -> int:
        return min(self.m, self.chunk_rows)

    @property
    def scratch_columns(self) -> int:
        """How many classes' dlogits and sums the scratch has: a quarter of the bytes of its rows of x, or 128 KiB; or
        as many as E has had in forward."""
        a_class = self.scratch_rows * E_ITEMSIZE + self.h * SUM_ITEMSIZE * self.has_sums(self.scratch_rows)
        there = max(self.scratch_rows * self.h * E_ITEMSIZE // 4, LEAST_SCRATCH)
        if self.forward_rows == 0:
            there = max(there, self.scratch_rows * self.v * E_ITEMSIZE)
        return min(max(there // a_class // LEAST_COLUMNS, 1) * LEAST_COLUMNS, round_up(self.v, LEAST_COLUMNS))

    def has_sums(self, part_rows: int) -> bool:
        """Whether a block is summed over parts, and not in the gradient itself."""
        return part_rows < self.m and self.itemsize < SUM_ITEMSIZE

    def bytes_of_class(self, part_rows: int) -> int:
        """Of a class's own gradient, or its sums, which begin there."""
        return self.h * (SUM_ITEMSIZE if self.has_sums(part_rows) else self.itemsize)


@functools.lru_cache(maxsize=1024)
def lean_blocks(problem: LeanProblem) -> tuple[LeanBlock, ...]:
    """All classes, ascending, in blocks of which each is the best next one.

    A block costs what its classes cost in any block, and what comes on top: launches, short waves of tiles, sums. The
    fewer classes it has of those left, the more room there is for it, but the more blocks follow. The best next one has
    the least on top for each halving of what is left. M 8192, H 4096, V 128256 with chunks of 128 rows has 28 blocks;
    the last 528 classes take nine of them, and 576 of all 701 parts.
    """
    blocks, v0 = [], 0
    while problem.v - v0 > problem.scratch_columns:
        in_scratch = LeanBlock(v0, v0 + problem.scratch_columns, problem.scratch_rows, None, None)
        blocks.append(min((in_scratch, *_that_fit(problem, v0)), key=lambda block: _on_top(problem, block)))
        v0 = blocks[-1].v1
    return *blocks, LeanBlock(v0, problem.v, problem.scratch_rows, None, None)


def _that_fit(problem: LeanProblem, v0: int) -> Iterator[LeanBlock]:
    """Some widths: with all rows, else with as many as there is room for; or with those of the scratch."""
    m, size, row_of_x = problem.m, problem.v * problem.h * problem.itemsize, problem.h * E_ITEMSIZE
    for n in _widths(problem, v0):
        e_at, x_at = _offsets(problem, v0, n, m)
        if x_at + m * row_of_x <= size:
            yield LeanBlock(v0, v0 + n, m, e_at, x_at)
        else:
            room = size - _offsets(problem, v0, n, 0)[1] - OFFSET_MULTIPLE
            rows = min(room // (row_of_x + n * E_ITEMSIZE), m - 1) // ROW_MULTIPLE * ROW_MULTIPLE
            if rows >= problem.chunk_rows:
                rows = even_chunks(m, rows)
                yield LeanBlock(v0, v0 + n, rows, *_offsets(problem, v0, n, rows))
        e_at, x_at = _offsets(problem, v0, n, problem.scratch_rows)
        if x_at <= size:
            yield LeanBlock(v0, v0 + n, problem.scratch_rows, e_at, None)


def _widths(problem: LeanProblem, v0: int) -> list[int]:
    """Sixteenths of what is left, and the widest that fit: with all rows of x there, and with those of the scratch.
    Ascending: of equals the first is taken, and bits depend on it."""
    left = problem.v - v0
    there = left * problem.h * problem.itemsize - 2 * OFFSET_MULTIPLE
    widths = [left * sixteenths // 16 for sixteenths in range(1, 16)]
    for rows, of_x in (problem.m, problem.m * problem.h * E_ITEMSIZE), (problem.scratch_rows, 0):
        widths.append(min((there - of_x) // (problem.bytes_of_class(rows) + rows * E_ITEMSIZE), left - 1))
    multiples = [COLUMN_MULTIPLE if n >= COLUMN_MULTIPLE else LEAST_COLUMNS for n in widths]
    return sorted({n // multiple * multiple for n, multiple in zip(widths, multiples, strict=True) if n >= multiple})


def _offsets(problem: LeanProblem, v0: int, n: int, rows: int) -> tuple[int, int]:
    """Of a part's dlogits, behind the block's own rows and sums, and of its rows of x behind these."""
    begin = v0 * problem.h * problem.itemsize
    e_at = round_up(begin + n * problem.bytes_of_class(rows), OFFSET_MULTIPLE)
    return e_at, round_up(e_at + rows * n * E_ITEMSIZE, OFFSET_MULTIPLE)


# A part's launches and first loads, 40 us: in waves of tiles, times how deep they multiply, 0.0125 us each. A guess,
# and high: parts of 128 rows and 8 classes, 91 us by this count, took 55 each (H200, H 4096, with other tiles). No
# other value was tried.
PART_COST = 3200


def _on_top(problem: LeanProblem, block: LeanBlock) -> float:
    """In the units of `recompute_blocks`: what comes on top, for each halving of the classes that are left."""
    m, h, n, rows = problem.m, problem.h, block.v1 - block.v0, block.part_rows
    m_tiles, n_tiles, h_tiles = (-(-size // 256) for size in (rows, n, h))
    waves = -(-m_tiles * n_tiles // WAVE) * h + -(-n_tiles * h_tiles // WAVE) * rows
    sums_and_x = (n + rows) * h // 8000  # bytes that are read and written, at 4 TB/s or so
    cost = -(-m // rows) * (PART_COST + waves + sums_and_x)
    return (cost - 2 * m * h * n // (256 * 256 * WAVE)) / -math.log2(1 - n / (problem.v - block.v0))
