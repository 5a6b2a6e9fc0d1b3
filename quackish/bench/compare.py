"""Compares two results files: the ratios of their common rows, and the regressions."""

import itertools
from pathlib import Path
from typing import NamedTuple

from quackish.bench.cells import NOT_PROVIDERS, Cell
from quackish.bench.environment import ENVIRONMENT
from quackish.bench.results import Row, cell_of, read_rows
from quackish.console import fill, text_table


class Pair(NamedTuple):
    """The rows of a cell and provider in two files."""

    cell: Cell
    provider: str
    before: Row
    after: Row
    verdict: str

    def ratio(self, column: str) -> str:
        a, b = self.before[column], self.after[column]
        return f"{float(b) / float(a):.3f}" if a and b else "-"


def compare(before: Path, after: Path, fail: float) -> tuple[str, list[Pair]]:
    """(text, the pairs in it): the last row of each cell and provider counts. `fail=0.03` allows a slowdown of 3 %.

    Raises ValueError for other files, and for files without common rows.
    """
    a, b = ({(cell_of(row), row["provider"]): row for row in read_rows(path)} for path in (before, after))
    keys = sorted({**a, **b}, key=lambda key: (key[0].op, key[0].direction, key[0].dtype, key[0].shape, key[0].kind))
    pairs = [Pair(*key, a[key], b[key], _verdict(a[key], b[key], fail)) for key in keys if key in a and key in b]
    if not pairs:
        raise ValueError(f"{before} and {after} have no row in common")
    parts = []
    for name in ENVIRONMENT:
        old, new = (", ".join(dict.fromkeys(row[name] for row in rows.values())) for rows in (a, b))
        if old != new and name != "date":
            parts.append(fill(f"{name}: {old or '-'} -> {new or '-'}", indent="  "))
    rows: list[str | tuple[str, ...]] = []
    for cell, group in itertools.groupby(pairs, lambda pair: pair.cell):
        rows.append(str(cell))
        for pair in group:
            rows.append(_line(pair))
            rows += [fill(pair.after["status"], "      ")] * (pair.verdict == "fails")
    header = ("  provider", "ms before", "after", "ratio", "memory ratio", "")
    parts.append(text_table(header, rows, "lrrrrl"))
    only = [f"{key[0]} {key[1]} ({'before' if key in a else 'after'})" for key in keys if key not in a or key not in b]
    parts += [fill(f"in one file only: {'; '.join(only)}", indent="  ")] if only else []
    slower = f"slower by more than {100 * fail:g} % and by more than the noise"
    parts.append(fill(f"{len(regressions(pairs))} of {len(pairs)} rows are {slower}, or fail now"))
    return "\n".join(parts), pairs


def regressions(pairs: list[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.verdict in ("slower", "fails")]


def _line(pair: Pair) -> tuple[str, ...]:
    times = (f"{float(row['median_ms']):.4g}" if row["median_ms"] else "-" for row in (pair.before, pair.after))
    return f"  {pair.provider}", *times, pair.ratio("median_ms"), pair.ratio("peak_mb"), pair.verdict


def _verdict(a: Row, b: Row, fail: float) -> str:
    """ "slower" or "faster" by more than `fail` and the noise, the range from p20 to p80; or how the status changed."""
    if b["provider"] in NOT_PROVIDERS:
        return ""
    if b["status"] != "ok":
        return "fails" if a["status"] == "ok" else "failed before"
    if a["status"] != "ok":
        return "works"
    ratio = float(b["median_ms"]) / float(a["median_ms"])
    if ratio > 1 + fail:
        return "slower" if float(b["p20_ms"]) > float(a["p80_ms"]) else "noise"
    if ratio < 1 / (1 + fail):
        return "faster" if float(b["p80_ms"]) < float(a["p20_ms"]) else "noise"
    return ""
