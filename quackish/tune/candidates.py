"""Candidates: the legal configs near the analytical choice that are worth compiling. Plain Python, no GPU.

Configs that must be slower are excluded by a merit. For a norm it is the bytes in flight per SM, which bound the
bandwidth; below half of the analytical choice's a config cannot compete. For a GEMM it is FLOPs per loaded element.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from quackish.configs.attention import REGISTERS, TILES, AttentionConfig, AttentionProblem
from quackish.configs.choose import RULES, analytical
from quackish.configs.gemm import TILE_K, GemmConfig, GemmProblem, gemm_smem_bytes
from quackish.configs.gemm_sm100 import TILE_M, GemmSm100Config, gemm_sm100_smem_bytes
from quackish.configs.grouped_gemm import GroupedGemmProblem
from quackish.configs.grouped_gemm_sm100 import grouped_gemm_sm100_smem_bytes
from quackish.configs.rms_norm import (
    CLUSTERS,
    RmsNormBwdConfig,
    RmsNormBwdProblem,
    RmsNormFwdConfig,
    RmsNormFwdProblem,
    columns_per_cta,
    elements_per_thread,
)
from quackish.gpu import FAMILIES, Gpu
from quackish.work import ATTENTION_RESULTS


def candidates(kernel: str, problem: Any, gpu: Gpu, max_others: int) -> list[Any]:
    """The analytical choice, then at most `max_others` other configs, the most similar ones first."""
    base = analytical(kernel, problem, gpu).config
    configs, merit, min_share = SPACES[kernel][gpu.family]
    min_merit = min_share * merit(problem, base)
    legal = {
        config
        for config in configs(problem, base, gpu)
        if RULES[kernel][gpu.family].why_illegal(problem, config, gpu) is None and merit(problem, config) >= min_merit
    }
    others = sorted(legal - {base}, key=lambda config: (_distance(config, base), repr(config)))
    return [base, *others[:max_others]]


def _distance(config: Any, base: Any) -> float:
    """The sum over fields of |log2 of the ratio|; 1 for fields that are not positive ints."""
    total = 0.0
    for field in dataclasses.fields(base):
        a, b = getattr(config, field.name), getattr(base, field.name)
        if a != b:
            are_positive_ints = isinstance(a, int) and a > 0 and b > 0
            total += abs(math.log2(a / b)) if are_positive_ints else 1.0
    return total


# RMSNorm -------------------------------------------------------------------------------------------------------------

_THREADS_PER_ROW = (8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024)


def _row_shapes(problem: RmsNormFwdProblem | RmsNormBwdProblem, base: Any) -> Iterator[tuple[int, int, int]]:
    """(threads, threads_per_row, split_n) with half to twice as many elements per thread, and few idle threads."""
    elements = elements_per_thread(problem, base)
    for split_n in {base.split_n, base.split_n // 2, base.split_n * 2} & set(CLUSTERS):
        vectors = -(-columns_per_cta(problem.n, problem.vec, split_n) // problem.vec)
        for per_row in {*_THREADS_PER_ROW, base.threads_per_row}:
            per_thread = -(-vectors // per_row)
            if not elements <= 2 * per_thread * problem.vec <= 4 * elements:
                continue
            if per_row * per_thread > 1.25 * vectors + 8:
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


def _forward_elements_in_flight(problem: RmsNormFwdProblem, config: RmsNormFwdConfig) -> int:
    """Elements of x in flight per SM: a thread loads its part of a row at once."""
    return config.ctas_per_sm * config.threads * elements_per_thread(problem, config)


def _backward_bytes_in_flight(problem: RmsNormBwdProblem, config: RmsNormBwdConfig) -> float:
    """Bytes in flight per SM while a tile is computed; without stages, the bytes of the tile itself."""
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


def _sm100_configs(
    smem_bytes: Callable, problem: GemmProblem | GroupedGemmProblem, base: GemmSm100Config, gpu: Gpu
) -> Iterator[GemmSm100Config]:
    """Blackwell's, with all stages that fit."""
    for tile_n, ctas, group, along in itertools.product((128, 256), (1, 2), (4, 8, 16), ("m", "n")):
        tile = GemmSm100Config(tile_n, ctas, 0, group, along)
        room = gpu.smem_bytes - smem_bytes(problem, tile)
        yield dataclasses.replace(tile, num_stages=room // tile.stage_bytes)


def _grouped_configs(problem: GroupedGemmProblem, base: GemmConfig, gpu: Gpu) -> Iterator[GemmConfig]:
    fields = (128, 192), (128, 192, 256), (1, 2), (1, 2), (3, 4, 5, 6, 7), (4, 8, 16), ("m",), (False, True)
    for values in itertools.product(*fields):
        config = GemmConfig(*values)
        if config.cluster_m * config.cluster_n <= 2:
            yield config


def _multiplications_per_load(problem: GemmProblem | GroupedGemmProblem, c: GemmConfig) -> float:
    """Per element loaded by a CTA. Multicast shares A's tile along the cluster's n, and B's along its m."""
    return c.tile_m * c.tile_n / (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m)


def _multiplications_per_load_sm100(problem: GemmProblem | GroupedGemmProblem, c: GemmSm100Config) -> float:
    """Per element loaded by a CTA: its rows of A, and its share of B's columns."""
    return TILE_M * c.tile_n / (TILE_M + c.tile_n / c.ctas)


def _on_blackwell(smem_bytes: Callable) -> dict[str, tuple[Callable, Callable, float]]:
    space = functools.partial(_sm100_configs, smem_bytes), _multiplications_per_load_sm100, 1 / 1.5
    return dict.fromkeys(("sm_100", "sm_103"), space)


# Attention -----------------------------------------------------------------------------------------------------------


def _attention_configs(problem: AttentionProblem, base: AttentionConfig, gpu: Gpu) -> Iterator[AttentionConfig]:
    tiles = {tile for tiles in TILES.values() for tile in tiles}
    for values in itertools.product(REGISTERS, tiles, range(1, 7), (1, 2)):
        yield AttentionConfig(*values)


def _same_merit(problem: AttentionProblem, config: AttentionConfig) -> float:
    return 1.0  # all are tried: there are at most 72


# kernel -> GPU family -> (configs, merit, the smallest share of the analytical choice's merit that is worth a try)
SPACES: dict[str, dict[str, tuple[Callable, Callable, float]]] = {
    "rms_norm_fwd": dict.fromkeys(FAMILIES, (_forward_configs, _forward_elements_in_flight, 0.5)),
    "rms_norm_bwd": dict.fromkeys(FAMILIES, (_backward_configs, _backward_bytes_in_flight, 0.5)),
    "lce_gemm": {
        "sm_90": (_gemm_configs, _multiplications_per_load, 1 / 1.5),
        **_on_blackwell(gemm_sm100_smem_bytes),
    },
    "grouped_gemm": {
        "sm_90": (_grouped_configs, _multiplications_per_load, 1 / 1.5),
        **_on_blackwell(grouped_gemm_sm100_smem_bytes),
    },
    **{kernel: {"sm_90": (_attention_configs, _same_merit, 1.0)} for kernel in ATTENTION_RESULTS},
}
