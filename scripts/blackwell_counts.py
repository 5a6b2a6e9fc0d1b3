"""Writes the tables of docs/blackwell.md: counts of Blackwell's GEMMs beside limits, and predicted times.

    python scripts/blackwell_counts.py            # writes the page
    python scripts/blackwell_counts.py --check    # exit status 1 if its tables are out of date

Needs no GPU. Each GEMM is compiled for sm_100a, which takes some seconds, and its SASS is read with cuobjdump.

Epilogue warps execute one loop over tiles, and in most kernels a loop over pieces of a tile in it. Instructions per
tile are counted along two paths through forward branches: the shortest, and the longest. Each pass over pieces counts.
Waits that succeed at once are counted, their retries are not.
"""

import csv
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import page_tables
from quackish.cli import call_arguments
from quackish.cli.parser import Parser
from quackish.device.choose import analytical
from quackish.device.cubin import Instruction
from quackish.device.launch import disassemble
from quackish.device.work import LAUNCH_US, estimate
from quackish.gpu import B200, H200, Gpu, Roofs, roofs_of
from quackish.kernels.gemm.problem import TILE_K, Store
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.sm100_config import TILE_M, GemmSm100Config
from quackish.ops.linear_cross_entropy.gemm_problems import Dlogits, LceGemmProblem, RowsOut, Softmax, StoreWithResidual
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.shared.dry_run import DryRun, Step

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/blackwell.md"


# Instructions of an epilogue ------------------------------------------------------------------------------------------


class Paths(NamedTuple):
    """Through the loop over tiles of an epilogue warp."""

    passes: int  # of the loop over pieces of a tile; 1 if that is unrolled
    shortest: list[str]  # the instructions in order, each repeated as often as a tile executes it
    longest: list[str]


def epilogue_paths(code: Sequence[Instruction], tile_n: int) -> Paths:
    """Both loops contain all loads from tensor memory: that over pieces of a tile, and around it that over tiles.

    A pass over pieces takes the columns that its loads take, which gives the number of passes.
    """
    loads = [(i, int(found[1])) for i, one in enumerate(code) if (found := _LOAD.search(one.text))]
    passes, left = divmod(tile_n, sum(columns for _, columns in loads))
    if left:
        raise ValueError(f"{len(loads)} loads from tensor memory do not divide {tile_n} columns evenly into passes")
    index = {one.address: i for i, one in enumerate(code)}
    targets = {i: index[int(found[1], 16)] for i, one in enumerate(code) if (found := _BRANCH.search(one.text))}
    loops = sorted((i - to, to, i) for i, to in targets.items() if to <= loads[0][0] and i >= loads[-1][0])
    if passes == 1:
        (_, first, last), pieces = loops[0], range(0)
    else:
        (_, begin, end), (_, first, last) = loops[:2]
        pieces = range(begin, end + 1)
    # best[i]: (length, next) of the paths from i to the end of the loop; None if there is none
    paths = []
    for choose in (min, max):
        best: dict[int, tuple[int, int | None]] = {last: (1, None)}
        for i in range(last - 1, first - 1, -1):
            is_branch, text = i in targets, code[i].text
            next_ones = [] if is_branch and _is_unconditional(text) else [i + 1]
            next_ones += [targets[i]] if is_branch and i < targets[i] <= last else []
            next_ones = [j for j in next_ones if _passes_all(i, j, pieces)]
            reachable = [(best[j][0] + (passes if i in pieces else 1), j) for j in next_ones if j in best]
            if reachable and "EXIT" not in text:
                best[i] = choose(reachable)
        at: int | None = first
        path = []
        while at is not None:
            path += [code[at].text] * (passes if at in pieces else 1)
            at = best[at][1]
        paths.append(path)
    return Paths(passes, *paths)


_LOAD = re.compile(r"\bLDTM\.x(\d+)\b")
_BRANCH = re.compile(r"\bBRA\b.*\b(0x[0-9a-f]+)$")


def _is_unconditional(text: str) -> bool:
    return re.match(r"BRA(\.\w+)* 0x", text) is not None


def _passes_all(i: int, j: int, pieces: range) -> bool:
    """Whether a step from instruction i to j enters the loop over pieces at its begin, and leaves it at its end."""
    if not pieces or (i in pieces and j in pieces):
        return True
    if i in pieces:
        return i == pieces[-1]
    return j == pieces[0] if j in pieces else not i < pieces[0] < j


MUFU_CYCLES = (
    8  # of a warp's instruction on B200: 4 results per cycle and quarter of an SM (CUDA C++ Programming Guide)
)


class Epilogue(NamedTuple):
    title: str
    kernel: str
    problem: Any
    usual: str = "shortest"  # which path a tile takes inside of the matrix


