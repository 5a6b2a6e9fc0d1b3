"""Results files: a CSV of a row for each provider in each cell, and its rows by cell and provider.

`python -m quackish bench` writes COLUMNS, the programs in benchmarks/ PROGRAM_COLUMNS. Files that these programs wrote
before they shared columns with `bench` are read too.
"""

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from quackish.bench.cells import A_LAUNCH, AGAIN, NONE_IGNORED, OURS, Cell, Job, is_ours, parse_shape, shape_name
from quackish.bench.environment import ENVIRONMENT, SCHEMA
from quackish.bench.measured import Measured
from quackish.bench.operations import OPERATIONS

Row = dict[str, str]
Point = tuple[float, float]  # milliseconds, GB

ERRORS = ("err_y", "err_loss", "err_dx", "err_dweight")
COLUMNS = (  # benchmarks/README.md says what they mean
    *("schema", *ENVIRONMENT, "quackish", "source"),
    *("op", "shape", "dtype", "direction", "models", "provider", "role", "status", "note", "rounds"),
    *("median_ms", "p20_ms", "p80_ms", "roof_ms", "pct_of_roof", "peak_mb", "standing_mb"),
    *("first_s", "compiles", "launches", "deterministic", *ERRORS),
)
PROGRAM_COLUMNS = (*COLUMNS, "data", "ignored")
# Rows that agree in these were measured in the same circumstances: --resume does not measure them again.
SAME = tuple(name for name in (*ENVIRONMENT, "schema", "quackish", "source", "rounds") if name != "date")
COMPETING = ("ours", "peer", "own")  # roles that are compared
WRONG = 0.1  # a larger error is not rounding: bf16's is 0.02 at its worst here


# Rows -----------------------------------------------------------------------------------------------------------------


