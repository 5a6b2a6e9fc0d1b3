"""Floating-point arithmetic of PTX on numpy arrays.

fp32 values are float32 arrays, bf16 and fp16 values uint16 arrays of their bits, packed values uint32 or uint64 arrays
with element 0 in the low bits. Rounding modes have PTX's names: "rn", "rz", "rm" (down), "rp" (up). Results are the
bits of a GPU, except those of the functions named `approximate_...`. Run them under `np.errstate(all="ignore")`.

The quotations are from the PTX ISA.
"""

import fractions
from collections.abc import Callable
from typing import Any

import numpy as np

Array = Any  # a numpy array or scalar

# GPUs return these for every NaN that arithmetic makes, and drop payloads.
NAN_F32 = np.uint32(0x7FFFFFFF).view(np.float32)
NAN_16 = np.uint16(0x7FFF)  # the NaN of bf16 and of fp16

_TINY = np.float32(2.0**-126)  # the smallest normal number of fp32
_LOW_29, _HALF_29 = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)  # the bits of fp64 that fp32 lacks, and half of them
_ONE, _SIXTEEN, _LOW_15 = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)

# Instructions run on 32 to 1024 threads, where the overhead of numpy's calls dominates: `count_nonzero` takes a sixth
# of the time of `any`, and constants are numpy scalars.
_some = np.count_nonzero


def canonical(x: Array) -> Array:
    """fp32 `x` with every NaN replaced by the GPU's."""
    x = np.asarray(x, np.float32)
    nan = np.isnan(x)
    return np.where(nan, NAN_F32, x) if _some(nan) else x


def flush(x: Array) -> Array:
    """`.ftz`: "flushes subnormal inputs and results to sign-preserving zero"."""
    x = np.asarray(x, np.float32)
    subnormal = (np.abs(x) < _TINY) & (x != 0)
    return np.where(subnormal, np.copysign(np.float32(0), x), x) if _some(subnormal) else x


# fp32 arithmetic


def add(a: Array, b: Array, rounding: str = "rn") -> Array:
    if rounding == "rn":
        return canonical(np.add(a, b, dtype=np.float32))
    return _rounded(_f64(a), _f64(b), rounding)


def sub(a: Array, b: Array, rounding: str = "rn") -> Array:
    return add(a, np.negative(b, dtype=np.float32), rounding)


def mul(a: Array, b: Array, rounding: str = "rn") -> Array:
    if rounding == "rn":
        return canonical(np.multiply(a, b, dtype=np.float32))
    return _directed(_product(a, b), rounding)


def fma(a: Array, b: Array, c: Array, rounding: str = "rn") -> Array:
    """a * b + c with one rounding.

    "computes the product of a and b to infinite precision and then adds c to this product, again in infinite
    precision. The resulting value is then rounded to single precision".
    """
    return _rounded(_product(a, b), _f64(c), rounding)


def div(a: Array, b: Array) -> Array:
    """Rounds to nearest, as `.rn` does."""
    return canonical(np.divide(a, b, dtype=np.float32))


def sqrt(a: Array) -> Array:
    """Rounds to nearest, as `.rn` does."""
    return canonical(np.sqrt(a, dtype=np.float32))


def minimum(a: Array, b: Array, nan: bool = False) -> Array:
    """The smaller operand. If one is NaN, the other one; with `nan`, which is PTX's `.NaN`, NaN."""
    return _extreme(np.minimum if nan else np.fmin, np.bitwise_or, a, b)


def maximum(a: Array, b: Array, nan: bool = False) -> Array:
    """The larger operand. NaN is treated as in `minimum`."""
    return _extreme(np.maximum if nan else np.fmax, np.bitwise_and, a, b)


def _extreme(choose: Callable[..., Array], sign_of_zeros: Callable[..., Array], a: Array, b: Array) -> Array:
    """The minimum or maximum. sign_of_zeros: combines the bits of two zeros."""
    result = canonical(choose(np.asarray(a, np.float32), np.asarray(b, np.float32)))
    if _some(result == 0):
        # "If values of both inputs are 0.0, then +0.0 > -0.0."
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        zero = sign_of_zeros(a.view(np.uint32), b.view(np.uint32)).view(np.float32)
        result = np.where((a == 0) & (b == 0), zero, result)
    return result


# Sums in fp64, and their rounding to fp32. A product of two fp32 numbers is exact in fp64.


def _f64(x: Array) -> Array:
    return np.asarray(x).astype(np.float64)


def _product(a: Array, b: Array) -> Array:
    """The product, which is exact: it has 48 bits."""
    return np.multiply(a, b, dtype=np.float64)


