"""A GEMM's clusters begin their tiles together, wave by wave, so that one finds in the L2 what another has loaded.

Left alone they drift apart. GB read from DRAM on an H200, apart, together, and by cuBLAS:
    M, H, V              dX           dW           logits
    8192, 4096, 128256   28, 12, 20   26, 14, 18   16, 13, 8
    8192, 2048, 151936   15, 6, 10    13, 7, 6     6, 4.5, 4
Meeting within a tile too, each 64 to 256 steps, gains no more.

It is no barrier: who waits in vain for clusters that have no SM yet goes on alone, and no result depends on it.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from quackish.kernels.common.column_sum import increment

# Looks at the ticket, in all of a launch: about a millisecond if each is a trip to the L2 and back (not measured).
PATIENCE = 1000
WORTH_MEETING = 16  # steps along k: shorter tiles are not worth the wait


@cute.jit
def tiles_to_meet_for(tiles: Int32, k_tiles: Int32, clusters: Int32) -> Int32:
    """The first so many tiles are begun together: all, or none."""
    return tiles if tiles > clusters and k_tiles >= WORTH_MEETING else Int32(0)


@cute.jit
def patience_for(tiles: Int32, k_tiles: Int32, clusters: Int32) -> Int32:
    """... and a look for each eight steps along k at most: a short launch is not held up long."""
    return cutlass.min(tiles // clusters * (k_tiles // 8), PATIENCE)


@cute.jit
def begin_together(ticket: cute.Pointer, tile: Int32, tiles: Int32, clusters: Int32, patience: Int32) -> Int32:
    """A warp arrives with its cluster's tile and waits for its wave. ticket: 0 before the first and after the last of
    `tiles` calls. Returns what is left of the patience."""
    if cute.arch.lane_idx() == 0:
        increment(ticket, tiles)
        expected = cutlass.min((tile // clusters + 1) * clusters, tiles)
        arrived = cute.arch.load(ticket, Int32, sem="relaxed", scope="gpu")
        while arrived < expected and arrived != 0 and patience > 0:
            arrived = cute.arch.load(ticket, Int32, sem="relaxed", scope="gpu")
            patience -= 1
    cute.arch.sync_warp()
    return patience
