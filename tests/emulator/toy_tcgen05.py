"""A small GEMM of Blackwell's tensor cores, for the emulator's tests. It has run in the emulator alone, on no GPU."""

import dataclasses

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import BFloat16, Float32, Int32, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.experimental import primitives
from cutlass.utils import blackwell_helpers

from quackish.kernels.arguments import fake_pointer

EPILOGUE_WARPS, MMA_WARP, TMA_WARP, THREADS = 4, 4, 5, 192
COLUMNS, DEPTH, STAGES = 64, 64, 2  # of a tile's n and k, and of the pipeline


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    pass


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    ctas: int = 1  # that compute a tile of 128 * ctas rows together


class Gemm:
    """d = a @ b.T in fp32; a (m, k) and b (n, k) bf16, k a multiple of 8, n of 64.

    Warp 5 loads tiles, warp 4 multiplies them in tensor memory, warps 0 to 3 store the product. There is one
    accumulator, which the epilogue releases as soon as it is in registers.
    """

    def __init__(self, problem: GemmProblem, config: GemmConfig):
        self.ctas = config.ctas
        self.tile = 128 * config.ctas, COLUMNS, DEPTH

    def fake_args(self):
        a, b, d = (fake_pointer(dtype) for dtype in ("bfloat16", "bfloat16", "float32"))
        return a, b, d, Int32(1), Int32(1), Int32(1), Int32(1), cute.runtime.make_fake_stream()

    @cute.jit
    def __call__(
        self,
        a: cute.Pointer,
        b: cute.Pointer,
        d: cute.Pointer,
        m: Int32,
        n: Int32,
        k: Int32,
        clusters: Int32,
        stream: CUstream,
    ):
        group = tcgen05.CtaGroup.TWO if self.ctas == 2 else tcgen05.CtaGroup.ONE
        mma = cute.make_tiled_mma(
            tcgen05.MmaF16BF16Op(
                BFloat16,
                Float32,
                (self.tile[0], COLUMNS, 16),
                group,
                tcgen05.OperandSource.SMEM,
                OperandMajorMode.K,
                OperandMajorMode.K,
            )
        )
        k = cute.assume(k, divby=8)
        mA, mB = (cute.make_tensor(p, cute.make_layout((rows, k), stride=(k, 1))) for p, rows in ((a, m), (b, n)))
        mD = cute.make_tensor(d, cute.make_layout((m, n), stride=(n, 1)))
        sA_layout = blackwell_helpers.make_smem_layout_a(mma, self.tile, BFloat16, STAGES)
        sB_layout = blackwell_helpers.make_smem_layout_b(mma, self.tile, BFloat16, STAGES)
        vmnk = cute.tiled_divide(cute.make_layout((self.ctas, 1, 1)), (mma.thr_id,))
        load, stage = cpasync.CopyBulkTensorTileG2SOp(group), (None, None, None, 0)
        tma_a, gA = cute.nvgpu.make_tiled_tma_atom_A(
            load, mA, cute.slice_(sA_layout, stage), self.tile, mma, vmnk.shape
        )
        tma_b, gB = cute.nvgpu.make_tiled_tma_atom_B(
            load, mB, cute.slice_(sB_layout, stage), self.tile, mma, vmnk.shape
        )
        self.kernel(mma, tma_a, gA, tma_b, gB, mD, sA_layout, sB_layout, vmnk).launch(
            grid=[self.ctas, 1, clusters], block=[THREADS, 1, 1], cluster=[self.ctas, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        tma_a: cute.CopyAtom,
        mA: cute.Tensor,
        tma_b: cute.CopyAtom,
        mB: cute.Tensor,
        mD: cute.Tensor,
        sA_layout: cute.ComposedLayout,
        sB_layout: cute.ComposedLayout,
        vmnk: cute.Layout,
    ):
        rows, columns, depth = self.tile
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        member, _, first = cute.arch.block_idx()  # the CTA of its pair, the cluster
        _, _, step = cute.arch.grid_dim()

        # shared memory, pipelines, tensor memory
        smem = cutlass.memory.SmemAllocator()
        sA = smem.allocate_tensor(BFloat16, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(BFloat16, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        one = pipeline.CooperativeGroup(pipeline.Agent.Thread)
        stage = (None, None, None, 0)
        loaded = pipeline.PipelineTmaUmma.create(
            num_stages=STAGES,
            producer_group=one,
            consumer_group=one,
            tx_count=2 * (cute.cosize(cute.slice_(sA_layout, stage)) + cute.cosize(cute.slice_(sB_layout, stage)))
            * self.ctas,
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )  # fmt: skip
        multiplied = pipeline.PipelineUmmaAsync.create(
            num_stages=1,
            producer_group=one,
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, EPILOGUE_WARPS * self.ctas),
            cta_layout_vmnk=vmnk,
            defer_sync=True,
        )
        tmem = cutlass.memory.TmemAllocator(
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=1, num_threads=THREADS),
            allocator_warp_id=0,
            is_two_cta=self.ctas == 2,
        )
        pipeline.pipeline_init_arrive(cluster_shape_mn=(self.ctas, 1), is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=(self.ctas, 1))
        tmem.allocate(columns)  # by both CTAs of a pair, which have started
        tmem.relinquish_alloc_permit()
        tmem.wait_for_alloc()
        shape = mma.partition_shape_C((rows, columns))
        acc = cute.make_tensor(tmem.retrieve_ptr(Float32), mma.make_fragment_C(shape).layout)
        row_tiles, depth_tiles = cute.ceil_div(mD.shape[0], rows), cute.ceil_div(cute.shape(mA)[1], depth)
        total = row_tiles * cute.ceil_div(mD.shape[1], columns)

        if warp == TMA_WARP:
            thr, alone = mma.get_slice(member), cute.make_layout(1)
            tAgA = thr.partition_A(cute.local_tile(mA, (rows, depth), (None, None)))
            tBgB = thr.partition_B(cute.local_tile(mB, (columns, depth), (None, None)))
            tAsA, tAgA = cpasync.tma_partition(
                tma_a, 0, alone, cute.group_modes(sA, 0, 3), cute.group_modes(tAgA, 0, 3)
            )
            tBsB, tBgB = cpasync.tma_partition(
                tma_b, 0, alone, cute.group_modes(sB, 0, 3), cute.group_modes(tBgB, 0, 3)
            )
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, STAGES)
            for tile in cutlass.range(first, total, step, unroll=1):
                for k in cutlass.range(depth_tiles, unroll=1):
                    loaded.producer_acquire(state)
                    barrier = loaded.producer_get_barrier(state)
                    cute.copy(tma_a, tAgA[None, tile % row_tiles, k], tAsA[None, state.index], tma_bar_ptr=barrier)
                    cute.copy(tma_b, tBgB[None, tile // row_tiles, k], tBsB[None, state.index], tma_bar_ptr=barrier)
                    state.advance()
            loaded.producer_tail(state)

        elif warp == MMA_WARP:
            if member == 0:  # the even CTA of a pair issues
                tCrA, tCrB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
                state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, STAGES)
                acc_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, 1)
                for _ in cutlass.range(first, total, step, unroll=1):
                    multiplied.producer_acquire(acc_state)
                    primitives.tcgen05_fence("after_thread_sync")
                    mma.set(tcgen05.Field.ACCUMULATE, False)
                    for _ in cutlass.range(depth_tiles, unroll=1):
                        loaded.consumer_wait(state)
                        primitives.tcgen05_fence("after_thread_sync")
                        for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                            cute.gemm(mma, acc, tCrA[None, None, k, state.index], tCrB[None, None, k, state.index], acc)
                            mma.set(tcgen05.Field.ACCUMULATE, True)
                        loaded.consumer_release(state)
                        state.advance()
                    multiplied.producer_commit(acc_state)
                    acc_state.advance()
                multiplied.producer_tail(acc_state)

        else:
            load = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(COLUMNS)), Float32)
            values = acc[(None, None), 0, 0]  # a row per thread
            t2r = tcgen05.make_tmem_copy(load, values)
            thr = t2r.get_slice(cute.arch.thread_idx()[0])
            source = thr.partition_S(values)
            r_shape = thr.partition_D(cute.make_identity_tensor((128, COLUMNS))).shape
            state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, 1)
            for tile in cutlass.range(first, total, step, unroll=1):
                row = tile % row_tiles * rows + member * 128 + cute.arch.thread_idx()[0]
                column = tile // row_tiles * columns
                rD = cute.make_rmem_tensor(r_shape, Float32)
                multiplied.consumer_wait(state)
                primitives.tcgen05_fence("after_thread_sync")
                cute.copy(t2r, source, rD)
                cute.arch.fence_view_async_tmem_load()
                primitives.tcgen05_fence("before_thread_sync")
                with cute.arch.elect_one():
                    multiplied.consumer_release(state)
                if row < mD.shape[0]:
                    for j in cutlass.range(COLUMNS, unroll_full=True):
                        mD[row, column + j] = rD[j]
                state.advance()
            pipeline.NamedBarrier(barrier_id=2, num_threads=32 * EPILOGUE_WARPS).arrive_and_wait()
            tmem.free(acc.iterator)
