"""Linear cross entropy, before the logits of a chunk: gathers its live rows and computes their row_shift.

For chunk row i, p = start + i and r = order[p]:
- live (p < num_live): live_x[i] = x[r]; slot_target[i] = target[r], or -1 if it is not a class. row_shift[i] = the
  logit of the target, or of class 0 if the target is not a class; -HUGE if it is not finite. So row_shift is at most
  the row's maximum. row_max_bits[i] = encode(row_shift[i]).
- ignored: loss[r] = lse[r] = 0, dx[r] = 0, slot_target[i] = -1; row_shift[i] = HUGE, so that exp(a - row_shift) is
  exactly 0 for any bias; live_x[i] = 0 up to the end of the last GEMM tile with a live row. With `return_stats` also
  log_prob[r] = entropy[r] = 0 and predicted[r] = -1.
flags = 0, and argmax_bits[i] is less than the code of any argmax. With `only_live_x` nothing but live_x is written. One
warp per row.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.math import encode
from quackish.kernels.memory import fill_row, load_at, load_eight, store_at, vector_at
from quackish.ops.linear_cross_entropy.kernels.exponents import HUGE
from quackish.ops.linear_cross_entropy.kernels.row_kernel import RowKernel, rounded_up, with_row_state
from quackish.ops.linear_cross_entropy.row_problems import ROW_TILE, GatherArgs, LceGatherProblem, LceRowsConfig


class LceGather(RowKernel):
    problem: LceGatherProblem
    config: LceRowsConfig

    @cute.jit
    def __call__(self, args: GatherArgs, stream: CUstream):
        args = with_row_state(args, args.start)
        self.kernel(args).launch(**self.launch_options(cute.ceil_div(args.rows, self.num_warps), stream))

    @cute.kernel
    def kernel(self, args: GatherArgs):
        after_previous()
        h = self.problem.h
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        i = cta * self.num_warps + warp

        if const_expr(not self.problem.only_live_x):
            # clear the flags: one per thread is enough, as a row has 32 threads
            flag = cta * self.config.threads + tid
            if flag < 1 + cute.ceil_div(args.rows, ROW_TILE):
                store_at(args.state.flags, flag, Int32(0))

        if i < args.rows:
            live = load_at(args.state.num_live, 0) - args.start  # rows of this chunk
            r = load_at(args.state.order, args.start + i)
            if const_expr(self.problem.return_stats):
                if lane == 0:
                    store_at(args.argmax_bits, i, Int64(-(2**63)))
            if i < live:
                x, live_x = args.x + Int64(r) * args.x_stride, args.live_x + Int64(i) * h
                if const_expr(self.problem.only_live_x):
                    self.copy_and_dot(x, None, live_x, lane)
                else:
                    self.target(args, i, load_at(args.target, r).to(Int64), x, live_x, lane)
            else:
                if i < rounded_up(live):
                    fill_row(args.live_x + Int64(i) * h, h, lane, 0.0)
                if const_expr(not self.problem.only_live_x):
                    self.ignored_row(args, i, r, lane)

    @cute.jit
    def target(self, args: GatherArgs, i: Int32, t: Int64, x: cute.Pointer, live_x: cute.Pointer, lane: Int32):
        """Copies x to live_x, and stores target t of chunk row i and its row_shift."""
        is_class = t >= 0 and t < args.v
        index = t if is_class else Int64(0)
        z = self.copy_and_dot(x, args.w + index * self.problem.h, live_x, lane)
        if const_expr(args.bias is not None):
            z += load_at(args.bias, index).to(Float32)
        if const_expr(self.problem.softcap):
            z = args.softcap * cute.math.tanh(z / args.softcap)
        if not (z > -HUGE and z < HUGE):  # NaN, or a masked target
            z = Float32(-HUGE)
        if lane == 0:
            store_at(args.state.slot_target, i, t.to(Int32) if is_class else Int32(-1))
            store_at(args.state.row_shift, i, z)
            store_at(args.state.row_max_bits, i, encode(z))

    @cute.jit
    def ignored_row(self, args: GatherArgs, i: Int32, r: Int32, lane: Int32):
        if const_expr(args.dx is not None):
            fill_row(args.dx + Int64(r) * self.problem.h, self.problem.h, lane, 0.0)
        if lane == 0:
            store_at(args.state.slot_target, i, Int32(-1))
            store_at(args.state.row_shift, i, Float32(HUGE))
            store_at(args.state.row_max_bits, i, encode(Float32(HUGE)))
            store_at(args.loss, r, Float32(0.0))
            store_at(args.state.lse, r, Float32(0.0))
            if const_expr(self.problem.return_stats):
                store_at(args.state.log_prob, r, Float32(0.0))
                store_at(args.state.entropy, r, Float32(0.0))
                store_at(args.state.predicted, r, Int32(-1))

    @cute.jit
    def copy_and_dot(self, x: cute.Pointer, w: cute.Pointer | None, out: cute.Pointer, lane: Int32) -> Float32:
        """Copies x to out and returns x . w, summed over the warp: the same bits in each lane. 0 without w."""
        num_vectors, batch = const_expr(self.problem.h // 8), const_expr(self.config.vectors)
        rX = cute.make_rmem_tensor((8, batch), x.dtype)
        rW = cute.make_rmem_tensor((8, batch), x.dtype)
        dot = cute.make_rmem_tensor((8,), Float32)
        dot.fill(0.0)
        for first in cutlass.range(0, num_vectors // (32 * batch) * (32 * batch), 32 * batch, unroll=1):
            for b in cutlass.range_constexpr(batch):
                col = (first + b * 32 + lane) * 8
                rX[None, b].store(load_eight(x, col, self.problem.x_aligned))
                if const_expr(w is not None):
                    rW[None, b].store(vector_at(w, col, 8).load())
            for b in cutlass.range_constexpr(batch):
                vector_at(out, (first + b * 32 + lane) * 8, 8).store(rX[None, b].load())
                if const_expr(w is not None):
                    dot.store(dot.load() + rX[None, b].load().to(Float32) * rW[None, b].load().to(Float32))
        for u in cutlass.range_constexpr(-(-(num_vectors % (32 * batch)) // 32)):  # remainder
            vector = num_vectors // (32 * batch) * (32 * batch) + u * 32 + lane
            if vector < num_vectors:
                rX[None, 0].store(load_eight(x, vector * 8, self.problem.x_aligned))
                vector_at(out, vector * 8, 8).store(rX[None, 0].load())
                if const_expr(w is not None):
                    rW[None, 0].store(vector_at(w, vector * 8, 8).load())
                    dot.store(dot.load() + rX[None, 0].load().to(Float32) * rW[None, 0].load().to(Float32))
        partial = dot.load().reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
        return cute.arch.warp_reduction_sum(partial)
