"""The targets and the page of linear cross entropy."""

import functools
import itertools
import math
from pathlib import Path

from benchmarks.verdicts import at_most, dominated, faster, verdict
from quackish.bench import plots, report
from quackish.bench.cells import A_LAUNCH, OURS, Cell, is_ours
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.ops.linear_cross_entropy.measure import GEMMS, NONE_IGNORED, THREE_GEMMS
from quackish.ops.linear_cross_entropy.providers import ABOUT, STATS, TOKENS
from quackish.testing.timing import LOAD_MS

train = functools.partial(Cell, "linear_cross_entropy", dtype="bfloat16", direction="forward+backward")
HEADLINE = train((8192, 4096, 128256))
# (time relative to three bare GEMMs, GB above inputs)
HEADLINE_TARGETS = {"stored": (1.00, None), "chunked": (1.00, 3.0), "recompute": (1.28, 1.30)}
SHAPES = tuple(map(train, ((4096, 2048, 32000), (8192, 2048, 151936), (16384, 4096, 128256), (65536, 4096, 128256))))
SHAPES_TARGET = 1.02
SMALL = train((1024, 4096, 128256))
# Cells where every provider is measured at several settings.
AGAINST_MEMORY = (HEADLINE, train(HEADLINE.shape, data="confident"), SHAPES[-1])
# Few classes: the time must be linear in the rows. (provider, time / PyTorch's with fp32 logits)
MANY_ROWS = [train((m, 512, 256)) for m in (65536, 262144, 1048576)]
MANY_ROWS_BARS = ((OURS, 1.5), (TOKENS, 1.5), (f"{OURS}-recompute", 3.0))
FP32 = [train(HEADLINE.shape, dtype=dtype) for dtype in ("float32", "tf32")]  # on the portable path
LOSS_TARGET = 1.03  # time of the loss without grad / time of the logits GEMM
STATS_TARGET = 1.06  # time with statistics / time of the loss alone, both without grad
IGNORED_TARGET = 0.35  # time with 80 % of the rows ignored / time with none ignored
ERROR_TARGETS = {"normal": 1.0, "confident": 0.5}  # error / torch's error
HOST_TARGETS = (("torch", "PyTorch eager's", 1.4), ("quack", "QuACK's", 0.5))  # host time / theirs, in the same run
LAUNCH_TARGET_US = 15  # host time of one launch


