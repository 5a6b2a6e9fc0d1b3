"""Linear cross entropy: dw[t - v0] += the sum over a chunk's rows i with target t of grad_i * x[row_i], t in [v0, v1).

The rows come sorted by class (`lce_sort`), so a class's are neighbours. A CTA has 256 columns; each of its warps looks
at `places` places and sums the rows of each class that begins there, ascending, if they are fewer than MANY_ROWS. Some
tokens are the target of many rows: these are left to all warps of the CTA, each of which has every num_warps-th row,
and their sums are added in order.

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

COLUMNS = 256  # of a CTA, eight a lane


class LceTargets:
    def __init__(self, problem: LceTargetsProblem, config: LceTargetsConfig):
        self.problem, self.threads, self.batch, self.places = problem, config.threads, config.rows, config.places
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
            grid=[cute.ceil_div(rows, self.num_warps * self.places), -(-self.problem.h // COLUMNS), 1],
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
        cta, slice_of_h, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        h, num_places = const_expr(self.problem.h), const_expr(self.places)
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.num_warps * COLUMNS), byte_alignment=16)
        sMany = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps * num_places), byte_alignment=16)
        column = slice_of_h * COLUMNS + lane * 8
        writes = column < h
        # Lanes behind the last column work as well: they have places that the others ask for.
        column = cutlass.min(column, h - 8)
        x = x + column

        # Each place's class, how many of the places from there on have it, and its first row. The launch before this
        # one writes dw and rest alone: rows are on their way before it ends.
        cute.arch.fence_acq_rel_gpu()
        live = cutlass.min(load_at(num_live, 0) - start, rows)
        first = (cta * self.num_warps + warp) * num_places
        here = self.place(of_rows, first - 1 + lane, live)
        rCount = cute.make_rmem_tensor((num_places,), Int32)  # 0 where this warp has nothing to do
        raw = cute.make_rmem_tensor((8, num_places), x.dtype)
        for q in cutlass.range_constexpr(num_places):
            t = cute.arch.shuffle_sync(here[0], 1 + q)
            begins = cute.arch.shuffle_sync(here[0], q) != t
            count = cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t) & -(2 << q))
            count = count if begins and t >= v0 and t < v1 else Int32(0)
            if lane == 0:
                sMany[warp * num_places + q] = first + q if count >= MANY_ROWS else Int32(-1)
            rCount[q] = count if count < MANY_ROWS else Int32(0)
            row = cute.arch.shuffle_sync(here[1], 1 + q)
            if rCount[q] > 0:
                raw[None, q].store(load_eight(x, Int64(row) * x_stride, self.problem.x_aligned))
        after_previous()

        # classes with few rows
        total = cute.make_rmem_tensor((8,), Float32)
        for q in cutlass.range_constexpr(num_places):
            if rCount[q] > 0:
                at = Int64(cute.arch.shuffle_sync(here[0], 1 + q) - v0) * h + column
                old = self.exact(vector_at(dw, at, 8), rest, Int64(first + q) * h + column)
                total.store(raw[None, q].load().to(Float32) * cute.arch.shuffle_sync(here[2], 1 + q))
                self.add_rows(total, x, here, x_stride, Int32(1 + q), Int32(1), rCount[q])
                if writes:
                    vector_at(dw, at, 8).store((old + total.load()).to(dw.dtype))

        # classes with many
        cute.arch.sync_threads()
        for i in cutlass.range(self.num_warps * num_places, unroll=1):
            s = sMany[i]
            if s >= 0:
                t = load_at(of_rows[0], s)
                total.fill(0.0)
                places, count = s + warp, Int32(32)
                while count == 32:
                    here = self.place(of_rows, places + lane * self.num_warps, live)
                    count = cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t))
                    self.add_rows(total, x, here, x_stride, Int32(0), Int32(0), count)
                    places += 32 * self.num_warps
                vector_at(sSums.iterator, (warp * 32 + lane) * 8, 8).store(total.load())
                cute.arch.sync_threads()
                if warp == 0 and writes:
                    for k in cutlass.range_constexpr(1, self.num_warps):
                        total.store(total.load() + vector_at(sSums.iterator, (k * 32 + lane) * 8, 8).load())
                    at = Int64(t - v0) * h + column
                    old = self.exact(vector_at(dw, at, 8), rest, Int64(s) * h + column)
                    vector_at(dw, at, 8).store((old + total.load()).to(dw.dtype))
                cute.arch.sync_threads()

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

    @cute.jit
    def add_rows(self, total, x: cute.Pointer, here: tuple, x_stride: Int64, lane0: Int32, first: Int32, count: Int32):
        """total += the rows [first, count) of those that lanes lane0 and up have, a batch in flight.

        Behind the last one that again: loads in branches would wait for each other, 3.4 ms for 8192 rows of a class
        instead of 1.2 (H200, H 4096, not spread over CTAs and warps).
        """
        raw = cute.make_rmem_tensor((8, self.batch), x.dtype)
        for k in cutlass.range(first, count, self.batch, unroll=1):
            for b in cutlass.range_constexpr(self.batch):
                r = cute.arch.shuffle_sync(here[1], lane0 + cutlass.min(k + b, count - 1))
                raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))
            for b in cutlass.range_constexpr(self.batch):
                grad = cute.arch.shuffle_sync(here[2], lane0 + k + b)
                if k + b < count:
                    total.store(total.load() + raw[None, b].load().to(Float32) * grad)