_BF16 = "bfloat16"
_DW = dict(a_major="m", b_major="n", live="k")
_OPTIONS = dict(bias_dtype="float32", softcap=True, smoothing=True, weighted=True, logit_scale=True)
_GROUPED = dict(dtype=_BF16, max_groups=128, out_dtype=_BF16, cluster_tile="256x256")
EPILOGUES = [
    Epilogue("softmax", "lce_gemm", LceGemmProblem(Softmax(), _BF16, _BF16)),
    Epilogue("softmax, D in two", "lce_gemm", LceGemmProblem(Softmax(), _BF16, _BF16, d_in_two=True)),
    Epilogue("softmax, sums only", "lce_gemm", LceGemmProblem(Softmax(), _BF16, None)),
    Epilogue("softmax, statistics", "lce_gemm", LceGemmProblem(Softmax(return_stats=True), _BF16, _BF16)),
    Epilogue("softmax, all options", "lce_gemm", LceGemmProblem(Softmax(**_OPTIONS, return_stats=True), _BF16, None)),
    Epilogue("dlogits", "lce_gemm", LceGemmProblem(Dlogits(), _BF16, _BF16)),
    Epilogue("dlogits, all options", "lce_gemm", LceGemmProblem(Dlogits(**_OPTIONS, entropy=True), _BF16, _BF16)),
    Epilogue("rows", "lce_gemm", LceGemmProblem(RowsOut(), _BF16, _BF16, b_major="n"), "longest"),
    Epilogue("store", "lce_gemm", LceGemmProblem(Store(), _BF16, _BF16, **_DW)),
    Epilogue("store, with residual", "lce_gemm", LceGemmProblem(StoreWithResidual(), _BF16, _BF16, **_DW)),
    Epilogue("store, adds to fp32", "lce_gemm", LceGemmProblem(Store(accumulate=True), _BF16, "float32", **_DW)),
    Epilogue("up", "grouped_gemm", mlp.MlpGemmProblem(mlp.Up("swiglu", keeps=True), **_GROUPED)),
    Epilogue("down", "grouped_gemm", mlp.MlpGemmProblem(mlp.Down(), **_GROUPED)),
    Epilogue(
        "down_backward", "grouped_gemm",
        mlp.MlpGemmProblem(mlp.DownBackward("swiglu", scaled=True), **_GROUPED, b_major="n"),
    ),
    Epilogue("store (grouped)", "grouped_gemm", mlp.MlpGemmProblem(mlp.Store(), **_GROUPED)),
]  # fmt: skip