def _rounded(a: Array, b: Array, rounding: str) -> Array:
    """The sum of two fp64 numbers rounded once to fp32."""
    total = np.asarray(a + b)
    if rounding != "rn":
        result = _directed(_odd(total, a, b), rounding)
        if rounding == "rm":  # IEEE 754: an exact sum of zero is -0 unless both addends are +0
            both_plus = (a == 0) & (b == 0) & ~np.signbit(a) & ~np.signbit(b)
            result = np.where((total == 0) & ~both_plus, np.float32(-0.0), result)
        return result
    # Rounding twice differs from rounding once only if the first rounding ends half way between two fp32 numbers.
    half_way = (total.view(np.uint64) & _LOW_29) == _HALF_29
    if _some(half_way) or _some(np.abs(total) < _TINY):  # half way is elsewhere for subnormal numbers
        total = _odd(total, a, b)
    return canonical(total.astype(np.float32))


def _odd(total: Array, a: Array, b: Array) -> Array:
    """a + b rounded to odd: of the two fp64 neighbors of an inexact sum, the one with an odd last bit.

    Such a number is never half way between two numbers of a format with fewer than 52 bits, and lies on the side of it
    that the exact sum lies on, so that rounding it again equals rounding the exact sum.
    """
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact: Knuth's two-sum
    bits = total.view(np.int64)
    wrong = (np.abs(error) > 0) & (bits & 1 == 0) & np.isfinite(total)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(wrong, bits + step, bits).view(np.float64)


def _directed(x: Array, rounding: str) -> Array:
    """fp64 `x`, exact or rounded to odd, rounded to fp32 in one direction."""
    result = np.asarray(x).astype(np.float32)
    back = result.astype(np.float64)
    if rounding == "rm":
        wrong, toward = back > x, np.float32(-np.inf)
    elif rounding == "rp":
        wrong, toward = back < x, np.float32(np.inf)
    else:
        assert rounding == "rz", rounding
        wrong, toward = np.abs(back) > np.abs(x), np.float32(0)
    return canonical(np.where(wrong, np.nextafter(result, toward), result))


# Approximations. Each returns the exact value rounded to nearest; a GPU may differ from that by the manual's bound.


def approximate_rcp(a: Array) -> Array:
    # "The maximum ulp error is 1 across the full range of inputs."
    return div(np.float32(1), a)


def approximate_sqrt(a: Array) -> Array:
    # "The maximum relative error over the entire positive finite floating-point range is 2^-23."
    return sqrt(a)


def approximate_rsqrt(a: Array) -> Array:
    # "The maximum relative error for rsqrt.f32 over the entire positive finite floating-point range is 2^-22.9."
    return canonical((1 / np.sqrt(_f64(a))).astype(np.float32))


def approximate_ex2(a: Array) -> Array:
    # "The maximum ulp error is 2 ulp from correctly rounded result across the full range of inputs."
    return canonical(np.exp2(_f64(a)).astype(np.float32))


def approximate_lg2(a: Array) -> Array:
    # "The maximum absolute error is 2^-22 when the input operand is in the range (0.5, 2). For positive finite inputs
    # outside of this interval, maximum relative error is 2^-22."
    return canonical(np.log2(_f64(a)).astype(np.float32))


def approximate_tanh(a: Array) -> Array:
    # "The maximum relative error over the entire floating point range is 2^-11."
    return canonical(np.tanh(_f64(a)).astype(np.float32))


def approximate_sin(a: Array) -> Array:
    """The maximum absolute error is 2^-20.5 within 2 pi and 2^-14.7 within 100 pi; beyond, there is no bound."""
    return canonical(np.sin(_f64(a)).astype(np.float32))


def approximate_cos(a: Array) -> Array:
    """The errors are those of `approximate_sin`."""
    return canonical(np.cos(_f64(a)).astype(np.float32))


# Conversions


def bf16_to_f32(bits: Array) -> Array:
    return (np.asarray(bits, np.uint16).astype(np.uint32) << _SIXTEEN).view(np.float32)


def f16_to_f32(bits: Array) -> Array:
    return canonical(np.asarray(bits, np.uint16).view(np.float16).astype(np.float32))


def e5m2_to_f32(bits: Array) -> Array:
    return f16_to_f32(np.asarray(bits, np.uint8).astype(np.uint16) << np.uint16(8))


