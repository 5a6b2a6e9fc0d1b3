"""Sums of accumulators over the CTAs of a cluster, in a fixed order. The CTAs own the sums in turn.

Every CTA sends its accumulator to the owner's shared memory, where a barrier counts the bytes. The owner adds those of
all CTAs in the order of their ranks, and tells every CTA that its memory is free for the next sum that it owns.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr


class ClusterSum(NamedTuple):
    """A sum for each warp group. `step` counts its sums, from 0."""

    received: cute.Tensor  # (threads, values of a thread, CTAs) fp32
    full: cute.Pointer  # a barrier for each warp group
    empty: cute.Pointer  # a barrier for each warp group and owner

    @staticmethod
    @cute.jit
    def allocate(
        smem, num_ctas: cutlass.Constexpr[int], num_wgs: cutlass.Constexpr[int], values: cutlass.Constexpr[int]
    ):
        """values: of a thread. The cluster must synchronize before the first sum."""
        layout = cute.make_layout((128 * num_wgs, values, num_ctas))
        received = smem.allocate_tensor(Float32, layout, 128)
        barriers = smem.allocate_array(Int64, num_wgs * (1 + num_ctas))
        if cute.arch.thread_idx()[0] == 0:
            for i in cutlass.range_constexpr(num_wgs):
                cute.arch.mbarrier_init(barriers + i, 1)
            for i in cutlass.range_constexpr(num_wgs * num_ctas):
                cute.arch.mbarrier_init(barriers + num_wgs + i, 4)  # a warp group's warps
        return ClusterSum(received, barriers, barriers + num_wgs)


@cute.jit
def send_to_owner(sums: ClusterSum, acc: cute.Tensor, step: Int32, wg: Int32, tid: Int32):
    """Sends a warp group's accumulator to the owner of a step."""
    num_ctas, num_wgs = sums.received.shape[2], sums.received.shape[0] // 128
    owner, turn, rank = step % num_ctas, step // num_ctas, cute.arch.block_idx_in_cluster()
    cute.arch.mbarrier_wait(sums.empty + (owner * num_wgs + wg), (turn + 1) % 2)
    for i in cutlass.range_constexpr(cute.size(acc)):
        to = sums.received[tid, i, None].iterator + rank * sums.received.stride[2]
        cute.arch.store_async_dsmem(to, acc[i].bitcast(Int32), sums.full + wg, owner)


@cute.jit
def received_sum(sums: ClusterSum, acc: cute.Tensor, step: Int32, wg: Int32, tid: Int32):
    """acc = sum over the CTAs, in the owner."""
    num_ctas, num_wgs = sums.received.shape[2], sums.received.shape[0] // 128
    rank, turn = step % num_ctas, step // num_ctas
    if tid % 128 == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(sums.full + wg, 128 * 4 * const_expr(cute.size(acc) * num_ctas))
    cute.arch.mbarrier_wait(sums.full + wg, turn % 2)
    for i in cutlass.range_constexpr(cute.size(acc)):
        acc[i] = sums.received[tid, i, 0]
        for r in cutlass.range_constexpr(1, num_ctas):
            acc[i] = acc[i] + sums.received[tid, i, r]
    cute.arch.sync_warp()
    if tid % 32 < num_ctas:
        # As consumers release stages that TMA fills for several CTAs: without a fence, because the reads are complete.
        cute.arch.mbarrier_arrive(sums.empty + (rank * num_wgs + wg), tid % 32)
