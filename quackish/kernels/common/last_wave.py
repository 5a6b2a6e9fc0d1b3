"""The last wave of a GEMM's tiles, where it has half as many as there are clusters or fewer: cut along k.

`total` tiles make whole waves, a tile a cluster, and a rest. Each tile of the rest is cut into as many even pieces as
there are clusters for, a piece a cluster. Each warp group leaves its piece's sums in scratch, and the one that comes
last to a tile adds them up, in the order of k: nobody waits, and bits depend on sizes alone.

A rest of more tiles stays whole. Cut evenly over all clusters (stream-K), every piece begins elsewhere in k, so nothing
that one cluster loads is in the L2 for another: dX of 128 tiles took 780 us instead of 655 (H200, 4096 x 2048 x 32000).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.experimental import primitives as prims

from quackish.kernels.common.rows import fake_pointer, vector_at

LEAST_STEPS = 4  # along k, of a piece
# Steps that cutting saves: 16 us, which is what adding pieces up takes. (Of 10 tiles in 6 pieces, on an H200, 53 steps
# less should gain 35 us and gained 20.)
LEAST_SAVED = 24


class LastWave:
    def __init__(self, config):
        self.num_wgs, self.ctas = config.num_wgs, config.cluster_m * config.cluster_n
        self.values = config.tile_n // 2  # of a thread: 64 rows of a tile in a warp group's registers

    def fake_args(self):
        return fake_pointer("float32"), fake_pointer("int32", aligned=False)

    def allocate(self, smem):
        return smem.allocate_tensor(Int32, cute.make_layout(self.num_wgs), byte_alignment=16)

    @cute.jit
    def plan(self, total: Int32, k_tiles: Int32, cluster: Int32, clusters: Int32):
        """(end of this cluster's items, the first that is a piece, tiles of the rest, pieces a tile)"""
        waves, rest = total // clusters, total % clusters
        pieces = Int32(1)
        if rest > 0:
            pieces = clusters // rest
        if k_tiles < LEAST_STEPS * pieces or k_tiles - k_tiles // pieces < LEAST_SAVED:
            pieces = Int32(1)
        items = waves + 1 if cluster < rest * pieces else waves
        return items, (waves if pieces > 1 else items), rest, pieces

    @cute.jit
    def item(self, j: Int32, plan: tuple, k_tiles: Int32, cluster: Int32, clusters: Int32):
        """(tile, first step, end of its steps) of this cluster's j-th item; neighbours have the same steps."""
        _, cut_from, rest, pieces = plan
        tile, begin, end = cluster + j * clusters, Int32(0), k_tiles
        if j >= cut_from:
            piece = cluster // rest
            tile = j * clusters + cluster % rest
            begin, end = self.steps(piece, pieces, k_tiles), self.steps(piece + 1, pieces, k_tiles)
        return tile, begin, end

    @cute.jit
    def steps(self, piece: Int32, pieces: Int32, k_tiles: Int32) -> Int32:
        """Where a piece begins: floor(piece * k_tiles / pieces), with no number larger than k_tiles."""
        return piece * (k_tiles // pieces) + piece * (k_tiles % pieces) // pieces

    @cute.jit
    def is_complete(self, acc, args: tuple, sTicket: cute.Tensor, j: Int32, plan: tuple, where: tuple) -> Boolean:
        """Whether acc holds a whole tile's sums, now if not before: of a piece, for whoever comes last to its tile."""
        cluster, cta, wg, thread = where
        (partials, tickets), (_, cut_from, rest, pieces) = args, plan
        complete = Boolean(True)
        if j >= cut_from:
            self.leave(acc, partials, cluster, cta, wg, thread)
            cute.arch.fence_acq_rel_gpu()
            self.barrier(wg)
            tile = cluster % rest
            if thread == 0:
                sTicket[wg - 1] = self.arrive(tickets + ((tile * self.ctas + cta) * self.num_wgs + wg - 1), pieces)
            self.barrier(wg)
            complete = sTicket[wg - 1] == pieces - 1
            if complete:
                cute.arch.fence_acq_rel_gpu()
                acc.fill(0.0)
                for piece in cutlass.range(pieces, unroll=1):
                    self.add(acc, partials, tile + piece * rest, cta, wg, thread)
        return complete

    @cute.jit
    def arrive(self, ticket: cute.Pointer, pieces: Int32) -> Int32:
        """How many came before; the last makes it 0 again."""
        order, scope = prims.MemOrder.ACQ_REL, prims.MemScope.GPU
        limit = Uint32(pieces - 1)
        return Int32(prims.atomicrmw(prims.AtomicOp.INC, ticket.to_llvm_ptr(), limit, mem_order=order, syncscope=scope))

    def barrier(self, wg):
        cute.arch.barrier(barrier_id=wg + 2 * self.num_wgs, number_of_threads=128)

    @cute.jit
    def place(self, cluster: Int32, cta: Int32, wg: Int32, thread: Int32) -> Int64:
        """Where a thread's values of a cluster's piece begin; four at a time, 512 floats apart."""
        return Int64((cluster * self.ctas + cta) * self.num_wgs + wg - 1) * (128 * self.values) + thread * 4

    @cute.jit
    def leave(self, acc, partials: cute.Pointer, cluster: Int32, cta: Int32, wg: Int32, thread: Int32):
        place = self.place(cluster, cta, wg, thread)
        four = cute.make_rmem_tensor((4,), Float32)
        for q in cutlass.range_constexpr(self.values // 4):
            for k in cutlass.range_constexpr(4):
                four[k] = acc[q * 4 + k]
            vector_at(partials, place + q * 512, 4).store(four.load())

    @cute.jit
    def add(self, acc, partials: cute.Pointer, cluster: Int32, cta: Int32, wg: Int32, thread: Int32):
        place = self.place(cluster, cta, wg, thread)
        batch = const_expr(8)  # loads in flight
        raw = cute.make_rmem_tensor((4, batch), Float32)
        for q in cutlass.range_constexpr(self.values // (4 * batch)):
            for b in cutlass.range_constexpr(batch):
                raw[None, b].store(vector_at(partials, place + (q * batch + b) * 512, 4).load())
            for b in cutlass.range_constexpr(batch):
                for k in cutlass.range_constexpr(4):
                    acc[(q * batch + b) * 4 + k] += raw[k, b]
