"""Linear cross entropy: dbias[c] = sum over the live rows i of a chunk of row_scale[i] * E[i, c], in fp32.

A CTA has `lanes * 8` columns and all rows. A thread adds eight columns of every (threads / lanes)-th row, in order;
then the threads of a column are added, in order: no atomic, and the same bits on every run.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import LceBiasConfig, LceBiasProblem
from quackish.kernels.common.lce import after_previous, fake_count, load_at
from quackish.kernels.common.rows import fake_pointer, vector_at


class LceBias:
    def __init__(self, problem: LceBiasProblem, config: LceBiasConfig):
        self.problem, self.config = problem, config
        self.columns = config.lanes * 8
        self.groups = config.threads // config.lanes

    def fake_args(self):
        p = self.problem
        row_scale = fake_pointer("float32" if p.row_scale else None, aligned=False)
        pointers = fake_pointer(p.dtype), row_scale, fake_pointer("float32", aligned=False)
        stream = cute.runtime.make_fake_stream()
        return (*pointers, fake_count(), Int64(8), Int32(0), Int32(1), Int32(1), stream)

    @cute.jit
    def __call__(
        self,
        e: cute.Pointer,  # (rows, n)
        row_scale: Optional[cute.Pointer],  # (rows,)
        db: cute.Pointer,  # (n,)
        num_live: cute.Pointer,  # (1,)
        e_stride: Int64,  # a multiple of 8
        start: Int32,
        rows: Int32,
        n: Int32,
        stream: CUstream,
    ):
        self.kernel(e, row_scale, db, num_live, e_stride, start, rows, n).launch(
            grid=[cute.ceil_div(n, self.columns), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=65_536 // (self.config.threads * 64),
            preferred_smem_carveout=50,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        e: cute.Pointer,
        row_scale: Optional[cute.Pointer],
        db: cute.Pointer,
        num_live: cute.Pointer,
        e_stride: Int64,
        start: Int32,
        rows: Int32,
        n: Int32,
    ):
        after_previous()
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.groups * self.columns), byte_alignment=16)
        lane, group = tid % self.config.lanes, tid // self.config.lanes
        col = cta * self.columns + lane * 8
        live = cutlass.min(load_at(num_live, 0) - start, rows)

        # this thread's rows, a batch in flight
        batch, groups = const_expr(4), self.groups
        raw = cute.make_rmem_tensor((8, batch), e.dtype)
        rScale = cute.make_rmem_tensor((batch,), Float32)
        rScale.fill(1.0)
        acc = cute.make_rmem_tensor((8,), Float32)
        acc.fill(0.0)
        if col < n:
            for i in cutlass.range(group, live, groups * batch, unroll=1):
                for b in cutlass.range_constexpr(batch):
                    if i + b * groups < live:
                        raw[None, b].store(vector_at(e, Int64(i + b * groups) * e_stride + col, 8).load())
                        if const_expr(row_scale is not None):
                            rScale[b] = load_at(row_scale, i + b * groups)
                for b in cutlass.range_constexpr(batch):
                    if i + b * groups < live:
                        acc.store(acc.load() + raw[None, b].load().to(Float32) * rScale[b])

        # over the threads of a column
        vector_at(sSums.iterator, tid * 8, 8).store(acc.load())
        cute.arch.sync_threads()
        for j in cutlass.range(tid, self.columns, self.config.threads, unroll=1):
            total = Float32(0.0)
            for k in cutlass.range(groups, unroll=8):
                total += sSums[k * self.columns + j]
            if cta * self.columns + j < n:
                out = cute.make_tensor(db + (cta * self.columns + j), cute.make_layout(1))
                out[0] = out[0] + total if const_expr(self.problem.accumulate) else total
