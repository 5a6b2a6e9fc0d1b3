"""The columns of results files, and the files: CSV that survives a killed run.

`python -m quackish bench` writes COLUMNS. The programs in benchmarks/ have other names or units for some of them, and
fewer or more: NORM_COLUMNS and LCE_COLUMNS. Rows are read with the names of COLUMNS. Raise SCHEMA when one changes.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from quackish import __version__
from quackish.bench.cells import Cell, Job, parse_shape, shape_name
from quackish.bench.environment import ENVIRONMENT, environment, source
from quackish.bench.measured import AGAIN, NONE_IGNORED, Measured, is_ours
from quackish.bench.operations import OPERATIONS

Row = dict[str, str]
SCHEMA = 2

COLUMNS = {
    "schema": "2; another number means other columns or meanings",
    "date": "start of the run",
    "commit": "of the checkout that quackish was imported from; empty for an installed package",
    "dirty": "True: the checkout had local changes",
    "gpu": "its name, or cpu",
    "driver": "version of the NVIDIA driver",
    "python": "version",
    "torch": "version",
    "cuda": "the version torch was built for",
    "dsl": "version of nvidia-cutlass-dsl",
    "tvm_ffi": "version of apache-tvm-ffi",
    "peers": "versions of what is installed of the other libraries",
    "quackish": "version",
    "source": "hash of quackish's source files",
    "op": "rms_norm or linear_cross_entropy",
    "shape": "MxN or MxHxV: rows (tokens), hidden size, vocabulary",
    "dtype": "of inputs and weights, in torch's words",
    "direction": "forward, backward (rms_norm), forward+backward (linear_cross_entropy)",
    "models": "the models that have this shape, if they were asked for",
    "provider": "who computed it",
    "role": "ours, peer, own (the user's), roof, part (of roof or truth), again (ours a second time: the noise)",
    "status": "ok, or why there is no time",
    "note": "plain launches: not as a CUDA graph; portable path: no kernel of ours; wrong: an error beyond 0.1",
    "rounds": "turns: of ten samples each for rms_norm, of one each for linear_cross_entropy",
    "median_ms": "milliseconds; the L2 cleared before each sample, all providers of a cell in turns",
    "p20_ms": "20th percentile",
    "p80_ms": "80th percentile",
    "roof_ms": "median of the roof in the same turns",
    "pct_of_roof": "100 * roof_ms / median_ms",
    "peak_mb": "10^6 bytes at the peak of a warm call above before the library's first call, what it returns included",
    "standing_mb": "of these, what the library keeps between calls, from all its calls in the process",
    "first_s": "seconds of the first call in the process that measured, which compiles or loads from a cache",
    "compiles": "kernels of ours that the first call compiled; the others came from the cache",
    "launches": "kernels of ours in one call",
    "deterministic": "whether ten runs gave the same bytes",
    "err_y": "norm-wise error against fp64",
    "err_loss": "relative error against fp64",
    "err_dx": "norm-wise error against fp64",
    "err_dweight": "norm-wise error against fp64",
}
NORM_COLUMNS = (
    *ENVIRONMENT,
    *("cells", "op", "dtype", "m", "n", "provider", "status"),
    *("median_us", "p20_us", "p80_us", "gb_per_s", "roof_us", "pct_of_roof", "bar_us", "within_bar"),
    *("err_y", "err_dx", "err_dweight", "deterministic", "peak_mb", "standing_mb"),
)
LCE_COLUMNS = (
    *ENVIRONMENT,
    *("mode", "m", "h", "v", "data", "ignored", "provider", "status"),
    *("median_ms", "p20_ms", "p80_ms", "roof_ms", "of_roof", "peak_gb", "standing_mb", "first_s", "launches"),
    *("err_loss", "err_dx", "err_dw"),
)
OPS = {"fwd": "forward", "bwd": "backward"}  # NORM_COLUMNS' op
MODES = {"train": "forward+backward", "loss": "forward", "host": "host"}  # LCE_COLUMNS' mode
# What a column of these is called in COLUMNS, and how to convert it, which is its own inverse or a factor.
_ALIASES: dict[str, tuple[str, Callable[[float], float], Callable[[float], float]]] = {
    **{f"{t}_us": (f"{t}_ms", lambda us: us / 1e3, lambda ms: ms * 1e3) for t in ("median", "p20", "p80", "roof")},
    "of_roof": ("pct_of_roof", lambda ratio: 100 / ratio, lambda percent: 100 / percent),
    "peak_gb": ("peak_mb", lambda gb: gb * 1e3, lambda mb: mb / 1e3),
    "err_dw": ("err_dweight", float, float),
}
KEY = ("op", "shape", "dtype", "direction", "provider")  # what a row is about
# Rows that agree in these were measured in the same circumstances: --resume does not measure them again.
SAME = tuple(name for name in (*ENVIRONMENT, "schema", "quackish", "source", "rounds") if name != "date")
ERRORS = ("err_y", "err_loss", "err_dx", "err_dweight")
COMPETING = ("ours", "peer", "own")  # roles that are compared
WRONG = 0.1  # a larger error is not rounding: bf16's is 0.02 at its worst here


def origin(device, commit: str | None = None) -> Row:
    """The columns that all rows of a run share."""
    own = {"schema": str(SCHEMA), "quackish": __version__, "source": source()}
    return {**environment(device, commit), **own}


def row_of(job: Job, name: str, found: Measured, columns: Sequence[str], rounds: int = 0) -> dict[str, object]:
    """The values of `columns`, except those that `origin` has, for one provider in one cell."""
    cell, wrong = job.cell, [f"{k} {v:.3g}" for k, v in found.errors.items() if not v <= WRONG]  # NaN too
    row: dict[str, object] = {
        **dict(op=cell.op, shape=shape_name(cell.shape), dtype=cell.dtype, direction=cell.direction),
        **dict(data=cell.data, ignored=cell.ignored, models="", provider=name, role=role_of(cell, name), rounds=rounds),
        **dict(zip("mhv" if len(cell.shape) == 3 else "mn", cell.shape, strict=True)),
        "status": found.status,
        "note": ", ".join(filter(None, (found.note, f"wrong: {' '.join(wrong)}" if wrong else ""))),
        **dict(first_s=found.first_s, deterministic=found.deterministic),
        **dict(compiles=found.compiles or None, launches=found.launches or None),
        "peak_mb": None if found.peak_bytes is None else found.peak_bytes / 1e6,
        "standing_mb": None if found.standing_bytes is None else found.standing_bytes / 1e6,
        **{"err_dweight" if name == "err_dw" else name: value for name, value in found.errors.items()},
        **job.columns,
    }
    if times := found.times:
        row |= {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
        if found.roof:
            row |= {"roof_ms": found.roof.median / 1e3, "pct_of_roof": 100 * found.roof.median / times.median}
            if cell.op == "rms_norm":
                bar = bar_us(cell.direction, found.roof.median)
                row |= dict(bar_us=bar, within_bar=times.median <= bar)
        if cell.op == "rms_norm":
            row["gb_per_s"] = norm_bytes(cell) / times.median / 1e3
    if "cells" in columns:
        row["op"] = {direction: short for short, direction in OPS.items()}[cell.direction]
    if "mode" in columns:
        row["mode"] = {direction: mode for mode, direction in MODES.items()}[cell.direction]
    if "note" not in columns and found.status == "ok":
        row["status"] = found.note or "ok"
    for alias, (known, _, to_alias) in _ALIASES.items():
        if alias in columns and row.get(known) is not None:
            row[alias] = to_alias(row[known])
    return {name: "" if row[name] is None else row[name] for name in columns if name in row}


def bar_us(direction: str, roof_us: float) -> float:
    """RMSNorm's bar: 1.05 times the roof, plus microseconds for what the roof does not have to do."""
    return 1.05 * roof_us + {"forward": 1.0, "backward": 4.0}[direction]


