"""Hopper GEMM, persistent and warp-specialized: D[m, n] = sum over k of A[m, k] * B[n, k], by TMA and WGMMA.

A producer warp loads tiles of A and B, `num_stages` deep, multicast within the cluster. Consumer warp groups multiply
and pass their fp32 accumulator to an epilogue (`epilogues.py`). Cooperative: the warp groups share a tile, 64 rows
each. Ping-pong: two warp groups have a tile each, and one runs its products during the other's epilogue.
The number of live rows, `num_live - start` along m or k, is read on the device.
"""

import dataclasses
from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as sm90

from quackish.configs.gemm import PRODUCER_REGISTERS, TILE_K, GemmConfig, GemmProblem
from quackish.kernels.common.epilogues import make_epilogue
from quackish.kernels.common.lce import after_previous, load_at
from quackish.kernels.common.rows import DTYPES, fake_pointer
from quackish.kernels.common.split_k_tail import Plan, SplitKTail
from quackish.kernels.common.wave_sync import spin_limit, tiles_to_sync, wave_sync


@cute.jit
def matrix(base: cute.Pointer, rows: Int32, cols: Int32, ld: Int64, cols_contiguous: cutlass.Constexpr[bool]):
    """A (rows, cols) tensor with leading dimension `ld`, a multiple of 8."""
    if const_expr(cols_contiguous):
        return cute.make_tensor(base, cute.make_layout((rows, cols), stride=(cute.assume(ld, divby=8), 1)))
    return cute.make_tensor(base, cute.make_layout((rows, cols), stride=(1, cute.assume(ld, divby=8))))


