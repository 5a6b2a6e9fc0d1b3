"""Clusters of a GEMM start each wave of tiles together, so that they share loads through the L2.

Unsynchronized clusters drift apart. DRAM reads at 8192 x 4096 x 128256 (H200) without wave_sync, with it, with cuBLAS:
dX 28, 12, 20 GB; dW 26, 14, 18 GB. A step takes 37.2 ms without and 35.6 ms with it (H100). Synchronizing also within a
tile gained nothing.

This is not a barrier: spinning is bounded, so non-resident clusters cannot deadlock, and no result depends on it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from quackish.kernels.memory import increment

MAX_SPINS = 1000  # per launch: about 1 ms, if a spin is a round trip to the L2 (not measured)
MIN_STEPS = 16  # along k; shorter tiles are not synchronized


@cute.jit
def tiles_to_sync(tiles: Int32, k_tiles: Int32, clusters: Int32) -> Int32:
    """How many tiles start synchronized: all or none."""
    return tiles if tiles > clusters and k_tiles >= MIN_STEPS else Int32(0)


@cute.jit
def spin_limit(tiles: Int32, k_tiles: Int32, clusters: Int32) -> Int32:
    """Maximum spins per launch: one per 8 steps along k, so that a short launch is not delayed for long."""
    return cutlass.min(tiles // clusters * (k_tiles // 8), MAX_SPINS)


@cute.jit
def wave_sync(ticket: cute.Pointer, tile: Int32, tiles: Int32, clusters: Int32, spins: Int32) -> Int32:
    """Waits for the other clusters of this wave. Called by one warp per cluster and tile. Returns the remaining spins.

    ticket: 0 before the first and after the last of `tiles` calls.
    """
    if cute.arch.lane_idx() == 0:
        increment(ticket, tiles)
        expected = cutlass.min((tile // clusters + 1) * clusters, tiles)
        arrived = cute.arch.load(ticket, Int32, sem="relaxed", scope="gpu")
        while arrived < expected and arrived != 0 and spins > 0:
            arrived = cute.arch.load(ticket, Int32, sem="relaxed", scope="gpu")
            spins -= 1
    cute.arch.sync_warp()
    return spins
