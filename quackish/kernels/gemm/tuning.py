"""What `quackish tune` tries for GEMMs. A config that multiplies too seldom per loaded element cannot compete."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from quackish.gpu import Gpu
from quackish.kernels.gemm.sm90_config import GemmConfig
from quackish.kernels.gemm.sm100_config import TILE_M, GemmSm100Config

MIN_MERIT = 1 / 1.5  # of `multiplications_per_load`


def sm100_configs(smem_bytes: Callable, problem: Any, base: GemmSm100Config, gpu: Gpu) -> Iterator[GemmSm100Config]:
    """Blackwell's, with all stages that fit."""
    for tile_n, ctas, group, along in itertools.product((128, 256), (1, 2), (4, 8, 16), ("m", "n")):
        tile = GemmSm100Config(tile_n, ctas, 0, group, along)
        room = gpu.smem_bytes - smem_bytes(problem, tile)
        yield dataclasses.replace(tile, num_stages=room // tile.stage_bytes)


def multiplications_per_load(problem: Any, c: GemmConfig) -> float:
    """Per element loaded by a CTA. Multicast shares A's tile along the cluster's n, and B's along its m."""
    return c.tile_m * c.tile_n / (c.tile_m / c.cluster_n + c.tile_n / c.cluster_m)


def multiplications_per_load_sm100(problem: Any, c: GemmSm100Config) -> float:
    """Per element loaded by a CTA: its rows of A, and its share of B's columns."""
    return TILE_M * c.tile_n / (TILE_M + c.tile_n / c.ctas)
