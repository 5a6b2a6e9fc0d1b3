"""Linear cross entropy: dw[t - v0] += the sum over a chunk's rows i with target t of grad_i * x[row_i], t in [v0, v1).

The rows come sorted by class (`lce_sort`), so a class's are neighbours. A CTA has a place, and work where a class
begins, at place s: a slice of the columns, of all rows of the class, ascending. Some tokens are the target of many
rows. A class with MANY_ROWS or more gives each of the first `num_warps` places 256 of these columns; there a warp has
each num_warps-th row, and their sums are added in order.

The sum is in fp32, and dw is read and rounded once. A bf16 dw was rounded before: rest[s] has the bits that this cut
off (`StoreAndRest`). Without them the sum of two large parts that nearly cancel would keep the error of one: 6 times
torch's, for a model whose outputs are its targets' averages.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64, const_expr

from quackish.configs.lce_rows import MANY_ROWS, LceTargetsConfig, LceTargetsProblem
from quackish.kernels.common.lce import after_previous, fake_count, load_at, load_eight
from quackish.kernels.common.rows import fake_pointer, vector_at


class LceTargets:
    def __init__(self, problem: LceTargetsProblem, config: LceTargetsConfig):
        self.problem, self.threads, self.batch = problem, config.threads, config.rows
        self.num_warps = config.threads // 32

    def fake_args(self):
        p = self.problem
        int32, fp32 = fake_pointer("int32", aligned=False), fake_pointer("float32", aligned=False)
        x, dw = fake_pointer(p.dtype, p.x_aligned), fake_pointer(p.dw_dtype)
        rest = fake_pointer("int16" if p.rest else None)
        numbers = Int64(8), Int32(0), Int32(1), Int32(0), Int32(1)
        return (x, int32, int32, fp32, fake_count(), dw, rest, *numbers, cute.runtime.make_fake_stream())

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, h)
        sorted_cls: cute.Pointer,  # (rows,)
        sorted_row: cute.Pointer,  # (rows,)
        sorted_grad: cute.Pointer,  # (rows,)
        num_live: cute.Pointer,  # (1,)
        dw: cute.Pointer,  # (v1 - v0, h)
        rest: Optional[cute.Pointer],  # (rows, h)
        x_stride: Int64,
        v0: Int32,
        v1: Int32,
        start: Int32,
        rows: Int32,
        stream: CUstream,
    ):
        of_rows = sorted_cls, sorted_row, sorted_grad
        self.kernel(x, of_rows, num_live, dw, rest, x_stride, v0, v1, start, rows).launch(
            grid=[rows, -(-self.problem.h // (8 * self.threads)), 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Pointer,
        of_rows: tuple,
        num_live: cute.Pointer,
        dw: cute.Pointer,
        rest: Optional[cute.Pointer],
        x_stride: Int64,
        v0: Int32,
        v1: Int32,
        start: Int32,
        rows: Int32,
    ):
        tid, _, _ = cute.arch.thread_idx()
        s, slice_of_h, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        h, num_warps = const_expr(self.problem.h), const_expr(self.num_warps)
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(num_warps * 256), byte_alignment=16)

        # The class here, and how many of the places from MANY_ROWS before it on are its own: a lane looks at each.
        # The launch before this one writes dw and rest alone: the class's first rows are on their way before it ends.
        cute.arch.fence_acq_rel_gpu()
        live = cutlass.min(load_at(num_live, 0) - start, rows)
        here = self.place(of_rows, s - MANY_ROWS + lane, live)
        t = cute.arch.shuffle_sync(here[0], MANY_ROWS)
        its = cute.arch.vote_ballot_sync(here[0] == t)
        before, count = cute.arch.popc(its & ((1 << MANY_ROWS) - 1)), cute.arch.popc(its)
        many = count >= MANY_ROWS
        works = s < live and t >= v0 and t < v1 and before < (num_warps if many else 1)
        column = (slice_of_h * self.threads + tid) * 8
        lane0 = Int32(MANY_ROWS)  # has the first of this warp's places
        if many:
            lane0 = Int32(0)
            column = (slice_of_h * self.threads + before * 32 + lane) * 8
            here = self.place(of_rows, s - before + warp + lane * num_warps, live)
            count = self.count(here, t)
        s = s - before

        raw = cute.make_rmem_tensor((8, self.batch), x.dtype)
        # Lanes behind the last column work as well: they have places that the others ask for.
        columns = cutlass.min(column, h - 8)
        if works:
            self.load_rows(raw, x + columns, here, x_stride, lane0, count)
        after_previous()

        if works:
            total = cute.make_rmem_tensor((8,), Float32)
            total.fill(0.0)
            writes = column < h and (warp == 0 or not many)
            at = Int64(t - v0) * h + columns
            old = self.exact(vector_at(dw, at, 8), rest, Int64(s) * h + columns)
            self.add_rows(total, raw, here, lane0, Int32(0), count)
            first, places = Int32(self.batch), s
            while count > 0:
                for k in cutlass.range(first, count, self.batch, unroll=1):
                    self.load_more_rows(raw, x + columns, here, x_stride, lane0, k, count)
                    self.add_rows(total, raw, here, lane0, k, count)
                first, more, count = Int32(0), many and count == 32, Int32(0)
                if more:
                    places += 32 * num_warps
                    here = self.place(of_rows, places + warp + lane * num_warps, live)
                    count = self.count(here, t)
            if many:
                vector_at(sSums.iterator, tid * 8, 8).store(total.load())
                cute.arch.sync_threads()
                if warp == 0:
                    for k in cutlass.range_constexpr(1, num_warps):
                        total.store(total.load() + vector_at(sSums.iterator, (k * 32 + lane) * 8, 8).load())
            if writes:
                vector_at(dw, at, 8).store((old + total.load()).to(dw.dtype))

    @cute.jit
    def exact(self, out: cute.Tensor, rest: Optional[cute.Pointer], at: Int64):
        """out as it was before it was rounded."""
        if const_expr(rest is None):
            return out.load().to(Float32)
        upper, lower = out.load().bitcast(Int16).to(Int32), vector_at(rest, at, 8).load().to(Int32)
        return (upper * 0x10000 + lower).bitcast(Float32)

    @cute.jit
    def place(self, of_rows: tuple, at: Int32, live: Int32):
        """(class, row, grad) of a place; class -2 where there is none. No class is -1, and sorted first."""
        t, row, grad = Int32(-2), Int32(0), Float32(0.0)
        if at >= 0 and at < live:
            t, row, grad = load_at(of_rows[0], at), load_at(of_rows[1], at), load_at(of_rows[2], at)
        return t, row, grad

    def count(self, here: tuple, t: Int32) -> Int32:
        """How many of the lanes' places have class t: the first ones."""
        return cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t))

    @cute.jit
    def load_rows(self, raw, x: cute.Pointer, here: tuple, x_stride: Int64, lane0: Int32, count: Int32):
        """The first batch: most classes have one row, and nothing else is to be waited for."""
        for b in cutlass.range_constexpr(self.batch):
            r = cute.arch.shuffle_sync(here[1], lane0 + b)
            if b < count:
                raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))

    @cute.jit
    def load_more_rows(self, raw, x: cute.Pointer, here: tuple, x_stride: Int64, lane0: Int32, k: Int32, count: Int32):
        """Rows k and up, a batch; behind the last one that again: loads in branches would wait for each other, 3.4 ms
        for 8192 rows of a class instead of 1.2 (H200, H 4096, not spread over CTAs and warps)."""
        for b in cutlass.range_constexpr(self.batch):
            r = cute.arch.shuffle_sync(here[1], lane0 + cutlass.min(k + b, count - 1))
            raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))

    @cute.jit
    def add_rows(self, total, raw, here: tuple, lane0: Int32, k: Int32, count: Int32):
        for b in cutlass.range_constexpr(self.batch):
            grad = cute.arch.shuffle_sync(here[2], lane0 + k + b)
            if k + b < count:
                total.store(total.load() + raw[None, b].load().to(Float32) * grad)
