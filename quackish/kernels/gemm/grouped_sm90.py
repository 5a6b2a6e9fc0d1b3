"""Hopper grouped GEMM, persistent and warp-specialized: the products of all groups in one launch, by TMA and WGMMA.

Structured like `sm90.py`: a producer warp loads, consumer warp groups multiply and pass their accumulators to an
epilogue. The kernel derives its tiles from `offs` (`group_walk.py`). One TMA tensor serves all groups: loads along k
and stores along m are clipped at a group's end (`ragged.py`).
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.gemm.gemm_kernel import Stage
from quackish.kernels.gemm.group_walk import Groups, GroupWalk
from quackish.kernels.gemm.grouped_operands import GroupedOperands
from quackish.kernels.gemm.grouped_problem import GroupedGemmArgs, GroupedGemmProblem
from quackish.kernels.gemm.ragged import EXTENT
from quackish.kernels.gemm.sm90_config import BLOCK_M, PRODUCER_REGISTERS, GemmConfig
from quackish.kernels.gemm.tile_store import Group, Output, RowBlock, block_below
from quackish.kernels.gemm.wgmma import WgmmaKernel


class GroupedGemmSm90(GroupedOperands, WgmmaKernel):
    def __init__(self, problem: GroupedGemmProblem, config: GemmConfig):
        super().__init__(problem, config)
        self.walk = GroupWalk(problem, config, self.raster)

    @cute.kernel
    def kernel(
        self,
        a_atoms: list,
        b_atoms: list,
        atoms: list,  # of the epilogue: its outputs', then its inputs'
        args: GroupedGemmArgs,  # without the operands
        tiled_mmas: list,  # one overwrites the accumulator, one adds to it
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
    ):
        p, c = self.problem, self.config
        tile_m, _, tile_k = self.tile
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        wg = cute.arch.make_warp_uniform(tid // 128)

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sA, sB = self.allocate(smem, sA_layout, sB_layout)
        staging = self.epilogue.allocate(smem)
        shared = self.walk.allocate(smem)
        loaded = self.stages()
        pipeline.pipeline_init_arrive(cluster_shape_mn=self.cluster, is_relaxed=True)

        after_previous()
        # the groups and their tiles
        tiles_n = cute.ceil_div(args.n, self.epilogue.tile_cols * c.cluster_n)
        tiles_m, k_steps = Int32(0), Int32(0)
        if const_expr(p.along == "m"):
            k_steps = cute.ceil_div(args.k, tile_k) * p.k_parts
        else:
            tiles_m = cute.ceil_div(args.m, tile_m * c.cluster_m)
        walk = self.walk.begin(shared, args, tiles_m, tiles_n, k_steps)
        pipeline.pipeline_init_wait(cluster_shape_mn=self.cluster)

        if wg == 0:
            cute.arch.setmaxregister_decrease(PRODUCER_REGISTERS)
            if warp == 0:
                self.produce(a_atoms[0], b_atoms, sA, sB, loaded, args, walk)
        else:
            cute.arch.setmaxregister_increase(c.consumer_registers)
            self.consume(tiled_mmas, sA, sB, loaded, args, walk, Output(atoms, staging), wg, tid % 128)

    @cute.jit
    def produce(self, a_atom, b_atoms, sA, sB, loaded, args: GroupedGemmArgs, walk: Groups):
        """The producer warp: loads the stages of every item."""
        p, c = self.problem, self.config
        tile_m, tile_n, tile_k = self.tile
        box = const_expr(tile_n // self.b_boxes)
        _, rank_m, rank_n, mask_a, mask_b = self.multicast()
        cta_m, cta_n, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, c.num_stages)
        # where B's boxes lie in a stage: those of a pair's matrices, or for two parts along k all of it
        boxes = [sB, sB]
        if const_expr(p.k_parts == 1):
            boxes = [cute.local_tile(sB, (box, tile_k), (i, 0, None)) for i in range(self.b_boxes)]
        for j in cutlass.range(cluster, walk.num_items, num_clusters, unroll=1):
            item = self.walk.item(j, walk)
            row = (item.tm * c.cluster_m + cta_m) * tile_m
            col = (item.tn * c.cluster_n + cta_n) * box
            if const_expr(p.along == "m"):
                a = cute.domain_offset((item.begin + row, 0), a_atom[1])
                group = cutlass.min(item.group, args.groups - 1)
                bs = [cute.domain_offset((col, 0), atom[1][None, None, group]) for atom in b_atoms]
                k0 = cute.ceil_div(args.k * p.k_parts, tile_k) if item.is_filled else Int32(0)
            else:
                start, end = EXTENT - item.length, item.begin + item.length
                a = cute.domain_offset((row, start), a_atom[1][None, None, EXTENT, end])
                bs = [cute.domain_offset((col, start), b_atoms[0][1][None, None, EXTENT, end])]
                k0 = Int32(0)
            a_part = self.partition(a_atom, a, sA, rank_n, c.cluster_n)
            a2_part = a_part
            if const_expr(p.k_parts == 2):  # A's columns from k on, which need not be a multiple of tile_k
                a2_part = self.partition(a_atom, cute.domain_offset((0, args.k), a), sA, rank_n, c.cluster_n)
            b_parts = [
                self.partition(atom, b, box, rank_m, c.cluster_m)
                for atom, b, box in zip(b_atoms, bs, boxes, strict=True)
            ]
            part_steps = walk.k_steps // p.k_parts
            for kt in cutlass.range(item.steps, unroll=1):
                loaded.producer_acquire(state)
                stage = Stage(state.index, loaded.producer_get_barrier(state))
                if const_expr(p.k_parts == 1):
                    self.load(a_atom, a_part, 0, k0 + kt, stage, mask_a)
                    for i in cutlass.range_constexpr(self.b_boxes):
                        self.load(b_atoms[i], b_parts[i], 0, k0 + kt, stage, mask_b)
                elif kt < part_steps:
                    self.load(a_atom, a_part, 0, k0 + kt, stage, mask_a)
                    self.load(b_atoms[0], b_parts[0], 0, k0 + kt, stage, mask_b)
                else:
                    self.load(a_atom, a2_part, 0, kt - part_steps, stage, mask_a)
                    self.load(b_atoms[1], b_parts[1], 0, kt - part_steps, stage, mask_b)
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def consume(
        self, tiled_mmas, sA, sB, loaded, args: GroupedGemmArgs, walk: Groups, out: Output, wg: Int32, thread: Int32
    ):  # fmt: skip
        """A consumer warp group: multiplies the stages of its items, and passes the sums to the epilogue."""
        c, tile_m = self.config, self.config.tile_m
        cta_m, cta_n, first = cute.arch.block_idx()
        _, _, step = cute.arch.grid_dim()
        last = walk.num_items
        rA, rB, acc, accs = self.fragments(tiled_mmas[1], sA, sB, wg)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        released = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        own, own_step, row_in_tile = first, step, (wg - 1) * BLOCK_M
        if const_expr(c.pingpong):
            own, own_step, row_in_tile = first + (wg - 1) * step, 2 * step, Int32(0)
            if wg == 2:
                if own < last:
                    skipped = self.walk.item(first, walk).steps
                    read.advance(skipped)
                    released.advance(skipped)
        for j in cutlass.range(own, last, own_step, unroll=1):
            item = self.walk.item(j, walk)
            row0 = (item.tm * c.cluster_m + cta_m) * tile_m + row_in_tile
            col0 = (item.tn * c.cluster_n + cta_n) * self.epilogue.tile_cols
            group = Group(item.group, args.groups, item.is_filled, walk.fill)
            first_block = RowBlock(0, row0, col0, args.rows, args.n, item.length, item.begin, thread, wg, group)
            blocks = [block_below(first_block, b) for b in range(c.row_blocks)]
            prefetched = [self.epilogue.prepare(args.epilogue, out, block) for block in blocks]
            read, released = self.multiply_stages(
                tiled_mmas, acc, rA, rB, loaded, read, released, item.steps, j > first, j + step < last, wg
            )
            if const_expr(c.pingpong):  # skip the stages of the other warp group's tile
                if j + step < last:
                    skipped = self.walk.item(j + step, walk).steps
                    read.advance(skipped)
                    released.advance(skipped)
            for b in cutlass.range_constexpr(c.row_blocks):
                self.epilogue(accs[b], prefetched[b], args.epilogue, out, blocks[b])
        self.epilogue.finish(thread)
