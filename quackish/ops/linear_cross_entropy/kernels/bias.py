"""Linear cross entropy: dbias[c] = sum over the live rows i of a chunk of row_scale[i] * exp_logits[i, c].

Summed in fp32 in a fixed order, without atomics. Each CTA has `lanes * 8` columns and all rows. A thread sums eight
columns of every (threads / lanes)-th row. Then the CTA adds up the threads' sums of each column.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, vector_at
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel
from quackish.ops.linear_cross_entropy.row_problems import BiasArgs, LceBiasConfig, LceBiasProblem


class LceBias(RowKernel):
    def __init__(self, problem: LceBiasProblem, config: LceBiasConfig):
        super().__init__(problem, config)
        self.columns = config.lanes * 8
        self.groups = config.threads // config.lanes

    @cute.jit
    def __call__(self, args: BiasArgs, stream: CUstream):
        self.kernel(args).launch(**self.launch_options(cute.ceil_div(args.n, self.columns), stream, smem_carveout=50))

    @cute.kernel
    def kernel(self, args: BiasArgs):
        after_previous()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.groups * self.columns), byte_alignment=16)
        lane, group = tid % self.config.lanes, tid // self.config.lanes
        col = cta * self.columns + lane * 8
        live = cutlass.min(load_at(args.num_live, 0) - args.start, args.rows)

        # sum this thread's rows, with a batch of loads in flight
        batch, groups = const_expr(4), self.groups
        raw = cute.make_rmem_tensor((8, batch), args.exp_logits.dtype)
        rScale = cute.make_rmem_tensor((batch,), Float32)
        rScale.fill(1.0)
        acc = cute.make_rmem_tensor((8,), Float32)
        acc.fill(0.0)
        if col < args.n:
            for i in cutlass.range(group, live, groups * batch, unroll=1):
                for b in cutlass.range_constexpr(batch):
                    if i + b * groups < live:
                        offset = Int64(i + b * groups) * args.exp_logits_stride + col
                        raw[None, b].store(vector_at(args.exp_logits, offset, 8).load())
                        if const_expr(args.row_scale is not None):
                            rScale[b] = load_at(args.row_scale, i + b * groups)
                for b in cutlass.range_constexpr(batch):
                    if i + b * groups < live:
                        acc.store(acc.load() + raw[None, b].load().to(Float32) * rScale[b])

        # add up the threads' sums of each column
        vector_at(sSums.iterator, tid * 8, 8).store(acc.load())
        cute.arch.sync_threads()
        for j in cutlass.range(tid, self.columns, self.config.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sSums[k * self.columns + j]
            if cta * self.columns + j < args.n:
                out = cute.make_tensor(args.db + (cta * self.columns + j), cute.make_layout(1))
                out[0] = out[0] + total if const_expr(self.problem.accumulate) else total
