"""Functions of one fp32 number: with the approximate instructions, and order-preserving integer codes."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


@cute.jit
def sigmoid(x: Float32) -> Float32:
    return cute.arch.rcp_approx(1.0 + cute.math.exp2(x * -LOG2_E, fastmath=True))


@cute.jit
def tanh(x: Float32) -> Float32:
    """1 - 2 / (exp(2x) + 1). Absolute error below 2^-22, so logits with a softcap of 1e4 are off by up to 1e-3."""
    return 1.0 - 2.0 * cute.arch.rcp_approx(cute.math.exp2(x * (2.0 * LOG2_E), fastmath=True) + 1.0)


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
