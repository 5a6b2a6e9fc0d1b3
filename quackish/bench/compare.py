"""Two results files: how the rows that both have differ, and which of them are regressions."""

from pathlib import Path
from typing import NamedTuple

from quackish.bench.cells import NOT_PROVIDERS, Cell
from quackish.bench.environment import ENVIRONMENT
from quackish.bench.results import Row, cell_of, read_rows
from quackish.profiling import text_table


class Pair(NamedTuple):
    """Two rows about the same."""

    cell: Cell
    provider: str
    a: Row  # before
    b: Row
    verdict: str

    def ratio(self, column: str = "median_ms") -> float | None:
        return float(self.b[column]) / float(self.a[column]) if self.a[column] and self.b[column] else None


class Comparison(NamedTuple):
    both: list[Pair]
    only: list[str]  # in one of them
    changes: list[str]  # of the environment

    @property
    def regressions(self) -> list[Pair]:
        return [pair for pair in self.both if pair.verdict in ("slower", "fails")]


def compare(before: Path, after: Path, fail: float) -> Comparison:
    """Joins the last rows of each cell and provider; `fail` 0.03 allows 3 %.

    ValueError for files that are no results or have no row in common.
    """
    a, b = ({(cell_of(row), row["provider"]): row for row in read_rows(path)} for path in (before, after))
    keys = sorted({**a, **b}, key=lambda key: (key[0].op, key[0].direction, key[0].dtype, key[0].shape, key[0].kind))
    both = [Pair(*key, a[key], b[key], _verdict(a[key], b[key], fail)) for key in keys if key in a and key in b]
    if not both:
        raise ValueError(f"{before} and {after} have no row in common")
    only = [f"{key[0]} {key[1]} ({'before' if key in a else 'after'})" for key in keys if key not in a or key not in b]
    values = [(name, *(", ".join({row[name]: 0 for row in of.values()}) for of in (a, b))) for name in ENVIRONMENT]
    changes = [f"{name}: {old or '-'} -> {new or '-'}" for name, old, new in values if old != new and name != "date"]
    return Comparison(both, only, changes)


def _verdict(a: Row, b: Row, fail: float) -> str:
    """slower or faster: beyond `fail` and beyond the noise, which is the range from p20 to p80."""
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


def text(found: Comparison, fail: float) -> str:
    """The environment's changes, the table, what only one file has, and the regressions."""
    lines = []
    for pair in found.both:
        times = (f"{float(row['median_ms']):.4g}" if row["median_ms"] else "-" for row in (pair.a, pair.b))
        ratios = (f"{ratio:.3f}" if ratio else "-" for ratio in (pair.ratio(), pair.ratio("peak_mb")))
        why = f"{pair.verdict}: {pair.b['status']}" if pair.verdict == "fails" else pair.verdict
        lines.append((str(pair.cell), pair.provider, *times, *ratios, why))
    header = ("cell", "provider", "ms before", "after", "ratio", "memory ratio", "")
    parts = [*found.changes, text_table(header, lines, "llrrrrl")]
    parts += [f"in one file only: {'; '.join(found.only)}"] if found.only else []
    beyond = f"slower by more than {100 * fail:g} % and beyond the noise"
    return "\n".join([*parts, f"{len(found.regressions)} of {len(found.both)} rows {beyond}, or failing now"])