def norm_bytes(cell: Cell) -> int:
    """RMSNorm's least traffic: each input read once, each output written once."""
    (m, n), itemsize = cell.shape, {"float32": 4}.get(cell.dtype, 2)
    matrices, vectors = {"forward": (2, 1), "backward": (3, 2)}[cell.direction]  # x, y, weight; x, dy, dx and dweight
    return (matrices * m + vectors) * n * itemsize + 4 * m


def role_of(cell: Cell, name: str) -> str:
    op = OPERATIONS[cell.op]
    if name == AGAIN:
        return "again"
    if name in (op.roofs.get(cell.direction), NONE_IGNORED):
        return "roof"
    if is_ours(name):
        return "ours"
    if name in op.parts:
        return "part"
    return "peer" if name in op.providers else "own"


def cell_of(row: Row) -> Cell:
    data, ignored = row.get("data") or "normal", float(row.get("ignored") or 0)
    return Cell(row["op"], parse_shape(row["shape"]), row["dtype"], row["direction"], data, ignored)


class CsvLog:
    """A CSV file with a fixed header, flushed with every write: a run that is killed keeps what it measured.

    With `append` the rows in the file are kept; ValueError if it has another header.
    """

    def __init__(self, path: Path, columns: Sequence[str], constants: Mapping[str, str], append: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.columns, self._constants = path, columns, constants
        append = append and path.exists()
        if append:
            with path.open(newline="") as file:
                header = next(csv.reader(file), [])
            if header != list(columns):
                raise ValueError(f"{path}: its columns are {', '.join(header)}; expected {', '.join(columns)}")
        self._file = path.open("a" if append else "w", newline="")
        self._writer = csv.DictWriter(self._file, columns, extrasaction="ignore")
        if not append:
            self._writer.writeheader()

    def write(self, rows: Iterable[Mapping[str, object]]) -> None:
        for row in rows:
            self._writer.writerow({key: _plain(value) for key, value in {**self._constants, **row}.items()})
        self._file.flush()


def _plain(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def read_csv(path: Path) -> list[Row]:
    """The rows as they are."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_rows(path: Path) -> list[Row]:
    """The rows of any of the files above, with the columns of COLUMNS too."""
    return list(map(canonical, read_csv(path)))


def canonical(row: Row) -> Row:
    row = dict(row)
    if "mode" in row:
        row |= dict(op="linear_cross_entropy", direction=MODES[row["mode"]], dtype="bfloat16")
        row["shape"] = shape_name([row[dim] for dim in "mhv"])
    elif "cells" in row:
        row |= dict(op="rms_norm", direction=OPS[row["op"]], shape=f"{row['m']}x{row['n']}")
    for alias, (known, from_alias, _) in _ALIASES.items():
        if alias in row:
            row[known] = str(from_alias(float(row[alias]))) if row[alias] else ""
    row["role"] = row.get("role") or role_of(cell_of(row), row["provider"])
    return row
