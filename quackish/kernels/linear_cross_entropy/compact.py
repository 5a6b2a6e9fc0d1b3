"""Linear cross entropy: which rows are live, and the divisor of `mean`.

order = the numbers of the live rows (target != ignore_index), ascending, then of the others, ascending; tickets = 0;
inv_divisor = 1 / (sum of the class weights of the rows that have a class, or num_items), 1 where no row has one.

One CTA. First it counts, then it reads the targets again, now from the caches, and gives every row its place: the live
rows before it are those of earlier tiles, of earlier warps, and of lower lanes.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.gemm import NUM_TICKETS
from quackish.configs.lce_rows import LceCompactConfig, LceCompactProblem
from quackish.kernels.common.lce import after_previous, fake_count, fake_target, load_at, store_at
from quackish.kernels.common.rows import fake_pointer


class LceCompact:
    def __init__(self, problem: LceCompactProblem, config: LceCompactConfig):
        self.problem, self.each = problem, config.each
        self.threads, self.num_warps = config.threads, config.threads // 32
        self.tile = config.threads * config.each

    def fake_args(self):
        p = self.problem
        class_weight = fake_pointer(p.class_weight_dtype, aligned=False)
        num_items = fake_pointer("float32", aligned=False) if p.divisor == "tensor" else None
        int32 = fake_pointer("int32", aligned=False)
        outputs = int32, fake_pointer("float32", aligned=False), int32
        stream = cute.runtime.make_fake_stream()
        numbers = Float32(1), Int64(0), Int32(1), Int32(1)
        return (fake_target(p.target_dtype), class_weight, num_items, *outputs, fake_count(), *numbers, stream)

    @cute.jit
    def __call__(
        self,
        target: cute.Pointer,  # (m,)
        class_weight: Optional[cute.Pointer],  # (v,)
        num_items_at: Optional[cute.Pointer],  # 0-dim fp32
        order: cute.Pointer,  # (m,) int32
        inv_divisor: cute.Pointer,  # (1,) fp32
        tickets: cute.Pointer,  # (NUM_TICKETS,) int32
        num_live: cute.Pointer,  # (1,) int32
        num_items: Float32,
        ignore_index: Int64,
        v: Int32,
        m: Int32,
        stream: CUstream,
    ):
        self.kernel(
            target, class_weight, num_items_at, order, inv_divisor, tickets, num_live, num_items, ignore_index, v, m
        ).launch(grid=[1, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True)

    @cute.kernel
    def kernel(
        self,
        target: cute.Pointer,
        class_weight: Optional[cute.Pointer],
        num_items_at: Optional[cute.Pointer],
        order: cute.Pointer,
        inv_divisor: cute.Pointer,
        tickets: cute.Pointer,
        num_live: cute.Pointer,
        num_items: Float32,
        ignore_index: Int64,
        v: Int32,
        m: Int32,
    ):
        after_previous()
        tid, _, _ = cute.arch.thread_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        sLive = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps), byte_alignment=16)
        sCounted = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps), byte_alignment=16)
        sWeight = smem.allocate_tensor(Float32, cute.make_layout(self.num_warps), byte_alignment=16)
        sTile = smem.allocate_tensor(Int32, cute.make_layout(2 * self.num_warps), byte_alignment=16)
        mine = warp * (32 * self.each) + lane  # of a tile: this thread's first row, the others 32 apart
        num_tiles = cute.ceil_div(m, self.tile)

        for first in cutlass.range_constexpr(0, NUM_TICKETS, self.threads):
            if first + tid < NUM_TICKETS:
                store_at(tickets, first + tid, Int32(0))

        # count: live rows, rows that have a class, the sum of their class weights
        live, counted, weight = Int32(0), Int32(0), Float32(0.0)
        rW = cute.make_rmem_tensor((self.each,), Float32)
        for tile in cutlass.range(num_tiles, unroll=1):
            rT = self.targets(target, tile * self.tile + mine, m, ignore_index)
            if const_expr(class_weight is not None):
                for k in cutlass.range_constexpr(self.each):
                    index = rT[k] if rT[k] >= 0 and rT[k] < v else Int64(0)
                    rW[k] = load_at(class_weight, index).to(Float32)
            for k in cutlass.range_constexpr(self.each):
                if rT[k] != ignore_index:
                    live += 1
                    if rT[k] >= 0 and rT[k] < v:
                        counted += 1
                        if const_expr(class_weight is not None):
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
            store_at(num_live, 0, live)
            inverse = Float32(1.0)
            if counted > 0:
                if const_expr(self.problem.divisor == "weights"):
                    inverse = Float32(1.0) / (weight if const_expr(class_weight is not None) else counted.to(Float32))
                elif const_expr(self.problem.divisor == "float"):
                    inverse = Float32(1.0) / num_items
                elif const_expr(self.problem.divisor == "tensor"):
                    inverse = Float32(1.0) / load_at(num_items_at, 0)
            store_at(inv_divisor, 0, inverse)

        # order
        before = Int32(0)  # live rows of earlier tiles
        rMask = cute.make_rmem_tensor((self.each,), Int32)
        for tile in cutlass.range(num_tiles, unroll=1):
            row = tile * self.tile + mine
            rT = self.targets(target, row, m, ignore_index)
            in_warp = Int32(0)
            for k in cutlass.range_constexpr(self.each):
                rMask[k] = cute.arch.vote_ballot_sync(rT[k] != ignore_index)
                in_warp += cute.arch.popc(rMask[k])
            slots = (tile % 2) * self.num_warps  # two, so that one barrier a tile is enough
            if lane == 0:
                sTile[slots + warp] = in_warp
            cute.arch.sync_threads()
            in_lane = sTile[slots + lane]
            at = before + cute.arch.warp_redux_sync(in_lane if lane < warp else Int32(0), "add")
            before += cute.arch.warp_redux_sync(in_lane, "add")
            for k in cutlass.range_constexpr(self.each):
                here = row + 32 * k
                rank = at + cute.arch.popc(rMask[k] & Int32(cute.arch.lanemask_lt()))  # live rows before this one
                at += cute.arch.popc(rMask[k])
                if here < m:
                    store_at(order, rank if rT[k] != ignore_index else live + here - rank, here)

    @cute.jit
    def targets(self, target: cute.Pointer, row: Int32, m: Int32, ignore_index: Int64) -> cute.Tensor:
        """Of rows row, row + 32, ...; ignore_index past the last one."""
        rT = cute.make_rmem_tensor((self.each,), Int64)
        rT.fill(ignore_index)
        for k in cutlass.range_constexpr(self.each):
            if row + 32 * k < m:
                rT[k] = load_at(target, row + 32 * k).to(Int64)
        return rT
