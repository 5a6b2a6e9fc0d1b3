"""out *= factor for two tensors. If the factor, read on the device, is 1, nothing is touched."""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr

from quackish.kernels.arguments import DTYPES, fake_args
from quackish.kernels.dependent_launch import after_previous
from quackish.kernels.memory import load_at, store_at, store_scaled, vector_at
from quackish.ops.shared.problems import ScaleArgs, ScaleConfig, ScaleProblem


class Scale:
    def __init__(self, problem: ScaleProblem, config: ScaleConfig):
        self.problem, self.config = problem, config
        self.vec = 128 // DTYPES[problem.dtype].width

    def fake_args(self):
        return fake_args(self.problem)

    @cute.jit
    def __call__(self, args: ScaleArgs, stream: CUstream):
        """At most 64 registers per thread; starts before the previous kernel ends, see `after_previous`."""
        threads = self.config.threads
        self.kernel(args).launch(
            grid=[args.num_ctas, 1, 1],
            block=[threads, 1, 1],
            min_blocks_per_mp=65_536 // (threads * 64),
            preferred_smem_carveout=10,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, args: ScaleArgs):
        after_previous()
        factor = load_at(args.factor, 0)
        if factor != 1.0:
            self.scale(args.out, args.n, factor)
            self.scale(args.out2, args.n2, factor)

    @cute.jit
    def scale(self, out: cute.Pointer, n: Int64, factor: Float32):
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
                    store_scaled(raw[None, b], out, (v + b * threads) * vec, factor)
        # remainder
        last = num_vectors * vec + tid
        if cta == 0:
            if last < n:
                store_at(out, last, load_at(out, last).to(Float32) * factor)
