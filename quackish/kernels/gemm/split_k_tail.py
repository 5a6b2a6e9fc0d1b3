"""Split-K for the tail of a GEMM: the tiles of a partly filled last wave, which would leave clusters idle.

All tail tiles are divided into the same number of splits along k. The splits take one round, with a cluster for each,
or several rounds: 50 tail tiles on 66 clusters leave 16 idle, while 5 splits each take 4 rounds of a fifth of a tile.
Each warp group writes the sums of its split to scratch. The last one to arrive at a tile adds the sums in the order of
k. So no warp group waits for another, and the bits depend only on the sizes and the number of live rows.

All tiles are split at the same positions, and clusters work on the same split of different tiles, so they share loads
through the L2. Stream-K, where each split starts at a different k, was slower: dX at 4096 x 2048 x 32000 took 780 us,
and 655 unsplit (H200).
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.experimental import primitives as prims

from quackish.kernels.gemm.problem import TailArgs
from quackish.kernels.gemm.sm90_config import MAX_SPLITS, MIN_GAIN, MIN_STEPS, steps_of_splits
from quackish.kernels.gemm.tile_store import NamedBarrier
from quackish.kernels.memory import vector_at


class TailPlan(NamedTuple):
    """A cluster's work items: tiles before item `first_split`, splits of tail tiles from there on."""

    items: Int32
    first_split: Int32
    tail: Int32  # tiles
    splits: Int32  # per tail tile


class SplitKTail:
    def __init__(self, config):
        self.num_wgs, self.ctas = config.num_wgs, config.cluster_m * config.cluster_n
        self.values = config.tile_n // 2  # accumulator values per thread: a warp group has BLOCK_M rows of a tile

    def allocate(self, smem):
        return smem.allocate_tensor(Int32, cute.make_layout(self.num_wgs), byte_alignment=16)

    @cute.jit
    def plan(self, args: TailArgs, total: Int32, k_tiles: Int32, cluster: Int32, clusters: Int32) -> TailPlan:
        waves, tail = total // clusters, total % clusters
        splits, steps = Int32(1), k_tiles
        if tail > 0:
            # same as sm90_config.num_tail_splits, but for the live rows
            n = clusters // tail
            if k_tiles >= MIN_STEPS * n and steps_of_splits(n, tail, k_tiles, clusters) < steps:
                splits, steps = n, steps_of_splits(n, tail, k_tiles, clusters)
            for n in cutlass.range_constexpr(2, MAX_SPLITS + 1):
                if n * tail <= args.max_splits and steps_of_splits(n, tail, k_tiles, clusters) + MIN_GAIN <= steps:
                    splits, steps = Int32(n), steps_of_splits(n, tail, k_tiles, clusters)
        items = waves + (tail * splits - cluster + clusters - 1) // clusters
        return TailPlan(items, waves if splits > 1 else items, tail, splits)

    @cute.jit
    def item(self, j: Int32, plan: TailPlan, k_tiles: Int32, cluster: Int32, clusters: Int32):
        """(tile, first step, end of the steps) of this cluster's j-th item. Neighbor clusters have the same steps."""
        tile, begin, end = cluster + j * clusters, Int32(0), k_tiles
        if j >= plan.first_split:
            q = (j - plan.first_split) * clusters + cluster
            split = q // plan.tail
            tile = plan.first_split * clusters + q % plan.tail
            begin, end = self.first_step(split, plan.splits, k_tiles), self.first_step(split + 1, plan.splits, k_tiles)
        return tile, begin, end

    @cute.jit
    def first_step(self, split: Int32, splits: Int32, k_tiles: Int32) -> Int32:
        """floor(split * k_tiles / splits) without overflow."""
        return split * (k_tiles // splits) + split * (k_tiles % splits) // splits

    @cute.jit
    def is_complete(
        self, acc, args: TailArgs, sTicket: cute.Tensor, j: Int32, plan: TailPlan, cluster: Int32, clusters: Int32,
        cta: Int32, wg: Int32, thread: Int32
    ) -> Boolean:  # fmt: skip
        """Whether acc holds a complete tile. The last split to arrive at a tile adds up the sums of all splits."""
        complete = Boolean(True)
        if j >= plan.first_split:
            q = (j - plan.first_split) * clusters + cluster
            self.store_partial(acc, args.partials, q, cta, wg, thread)
            cute.arch.fence_acq_rel_gpu()
            self.barrier(wg)
            tile = q % plan.tail
            if thread == 0:
                ticket = args.tickets + ((tile * self.ctas + cta) * self.num_wgs + wg - 1)
                sTicket[wg - 1] = self.arrive(ticket, plan.splits)
            self.barrier(wg)
            complete = sTicket[wg - 1] == plan.splits - 1
            if complete:
                cute.arch.fence_acq_rel_gpu()
                acc.fill(0.0)
                for split in cutlass.range(plan.splits, unroll=1):
                    self.add_partial(acc, args.partials, tile + split * plan.tail, cta, wg, thread)
        return complete

    @cute.jit
    def arrive(self, ticket: cute.Pointer, splits: Int32) -> Int32:
        """The number of earlier arrivals. The last arrival resets the ticket to 0."""
        order, scope = prims.MemOrder.ACQ_REL, prims.MemScope.GPU
        limit = Uint32(splits - 1)
        return Int32(prims.atomicrmw(prims.AtomicOp.INC, ticket.to_llvm_ptr(), limit, mem_order=order, syncscope=scope))

    def barrier(self, wg):
        cute.arch.barrier(barrier_id=NamedBarrier.TAIL.of(wg, self.num_wgs), number_of_threads=128)

    @cute.jit
    def offset(self, q: Int32, cta: Int32, wg: Int32, thread: Int32) -> Int64:
        """Offset of a thread's first four values of the q-th split. Its next four are 512 floats further on."""
        return Int64((q * self.ctas + cta) * self.num_wgs + wg - 1) * (128 * self.values) + thread * 4

    @cute.jit
    def store_partial(self, acc, partials: cute.Pointer, q: Int32, cta: Int32, wg: Int32, thread: Int32):
        offset = self.offset(q, cta, wg, thread)
        four = cute.make_rmem_tensor((4,), Float32)
        for i in cutlass.range_constexpr(self.values // 4):
            for k in cutlass.range_constexpr(4):
                four[k] = acc[i * 4 + k]
            vector_at(partials, offset + i * 512, 4).store(four.load())

    @cute.jit
    def add_partial(self, acc, partials: cute.Pointer, q: Int32, cta: Int32, wg: Int32, thread: Int32):
        offset = self.offset(q, cta, wg, thread)
        batch = const_expr(8)  # loads in flight
        raw = cute.make_rmem_tensor((4, batch), Float32)
        for i in cutlass.range_constexpr(self.values // (4 * batch)):
            for b in cutlass.range_constexpr(batch):
                raw[None, b].store(vector_at(partials, offset + (i * batch + b) * 512, 4).load())
            for b in cutlass.range_constexpr(batch):
                for k in cutlass.range_constexpr(4):
                    acc[(i * batch + b) * 4 + k] += raw[k, b]
