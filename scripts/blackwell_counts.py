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
from quackish.ops.linear_divergence.problems import DivergenceRowsProblem
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.rotary.problems import RotaryProblem
from quackish.ops.shared.dry_run import DryRun, Step
from quackish.ops.shared.problems import StoreGemmProblem

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


# For an instruction of a warp. A quarter of a B200's SM has 4 results per cycle (CUDA C++ Programming Guide).
MUFU_CYCLES = 8


class Epilogue(NamedTuple):
    title: str
    problem: Any
    usual: str = "shortest"  # which path a tile takes inside of the matrix


_BF16 = "bfloat16"
_DW = dict(a_major="m", b_major="n", live="k")
_OPTIONS = dict(bias_dtype="float32", softcap=True, smoothing=True, weighted=True, logit_scale=True)
_GROUPED = dict(dtype=_BF16, max_groups=128, out_dtype=_BF16, cluster_tile="256x256")
_DENSE = _GROUPED | dict(max_groups=1)
EPILOGUES = [
    Epilogue("softmax", LceGemmProblem(Softmax(), _BF16, _BF16)),
    Epilogue("softmax, D in two", LceGemmProblem(Softmax(), _BF16, _BF16, d_in_two=True)),
    Epilogue("softmax, sums only", LceGemmProblem(Softmax(), _BF16, None)),
    Epilogue("softmax, statistics", LceGemmProblem(Softmax(return_stats=True), _BF16, _BF16)),
    Epilogue("softmax, all options", LceGemmProblem(Softmax(**_OPTIONS, return_stats=True), _BF16, None)),
    Epilogue("dlogits", LceGemmProblem(Dlogits(), _BF16, _BF16)),
    Epilogue("dlogits, all options", LceGemmProblem(Dlogits(**_OPTIONS, entropy=True), _BF16, _BF16)),
    Epilogue("rows", LceGemmProblem(RowsOut(), _BF16, _BF16, b_major="n"), "longest"),
    Epilogue("store", LceGemmProblem(Store(), _BF16, _BF16, **_DW)),
    Epilogue("store, with residual", LceGemmProblem(StoreWithResidual(), _BF16, _BF16, **_DW)),
    Epilogue("store, adds to fp32", LceGemmProblem(Store(accumulate=True), _BF16, "float32", **_DW)),
    Epilogue("store, fp32 logits", StoreGemmProblem(Store(), _BF16, "float32")),
    Epilogue("up", mlp.MlpGemmProblem(mlp.Up("swiglu", keeps=True), **_GROUPED)),
    Epilogue("up, dense", mlp.MlpGemmProblem(mlp.Up("swiglu", keeps=True), **_DENSE, b_in_two=True)),
    Epilogue("down", mlp.MlpGemmProblem(mlp.Down(), **_GROUPED)),
    Epilogue("down, dense", mlp.MlpGemmProblem(mlp.Down(), **_DENSE)),
    Epilogue("down_backward", mlp.MlpGemmProblem(mlp.DownBackward("swiglu", scaled=True), **_GROUPED, b_major="n")),
    Epilogue("down_backward, dense", mlp.MlpGemmProblem(mlp.DownBackward("swiglu"), **_DENSE, b_major="n")),
    Epilogue(
        "down_backward, geglu_erf",
        mlp.MlpGemmProblem(mlp.DownBackward("geglu_erf", scaled=True), **_GROUPED, b_major="n"),
    ),
    Epilogue("store (grouped)", mlp.MlpGemmProblem(mlp.Store(), **_GROUPED)),
]  # fmt: skip


