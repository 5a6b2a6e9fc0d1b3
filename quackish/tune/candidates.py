"""Which configs are worth compiling: the legal ones around the analytical choice. Plain Python, no GPU.

What is certain to be further from the floor than the analytical choice is left out. Memory has a latency, so bandwidth
is bounded by the bytes that an SM has in flight: a norm with less than half of the analytical choice's cannot come near
it. A GEMM is bounded by what its tiles load for each product.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Any

from quackish.configs.choose import RULES, analytical
from quackish.configs.gemm import TILE_K, GemmConfig, GemmProblem, gemm_smem_bytes
from quackish.configs.grouped_gemm import GroupedGemmProblem
from quackish.configs.rms_norm import (
    CLUSTERS,
    RmsNormBwdConfig,
    RmsNormBwdProblem,
    RmsNormFwdConfig,
    RmsNormFwdProblem,
    columns_per_cta,
    elements_per_thread,
)
from quackish.gpu import Gpu


def candidates(kernel: str, problem: Any, gpu: Gpu, most: int) -> list[Any]:
    """The analytical choice, then at most `most` others, the most similar ones first."""
    base = analytical(kernel, problem, gpu).config
    around, merit, share = SPACES[kernel]
    least = share * merit(problem, base)
    legal = {
        config
        for config in around(problem, base, gpu)
        if RULES[kernel].why_illegal(problem, config, gpu) is None and merit(problem, config) >= least
    }
    others = sorted(legal - {base}, key=lambda config: (_distance(config, base), repr(config)))
    return [base, *others[:most]]


def _distance(config: Any, base: Any) -> float:
    """In doublings of fields; another word is as far as one."""
    total = 0.0
    for field in dataclasses.fields(base):
        here, there = getattr(config, field.name), getattr(base, field.name)
        if here != there:
            both = isinstance(here, int) and here > 0 and there > 0
            total += abs(math.log2(here / there)) if both else 1.0
    return total


# RMSNorm -------------------------------------------------------------------------------------------------------------

_THREADS_PER_ROW = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


def _row_shapes(problem: RmsNormFwdProblem | RmsNormBwdProblem, base: Any) -> Iterator[tuple[int, int, int]]:
    """(threads, threads_per_row, split_n): half to twice the elements a thread, few threads without any."""
    elements = elements_per_thread(problem, base)
    for split_n in {base.split_n, base.split_n // 2, base.split_n * 2} & set(CLUSTERS):
        vectors = -(-columns_per_cta(problem.n, problem.vec, split_n) // problem.vec)
        for per_row in {*_THREADS_PER_ROW, base.threads_per_row}:
            each = -(-vectors // per_row)
            if not elements <= 2 * each * problem.vec <= 4 * elements or per_row * each > 1.25 * vectors + 8:
                continue
            for rows in {1, 2, 4, 8, 16, base.threads // base.threads_per_row}:
                threads = per_row * rows
                if threads == per_row or 64 <= threads <= 512:
                    yield threads, per_row, split_n


def _forward_configs(problem: RmsNormFwdProblem, base: RmsNormFwdConfig, gpu: Gpu) -> Iterator[RmsNormFwdConfig]:
    for shape in _row_shapes(problem, base):
        yield RmsNormFwdConfig(*shape)


def _backward_configs(problem: RmsNormBwdProblem, base: RmsNormBwdConfig, gpu: Gpu) -> Iterator[RmsNormBwdConfig]:
    stages = {base.num_stages, 2, 3, 4, 6, 8} if problem.aligned else {0}
    for (threads, per_row, split_n), num_stages, ctas in itertools.product(
        _row_shapes(problem, base), stages, (1, 2, 3, 4)
    ):
        if 128 <= threads * ctas <= 1024:
            yield RmsNormBwdConfig(threads, per_row, num_stages, ctas, split_n)


def _in_flight(problem: RmsNormFwdProblem, config: RmsNormFwdConfig) -> int:
    """Elements of x on an SM: a thread loads all that it has at once, and 64 registers of each leave 1024 threads."""
    return 1024 // config.threads * config.threads * elements_per_thread(problem, config)


def _fetched(problem: RmsNormBwdProblem, config: RmsNormBwdConfig) -> float:
    """Bytes on an SM that are on their way while a tile is worked on; without stages, the tile's own."""
    rows = config.threads // config.threads_per_row * config.ctas_per_sm
    return max(config.num_stages - 1, 1) * rows * problem.row_bytes / config.split_n


# GEMMs ---------------------------------------------------------------------------------------------------------------

_PINGPONG_TILES = ((128, 128), (128, 192), (192, 128))


def _gemm_configs(problem: GemmProblem, base: GemmConfig, gpu: Gpu) -> Iterator[GemmConfig]:
    tiles = itertools.product((64, 128, 192, 256), (128, 192, 256))
    clusters = ((1, 1), (2, 1), (1, 2), (2, 2), (4, 1))
    for tile_mn, cluster, pingpong in itertools.product(tiles, clusters, (False, True)):
        if pingpong and tile_mn not in _PINGPONG_TILES:
            continue
        tile = GemmConfig(*tile_mn, *cluster, pingpong=pingpong)
        stage = sum(tile_mn) * TILE_K * 2
        room = gpu.smem_bytes - gemm_smem_bytes(problem, dataclasses.replace(tile, num_stages=0))
        for group, along in itertools.product((4, 8, 16), ("m", "n")):
            yield dataclasses.replace(tile, num_stages=room // stage, group=group, group_along=along)


def _grouped_configs(problem: GroupedGemmProblem, base: GemmConfig, gpu: Gpu) -> Iterator[GemmConfig]:
    fields = (128, 192), {128, 256, base.tile_n}, (1, 2), (1, 2), (3, 4, 5, 6, 7), (4, 8, 16), ("m",), (False, True)
    for values in itertools.product(*fields):
        config = GemmConfig(*values)
        if config.cluster_m * config.cluster_n <= 2:
            yield config


def _products(problem: GemmProblem | GroupedGemmProblem, c: GemmConfig) -> float:
    """For each element that a CTA loads: A's are shared along the cluster's n, B's along its m."""
    return c.tile_m * c.tile_n / (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m)


# The configs around the analytical choice; a merit; the least share of the analytical choice's that is worth a try.
SPACES = {
    "rms_norm_fwd": (_forward_configs, _in_flight, 0.5),
    "rms_norm_bwd": (_backward_configs, _fetched, 0.5),
    "lce_gemm": (_gemm_configs, _products, 1 / 1.5),
    "grouped_gemm": (_grouped_configs, _products, 1 / 1.5),
}
