"""How Hopper's GEMMs run: configs, split-K in the tail, and which configs are legal."""

import dataclasses
import functools

from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import TILE_K, GemmProblem, raster_why_illegal

BLOCK_M = 64  # rows of the accumulator of a warp group; an epilogue handles this many at a time
PRODUCER_REGISTERS = 24


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """Tiles of tile_m x tile_n, TILE_K deep, computed by consumer warp groups; one producer warp group loads.

    Cooperative: each consumer warp group has 64 rows of the tile. `pingpong`: each of two consumer warp groups has its
    own tile, and one runs its mainloop while the other runs its epilogue. (If the epilogue selects tiles, the kernel
    ignores `pingpong`, which cannot skip tiles.)

    The CTAs of a cluster of cluster_m x cluster_n multicast their loads. Tiles are processed in groups of `group`
    clusters along `group_along` ("m" or "n"), each group along the whole other dimension, for L2 hits within a group.
    """

    tile_m: int = 128
    tile_n: int = 256
    cluster_m: int = 2
    cluster_n: int = 1
    num_stages: int = 4
    group: int = 8
    group_along: str = "m"
    pingpong: bool = False

    @property
    def num_wgs(self) -> int:
        """Consumer warp groups."""
        return 2 if self.pingpong else self.tile_m // BLOCK_M

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows per consumer warp group and tile."""
        return self.tile_m // BLOCK_M if self.pingpong else 1

    @property
    def num_buffers(self) -> int:
        """Output buffers of at most 64 columns per warp group.

        One with ping-pong: stores overlap with the other warp group's mainloop, so a stage is a better use of the
        memory. One also if a tile has an odd number of pieces: the next tile would start with the buffer in use.
        """
        return 1 if self.pingpong or self.tile_n % 128 else 2

    @property
    def cluster_rows(self) -> int:
        """Rows of a cluster's tile."""
        return self.tile_m * self.cluster_m

    @property
    def cluster_columns(self) -> int:
        return self.tile_n * self.cluster_n

    @property
    def threads(self) -> int:
        return 128 * (1 + self.num_wgs)

    @property
    def consumer_registers(self) -> int:
        """Registers per consumer thread: the SM's registers minus the producer's, at most 240."""
        return {1: 240, 2: 240, 3: 160, 4: 112}[self.num_wgs]

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that are resident at once, with one CTA per SM."""
        return sm_count // (self.cluster_m * self.cluster_n)

    def tail_room(self, m: int, n: int, k: int, clusters: int) -> tuple[int, int]:
        """(splits, floats) of `split_k_tail`'s scratch: enough if all rows are live, and at least one per cluster.

        With fewer live rows, the kernel makes no more splits than fit.
        """
        rows, columns = self.cluster_rows, self.cluster_columns
        splits = max(clusters, num_tail_splits(-(-m // rows) * -(-n // columns), -(-k // TILE_K), clusters))
        return splits, splits * rows * columns


# Split-K in the tail -------------------------------------------------------------------------------------------------


def splits_tails(gpu: Gpu) -> bool:
    """True if the GPU's GEMM has `split_k_tail`. Its constants were fitted on Hopper."""
    return gpu.family == "sm_90"


MIN_STEPS = 4  # along k, per split
MAX_SPLITS = 8  # per tile, in several rounds
MAX_ROUNDS = 4  # limits the scratch to 69 MB on an H200
MIN_GAIN = 32  # steps that additional rounds must save


def steps_of_splits(splits, tail, k_tiles, clusters):
    """Estimated time of `tail` tiles with `splits` splits each, in steps along k of 0.7 us.

    Splitting costs 14 steps, a round 3, a split 1 (fitted on an H200).
    """
    rounds = (tail * splits + clusters - 1) // clusters
    return rounds * ((k_tiles + splits - 1) // splits + 3) + splits + 14


@functools.lru_cache(maxsize=1024)
def num_tail_splits(tiles: int, k_tiles: int, clusters: int) -> int:
    """The total number of splits of a GEMM's tail tiles, as the kernel chooses with all rows live.

    dx takes 0.98 of its unsplit time at M 8192 and at M 16384 (H200, H 4096, V 128256).
    """
    tail, splits, steps = tiles % clusters, 1, k_tiles
    if tail == 0:
        return 0
    n = clusters // tail
    if k_tiles >= MIN_STEPS * n and (n_steps := steps_of_splits(n, tail, k_tiles, clusters)) < steps:
        splits, steps = n, n_steps
    for n in range(2, MAX_SPLITS + 1):
        n_steps = steps_of_splits(n, tail, k_tiles, clusters)
        if n * tail <= MAX_ROUNDS * clusters and n_steps + MIN_GAIN <= steps:
            splits, steps = n, n_steps
    return tail * splits


# Legality ------------------------------------------------------------------------------------------------------------

MIN_REGISTERS = 40  # per consumer thread, in addition to the accumulator; fewer were not tried
STAGED_BYTES = BLOCK_M * 128  # per output buffer: 128 bytes of each row of a warp group


def gemm_smem_bytes(problem: GemmProblem, config: GemmConfig) -> int:
    """Shared memory per CTA: stages of A and B, output buffers, barriers and alignment."""
    stages = config.num_stages * (config.tile_m + config.tile_n) * TILE_K * 2
    output = STAGED_BYTES * config.num_buffers * config.num_wgs if problem.out_dtype is not None else 0
    return stages + output + 4 * config.num_wgs * problem.split_k_tail + 1024


def gemm_why_illegal(problem: GemmProblem, config: GemmConfig, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem`: the field, its value and the legal values. None if it can."""
    p, c = problem, config
    if reason := fields_why_illegal(c):
        return reason
    if c.pingpong and (p.split_k_tail or not p.epilogue.can_pingpong):
        return "pingpong is True; expected False, as the problem splits tiles along k or scatters their rows"
    if reason := p.epilogue.why_illegal(p, c, gpu):
        return reason
    return space_why_illegal(c, gemm_smem_bytes(p, c), gpu)


def fields_why_illegal(c: GemmConfig) -> str | None:
    """The checks of `gemm_why_illegal` that do not depend on the problem."""
    return raster_why_illegal(c, {
        "tile_m": (64, 128, 192, 256), "tile_n": (128, 192, 256), "cluster_m": (1, 2, 4), "cluster_n": (1, 2),
        "group_along": ("m", "n"),
    })  # fmt: skip


def space_why_illegal(c: GemmConfig, smem_bytes: int, gpu: Gpu) -> str | None:
    """The checks of `gemm_why_illegal` for registers and shared memory."""
    accumulators = c.row_blocks * c.tile_n // 2
    if accumulators + MIN_REGISTERS > c.consumer_registers:
        return (
            f"tile_n is {c.tile_n} with tile_m {c.tile_m}, {accumulators} accumulator registers; expected at most "
            f"{c.consumer_registers - MIN_REGISTERS}, as a thread has {c.consumer_registers} registers"
        )
    if smem_bytes > gpu.smem_bytes:
        return (
            f"num_stages is {c.num_stages} with tiles of {c.tile_m} x {c.tile_n} x {TILE_K}, {smem_bytes} bytes of "
            f"shared memory; expected at most {gpu.smem_bytes} on {gpu.name}"
        )
    return None
