"""Two results files: how the rows that both have differ, and which of them are regressions."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quackish.bench.cells import parse_shape
from quackish.bench.report import console_table
from quackish.bench.results import COMPETING, KEY, cell_of, read_rows

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "dsl", "tvm_ffi", "peers", "quackish", "commit", "rounds")
STYLES = {"slower": "red", "fails": "red", "faster": "green", "works": "green", "noise": "dim"}


@dataclasses.dataclass(frozen=True)
class Comparison:
    both: "pd.DataFrame"  # columns of the two as <name>_a and <name>_b, with ratio, memory and verdict
    only_before: list[str]
    only_after: list[str]
    changes: list[str]  # of the environment
    fail: float

    @property
    def regressions(self) -> list[str]:
        """A sentence for each."""
        bad = self.both[self.both.verdict.isin(("slower", "fails"))]
        return [_sentence(row) for row in bad.itertuples()]


def compare(before: Path, after: Path, fail: float, providers: Sequence[str] = ("*",)) -> Comparison:
    """Joins on KEY; `fail` 0.03 allows 3 %. ValueError for a file of others, or if the two have no row in common."""
    a, b = _load(before), _load(after)
    joined = a.merge(b, on=list(KEY), how="outer", indicator=True, suffixes=("_a", "_b"))
    joined = joined.sort_values("shape", key=lambda shapes: shapes.map(parse_shape), kind="stable")
    joined = joined.sort_values(["op", "direction", "dtype"], kind="stable")
    wanted = joined.provider.map(lambda name: any(fnmatch.fnmatchcase(name, p) for p in providers))
    joined = joined[wanted | joined[["role_a", "role_b"]].eq("roof").any(axis=1)]
    both = joined[joined._merge == "both"].copy()
    if both.empty:
        raise ValueError(f"{before} and {after} have no row in common")
    both["ratio"] = both.median_ms_b / both.median_ms_a
    both["memory"] = both.peak_mb_b / both.peak_mb_a
    both["verdict"] = [_verdict(row, fail) for row in both.itertuples()]
    only = ([_name(row) for row in joined[joined._merge == f"{side}_only"].itertuples()] for side in ("left", "right"))
    values = ((name, *(", ".join(dict.fromkeys(table[name])) for table in (a, b))) for name in ENVIRONMENT)
    changes = [f"{name}: {old or '-'} -> {new or '-'}" for name, old, new in values if old != new]
    return Comparison(both, *only, changes, fail)


def _load(path: Path) -> "pd.DataFrame":
    """The last row of each; numbers as numbers, NaN for none."""
    import pandas as pd

    if not (rows := read_rows(path)):
        raise ValueError(f"{path}: has no rows")
    table = pd.DataFrame([{"data": "normal", "ignored": "0.0"} | row for row in rows])
    for name in ("median_ms", "p20_ms", "p80_ms", "peak_mb"):
        table[name] = pd.to_numeric(table[name])
    return table.drop_duplicates(list(KEY), keep="last")


def _verdict(row, fail: float) -> str:
    """slower or faster: beyond `fail` and beyond the noise, which is the range from p20 to p80."""
    if row.role_b not in COMPETING:
        return ""
    if row.status_b != "ok":
        return "fails" if row.status_a == "ok" else "failed before"
    if row.status_a != "ok":
        return "works"
    if row.ratio > 1 + fail:
        return "slower" if row.p20_ms_b > row.p80_ms_a else "noise"
    if row.ratio < 1 / (1 + fail):
        return "faster" if row.p80_ms_b < row.p20_ms_a else "noise"
    return ""


def _name(row) -> str:
    return f"{row.op} {cell_of(row._asdict())} {row.provider}"


def _sentence(row) -> str:
    if row.verdict == "fails":
        return f"{_name(row)}: took {row.median_ms_a:.4g} ms, now {row.status_b}"
    return (
        f"{_name(row)}: {row.median_ms_a:.4g} -> {row.median_ms_b:.4g} ms, {row.ratio:.3f} times "
        f"(p80 was {row.p80_ms_a:.4g}, p20 is {row.p20_ms_b:.4g})"
    )


def show(found: Comparison, console: "Console") -> None:
    """Prints the table, what only one file has, how the roofs moved, and the regressions."""
    for change in found.changes:
        console.print(change, markup=False, soft_wrap=True)
    header = ("shape", "provider", ">before", ">after", ">ratio", ">memory ratio", "")
    for (op, direction, dtype), rows in found.both.groupby(["op", "direction", "dtype"], sort=False):
        lines, styles = [], []
        for row in rows.itertuples():
            numbers = (f"{row.median_ms_a:.4g}", f"{row.median_ms_b:.4g}", f"{row.ratio:.3f}", f"{row.memory:.3f}")
            shown = ("-" if text == "nan" else text for text in numbers)
            lines.append((row.shape + cell_of(row._asdict()).kind, row.provider, *shown, row.verdict))
            styles.append(STYLES.get(row.verdict, "" if row.role_b in COMPETING else "dim"))
        console_table(f"{op}, {direction}, {dtype}, ms", header, lines, styles)
    for title, names in (("only before", found.only_before), ("only after", found.only_after)):
        if names:
            console.print(f"{title}: {'; '.join(names)}", markup=False, soft_wrap=True)
    roofs = found.both[found.both.role_b == "roof"].ratio.dropna()
    if not roofs.empty:
        low, high = (f"{100 * (ratio - 1):+.1f} %" for ratio in (roofs.min(), roofs.max()))
        console.print(f"the roofs themselves moved by {low} to {high}")
    regressions = found.regressions
    for sentence in regressions:
        console.print(f"REGRESSION  {sentence}", style="red", markup=False, soft_wrap=True)
    beyond = f"slower by more than {100 * found.fail:g} % and beyond the noise"
    console.print(f"{len(regressions)} of {len(found.both)} rows {beyond}, or failing now")
