"""RMSNorm, forward and backward, beside every installed peer: time, memory and error in every cell of a grid.

python -m benchmarks.rms_norm             # every cell that a bar is about, and some large N
python -m benchmarks.rms_norm --quick     # five cells
python -m benchmarks.rms_norm --m 4096 --n 1024 2048 --ops bwd --configs num_stages=4 threads=256,num_stages=6
"""

import argparse
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness
from quackish.bench import plots, report, schema
from quackish.bench.bars import Verdict, every, verdict
from quackish.bench.cells import Cell, Job
from quackish.bench.measured import OURS
from quackish.bench.providers_rms_norm import PROVIDERS, with_config
from quackish.bench.results import Results

ROWS = (4096, 8192, 16384, 32768, 65536)
BF16 = "bfloat16"
GRID = [(m, n, BF16) for n in (256, 512, 1024, 2048, 3072, 4096, 8192) for m in ROWS]
CELLS = {
    "grid": GRID,
    "dtypes": [(m, 4096, dtype) for dtype in ("float16", "float32") for m in ROWS],
    "large_n": [(m, n, BF16) for n in (16384, 65536) for m in (1024, 4096, 16384)],
}
QUICK = [(m, n, BF16) for m, n in ((4096, 256), (16384, 1024), (4096, 4096), (65536, 4096), (16384, 8192))]
SETS = {"grid": "bf16 grid", "dtypes": "fp16 and fp32 at N 4096", "large_n": "large N", "quick": "quick"}
SETS |= {"own": "own cells"}
TITLES = {"backward": "Backward: dx and dweight, whole", "forward": "Forward: y and rstd"}
RIVAL, SPEEDUP = "quack", 1.25  # QuACK's backward over ours, in the geometric mean
BARS = (  # at most so many times the bar or QuACK's time
    ("backward <= 1.05 t_add + 4 us; time / bar", 1.0, "bar"),
    ("forward <= 1.05 t_mul + 1 us; time / bar", 1.0, "bar"),
    ("backward no slower than QuACK; time / QuACK's", 1.0, "QuACK's"),
    ("forward at most 2 % over QuACK; time / QuACK's", 1.02, "QuACK's"),
)


def verdicts(results: Results) -> list[Verdict]:
    """For every bar that something was measured for: how many cells keep it, and the worst cell."""
    if not any(row["provider"] == OURS for row in results.rows):
        return []

    def bar(cell: Cell) -> float | None:
        roof = results.ms(cell, results.roof(cell))
        return results.value(cell, OURS, "bar_us") or (roof and schema.bar_us(cell.direction, 1e3 * roof))

    def rival(cell: Cell) -> float | None:
        return results.value(cell, RIVAL, "median_us")

    lines = []
    for name, title in SETS.items():
        cells = {direction: report.cells_of(results, name, direction) for direction in TITLES}
        for text, limit, time_of in () if name == "large_n" else BARS:
            time_of = {"bar": bar, "QuACK's": rival}[time_of]
            lines += every(results, cells[text.split()[0]], limit, f"{title}: {text}", time_of)
        both = [c for c in cells["backward"] if results.ms(c, RIVAL) and results.ms(c, OURS)]
        if both and name not in ("dtypes", "large_n"):
            mean = math.exp(sum(math.log(results.ratio(cell, RIVAL, OURS)) for cell in both) / len(both))
            text = f"{title}: backward over QuACK's in the geometric mean: {mean:.3f}x, bar {SPEEDUP}x"
            lines.append(verdict(mean >= SPEEDUP, text))
    return lines


PAGE = report.Page(
    preface="Medians in us (p20-p80 for quackish) of CUDA graph replays, the L2 cleared before each, all providers "
    "taking turns. `err` is the norm-wise error of the worst output against fp64, for quackish and the best peer; "
    "`same` says whether the bytes repeated.",
    sections=lambda results: report.of_norms(results, SETS, TITLES, RIVAL),
    figures=plots.for_norms,
    verdicts=verdicts,
)


def jobs_of(args: argparse.Namespace, device: torch.device) -> list[Job]:
    """The cells to measure, forward and backward; forced configs are the backward's alone."""
    cells = {"quick": QUICK} if args.quick else CELLS
    if args.m or args.n:
        cells = {"own": [(m, n, args.dtype) for n, m in itertools.product(args.n or [4096], args.m or ROWS)]}
    elif device.type == "cpu":
        cells = {"own": [(64, n, BF16) for n in (256, 1000)]}
    configs = tuple(with_config(changes).name for changes in args.configs)
    return [
        Job(
            Cell("rms_norm", (m, n), dtype, schema.OPS[op]),
            (*args.providers, *(configs if op == "bwd" else ())),
            {"cells": name},
        )
        for name, sizes in cells.items()
        for m, n, dtype in sizes
        for op in args.ops
    ]


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = harness.arguments("rms_norm", __doc__)
    parser.add_argument("--quick", action="store_true", help="five cells instead of all")
    parser.add_argument("--m", type=int, nargs="+", help="own cells: numbers of rows")
    parser.add_argument("--n", type=int, nargs="+", help="own cells: row lengths")
    parser.add_argument("--dtype", choices=(BF16, "float16", "float32"), default=BF16, help="own cells: %(default)s")
    parser.add_argument("--ops", nargs="+", choices=schema.OPS, default=tuple(schema.OPS))
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS))
    configs = "also time quackish's backward with these fields of RmsNormBwdConfig replaced"
    parser.add_argument("--configs", nargs="+", default=[], metavar="FIELD=VALUE[,...]", help=configs)
    parser.add_argument("--rounds", type=int, default=10, help="turns of ten calls each; default %(default)s")
    args = parser.parse_args(argv)
    jobs = jobs_of(args, harness.device_to_measure())
    options = dict(rounds=args.rounds, repeats=3, backend=harness.BACKEND)
    return harness.run("rms_norm", lambda own: jobs, PAGE, schema.NORM_COLUMNS, args, **options)


if __name__ == "__main__":
    harness.main(main)
