"""Hopper GEMM, persistent and warp-specialized: D[m, n] = sum over k of A[m, k] * B[n, k], by TMA and WGMMA.

A producer warp loads tiles of A and B, `num_stages` deep, multicast within the cluster. Consumer warp groups compute an
fp32 accumulator and pass it to an epilogue (`epilogues.py`). Cooperative: the warp groups share a tile, BLOCK_M rows
each. Ping-pong: each of two warp groups has its own tile, and one runs its mainloop during the other's epilogue.
With `live` the number of live rows, `num_live - start` along m or k, is read on the device.
"""

import dataclasses
from typing import ClassVar, NamedTuple, Optional

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.gemm.epilogue_store import StoreSm90
from quackish.kernels.gemm.gemm_kernel import Stage, live_rows
from quackish.kernels.gemm.operands import Operands
from quackish.kernels.gemm.problem import TILE_K, GemmArgs, GemmProblem, Store
from quackish.kernels.gemm.sm90_config import BLOCK_M, PRODUCER_REGISTERS, GemmConfig
from quackish.kernels.gemm.split_k_tail import SplitKTail, TailPlan
from quackish.kernels.gemm.tile_store import Output, RowBlock, block_below
from quackish.kernels.gemm.wave_sync import spin_limit, tiles_to_sync, wave_sync
from quackish.kernels.gemm.wgmma import WgmmaKernel

EVICT_LAST = 0x14F0_0000_0000_0000  # an L2 cache policy as encoded by PTX's `createpolicy`


class Items(NamedTuple):
    """A cluster's work items: first, first + step, ... < last. Each is a tile or, with split-K, a split of a tile."""

    cta_m: Int32  # this CTA in the cluster
    cta_n: Int32
    first: Int32
    last: Int32
    step: Int32
    plan: Optional[TailPlan]  # with split-K
    tiles_m: Int32  # cluster tiles of D
    tiles_n: Int32
    k_tiles: Int32  # steps along k per tile
    cluster: Int32
    num_clusters: Int32


