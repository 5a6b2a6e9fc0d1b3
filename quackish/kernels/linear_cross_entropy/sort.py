"""Linear cross entropy, between the input's gradient and the weight's: the targets' part of a chunk, taken out of E.

The weight's gradient is a sum over rows of (row_scale * E) x, and its GEMM has row_scale * x rounded. Where a class is
the target of a row, that rounding is most of the error: so these terms, x as it is, are added apart, by `lce_targets`.
For chunk row i, live, with t = slot_target[i] and r = order[start + i], at its place by (t, i):
  sorted_cls = t, sorted_row = r, sorted_grad = row_scale[i] * E[i, t], then E[i, t] = 0 (grad 0 without a class, or
  where it is none of the v that E has); and places[t], where given and NO_PLACE before, is the first place of class t.

A lane has a row, whose place is the number of rows before it by (t, i); each warp of the CTA counts a part of these.
That is rows^2 comparisons of integers loaded from shared memory 4 at a time: 0.06 ms for 16,384 rows (H200). With more
than MOST_ROWS_COUNTED rows, `index` is given: the row at each place, live rows first.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Boolean, Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import LceSortConfig, LceSortProblem
from quackish.kernels.common.lce import after_previous, fake_count, fake_target, load_at, store_at
from quackish.kernels.common.rows import fake_pointer, vector_at


class LceSort:
    def __init__(self, problem: LceSortProblem, config: LceSortConfig):
        self.problem, self.tile = problem, config.tile
        self.threads, self.num_warps = config.threads, config.threads // 32

    def fake_args(self):
        int32, fp32 = fake_pointer("int32", aligned=False), fake_pointer("float32", aligned=False)
        e = fake_pointer("bfloat16", aligned=False)
        return (
            fake_pointer("int32"),
            int32,
            fake_count(),
            fp32,
            e,
            e if self.problem.e_split else None,
            int32,
            int32,
            fp32,
            int32 if self.problem.places else None,
            fake_target("int64") if self.problem.presorted else None,
            Int64(8),
            Int64(8),
            Int32(8),
            Int32(8),
            Int32(0),
            Int32(1),
            cute.runtime.make_fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        slot_target: cute.Pointer,  # (rows,)
        order: cute.Pointer,  # (m,)
        num_live: cute.Pointer,  # (1,)
        row_scale: cute.Pointer,  # (rows,)
        e: cute.Pointer,  # (rows, v_split) columns
        e2: Optional[cute.Pointer],  # those from v_split on
        sorted_cls: cute.Pointer,  # (rows,)
        sorted_row: cute.Pointer,  # (rows,)
        sorted_grad: cute.Pointer,  # (rows,)
        places: Optional[cute.Pointer],  # (v,)
        index: Optional[cute.Pointer],  # (rows,)
        e_stride: Int64,
        e2_stride: Int64,
        v_split: Int32,
        v: Int32,
        start: Int32,
        rows: Int32,
        stream: CUstream,
    ):
        of_e = e, e2, e_stride, e2_stride, v_split
        outs = sorted_cls, sorted_row, sorted_grad, places
        rows_a_cta = self.threads if const_expr(self.problem.presorted) else 32
        self.kernel(slot_target, order, num_live, row_scale, of_e, outs, index, v, start, rows).launch(
            grid=[cute.ceil_div(rows, rows_a_cta), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        slot_target: cute.Pointer,
        order: cute.Pointer,
        num_live: cute.Pointer,
        row_scale: cute.Pointer,
        of_e: tuple,
        outs: tuple,
        index: Optional[cute.Pointer],
        v: Int32,
        start: Int32,
        rows: Int32,
    ):
        sorted_cls, sorted_row, sorted_grad, places = outs
        if const_expr(self.problem.presorted):
            after_previous()
            live = cutlass.min(load_at(num_live, 0) - start, rows)
            i, t, place, is_first = self.given(slot_target, index, live)
        else:
            # Read and counted while the launch before this one, which writes nothing of it, is on its last tiles.
            cute.arch.fence_acq_rel_gpu()
            live = cutlass.min(load_at(num_live, 0) - start, rows)
            i, t, place = self.counted(slot_target, live)
            after_previous()

        if i < live:
            grad = Float32(0.0)
            if t >= 0 and t < v:
                grad = load_at(row_scale, i) * self.take_out(of_e, i, t)
                if const_expr(places is not None):
                    if const_expr(not self.problem.presorted):
                        cute.arch.atomic_min(places + t, place)
                    elif is_first:
                        store_at(places, t, place)
            store_at(sorted_cls, place, t)
            store_at(sorted_row, place, load_at(order, start + i))
            store_at(sorted_grad, place, grad)

    @cute.jit
    def given(self, slot_target: cute.Pointer, index: cute.Pointer, live: Int32):
        """(row, its class, its place, whether the class begins there) of this thread; a row from `live` on for none."""
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        place = cta * self.threads + tid
        i, t, is_first = live, Int32(-1), Boolean(True)
        if place < live:
            i = load_at(index, place).to(Int32)
            t = load_at(slot_target, i)
            if place > 0:
                is_first = load_at(slot_target, load_at(index, place - 1).to(Int32)) != t
        return i, t, place, is_first

    @cute.jit
    def counted(self, slot_target: cute.Pointer, live: Int32):
        """(row, its class, its place) of a lane of the first warp; the other warps have no row."""
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        smem = cutlass.memory.SmemAllocator()
        sCls = smem.allocate_tensor(Int32, cute.make_layout(self.tile), byte_alignment=16)
        sCount = smem.allocate_tensor(Int32, cute.make_layout((32, self.num_warps)), byte_alignment=16)
        first = cta * 32
        i = first + lane
        t, place = Int32(-1), Int32(0)
        if first < live:
            if i < live:
                t = load_at(slot_target, i)
            count = Int32(0)
            for begin in cutlass.range(0, live, self.tile, unroll=1):
                self.load_tile(slot_target, begin, live, sCls)
                cute.arch.sync_threads()
                count += self.count_before(sCls, begin, first, t, warp)
                cute.arch.sync_threads()
            if warp == 0:  # the CTA's own rows
                for k in cutlass.range_constexpr(32):
                    other = cute.arch.shuffle_sync(t, k)
                    if first + k < live and (other < t or (other == t and k < lane)):
                        count += 1
            sCount[lane, warp] = count
            cute.arch.sync_threads()
            for w in cutlass.range_constexpr(self.num_warps):
                place += sCount[lane, w]
        if warp != 0:
            i = live
        return i, t, place

    @cute.jit
    def load_tile(self, slot_target: cute.Pointer, begin: Int32, live: Int32, sCls: cute.Tensor):
        """Classes from `begin` on, behind the last live row the largest number there is."""
        tid, _, _ = cute.arch.thread_idx()
        for v in cutlass.range_constexpr(self.tile // (4 * self.threads)):
            at = (v * self.threads + tid) * 4
            j = begin + at
            four = vector_at(sCls.iterator, at, 4)
            if j + 4 <= live:
                four.store(vector_at(slot_target, j, 4).load())
            else:
                for k in cutlass.range_constexpr(4):
                    four[k] = load_at(slot_target, j + k) if j + k < live else Int32(0x7FFFFFFF)

    @cute.jit
    def count_before(self, sCls: cute.Tensor, begin: Int32, first: Int32, t: Int32, warp: Int32) -> Int32:
        """This warp's part of how many rows of the tile are before this lane's, the CTA's own left out."""
        count = Int32(0)
        for v in cutlass.range(self.tile // (4 * self.num_warps), unroll=8):
            at = (v * self.num_warps + warp) * 4
            j = begin + at
            bound = t if j >= first else t + 1  # in a tie, those with lower numbers come first
            if j >= first and j < first + 32:
                bound = Int32(-1)
            four = vector_at(sCls.iterator, at, 4).load()
            for k in cutlass.range_constexpr(4):
                count += Int32(1) if four[k] < bound else Int32(0)
        return count

    @cute.jit
    def take_out(self, of_e: tuple, i: Int32, t: Int32) -> Float32:
        """E[i, t], and 0 in its place."""
        e, e2, e_stride, e2_stride, v_split = of_e
        value = Float32(0.0)
        if const_expr(self.problem.e_split):
            if t < v_split:
                value = load_at(e, Int64(i) * e_stride + t).to(Float32)
                store_at(e, Int64(i) * e_stride + t, Float32(0.0))
            else:
                value = load_at(e2, Int64(i) * e2_stride + (t - v_split)).to(Float32)
                store_at(e2, Int64(i) * e2_stride + (t - v_split), Float32(0.0))
        else:
            value = load_at(e, Int64(i) * e_stride + t).to(Float32)
            store_at(e, Int64(i) * e_stride + t, Float32(0.0))
        return value
