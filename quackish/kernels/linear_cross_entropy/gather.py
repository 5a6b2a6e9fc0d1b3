"""Linear cross entropy, before the logits of a chunk: gathers its live rows and computes the shift of each.

For chunk row i, p = start + i and r = order[p]:
- live (p < num_live): xc[i] = x[r]; slot_target[i] = target[r], or -1 if that is no class; row_shift[i] = the target's
  logit, softcap * tanh(z / softcap) with z = x[r] . w[target[r]] + bias[target[r]], or class 0's if the target is no
  class, so at most the row's maximum. A row_shift that is not finite becomes -HUGE. row_max_bits[i] =
  encode(row_shift[i]).
- ignored: loss[r] = lse[r] = 0, dx[r] = 0, slot_target[i] = -1 and row_shift[i] = HUGE, so that exp(a - row_shift) is
  exactly 0 for any bias; xc[i] = 0 up to the end of the last GEMM tile with a live row.
flags = 0. One warp per row.
"""

from typing import Optional

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import ROW_TILE, LceGatherProblem, LceRowsConfig
from quackish.kernels.common.lce import (
    HUGE,
    after_previous,
    encode,
    fake_count,
    fake_target,
    fill_row,
    load_at,
    load_eight,
    rounded_up,
    store_at,
)
from quackish.kernels.common.rows import fake_pointer, vector_at


class LceGather:
    def __init__(self, problem: LceGatherProblem, config: LceRowsConfig):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        p = self.problem
        rows_out = fake_pointer("float32" if p.rows_out else None, aligned=False)
        fp32, int32 = fake_pointer("float32", aligned=False), fake_pointer("int32", aligned=False)
        return (
            fake_pointer(p.dtype, p.x_aligned),
            fake_pointer(p.dtype),
            fake_pointer(p.bias_dtype, aligned=False),
            fake_target(p.target_dtype),
            int32,
            fake_count(),
            fake_pointer(p.dtype),
            int32,
            fp32,
            int32,
            int32,
            fake_pointer(p.dx_dtype),
            rows_out,
            rows_out,
            Int64(1),
            Float32(1),
            Int32(0),
            Int32(1),
            Int32(1),
            cute.runtime.make_fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        x: cute.Pointer,  # (m, h)
        w: cute.Pointer,  # (v, h)
        bias: Optional[cute.Pointer],  # (v,)
        target: cute.Pointer,  # (m,)
        order: cute.Pointer,  # (m,)
        num_live: cute.Pointer,  # (1,)
        xc: cute.Pointer,  # (rows, h)
        slot_target: cute.Pointer,  # (rows,)
        row_shift: cute.Pointer,  # (rows,)
        row_max_bits: cute.Pointer,  # (rows,)
        flags: cute.Pointer,  # (1 + ceil(rows / 128),)
        dx: Optional[cute.Pointer],  # (m, h)
        loss: Optional[cute.Pointer],  # (m,)
        lse: Optional[cute.Pointer],  # (m,)
        x_stride: Int64,
        softcap: Float32,
        start: Int32,
        rows: Int32,
        v: Int32,
        stream: CUstream,
    ):
        ins, outs = (x, w, bias, target, order), (xc, slot_target, row_shift, row_max_bits, flags, dx, loss, lse)
        self.kernel(ins, num_live, outs, x_stride, softcap, start, rows, v).launch(
            grid=[cute.ceil_div(rows, self.num_warps), 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=65_536 // (self.config.threads * 64),
            preferred_smem_carveout=10,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        ins: tuple,
        num_live: cute.Pointer,
        outs: tuple,
        x_stride: Int64,
        softcap: Float32,
        start: Int32,
        rows: Int32,
        v: Int32,
    ):
        after_previous()
        x, w, bias, target, order = ins
        xc, slot_target, row_shift, row_max_bits, flags, dx, loss, lse = outs
        h = self.problem.h
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        warp, lane = cute.arch.warp_idx(), cute.arch.lane_idx()
        i = cta * self.num_warps + warp

        # 32 threads a row are more than there are flags
        flag = cta * self.config.threads + tid
        if flag < 1 + cute.ceil_div(rows, ROW_TILE):
            store_at(flags, flag, Int32(0))

        if i < rows:
            live_here = load_at(num_live, 0) - start
            r = load_at(order, start + i)
            if i < live_here:
                t = load_at(target, r).to(Int64)
                inside = t >= 0 and t < v
                index = t if inside else Int64(0)
                z = self.copy_and_dot(x + Int64(r) * x_stride, w + index * h, xc + Int64(i) * h, lane)
                if const_expr(bias is not None):
                    z += load_at(bias, index).to(Float32)
                if const_expr(self.problem.softcap):
                    z = softcap * cute.math.tanh(z / softcap)
                if not (z > -HUGE and z < HUGE):  # NaN, or a masked target
                    z = Float32(-HUGE)
                if lane == 0:
                    store_at(slot_target, i, t.to(Int32) if inside else Int32(-1))
                    store_at(row_shift, i, z)
                    store_at(row_max_bits, i, encode(z))
            else:
                if i < rounded_up(live_here):
                    fill_row(xc + Int64(i) * h, h, lane, 0.0)
                if const_expr(dx is not None):
                    fill_row(dx + Int64(r) * h, h, lane, 0.0)
                if lane == 0:
                    store_at(slot_target, i, Int32(-1))
                    store_at(row_shift, i, Float32(HUGE))
                    store_at(row_max_bits, i, encode(Float32(HUGE)))
                    if const_expr(loss is not None):
                        store_at(loss, r, Float32(0.0))
                        store_at(lse, r, Float32(0.0))

    @cute.jit
    def copy_and_dot(self, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, lane: Int32) -> Float32:
        """out = x, and x . w over the warp: the same bits in each lane."""
        num_vectors, batch = const_expr(self.problem.h // 8), const_expr(self.config.vectors)
        rX = cute.make_rmem_tensor((8, batch), x.dtype)
        rW = cute.make_rmem_tensor((8, batch), x.dtype)
        dot = cute.make_rmem_tensor((8,), Float32)
        dot.fill(0.0)
        for first in cutlass.range(0, num_vectors // (32 * batch) * (32 * batch), 32 * batch, unroll=1):
            for b in cutlass.range_constexpr(batch):
                at = (first + b * 32 + lane) * 8
                rX[None, b].store(load_eight(x, at, self.problem.x_aligned))
                rW[None, b].store(vector_at(w, at, 8).load())
            for b in cutlass.range_constexpr(batch):
                vector_at(out, (first + b * 32 + lane) * 8, 8).store(rX[None, b].load())
                dot.store(dot.load() + rX[None, b].load().to(Float32) * rW[None, b].load().to(Float32))
        for u in cutlass.range_constexpr(-(-(num_vectors % (32 * batch)) // 32)):  # the ragged end
            vector = num_vectors // (32 * batch) * (32 * batch) + u * 32 + lane
            if vector < num_vectors:
                rX[None, 0].store(load_eight(x, vector * 8, self.problem.x_aligned))
                rW[None, 0].store(vector_at(w, vector * 8, 8).load())
                vector_at(out, vector * 8, 8).store(rX[None, 0].load())
                dot.store(dot.load() + rX[None, 0].load().to(Float32) * rW[None, 0].load().to(Float32))
        partial = dot.load().reduce(cute.ReductionOp.ADD, init_val=Float32(0.0), reduction_profile=0)
        return cute.arch.warp_reduction_sum(partial)