class GemmSm90(Operands, WgmmaKernel):
    epilogues: ClassVar = {Store: StoreSm90}

    def __init__(self, problem: GemmProblem, config: GemmConfig):
        if problem.epilogue.selects_tiles:
            config = dataclasses.replace(config, pingpong=False)
        super().__init__(problem, config)
        self.tail = SplitKTail(config) if problem.split_k_tail else None

    @cute.kernel
    def kernel(
        self,
        a_atoms: list,
        b_atoms: list,
        d_atoms: list,
        args: GemmArgs,  # without the operands
        tiled_mmas: list,  # one overwrites the accumulator, one adds to it
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        p, c = self.problem, self.config
        tile_m, tile_n, tile_k = self.tile
        tid, _, _ = cute.arch.thread_idx()
        cta_m, cta_n, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tid // 128)

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sA, sB = self.allocate(smem, sA_layout, sB_layout)
        staging = self.epilogue.allocate(smem)
        sTicket = self.tail.allocate(smem) if const_expr(p.split_k_tail) else None
        loaded = self.stages()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        after_previous()
        # problem size: live rows, tiles, steps along k
        m, n, k = args.m, args.n, args.k
        live = live_rows(args, p.live)
        tiles_m = cute.ceil_div(live if const_expr(p.live != "k") else m, tile_m * c.cluster_m)
        tiles_n = cute.ceil_div(n, tile_n * c.cluster_n)
        # At least one step: a branch around the WGMMAs costs 50 registers. With no live rows, multiply an out-of-bounds
        # tile: TMA fills zeros.
        k_tiles = cutlass.max(cute.ceil_div(live if const_expr(p.live == "k") else k, tile_k), 1)
        out_of_bounds = Int32(0)
        if const_expr(p.live == "k"):
            if live == 0:
                out_of_bounds = cute.ceil_div(k, tile_k)
        total = self.epilogue.num_tiles(args.epilogue, tiles_m * tiles_n)
        # this cluster's work items
        first, last, step = cluster, total, num_clusters
        plan, whole_tiles = None, total
        if const_expr(p.split_k_tail):
            plan = self.tail.plan(args.tail, total, k_tiles, cluster, num_clusters)
            first, last, step = Int32(0), plan.items, Int32(1)
            if plan.splits > 1:
                whole_tiles = total - plan.tail
        items = Items(cta_m, cta_n, first, last, step, plan, tiles_m, tiles_n, k_tiles, cluster, num_clusters)
        synced = tiles_to_sync(whole_tiles, k_tiles, num_clusters)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if wg == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(a_atoms, b_atoms[0], sA, sB, loaded, args, items, synced, out_of_bounds)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            out = Output(d_atoms, staging, args.split, args.d, args.d_stride)
            self.consume(tiled_mmas, sA, sB, loaded, args, items, out, sTicket, live, wg, tid % 128)

    @cute.jit
    def produce(
        self, a_atoms, b_atom, sA, sB, loaded, args: GemmArgs, items: Items, synced: Int32, out_of_bounds: Int32
    ):
        """The producer warp: loads the stages of all items."""
        p, c = self.problem, self.config
        rank, rank_m, rank_n, mask_a, mask_b = self.multicast()
        parts = [self.partition(atom, atom[1], sA, rank_n, c.cluster_n) for atom in a_atoms]
        b_part = self.partition(b_atom, b_atom[1], sB, rank_m, c.cluster_m)
        k_split = args.split // TILE_K
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        spins = spin_limit(synced, items.k_tiles, items.num_clusters)
        # Keeping A in the L2 makes dx 0.6 to 3 % faster, logits up to 3 %, dw no faster (H100, H200).
        a_policy = Int64(EVICT_LAST)
        for j in cutlass.range(items.first, items.last, items.step, unroll=1):
            tile, k_begin, k_end = self.item(j, items)
            tm, tn = self.raster(tile, items.tiles_m, items.tiles_n)
            row, col = tm * c.cluster_m + items.cta_m, tn * c.cluster_n + items.cta_n
            if const_expr(not p.epilogue.selects_tiles):
                if rank == 0 and tile < synced:
                    spins = wave_sync(args.ticket, tile, synced, items.num_clusters, spins)
            if self.epilogue.is_selected(args.epilogue, tm, args.m):
                for kt in cutlass.range(k_begin, k_end, unroll=1):
                    loaded.producer_acquire(state)
                    stage = Stage(state.index, loaded.producer_get_barrier(state))
                    if const_expr(not p.a_in_two):
                        self.load(a_atoms[0], parts[0], row, kt + out_of_bounds, stage, mask_a, a_policy)
                    elif kt < k_split:
                        self.load(a_atoms[0], parts[0], row, kt, stage, mask_a, a_policy)
                    else:
                        self.load(a_atoms[1], parts[1], row, kt - k_split, stage, mask_a, a_policy)
                    self.load(b_atom, b_part, col, kt + out_of_bounds, stage, mask_b)
                    state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(
        self, tiled_mmas, sA, sB, loaded, args: GemmArgs, items: Items, out: Output, sTicket, live: Int32, wg: Int32,
        thread: Int32
    ):  # fmt: skip
        """A consumer warp group: the mainloop and the epilogue of each of its items."""
        p, c = self.problem, self.config
        tile_m, tile_n, _ = self.tile
        first, last, step, k_tiles = items.first, items.last, items.step, items.k_tiles
        rA, rB, acc, accs = self.fragments(tiled_mmas[1], sA, sB, wg)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        released = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        wg_first, wg_step, row_in_tile = first, step, (wg - 1) * BLOCK_M
        if const_expr(c.pingpong):
            wg_first, wg_step, row_in_tile = first + (wg - 1) * step, 2 * step, Int32(0)
            if wg == 2:
                read.advance(k_tiles)
                released.advance(k_tiles)
        for j in cutlass.range(wg_first, last, wg_step, unroll=1):
            tile, k_begin, k_end = self.item(j, items)
            tm, tn = self.raster(tile, items.tiles_m, items.tiles_n)
            if self.epilogue.is_selected(args.epilogue, tm, args.m):
                row0 = (tm * c.cluster_m + items.cta_m) * tile_m + row_in_tile
                col0 = (tn * c.cluster_n + items.cta_n) * tile_n
                first_block = RowBlock(0, row0, col0, args.m, args.n, live, args.start, thread, wg)
                blocks = [block_below(first_block, b) for b in range(c.row_blocks)]
                prefetched = [self.epilogue.prepare(args.epilogue, out, block) for block in blocks]
                read, released = self.multiply_stages(
                    tiled_mmas, acc, rA, rB, loaded, read, released, k_end - k_begin, j > first, j + step < last, wg
                )
                if const_expr(c.pingpong):  # skip the stages of the other warp group's tile
                    read.advance(k_tiles)
                    released.advance(k_tiles)
                complete = True
                if const_expr(p.split_k_tail):
                    cta = items.cta_n * c.cluster_m + items.cta_m
                    complete = self.tail.is_complete(
                        acc, args.tail, sTicket, j, items.plan, items.cluster, items.num_clusters, cta, wg, thread
                    )
                if complete:
                    for b in cutlass.range_constexpr(c.row_blocks):
                        self.epilogue(accs[b], prefetched[b], args.epilogue, out, blocks[b])
        self.epilogue.finish(thread)

    @cute.jit
    def item(self, j: Int32, items: Items):
        """(tile, first step along k, end of the steps) of item j."""
        if const_expr(self.problem.split_k_tail):
            return self.tail.item(j, items.plan, items.k_tiles, items.cluster, items.num_clusters)
        return j, Int32(0), items.k_tiles
