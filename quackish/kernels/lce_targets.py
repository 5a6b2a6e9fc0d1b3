"""Linear cross entropy: dw[t - v0] += the sum over a chunk's rows i with target t of grad_i * x[row_i], t in [v0, v1).

The rows come sorted by class (`lce_sort`), so a class's are neighbours. A CTA has a slice of the columns, and work
where a class begins, at place s: its sum is in fp32, over the rows ascending, and dw is read and rounded once. A bf16
dw was rounded before: rest[s] has the bits that this cut off (`StoreAndRest`). Without them the sum of two large parts
that nearly cancel would keep the error of one: 6 times torch's, for a model whose outputs are its targets' averages.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64, const_expr

from quackish.configs.lce_rows import LceTargetsConfig, LceTargetsProblem
from quackish.kernels.common.lce import after_previous, fake_count, load_at, load_eight
from quackish.kernels.common.rows import fake_pointer, vector_at


class LceTargets:
    def __init__(self, problem: LceTargetsProblem, config: LceTargetsConfig):
        self.problem, self.threads, self.batch = problem, config.threads, config.rows

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
        h = const_expr(self.problem.h)
        column = (slice_of_h * self.threads + tid) * 8
        # The launch before this one writes dw and rest alone: the class's first rows are on their way before it ends.
        cute.arch.fence_acq_rel_gpu()
        live = cutlass.min(load_at(num_live, 0) - start, rows)
        t, before, here = Int32(-1), Int32(-1), (Int32(-1), Int32(0), Float32(0.0))
        raw = cute.make_rmem_tensor((8, self.batch), x.dtype)
        # Lanes behind the last column work as well: they have places that the others ask for.
        columns = cutlass.min(column, h - 8)
        if s < live:
            if s > 0:
                before = load_at(of_rows[0], s - 1)
            here = self.places(of_rows, s, live)
            t = cute.arch.shuffle_sync(here[0], 0)
        begins = t != before and t >= v0 and t < v1  # no class is -1, and sorted first
        count = Int32(0)
        if begins:
            count = self.count(here, t)
            self.load_rows(raw, x + columns, here, x_stride, Int32(0), count, first=True)
        after_previous()

        if begins:
            out = vector_at(dw, Int64(t - v0) * h + columns, 8)
            old = self.exact(out, rest, Int64(s) * h + columns)
            total = cute.make_rmem_tensor((8,), Float32)
            total.fill(0.0)
            self.add_rows(total, raw, here, Int32(0), count)
            first = Int32(self.batch)
            while count > 0:
                for k in cutlass.range(first, count, self.batch, unroll=1):
                    self.load_rows(raw, x + columns, here, x_stride, k, count, first=False)
                    self.add_rows(total, raw, here, k, count)
                s, first, more = s + 32, Int32(0), count == 32
                count = Int32(0)
                if more:
                    here = self.places(of_rows, s, live)
                    count = self.count(here, t)
            if column < h:
                out.store((old + total.load()).to(dw.dtype))

    @cute.jit
    def exact(self, out: cute.Tensor, rest: Optional[cute.Pointer], at: Int64):
        """out as it was before it was rounded."""
        if const_expr(rest is None):
            return out.load().to(Float32)
        upper, lower = out.load().bitcast(Int16).to(Int32), vector_at(rest, at, 8).load().to(Int32)
        return (upper * 0x10000 + lower).bitcast(Float32)

    @cute.jit
    def places(self, of_rows: tuple, s: Int32, live: Int32):
        """(class, row, grad) of this lane's of the 32 places from s on; class -1 behind the last."""
        at = s + cute.arch.lane_idx()
        t, row, grad = Int32(-1), Int32(0), Float32(0.0)
        if at < live:
            t, row, grad = load_at(of_rows[0], at), load_at(of_rows[1], at), load_at(of_rows[2], at)
        return t, row, grad

    @cute.jit
    def count(self, here: tuple, t: Int32) -> Int32:
        """How many of these 32 places have class t: the first ones."""
        return cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t))

    @cute.jit
    def load_rows(
        self, raw, x: cute.Pointer, here: tuple, x_stride: Int64, k: Int32, count: Int32, first: cutlass.Constexpr[bool]
    ):
        """The rows of places k and up, a batch at most; before place `count`."""
        for b in cutlass.range_constexpr(self.batch):
            if const_expr(first):
                r = cute.arch.shuffle_sync(here[1], k + b)
                if k + b < count:  # most classes have one row
                    raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))
            else:  # the last row again behind it: loads in branches would wait for each other
                r = cute.arch.shuffle_sync(here[1], cutlass.min(k + b, count - 1))
                raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))

    @cute.jit
    def add_rows(self, total, raw, here: tuple, k: Int32, count: Int32):
        for b in cutlass.range_constexpr(self.batch):
            grad = cute.arch.shuffle_sync(here[2], k + b)
            if k + b < count:
                total.store(total.load() + raw[None, b].load().to(Float32) * grad)
