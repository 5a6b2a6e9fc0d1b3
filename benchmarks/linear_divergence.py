"""The distillation head, against the four matmuls it consists of, and other libraries.

    python -m benchmarks.linear_divergence

bf16, the mean over rows. Shapes are tokens, hidden sizes of student and teacher, classes.
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.verdicts import at_most, faster, verdict
from quackish.bench import plots, report
from quackish.bench.cells import OURS, Cell, Job, is_ours
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.bench.table import BENCHES

OP = "linear_divergence"
SHAPES = (8192, 2048, 4096, 128_256), (8192, 4096, 4096, 151_936)
BETAS = 0.0, 1.0, 0.5
OVER_MATMULS = {OURS: 1.15, "quackish-per-row": 1.3}


def verdicts(results: Results) -> list[Verdict]:
    lines = []
    for cell in results.cells:
        for name, target in OVER_MATMULS.items():
            ratio = results.ratio(cell, name, BENCHES[OP].roofs[cell.direction])
            lines += at_most(ratio, target, f"{cell}: {name}: time / four matmuls")
        compiled = ["torch-compile"] if results.ms(cell, "torch-compile") else []
        lines += faster(results, cell, OURS, compiled, f"{cell}: faster than compiled PyTorch")
    for column in ("peak_mb", *BENCHES[OP].errors):
        lines += at_most_trl(results, column)
    return lines


def at_most_trl(results: Results, column: str) -> list[Verdict]:
    """PASS if our value is at most TRL's in every cell that has both."""
    pairs = {cell: tuple(results.value(cell, name, column) for name in (OURS, "trl")) for cell in results.cells}
    pairs = {cell: pair for cell, pair in pairs.items() if None not in pair}
    if not pairs:
        return []
    kept = sum(mine <= other for mine, other in pairs.values())
    worst = max(pairs, key=lambda cell: pairs[cell][0] / pairs[cell][1])
    mine, other = pairs[worst]
    text = f"{column} at most TRL's: {kept} of {len(pairs)} cells, worst {mine:.4g}, TRL {other:.4g} in {worst}"
    return [verdict(kept == len(pairs), text)]


PAGE = report.Page(
    preface="Times are medians of plain calls; providers take turns. The roof is the four matmuls by torch.mm: both "
    "models' logits, dX and dW. Memory is the peak above inputs, including gradients. Errors are against fp64.",
    figures=plots.for_bench,
    verdicts=verdicts,
)


def jobs(on_gpu: bool) -> list[Job]:
    """All cells; without a GPU, small ones."""
    bench = BENCHES[OP]
    shapes, names = SHAPES, bench.providers
    if not on_gpu:
        shapes, names = (bench.op.small,), tuple(name for name in names if is_ours(name) or name == "torch")
    cells = [Cell(OP, shape, "bfloat16", "forward+backward", f"beta={beta}") for beta in BETAS for shape in shapes]
    return [Job(cell, names) for cell in cells]


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Returns the CSV file."""
    args = harness.arguments(OP, __doc__).parse_args(argv)
    return [harness.run(jobs(harness.device_to_measure().type == "cuda"), PAGE, args)]


if __name__ == "__main__":
    harness.main(main)