def e4m3_to_f32(bits: Array) -> Array:
    """4 bits of exponent with a bias of 7, 3 of mantissa; no infinity, and NaN has all of these bits set."""
    bits = np.asarray(bits, np.uint8)
    exponent, mantissa = (bits >> 3 & 15).astype(np.int32), (bits & 7).astype(np.float32)
    size = np.where(exponent, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)).astype(np.float32)
    return np.where(bits & 127 == 127, NAN_F32, np.where(bits >> 7, -size, size))


def f32_to_bf16(x: Array, rounding: str = "rn") -> Array:
    """Rounds to the bits of bf16. `rounding` is "rn" or "rz"."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    if rounding == "rn":
        # Adds just under half of the last place, or half where the last place is odd.
        bits = bits + (((bits >> _SIXTEEN) & _ONE) + _LOW_15)
    return _with_nan(x, (bits >> _SIXTEEN).astype(np.uint16))


def f32_to_f16(x: Array, rounding: str = "rn") -> Array:
    """Rounds to the bits of fp16. `rounding` is "rn" or "rz"."""
    x = np.asarray(x, np.float32)
    half = x.astype(np.float16)
    bits = half.view(np.uint16)
    if rounding == "rz":
        bits = bits - (np.abs(half.astype(np.float32)) > np.abs(x)).astype(np.uint16)
    return _with_nan(x, bits)


def _with_nan(x: Array, bits: Array) -> Array:
    """Bits of 16-bit results, with the GPU's NaN where `x` is NaN."""
    nan = np.isnan(x)
    return np.where(nan, NAN_16, bits) if _some(nan) else bits


def _f32_to_fp8(x: Array, values: Array) -> Array:
    """Rounds to the nearest of `values`, which are the numbers with the bits 0, 1, ..., ties to even bits.

    `.satfinite`: "the result is set to MAX_NORM of the destination format", and NaN to NaN, 0x7f.
    """
    x = np.asarray(x, np.float32)
    size = np.abs(x).astype(np.float64)
    above = np.minimum(np.searchsorted(values, size), len(values) - 1)
    below = np.maximum(above - 1, 0)
    up, down = values[above] - size, size - values[below]
    bits = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    bits = np.where(size >= values[-1], len(values) - 1, bits)
    return np.where(np.isnan(x), 0x7F, bits | np.signbit(x) << 7).astype(np.uint8)


_E4M3 = e4m3_to_f32(np.arange(0x7F)).astype(np.float64)  # up to 448
_E5M2 = e5m2_to_f32(np.arange(0x7C)).astype(np.float64)  # up to 57344


def f32_to_e4m3(x: Array) -> Array:
    return _f32_to_fp8(x, _E4M3)


def f32_to_e5m2(x: Array) -> Array:
    return _f32_to_fp8(x, _E5M2)


def f32_to_tf32(x: Array) -> Array:
    """The value that tensor cores multiply: "will truncate lower 13 bits of the 32-bit input data"."""
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


_TO_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def float_to_integer(x: Array, rounding: str, dtype: Any, is_f64: bool = False) -> Array:
    """Rounds to an integer type; values out of range saturate.

    `rounding` is "rni", "rzi", "rmi" or "rpi". NaN gives "Zero if source is not .f64 and destination is not .s64,
    .u64", else "1 << (BitWidth(dst) - 1)".
    """
    info, value = np.iinfo(dtype), _TO_INTEGRAL[rounding](_f64(x))
    below, above = value <= info.min, value >= info.max
    nan = np.uint64(1 << (info.bits - 1) if is_f64 or info.bits == 64 else 0).astype(dtype)
    inside = np.where(below | above | (value != value), 0, value).astype(dtype)
    saturated = np.where(below, dtype(info.min), np.where(above, dtype(info.max), inside))
    return np.where(value != value, nan, saturated)


def to_integral(x: Array, rounding: str) -> Array:
    """Rounds fp32 or fp64 to an integer of the same type."""
    result = _TO_INTEGRAL[rounding](x)
    return canonical(result) if result.dtype == np.float32 else result


# fp64. NaN keeps the payload of an operand, as numpy's does.


