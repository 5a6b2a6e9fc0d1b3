"""Shared by linear cross entropy's kernels: fake arguments, access by pointer, and floats as ordered integers."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from quackish.configs.lce_args import Ptr
from quackish.configs.lce_rows import ROW_TILE
from quackish.kernels.common.rows import DTYPES, fake_pointer, vector_at

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# In place of infinity: exp(a - HUGE) is 0, and any a is far above -HUGE. Finite, and so times LOG2_E, as else an a of
# -inf would give inf - inf.
HUGE = 2e38
# In e * log2(e), the least log2(e): 0 * -inf would be NaN for a masked class. exp2(LEAST_LOG2) is 0 in fp32.
LEAST_LOG2 = -256.0


def log2_scale(logit_scale):
    """What a logit is multiplied by in log2 units.

    Kernels keep logits as they are before logit_scale: row_shift and target_logit too. Only exponents are scaled.
    """
    return LOG2_E if logit_scale is None else load_at(logit_scale, 0) * LOG2_E


def shift_in_log2(row_shift, scale_log2):
    """row_shift times what `log2_scale` returned."""
    if isinstance(scale_log2, float):
        return row_shift * scale_log2
    return cute.arch.fmax(row_shift * scale_log2, Float32(-HUGE))  # -inf would give inf - inf


def fake_args(problem):
    """(arguments, stream) to compile a kernel for: `problem.args` with a pointer or a number for each spec."""

    def fake(spec: tuple | Ptr | str | None):
        if isinstance(spec, tuple):  # a NamedTuple
            return spec._make(map(fake, spec))
        return fake_pointer(spec.dtype, spec.aligned) if isinstance(spec, Ptr) else spec and DTYPES[spec](1)

    return fake(problem.args), cute.runtime.make_fake_stream()


@cute.jit
def after_previous():
    """Waits for the previous launch, and lets CTAs of the next one start on SMs with room: they wait here too.

    Every CTA calls this, on every path. When a CTA starts, all launches before the previous one are done, because the
    previous launch waited for them here. (PyTorch's kernels start no launch early.) Their results may be read before
    this call, after a fence, which empties the L1. Nothing may be written before this call: the previous launch may
    still use memory that this launch was given.
    """
    cute.arch.griddepcontrol_wait()
    cute.arch.griddepcontrol_launch_dependents()


@cute.jit
def load_at(base: cute.Pointer, at):
    return cute.make_tensor(base + at, cute.make_layout(1))[0]


@cute.jit
def load_eight(base: cute.Pointer, at, aligned: cutlass.Constexpr[bool]):
    """Eight elements, loaded one by one unless they start on 16 bytes."""
    if const_expr(aligned):
        return vector_at(base, at, 8).load()
    raw = cute.make_rmem_tensor((8,), base.dtype)
    for k in cutlass.range_constexpr(8):
        raw[k] = load_at(base, at + k)
    return raw.load()


@cute.jit
def store_at(base: cute.Pointer, at, value):
    cute.make_tensor(base + at, cute.make_layout(1))[0] = value.to(base.dtype)


@cute.jit
def encode(x: Float32) -> Int32:
    """An int32 in the order of floats, so that an integer maximum is the floats' maximum."""
    bits = x.bitcast(Int32)
    return bits if bits >= 0 else bits ^ 0x7FFFFFFF


@cute.jit
def decode(code: Int32) -> Float32:
    bits = code if code >= 0 else code ^ 0x7FFFFFFF
    return bits.bitcast(Float32)


@cute.jit
def encode_argmax(x: Float32, index: Int32) -> Int64:
    """The larger x has the larger code, and of equal ones the smaller index: the maximum is the argmax."""
    x = Float32(0.0) if x == 0.0 else x  # -0.0 equals 0.0
    return (Int64(encode(x)) << 32) | Int64(0x7FFFFFFF - index)


@cute.jit
def decode_argmax(code: Int64) -> Int32:
    return 0x7FFFFFFF - (code & 0x7FFFFFFF).to(Int32)


@cute.jit
def rounded_up(live: Int32) -> Int32:
    """`live` rows of a chunk, up to the end of their last GEMM tile."""
    return (cutlass.max(live, 0) + (ROW_TILE - 1)) // ROW_TILE * ROW_TILE


@cute.jit
def fill_row(row: cute.Pointer, n: cutlass.Constexpr[int], lane, value: cutlass.Constexpr[float]):
    """A warp writes n elements, n a multiple of 8."""
    vec = const_expr(128 // row.dtype.width)
    filled = cute.make_rmem_tensor((vec,), row.dtype)
    filled.fill(value)
    for v in cutlass.range(lane, n // vec, 32, unroll=4):
        vector_at(row, v * vec, vec).store(filled.load())


@cute.jit
def convert_row(row: cute.Pointer, out: cute.Pointer, n: cutlass.Constexpr[int], lane, factor, batch):
    """A warp writes out = row * factor (None is 1), n elements, n a multiple of 8; both may be the same memory.

    `batch` vectors of a thread are in flight.
    """
    num_vectors = const_expr(n // 8)
    whole = const_expr(num_vectors // (32 * batch) * (32 * batch))
    raw = cute.make_rmem_tensor((8, batch), row.dtype)
    for first in cutlass.range(0, whole, 32 * batch, unroll=1):
        for b in cutlass.range_constexpr(batch):
            raw[None, b].store(vector_at(row, (first + b * 32 + lane) * 8, 8).load())
        for b in cutlass.range_constexpr(batch):
            store_scaled(raw[None, b], out, (first + b * 32 + lane) * 8, factor)
    for b in cutlass.range_constexpr(batch):  # the ragged end
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
