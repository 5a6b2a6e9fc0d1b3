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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness, report_rms_norm
from benchmarks.harness import console
from benchmarks.providers_rms_norm import EPS, PROVIDERS, Provider, load, with_config
from benchmarks.truth_rms_norm import backward_errors, forward_errors, is_deterministic, rstd_of
from quackish.testing import inputs
from quackish.testing.timing import Times, Work, interleave, peak_bytes, prepare

FIELDS = (
    *harness.ENVIRONMENT,
    *("cells", "op", "dtype", "m", "n", "provider", "status"),
    *("median_us", "p20_us", "p80_us", "gb_per_s", "roof_us", "pct_of_roof", "bar_us", "within_bar"),
    *("err_y", "err_dx", "err_dweight", "deterministic", "peak_mb"),
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


def measure(cell: Cell, ops: Sequence[str], providers: Sequence[Provider], device: torch.device, rounds: int):
    """The rows of one cell: for each op one of its roof and one of each provider."""
    shapes = ((cell.m, cell.n), (cell.m, cell.n), (cell.n,))
    x, dy, weight = (inputs.rows(s, cell.dtype, seed=i, device=device) for i, s in enumerate(shapes))
    rstd = rstd_of(x, EPS)
    out = torch.empty_like(x)
    if "fwd" in ops:
        calls = {p.name: lambda p=p: p.forward(x, weight) for p in providers if p.forward}
        errors_of = lambda outputs: forward_errors(x, weight, EPS, outputs)  # noqa: E731
        yield from _measure_op("fwd", cell, calls, lambda: out.copy_(x), errors_of, device, rounds)
    if "bwd" in ops:
        calls = {p.name: lambda p=p: p.backward(dy, x, weight, rstd) for p in providers}
        errors_of = lambda outputs: backward_errors(dy, x, weight, EPS, outputs)  # noqa: E731
        yield from _measure_op("bwd", cell, calls, lambda: torch.add(x, dy, out=out), errors_of, device, rounds)


def _measure_op(
    op: str,
    cell: Cell,
    calls: Mapping[str, Callable[[], tuple]],
    roof: Callable[[], object],
    errors_of: Callable[[Mapping[str, tuple]], Mapping[str, dict]],
    device: torch.device,
    rounds: int,
):
    rows: dict[str, dict] = {}
    works: dict[str, Work] = {}
    for name, call in calls.items():
        try:
            works[name] = prepare(call, device)
            peak = peak_bytes(call, device)
            rows[name] = {
                "status": "ok" if works[name].is_graph or device.type == "cpu" else "plain launches",
                "deterministic": is_deterministic(works[name]),
                "peak_mb": "" if peak is None else peak / 1e6,
            }
        except Exception as error:
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # raises where the CUDA context is lost: the run ends here
            works.pop(name, None)
            rows[name] = {"status": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    for name, errors in errors_of({name: work.outputs for name, work in works.items()}).items():
        rows[name] |= errors

    runs = {name: work.run for name, work in works.items()}
    if report_rms_norm.OURS in works:  # twice: how far apart are two measurements of the same thing?
        runs[report_rms_norm.AGAIN] = works[report_rms_norm.OURS].run
        rows[report_rms_norm.AGAIN] = {"status": rows[report_rms_norm.OURS]["status"]}
    roof_name = report_rms_norm.ROOFS[op]
    runs[roof_name], rows[roof_name] = prepare(roof, device).run, {"status": "ok"}
    times = interleave(runs, device, rounds)
    for name, row in rows.items():
        where = {"cells": cell.cells, "op": op, "dtype": cell.dtype_name, "m": cell.m, "n": cell.n, "provider": name}
        speed = _speed(op, cell, times[name], times[roof_name].median) if name in times else {}
        yield {**where, **row, **speed}


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
        ours = by_name.get(report_rms_norm.OURS, {})
        kept = f" {'within' if ours['within_bar'] else 'OVER'} bar {ours['bar_us']:.1f}" if "bar_us" in ours else ""
        by_name.pop(report_rms_norm.AGAIN, None)
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


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    args = arguments().parse_args(argv)
    device = harness.device_to_measure()
    providers, missing = load(args.providers)
    for name, reason in missing.items():
        console.print(f"without {name}: {reason}", markup=False)
    providers += [with_config(changes) for changes in args.configs]
    cells = cells_of(args, device)
    path = (args.out or harness.results_dir(device)) / "rms_norm.csv"
    log = harness.CsvLog(path, FIELDS, harness.environment(device, args.commit))
    try:
        with harness.progress() as bar:
            task = bar.add_task("RMSNorm", total=len(cells))
            for cell in cells:
                bar.update(task, description=f"RMSNorm {cell}")
                rows = list(measure(cell, args.ops, providers, device, args.rounds))
                log.write(rows)
                console.print(_line(cell, rows), markup=False, soft_wrap=True)
                bar.advance(task)
    finally:  # what was measured is reported, whatever ended the run
        report_rms_norm.report(path)
    console.print(f"{path} and, beside it, .md, .svg, .png", markup=False, soft_wrap=True)
    return path


if __name__ == "__main__":
    main()
