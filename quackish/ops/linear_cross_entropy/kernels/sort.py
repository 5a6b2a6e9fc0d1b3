"""Linear cross entropy, between dx and dw: sorts a chunk's rows by class and takes the target entries of exp_logits.

dw is the sum over rows of exp_logits times row_scale * x, and its GEMM rounds row_scale * x. For a row's target class
that rounding is most of the error, so `lce_targets` adds the target entries' terms separately, with x not rounded.
For live chunk row i, with t = slot_target[i] and r = order[start + i], at its sorted slot, the rank of (t, i):
  sorted_target = t, sorted_row = r, sorted_grad = row_scale[i] * exp_logits[i, t] (0 if t is not a class, or not one of
  the v in exp_logits), then exp_logits[i, t] = 0. first_slot_of_class[t], if given and NO_SLOT before, becomes the
  first sorted slot of class t.

One lane per row. Its sorted slot is the number of rows before it by (t, i); each warp of the CTA counts a part of them.
These are rows^2 comparisons of integers, loaded from shared memory 4 at a time: 0.06 ms for 16,384 rows (H200). With
more than MOST_ROWS_COUNTED rows, `index` is given: the chunk row of each sorted slot, live rows first.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, store_at, vector_at
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import LceSortConfig, LceSortProblem, SortArgs


class LceSort(RowKernel):
    def __init__(self, problem: LceSortProblem, config: LceSortConfig):
        super().__init__(problem, config)
        self.threads, self.tile = config.threads, config.tile

    @cute.jit
    def __call__(self, args: SortArgs, stream: CUstream):
        rows_per_cta = self.threads if const_expr(self.problem.presorted) else 32
        args = with_row_state(args, args.start)
        self.kernel(args).launch(
            grid=[cute.ceil_div(args.rows, rows_per_cta), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: SortArgs):
        if const_expr(self.problem.presorted):
            after_previous()
            live = cutlass.min(load_at(args.state.num_live, 0) - args.start, args.rows)
            i, t, slot, is_first = self.presorted_slot(args, live)
        else:
            # Count during the last tiles of the previous launch, which does not write slot_target.
            cute.arch.fence_acq_rel_gpu()
            live = cutlass.min(load_at(args.state.num_live, 0) - args.start, args.rows)
            i, t, slot = self.counted_slot(args.state.slot_target, live)
            after_previous()

        if i < live:
            grad = Float32(0.0)
            if t >= 0 and t < args.v:
                grad = load_at(args.state.row_scale, i) * self.take_target(args, i, t)
                if const_expr(args.first_slot_of_class is not None):
                    if const_expr(not self.problem.presorted):
                        cute.arch.atomic_min(args.first_slot_of_class + t, slot)
                    elif is_first:
                        store_at(args.first_slot_of_class, t, slot)
            store_at(args.state.sorted_target, slot, t)
            store_at(args.state.sorted_row, slot, load_at(args.state.order, args.start + i))
            store_at(args.state.sorted_grad, slot, grad)

    @cute.jit
    def presorted_slot(self, args: SortArgs, live: Int32):
        """This thread's (chunk row, target, sorted slot, whether it is its class's first). No slot: row >= live."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        slot = cta * self.threads + tid
        i, t, is_first = live, Int32(-1), Boolean(True)
        if slot < live:
            i = load_at(args.index, slot).to(Int32)
            t = load_at(args.state.slot_target, i)
            if slot > 0:
                is_first = load_at(args.state.slot_target, load_at(args.index, slot - 1).to(Int32)) != t
        return i, t, slot, is_first

    @cute.jit
    def counted_slot(self, slot_target: cute.Pointer, live: Int32):
        """(chunk row, target, sorted slot) of each lane of the first warp. The other warps have no rows."""
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        sTarget = smem.allocate_tensor(Int32, cute.make_layout(self.tile), byte_alignment=16)
        sCount = smem.allocate_tensor(Int32, cute.make_layout((32, self.num_warps)), byte_alignment=16)
        first = cta * 32
        i = first + lane
        t, slot = Int32(-1), Int32(0)
        if first < live:
            if i < live:
                t = load_at(slot_target, i)
            count = Int32(0)
            for begin in cutlass.range(0, live, self.tile, unroll=1):
                self.load_tile(slot_target, begin, live, sTarget)
                cute.arch.sync_threads()
                count += self.count_before(sTarget, begin, first, t, warp)
                cute.arch.sync_threads()
            if warp == 0:  # the CTA's own rows
                for k in cutlass.range_constexpr(32):
                    other = cute.arch.shuffle_sync(t, k)
                    if first + k < live and (other < t or (other == t and k < lane)):
                        count += 1
            sCount[lane, warp] = count
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(self.num_warps):
                slot += sCount[lane, w]
        if warp != 0:
            i = live
        return i, t, slot

    @cute.jit
    def load_tile(self, slot_target: cute.Pointer, begin: Int32, live: Int32, sTarget: cute.Tensor):
        """Loads the targets from chunk row `begin` on; the largest int32 past the last live row."""
        tid, _, _ = cute.arch.thread_idx()
        for v in cutlass.range_constexpr(self.tile // (4 * self.threads)):
            at = (v * self.threads + tid) * 4
            j = begin + at
            four = vector_at(sTarget.iterator, at, 4)
            if j + 4 <= live:
                four.store(vector_at(slot_target, j, 4).load())
            else:
                for k in cutlass.range_constexpr(4):
                    four[k] = load_at(slot_target, j + k) if j + k < live else Int32(0x7FFFFFFF)

    @cute.jit
    def count_before(self, sTarget: cute.Tensor, begin: Int32, first: Int32, t: Int32, warp: Int32) -> Int32:
        """This warp's share of the number of the tile's rows before this lane's row, without the CTA's own rows."""
        count = Int32(0)
        for v in cutlass.range(self.tile // (4 * self.num_warps), unroll=8):
            at = (v * self.num_warps + warp) * 4
            j = begin + at
            bound = t if j >= first else t + 1  # ties: lower rows come first
            if j >= first and j < first + 32:
                bound = Int32(-1)
            four = vector_at(sTarget.iterator, at, 4).load()
            for k in cutlass.range_constexpr(4):
                count += Int32(1) if four[k] < bound else Int32(0)
        return count

    @cute.jit
    def take_target(self, args: SortArgs, i: Int32, t: Int32) -> Float32:
        """Returns exp_logits[i, t] and sets it to 0."""
        value = Float32(0.0)
        if const_expr(not self.problem.exp_logits_split):
            value = self.take(args.exp_logits.first, Int64(i) * args.exp_logits.first_stride + t)
        elif t < args.exp_logits.split:
            value = self.take(args.exp_logits.first, Int64(i) * args.exp_logits.first_stride + t)
        else:
            value = self.take(
                args.exp_logits.second, Int64(i) * args.exp_logits.second_stride + (t - args.exp_logits.split)
            )
        return value

    @cute.jit
    def take(self, base: cute.Pointer, offset: Int64) -> Float32:
        value = load_at(base, offset).to(Float32)
        store_at(base, offset, Float32(0.0))
        return value
