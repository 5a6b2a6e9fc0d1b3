"""Blackwell grouped GEMM, persistent and warp-specialized: products of all groups in one launch, by TMA and tcgen05.

Structured like `sm100.py`. The kernel derives its tiles from `offs` (`group_walk.py`), as Hopper's. With two CTAs
per tile, one of them may have no rows of the group: its loads and stores are clipped at the group's end.

Compiled and emulated, not run on a GPU.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.gemm.gemm_kernel import Stage
from quackish.kernels.gemm.group_walk import Groups, GroupWalk
from quackish.kernels.gemm.grouped_operands import GroupedOperands
from quackish.kernels.gemm.grouped_problem import GroupedGemmArgs, GroupedGemmProblem
from quackish.kernels.gemm.problem import TILE_K
from quackish.kernels.gemm.ragged import EXTENT
from quackish.kernels.gemm.sm100_config import ACCUMULATORS, TILE_M, GemmSm100Config
from quackish.kernels.gemm.tile_store import Group, Output, RowBlock
from quackish.kernels.gemm.umma import MMA_WARP, TMA_WARP, Operand, UmmaKernel


class GroupedGemmSm100(GroupedOperands, UmmaKernel):
    def __init__(self, problem: GroupedGemmProblem, config: GemmSm100Config):
        super().__init__(problem, config)
        self.walk = GroupWalk(problem, config, self.raster)

    @cute.kernel
    def kernel(
        self,
        a_atoms: list,
        b_atoms: list,
        atoms: list,  # of the epilogue: its outputs', then its inputs'
        args: GroupedGemmArgs,  # without the operands
        mma: cute.TiledMma,
        a_operand: Operand,
        b_operand: Operand,
    ):
        p, c = self.problem, self.config
        thread, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory, barriers, tensor memory
        smem = cutlass.memory.SmemAllocator()
        sA, sA_mma = self.allocate(smem, a_operand)
        sB, sB_mma = self.allocate(smem, b_operand)
        staging = self.epilogue.allocate(smem)
        shared = self.walk.allocate(smem)
        loaded, done = self.pipelines()
        memory, accs = self.tensor_memory(mma)

        after_previous()
        # the groups and their tiles
        tiles_n = cute.ceil_div(args.n, self.epilogue.tile_cols)
        tiles_m, k_steps = Int32(0), Int32(0)
        if const_expr(p.along == "m"):
            k_steps = cute.ceil_div(args.k, TILE_K) * p.k_parts
        else:
            tiles_m = cute.ceil_div(args.m, c.cluster_rows)
        walk = self.walk.begin(shared, args, tiles_m, tiles_n, k_steps)

        if warp == TMA_WARP:
            self.produce(a_atoms[0], b_atoms, sA, sB, loaded, args, walk)
        elif warp == MMA_WARP:
            if cta == 0:
                self.multiply(mma, accs, sA_mma, sB_mma, loaded, done, walk)
        else:
            self.consume(accs, done, args, walk, Output(atoms, staging), thread)
            self.free_tensor_memory(memory, accs)
        self.leave()

    @cute.jit
    def produce(self, a_atom, b_atoms, sA, sB, loaded, args: GroupedGemmArgs, walk: Groups):
        """The TMA warp: loads this CTA's part of the stages of every item."""
        p = self.problem
        cta, _, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        for j in cutlass.range(cluster, walk.num_items, num_clusters, unroll=1):
            item = self.walk.item(j, walk)
            row = (item.tm * self.ctas + cta) * TILE_M
            col = item.tn * self.epilogue.tile_cols
            if const_expr(not self.has_pairs):
                col += cta * self.box_n
            if const_expr(p.along == "m"):
                a = cute.domain_offset((item.begin + row, 0), a_atom[1])
                group = cutlass.min(item.group, args.groups - 1)
                bs = [cute.domain_offset((col, 0), atom[1][None, None, group]) for atom in b_atoms]
                k0 = cute.ceil_div(args.k * p.k_parts, TILE_K) if item.is_filled else Int32(0)
            else:
                start, end = EXTENT - item.length, item.begin + item.length
                a = cute.domain_offset((row, start), a_atom[1][None, None, EXTENT, end])
                bs = [cute.domain_offset((col, start), b_atoms[0][1][None, None, EXTENT, end])]
                k0 = Int32(0)
            a_part = self.partition(a_atom, a, sA, 0, 1)
            a2_part = a_part
            if const_expr(p.k_parts == 2):  # A's columns from k on, which need not be a multiple of TILE_K
                a2_part = self.partition(a_atom, cute.domain_offset((0, args.k), a), sA, 0, 1)
            b_parts = [self.partition(atom, b, sB, 0, 1) for atom, b in zip(b_atoms, bs, strict=True)]
            part_steps = walk.k_steps // p.k_parts
            for kt in cutlass.range(item.steps, unroll=1):
                loaded.producer_acquire(state)
                stage = Stage(state.index, loaded.producer_get_barrier(state))
                if const_expr(p.k_parts == 1):
                    self.load(a_atom, a_part, 0, k0 + kt, stage, None)
                    self.load_b(b_atoms, b_parts, k0 + kt, stage, cta)
                elif kt < part_steps:
                    self.load(a_atom, a_part, 0, k0 + kt, stage, None)
                    self.load(b_atoms[0], b_parts[0], 0, k0 + kt, stage, None)
                else:
                    self.load(a_atom, a2_part, 0, kt - part_steps, stage, None)
                    self.load(b_atoms[1], b_parts[1], 0, kt - part_steps, stage, None)
                state.advance()
        loaded.producer_tail(state)

    @cute.jit
    def load_b(self, atoms, parts, kt: Int32, stage: Stage, cta: Int32):
        """Starts to load this CTA's columns of B. With pairs, each of two CTAs has one matrix's."""
        if const_expr(not self.has_pairs):
            self.load(atoms[0], parts[0], 0, kt, stage, None)
        elif const_expr(self.ctas == 1):
            for i in cutlass.range_constexpr(2):
                self.load(atoms[i], parts[i], 0, kt, stage._replace(index=stage.index * 2 + i), None)
        elif cta == 0:
            self.load(atoms[0], parts[0], 0, kt, stage, None)
        else:
            self.load(atoms[1], parts[1], 0, kt, stage, None)

    @cute.jit
    def multiply(self, mma, accs, sA, sB, loaded, done, walk: Groups):
        """The MMA warp of the cluster's first CTA: the products of every item."""
        _, _, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.config.num_stages)
        written = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, ACCUMULATORS)
        for j in cutlass.range(cluster, walk.num_items, num_clusters, unroll=1):
            steps = self.walk.item(j, walk).steps
            read, written = self.multiply_tile(mma, accs, rA, rB, loaded, done, read, written, steps)
        done.producer_tail(written)

    @cute.jit
    def consume(self, accs, done, args: GroupedGemmArgs, walk: Groups, out: Output, thread: Int32):
        """An epilogue warp: the epilogues of every item."""
        cta, _, cluster = cute.arch.block_idx()
        _, _, num_clusters = cute.arch.grid_dim()
        copy, rows = self.reader(accs, thread)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, ACCUMULATORS)
        for j in cutlass.range(cluster, walk.num_items, num_clusters, unroll=1):
            item = self.walk.item(j, walk)
            row0, col0 = (item.tm * self.ctas + cta) * TILE_M, item.tn * self.epilogue.tile_cols
            group = Group(item.group, args.groups, item.is_filled, walk.fill)
            block = RowBlock(0, row0, col0, args.rows, args.n, item.length, item.begin, thread, group=group)
            prefetched = self.epilogue.prepare(args.epilogue, out, block)
            acc = self.wait_for_tile(done, state, copy, rows)
            self.epilogue(acc, prefetched, args.epilogue, out, block)
            self.release(done, state)
            state.advance()
        self.epilogue.finish(thread)
