"""The MLP of a mixture of experts, forward and backward, against six grouped GEMMs and whole MLPs of other libraries.

    python -m benchmarks.grouped_mlp                       # the MLP for sorted rows, and moe_mlp after a router
    python -m benchmarks.grouped_mlp --models olmoe-1b-7b mixtral-8x7b --only moe_mlp

bf16, swiglu, scales with gradient; 16,384 tokens (8192 for Mixtral). Groups have equal sizes, sizes in proportion to
1 / rank (zipf), or no rows in every other group (half-empty). Before moe_mlp is measured, processes compile the kernels
of Liger and SonicMoE for all models at once, into their caches on disk.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.verdicts import at_most, faster, verdict
from quackish.bench import plots, report
from quackish.bench.cells import OURS, Cell, Job, is_ours
from quackish.bench.report import Verdict
from quackish.bench.results import Results
from quackish.bench.table import BENCHES
from quackish.ops.mlp.measure import DATA, ERRORS, ROOFS, Data, step
from quackish.ops.shared.models import MODELS

OPS = ("grouped_mlp", "moe_mlp")
TOKENS = {"qwen3-30b-a3b": 16_384, "olmoe-1b-7b": 16_384, "gpt-oss-20b": 16_384, "mixtral-8x7b": 8192}
TRAIN = "forward+backward"
ROOF = ROOFS[TRAIN]
HOST = (1024, 128, 128, 8)  # a small shape, so that GPU time stays hidden
COMPILED = ("liger", "sonicmoe")  # `first_step` compiles their kernels
OVER_ROOF, SPEEDUP, MOST_LAUNCHES = 1.06, 1.20, 8


def verdicts(results: Results) -> list[Verdict]:
    lines, speedups = [], []
    for cell in results.cells:
        if cell.direction == "host":
            ours, theirs = results.ms(cell, OURS), results.ms(cell, "torch")
            lines += at_most(ours and theirs and ours / theirs, 1.0, f"{cell}: host time / PyTorch eager's")
            continue
        if cell.op == "grouped_mlp":
            lines += at_most(results.ratio(cell, OURS, ROOF), OVER_ROOF, f"{cell}: time / six GEMMs")
            # moe_mlp has no such target: it adds 4 to these 6, which copy and sum the tokens' rows.
            lines += at_most(results.value(cell, OURS, "launches"), MOST_LAUNCHES, f"{cell}: launches")
        peers = [name for name in results.providers([cell]) if not is_ours(name)]
        lines += faster(results, cell, OURS, peers, f"{cell}: faster than every peer")
        errors = [(name, *(results.value(cell, who, name) for who in (OURS, "torch"))) for name in ERRORS]
        if errors := [(name, ours, theirs) for name, ours, theirs in errors if ours is not None and theirs]:
            worse = [f"; {name} {ours:.2e} > {theirs:.2e}" for name, ours, theirs in errors if not ours <= theirs]
            lines.append(verdict(not worse, f"{cell}: errors at most PyTorch eager's{''.join(worse)}"))
        if speedup := results.ratio(cell, "torch-compile", OURS):
            speedups.append(speedup)
    if speedups:
        mean = math.prod(speedups) ** (1 / len(speedups))
        lines.append(verdict(mean >= SPEEDUP, f"torch-compile: {mean:.3f} times our time on average, target {SPEEDUP}"))
    return lines


PAGE = report.Page(
    preface="Times are medians of plain calls, in which all providers take turns in random order. The roof is the bare "
    "matmuls, two for forward and six for forward and backward, by the fastest library that is named in its note. "
    "Memory is the peak above inputs, including gradients and what the library keeps between calls. Errors are "
    "norm-wise against fp64; dW is the error of w1, and dscales the error of the router's weights.",
    figures=plots.for_bench,
    verdicts=verdicts,
)


def jobs(op: str, models: Sequence[str]) -> list[Job]:
    bench = BENCHES[op]
    cells = [
        (Cell(op, shape, "bfloat16", TRAIN, data), name)
        for model in models
        for shape, name in bench.op.model_shapes(MODELS[model], TOKENS[model]).items()
        for data in (DATA if op == "grouped_mlp" else DATA[:1])
    ]
    return [Job(cell, bench.providers, name) for cell, name in cells]


def tiny(op: str) -> list[Job]:
    """Small jobs, which run on a machine without a GPU."""
    bench = BENCHES[op]
    providers = tuple(name for name in bench.providers if is_ours(name) or name in ("torch", "transformers"))
    data = DATA if op == "grouped_mlp" else DATA[:1]
    return [Job(Cell(op, bench.op.small, "bfloat16", TRAIN, kind), providers, "small") for kind in data]


def first_step(cell: Cell, name: str) -> None:
    step(BENCHES[cell.op].load(name), Data.make(cell, harness.device_to_measure()))()


def main(argv: Sequence[str] | None = None) -> list[Path]:
    """Returns the CSV files."""
    parser = harness.arguments("grouped_mlp", __doc__)
    parser.add_argument("--models", nargs="+", choices=TOKENS, default=list(TOKENS), metavar="NAME")
    parser.add_argument("--only", choices=OPS, help="only this operation")
    args = parser.parse_args(argv)
    on_gpu, paths = harness.device_to_measure().type == "cuda", []
    for op in [args.only] if args.only else OPS:
        to_measure = jobs(op, args.models) if on_gpu else tiny(op)
        if op == "grouped_mlp":
            host = HOST if on_gpu else BENCHES[op].op.small
            to_measure.append(Job(Cell(op, host, "bfloat16", "host"), (OURS, "torch")))
        elif on_gpu and not args.report:
            harness.warm_up(to_measure, COMPILED, first_step)
            os.environ["QUACK_FORCE_CACHE_UPDATE"] = "1"  # SonicMoE tunes again, on an idle GPU
        paths.append(harness.run(to_measure, PAGE, args))
    return paths


if __name__ == "__main__":
    harness.main(main)
