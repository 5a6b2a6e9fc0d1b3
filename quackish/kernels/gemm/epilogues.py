"""The device code of GEMM epilogues, which consume the fp32 accumulator of a tile."""

import cutlass.cute as cute
from cutlass import Int32, const_expr

from quackish.kernels.gemm.slice_store import SliceStore
from quackish.kernels.gemm.tile_store import Output, RowBlock, Staging


class Epilogue:
    """An epilogue on one GPU family. `args` is the NamedTuple in the kernel's `args.epilogue`.

    Methods in the order of their calls:
    - `store_atom`: on the host if `stores_by_tma`, for each buffer of D.
    - `allocate`: once per CTA.
    - `num_tiles`, once per warp role, and `is_selected`, per tile: which tiles are computed (not in grouped GEMMs).
    - `prepare`: before each mainloop, per block. Starts the loads of what it returns, which overlap with the mainloop.
    - `__call__`: after the mainloop, per block, by all threads of the warp group, with the result of `prepare`. The
      accumulator is in registers on Hopper, which it may overwrite, and an `Accumulator` of umma.py on Blackwell. With
      split-K, only the last split to arrive at a tile calls it.
    - `finish`: once per consumer thread, before the CTA exits.

    A new epilogue is an `EpilogueSpec` beside the operation's problems, which has its options and its arguments, a
    subclass of this class with `__call__` for each GPU family, and a line in `epilogues` of each of the operation's
    kernel classes.
    """

    def __init__(self, problem, config, output: Staging | SliceStore | None):
        self.problem, self.spec, self.config, self.output = problem, problem.epilogue, config, output
        self.stores_by_tma = problem.out_dtype is not None and self.spec.stores_by_tma

    def store_atom(self, mD: cute.Tensor) -> tuple:
        """(TMA atom, tensor of coordinates) that stores to D."""
        return self.output.store_atom(mD)

    def allocate(self, smem):
        """Shared memory for the output."""
        return self.output.allocate(smem) if self.output is not None else None

    def num_tiles(self, args, total: Int32) -> Int32:
        """How many of `total` cluster tiles to visit: all or none."""
        return total

    def is_selected(self, args, tm: Int32, m: Int32) -> bool:
        """Whether to compute the cluster tiles whose first row is tm * tile_m * cluster_m."""
        return True

    def prepare(self, args, out: Output, block: RowBlock):
        return None

    @cute.jit
    def __call__(self, acc: cute.Tensor, prefetched, args, out: Output, block: RowBlock):
        raise NotImplementedError

    @cute.jit
    def finish(self, thread: Int32):
        if const_expr(self.output is not None):
            self.output.finish(thread)