def row_of(job: Job, name: str, found: Measured, rounds: int = 0) -> dict[str, object]:
    """The columns that the origin of the run does not have, for one provider in one cell."""
    cell, wrong = job.cell, [f"{k} {v:.3g}" for k, v in found.errors.items() if not v <= WRONG]  # NaN too
    row: dict[str, object] = {
        **dict(op=cell.op, shape=shape_name(cell.shape), dtype=cell.dtype, direction=cell.direction),
        **dict(data=cell.data, ignored=cell.ignored, provider=name, role=role_of(cell, name), rounds=rounds),
        "status": found.status,
        "note": ", ".join(filter(None, (found.note, f"wrong: {' '.join(wrong)}" if wrong else ""))),
        **dict(first_s=found.first_s, deterministic=found.deterministic),
        **dict(compiles=found.compiles or None, launches=found.launches or None),
        "peak_mb": None if found.peak_bytes is None else found.peak_bytes / 1e6,
        "standing_mb": None if found.standing_bytes is None else found.standing_bytes / 1e6,
        **found.errors,
        **job.columns,
    }
    if times := found.times:
        row |= {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
        if found.roof:
            row |= {"roof_ms": found.roof.median / 1e3, "pct_of_roof": 100 * found.roof.median / times.median}
    return {name: "" if value is None else value for name, value in row.items()}


def role_of(cell: Cell, name: str) -> str:
    op = OPERATIONS[cell.op]
    if name == AGAIN:
        return "again"
    if name in (op.roofs.get(cell.direction), NONE_IGNORED):
        return "roof"
    if name in (*op.parts, A_LAUNCH):
        return "part"
    if is_ours(name):
        return "ours"
    return "peer" if name in op.providers else "own"


def cell_of(row: Row) -> Cell:
    data, ignored = row.get("data") or "normal", float(row.get("ignored") or 0)
    return Cell(row["op"], parse_shape(row["shape"]), row["dtype"], row["direction"], data, ignored)


# Files ----------------------------------------------------------------------------------------------------------------


class CsvLog:
    """A CSV file with a fixed header, flushed with every write: a run that is killed keeps what it measured.

    With `append` the rows in the file are kept; ValueError if it is no results file.
    """

    def __init__(self, path: Path, columns: Sequence[str], constants: Mapping[str, str], append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = read_rows(path) if append and path.exists() else []
        self.path, self._constants = path, {}
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, columns, restval="", extrasaction="ignore")
        self._writer.writeheader()
        self.write(kept)
        self._constants = constants

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            self._writer.writerow({key: _plain(value) for key, value in {**self._constants, **row}.items()})
        self._file.flush()


def _plain(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_rows(path: Path) -> list[Row]:
    """The rows of any results file, with COLUMNS; ValueError that says what is wrong with the file."""
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or []
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror.lower()}") from None
    if not {"dtype", "mode"}.intersection(names) or "provider" not in names:
        raise ValueError(f"{path}: not a results file of quackish: its columns are {', '.join(names) or 'none'}")
    rows = list(map(_converted, rows))
    if others := {row["schema"] for row in rows} - {str(SCHEMA)}:
        raise ValueError(f"{path}: its schema is {', '.join(sorted(others))}, this is {SCHEMA}")
    return rows


_OLD_OPS = {"fwd": "forward", "bwd": "backward"}
_OLD_MODES = {"train": "forward+backward", "loss": "forward", "host": "host"}
_OLD_NUMBERS: dict[str, tuple[str, Callable[[float], float]]] = {
    **{f"{name}_us": (f"{name}_ms", lambda us: us / 1e3) for name in ("median", "p20", "p80", "roof")},
    "of_roof": ("pct_of_roof", lambda ratio: 100 / ratio),
    "peak_gb": ("peak_mb", lambda gb: gb * 1e3),
    "err_dw": ("err_dweight", float),
}


def _converted(row: Row) -> Row:
    """A row with COLUMNS and what else it has; those before schema 2 had other names and units."""
    found = dict.fromkeys(COLUMNS, "") | row
    if "mode" in row:
        found |= dict(op="linear_cross_entropy", direction=_OLD_MODES[row["mode"]], dtype="bfloat16")
        found |= dict(schema=str(SCHEMA), shape=shape_name([row[dim] for dim in "mhv"]))
    elif row.get("op") in _OLD_OPS:
        found |= dict(op="rms_norm", direction=_OLD_OPS[row["op"]], schema=str(SCHEMA), shape=f"{row['m']}x{row['n']}")
    for old, (name, convert) in _OLD_NUMBERS.items():
        if row.get(old):
            found[name] = f"{convert(float(row[old])):.12g}"
    found["role"] = found["role"] or role_of(cell_of(found), row["provider"])
    return found


# By cell and provider -------------------------------------------------------------------------------------------------


class Results:
    """Rows of one operation; the last row for a cell and provider counts."""

    def __init__(self, rows: Sequence[Row]):
        self.rows, self.op = rows, OPERATIONS[rows[0]["op"]]
        self.cells: dict[Cell, dict[str, Row]] = defaultdict(dict)
        for row in rows:
            self.cells[cell_of(row)][row["provider"]] = row

    def scale(self, cell: Cell) -> tuple[float, str]:
        """From the columns' milliseconds to the unit that people read."""
        unit = "us" if cell.direction == "host" else self.op.unit
        return {"us": 1e3, "ms": 1.0}[unit], unit

    def first(self, cell: Cell) -> Row:
        """A row of the cell, for columns that all of its rows share."""
        return next(iter(self.cells[cell].values()))

    def value(self, cell: Cell, provider: str, column: str) -> float | None:
        value = self.cells.get(cell, {}).get(provider, {}).get(column)
        return float(value) if value else None

    def ms(self, cell: Cell, provider: str) -> float | None:
        return self.value(cell, provider, "median_ms")

    def ratio(self, cell: Cell, over: str, under: str) -> float | None:
        """Time of `over` divided by that of `under`; inf if `over` failed, None if either was not measured."""
        if over not in self.cells.get(cell, {}) or not (b := self.ms(cell, under)):
            return None
        return (self.ms(cell, over) or math.inf) / b

    def roof(self, cell: Cell) -> str:
        return self.op.roofs.get(cell.direction, "")

    def groups(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells by (direction, dtype), each group sorted by the sizes that are not rows, then by rows."""
        groups: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell in sorted(self.cells, key=lambda cell: (cell.shape[1:], cell.shape[0], cell.data, cell.ignored)):
            groups[cell.direction, cell.dtype].append(cell)
        order = [*self.op.directions.values(), "host"]
        return dict(sorted(groups.items(), key=lambda item: order.index(item[0][0])))

    def providers(self, cells: Iterable[Cell]) -> list[str]:
        """Those with a time in any of `cells`: ours, the known ones in their own order, the user's."""
        rows = [row for cell in cells for row in self.cells.get(cell, {}).values()]
        names = {row["provider"] for row in rows if row["role"] in COMPETING and row["median_ms"]}
        order = {name: i for i, name in enumerate(self.op.providers)}
        return sorted(names, key=lambda name: (not is_ours(name), order.get(name, len(order)), name))

    def is_wrong(self, cell: Cell, provider: str) -> bool:
        """Some error is NaN or too large to be rounding."""
        errors = (self.value(cell, provider, column) for column in ERRORS)
        return any(not error <= WRONG for error in errors if error is not None)

    def best(self, cell: Cell, ours: bool) -> str | None:
        """The fastest of ours, or of all others, whose results are right; None if there is none."""
        names = [n for n in self.providers([cell]) if is_ours(n) == ours and not self.is_wrong(cell, n)]
        return min(names, key=lambda name: self.ms(cell, name), default=None)

    def points(self, cell: Cell) -> dict[str, Point]:
        """Time and memory of each provider that has both."""
        both = {name: (self.ms(cell, name), self.value(cell, name, "peak_mb")) for name in self.providers([cell])}
        return {name: (ms, mb / 1e3) for name, (ms, mb) in both.items() if ms and mb}

    def peers(self, cell: Cell) -> dict[str, Point]:
        return {name: point for name, point in self.points(cell).items() if not is_ours(name)}

    def not_dominated(self, cell: Cell) -> list[str]:
        """Peers' points for which no point of ours is at most as slow and as large, as name, time and memory."""
        ours = [point for name, point in self.points(cell).items() if is_ours(name)]
        return [
            f"{name} ({ms:.4g} ms, {gb:.4f} GB{', wrong results' if self.is_wrong(cell, name) else ''})"
            for name, (ms, gb) in self.peers(cell).items()
            if not any(a <= ms and b <= gb for a, b in ours)
        ]

    def failures(self) -> dict[tuple[str, str], list[Cell]]:
        """The cells of each (provider, reason)."""
        found: dict[tuple[str, str], list[Cell]] = defaultdict(list)
        for cell, rows in self.cells.items():
            for name, row in rows.items():
                if reason := row["status"] if row["status"] != "ok" else row["note"]:
                    found[name, reason].append(cell)
        return found

    def noise(self) -> str:
        """How far apart two measurements of the same work in the same turns were."""
        ratios = (self.ratio(cell, AGAIN, OURS) for cell in self.cells)
        apart = sorted(abs(ratio - 1) for ratio in ratios if ratio is not None and ratio < math.inf)
        if not apart:
            return "noise: not measured"
        median, most = apart[len(apart) // 2], apart[-1]
        return f"noise: quackish twice in one cell differs by {median:.1%} (median), {most:.1%} (most)"
