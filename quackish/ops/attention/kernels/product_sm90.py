"""Backward of attention on Hopper: dq = scale * ds k, for ds that the kernel for dk and dv stored as dbias.

A CTA has `num_wgs` blocks of 64 queries and walks over the keys, like forward.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, pipeline
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers as sm90

from quackish.kernels.dependent_launch import after_previous
from quackish.ops.attention.kernels.attention_sm90 import EVICT_FIRST, AttentionSm90
from quackish.ops.attention.kernels.items import Item
from quackish.ops.attention.kernels.scores import Block
from quackish.ops.attention.kernels.swizzled_tile import SwizzledTile
from quackish.ops.attention.problems import BLOCK, ProductArgs


class AttentionProductSm90(AttentionSm90):
    rows_are_queries = True

    def __init__(self, problem, config):
        super().__init__(problem, config)
        self.ds = SwizzledTile(self.dtype, BLOCK, self.tile_k)

    @property
    def stage_bytes(self) -> int:
        return self.config.num_wgs * self.ds.bytes + self.other.bytes

    @cute.jit
    def __call__(self, args: ProductArgs, stream: CUstream):
        s, c = args.scores, self.config
        ds_atom = self.load_atom(self.ds, self.tensor(args.ds, s.num_q, s.num_k, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, s.heads // s.group, s.batch))
        layouts = [self.ds.layout(c.num_wgs * c.num_stages), self.other.layout(c.num_stages)]
        self.kernel([ds_atom, k_atom], args, layouts).launch(**self.launch_options(args, stream))

    @cute.kernel
    def kernel(self, atoms: list, args: ProductArgs, layouts: list):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sWalk = self.allocate_walk(smem)
        sDS, sK = self.ds.allocate(smem, layouts[0]), self.other.allocate(smem, layouts[1])
        loaded = self.pipeline(c.num_stages, self.stage_bytes)
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, [sDS, sK], sWalk, loaded, args)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            self.consume(sDS, sK, loaded, args, wg - 1, tid % 128)

    @cute.jit
    def produce(self, atoms, shared, sWalk, loaded, args: ProductArgs):
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            head = item.head
            ds_part = self.part(atoms[0], shared[0], self.of_head(atoms[0][1], head.query_head, head.batch), self.ds)
            k_part = self.part(atoms[1], shared[1], self.of_head(atoms[1][1], head.key_head, head.batch), self.other)
            state = self.load_item([atoms, ds_part, k_part], item, args, loaded, state, sWalk, 0)
        loaded.producer_tail(state)

    @cute.jit
    def load_tile(self, loads, item: Item, args: ProductArgs, n: Int32, loaded, state, is_full):
        """Loads tile n of ds and k."""
        atoms, ds_part, k_part = loads
        wgs, barrier = self.config.num_wgs, loaded.producer_get_barrier(state)
        for w in cutlass.range_constexpr(wgs):
            stage = state.index * wgs + w
            self.load(atoms[0], ds_part, item.tile * wgs + w, n, stage, barrier, Int64(EVICT_FIRST))
        self.load(atoms[1], k_part, n, 0, state.index, barrier)

    def mma(self):
        """ds (BLOCK, keys) @ k (keys, d), both in shared memory, added to the accumulator."""
        mma = sm90.make_trivial_tiled_mma(
            self.dtype, self.dtype, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1),
            tiler_mn=(BLOCK, self.d),
        )  # fmt: skip
        mma.set(warpgroup.Field.ACCUMULATE, True)
        return mma

    @cute.jit
    def consume(self, sDS, sK, loaded, args: ProductArgs, wg: Int32, thread: Int32):
        c, s = self.config, args.scores
        mma = self.mma()
        part = mma.get_slice(0)
        rDS = mma.make_fragment_A(part.partition_A(sDS))
        rK = mma.make_fragment_B(part.partition_B(self.transposed(sK, c.num_stages)))
        dq = self.accumulator(self.d)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            dq.fill(0.0)
            for _ in cutlass.range(item.first, self.last_of(item, args, 0), unroll=1):
                loaded.consumer_wait(read)
                of_ds = rDS[None, None, None, read.index * c.num_wgs + wg]
                self.multiply(dq, [mma], of_ds, rK[None, None, None, read.index])
                warpgroup.wait_group(0)
                loaded.consumer_release(read)
                read.advance()
            block = Block(item.head, item.tile * self.tile_q + wg * BLOCK, Int32(0), BLOCK, self.tile_k, wg, thread)
            for v in cutlass.range_constexpr(cute.size(dq)):
                dq[v] = dq[v] * s.scale
            self.write_queries(dq, args.dq, s, block)
