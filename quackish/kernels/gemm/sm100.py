"""Blackwell GEMM, persistent and warp-specialized: D[m, n] = sum over k of A[m, k] * B[n, k], by TMA and tcgen05.

One warp loads tiles of A and B, `num_stages` deep. One warp issues the MMAs, into one of two fp32 accumulators in
tensor memory, while four warps pass the other one to an epilogue (`epilogues.py`). `umma.py` tells how two CTAs share a
tile.
With `live` the number of live rows, `num_live - start` along m or k, is read on the device.

Compiled and emulated, not run on a GPU.
"""

from typing import ClassVar, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.gemm.epilogue_store_sm100 import StoreSm100
from quackish.kernels.gemm.gemm_kernel import Stage, live_rows
from quackish.kernels.gemm.operands import Operands
from quackish.kernels.gemm.problem import TILE_K, GemmArgs, Store
from quackish.kernels.gemm.sm100_config import ACCUMULATORS, TILE_M
from quackish.kernels.gemm.tile_store import Output, RowBlock
from quackish.kernels.gemm.umma import MMA_WARP, TMA_WARP, Operand, UmmaKernel


class Tiles(NamedTuple):
    """A cluster's tiles: first, first + step, ... < last."""

    cta: Int32  # this CTA in the cluster
    first: Int32
    last: Int32
    step: Int32
    tiles_m: Int32  # of D
    tiles_n: Int32
    k_tiles: Int32  # steps along k per tile
    live: Int32


class GemmSm100(Operands, UmmaKernel):
    epilogues: ClassVar = {Store: StoreSm100}

    @cute.kernel
    def kernel(
        self,
        a_atoms: list,
        b_atoms: list,
        d_atoms: list,
        args: GemmArgs,  # without the operands
        mma: cute.TiledMma,
        a_operand: Operand,
        b_operand: Operand,
    ):
        p, c = self.problem, self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory, barriers, tensor memory
        smem = cutlass.memory.SmemAllocator()
        sA, sA_mma = self.allocate(smem, a_operand)
        sB, sB_mma = self.allocate(smem, b_operand)
        staging = self.epilogue.allocate(smem)
        loaded, done = self.pipelines()
        memory, accs = self.tensor_memory(mma)

        after_previous()
        # problem size: live rows, tiles, steps along k
        live = live_rows(args, p.live)
        tiles_m = cute.ceil_div(live if const_expr(p.live != "k") else args.m, c.cluster_rows)
        tiles_n = cute.ceil_div(args.n, c.tile_n)
        # At least one step: with no live rows, multiply an out-of-bounds tile, which TMA fills with zeros.
        k_tiles = cutlass.max(cute.ceil_div(live if const_expr(p.live == "k") else args.k, TILE_K), 1)
        total = self.epilogue.num_tiles(args.epilogue, tiles_m * tiles_n)
        tiles = Tiles(cta, cluster, total, num_clusters, tiles_m, tiles_n, k_tiles, live)

        if warp == TMA_WARP:
            self.produce(a_atoms, b_atoms[0], sA, sB, loaded, args, tiles)
        elif warp == MMA_WARP:
            if cta == 0:
                self.multiply(mma, accs, sA_mma, sB_mma, loaded, done, args, tiles)
        else:
            out = Output(d_atoms, staging, args.split, args.d, args.d_stride)
            self.consume(accs, done, args, tiles, out, thread)
            self.free_tensor_memory(memory, accs)
        self.leave()

    @cute.jit
    def produce(self, a_atoms, b_atom, sA, sB, loaded, args: GemmArgs, tiles: Tiles):
        """The TMA warp: loads this CTA's part of the stages of all tiles."""
        p = self.problem
        parts = [self.partition(atom, atom[1], sA, 0, 1) for atom in a_atoms]
        b_part = self.partition(b_atom, b_atom[1], sB, 0, 1)
        k_split, out_of_bounds = args.split // TILE_K, Int32(0)
        if const_expr(p.live == "k"):
            if tiles.live == 0:
                out_of_bounds = cute.ceil_div(args.k, TILE_K)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        for j in cutlass.range(tiles.first, tiles.last, tiles.step, unroll=1):
            tm, tn = self.raster(j, tiles.tiles_m, tiles.tiles_n)
            if self.epilogue.is_selected(args.epilogue, tm, args.m):
                row, col = tm * self.ctas + tiles.cta, tn * self.ctas + tiles.cta
                for kt in cutlass.range(tiles.k_tiles, unroll=1):
                    loaded.producer_acquire(state)
                    stage = Stage(state.index, loaded.producer_get_barrier(state))
                    if const_expr(not p.a_in_two):
                        self.load(a_atoms[0], parts[0], row, kt + out_of_bounds, stage, None)
                    elif kt < k_split:
                        self.load(a_atoms[0], parts[0], row, kt, stage, None)
                    else:
                        self.load(a_atoms[1], parts[1], row, kt - k_split, stage, None)
                    self.load(b_atom, b_part, col, kt + out_of_bounds, stage, None)
                    state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def multiply(self, mma, accs, sA, sB, loaded, done, args: GemmArgs, tiles: Tiles):
        """The MMA warp of the cluster's first CTA: the products of all tiles."""
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.num_stages)
        written = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACCUMULATORS)
        for j in cutlass.range(tiles.first, tiles.last, tiles.step, unroll=1):
            tm, _ = self.raster(j, tiles.tiles_m, tiles.tiles_n)
            if self.epilogue.is_selected(args.epilogue, tm, args.m):
                read, written = self.multiply_tile(mma, accs, rA, rB, loaded, done, read, written, tiles.k_tiles)
        done.producer_tail(written)

    @cute.jit
    def consume(self, accs, done, args: GemmArgs, tiles: Tiles, out: Output, thread: Int32):
        """An epilogue warp: the epilogues of all tiles."""
        copy, rows = self.reader(accs, thread)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
        for j in cutlass.range(tiles.first, tiles.last, tiles.step, unroll=1):
            tm, tn = self.raster(j, tiles.tiles_m, tiles.tiles_n)
            if self.epilogue.is_selected(args.epilogue, tm, args.m):
                row0, col0 = (tm * self.ctas + tiles.cta) * TILE_M, tn * self.config.tile_n
                block = RowBlock(0, row0, col0, args.m, args.n, tiles.live, args.start, thread)
                prefetched = self.epilogue.prepare(args.epilogue, out, block)
                acc = self.wait_for_tile(done, state, copy, rows)
                self.epilogue(acc, prefetched, args.epilogue, out, block)
                self.release(done, state)
                state.advance()
        self.epilogue.finish(thread)
