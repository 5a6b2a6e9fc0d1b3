"""out *= factor, of two tensors, in place; nothing is read or written where the factor, on the device, is 1."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import LceScaleConfig, LceScaleProblem
from quackish.kernels.common.lce import after_previous, load_at, store_at, store_scaled
from quackish.kernels.common.rows import DTYPES, fake_pointer, vector_at


class LceScale:
    def __init__(self, problem: LceScaleProblem, config: LceScaleConfig):
        self.dtype, self.config = problem.dtype, config
        self.vec = 128 // DTYPES[problem.dtype].width

    def fake_args(self):
        out, factor = fake_pointer(self.dtype), fake_pointer("float32", aligned=False)
        stream = cute.runtime.make_fake_stream()
        return (out, out, factor, Int64(1), Int64(1), Int32(1), stream)

    @cute.jit
    def __call__(
        self,
        out: cute.Pointer,  # (n,)
        out2: cute.Pointer,  # (n2,)
        factor: cute.Pointer,  # (1,)
        n: Int64,
        n2: Int64,
        num_ctas: Int32,
        stream: CUstream,
    ):
        self.kernel(out, out2, factor, n, n2).launch(
            grid=[num_ctas, 1, 1],
            block=[self.config.threads, 1, 1],
            min_blocks_per_mp=65_536 // (self.config.threads * 64),
            preferred_smem_carveout=10,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, out: cute.Pointer, out2: cute.Pointer, factor: cute.Pointer, n: Int64, n2: Int64):
        after_previous()
        f = load_at(factor, 0)
        if f != 1.0:
            self.scale(out, n, f)
            self.scale(out2, n2, f)

    @cute.jit
    def scale(self, out: cute.Pointer, n: Int64, f: Float32):
        tid, _, _ = cute.arch.thread_idx()
        cta, _, _ = cute.arch.block_idx()
        num_ctas, _, _ = cute.arch.grid_dim()
        vec, batch, threads = self.vec, self.config.vectors, self.config.threads
        tile_vectors = const_expr(batch * threads)
        num_vectors = n // vec
        raw = cute.make_rmem_tensor((vec, batch), out.dtype)
        for tile in cutlass.range(cta, Int32((num_vectors + tile_vectors - 1) // tile_vectors), num_ctas, unroll=1):
            v = Int64(tile) * tile_vectors + tid
            for b in cutlass.range_constexpr(batch):
                if v + b * threads < num_vectors:
                    raw[None, b].store(vector_at(out, (v + b * threads) * vec, vec).load())
            for b in cutlass.range_constexpr(batch):
                if v + b * threads < num_vectors:
                    store_scaled(raw[None, b], out, (v + b * threads) * vec, f)
        # the last few elements
        last = num_vectors * vec + tid
        if cta == 0:
            if last < n:
                store_at(out, last, load_at(out, last).to(Float32) * f)