def epilogue_rows() -> Iterator[list[str]]:
    yield ["epilogue", "registers", "stack B", "instructions", "MUFU", "K"]
    for one in EPILOGUES:
        config = analytical(one.problem, B200).config
        used, code = disassemble(one.problem.spec.kernel_class(B200), one.problem, config, B200.target)
        paths = epilogue_paths(code, config.tile_n)
        usual = getattr(paths, one.usual)
        mufu = sum("MUFU" in text for text in usual)
        cycles = max(len(usual), MUFU_CYCLES * mufu)
        hidden = -(-cycles * FLOPS_PER_CYCLE["B200"] // (2 * TILE_M * config.tile_n))
        numbers = used.registers, used.stack_bytes, len(usual), mufu, hidden
        yield [one.title, *(f"{number:,}" for number in numbers)]


ROW_KERNELS = {
    "rotary, D 64": RotaryProblem(64, _BF16, _BF16, 64),
    "rotary, D 128": RotaryProblem(128, _BF16, _BF16, 128),
    "divergence_rows, beta 0, V 128256": DivergenceRowsProblem(128_256, "forward", _BF16),
    "divergence_rows, beta 0.5, V 151936": DivergenceRowsProblem(151_936, "between", _BF16),
}


def row_kernel_rows() -> Iterator[list[str]]:
    yield ["kernel", "threads", "registers", "stack B"]
    for title, problem in ROW_KERNELS.items():
        config = analytical(problem, B200).config
        used, _ = disassemble(problem.spec.kernel_class(B200), problem, config, B200.target)
        yield [title, str(config.threads), str(used.registers), str(used.stack_bytes)]


# GEMMs of a call ------------------------------------------------------------------------------------------------------

FLOPS_PER_CYCLE = {"H200": 4096, "B200": 8192}  # per SM, dense bf16
SLOWEST, FASTEST = roofs_of(B200), roofs_of(B200).fastest  # published speeds; the clock is what power allows
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


# Predictions ----------------------------------------------------------------------------------------------------------


def gemm_sizes(step: Step) -> dict[str, int] | None:
    """m, n and k of a GEMM without groups; None for other launches, and for those that select tiles."""
    sizes, problem = step.sizes, step.problem
    if step.kernel == "grouped_gemm":
        columns = sizes["n"] * (1 + problem.epilogue.has_pairs)
        return dict(m=sizes["rows"], n=columns, k=sizes["k"] * problem.k_parts)
    is_gemm = step.kernel in ("lce_gemm", "gemm") and not problem.epilogue.selects_tiles
    return sizes if is_gemm else None


def gemm_seconds(tile: Tiling, gpu: Gpu, roofs: Roofs, split_k_tail: bool = False) -> float:
    """Whole waves of tiles at the clock of `roofs`. Splits of the last wave leave no SM idle."""
    waves = tile.waves if split_k_tail else math.ceil(tile.waves)
    cycles = waves * tile.tile_flops / FLOPS_PER_CYCLE[gpu.name]
    return cycles / clock(gpu, roofs) + LAUNCH_US * 1e-6


def clock(gpu: Gpu, roofs: Roofs) -> float:
    """The cycles per second at which tensor cores that are never idle reach the rate of long GEMMs."""
    return roofs.gemm / (gpu.sm_count * FLOPS_PER_CYCLE[gpu.name])


def seconds(dry: DryRun, gpu: Gpu, roofs: Roofs) -> float:
    """GEMMs by waves, other launches by bytes."""
    total = 0.0
    for step in dry.steps:
        if (sizes := gemm_sizes(step)) is None:
            once = max(LAUNCH_US, estimate(step.work, roofs).us) * 1e-6
        else:
            tile = tiling(step.choice.config, sizes, gpu)
            once = gemm_seconds(tile, gpu, roofs, getattr(step.problem, "split_k_tail", False))
        total += step.calls * once
    return total


# Results of the H200 whose calls are predicted, and options of these calls
RESULTS = {
    "linear_cross_entropy.csv": "",
    "mlp.csv": " --w3",
    "linear_divergence.csv": "",
    "rotary.csv": "",
}


def measured_calls(file: str) -> dict[str, float]:
    """Milliseconds of forward and backward on an H200, without ignored rows and with beta 0."""
    times: dict[str, float] = {}
    with (ROOT / "benchmarks/results/H200" / file).open() as lines:
        for row in csv.DictReader(lines):
            op, direction = row["op"], row["direction"]
            directions = ("forward", "backward") if op == "rotary" else ("forward+backward",)
            key = row["provider"], row["ignored"], row["dtype"]
            if key == ("quackish", "0.0", _BF16) and row["data"] in ("normal", "beta=0.0"):
                if direction in directions and row["shape"] not in MANY_ROWS:
                    call = f"{op} {row['shape']}{RESULTS[file]}"
                    times[call] = times.get(call, 0.0) + float(row["median_ms"])
    return times


LOSSES = [f"linear_cross_entropy {tokens}x4096x128256" for tokens in (1024, 4096, 8192, 16_384, 65_536)]


def milliseconds(seconds: float) -> str:
    """Three digits, or as many as the integer part has."""
    return f"{1e3 * seconds:#.3g}".removesuffix(".")


def prediction_rows() -> Iterator[list[str]]:
    yield ["call", "from ms", "to ms", "expected GB"]
    others = [call for file in ("mlp.csv", "linear_divergence.csv", "rotary.csv") for call in measured_calls(file)]
    for call in (*LOSSES, *others):
        dry = steps_of(call, B200)
        times = (milliseconds(seconds(dry, B200, at)) for at in (FASTEST, SLOWEST))
        yield [f"`{call}`", *times, f"{dry.peak_bytes / 1e9:.2f}"]


def hopper_ratios() -> dict[str, list[float]]:
    """Predicted time / measured time of each call on an H200, by operation."""
    ratios: dict[str, list[float]] = {}
    for file in RESULTS:
        for call, ms in measured_calls(file).items():
            predicted = seconds(steps_of(call, H200), H200, roofs_of(H200))
            ratios.setdefault(Path(file).stem, []).append(1e3 * predicted / ms)
    return ratios


def hopper_rows() -> Iterator[list[str]]:
    yield ["operation", "calls", "predicted / measured: least", "mean", "largest"]
    for name, ratios in hopper_ratios().items():
        numbers = min(ratios), sum(ratios) / len(ratios), max(ratios)
        yield [f"`{name}`", str(len(ratios)), *(f"{number:.3f}" for number in numbers)]


# What others state for a B200 -----------------------------------------------------------------------------------------


def loss_gemms(tokens: int) -> list[tuple[int, int, int]]:
    """(m, n, k) of the GEMMs of linear cross entropy, with H 4096 and V 128256, if all rows are one chunk."""
    h, v = 4096, 128_256
    return [(tokens, v, h), (tokens, h, v), (v, h, tokens)]


def expert_gemms(rows: int, h: int, i: int, experts: int) -> list[tuple[int, int, int]]:
    """Of SwiGLU experts with equal numbers of rows; gradients of weights sum over the rows of an expert."""
    each = rows // experts
    forward = [(rows, 2 * i, h), (rows, h, i)]
    return [*forward, (rows, i, h), (rows, h, 2 * i), (experts * 2 * i, h, each), (experts * h, i, each)]


# Forward and backward in bf16, or one GEMM; ms by library
PUBLISHED = {
    **{
        f"loss, {tokens:,} tokens": (loss_gemms(tokens), times)
        for tokens, times in {
            1024: {"QuACK": 2.12, "Liger": 2.52},
            4096: {"QuACK": 8.33, "Liger": 9.04},
            8192: {"QuACK": 17.26, "Liger": 17.51},
            16_384: {"QuACK": 34.1, "Liger": 35.9},
            65_536: {"QuACK": 140.0, "Liger": 144.8},
        }.items()
    },
    **{
        f"dW over {k} rows": ([(128_256, 4096, k)], {"Liger": liger, "cuBLAS": cublas})
        for k, liger, cublas in ((256, 0.252, 0.264), (512, 0.394, 0.396), (1024, 0.699, 0.685), (2048, 1.349, 1.336))
    },
    "Mixtral's experts, 16,384 rows": (expert_gemms(16_384, 4096, 14_336, 8), {"Liger": 23.7}),
    "Qwen3-30B's experts, 65,536 rows": (expert_gemms(65_536, 2048, 768, 128), {"Liger": 5.84}),
}


def published_rows() -> Iterator[list[str]]:
    libraries = "QuACK", "Liger", "cuBLAS"
    yield ["work", "from ms", "to ms", *libraries]
    for title, (gemms, stated) in PUBLISHED.items():
        tiles = [tiling(GemmSm100Config(), dict(zip("mnk", sizes, strict=True)), B200) for sizes in gemms]
        low, high = (sum(gemm_seconds(tile, B200, at) for tile in tiles) for at in (FASTEST, SLOWEST))
        cells = []
        for name in libraries:
            if (ms := stated.get(name)) is None:
                cells.append("")
            else:
                where = "in" if low <= ms / 1e3 <= high else "out"
                cells.append(f"{ms:g}, {1e3 * (low + high) / 2 / ms:.2f} {where}")
        yield [title, milliseconds(low), milliseconds(high), *cells]


# The page -------------------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], Iterator[list[str]]]] = {
    "epilogues": epilogue_rows,
    "row kernels": row_kernel_rows,
    "predictions": prediction_rows,
    "published": published_rows,
    "hopper": hopper_rows,
}


if __name__ == "__main__":
    sys.exit(page_tables.main(__doc__, {PAGE: TABLES}, Path(__file__).name))
