"""Two results files: how the rows that both have differ, and which of them are regressions."""

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from quackish.bench.cells import Cell, shape_name
from quackish.bench.report import console_table
from quackish.bench.results import COMPETING, Row, cell_of, read_rows

if TYPE_CHECKING:
    from rich.console import Console

ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "dsl", "tvm_ffi", "peers", "quackish", "commit", "rounds")
STYLES = {"slower": "red", "fails": "red", "faster": "green", "works": "green", "noise": "dim"}
Key = tuple[Cell, str]  # and a provider


class Pair(NamedTuple):
    """Two rows about the same."""

    cell: Cell
    provider: str
    a: Row  # before
    b: Row
    verdict: str

    def ratio(self, column: str = "median_ms") -> float | None:
        return float(self.b[column]) / float(self.a[column]) if self.a[column] and self.b[column] else None

    def regression(self) -> str:
        """A sentence."""
        name, (a, b) = _name((self.cell, self.provider)), (self.a, self.b)
        if self.verdict == "fails":
            return f"{name}: took {float(a['median_ms']):.4g} ms, now {b['status']}"
        ms, p80, p20 = float(b["median_ms"]), float(a["p80_ms"]), float(b["p20_ms"])
        times = f"{float(a['median_ms']):.4g} -> {ms:.4g} ms, {self.ratio():.3f} times"
        return f"{name}: {times} (p80 was {p80:.4g}, p20 is {p20:.4g})"


class Comparison(NamedTuple):
    both: list[Pair]
    only_before: list[str]
    only_after: list[str]
    changes: list[str]  # of the environment
    fail: float

    @property
    def regressions(self) -> list[str]:
        return [pair.regression() for pair in self.both if pair.verdict in ("slower", "fails")]


def compare(before: Path, after: Path, fail: float, providers: Sequence[str] = ("*",)) -> Comparison:
    """Joins by cell and provider; `fail` 0.03 allows 3 %. ValueError for a file of others, or with no row in common."""
    a, b = _load(before), _load(after)
    keys = [
        (cell, provider)
        for cell, provider in sorted({**a, **b}, key=lambda key: (*_group(key[0]), key[0].shape, key[0].kind))
        if any(fnmatch.fnmatchcase(provider, pattern) for pattern in providers)
        or "roof" in (row["role"] for row in (a.get((cell, provider)), b.get((cell, provider))) if row)
    ]
    both = [Pair(*key, a[key], b[key], _verdict(a[key], b[key], fail)) for key in keys if key in a and key in b]
    if not both:
        raise ValueError(f"{before} and {after} have no row in common")
    only_before, only_after = ([_name(key) for key in keys if key not in other] for other in (b, a))
    values = ((name, *(", ".join({row[name]: 0 for row in rows.values()}) for rows in (a, b))) for name in ENVIRONMENT)
    changes = [f"{name}: {old or '-'} -> {new or '-'}" for name, old, new in values if old != new]
    return Comparison(both, only_before, only_after, changes, fail)


def _load(path: Path) -> Mapping[Key, Row]:
    """The last row of each."""
    return {(cell_of(row), row["provider"]): row for row in read_rows(path)}


def _group(cell: Cell) -> tuple[str, str, str]:
    return cell.op, cell.direction, cell.dtype


def _name(key: Key) -> str:
    return f"{key[0].op} {key[0]} {key[1]}"


def _verdict(a: Row, b: Row, fail: float) -> str:
    """slower or faster: beyond `fail` and beyond the noise, which is the range from p20 to p80."""
    if b["role"] not in COMPETING:
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


def show(found: Comparison, console: "Console") -> None:
    """Prints the table, what only one file has, how the roofs moved, and the regressions."""
    for change in found.changes:
        console.print(change, markup=False, soft_wrap=True)
    header = ("shape", "provider", ">before", ">after", ">ratio", ">memory ratio", "")
    for group, pairs in itertools.groupby(found.both, lambda pair: _group(pair.cell)):
        lines, styles = [], []
        for pair in pairs:
            times = (f"{float(row['median_ms']):.4g}" if row["median_ms"] else "-" for row in (pair.a, pair.b))
            ratios = (f"{ratio:.3f}" if ratio else "-" for ratio in (pair.ratio(), pair.ratio("peak_mb")))
            lines.append((shape_name(pair.cell.shape) + pair.cell.kind, pair.provider, *times, *ratios, pair.verdict))
            styles.append(STYLES.get(pair.verdict, "" if pair.b["role"] in COMPETING else "dim"))
        console_table(f"{', '.join(group)}, ms", header, lines, styles)
    for title, names in (("only before", found.only_before), ("only after", found.only_after)):
        if names:
            console.print(f"{title}: {'; '.join(names)}", markup=False, soft_wrap=True)
    if roofs := [pair.ratio() for pair in found.both if pair.b["role"] == "roof" and pair.ratio()]:
        low, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in (min(roofs), max(roofs)))
        console.print(f"the roofs themselves moved by {low} to {high}")
    for sentence in found.regressions:
        console.print(f"REGRESSION  {sentence}", style="red", markup=False, soft_wrap=True)
    beyond = f"slower by more than {100 * found.fail:g} % and beyond the noise"
    console.print(f"{len(found.regressions)} of {len(found.both)} rows {beyond}, or failing now")
