"""Attention forward on Hopper: o = softmax(x) v and lse, for x of `common/attention_scores.py`.

A CTA has `num_wgs` blocks of 64 queries, one per consumer warp group. A producer warp loads tiles of k, v, bias and
mask. The softmax is online, in fp32: q k^T of the next tile and p v of the previous one are in flight together.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr, pipeline

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.math import LN_2, LOG2_E
from quackish.ops.attention.kernels.attention_sm90 import AttentionSm90
from quackish.ops.attention.kernels.items import Item
from quackish.ops.attention.kernels.scores import Block, pair_rows
from quackish.ops.attention.problems import BLOCK, LARGE, ForwardArgs


class AttentionForwardSm90(AttentionSm90):
    rows_are_queries = True
    pingpong = True

    @property
    def stage_bytes(self) -> int:
        return self.other.bytes + self.score_bytes

    @cute.jit
    def __call__(self, args: ForwardArgs, stream: CUstream):
        s = args.scores
        heads_k = s.heads // s.group
        q_atom = self.load_atom(self.own, self.tensor(s.q, s.num_q, s.d, s.heads, s.batch))
        k_atom = self.load_atom(self.other, self.tensor(s.k, s.num_k, s.d, heads_k, s.batch))
        v_atom = self.load_atom(self.other, self.tensor(s.v, s.num_k, s.d, heads_k, s.batch))
        layouts = [self.own.layout(self.num_own), self.other.layout(self.config.num_stages)]
        atoms = [q_atom, k_atom, v_atom]
        self.kernel(atoms, self.score_atoms(s), args, layouts, self.score_layouts()).launch(
            **self.launch_options(args, stream)
        )

    @cute.kernel
    def kernel(self, atoms: list, score_atoms: list, args: ForwardArgs, layouts: list, score_layouts: list):
        c = self.config
        tid, _, _ = cute.arch.thread_idx()
        wg = cute.arch.make_warp_uniform(tid // 128)
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())

        # shared memory and barriers
        smem = cutlass.memory.SmemAllocator()
        sWalk, sItems = self.allocate_walk(smem), self.allocate_items(smem)
        sQ = self.own.allocate(smem, layouts[0])
        sK, sV = self.other.allocate(smem, layouts[1]), self.other.allocate(smem, layouts[1])
        tiles = self.allocate_scores(smem, score_layouts)
        queries = self.own_pipeline(1)
        keys, values = (self.pipeline(c.num_stages, num_bytes) for num_bytes in (self.stage_bytes, self.other.bytes))
        pipeline.pipeline_init_arrive(cluster_shape_mn=(1, 1), is_relaxed=True)
        after_previous()

        pipeline.pipeline_init_wait(cluster_shape_mn=(1, 1))

        if wg == 0:
            cute.arch.setmaxregister_decrease(self.registers[0])
            if warp == 0:
                self.produce(atoms, score_atoms, [sK, sV, tiles, sWalk], keys, values, args)
            elif warp == 1:
                self.produce_own([(atoms[0], sQ)], queries, sItems, args, 1)
        else:
            cute.arch.setmaxregister_increase(self.registers[1])
            shared = [sQ, sK, sV, tiles, sWalk, sItems]
            self.consume(shared, queries, keys, values, args, wg - 1, tid % 128)

    @cute.jit
    def produce(self, atoms, score_atoms, shared, keys, values, args: ForwardArgs):
        s = args.scores
        sK, sV, tiles, sWalk = shared
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.config.num_stages)
        policy = self.bias_policy(s)
        for turn in cutlass.range(self.turns(args), unroll=1):
            item = self.item(turn, args)
            head = item.head
            k_part = self.part(atoms[1], sK, self.of_head(atoms[1][1], head.key_head, head.batch), self.other)
            v_part = self.part(atoms[2], sV, self.of_head(atoms[2][1], head.key_head, head.batch), self.other)
            parts = [k_part, v_part, *self.score_parts(score_atoms, tiles, s, head)]
            loads = [atoms, score_atoms, parts, policy, values]
            state = self.load_item(loads, item, args, keys, state, sWalk, 1)
        keys.producer_tail(state.clone())
        values.producer_tail(state)

    @cute.jit
    def load_tile(self, loads, item: Item, args: ForwardArgs, n: Int32, keys, state, is_full):
        """Loads tile n of k, and of bias and mask for an item's queries, and then that of v."""
        atoms, score_atoms, parts, policy, values = loads
        barrier = keys.producer_get_barrier(state)
        self.load(atoms[1], parts[0], n, 0, state.index, barrier)
        self.load_scores(score_atoms, parts[2:], item.tile, n, state.index, barrier, policy, is_full)
        values.producer_acquire(state)
        self.load(atoms[2], parts[1], n, 0, state.index, values.producer_get_barrier(state))

    @cute.jit
    def consume(self, shared, queries, keys, values, args: ForwardArgs, wg: Int32, thread: Int32):
        c, s = self.config, args.scores
        sQ, sK, sV, tiles, sWalk, sItems = shared
        pv_mma = self.mma_from_registers()
        operands = self.own_operands(self.tile_k, [sQ])
        qk_mmas = operands[0][0]
        rK = qk_mmas[0].make_fragment_B(qk_mmas[0].get_slice(0).partition_B(sK))
        rV = pv_mma.make_fragment_B(pv_mma.get_slice(0).partition_B(self.transposed(sV, c.num_stages)))
        x, o, p = self.accumulator(self.tile_k), self.accumulator(self.d), self.operand(self.tile_k)
        top, total = cute.make_rmem_tensor((2,), Float32), cute.make_rmem_tensor((2,), Float32)  # per row
        own = self.own_state(wg)
        read = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        previous = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, c.num_stages)
        unit = self.unit_of_scores(s)
        self.start_pingpong(wg)
        for _ in cutlass.range(self.turns(args), unroll=1):
            item = self.own_item(args, sItems, queries, own)
            ((_, rQ),) = self.load_own(operands, [sQ], own.index, thread)
            block = Block(
                item.head, item.tile * self.tile_q + wg * BLOCK, item.first * self.tile_k, BLOCK, self.tile_k, wg,
                thread,
            )  # fmt: skip
            o.fill(0.0)
            top.fill(-Float32.inf)
            total.fill(0.0)

            # the first tile
            keys.consumer_wait(read)
            self.multiply(x, qk_mmas, rQ, rK[None, None, None, read.index])
            cute.nvgpu.warpgroup.wait_group(0)
            at, is_full = self.loaded_block(block, sWalk, read.index, item.first)
            self.scores(x, s, tiles, read.index, at, None, None, is_full)
            self.release(keys, read)
            self.exponentials(x, top, total, unit)
            self.round_to_operand(p, x)
            read.advance()
            for n in cutlass.range(item.first + 1, item.last, unroll=1):
                keys.consumer_wait(read)
                values.consumer_wait(previous)
                self.wait_to_issue(wg)
                self.multiply(x, qk_mmas, rQ, rK[None, None, None, read.index])
                self.multiply(o, [pv_mma], p, rV[None, None, None, previous.index])
                self.let_next_issue(wg)
                cute.nvgpu.warpgroup.wait_group(1)
                at, is_full = self.loaded_block(block, sWalk, read.index, n)
                self.scores(x, s, tiles, read.index, at, None, None, is_full)
                self.release(keys, read)
                rescale = self.exponentials(x, top, total, unit)
                cute.nvgpu.warpgroup.wait_group(0)
                values.consumer_release(previous)
                previous.advance()
                for v in cutlass.range_constexpr(cute.size(o)):
                    o[v] = o[v] * rescale[v // 2 % 2]
                self.round_to_operand(p, x)
                read.advance()
            own = self.release_own(queries, own)
            values.consumer_wait(previous)
            self.multiply(o, [pv_mma], p, rV[None, None, None, previous.index])
            cute.nvgpu.warpgroup.wait_group(0)
            values.consumer_release(previous)
            previous.advance()
            self.finish(o, top, total, unit, args, block)
        self.end_pingpong(wg)

    @cute.jit
    def loaded_block(self, block: Block, sWalk, stage: Int32, n: Int32):
        """(block with the keys of the loaded tile, `is_full` of `scores`); without a mask it is tile n."""
        # Reading both from global memory, a branch around the mask spills registers.
        n, is_full = self.loaded_tile(sWalk, stage, n, self.problem.bias_aligned or self.problem.mask_aligned)
        return block._replace(k0=n * self.tile_k), is_full

    @cute.jit
    def exponentials(self, x: cute.Tensor, top: cute.Tensor, total: cute.Tensor, unit: Float32):
        """x = exp(unit (x - top)) with the rows' new maxima; returns the factors for what was summed before."""
        factor = unit * LOG2_E
        rescale = cute.make_rmem_tensor((2,), Float32)
        for r in cutlass.range_constexpr(2):
            new = top[r]
            for i in cutlass.range_constexpr(cute.size(x)):
                if const_expr(i // 2 % 2 == r):
                    new = cute.arch.fmax(new, x[i])
            for offset in (1, 2):
                new = cute.arch.fmax(new, cute.arch.shuffle_sync_bfly(new, offset=offset))
            base = Float32(0.0) if new == -Float32.inf else new
            shift = base * factor
            rescale[r] = cute.math.exp2(top[r] * factor - shift, fastmath=True)
            # x * factor - shift is one multiply-add. It is not 0 where x is the maximum, because only shift is rounded:
            # too far from 0 if x is large.
            is_large = (shift > LARGE) | (shift < -LARGE)
            if cute.arch.vote_any_sync(is_large):
                subtracted = base if is_large else Float32(0.0)
                for i in cutlass.range_constexpr(cute.size(x)):
                    if const_expr(i // 2 % 2 == r):
                        x[i] = x[i] - subtracted
                if is_large:
                    rescale[r], shift = cute.math.exp2((top[r] - base) * factor, fastmath=True), Float32(0.0)
            top[r] = new
            added = Float32(0.0)
            for i in cutlass.range_constexpr(cute.size(x)):
                if const_expr(i // 2 % 2 == r):
                    x[i] = cute.math.exp2(x[i] * factor - shift, fastmath=True)
                    added = added + x[i]
            total[r] = total[r] * rescale[r] + added
        return rescale

    @cute.jit
    def finish(self, o: cute.Tensor, top, total, unit: Float32, args: ForwardArgs, block: Block):
        """Divides by the sums, and stores o, lse and its residual."""
        s, head = args.scores, block.head
        for r in cutlass.range_constexpr(2):
            for offset in (1, 2):
                total[r] = total[r] + cute.arch.shuffle_sync_bfly(total[r], offset=offset)
            divided = Float32(1.0) / total[r]
            for i in cutlass.range_constexpr(cute.size(o)):
                if const_expr(i // 2 % 2 == r):
                    o[i] = Float32(0.0) if total[r] == 0.0 else o[i] * divided
            row = block.q0 + pair_rows(block.thread) + 8 * r
            if block.thread % 4 == 0 and row < s.num_q:
                lse = top[r] * unit + cute.math.log2(total[r]) * LN_2
                at = (Int64(head.batch) * s.heads + head.query_head) * s.num_q + row
                (args.lse + at).store(-Float32.inf if total[r] == 0.0 else lse)
                residual = cute.math.fma(top[r], unit, -lse) + cute.math.log2(total[r]) * LN_2
                is_large = (total[r] > 0.0) & ((lse > LARGE) | (lse < -LARGE))
                (args.lse_residual + at).store(residual if is_large else Float32(0.0))
        self.write_queries(o, args.o, s, block)