def fma_f64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding. Finite numbers are added as fractions, one after another."""
    a, b, c = np.broadcast_arrays(a, b, c)
    result = np.array(a * b + c)
    for i in np.flatnonzero(np.isfinite(a) & np.isfinite(b) & np.isfinite(c) & (a != 0) & (b != 0)):
        exact = fractions.Fraction(a.flat[i]) * fractions.Fraction(b.flat[i]) + fractions.Fraction(c.flat[i])
        result.flat[i] = _nearest_f64(exact)
    return result


def _nearest_f64(x: fractions.Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        return np.inf if x > 0 else -np.inf


def minimum_f64(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0) & np.signbit(a), a, np.fmin(b, a))


def maximum_f64(a: Array, b: Array) -> Array:
    return np.where((a == 0) & (b == 0) & ~np.signbit(a), a, np.fmax(b, a))


def coarse_rcp_f64(a: Array) -> Array:
    """rcp.approx.ftz.f64: the upper halves of the operand and of the result alone have a meaning."""
    return _upper_half(1 / _upper_half(a))


def coarse_rsqrt_f64(a: Array) -> Array:
    """rsqrt.approx.ftz.f64, which is as coarse as `coarse_rcp_f64`."""
    return _upper_half(1 / np.sqrt(_upper_half(a)))


def _upper_half(a: Array) -> Array:
    """Drops the lower 32 bits; subnormal numbers become zeros of their sign."""
    upper = (np.asarray(a, np.float64).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)
    return np.where(np.abs(upper) < 2.0**-1022, np.copysign(0.0, upper), upper)


# bf16 and fp16 arithmetic: one rounding, to nearest

_ONE_BF16, _ONE_F16, _MINUS_ZERO = np.uint16(0x3F80), np.uint16(0x3C00), np.uint16(0x8000)


def fma_bf16(a: Array, b: Array, c: Array) -> Array:
    """a * b + c with one rounding: exact, or rounded to odd, until the last step."""
    exact = _odd_fma(*map(bf16_to_f32, (a, b, c)))
    # To fp32, to odd again, and to bf16.
    single = exact.astype(np.float32)
    bits, back = single.view(np.int32), single.astype(np.float64)
    wrong = (back != exact) & (bits & 1 == 0) & (exact == exact)
    step = np.where(np.abs(back) < np.abs(exact), 1, -1).astype(np.int32)
    return f32_to_bf16(np.where(wrong, bits + step, bits).view(np.float32))


def fma_f16(a: Array, b: Array, c: Array) -> Array:
    exact = _odd_fma(*map(f16_to_f32, (a, b, c)))
    return _with_nan(exact, exact.astype(np.float16).view(np.uint16))


def _odd_fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp64, rounded to odd."""
    product, c = _product(a, b), _f64(c)
    return _odd(np.asarray(product + c), product, c)


def add_bf16(a: Array, b: Array) -> Array:
    return fma_bf16(a, _ONE_BF16, b)


def add_f16(a: Array, b: Array) -> Array:
    return fma_f16(a, _ONE_F16, b)


def mul_bf16(a: Array, b: Array) -> Array:
    """The product. Adding -0 keeps the sign of a product that is zero."""
    return fma_bf16(a, b, _MINUS_ZERO)


def mul_f16(a: Array, b: Array) -> Array:
    return fma_f16(a, b, _MINUS_ZERO)


def minimum_bf16(a: Array, b: Array, nan: bool = False) -> Array:
    return f32_to_bf16(minimum(bf16_to_f32(a), bf16_to_f32(b), nan))


def maximum_bf16(a: Array, b: Array, nan: bool = False) -> Array:
    return f32_to_bf16(maximum(bf16_to_f32(a), bf16_to_f32(b), nan))


def minimum_f16(a: Array, b: Array, nan: bool = False) -> Array:
    return f32_to_f16(minimum(f16_to_f32(a), f16_to_f32(b), nan))


def maximum_f16(a: Array, b: Array, nan: bool = False) -> Array:
    return f32_to_f16(maximum(f16_to_f32(a), f16_to_f32(b), nan))


# Packed formats


def pack16(low: Array, high: Array) -> Array:
    """Two uint16 arrays as one of uint32."""
    return np.asarray(low, np.uint16).astype(np.uint32) | np.asarray(high, np.uint16).astype(np.uint32) << _SIXTEEN


def each16(function: Callable[..., Array], *packed: Array) -> Array:
    """A function of 16-bit numbers on both halves of uint32 arrays: bf16x2 and f16x2."""
    return _each(function, np.uint32, np.uint16, packed)


def each32(function: Callable[..., Array], *packed: Array) -> Array:
    """A function of fp32 numbers on both halves of uint64 arrays: f32x2."""
    return _each(function, np.uint64, np.float32, packed)


def _each(function: Callable[..., Array], whole: type, part: type, packed: tuple[Array, ...]) -> Array:
    """Applies a function to all parts of packed arrays."""
    arrays = np.broadcast_arrays(*(np.asarray(x, whole) for x in packed))
    parts: Any = (np.ascontiguousarray(x).view(part) for x in arrays)
    return np.ascontiguousarray(function(*parts)).view(whole).reshape(arrays[0].shape)
