"""The last wave of a GEMM's tiles, cut along k where it would leave clusters idle.

`total` tiles make whole waves, a tile a cluster, and a rest. Each tile of the rest is cut into even pieces: as many as
there are clusters for, a piece a cluster; or a few more, in several rounds, if that leaves fewer clusters idle (of 66
clusters 16 have none of 50 whole tiles; in 5 pieces each these take 4 rounds of a fifth of a tile). Each warp group
leaves its piece's sums in scratch, and the one that comes last to a tile adds them up, in the order of k: nobody waits,
and bits depend on sizes alone, those of all rows and of the live ones.

All tiles are cut at the same places, and all first pieces come first: clusters find in the L2 what others have loaded.
Cut evenly over all clusters instead (stream-K), every piece begins elsewhere in k: dX of 128 tiles took 780 us, 655
whole (H200, 4096 x 2048 x 32000).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, const_expr
from cutlass.experimental import primitives as prims

from quackish.configs.gemm import LEAST_STEPS, MOST_PIECES, WORTH_ROUNDS, steps_of_pieces
from quackish.kernels.common.rows import fake_pointer, vector_at


class LastWave:
    def __init__(self, config):
        self.num_wgs, self.ctas = config.num_wgs, config.cluster_m * config.cluster_n
        self.values = config.tile_n // 2  # of a thread: 64 rows of a tile in a warp group's registers

    def fake_args(self):
        return fake_pointer("float32"), fake_pointer("int32", aligned=False), Int32(1)

    def allocate(self, smem):
        return smem.allocate_tensor(Int32, cute.make_layout(self.num_wgs), byte_alignment=16)

    @cute.jit
    def plan(self, args: tuple, total: Int32, k_tiles: Int32, cluster: Int32, clusters: Int32):
        """(end of this cluster's items, the first that is a piece, tiles of the rest, pieces a tile)"""
        waves, rest = total // clusters, total % clusters
        pieces, steps = Int32(1), k_tiles
        if rest > 0:
            # as configs.gemm.last_wave_pieces, of the rows that are live
            n = clusters // rest
            if k_tiles >= LEAST_STEPS * n and steps_of_pieces(n, rest, k_tiles, clusters) < steps:
                pieces, steps = n, steps_of_pieces(n, rest, k_tiles, clusters)
            for n in cutlass.range_constexpr(2, MOST_PIECES + 1):
                if n * rest <= args[2] and steps_of_pieces(n, rest, k_tiles, clusters) + WORTH_ROUNDS <= steps:
                    pieces, steps = Int32(n), steps_of_pieces(n, rest, k_tiles, clusters)
        items = waves + (rest * pieces - cluster + clusters - 1) // clusters
        return items, (waves if pieces > 1 else items), rest, pieces

    @cute.jit
    def item(self, j: Int32, plan: tuple, k_tiles: Int32, cluster: Int32, clusters: Int32):
        """(tile, first step, end of its steps) of this cluster's j-th item; neighbours have the same steps."""
        _, cut_from, rest, pieces = plan
        tile, begin, end = cluster + j * clusters, Int32(0), k_tiles
        if j >= cut_from:
            q = (j - cut_from) * clusters + cluster
            piece = q // rest
            tile = cut_from * clusters + q % rest
            begin, end = self.steps(piece, pieces, k_tiles), self.steps(piece + 1, pieces, k_tiles)
        return tile, begin, end

    @cute.jit
    def steps(self, piece: Int32, pieces: Int32, k_tiles: Int32) -> Int32:
        """Where a piece begins: floor(piece * k_tiles / pieces), with no number larger than k_tiles."""
        return piece * (k_tiles // pieces) + piece * (k_tiles % pieces) // pieces

    @cute.jit
    def is_complete(self, acc, args: tuple, sTicket: cute.Tensor, j: Int32, plan: tuple, where: tuple) -> Boolean:
        """Whether acc holds a whole tile's sums, now if not before: of a piece, for whoever comes last to its tile."""
        cluster, clusters, cta, wg, thread = where
        (partials, tickets, _), (_, cut_from, rest, pieces) = args, plan
        complete = Boolean(True)
        if j >= cut_from:
            q = (j - cut_from) * clusters + cluster
            self.leave(acc, partials, q, cta, wg, thread)
            cute.arch.fence_acq_rel_gpu()
            self.barrier(wg)
            tile = q % rest
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
    def place(self, q: Int32, cta: Int32, wg: Int32, thread: Int32) -> Int64:
        """Where a thread's values of the q-th piece begin; four at a time, 512 floats apart."""
        return Int64((q * self.ctas + cta) * self.num_wgs + wg - 1) * (128 * self.values) + thread * 4

    @cute.jit
    def leave(self, acc, partials: cute.Pointer, q: Int32, cta: Int32, wg: Int32, thread: Int32):
        place = self.place(q, cta, wg, thread)
        four = cute.make_rmem_tensor((4,), Float32)
        for q in cutlass.range_constexpr(self.values // 4):
            for k in cutlass.range_constexpr(4):
                four[k] = acc[q * 4 + k]
            vector_at(partials, place + q * 512, 4).store(four.load())

    @cute.jit
    def add(self, acc, partials: cute.Pointer, q: Int32, cta: Int32, wg: Int32, thread: Int32):
        place = self.place(q, cta, wg, thread)
        batch = const_expr(8)  # loads in flight
        raw = cute.make_rmem_tensor((4, batch), Float32)
        for q in cutlass.range_constexpr(self.values // (4 * batch)):
            for b in cutlass.range_constexpr(batch):
                raw[None, b].store(vector_at(partials, place + (q * batch + b) * 512, 4).load())
            for b in cutlass.range_constexpr(batch):
                for k in cutlass.range_constexpr(4):
                    acc[(q * batch + b) * 4 + k] += raw[k, b]