def verdicts(results: Results) -> list[Verdict]:
    """A verdict for every target that was measured."""
    lines, ratio, cells = [], results.ratio, sorted(results.cells, key=lambda cell: (cell.shape[1:], cell.shape[0]))
    for schedule, (of_gemms, gb) in HEADLINE_TARGETS.items():
        name, text, points = f"{OURS}-{schedule}", f"{_name(HEADLINE)} {schedule}", results.points(HEADLINE)
        lines += at_most(ratio(HEADLINE, name, THREE_GEMMS), of_gemms, f"{text}: time / 3 GEMMs")
        if gb and (mb := results.value(HEADLINE, name, "peak_mb")):
            lines += at_most(mb / 1e3, gb, f"{text}: peak above inputs", " GB")
        if mine := points.get(name):
            rivals = [peer for peer, (_, size) in results.peers(HEADLINE).items() if size <= mine[1]]
            lines += faster(results, HEADLINE, name, rivals, f"{text}: faster than every peer that uses no more memory")
    for cell in (*SHAPES, SMALL):
        if cell in SHAPES:
            lines += at_most(ratio(cell, OURS, THREE_GEMMS), SHAPES_TARGET, f"{_name(cell)}: time / 3 GEMMs")
        peers = [name for name in results.providers([cell]) if not is_ours(name)]
        lines += faster(results, cell, OURS, peers, f"{_name(cell)}: faster than every peer")
    for cell, (name, target) in itertools.product(MANY_ROWS, MANY_ROWS_BARS):
        lines += at_most(
            ratio(cell, name, "torch-fp32"), target, f"{_name(cell)}, {name}: time / PyTorch's with fp32 logits"
        )
    for cell in FP32:
        lines += at_most(ratio(cell, OURS, "liger"), 1.0, f"{_name(cell)}, {cell.dtype}: time / Liger's")
        mine, theirs = (results.value(cell, name, "peak_mb") for name in (OURS, "liger"))
        lines += at_most(mine and theirs and mine / theirs, 1.0, f"{_name(cell)}, {cell.dtype}: memory / Liger's")
    for cell in AGAINST_MEMORY:
        data = "" if cell.data == "normal" else f", {cell.data} data"
        lines += dominated(results, cell, f"{_name(cell)}{data}: time against memory")
    for cell in (cell for cell in cells if cell.direction == "forward"):
        lines += at_most(ratio(cell, OURS, GEMMS[0]), LOSS_TARGET, f"{_name(cell)} loss only: time / logits GEMM")
        lines += at_most(ratio(cell, STATS, OURS), STATS_TARGET, f"{_name(cell)} loss and statistics: time / loss only")
    for cell in (cell for cell in cells if cell.ignored >= 0.8):
        text = f"{_name(cell)}, {cell.ignored:.0%} ignored: time / none ignored"
        lines += at_most(ratio(cell, OURS, NONE_IGNORED), IGNORED_TARGET, text)
    for data, target in ERROR_TARGETS.items():
        of_data = [c for c in cells if (c.dtype, c.direction, c.data) == ("bfloat16", "forward+backward", data)]
        lines += _errors(results, of_data, data, target)
    for cell in (cell for cell in cells if cell.direction == "host"):
        for name, whose, target in HOST_TARGETS:
            lines += at_most(ratio(cell, OURS, name), target, f"{_name(cell)}: host, forward + backward / {whose}")
        ms = results.ms(cell, A_LAUNCH)
        lines += at_most(ms and 1e3 * ms, LAUNCH_TARGET_US, f"{_name(cell)}: host, the slowest launch", " us")
    return lines


def _name(cell: Cell) -> str:
    return " x ".join(map(str, cell.shape))


def _errors(results: Results, cells: list[Cell], data: str, target: float) -> list[Verdict]:
    """The worst ratio of our errors to those of torch's eager bf16, over all variants and shapes."""
    lines = []
    for column, what in (("err_dx", "dX"), ("err_dweight", "dW")):
        ratios = {}
        for cell in cells:
            for name in filter(is_ours, results.providers([cell])):
                mine, theirs = results.value(cell, name, column), results.value(cell, "torch", column)
                if mine is not None and theirs:
                    ratios[f"{name} at {_name(cell)}"] = math.inf if math.isnan(mine) else mine / theirs
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            text = (
                f"{data} data, error of {what} / torch eager's: worst {ratios[worst]:.4f}, {worst}, target {target:g}"
            )
            lines.append(verdict(ratios[worst] <= target, text))
    return lines


def figures(results: Results, path: Path) -> list[Path]:
    """Time against memory for each measured cell of AGAINST_MEMORY."""
    drawn: list[Path] = []
    for suffix, cell in zip(("", "_confident", "_m65536"), AGAINST_MEMORY, strict=True):
        if len(results.points(cell)) > 1:
            drawn += plots.against_memory(results, cell, path.with_name(path.stem + suffix))
    return drawn


PAGE = report.Page(
    preface="bf16 unless stated (tf32: fp32 tensors, matmuls in TF32). Times are medians of plain calls; all providers "
    f"take turns in random order, and {LOAD_MS:.0f} ms of GEMMs on random data run before each call, as in a training "
    "step. `3 GEMMs` is three torch.mm on the same data in the same turns. Memory is the peak of a warm call above "
    "what was allocated before the library's first call, including gradients and what the library keeps between calls "
    "(standing). Errors are norm-wise against fp64. A peer's point is dominated if some point of quackish is at least "
    "as good in both time and memory; points that are not dominated are listed under each table. `steady` is the time "
    "of a step in bursts of back-to-back steps, where all providers and the three GEMMs rotate without pauses; "
    "`steady / 3 GEMMs` is its ratio to the three GEMMs in the same rotation.",
    figures=figures,
    verdicts=verdicts,
    about=ABOUT,
)
