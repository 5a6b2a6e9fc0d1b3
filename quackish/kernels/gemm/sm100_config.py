"""How Blackwell's GEMMs run. What they compute is in problem.py and grouped_problem.py, as for Hopper."""

import dataclasses

from quackish.gpu import Gpu
from quackish.kernels.gemm.problem import TILE_K, GemmProblem, raster_why_illegal

TILE_M = 128  # rows of D per CTA: the lanes of tensor memory. An epilogue thread has one of them.
SLICE = 32  # columns that an epilogue thread loads from tensor memory at a time
EPILOGUE_WARPS = 4  # each can read a quarter of the lanes
ACCUMULATORS = 2  # in tensor memory, so that an epilogue overlaps the next mainloop
PIECE_BYTES = 128  # of each row of a buffer of the output, the span of the swizzle
STAGED_BYTES = 32 * PIECE_BYTES  # per output buffer: the rows of a warp
BUFFERS = 2  # of the output, per epilogue warp


@dataclasses.dataclass(frozen=True)
class GemmSm100Config:
    """Tiles of tile_m x tile_n per cluster, TILE_K deep: one warp loads, one multiplies, EPILOGUE_WARPS store.

    The `ctas` of a cluster compute a tile together. Each has 128 of its rows, and loads these rows of A and its share
    of B's columns; one of them issues the MMAs of both. Tiles are processed in groups of `group` clusters along
    `group_along` ("m" or "n"), each group along the whole other dimension, for L2 hits within a group.

    Not tuned: no Blackwell GPU has run it.
    """

    tile_n: int = 256
    ctas: int = 2
    num_stages: int = 6
    group: int = 8
    group_along: str = "m"

    @property
    def cluster_rows(self) -> int:
        """Rows of a cluster's tile."""
        return TILE_M * self.ctas

    @property
    def cluster_columns(self) -> int:
        return self.tile_n

    @property
    def threads(self) -> int:
        return 32 * (EPILOGUE_WARPS + 2)

    @property
    def slices(self) -> int:
        """Slices of SLICE columns in a row of a tile."""
        return self.tile_n // SLICE

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage in the shared memory of one CTA."""
        return (TILE_M + self.tile_n // self.ctas) * TILE_K * 2

    def max_clusters(self, sm_count: int) -> int:
        """Clusters that are resident at once, with one CTA per SM."""
        return sm_count // self.ctas


def gemm_sm100_smem_bytes(problem: GemmProblem, config: GemmSm100Config) -> int:
    """Shared memory per CTA: stages of A and B, output buffers, barriers and alignment."""
    staged = problem.out_dtype is not None and problem.epilogue.stores_by_tma
    return config.num_stages * config.stage_bytes + staged * BUFFERS * EPILOGUE_WARPS * STAGED_BYTES + 1024


def gemm_sm100_why_illegal(problem: GemmProblem, config: GemmSm100Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem`: the field, its value and the legal values. None if it can."""
    if reason := sm100_fields_why_illegal(config):
        return reason
    if problem.split_k_tail:
        return "split_k_tail is True; expected False, which Hopper's kernel alone knows"
    if reason := problem.epilogue.why_illegal(problem, config, gpu):
        return reason
    return sm100_space_why_illegal(config, gemm_sm100_smem_bytes(problem, config), gpu)


def sm100_fields_why_illegal(c: GemmSm100Config) -> str | None:
    """The checks of `gemm_sm100_why_illegal` that do not depend on the problem."""
    return raster_why_illegal(c, {"tile_n": (128, 256), "ctas": (1, 2), "group_along": ("m", "n")})


def sm100_space_why_illegal(c: GemmSm100Config, smem_bytes: int, gpu: Gpu) -> str | None:
    if smem_bytes > gpu.smem_bytes:
        return (
            f"num_stages is {c.num_stages} with tiles of {c.cluster_rows} x {c.tile_n} x {TILE_K} by {c.ctas} CTAs, "
            f"{smem_bytes} bytes of shared memory; expected at most {gpu.smem_bytes} on {gpu.name}"
        )
    return None
