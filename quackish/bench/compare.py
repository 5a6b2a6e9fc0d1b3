"""Two results files: how the rows that both have differ, and which of them are regressions."""

import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quackish.bench import schema
from quackish.bench.cells import parse_shape

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.table import Table

ENVIRONMENT = ("gpu", "driver", "torch", "cuda", "dsl", "tvm_ffi", "peers", "quackish", "commit", "rounds")


@dataclasses.dataclass(frozen=True)
class Comparison:
    both: "pd.DataFrame"  # columns of the two as <name>_a and <name>_b, with ratio, roof_ratio and verdict
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
    """Joins on (op, shape, dtype, direction, provider); `fail` 0.03 allows 3 %.

    ValueError if a file is not `bench`'s, or if the two have no row in common.
    """
    a, b = _load(before), _load(after)
    joined = a.merge(b, on=list(schema.KEY), how="outer", indicator=True, suffixes=("_a", "_b"))
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
    return Comparison(
        both=both,
        only_before=[_name(row) for row in joined[joined._merge == "left_only"].itertuples()],
        only_after=[_name(row) for row in joined[joined._merge == "right_only"].itertuples()],
        changes=_changes(a, b),
        fail=fail,
    )


def _load(path: Path) -> "pd.DataFrame":
    """The last row of each; numbers as numbers, NaN for none."""
    import pandas as pd

    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except pd.errors.EmptyDataError:
        raise ValueError(f"{path}: is empty") from None
    if absent := [name for name in schema.COLUMNS if name not in table.columns]:
        raise ValueError(f"{path}: not a CSV of `quackish bench`: has no column {', '.join(absent)}")
    if others := set(table.schema) - {str(schema.SCHEMA)}:
        raise ValueError(f"{path}: its schema is {', '.join(sorted(others))}, this is {schema.SCHEMA}")
    for name in ("median_ms", "p20_ms", "p80_ms", "peak_mb"):
        table[name] = pd.to_numeric(table[name])
    return table.drop_duplicates(list(schema.KEY), keep="last")


def _verdict(row, fail: float) -> str:
    """slower or faster: beyond `fail` and beyond the noise, which is the range from p20 to p80."""
    if row.role_b not in schema.COMPETING:
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


def _changes(a: "pd.DataFrame", b: "pd.DataFrame") -> list[str]:
    values = ((name, *(", ".join(dict.fromkeys(t[name])) for t in (a, b))) for name in ENVIRONMENT)
    return [f"{name}: {old or '-'} -> {new or '-'}" for name, old, new in values if old != new]


def _name(row) -> str:
    return f"{row.op} {row.direction} {row.shape} {row.dtype} {row.provider}"


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
    for (op, direction, dtype), rows in found.both.groupby(["op", "direction", "dtype"], sort=False):
        console.print(f"\n{op}, {direction}, {dtype}, ms", markup=False)
        console.print(_table(rows))
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


def _table(rows: "pd.DataFrame") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("shape", "provider", "before", "after", "ratio", "memory ratio", ""):
        table.add_column(name, justify="right" if name in ("before", "after", "ratio", "memory ratio") else "left")
    styles = {"slower": "red", "fails": "red", "faster": "green", "works": "green", "noise": "dim"}
    for row in rows.itertuples():
        numbers = (row.median_ms_a, row.median_ms_b, row.ratio, row.memory)
        shown = (("-" if n != n else f"{n:{f}}") for n, f in zip(numbers, (".4g", ".4g", ".3f", ".3f"), strict=True))
        style = styles.get(row.verdict) or ("dim" if row.role_b not in schema.COMPETING else None)
        table.add_row(row.shape, row.provider, *shown, row.verdict, style=style)
    return table
