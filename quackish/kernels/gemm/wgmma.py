"""Shared by the persistent, warp-specialized Hopper GEMMs: clusters, pipeline stages, WGMMA."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr, pipeline
from cutlass.cute.nvgpu import cpasync, warpgroup
from cutlass.utils import hopper_helpers as sm90

from quackish.kernels.gemm.gemm_kernel import LAYOUT, MAJOR, GemmKernel
from quackish.kernels.gemm.problem import TILE_K
from quackish.kernels.gemm.sm90_config import BLOCK_M
from quackish.kernels.gemm.tile_store import NamedBarrier


class WgmmaKernel(GemmKernel):
    """Base class of Hopper's GEMMs. A config is a GemmConfig."""

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.tile = (config.tile_m, config.tile_n, TILE_K)
        self.cluster = (config.cluster_m, config.cluster_n)
        self.b_boxes = 2 if self.has_pairs else 1  # TMA copies of B per stage

    # On the host ------------------------------------------------------------------------------------------------------

    def operands(self, a_major: str, b_major: str):
        """(its MMAs, the layout of A's stages in shared memory, that of B's)"""
        stages = self.config.num_stages
        a = sm90.make_smem_layout_a(LAYOUT[a_major], self.tile, self.dtype, stages)
        b = sm90.make_smem_layout_b(LAYOUT[b_major], self.tile, self.dtype, stages)
        return self.tiled_mmas(MAJOR[a_major], MAJOR[b_major]), a, b

    def a_atom(self, mA, layout):
        return self.load_atom(mA, layout, (self.config.tile_m, TILE_K), self.config.cluster_n)

    def b_atom(self, mB, layout):
        c, box = self.config, self.config.tile_n // self.b_boxes
        if self.b_boxes > 1:
            layout = sm90.make_smem_layout_b(LAYOUT[self.majors[1]], (c.tile_m, box, TILE_K), self.dtype, c.num_stages)
        return self.load_atom(mB, layout, (box, TILE_K), c.cluster_m)

    def tiled_mmas(self, a_major, b_major):
        """[MMA that overwrites the accumulator, MMA that adds to it]"""
        c, mmas = self.config, []
        for accumulate in (False, True):
            mma = sm90.make_trivial_tiled_mma(
                self.dtype, self.dtype, a_major, b_major, Float32, (1 if c.pingpong else c.num_wgs, 1, 1),
                tiler_mn=(BLOCK_M, c.tile_n),
            )  # fmt: skip
            mma.set(warpgroup.Field.ACCUMULATE, accumulate)
            mmas.append(mma)
        return mmas

    def launch_options(self, clusters: Int32, stream):
        c = self.config
        return dict(
            grid=[c.cluster_m, c.cluster_n, clusters], block=[c.threads, 1, 1],
            cluster=[c.cluster_m, c.cluster_n, 1], min_blocks_per_mp=1, stream=stream, use_pdl=True,
        )  # fmt: skip

    # On the device ----------------------------------------------------------------------------------------------------

    def allocate(self, smem, sA_layout, sB_layout):
        """The stages of A and of B in shared memory."""
        sA = smem.allocate_tensor(self.dtype, sA_layout.outer, byte_alignment=1024, swizzle=sA_layout.inner)
        sB = smem.allocate_tensor(self.dtype, sB_layout.outer, byte_alignment=1024, swizzle=sB_layout.inner)
        return sA, sB

    def multicast(self):
        """(rank in the cluster, rank along m, rank along n, multicast mask of A, multicast mask of B) of this CTA."""
        c, cta_layout = self.config, self.cta_layout()
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
        _, rank_m, rank_n, _ = cta_layout.get_flat_coord(rank)
        at = (0, rank_m, rank_n, 0)
        mask_a = cpasync.create_tma_multicast_mask(cta_layout, at, 2) if c.cluster_n > 1 else None
        mask_b = cpasync.create_tma_multicast_mask(cta_layout, at, 1) if c.cluster_m > 1 else None
        return rank, rank_m, rank_n, mask_a, mask_b

    def fragments(self, mma, sA, sB, wg: Int32):
        """A consumer warp group's A and B per stage, its accumulator, and the accumulator's blocks of BLOCK_M rows."""
        c, (tile_m, tile_n, _) = self.config, self.tile
        part = mma.get_slice(0 if c.pingpong else cute.make_layout(c.num_wgs, stride=128)(wg - 1))
        rA = mma.make_fragment_A(part.partition_A(sA))
        rB = mma.make_fragment_B(part.partition_B(sB))
        acc = cute.make_rmem_tensor(part.partition_shape_C((tile_m, tile_n)), Float32)
        layout = cute.make_layout(part.partition_shape_C((tile_m // c.row_blocks, tile_n)))
        accs = [cute.make_tensor(acc.iterator + b * cute.size(layout), layout) for b in range(c.row_blocks)]
        return rA, rB, acc, accs

    def stages(self):
        """The pipeline of loaded stages."""
        c, (tile_m, tile_n, tile_k) = self.config, self.tile
        num_readers = 1 if c.pingpong else c.num_wgs  # warp groups that read a stage
        arrivals = (c.cluster_m + c.cluster_n - 1) * 4 * num_readers  # one per warp and CTA that shares a multicast
        return pipeline.PipelineTmaAsync.create(
            num_stages=c.num_stages,
            tx_count=(tile_m + tile_n) * tile_k * self.dtype.width // 8,
            cta_layout_vmnk=self.cta_layout(),
            producer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread),
            consumer_group=pipeline.CooperativeGroup(pipeline.Agent.Thread, arrivals),
            defer_sync=True,
        )

    def cta_layout(self):
        return cute.make_layout((1, self.config.cluster_m, self.config.cluster_n, 1))

    @cute.jit
    def multiply_stages(
        self, mmas: list, acc, rA, rB, loaded, read, released, steps: Int32, has_previous, has_next, wg: Int32
    ):  # fmt: skip
        """acc = A @ B over the next `steps` loaded stages, at least one. Returns the advanced pipeline states.

        read, released: the next stage to multiply, and the next one to give back to the producer.
        has_previous, has_next: whether the other warp group of a ping-pong pair has a tile before and after this one.
        """
        (overwrite, add), num_wgs = mmas, self.config.num_wgs
        if const_expr(self.config.pingpong):
            if has_previous:
                cute.arch.barrier(barrier_id=NamedBarrier.ORDER.of(wg, num_wgs), number_of_threads=256)
        loaded.consumer_wait(read)
        self.multiply(overwrite, add, acc, rA, rB, read.index)
        read.advance()
        for kt in cutlass.range(1, steps, unroll=1):
            loaded.consumer_wait(read)
            self.multiply(add, add, acc, rA, rB, read.index)
            read.advance()
            warpgroup.wait_group(1)  # the stage before this one has been read
            loaded.consumer_release(released)
            released.advance()
        if const_expr(self.config.pingpong):
            if has_next:  # the other warp group's WGMMAs queue behind these
                cute.arch.barrier_arrive(barrier_id=NamedBarrier.ORDER.of(3 - wg, num_wgs), number_of_threads=256)
        warpgroup.wait_group(0)
        loaded.consumer_release(released)
        released.advance()
        return read, released

    def multiply(self, first_mma, mma, acc, rA, rB, stage):
        """Issues acc (+)= A @ B of one stage, asynchronously. `first_mma` is the MMA of its first step."""
        warpgroup.fence()
        for kb in range(cute.size(rA, mode=[2])):
            cute.gemm(mma if kb else first_mma, acc, rA[None, None, kb, stage], rB[None, None, kb, stage], acc)
        warpgroup.commit_group()
