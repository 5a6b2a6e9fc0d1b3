"""Results files: CSVs with a row per provider and cell."""

import csv
import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from quackish.bench.cells import AGAIN, OURS, Cell, Job, is_ours, library, shape_name
from quackish.bench.environment import ENVIRONMENT
from quackish.bench.measure import WRONG, Record
from quackish.bench.table import BENCHES, ERRORS, NOT_PROVIDERS
from quackish.ops.shared.for_tools import parse_shape
from quackish.text import significant

Row = dict[str, str]
Point = tuple[float, float]  # milliseconds, GB

COLUMNS = (  # explained in benchmarks/README.md
    *ENVIRONMENT,
    *("op", "shape", "dtype", "direction", "data", "ignored", "models", "provider", "status", "note"),
    *("median_ms", "p20_ms", "p80_ms", "roof_ms", "pct_of_roof", "peak_mb", "standing_mb"),
    *("launches", *ERRORS),
)


def row_of(job: Job, name: str, record: Record) -> dict[str, object]:
    """A row of a results file, without the columns of the environment."""
    cell = vars(job.cell) | {"shape": shape_name(job.cell.shape)}
    return {**cell, "models": job.models, "provider": name, **record}


def cell_of(row: Row) -> Cell:
    shape = parse_shape(row["shape"])
    return Cell(row["op"], shape, row["dtype"], row["direction"], row["data"], float(row["ignored"]))


def scale_of(cell: Cell) -> tuple[float, str]:
    """Returns (factor from milliseconds to the unit of reports, the unit)."""
    unit = "us" if cell.direction == "host" else BENCHES[cell.op].unit
    return {"us": 1e3, "ms": 1.0}[unit], unit


