"""Linear cross entropy: lists the live rows (target != ignore_index) and computes the divisor of "mean".

order = the live rows, ascending, then the ignored rows, ascending; num_live = the number of live rows; tickets = 0;
inv_divisor = 1, 1 / num_items or 1 / (sum of the targets' class weights); 1 if no target is a class.

One CTA. The first pass counts. The second pass rereads the targets from the caches and assigns each row its slot, the
number of live rows before it: those of earlier tiles, earlier warps and lower lanes.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.kernels.memory import load_at, store_at
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import CompactArgs, LceCompactConfig, LceCompactProblem


class LceCompact(RowKernel):
    def __init__(self, problem: LceCompactProblem, config: LceCompactConfig):
        super().__init__(problem, config)
        self.threads, self.batch, self.tile = config.threads, config.batch, config.threads * config.batch

    @cute.jit
    def __call__(self, args: CompactArgs, stream: CUstream):
        args = with_row_state(args)
        self.kernel(args).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(self, args: CompactArgs):
        after_previous()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        sLive = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps), byte_alignment=16)
        sCounted = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps), byte_alignment=16)
        sWeight = smem.allocate_tensor(Float32, cute.make_layout(self.num_warps), byte_alignment=16)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(2 * self.num_warps), byte_alignment=16)
        first_row = warp * (32 * self.batch) + lane  # of this thread in a tile; the next ones are 32 apart
        num_tiles = cute.ceil_div(args.m, self.tile)

        for ticket in cutlass.range_constexpr(0, NUM_TICKETS, self.threads):
            if ticket + tid < NUM_TICKETS:
                store_at(args.state.tickets, ticket + tid, Int32(0))

        # count live rows and rows whose target is a class, and sum the class weights of the latter
        live, counted, weight = Int32(0), Int32(0), Float32(0.0)
        rW = cute.make_rmem_tensor((self.batch,), Float32)
        for tile in cutlass.range(num_tiles, unroll=1):
            rT = self.targets(args, tile * self.tile + first_row)
            if const_expr(args.class_weight is not None):
                for k in cutlass.range_constexpr(self.batch):
                    index = rT[k] if rT[k] >= 0 and rT[k] < args.v else Int64(0)
                    rW[k] = load_at(args.class_weight, index).to(Float32)
            for k in cutlass.range_constexpr(self.batch):
                if rT[k] != args.ignore_index:
                    live += 1
                    if rT[k] >= 0 and rT[k] < args.v:
                        counted += 1
                        if const_expr(args.class_weight is not None):
                            weight += rW[k]
        live, counted = cute.arch.warp_redux_sync(live, "add"), cute.arch.warp_redux_sync(counted, "add")
        weight = cute.arch.warp_reduction_sum(weight)
        if lane == 0:
            sLive[warp], sCounted[warp], sWeight[warp] = live, counted, weight
        cute.arch.sync_threads()
        live = cute.arch.warp_redux_sync(sLive[lane], "add")
        counted = cute.arch.warp_redux_sync(sCounted[lane], "add")
        weight = cute.arch.warp_reduction_sum(sWeight[lane])

        if tid == 0:
            store_at(args.state.num_live, 0, live)
            inverse = Float32(1.0)
            if counted > 0:
                if const_expr(self.problem.divisor == "weights"):
                    divisor = weight if const_expr(args.class_weight is not None) else counted.to(Float32)
                    inverse = Float32(1.0) / divisor
                elif const_expr(self.problem.divisor == "float"):
                    inverse = Float32(1.0) / args.num_items
                elif const_expr(self.problem.divisor == "tensor"):
                    inverse = Float32(1.0) / load_at(args.num_items_at, 0)
            store_at(args.state.inv_divisor, 0, inverse)

        # assign slots
        before = Int32(0)  # live rows of earlier tiles
        rMask = cute.make_rmem_tensor((self.batch,), Int32)
        for tile in cutlass.range(num_tiles, unroll=1):
            row = tile * self.tile + first_row
            rT = self.targets(args, row)
            live_in_warp = Int32(0)
            for k in cutlass.range_constexpr(self.batch):
                rMask[k] = cute.arch.vote_ballot_sync(rT[k] != args.ignore_index)
                live_in_warp += cute.arch.popc(rMask[k])
            buffer = (tile % 2) * self.num_warps  # two buffers, so that one barrier per tile is enough
            if lane == 0:
                sTile[buffer + warp] = live_in_warp
            cute.arch.sync_threads()
            live_in_warp = sTile[buffer + lane]  # of warp `lane`
            slot0 = before + cute.arch.warp_redux_sync(live_in_warp if lane < warp else Int32(0), "add")
            before += cute.arch.warp_redux_sync(live_in_warp, "add")
            for k in cutlass.range_constexpr(self.batch):
                i = row + 32 * k
                slot = slot0 + cute.arch.popc(rMask[k] & Int32(cute.arch.lanemask_lt()))  # live rows before row i
                slot0 += cute.arch.popc(rMask[k])
                if i < args.m:
                    store_at(args.state.order, slot if rT[k] != args.ignore_index else live + i - slot, i)

    @cute.jit
    def targets(self, args: CompactArgs, row: Int32) -> cute.Tensor:
        """The targets of rows `row`, `row + 32`, ...; ignore_index past the last row."""
        rT = cute.make_rmem_tensor((self.batch,), Int64)
        rT.fill(args.ignore_index)
        for k in cutlass.range_constexpr(self.batch):
            if row + 32 * k < args.m:
                rT[k] = load_at(args.target, row + 32 * k).to(Int64)
        return rT
