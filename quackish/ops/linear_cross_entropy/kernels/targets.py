"""Linear cross entropy: dw[t - v0] += the sum over a chunk's rows i with target t of grad_i * x[row_i], t in [v0, v1).

The rows are sorted by class (`lce_sort`). Each CTA has 256 columns, and each of its warps has `slots` sorted slots. A
warp sums the rows of each class that starts in its slots, ascending, if they are fewer than MANY_ROWS. The rows of
larger classes are divided among all warps of the CTA, every num_warps-th row to one, and the warps' sums are added in
order.

The sum is in fp32, and dw is read and rounded once. A bf16 dw was already rounded by its GEMM; rounding_residual[s]
holds the dropped bits (`StoreWithResidual`). Without them, two large terms that nearly cancel would leave the rounding
error of one: 6 times torch's error, for a model whose outputs are its targets' averages.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int16, Int32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, load_eight, vector_at
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import MANY_ROWS, LceTargetsConfig, LceTargetsProblem, TargetsArgs

COLUMNS = 256  # per CTA, eight per lane


class LceTargets(RowKernel):
    def __init__(self, problem: LceTargetsProblem, config: LceTargetsConfig):
        super().__init__(problem, config)
        self.threads, self.batch, self.slots = config.threads, config.rows, config.slots

    @cute.jit
    def __call__(self, args: TargetsArgs, stream: CUstream):
        args = with_row_state(args, args.start)
        self.kernel(args).launch(
            grid=[cute.ceil_div(args.rows, self.num_warps * self.slots), -(-self.problem.h // COLUMNS), 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: TargetsArgs):
        cta, slice_of_h, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        h, num_slots = const_expr(self.problem.h), const_expr(self.slots)
        smem = cutlass.memory.SmemAllocator()
        sSums = smem.allocate_tensor(Float32, cute.make_layout(self.num_warps * COLUMNS), byte_alignment=16)
        sMany = smem.allocate_tensor(Int32, cute.make_layout(self.num_warps * num_slots), byte_alignment=16)
        col = slice_of_h * COLUMNS + lane * 8
        writes = col < h
        # Lanes past the last column stay active: other lanes read their slots.
        col = cutlass.min(col, h - 8)
        x = args.x + col

        # the class of each slot, the number of its rows if it starts there, and its first row. The previous launch
        # writes only dw and rounding_residual, so this runs before it ends.
        cute.arch.fence_acq_rel_gpu()
        live = cutlass.min(load_at(args.state.num_live, 0) - args.start, args.rows)
        first = (cta * self.num_warps + warp) * num_slots
        classes, rows, grads = self.load_slot(args, first - 1 + lane, live)  # one slot per lane
        rCount = cute.make_rmem_tensor((num_slots,), Int32)  # 0: not summed by this warp
        raw = cute.make_rmem_tensor((8, num_slots), x.dtype)
        for q in cutlass.range_constexpr(num_slots):
            t = cute.arch.shuffle_sync(classes, 1 + q)
            starts = cute.arch.shuffle_sync(classes, q) != t
            count = cute.arch.popc(cute.arch.vote_ballot_sync(classes == t) & -(2 << q))
            count = count if starts and t >= args.v0 and t < args.v1 else Int32(0)
            if lane == 0:
                sMany[warp * num_slots + q] = first + q if count >= MANY_ROWS else Int32(-1)
            rCount[q] = count if count < MANY_ROWS else Int32(0)
            row = cute.arch.shuffle_sync(rows, 1 + q)
            if rCount[q] > 0:
                raw[None, q].store(load_eight(x, Int64(row) * args.x_stride, self.problem.x_aligned))
        after_previous()

        # classes with few rows
        total = cute.make_rmem_tensor((8,), Float32)
        for q in cutlass.range_constexpr(num_slots):
            if rCount[q] > 0:
                offset = Int64(cute.arch.shuffle_sync(classes, 1 + q) - args.v0) * h + col
                old = self.unrounded_dw(args, offset, Int64(first + q) * h + col)
                total.store(raw[None, q].load().to(Float32) * cute.arch.shuffle_sync(grads, 1 + q))
                self.add_rows(total, x, rows, grads, args.x_stride, Int32(1 + q), Int32(1), rCount[q])
                if writes:
                    vector_at(args.dw, offset, 8).store((old + total.load()).to(args.dw.dtype))

        # classes with many rows
        cute.arch.sync_threads()
        for i in cutlass.range(self.num_warps * num_slots, unroll=1):
            s = sMany[i]
            if s >= 0:
                t = load_at(args.state.sorted_target, s)
                total.fill(0.0)
                slot, count = s + warp, Int32(32)
                while count == 32:
                    classes, rows, grads = self.load_slot(args, slot + lane * self.num_warps, live)
                    count = cute.arch.popc(cute.arch.vote_ballot_sync(classes == t))
                    self.add_rows(total, x, rows, grads, args.x_stride, Int32(0), Int32(0), count)
                    slot += 32 * self.num_warps
                vector_at(sSums.iterator, (warp * 32 + lane) * 8, 8).store(total.load())
                cute.arch.sync_threads()
                if warp == 0 and writes:
                    for k in cutlass.range_constexpr(1, self.num_warps):
                        total.store(total.load() + vector_at(sSums.iterator, (k * 32 + lane) * 8, 8).load())
                    offset = Int64(t - args.v0) * h + col
                    old = self.unrounded_dw(args, offset, Int64(s) * h + col)
                    vector_at(args.dw, offset, 8).store((old + total.load()).to(args.dw.dtype))
                cute.arch.sync_threads()

    @cute.jit
    def unrounded_dw(self, args: TargetsArgs, offset: Int64, residual_offset: Int64):
        """Eight elements of dw in fp32, before rounding."""
        out = vector_at(args.dw, offset, 8).load()
        if const_expr(args.rounding_residual is None):
            return out.to(Float32)
        upper = out.bitcast(Int16).to(Int32)
        lower = vector_at(args.rounding_residual, residual_offset, 8).load().to(Int32)
        return (upper * 0x10000 + lower).bitcast(Float32)

    @cute.jit
    def load_slot(self, args: TargetsArgs, slot: Int32, live: Int32):
        """(class, row, grad) of a sorted slot. Class -1: the target is not a class; -2: there is no such slot."""
        s, t, row, grad = args.state, Int32(-2), Int32(0), Float32(0.0)
        if slot >= 0 and slot < live:
            t, row, grad = load_at(s.sorted_target, slot), load_at(s.sorted_row, slot), load_at(s.sorted_grad, slot)
        return t, row, grad

    @cute.jit
    def add_rows(
        self, total, x: cute.Pointer, rows: Int32, grads: Float32, x_stride: Int64, lane0: Int32, first: Int32,
        count: Int32,
    ):  # fmt: skip
        """total += grad * x of the slots of lanes lane0 + first to lane0 + count - 1, with a batch of loads in flight.

        The last batch reloads the last row instead of branching, because loads in branches are serialized: 3.4 ms
        instead of 1.2 for 8192 rows of a class (H200, H 4096, before classes were divided among CTAs and warps).
        """
        raw = cute.make_rmem_tensor((8, self.batch), x.dtype)
        for k in cutlass.range(first, count, self.batch, unroll=1):
            for b in cutlass.range_constexpr(self.batch):
                r = cute.arch.shuffle_sync(rows, lane0 + cutlass.min(k + b, count - 1))
                raw[None, b].store(load_eight(x, Int64(r) * x_stride, self.problem.x_aligned))
            for b in cutlass.range_constexpr(self.batch):
                grad = cute.arch.shuffle_sync(grads, lane0 + k + b)
                if k + b < count:
                    total.store(total.load() + raw[None, b].load().to(Float32) * grad)
