"""Rounding of fractions to binary formats, and IEEE 754 arithmetic on Python numbers made of it."""

import math
import struct
from fractions import Fraction

INF, NAN = math.inf, math.nan
NAN_BITS = 0x7FFFFFFF  # the NaN of a GPU


class Format:
    """A binary format. Rounds by comparing a fraction with its two neighbors."""

    def __init__(self, precision: int, least: int, greatest: int):
        self.precision, self.least = precision, least  # `least`: exponent of the smallest subnormal number
        self.max = Fraction(2**precision - 1) * Fraction(2) ** (greatest - precision + 1)

    def round(self, x: Fraction, rounding: str = "rn") -> float:
        if x == 0:
            return 0.0
        exponent = max(abs(x.numerator).bit_length() - x.denominator.bit_length() - self.precision - 2, self.least)
        while Fraction(2) ** (exponent + self.precision) <= abs(x):
            exponent += 1
        unit = Fraction(2) ** exponent
        below = x // unit * unit
        above = below if below == x else below + unit
        nearest = {-1: below, 1: above}.get((x - below > above - x) - (x - below < above - x))
        if nearest is None:
            nearest = below if (below / unit) % 2 == 0 else above
        result = {"rn": nearest, "rm": below, "rp": above, "rz": below if x > 0 else above}[rounding]
        if abs(result) > self.max:
            away = rounding in ("rn", "rp" if x > 0 else "rm")
            return math.copysign(INF if away else float(self.max), x)
        return math.copysign(float(result), x)


F32, BF16, F16 = Format(24, -149, 127), Format(8, -133, 127), Format(11, -24, 15)


def bits_of(value: float) -> int:
    """The bits of a number that fp32 represents exactly; of NaN, the GPU's."""
    return NAN_BITS if math.isnan(value) else struct.unpack("<I", struct.pack("<f", value))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits & 0xFFFFFFFF))[0]


def fma(a: float, b: float, c: float, rounding: str = "rn", form: Format = F32) -> float:
    """a * b + c rounded once; add is fma(a, 1, c), and mul is fma(a, b, -0.0 or 0.0 with the product's sign)."""
    if all(map(math.isfinite, (a, b, c))):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact != 0:
            return form.round(exact, rounding)
        # IEEE 754: an exact zero is +0 unless both addends are -0; rounding down, -0 unless both are +0.
        signs = {math.copysign(1, a) * math.copysign(1, b), math.copysign(1, c)}
        if Fraction(a) * Fraction(b) != 0 or len(signs) == 2:
            return -0.0 if rounding == "rm" else 0.0
        return math.copysign(0.0, signs.pop())
    return a * b + c


def add(a: float, b: float, rounding: str = "rn", form: Format = F32) -> float:
    return fma(a, 1.0, b, rounding, form)


def mul(a: float, b: float, rounding: str = "rn", form: Format = F32) -> float:
    sign = math.copysign(1, a) * math.copysign(1, b)
    return fma(a, b, math.copysign(0.0, sign), rounding, form)


def div(a: float, b: float) -> float:
    if b == 0:
        sign = math.copysign(1, a) * math.copysign(1, b)
        return NAN if a == 0 or math.isnan(a) else math.copysign(INF, sign)
    if math.isfinite(a) and math.isfinite(b) and a != 0:
        return F32.round(Fraction(a) / Fraction(b))
    return a / b


def nearest(value: float) -> float:
    """A number of fp64 rounded to fp32."""
    return F32.round(Fraction(value)) if math.isfinite(value) and value != 0 else value


def flushed(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < 2.0**-126 else value
