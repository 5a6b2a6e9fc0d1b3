"""Linear cross entropy: dw[t - v0] += the sum over a chunk's rows i with target t of grad_i * x[row_i], t in [v0, v1).

The rows come sorted by class (`lce_sort`). A CTA has 256 columns; each of its warps has `slots` sorted slots and sums
the rows of each class that begins there, ascending, if they are fewer than MANY_ROWS. The rows of other classes are
divided among all warps of the CTA, every num_warps-th row to one, and the warps' sums are added in order.

The sum is in fp32, and dw is read and rounded once. A bf16 dw was rounded before; rounding_residual[s] has the bits
that this dropped (`StoreWithResidual`). Without them, the sum of two large terms that nearly cancel would keep the
error of one: 6 times torch's error, for a model whose outputs are its targets' averages.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64, const_expr

from quackish.configs.lce_args import TargetsArgs
from quackish.configs.lce_rows import MANY_ROWS, LceTargetsConfig, LceTargetsProblem
from quackish.kernels.common.lce import after_previous, fake_args, load_at, load_eight
from quackish.kernels.common.rows import vector_at

COLUMNS = 256  # per CTA, eight per lane


class LceTargets:
    def __init__(self, problem: LceTargetsProblem, config: LceTargetsConfig):
        self.problem, self.threads, self.batch, self.slots = problem, config.threads, config.rows, config.slots
        self.num_warps = config.threads // 32

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, a: TargetsArgs, stream: CUstream):
        self.kernel(a).launch(
            grid=[cute.ceil_div(a.rows, self.num_warps * self.slots), -(-self.problem.h // COLUMNS), 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, a: TargetsArgs):
        cta, slice_of_h, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        h, num_slots = const_expr(self.problem.h), const_expr(self.slots)
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.num_warps * COLUMNS), byte_alignment=16)
        sMany = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps * num_slots), byte_alignment=16)
        column = slice_of_h * COLUMNS + lane * 8
        writes = column < h
        # Lanes past the last column work too: other lanes read their slots.
        column = cutlass.min(column, h - 8)
        x = a.x + column

        # Each slot's class, how many slots from there on have it, and its first row. The previous launch writes only
        # dw and rounding_residual, so rows are loaded before it ends.
        cute.arch.fence_acq_rel_gpu()
        live = cutlass.min(load_at(a.num_live, 0) - a.start, a.rows)
        first = (cta * self.num_warps + warp) * num_slots
        here = self.sorted(a, first - 1 + lane, live)
        rCount = cute.make_rmem_tensor((num_slots,), Int32)  # 0: nothing to do for this warp
        raw = cute.make_rmem_tensor((8, num_slots), x.dtype)
        for q in cutlass.range_constexpr(num_slots):
            t = cute.arch.shuffle_sync(here[0], 1 + q)
            begins = cute.arch.shuffle_sync(here[0], q) != t
            count = cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t) & -(2 << q))
            count = count if begins and t >= a.v0 and t < a.v1 else Int32(0)
            if lane == 0:
                sMany[warp * num_slots + q] = first + q if count >= MANY_ROWS else Int32(-1)
            rCount[q] = count if count < MANY_ROWS else Int32(0)
            row = cute.arch.shuffle_sync(here[1], 1 + q)
            if rCount[q] > 0:
                raw[None, q].store(load_eight(x, Int64(row) * a.x_stride, self.problem.x_aligned))
        after_previous()

        # classes with few rows
        total = cute.make_rmem_tensor((8,), Float32)
        for q in cutlass.range_constexpr(num_slots):
            if rCount[q] > 0:
                at = Int64(cute.arch.shuffle_sync(here[0], 1 + q) - a.v0) * h + column
                old = self.exact(a, at, Int64(first + q) * h + column)
                total.store(raw[None, q].load().to(Float32) * cute.arch.shuffle_sync(here[2], 1 + q))
                self.add_rows(total, x, here, a.x_stride, Int32(1 + q), Int32(1), rCount[q])
                if writes:
                    vector_at(a.dw, at, 8).store((old + total.load()).to(a.dw.dtype))

        # classes with many rows
        cute.arch.sync_threads()
        for i in cutlass.range(self.num_warps * num_slots, unroll=1):
            s = sMany[i]
            if s >= 0:
                t = load_at(a.sorted_target, s)
                total.fill(0.0)
                slots, count = s + warp, Int32(32)
                while count == 32:
                    here = self.sorted(a, slots + lane * self.num_warps, live)
                    count = cute.arch.popc(cute.arch.vote_ballot_sync(here[0] == t))
                    self.add_rows(total, x, here, a.x_stride, Int32(0), Int32(0), count)
                    slots += 32 * self.num_warps
                vector_at(sSums.iterator, (warp * 32 + lane) * 8, 8).store(total.load())
                cute.arch.sync_threads()
                if warp == 0 and writes:
                    for k in cutlass.range_constexpr(1, self.num_warps):
                        total.store(total.load() + vector_at(sSums.iterator, (k * 32 + lane) * 8, 8).load())
                    at = Int64(t - a.v0) * h + column
                    old = self.exact(a, at, Int64(s) * h + column)
                    vector_at(a.dw, at, 8).store((old + total.load()).to(a.dw.dtype))
                cute.arch.sync_threads()

    @cute.jit
    def exact(self, a: TargetsArgs, at: Int64, residual_at: Int64):
        """Eight elements of dw in fp32, as before rounding."""
        out = vector_at(a.dw, at, 8).load()
        if const_expr(a.rounding_residual is None):
            return out.to(Float32)
        upper, lower = out.bitcast(Int16).to(Int32), vector_at(a.rounding_residual, residual_at, 8).load().to(Int32)
        return (upper * 0x10000 + lower).bitcast(Float32)

    @cute.jit
    def sorted(self, a: TargetsArgs, at: Int32, live: Int32):
        """(class, row, grad) of a sorted slot. Class -1: the target is no class; -2: there is no such slot."""
        t, row, grad = Int32(-2), Int32(0), Float32(0.0)
        if at >= 0 and at < live:
            t, row, grad = load_at(a.sorted_target, at), load_at(a.sorted_row, at), load_at(a.sorted_grad, at)
        return t, row, grad

    @cute.jit
    def add_rows(self, total, x: cute.Pointer, here: tuple, x_stride: Int64, lane0: Int32, first: Int32, count: Int32):
        """total += rows [first, count) of the rows of lanes lane0 and up, with a batch of loads in flight.

        The last batch loads the last row again instead of branching: loads in branches are serialized, which takes
        3.4 ms instead of 1.2 for 8192 rows of a class (H200, H 4096, before classes were divided among CTAs and warps).
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
