"""Activations of an MLP and their derivatives, elementwise in fp32: act = activate_gate(gate) * activate_up(up)."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from quackish.kernels.math import LOG2_E, sigmoid

LIMIT, ALPHA = 7.0, 1.702  # of "clamped_swiglu"
FP16_OVERFLOW = 65520.0  # the least number that rounds to an infinity in fp16
GELU_2, GELU_3 = 1.5957691216057308, 0.044715  # x * sigmoid(GELU_2 * (x + GELU_3 * x^3)), GELU_2 being 2 sqrt(2 / pi)
# For x < 0, the normal distribution is exp(-x^2 / 2) times a polynomial in t = 1 / (1 + TAIL_SCALE * |x|), without t^0.
# This fit has a relative error below 5e-6, and none where GELU's derivative is 0.
TAIL_SCALE = 0.30547013
TAIL = (0.12217579, 0.11705571, 0.13985580, -0.0023015237, 0.20006567, -0.076851363)


@cute.jit
def normal(x: Float32):
    """(the normal distribution at x, its density)"""
    t = cute.arch.rcp_approx(1.0 + TAIL_SCALE * cute.arch.fmax(x, -x))
    e = cute.math.exp2(x * x * (-0.5 * LOG2_E), fastmath=True)
    tail = TAIL[-1]
    for k in cutlass.range_constexpr(2, len(TAIL) + 1):
        tail = tail * t + TAIL[-k]
    tail = tail * (t * e)
    # 1 - tail or tail, by x's sign bit: choices by predicates spilled registers
    sign = ((x.bitcast(Int32) & -0x80000000) | 0x3F800000).bitcast(Float32)
    return cute.math.fma(-sign, tail, cute.arch.fmax(sign, 0.0)), e * 0.3989422804


@cute.jit
def activate_gate(gate: Float32, activation: cutlass.Constexpr[str]):
    """(activate_gate(gate), its derivative)"""
    if const_expr(activation == "relu2"):
        x = cute.arch.fmax(gate, 0.0, nan=True)
        return x * x, 2.0 * x
    if const_expr(activation == "reglu"):
        x = cute.arch.fmax(gate, 0.0, nan=True)
        return x, Float32(1.0) if gate > 0.0 else x
    if const_expr(activation in ("geglu_erf", "gelu_erf")):
        cdf, density = normal(gate)
        return gate * cdf, cdf + gate * density
    if const_expr(activation in ("geglu", "gelu_tanh")):
        square = gate * gate
        s = sigmoid(GELU_2 * gate * (1.0 + GELU_3 * square))
        return gate * s, s + gate * s * (1.0 - s) * (GELU_2 * (1.0 + 3.0 * GELU_3 * square))
    if const_expr(activation == "clamped_swiglu"):
        clamped = cute.arch.fmin(gate, LIMIT, nan=True)
        s = sigmoid(ALPHA * clamped)
        slope = s * (1.0 + ALPHA * clamped * (1.0 - s))
        return clamped * s, Float32(0.0) if gate >= LIMIT else slope
    s = sigmoid(gate)
    return gate * s, s * (1.0 + gate * (1.0 - s))


@cute.jit
def activate_up(up: Float32, activation: cutlass.Constexpr[str]):
    """(activate_up(up), its derivative)"""
    if const_expr(activation == "clamped_swiglu"):
        low = cute.arch.fmax(up, -LIMIT, nan=True)
        clamped = cute.arch.fmin(low, LIMIT, nan=True)
        return clamped + 1.0, Float32(0.0) if cute.arch.fmax(up, -up) >= LIMIT else Float32(1.0)
    return up, Float32(1.0)


@cute.jit
def activate_backward(dact: Float32, z: list, v: cutlass.Constexpr[int], activation: cutlass.Constexpr[str]):
    """The activation of value v of z, whose gradient is dact. z's value becomes its gradient.

    z: registers with the gate's and, if there is one, up's 16-bit values.
    """
    act, df = activate_gate(z[0][v].to(Float32), activation)
    if const_expr(len(z) == 2):
        u, du = activate_up(z[1][v].to(Float32), activation)
        z[1][v] = (dact * (act * du)).to(z[1].element_type)
        df, act = df * u, act * u
    z[0][v] = (dact * df).to(z[0].element_type)
    return act


@cute.jit
def overflow_as_fp16(x: Float32) -> Float32:
    """x, but infinite if it is infinite in fp16."""
    return x * Float32(float("inf")) if cute.arch.fmax(x, -x) >= FP16_OVERFLOW else x
