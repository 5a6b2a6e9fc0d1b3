"""The emulator's arithmetic against exact arithmetic on fractions, IEEE 754 and sentences of the PTX manual."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

from quackish.emulator import numbers
from tests.emulator.exact_arithmetic import BF16, F16, F32, INF, NAN, bits_of

MAX, TINY, SMALLEST = (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-149  # of fp32


@pytest.fixture(autouse=True)
def _silent():
    with np.errstate(all="ignore"):
        yield


def f32(*values):
    return np.array(values, np.float32)


def bits32(x) -> list[int]:
    return [int(v) for v in np.asarray(x, np.float32).view(np.uint32)]


def interesting(seed: int, count: int) -> list[float]:
    """fp32 numbers with few or many bits, close to each other, so that sums cancel and round half way."""
    random = np.random.default_rng(seed)
    whole = random.integers(-(2**24), 2**24, count) * 2.0 ** random.integers(-30, 6, count)
    short = random.integers(-9, 9, count) * 2.0 ** random.integers(-149, 124, count)
    near = (1 + random.integers(-3, 4, count) * 2.0**-23) * 2.0 ** random.integers(-27, 27, count)
    return [float(np.float32(x)) for x in random.permutation(np.concatenate([whole, short, near]))][:count]


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_fma_rounds_the_exact_value_once(rounding):
    a, b, c = interesting(1, 4000), interesting(2, 4000), interesting(3, 4000)
    a[:1000] = [1 + i * 2.0**-12 for i in range(1000)]  # products with 24 bits more than fp32 has
    c[:500] = [2.0**-60 * (-1) ** i for i in range(500)]  # ... on either side of half way
    exact = [Fraction(x) * Fraction(y) + Fraction(z) for x, y, z in zip(a, b, c, strict=True)]
    got = numbers.fma(f32(*a), f32(*b), f32(*c), rounding)
    for x, g, inputs in zip(exact, got, zip(a, b, c, strict=True), strict=True):
        if x != 0:
            assert bits_of(float(g)) == bits_of(F32.round(x, rounding)), inputs


def test_fma_where_rounding_through_fp64_is_wrong():
    a, b, c = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80
    product = Fraction(a) * Fraction(b)  # 1 + 2^-11 + 2^-24: half way between two fp32 numbers
    below, above = 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-23
    assert product == (Fraction(below) + Fraction(above)) / 2
    got = numbers.fma(f32(a, a, a), f32(b, b, b), f32(c, 0, -c))
    assert got.tolist() == [above, below, below]  # the tie goes to the even number, 1 + 2^-11
    assert float(np.float32(np.float64(a) * b + c)) == below  # what two roundings give


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_add_sub_and_mul_round_as_asked(rounding):
    a, b = interesting(4, 3000), interesting(5, 3000)
    for function, exact in [
        (numbers.add, lambda x, y: x + y),
        (numbers.sub, lambda x, y: x - y),
        (numbers.mul, lambda x, y: x * y),
    ]:
        got = function(f32(*a), f32(*b), rounding)
        for x, y, g in zip(a, b, got, strict=True):
            value = exact(Fraction(x), Fraction(y))
            if value != 0:
                assert bits_of(float(g)) == bits_of(F32.round(value, rounding)), (function.__name__, x, y)


def test_zeros_infinities_and_nan_of_arithmetic():
    # IEEE 754: the sign of a zero sum is + except in rounding toward negative, and that of equal zeros is kept.
    assert bits32(numbers.add(f32(1, 0.0, -0.0, -0.0), f32(-1, -0.0, 0.0, -0.0))) == [0, 0, 0, 1 << 31]
    assert bits32(numbers.add(f32(1, 0.0, 0.0, -0.0), f32(-1, -0.0, 0.0, -0.0), "rm")) == [1 << 31, 1 << 31, 0, 1 << 31]
    assert bits32(numbers.fma(f32(1, -1, 2), f32(1, 0.0, 3), f32(-1, -0.0, -6))) == [0, 1 << 31, 0]
    assert bits32(numbers.fma(f32(INF, 0, 2), f32(1, INF, MAX), f32(-INF, 1, 0))) == [
        0x7FFFFFFF,
        0x7FFFFFFF,
        0x7F800000,
    ]
    assert bits32(numbers.fma(f32(2), f32(MAX), f32(0), "rz")) == [bits_of(MAX)]
    assert bits32(numbers.fma(f32(-2), f32(MAX), f32(0), "rp")) == [bits_of(-MAX)]
    payload = np.array([0xFFC12345], np.uint32).view(np.float32)
    for function in (numbers.add, numbers.sub, numbers.mul, numbers.div, numbers.minimum):
        assert bits32(function(payload, payload)) == [0x7FFFFFFF], function.__name__
    assert bits32(numbers.fma(payload, f32(1), f32(1))) == [0x7FFFFFFF]
    assert bits32(numbers.div(f32(1, -1, 0, 1), f32(0, 0, 0, INF))) == [0x7F800000, 0xFF800000, 0x7FFFFFFF, 0]
    assert bits32(numbers.sqrt(f32(-0.0, -1, 4))) == [1 << 31, 0x7FFFFFFF, bits_of(2.0)]


def test_subnormal_numbers_are_kept_and_flushed():
    assert bits32(numbers.mul(f32(TINY, SMALLEST), f32(0.5, 0.5))) == [0x00400000, 0]  # half of the smallest: to even
    assert bits32(numbers.mul(f32(SMALLEST), f32(0.5), "rp")) == [1]
    assert bits32(numbers.fma(f32(TINY), f32(2.0**-23), f32(SMALLEST))) == [2]
    # the product is just above half of the smallest number, which fp64's rounding of the sum must not lose
    assert bits32(numbers.fma(f32(SMALLEST), f32(0.5 + 2.0**-20), f32(0))) == [1]
    flushed = numbers.flush(f32(SMALLEST, -SMALLEST, TINY, -0.0, 1, INF))
    assert bits32(flushed) == [0, 1 << 31, bits_of(TINY), 1 << 31, bits_of(1.0), 0x7F800000]
    assert bits32(numbers.flush(f32(NAN)))[0] & 0x7FFFFFFF > 0x7F800000


def test_minimum_and_maximum():
    # NaN only if both are NaN; one NaN gives the other operand. -0.0 is less than +0.0.
    a, b = f32(1, NAN, 2, NAN, 0.0, -0.0, -0.0), f32(2, 3, NAN, NAN, -0.0, 0.0, -0.0)
    low = [bits_of(v) for v in (1.0, 3.0, 2.0, NAN, -0.0, -0.0, -0.0)]
    high = [bits_of(v) for v in (2.0, 3.0, 2.0, NAN, 0.0, 0.0, -0.0)]
    assert bits32(numbers.minimum(a, b)) == low
    assert bits32(numbers.maximum(a, b)) == high
    # "If .NaN modifier is specified, then the result is canonical NaN if any of the inputs is NaN."
    for function, expected in ((numbers.minimum, low), (numbers.maximum, high)):
        assert bits32(function(a, b, nan=True)) == [expected[0], *[0x7FFFFFFF] * 3, *expected[4:]]
    half = numbers.maximum_bf16(np.array([0x7FC1, 0x8000], np.uint16), np.array([0x3F80, 0x0000], np.uint16), nan=True)
    assert half.tolist() == [0x7FFF, 0x0000]
    half = numbers.minimum_f16(np.array([0x7E01, 0x8000], np.uint16), np.array([0x3C00, 0x0000], np.uint16))
    assert half.tolist() == [0x3C00, 0x8000]


def test_approximate_functions_at_the_manuals_special_inputs():
    """The tables "Input | Result" of each instruction."""
    inputs = [-INF, -1.0, -0.0, 0.0, INF, NAN]
    table = {
        numbers.approximate_rcp: [-0.0, -1.0, -INF, INF, 0.0, NAN],
        numbers.approximate_sqrt: [NAN, NAN, -0.0, 0.0, INF, NAN],
        numbers.approximate_rsqrt: [NAN, NAN, -INF, INF, 0.0, NAN],
        numbers.approximate_ex2: [0.0, 0.5, 1.0, 1.0, INF, NAN],
        numbers.approximate_lg2: [NAN, NAN, -INF, -INF, INF, NAN],
        numbers.approximate_tanh: [-1.0, None, -0.0, 0.0, 1.0, NAN],
        numbers.approximate_sin: [NAN, None, -0.0, 0.0, NAN, NAN],
        numbers.approximate_cos: [NAN, None, 1.0, 1.0, NAN, NAN],
    }
    for function, results in table.items():
        for given, expected in zip(inputs, results, strict=True):
            if expected is not None:
                assert bits32(function(f32(given))) == [bits_of(expected)], (function.__name__, given)


def test_approximate_functions_round_to_nearest():
    x = f32(*np.random.default_rng(0).uniform(0.01, 20, 200))
    for function, exact in [
        (numbers.approximate_ex2, lambda v: 2.0**v),
        (numbers.approximate_lg2, math.log2),
        (numbers.approximate_rsqrt, lambda v: 1 / math.sqrt(v)),
        (numbers.approximate_rcp, lambda v: 1 / v),
        (numbers.approximate_tanh, math.tanh),
        (numbers.approximate_sin, math.sin),
        (numbers.approximate_cos, math.cos),
    ]:
        assert function(x).tolist() == [float(np.float32(exact(float(v)))) for v in x], function.__name__


@pytest.mark.parametrize("rounding", ["rn", "rz"])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_conversions_to_16_bits(name, rounding):
    form = {"bf16": BF16, "f16": F16}[name]
    convert, back = getattr(numbers, f"f32_to_{name}"), getattr(numbers, f"{name}_to_f32")
    limit = float(form.max)
    ulp = limit - float(form.round(Fraction(limit) * (1 - Fraction(1, 2 ** (form.precision + 1))), "rz"))
    values = interesting(6, 2000)
    values += [limit, -limit, limit + ulp / 4, limit + ulp / 2, 2.0**form.least, 2.0 ** (form.least - 1)]
    values += [1.5 * 2.0**form.least, 2.5 * 2.0**form.least, 0.0, -0.0, INF, -INF]
    values = [float(np.float32(v)) for v in values]
    got = back(convert(f32(*values), rounding))
    for value, g in zip(values, got, strict=True):
        expected = value if value == 0 or math.isinf(value) else form.round(Fraction(value), rounding)
        assert bits_of(float(g)) == bits_of(expected), value
    assert convert(np.array([0xFF800001, 0x7FC00000], np.uint32).view(np.float32), rounding).tolist() == [0x7FFF] * 2


def test_known_bits_of_conversions():
    assert numbers.f32_to_bf16(f32(1, -2, 3.140625, 0.1)).tolist() == [0x3F80, 0xC000, 0x4049, 0x3DCD]
    assert numbers.f32_to_f16(f32(1, -2, 65504, 65520, 2.0**-24)).tolist() == [0x3C00, 0xC000, 0x7BFF, 0x7C00, 1]
    assert numbers.f32_to_tf32(f32(1 + 2.0**-10, 1 + 2.0**-11)).tolist() == [1 + 2.0**-10, 1.0]


def test_conversions_to_integers():
    x = f32(2.5, 3.5, -2.5, -0.5, 3e9, -3e9, 1e20, INF, -INF, NAN)
    low, high = -(2**31), 2**31 - 1
    tail = [high, low, high, high, low, 0]
    for rounding, start in {
        "rni": [2, 4, -2, 0],
        "rzi": [2, 3, -2, 0],
        "rmi": [2, 3, -3, -1],
        "rpi": [3, 4, -2, 0],
    }.items():
        assert numbers.float_to_integer(x, rounding, np.int32).tolist() == start + tail, rounding
    assert numbers.float_to_integer(x, "rzi", np.uint32).tolist() == [
        2,
        3,
        0,
        0,
        3000000000,
        0,
        2**32 - 1,
        2**32 - 1,
        0,
        0,
    ]
    wide = numbers.float_to_integer(x, "rzi", np.int64).tolist()
    assert wide[4:] == [3000000000, -3000000000, 2**63 - 1, 2**63 - 1, -(2**63), -(2**63)]
    assert numbers.float_to_integer(f32(NAN, 1e20), "rzi", np.uint64).tolist() == [2**63, 2**64 - 1]


@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_arithmetic_of_16_bits_rounds_once(name):
    form = {"bf16": BF16, "f16": F16}[name]
    back = getattr(numbers, f"{name}_to_f32")
    random = np.random.default_rng(7)
    a, b, c = random.integers(0, 1 << 16, (3, 4000)).astype(np.uint16)
    c[::2] = numbers.f32_to_bf16(f32(1))[0] if name == "bf16" else 0x3C00
    a[::4] = b[::4] = c[0] + random.integers(0, 3, 1000).astype(np.uint16)  # products close to half way
    c[::8] = random.integers(1, 4, 500)  # ... decided by a tiny addend
    fma, add, mul = (getattr(numbers, f"{op}_{name}") for op in ("fma", "add", "mul"))
    for function, args, exact in [
        (fma, (a, b, c), lambda x, y, z: x * y + z),
        (add, (a, b), lambda x, y: x + y),
        (mul, (a, b), lambda x, y: x * y),
    ]:
        got = back(function(*args))
        for g, *values in zip(got, *(back(v).tolist() for v in args), strict=True):
            if all(map(math.isfinite, values)):
                value = exact(*map(Fraction, values))
                if value != 0:
                    assert bits_of(float(g)) == bits_of(form.round(value, "rn")), (function.__name__, values)


def test_packed_formats():
    a = np.array([0x3F800000_40000000, 0xBF800000_7F800000], np.uint64)  # low 2, high 1; low inf, high -1
    b = np.uint64(0x40400000_3F800000)  # low 1, high 3
    assert numbers.each32(numbers.add, a, b).tolist() == [0x40800000_40400000, 0x40000000_7F800000]
    assert numbers.each32(numbers.fma, a, b, np.uint64(0)).tolist() == [0x40400000_40000000, 0xC0400000_7F800000]
    x = np.array([0x3F80_4000, 0xBF80_7F80], np.uint32)
    assert numbers.each16(numbers.add_bf16, x, np.uint32(0x4040_3F80)).tolist() == [0x4080_4040, 0x4000_7F80]
    assert numbers.pack16(np.array([0x1234]), np.array([0xABCD])).tolist() == [0xABCD1234]


def test_shapes_and_types_do_not_change():
    for shape in [(), (1,), (32,)]:
        x = np.full(shape, 0.75, np.float32)
        for function in (numbers.add, numbers.sub, numbers.mul, numbers.div, numbers.minimum, numbers.maximum):
            result = function(x, np.float32(0))
            assert (result.dtype, result.shape) == (np.float32, shape), function.__name__
        for rounding in ("rn", "rz", "rm", "rp"):
            result = numbers.fma(x, x, np.float32(2), rounding)
            assert (result.dtype, result.shape) == (np.float32, shape)
        packed = numbers.each32(numbers.mul, np.zeros(shape, np.uint64), np.uint64(0))
        assert (packed.dtype, packed.shape) == (np.uint64, shape)


def test_every_bf16_number_survives_fp32():
    bits = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16)
    for name in ("bf16", "f16"):
        values = getattr(numbers, f"{name}_to_f32")(bits)
        same = getattr(numbers, f"f32_to_{name}")(values) == bits
        assert (same | np.isnan(values)).all()
        assert list(itertools.islice(bits[~same], 1)) == [0x7F81 if name == "bf16" else 0x7C01]
