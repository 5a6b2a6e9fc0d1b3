"""Shared by the persistent, warp-specialized Blackwell GEMMs: pipelines, MMAs of one or two CTAs, tensor memory.

    TMA warp --(loaded: full, by bytes)--> MMA warp --(done: full, by tcgen05.commit)--> epilogue warps
             <-(loaded: empty, by commit)-          <-(done: empty, one arrival per epilogue warp)-

Two CTAs compute one tile of 256 rows. Each loads its 128 rows of A and its half of B's columns, the first CTA issues
all MMAs, and each has its rows of the accumulator in its own tensor memory: lane = row, column = column. So one and two
CTAs have the same epilogues. A pair's barriers are the first CTA's: they count the bytes and arrivals of both.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, tcgen05
from cutlass.experimental import primitives as prims
from cutlass.utils import blackwell_helpers as sm100
from cutlass.utils import hopper_helpers as sm90

from quackish.kernels.gemm.gemm_kernel import LAYOUT, MAJOR, GemmKernel
from quackish.kernels.gemm.problem import TILE_K
from quackish.kernels.gemm.sm100_config import ACCUMULATORS, EPILOGUE_WARPS, SLICE, TILE_M

MMA_WARP, TMA_WARP = EPILOGUE_WARPS, EPILOGUE_WARPS + 1
ALLOCATED, READ = 1, 2  # named barriers: tensor memory is allocated; the epilogue warps have read it


class Operand(NamedTuple):
    """The layouts of an operand's stages in shared memory, of one CTA."""

    tma: Any  # (rows, TILE_K, box)
    mma: Any  # the same memory, as MMAs read it


class Accumulator(NamedTuple):
    """A CTA's part of the accumulator of a tile in tensor memory: TILE_M lanes of tile_n columns."""

    copy: Any  # tiled copy of a slice, of this thread
    slices: Any  # the thread's row, per slice of SLICE columns

    def load(self, j):
        """The thread's SLICE values of slice j, counted from 0, as an fp32 register tensor."""
        x = cute.make_rmem_tensor((SLICE, 1), Float32)
        out = cute.make_tensor(x.iterator, cute.make_layout(((SLICE, 1), 1, 1)))
        cute.copy(self.copy, self.slices[None, None, None, 0, j], out)
        cute.arch.fence_view_async_tmem_load()  # tcgen05.wait::ld: nothing else makes the registers valid
        return cute.make_tensor(x.iterator, cute.make_layout(SLICE))


