"""Shared by the linear cross entropy kernels: exponents, order-preserving integer codes, the base class."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.arguments import fake_args
from quackish.kernels.common.math import LOG2_E
from quackish.kernels.common.memory import load_at, vector_at

# A finite stand-in for infinity, also after multiplication by LOG2_E: inf - inf would be NaN.
HUGE = 2e38
# Lower bound of log2(e) in e * log2(e): 0 * -inf would be NaN for a masked class. exp2(LEAST_LOG2) is 0 in fp32.
LEAST_LOG2 = -256.0
# A row with a logit this far above its shift is flagged. Neither exp(60) in bf16 nor a sum of 2^20 of them in fp32
# overflows.
HEADROOM = 60.0


def log2_scale(logit_scale):
    """The factor from logits to log2 units: logit_scale * log2(e).

    Kernels keep logits, row_shift and target_logit unscaled. Only exponents include logit_scale.
    """
    return LOG2_E if logit_scale is None else load_at(logit_scale, 0) * LOG2_E


def shift_in_log2(row_shift, scale_log2):
    """row_shift * scale_log2, with scale_log2 from `log2_scale`."""
    if isinstance(scale_log2, float):
        return row_shift * scale_log2
    return cute.arch.fmax(row_shift * scale_log2, Float32(-HUGE))  # -inf would give inf - inf


class LceKernel:
    """Base class of the kernels around the GEMMs. A problem has `args`, a config has `threads`."""

    def __init__(self, problem, config):
        self.problem, self.config = problem, config
        self.num_warps = config.threads // 32

    def fake_args(self):
        return fake_args(self.problem)

    def launch_options(self, num_ctas, stream, smem_carveout: int = 10):
        """At most 64 registers per thread; starts before the previous kernel ends, see `after_previous`."""
        threads = self.config.threads
        return dict(
            grid=[num_ctas, 1, 1], block=[threads, 1, 1], min_blocks_per_mp=65_536 // (threads * 64),
            preferred_smem_carveout=smem_carveout, stream=stream, use_pdl=True,
        )  # fmt: skip


@cute.jit
def encode(x: Float32) -> Int32:
    """Order-preserving code of a float: the integer maximum of codes is the code of the maximum."""
    bits = x.bitcast(Int32)
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@cute.jit
def decode(code: Int32) -> Float32:
    bits = code if code >= 0 else code ^ 0x7FFFFFFF
    return bits.bitcast(Float32)


@cute.jit
def encode_argmax(x: Float32, index: Int32) -> Int64:
    """Code of (x, index) whose integer maximum is the argmax: the first index of the largest x."""
    x = Float32(0.0) if x == 0.0 else x  # -0.0 becomes 0.0
    return (Int64(encode(x)) << 32) | Int64(0x7FFFFFFF - index)


@cute.jit
def decode_argmax(code: Int64) -> Int32:
    return 0x7FFFFFFF - (code & 0x7FFFFFFF).to(Int32)


@cute.jit
def rounded_up(live: Int32) -> Int32:
    """`live` rounded up to whole GEMM tiles."""
    return (cutlass.max(live, 0) + (ROW_TILE - 1)) // ROW_TILE * ROW_TILE


@cute.jit
def convert_row(row: cute.Pointer, out: cute.Pointer, n: cutlass.Constexpr[int], lane, factor, batch):
    """A warp computes out = row * factor (None: 1) for n elements, a multiple of 8. Both may be the same memory.

    Each thread has `batch` vectors in flight.
    """
    num_vectors = const_expr(n // 8)
    whole = const_expr(num_vectors // (32 * batch) * (32 * batch))
    raw = cute.make_rmem_tensor((8, batch), row.dtype)
    for first in cutlass.range(0, whole, 32 * batch, unroll=1):
        for b in cutlass.range_constexpr(batch):
            raw[None, b].store(vector_at(row, (first + b * 32 + lane) * 8, 8).load())
        for b in cutlass.range_constexpr(batch):
            store_scaled(raw[None, b], out, (first + b * 32 + lane) * 8, factor)
    for b in cutlass.range_constexpr(batch):  # remainder
        if const_expr(whole + b * 32 < num_vectors):
            if whole + b * 32 + lane < num_vectors:
                raw[None, b].store(vector_at(row, (whole + b * 32 + lane) * 8, 8).load())
    for b in cutlass.range_constexpr(batch):
        if const_expr(whole + b * 32 < num_vectors):
            if whole + b * 32 + lane < num_vectors:
                store_scaled(raw[None, b], out, (whole + b * 32 + lane) * 8, factor)


@cute.jit
def store_scaled(raw: cute.Tensor, out: cute.Pointer, at, factor):
    values = raw.load().to(Float32)
    if const_expr(factor is not None):
        values = values * factor
    vector_at(out, at, cute.size(raw)).store(values.to(out.dtype))
