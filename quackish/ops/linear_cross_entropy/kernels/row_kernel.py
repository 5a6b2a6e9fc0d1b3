"""Shared by linear cross entropy's kernels around the GEMMs: the base class, and access to the RowState."""

import cutlass
import cutlass.cute as cute
from cutlass import AddressSpace, Int32, Int64

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.ops.linear_cross_entropy.row_problems import ROW_TILE
from quackish.ops.linear_cross_entropy.row_state import DESCRIPTIONS, Part, RowStateParts, parts_at


class RowKernel:
    """Base class of the kernels around the GEMMs. A problem has `args`, a config has `threads`."""

    def __init__(self, problem, config):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        return fake_args(self.problem)

    def launch_options(self, num_ctas, stream, smem_carveout: int = 10):
        """At most 64 registers per thread; starts before the previous kernel ends, see `after_previous`."""
        threads = self.config.threads
        return dict(
            grid=[num_ctas, 1, 1], block=[threads, 1, 1], min_blocks_per_mp=65_536 // (threads * 64),
            preferred_smem_carveout=smem_carveout, stream=stream, use_pdl=True,
        )  # fmt: skip


@cute.jit
def rounded_up(live: Int32) -> Int32:
    """`live` rounded up to whole GEMM tiles."""
    return (cutlass.max(live, 0) + (ROW_TILE - 1)) // ROW_TILE * ROW_TILE


def with_row_state(args, start=0):
    """`args` with pointers to the parts of the RowState in place of its address. Called on the host.

    start: the first slot of the chunk.
    """
    addresses = parts_at(args.state.toint(), Int64(args.m))

    def pointer(part: Part, address: Int64) -> cute.Pointer:
        address += 4 * Int64(start) if part.by_slot else 0
        return cute.make_ptr(DTYPES[part.dtype], address, AddressSpace.gmem, assumed_align=4)

    return args._replace(state=RowStateParts(*map(pointer, DESCRIPTIONS, addresses)))