class UmmaKernel(GemmKernel):
    """Base class of Blackwell's GEMMs. A config is a GemmSm100Config."""

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.ctas = config.ctas
        self.tile = (config.cluster_rows, config.tile_n, TILE_K)
        self.box_n = config.tile_n // (2 if self.has_pairs else config.ctas)  # columns of B that a TMA copy loads
        self.boxes = config.tile_n // config.ctas // self.box_n  # of B, per stage and CTA
        self.group = tcgen05.CtaGroup.TWO if config.ctas == 2 else tcgen05.CtaGroup.ONE

    # On the host ------------------------------------------------------------------------------------------------------

    def load_op(self, num_multicast: int):
        return cpasync.CopyBulkTensorTileG2SOp(self.group)  # with two CTAs, completes on the first one's mbarrier

    def operands(self, a_major: str, b_major: str):
        """(its MMA, A's Operand, B's Operand)"""
        op = tcgen05.MmaF16BF16Op(
            self.dtype, Float32, (*self.tile[:2], 16), self.group, tcgen05.OperandSource.SMEM, MAJOR[a_major],
            MAJOR[b_major],
        )  # fmt: skip
        mma, stages = cute.make_tiled_mma(op), self.config.num_stages
        box = (TILE_M, self.box_n, TILE_K)  # a stage's boxes of B are adjacent
        a = Operand(
            sm90.make_smem_layout_a(LAYOUT[a_major], box, self.dtype, stages),
            sm100.make_smem_layout_a(mma, self.tile, self.dtype, stages),
        )
        b = Operand(
            sm90.make_smem_layout_b(LAYOUT[b_major], box, self.dtype, stages * self.boxes),
            sm100.make_smem_layout_b(mma, self.tile, self.dtype, stages),
        )
        return mma, a, b

    def a_atom(self, mA, operand: Operand):
        return self.load_atom(mA, operand.tma, (TILE_M, TILE_K), 1)

    def b_atom(self, mB, operand: Operand):
        return self.load_atom(mB, operand.tma, (self.box_n, TILE_K), 1)

    def launch_options(self, clusters: Int32, stream):
        return dict(
            grid=[self.ctas, 1, clusters], block=[self.config.threads, 1, 1], cluster=[self.ctas, 1, 1],
            min_blocks_per_mp=1, stream=stream, use_pdl=True,
        )  # fmt: skip

    # On the device ----------------------------------------------------------------------------------------------------

    def allocate(self, smem, operand: Operand):
        """The stages of an operand: (as TMA writes them, as MMAs read them)."""
        s = smem.allocate_tensor(self.dtype, operand.tma.outer, byte_alignment=1024, swizzle=operand.tma.inner)
        return s, cute.make_tensor(s.iterator, operand.mma.outer)

    def cta_layout(self):
        return cute.make_layout(((self.ctas,), 1, 1, 1))

    def pipelines(self):
        """(loaded stages, finished accumulators)"""

        def threads(count=1):
            return pipeline.CooperativeGroup(pipeline.Agent.Thread, count)

        loaded = pipeline.PipelineTmaUmma.create(
            num_stages=self.config.num_stages, producer_group=threads(), consumer_group=threads(),
            tx_count=self.config.stage_bytes * self.ctas, cta_layout_vmnk=self.cta_layout(), defer_sync=True,
        )  # fmt: skip
        done = pipeline.PipelineUmmaAsync.create(
            num_stages=ACCUMULATORS, producer_group=threads(), consumer_group=threads(EPILOGUE_WARPS * self.ctas),
            cta_layout_vmnk=self.cta_layout(), defer_sync=True,
        )  # fmt: skip
        return loaded, done

    def tensor_memory(self, mma):
        """Called by all threads, after `pipelines`. (its allocator, all accumulators).

        The accumulators are (the MMA's values, 1, 1, ACCUMULATORS). Blocks while another CTA of the SM holds tensor
        memory. Call it before CTAs of the next kernel may start: one that takes tensor memory waits for this kernel.
        """
        memory = cutlass.memory.TmemAllocator(  # with two CTAs, initializes a barrier, too
            barrier_for_retrieve=pipeline.NamedBarrier(barrier_id=ALLOCATED, num_threads=self.config.threads),
            allocator_warp_id=0, is_two_cta=self.ctas == 2,
        )  # fmt: skip
        cluster = (self.ctas, 1)
        pipeline.pipeline_init_arrive(cluster_shape_mn=cluster, is_relaxed=True)
        pipeline.pipeline_init_wait(cluster_shape_mn=cluster)
        # Two CTAs allocate through barriers in each other's shared memory, so both must have started.
        memory.allocate(ACCUMULATORS * self.config.tile_n)
        memory.relinquish_alloc_permit()
        memory.wait_for_alloc()
        shape = cute.append(mma.partition_shape_C(self.tile[:2]), ACCUMULATORS)
        return memory, cute.make_tensor(memory.retrieve_ptr(Float32), mma.make_fragment_C(shape).layout)

    @cute.jit
    def multiply_tile(self, mma, accs, rA, rB, loaded, done, read, written, steps: Int32):
        """Issues the next accumulator = A @ B over `steps` loaded stages, at least one. Returns the advanced states."""
        done.producer_acquire(written)  # the epilogue has read this accumulator
        prims.tcgen05_fence("after_thread_sync")
        acc = accs[None, None, None, written.index]
        mma.set(tcgen05.Field.ACCUMULATE, False)  # the first MMA overwrites
        for _ in cutlass.range(steps, unroll=1):
            loaded.consumer_wait(read)
            prims.tcgen05_fence("after_thread_sync")
            for kb in cutlass.range_constexpr(cute.size(rA, mode=[2])):
                cute.gemm(mma, acc, rA[None, None, kb, read.index], rB[None, None, kb, read.index], acc)
                mma.set(tcgen05.Field.ACCUMULATE, True)
            loaded.consumer_release(read)  # when the MMAs have read the stage, in both CTAs
            read.advance()
        done.producer_commit(written)  # when the MMAs are complete, in both CTAs
        written.advance()
        return read, written

    def reader(self, accs, thread: Int32):
        """(tiled copy, the thread's row of all accumulators per slice), for `Accumulator`.

        Thread i of warp w has lane 32 * w + i: a warp can only read the quarter of the lanes with its index modulo 4.
        """
        atom = cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(SLICE)), Float32)
        slices = cute.flat_divide(accs[(None, None), 0, 0, None], (TILE_M, SLICE))
        copy = tcgen05.make_tmem_copy(atom, slices[None, None, 0, 0, 0])
        return copy, copy.get_slice(thread).partition_S(slices)

    @cute.jit
    def wait_for_tile(self, done, state, copy, rows) -> Accumulator:
        """The next accumulator, complete. copy, rows: the result of `reader`."""
        done.consumer_wait(state)
        prims.tcgen05_fence("after_thread_sync")
        return Accumulator(copy, rows[None, None, None, None, None, state.index])

    @cute.jit
    def release(self, done, state):
        """An epilogue warp has read an accumulator, which may now be overwritten."""
        prims.tcgen05_fence("before_thread_sync")
        with cute.arch.elect_one():
            done.consumer_release(state)

    @cute.jit
    def free_tensor_memory(self, memory, accs):
        """Called by the epilogue warps, after their last load."""
        pipeline.NamedBarrier(barrier_id=READ, num_threads=32 * EPILOGUE_WARPS).arrive_and_wait()
        memory.free(accs.iterator)

    @cute.jit
    def leave(self):
        """Called by all threads. Neither CTA of a pair exits while the other may access its barriers."""
        if const_expr(self.ctas == 2):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()
