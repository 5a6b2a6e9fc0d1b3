"""RMSNorm, forward and backward, beside every installed peer: time, memory and error in every cell of a grid.

    python -m benchmarks.rms_norm             # every cell that a bar is about, and some large N
    python -m benchmarks.rms_norm --quick     # five cells
    python -m benchmarks.rms_norm --m 4096 --n 1024 2048 --ops bwd --configs num_stages=4 threads=256,num_stages=6

Rows go to rms_norm.csv after each cell; report_rms_norm.py makes the verdicts, the page and the figure of them.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness, report_rms_norm
from benchmarks.harness import BACKEND, console
from quackish.bench.console import progress
from quackish.bench.environment import ENVIRONMENT, environment
from quackish.bench.files import CsvLog
from quackish.bench.measure_rms_norm import ROOFS, Data, measure
from quackish.bench.measured import AGAIN, OURS, Measured, Run
from quackish.bench.providers_rms_norm import PROVIDERS, Provider, load, with_config
from quackish.testing.timing import Times

FIELDS = (
    *ENVIRONMENT,
    *("cells", "op", "dtype", "m", "n", "provider", "status"),
    *("median_us", "p20_us", "p80_us", "gb_per_s", "roof_us", "pct_of_roof", "bar_us", "within_bar"),
    *("err_y", "err_dx", "err_dweight", "deterministic", "peak_mb", "standing_mb"),
)


@dataclasses.dataclass(frozen=True)
class Cell:
    cells: str  # the set it belongs to, a key of report_rms_norm.SETS
    m: int
    n: int
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.m} x {self.n} {self.dtype_name}"

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


ROWS = (4096, 8192, 16384, 32768, 65536)
GRID = [Cell("grid", m, n) for n in (256, 512, 1024, 2048, 3072, 4096, 8192) for m in ROWS]
DTYPES = [Cell("dtypes", m, 4096, dtype) for dtype in (torch.float16, torch.float32) for m in ROWS]
LARGE_N = [Cell("large_n", m, n) for n in (16384, 65536) for m in (1024, 4096, 16384)]
QUICK = [Cell("quick", m, n) for m, n in ((4096, 256), (16384, 1024), (4096, 4096), (65536, 4096), (16384, 8192))]


def bar_us(op: str, roof_us: float) -> float:
    """What quackish asks of itself: the roof and 5 %, and some microseconds for what a roof does not have to do."""
    return 1.05 * roof_us + {"fwd": 1.0, "bwd": 4.0}[op]


def bytes_moved(op: str, cell: Cell) -> int:
    """The fewest bytes: each input read once, each output written once."""
    matrices = {"fwd": 2, "bwd": 3}[op]  # x, y or x, dy, dx
    vectors = {"fwd": 1, "bwd": 2}[op]  # weight, dweight
    return (matrices * cell.m + vectors) * cell.n * cell.dtype.itemsize + 4 * cell.m


def rows_of(cell: Cell, ops: Sequence[str], providers: Mapping[str, Provider], device: torch.device, rounds: int):
    """The rows of one cell: for each op one of each provider, of ours a second time, and of the roof."""
    data = Data.make(cell.m, cell.n, cell.dtype, device)
    for op in ops:
        direction = {"fwd": "forward", "bwd": "backward"}[op]
        names = [name for name, provider in providers.items() if op == "bwd" or provider.forward]
        found: dict[str, Measured] = {}
        run = Run(device, providers.__getitem__, found.__setitem__, rounds=rounds, repeats=3)
        measure(direction, data, names, run)
        for name in (*names, AGAIN, ROOFS[direction]):
            if name in found:
                where = {"cells": cell.cells, "op": op, "dtype": cell.dtype_name, "m": cell.m, "n": cell.n}
                yield {**where, "provider": name, **_columns(op, cell, found[name])}


def _columns(op: str, cell: Cell, found: Measured) -> dict[str, object]:
    columns = {"status": found.note or found.status, **found.errors}
    columns |= {} if found.deterministic is None else {"deterministic": found.deterministic}
    columns |= {} if found.peak_bytes is None else {"peak_mb": found.peak_bytes / 1e6}
    columns |= {} if found.standing_bytes is None else {"standing_mb": found.standing_bytes / 1e6}
    return columns | (_speed(op, cell, found.times, found.roof.median) if found.times else {})


def _speed(op: str, cell: Cell, times: Times, roof_us: float) -> dict[str, object]:
    return {
        "median_us": times.median,
        "p20_us": times.p20,
        "p80_us": times.p80,
        "gb_per_s": bytes_moved(op, cell) / times.median / 1e3,
        "roof_us": roof_us,
        "pct_of_roof": 100 * roof_us / times.median,
        "bar_us": bar_us(op, roof_us),
        "within_bar": times.median <= bar_us(op, roof_us),
    }


def _line(cell: Cell, rows: Sequence[Mapping]) -> str:
    """One cell in a line, for the log."""
    parts = [f"{cell!s:>22}"]
    for op, group in itertools.groupby(rows, key=lambda row: row["op"]):
        by_name = {row["provider"]: row for row in group}
        ours = by_name.get(OURS, {})
        kept = f" {'within' if ours['within_bar'] else 'OVER'} bar {ours['bar_us']:.1f}" if "bar_us" in ours else ""
        by_name.pop(AGAIN, None)
        times = (f"{name} {row.get('median_us', math.nan):.1f}" for name, row in by_name.items())
        parts.append(f"{op}{kept}: {', '.join(times)}")
    return " | ".join(parts)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rms_norm", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="five cells instead of all")
    parser.add_argument("--m", type=int, nargs="+", help="own cells: numbers of rows")
    parser.add_argument("--n", type=int, nargs="+", help="own cells: row lengths")
    dtypes = ("bfloat16", "float16", "float32")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16", help="own cells: %(default)s")
    parser.add_argument("--ops", nargs="+", choices=("fwd", "bwd"), default=("fwd", "bwd"))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    configs = "also time quackish's backward with these fields of RmsNormBwdConfig replaced"
    parser.add_argument("--configs", nargs="+", default=[], metavar="FIELD=VALUE[,...]", help=configs)
    parser.add_argument("--rounds", type=int, default=10, help="turns of ten calls each; default %(default)s")
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results/<GPU>")
    parser.add_argument("--commit", help="recorded where there is no git to ask")
    return parser


def cells_of(args: argparse.Namespace, device: torch.device) -> list[Cell]:
    if args.m or args.n:
        product = itertools.product(args.n or [4096], args.m or ROWS)
        return [Cell("own", m, n, getattr(torch, args.dtype)) for n, m in product]
    if device.type == "cpu":
        return [Cell("own", 64, n) for n in (256, 1000)]
    return QUICK if args.quick else GRID + DTYPES + LARGE_N


def providers_of(args: argparse.Namespace) -> dict[str, Provider]:
    """Those that can be imported; the others are named."""
    providers = {}
    for name in args.providers:
        try:
            providers[name] = load(name, BACKEND)
        except Exception as error:  # a peer that is broken here must not stop the others
            console.print(f"without {name}: {type(error).__name__}: {error}", markup=False)
    configs = (with_config(changes, BACKEND) for changes in args.configs)
    return providers | {provider.name: provider for provider in configs}


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    args = arguments().parse_args(argv)
    device = harness.device_to_measure()
    providers = providers_of(args)
    cells = cells_of(args, device)
    path = (args.out or harness.results_dir(device)) / "rms_norm.csv"
    log = CsvLog(path, FIELDS, environment(device, args.commit))
    try:
        with progress() as bar:
            task = bar.add_task("RMSNorm", total=len(cells))
            for cell in cells:
                bar.update(task, description=f"RMSNorm {cell}")
                rows = list(rows_of(cell, args.ops, providers, device, args.rounds))
                log.write(rows)
                console.print(_line(cell, rows), markup=False, soft_wrap=True)
                bar.advance(task)
    finally:  # what was measured is reported, whatever ended the run
        report_rms_norm.report(path)
    console.print(f"{path} and, beside it, .md, .svg, .png", markup=False, soft_wrap=True)
    return path


if __name__ == "__main__":
    main()
