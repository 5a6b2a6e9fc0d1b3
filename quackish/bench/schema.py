"""The columns of a results file of `python -m quackish bench`. Whoever changes one's meaning raises SCHEMA."""

from quackish import __version__
from quackish.bench.cells import Cell, parse_shape, shape_name
from quackish.bench.environment import ENVIRONMENT, environment, source
from quackish.bench.measured import AGAIN, Measured, is_ours
from quackish.bench.operations import Operation

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
KEY = ("op", "shape", "dtype", "direction", "provider")  # what a row is about
# Rows that agree in these were measured in the same circumstances: --resume measures them no second time.
SAME = tuple(name for name in (*ENVIRONMENT, "schema", "quackish", "source", "rounds") if name != "date")
ERRORS = ("err_y", "err_loss", "err_dx", "err_dweight")
COMPETING = ("ours", "peer", "own")  # roles that are compared
WRONG = 0.1  # an error beyond this is no rounding: bf16's is 0.02 at its worst here


def origin(device, commit: str | None = None) -> dict[str, str]:
    """The columns that all rows of a run share."""
    own = {"schema": str(SCHEMA), "quackish": __version__, "source": source()}
    return {**environment(device, commit), **own}


def row_of(op: Operation, cell: Cell, name: str, found: Measured, *, models: str, rounds: int) -> dict[str, object]:
    """The other columns, of one provider in one cell."""
    row: dict[str, object] = {
        "op": cell.op,
        "shape": shape_name(cell.shape),
        "dtype": cell.dtype,
        "direction": cell.direction,
        "models": models,
        "provider": name,
        "role": role_of(op, cell, name),
        "status": found.status,
        "note": ", ".join(filter(None, (found.note, _wrong(found)))),
        "rounds": rounds,
        "first_s": found.first_s,
        "compiles": found.compiles or None,
        "launches": found.launches or None,
        "deterministic": found.deterministic,
        "peak_mb": None if found.peak_bytes is None else found.peak_bytes / 1e6,
        "standing_mb": None if found.standing_bytes is None else found.standing_bytes / 1e6,
        **{"err_dweight" if name == "err_dw" else name: value for name, value in found.errors.items()},
    }
    if found.times:
        times = found.times
        row |= {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
        if found.roof:
            row |= {"roof_ms": found.roof.median / 1e3, "pct_of_roof": 100 * found.roof.median / times.median}
    return {key: "" if value is None else value for key, value in row.items()}


def _wrong(found: Measured) -> str:
    wrong = [f"{name} {value:.3g}" for name, value in found.errors.items() if not value <= WRONG]  # NaN too
    return f"wrong: {' '.join(wrong)}" if wrong else ""


def role_of(op: Operation, cell: Cell, name: str) -> str:
    if name == AGAIN:
        return "again"
    if name == op.roofs[cell.direction]:
        return "roof"
    if is_ours(name):
        return "ours"
    if name in op.parts:
        return "part"
    return "peer" if name in op.providers else "own"


def cell_of(row: dict[str, str]) -> Cell:
    return Cell(row["op"], parse_shape(row["shape"]), row["dtype"], row["direction"])
