"""Time, memory and errors of RMSNorm and every installed peer, forward and backward, over a grid of shapes.

python -m benchmarks.rms_norm             # every cell with a target, and some large N
python -m benchmarks.rms_norm --quick     # five cells
"""

import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.verdicts import every, verdict
from quackish.bench import plots, report
from quackish.bench.cells import OURS, Cell, Job
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.ops.rms_norm.providers import PROVIDERS

ROWS = (4096, 8192, 16384, 32768, 65536)
BF16 = "bfloat16"
GRID = [(m, n, BF16) for n in (256, 512, 1024, 2048, 3072, 4096, 8192) for m in ROWS]
CELLS = GRID + [(m, 4096, dtype) for dtype in ("float16", "float32") for m in ROWS]
CELLS += [(m, n, BF16) for n in (16384, 65536) for m in (1024, 4096, 16384)]
MAX_N = 8192  # of the grid; larger N have verdicts of their own
QUICK = [(m, n, BF16) for m, n in ((4096, 256), (16384, 1024), (4096, 4096), (65536, 4096), (16384, 8192))]
TINY = [(64, n, BF16) for n in (256, 1000)]  # without a GPU
RIVAL, SPEEDUP = "quack", 1.25  # geometric mean of QuACK's backward time / ours, bf16
TARGETS = {  # (text, limit, what the limit is relative to)
    "forward": (("<= 1.05 t_mul + 1 us; time / target", 1.0, "target"), ("at most 2 % over QuACK", 1.02, "QuACK's")),
    "backward": (("<= 1.05 t_add + 4 us; time / target", 1.0, "target"), ("no slower than QuACK", 1.0, "QuACK's")),
}


def target_ms(results: Results, cell: Cell) -> float:
    """1.05 times the roof, plus microseconds for work that the roof does not do."""
    roof = results.ms(cell, results.roof(cell))
    return 1.05 * roof + {"forward": 0.001, "backward": 0.004}[cell.direction] if roof else 0.0


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for every measured target: how many cells meet it, and the worst cell."""
    times = {"target": lambda cell: target_ms(results, cell), "QuACK's": lambda cell: results.ms(cell, RIVAL)}
    lines = []
    for (direction, dtype), cells in results.groups().items():
        cells = [cell for cell in cells if OURS in results.cells[cell]]
        large = [cell for cell in cells if cell.shape[1] > MAX_N]
        cells = [cell for cell in cells if cell.shape[1] <= MAX_N]
        for text, limit, ms_of in TARGETS[direction]:
            lines += every(results, cells, limit, f"{dtype}: {direction} {text}", times[ms_of])
            lines += every(results, large, limit, f"{dtype}, N over {MAX_N}: {direction} {text}", times[ms_of])
        both = [cell for cell in cells if results.ms(cell, RIVAL) and results.ms(cell, OURS)]
        if both and direction == "backward" and dtype == BF16:
            mean = math.exp(sum(math.log(results.ratio(cell, RIVAL, OURS)) for cell in both) / len(both))
            text = f"{dtype}: backward over QuACK's in the geometric mean: {mean:.3f}x, target {SPEEDUP}x"
            lines.append(verdict(mean >= SPEEDUP, text))
    return lines


def figures(results: Results, path: Path) -> list[Path]:
    """The share of the roof for bf16 and N up to MAX_N."""
    groups = {direction: cells for (direction, dtype), cells in results.groups().items() if dtype == BF16}
    panels = {direction: [cell for cell in cells if cell.shape[1] <= MAX_N] for direction, cells in groups.items()}
    return plots.over_cells(results, panels, path.with_suffix(""), "RMSNorm, bf16")


PAGE = report.Page(
    preface="Forward computes y and rstd, backward the finished dx and dweight. Times are medians in us of CUDA graph "
    "replays; the L2 is cleared before each, and all providers take turns. Shares are of the roof in the same turns. "
    "Errors are norm-wise against fp64.",
    figures=figures,
    verdicts=verdicts,
)


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = harness.arguments("rms_norm", __doc__)
    parser.add_argument("--quick", action="store_true", help="five cells instead of all")
    args = parser.parse_args(argv)
    cells = TINY if harness.device_to_measure().type == "cpu" else QUICK if args.quick else CELLS
    jobs = [Job(Cell("rms_norm", (m, n), t, d), tuple(PROVIDERS)) for m, n, t in cells for d in TARGETS]
    return harness.run(jobs, PAGE, args)


if __name__ == "__main__":
    harness.main(main)