def epilogue_rows() -> Iterator[list[str]]:
    yield [
        "epilogue",
        "registers",
        "stack B",
        "shared B",
        "stages",
        "instructions",
        "all branches",
        "MUFU",
        "cycles",
        "K",
    ]
    for one in EPILOGUES:
        config = analytical(one.problem, B200).config
        kernel = one.problem.spec.kernel_class(B200)
        used, code = disassemble(kernel, one.problem, config, B200.target)
        paths = epilogue_paths(code, config.tile_n)
        usual = getattr(paths, one.usual)
        mufu = sum("MUFU" in text for text in usual)
        cycles = max(len(usual), MUFU_CYCLES * mufu)
        hidden = -(-cycles * FLOPS_PER_CYCLE["B200"] // (2 * TILE_M * config.tile_n))
        numbers = used.registers, used.stack_bytes, used.smem_bytes, config.num_stages
        numbers += len(usual), len(paths.longest), mufu, cycles, hidden
        yield [one.title, *(f"{number:,}" for number in numbers)]


# GEMMs of a call ------------------------------------------------------------------------------------------------------

FLOPS_PER_CYCLE = {"H200": 4096, "B200": 8192}  # per SM, dense bf16
SLOWEST, FASTEST = roofs_of(B200), roofs_of(B200).fastest  # published speeds; the clock is what power allows
# Forward and backward at M x 4096 x 128256 in bf16 on a B200, in ms, as the projects state them.
QUACK = {8192: 17.26}  # 0.6.2
LIGER = {1024: 2.52, 4096: 9.04, 8192: 17.51, 16_384: 35.9, 65_536: 144.8}
TOKENS = sorted(LIGER)
MANY_ROWS = ("65536x512x256", "262144x512x256", "1048576x512x256")  # bound by launches and bytes, not by GEMMs


class Tiling(NamedTuple):
    """Of a GEMM, on all SMs."""

    rows: int  # of a CTA's tile
    columns: int
    tiles: int  # of clusters
    clusters: int
    steps: int  # along K

    @property
    def waves(self) -> float:
        return self.tiles / self.clusters

    @property
    def tile_flops(self) -> int:
        return 2 * self.rows * self.columns * TILE_K * self.steps


def tiling(config: GemmConfig | GemmSm100Config, sizes: dict[str, int], gpu: Gpu) -> Tiling:
    is_sm100 = isinstance(config, GemmSm100Config)
    rows, across = (TILE_M, 1) if is_sm100 else (config.tile_m, config.cluster_n)
    tiles = -(-sizes["m"] // config.cluster_rows) * -(-sizes["n"] // (config.tile_n * across))
    return Tiling(rows, config.tile_n, tiles, config.max_clusters(gpu.sm_count), -(-sizes["k"] // TILE_K))


def steps_of(words: str, gpu: Gpu) -> DryRun:
    parser = Parser()
    call_arguments.add_arguments(parser)
    return call_arguments.dry_run_call(parser.parse_args(words.split()), gpu)


def headline_rows() -> Iterator[list[str]]:
    yield [
        "GEMM", "m, n, k", "MMAs / least", "waves", "filled", "L2 B/cycle", "MMA B/cycle", "GB", "from ms", "to ms",
        "memory alone ms",
    ]  # fmt: skip
    for step in steps_of("linear_cross_entropy 8192x4096x128256", B200).steps:
        if step.kernel != "lce_gemm" or step.problem.epilogue.selects_tiles:
            continue
        config, sizes = step.choice.config, step.sizes
        tile = tiling(config, sizes, B200)
        m, n, k = (sizes[name] for name in "mnk")
        mmas = tile.tiles * tile.steps * (TILE_K // 16)
        least = m * n * k / (config.cluster_rows * config.tile_n * 16)
        cycles = tile.tile_flops / tile.steps / FLOPS_PER_CYCLE["B200"]  # of a step
        read = TILE_K * 2 * (TILE_M + config.tile_n // config.ctas)  # by the MMAs of a CTA; also written by TMA
        yield [
            step.problem.spec.name_of(step.problem), f"{m}, {n}, {k}", f"{mmas:,} / {least:,.0f}", f"{tile.waves:.2f}",
            f"{tile.waves / math.ceil(tile.waves):.1%}", f"{config.stage_bytes / cycles:.0f}", f"{read / cycles:.0f}",
            f"{step.work.bytes / 1e9:.2f}", *(f"{gemm_seconds(step, B200, at) * 1e3:.2f}" for at in (FASTEST, SLOWEST)),
            f"{1e3 * step.work.bytes / FASTEST.copy:.2f}",
        ]  # fmt: skip


# Predictions ----------------------------------------------------------------------------------------------------------


def gemm_seconds(step: Step, gpu: Gpu, roofs: Roofs) -> float:
    """Whole waves of tiles at the clock of `roofs`. Splits of the last wave leave no SM idle."""
    tile = tiling(step.choice.config, step.sizes, gpu)
    waves = tile.waves if step.problem.split_k_tail else math.ceil(tile.waves)
    cycles = waves * tile.tile_flops / FLOPS_PER_CYCLE[gpu.name]
    return cycles / clock(gpu, roofs) + LAUNCH_US * 1e-6


def clock(gpu: Gpu, roofs: Roofs) -> float:
    """The cycles per second at which tensor cores that are never idle reach the rate of long GEMMs."""
    return roofs.gemm / (gpu.sm_count * FLOPS_PER_CYCLE[gpu.name])


def seconds(dry: DryRun, gpu: Gpu, roofs: Roofs) -> float:
    """GEMMs by waves, other launches by bytes."""
    total = 0.0
    for step in dry.steps:
        is_gemm = step.kernel == "lce_gemm" and not step.problem.epilogue.selects_tiles
        once = gemm_seconds(step, gpu, roofs) if is_gemm else max(LAUNCH_US, estimate(step.work, roofs).us) * 1e-6
        total += step.calls * once
    return total


def prediction_rows() -> Iterator[list[str]]:
    yield ["tokens", "from ms", "to ms", "QuACK ms", "Liger ms", "schedule", "expected GB"]
    for tokens in TOKENS:
        dry = steps_of(f"linear_cross_entropy {tokens}x4096x128256", B200)
        yield [
            f"{tokens:,}", *(f"{1e3 * seconds(dry, B200, at):.2f}" for at in (FASTEST, SLOWEST)),
            *(f"{stated[tokens]:.2f}" if tokens in stated else "" for stated in (QUACK, LIGER)),
            dry.plan["Schedule"].partition(",")[0], f"{dry.peak_bytes / 1e9:.2f}",
        ]  # fmt: skip


def hopper_rows() -> Iterator[list[str]]:
    yield ["shape", "predicted ms", "measured ms", "predicted / measured", "commit"]
    for file in ("linear_cross_entropy.csv", "sweep/linear_cross_entropy.csv"):
        with (ROOT / "benchmarks/results/H200" / file).open() as lines:
            for row in csv.DictReader(lines):
                key = row["provider"], row["data"], row["direction"], row["ignored"], row["dtype"]
                if key != ("quackish", "normal", "forward+backward", "0.0", _BF16) or row["shape"] in MANY_ROWS:
                    continue
                predicted = 1e3 * seconds(steps_of(f"linear_cross_entropy {row['shape']}", H200), H200, roofs_of(H200))
                measured = float(row["median_ms"])
                shape = row["shape"].replace("x", " x ")
                ratio = predicted / measured
                yield [shape, f"{predicted:.2f}", f"{measured:.2f}", f"{ratio:.3f}", f"`{row['commit'][:7]}`"]


# The page -------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], Iterator[list[str]]]] = {
    "epilogues": epilogue_rows,
    "headline": headline_rows,
    "predictions": prediction_rows,
    "hopper": hopper_rows,
}


if __name__ == "__main__":
    sys.exit(page_tables.main(__doc__, {PAGE: TABLES}, Path(__file__).name))