class CsvLog:
    """A CSV file with COLUMNS, flushed after every write so that a killed run keeps its results.

    `constants` are columns that all rows share. `count`: the rows written.
    """

    count = 0

    def __init__(self, path: Path, constants: Mapping[str, str], rows: Iterable[Row] = ()):
        self._file, self._constants = path.open("w", newline=""), constants
        self._writer = csv.DictWriter(self._file, COLUMNS, restval="", extrasaction="ignore")
        self._writer.writeheader()
        self.write(rows)

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            short = {name: float(f"{value:.6g}") for name, value in row.items() if isinstance(value, float)}
            self._writer.writerow({**self._constants, **row, **short})
            self.count += 1
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_rows(path: Path) -> list[Row]:
    """The rows of a results file. Raises ValueError for any other file."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or []
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror.lower()}") from None
    later = [name for name in ERRORS if name not in names]  # absent in older files
    if missing := [name for name in COLUMNS if name not in (*names, *later)]:
        raise ValueError(f"{path}: not a results file of quackish: it has no column {missing[0]}")
    return [row | dict.fromkeys(later, "") for row in rows]


class Results:
    """Rows of one operation by cell and provider. The last row of a cell and provider counts."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.bench = rows, BENCHES[rows[0]["op"]]
        self.op = self.bench.op
        self.cells: dict[Cell, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            self.cells[cell_of(row)][row["provider"]] = row

    def value(self, cell: Cell, provider: str, column: str) -> float | None:
        """A number of a row; None if it is not there."""
        value = self.cells.get(cell, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, cell: Cell, provider: str) -> float | None:
        """A provider's median time; None if it was not measured."""
        return self.value(cell, provider, "median_ms")

    def ratio(self, cell: Cell, over: str, under: str) -> float | None:
        """Time of `over` divided by time of `under`; inf if `over` failed, None if either was not measured."""
        if over not in self.cells.get(cell, {}) or not (b := self.ms(cell, under)):
            return None
        return (self.ms(cell, over) or math.inf) / b

    def roof(self, cell: Cell) -> str:
        """The name of the cell's roof; "" if it has none."""
        return self.bench.roofs.get(cell.direction, "")

    def models(self, cell: Cell) -> str:
        return next(iter(self.cells[cell].values()))["models"]

    def steady(self, cell: Cell) -> Cell | None:
        """The cell with steady bursts of the same work as `cell`, if it was measured."""
        steady = dataclasses.replace(cell, direction="steady")
        return steady if cell.direction == "forward+backward" and steady in self.cells else None

    def groups(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells by (direction, dtype), each group sorted by all sizes but the rows, then by rows."""
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in sorted(self.cells, key=lambda cell: (cell.shape[1:], cell.shape[0], cell.data, cell.ignored)):
            groups[cell.direction, cell.dtype].append(cell)
        order = [*self.bench.directions.values(), "steady", "host"]
        return dict(sorted(groups.items(), key=lambda item: order.index(item[0][0])))

    def providers(self, cells: Iterable[Cell]) -> list[str]:
        """Providers with a time in any of `cells`: quackish, then peers in the order of the table, then the user's."""
        rows = [row for cell in cells for row in self.cells.get(cell, {}).values()]
        names = {row["provider"] for row in rows if row["provider"] not in NOT_PROVIDERS and row["median_ms"]}
        order = {name: i for i, name in enumerate(self.bench.providers)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def is_wrong(self, cell: Cell, provider: str) -> bool:
        """True if an error is NaN or too large to be rounding."""
        errors = (self.value(cell, provider, column) for column in ERRORS)
        return any(not error <= WRONG for error in errors if error is not None)

    def points(self, cell: Cell) -> dict[str, Point]:
        """Time and memory of each provider with both."""
        both = {name: (self.ms(cell, name), self.value(cell, name, "peak_mb")) for name in self.providers([cell])}
        return {name: (ms, mb / 1e3) for name, (ms, mb) in both.items() if ms and mb}

    def best_points(self, cell: Cell) -> dict[str, Point]:
        """For figures: of each library the default, and settings that are over 2 % faster than those with less memory.

        A setting with the default's memory is left out: it does the same work. So are wrong results, and providers that
        also compute other outputs.
        """
        points = {n: p for n, p in self.points(cell).items() if n not in self.bench.more_outputs}
        points = {n: p for n, p in points.items() if not self.is_wrong(cell, n)}
        best = {n: p for n, p in points.items() if n == library(n)}
        for name, (ms, gb) in sorted(points.items(), key=lambda item: item[1][::-1]):
            default, smaller = (
                best.get(library(name)),
                [a for n, (a, b) in best.items() if library(n) == library(name) and b <= gb],
            )
            if ms < 0.98 * min(smaller, default=math.inf) and not (default and default[1] == gb):
                best[name] = ms, gb
        return {name: best[name] for name in points if name in best}

    def peers(self, cell: Cell) -> dict[str, Point]:
        return {name: point for name, point in self.points(cell).items() if not is_ours(name)}

    def not_dominated(self, cell: Cell) -> list[str]:
        """Peers, with time and memory, that are better than every point of quackish in time or in memory."""
        ours = [point for name, point in self.points(cell).items() if is_ours(name)]
        return [
            f"{name} ({significant(ms)} ms, {gb:.4f} GB{', wrong results' if self.is_wrong(cell, name) else ''})"
            for name, (ms, gb) in self.peers(cell).items()
            if not any(a <= ms and b <= gb for a, b in ours)
        ]

    def failures(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells of each (provider, failure or note)."""
        failures: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell, rows in self.cells.items():
            for name, row in rows.items():
                if reason := row["status"] if row["status"] != "ok" else row["note"]:
                    failures[name, reason].append(cell)
        return failures

    def noise(self) -> str:
        """How far two measurements of quackish in the same turns are apart."""
        ratios = (self.ratio(cell, AGAIN, OURS) for cell in self.cells)
        differences = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None and ratio < math.inf)
        if not differences:
            return "noise: not measured"
        median, most = differences[len(differences) // 2], differences[-1]
        return f"noise: two measurements of quackish in a cell differ by {median:.1%} (median), {most:.1%} (maximum)"