class GemmSm90:
    def __init__(self, problem: GemmProblem, config: GemmConfig):
        if problem.redo:
            config = dataclasses.replace(config, pingpong=False)
        self.problem, self.config = problem, config
        self.dtype = DTYPES[problem.dtype]
        self.epilogue = make_epilogue(problem, config)
        self.tail = SplitKTail(config) if problem.split_k_tail else None
        self.tile = (config.tile_m, config.tile_n, TILE_K)
        self.cluster = (config.cluster_m, config.cluster_n)

    def fake_args(self):
        p = self.problem
        a, b = fake_pointer(p.dtype), fake_pointer(p.dtype)
        second = fake_pointer(p.dtype if p.split_k else p.out_dtype if p.split_n else None)
        num_live = fake_pointer("int32", aligned=False)
        sizes = (Int32(1), Int32(1), Int32(1), Int32(1), Int32(1))
        strides = (Int64(1), Int64(1), Int64(1), Int64(1))
        stream = cute.runtime.make_fake_stream()
        return (
            a,
            second,
            b,
            fake_pointer(p.out_dtype),
            self.epilogue.fake_args(),
            self.tail.fake_args() if p.split_k_tail else None,
            None if p.redo else fake_pointer("int32", aligned=False),
            num_live,
            sizes,
            strides,
            Int32(1),
            stream,
        )

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,  # (m, k)
        second: Optional[cute.Pointer],  # columns from `split` on: of A with split_k, of D with split_n
        b: cute.Pointer,  # (n, k)
        d: Optional[cute.Pointer],  # (m, n)
        epilogue_args: Optional[tuple],
        tail_args: Optional[tuple],  # of SplitKTail
        ticket: Optional[cute.Pointer],  # (1,) of wave_sync: 0 before and after
        num_live: cute.Pointer,  # (1,)
        sizes: tuple,  # m, n, k, split, start
        strides: tuple,  # of a, second, b, d
        max_clusters: Int32,
        stream: CUstream,
    ):
        p, c = self.problem, self.config
        m, n, k, split, _ = sizes
        mA = matrix(a, m, split if p.split_k else k, strides[0], p.a_major == "k")
        mB = matrix(b, n, k, strides[2], p.b_major == "k")
        la, lb = LayoutEnum.from_tensor(mA), LayoutEnum.from_tensor(mB)
        sA_layout = sm90.make_smem_layout_a(la, self.tile, self.dtype, c.num_stages)
        sB_layout = sm90.make_smem_layout_b(lb, self.tile, self.dtype, c.num_stages)
        tiled_mmas = []
        for accumulate in (False, True):
            mma = sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, la.sm90_mma_major_mode(), lb.sm90_mma_major_mode(), Float32,
                (1 if c.pingpong else c.num_wgs, 1, 1), tiler_mn=(64, c.tile_n),
            )  # fmt: skip
            mma.set(warpgroup.Field.ACCUMULATE, accumulate)
            tiled_mmas.append(mma)
        a_atoms = [self.load_atom(mA, sA_layout, (c.tile_m, TILE_K), c.cluster_n)]
        if const_expr(p.split_k):
            mA2 = matrix(second, m, k - split, strides[1], p.a_major == "k")
            a_atoms.append(self.load_atom(mA2, sA_layout, (c.tile_m, TILE_K), c.cluster_n))
        b_atom = self.load_atom(mB, sB_layout, (c.tile_n, TILE_K), c.cluster_m)
        d_atoms = []
        if const_expr(self.epilogue.stages_output):
            d_atoms.append(self.epilogue.store_atom(matrix(d, m, split if p.split_n else n, strides[3], True)))
            if const_expr(p.split_n):
                d_atoms.append(self.epilogue.store_atom(matrix(second, m, n - split, strides[1], True)))
        tiles = cute.ceil_div(m, c.tile_m * c.cluster_m) * cute.ceil_div(n, c.tile_n * c.cluster_n)
        clusters = max_clusters if p.split_k_tail else cutlass.min(tiles, max_clusters)
        self.kernel(
            a_atoms,
            b_atom,
            d_atoms,
            d,
            epilogue_args,
            tail_args,
            ticket,
            num_live,
            sizes,
            strides[3],
            tiled_mmas,
            sA_layout,
            sB_layout,
        ).launch(
            grid=[c.cluster_m, c.cluster_n, clusters],
            block=[c.threads, 1, 1],
            cluster=[c.cluster_m, c.cluster_n, 1],
            min_blocks_per_mp=1,
            stream=stream,
            use_pdl=True,
        )

    def load_atom(self, tensor, smem_layout, tile, num_multicast):
        """(TMA atom, tensor of coordinates) that loads one stage's tile into `num_multicast` CTAs."""
        shared = num_multicast > 1
        op = cpasync.CopyBulkTensorTileG2SMulticastOp() if shared else cpasync.CopyBulkTensorTileG2SOp()
        stage = cute.slice_(smem_layout, (None, None, 0))
        atom, coordinates = cpasync.make_tiled_tma_atom(op, tensor, stage, tile, num_multicast=num_multicast)
        return atom, coordinates

    @cute.jit
    def cluster_tile(self, index: Int32, tiles_m: Int32, tiles_n: Int32):
        """(m, n) of the index-th cluster tile, in cluster tiles."""
        along_m = const_expr(self.config.group_along == "m")
        inner, outer = (tiles_m, tiles_n) if along_m else (tiles_n, tiles_m)
        group = index // (self.config.group * outer)
        first = group * self.config.group
        width = cutlass.min(inner - first, self.config.group)
        index -= first * outer
        i, o = first + index % width, index // width
        return (i, o) if along_m else (o, i)

    @cute.kernel
    def kernel(
        self,
        a_atoms: list,
        b_atom: tuple,
        d_atoms: list,
        d: Optional[cute.Pointer],
        epilogue_args: Optional[tuple],
        tail_args: Optional[tuple],
        ticket: Optional[cute.Pointer],
        num_live: cute.Pointer,
        sizes: tuple,
        ldd: Int64,
        tiled_mmas: list,  # one overwrites the accumulator, one adds to it
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        p, c = self.problem, self.config
        tile_m, tile_n, tile_k = self.tile
        m, n, k, split, start = sizes
        tid, _, _ = cute.arch.thread_idx()
        cta_m, cta_n, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tid // 128)

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        staging = self.epilogue.allocate(smem)
        sTicket = self.tail.allocate(smem) if const_expr(p.split_k_tail) else None
        cta_layout = cute.make_layout((1, c.cluster_m, c.cluster_n, 1))
        stage_bytes = (tile_m + tile_n) * tile_k * self.dtype.width // 8
        readers = 1 if c.pingpong else c.num_wgs  # warp groups that read a stage
        arrivals = (c.cluster_m + c.cluster_n - 1) * 4 * readers  # one per warp and CTA that shares a multicast
        loaded = pipeline.PipelineTmaAsync.create(
            num_stages=c.num_stages,
            tx_count=stage_bytes,
            cta_layout_vmnk=cta_layout,
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals),
            defer_sync=True,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        after_previous()
        # problem size: live rows, tiles, steps along k
        live = cutlass.max(cutlass.min(load_at(num_live, 0) - start, m if const_expr(p.live == "m") else k), 0)
        live = cute.arch.make_warp_uniform(live)
        tiles_m = cute.ceil_div(live if const_expr(p.live == "m") else m, tile_m * c.cluster_m)
        tiles_n = cute.ceil_div(n, tile_n * c.cluster_n)
        # At least 1: a branch around the WGMMAs costs 50 registers. With no live rows, multiply an out-of-bounds tile:
        # TMA fills zeros.
        k_tiles = cutlass.max(cute.ceil_div(live if const_expr(p.live == "k") else k, tile_k), 1)
        out_of_bounds = Int32(0)
        if const_expr(p.live == "k"):
            if live == 0:
                out_of_bounds = cute.ceil_div(k, tile_k)
        total = tiles_m * tiles_n
        if const_expr(p.redo):
            total = self.epilogue.tiles_to_redo(epilogue_args, total)
        # this cluster's items: tiles, the last of which may be splits of tiles
        first, last, step = cluster, total, num_clusters
        plan, whole = None, total
        if const_expr(p.split_k_tail):
            plan = self.tail.plan(tail_args, total, k_tiles, cluster, num_clusters)
            first, last, step = Int32(0), plan.items, Int32(1)
            if plan.splits > 1:
                whole = total - plan.tail
        synced = tiles_to_sync(whole, k_tiles, num_clusters)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if wg == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
                _, rank_m, rank_n, _ = cta_layout.get_flat_coord(rank)
                at = (0, rank_m, rank_n, 0)
                mask_a = cpasync.create_tma_multicast_mask(cta_layout, at, 2) if const_expr(c.cluster_n > 1) else None
                mask_b = cpasync.create_tma_multicast_mask(cta_layout, at, 1) if const_expr(c.cluster_m > 1) else None
                parts = [self.partition(atom, sA, (tile_m, tile_k), rank_n, c.cluster_n) for atom in a_atoms]
                tBsB, tBgB = self.partition(b_atom, sB, (tile_n, tile_k), rank_m, c.cluster_m)
                k_split = split // tile_k
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
                spins = spin_limit(synced, k_tiles, num_clusters)
                for j in cutlass.range(first, last, step, unroll=1):
                    t, k_begin, k_end = self.item(j, plan, k_tiles, cluster, num_clusters)
                    tm, tn = self.cluster_tile(t, tiles_m, tiles_n)
                    row, col = tm * c.cluster_m + cta_m, tn * c.cluster_n + cta_n
                    if const_expr(not p.redo):
                        if rank == 0 and t < synced:
                            spins = wave_sync(ticket, t, synced, num_clusters, spins)
                    if self.is_selected(epilogue_args, tm, m):
                        for kt in cutlass.range(k_begin, k_end, unroll=1):
                            loaded.producer_acquire(state)
                            bar = loaded.producer_get_barrier(state)
                            if const_expr(not p.split_k):
                                self.load(a_atoms[0], parts[0], row, kt + out_of_bounds, state.index, bar, mask_a)
                            elif kt < k_split:
                                self.load(a_atoms[0], parts[0], row, kt, state.index, bar, mask_a)
                            else:
                                self.load(a_atoms[1], parts[1], row, kt - k_split, state.index, bar, mask_a)
                            self.load(b_atom, (tBsB, tBgB), col, kt + out_of_bounds, state.index, bar, mask_b)
                            state.advance()
                loaded.producer_tail(state)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            thread = tid % 128
            overwrite, add = tiled_mmas
            mma = add.get_slice(0 if c.pingpong else cute.make_layout(c.num_wgs, stride=128)(wg - 1))
            rA = add.make_fragment_A(mma.partition_A(sA))
            rB = add.make_fragment_B(mma.partition_B(sB))
            acc = cute.make_rmem_tensor(mma.partition_shape_C((tile_m, tile_n)), Float32)
            block = cute.make_layout(mma.partition_shape_C((tile_m // c.row_blocks, tile_n)))
            blocks = [cute.make_tensor(acc.iterator + b * cute.size(block), block) for b in range(c.row_blocks)]
            kept = [self.epilogue.begin() for _ in blocks]
            out = d_atoms, split, staging
            read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
            released = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
            own, own_step, row_in_tile = first, step, (wg - 1) * 64
            if const_expr(c.pingpong):
                own, own_step, row_in_tile = first + (wg - 1) * step, 2 * step, Int32(0)
                if wg == 2:
                    read.advance(k_tiles)
                    released.advance(k_tiles)
            for j in cutlass.range(own, last, own_step, unroll=1):
                t, k_begin, k_end = self.item(j, plan, k_tiles, cluster, num_clusters)
                tm, tn = self.cluster_tile(t, tiles_m, tiles_n)
                if self.is_selected(epilogue_args, tm, m):
                    row0 = (tm * c.cluster_m + cta_m) * tile_m + row_in_tile
                    col0 = (tn * c.cluster_n + cta_n) * tile_n
                    for b in cutlass.range_constexpr(c.row_blocks):
                        self.epilogue.prepare(kept[b], epilogue_args, row0 + 64 * b, col0, m, live, start, thread)
                    if const_expr(c.pingpong):
                        if j > first:
                            cute.arch.barrier(barrier_id=self.order_barrier(wg), number_of_threads=256)
                    loaded.consumer_wait(read)
                    self.multiply(overwrite, add, acc, rA, rB, read.index)
                    read.advance()
                    for kt in cutlass.range(k_begin + 1, k_end, unroll=1):
                        loaded.consumer_wait(read)
                        self.multiply(add, add, acc, rA, rB, read.index)
                        read.advance()
                        warpgroup.wait_group(1)  # the stage before this one has been read
                        loaded.consumer_release(released)
                        released.advance()
                    if const_expr(c.pingpong):
                        if j + step < last:  # the other warp group's products queue behind these
                            cute.arch.barrier_arrive(barrier_id=self.order_barrier(3 - wg), number_of_threads=256)
                    warpgroup.wait_group(0)
                    loaded.consumer_release(released)
                    released.advance()
                    if const_expr(c.pingpong):  # skip the stages of the other warp group's tile
                        read.advance(k_tiles)
                        released.advance(k_tiles)
                    complete = True
                    if const_expr(p.split_k_tail):
                        where = cluster, num_clusters, cta_n * c.cluster_m + cta_m, wg, thread
                        complete = self.tail.is_complete(acc, tail_args, sTicket, j, plan, where)
                    if complete:
                        for b in cutlass.range_constexpr(c.row_blocks):
                            row = row0 + 64 * b
                            self.epilogue(blocks[b], kept[b], epilogue_args, out, d, row, col0, m, n, ldd, wg, thread)
            self.epilogue.finish(thread)

    @cute.jit
    def item(self, j: Int32, plan: Optional[Plan], k_tiles: Int32, cluster: Int32, num_clusters: Int32):
        """(tile, first step along k, end of its steps) of item j."""
        if const_expr(self.problem.split_k_tail):
            return self.tail.item(j, plan, k_tiles, cluster, num_clusters)
        return j, Int32(0), k_tiles

    def order_barrier(self, wg):
        """Named barrier at which a ping-pong warp group waits until the other one has issued its products."""
        return wg + 3 * self.config.num_wgs

    @cute.jit
    def is_selected(self, epilogue_args, tm, m):
        """Whether to compute this tile: all but in a `redo` problem, which has flags."""
        selected = True
        if const_expr(self.problem.redo):
            selected = self.epilogue.is_flagged(epilogue_args, tm, m)
        return selected

    def multiply(self, first, others, acc, rA, rB, stage):
        """Issues acc (+)= A @ B of one stage, asynchronously; `first`, the MMA of its first step, may overwrite acc."""
        warpgroup.fence()
        for kb in range(cute.size(rA, mode=[2])):
            cute.gemm(others if kb else first, acc, rA[None, None, kb, stage], rB[None, None, kb, stage], acc)
        warpgroup.commit_group()

    def partition(self, atom, shared, tile, rank, num_multicast):
        g = cute.local_tile(atom[1], tile, (None, None))
        return cpasync.tma_partition(
            atom[0], rank, cute.make_layout(num_multicast), cute.group_modes(shared, 0, 2), cute.group_modes(g, 0, 2)
        )

    def load(self, atom, part, tile, kt, stage, bar, mask):
        cute.copy(atom[0], part[1][None, tile, kt], part[0][None, stage], tma_bar_ptr=bar, mcast_mask=mask)
