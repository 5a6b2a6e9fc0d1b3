"""Integer and floating-point arithmetic. (PTX: Integer Arithmetic, Floating Point, Mixed Precision)"""

import functools

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.isa import action, instruction

# Integers. Results wrap around, as numpy's do.


@instruction("add.{u16,s16,u32,s32,u64,s64}", "T = T, T")
def add_integer(a, b):
    return a + b


@instruction("sub.{u16,s16,u32,s32,u64,s64}", "T = T, T")
def sub_integer(a, b):
    return a - b


@instruction("mul.lo.{u16,s16,u32,s32,u64,s64}", "T = T, T")
def mul_low(a, b):
    return a * b


@instruction("mul.wide.u16", "u32 = u16, u16")
@instruction("mul.wide.u32", "u64 = u32, u32")
@instruction("mul.wide.s16", "s32 = s16, s16")
@instruction("mul.wide.s32", "s64 = s32, s32")
def mul_wide(a, b):
    wide = {2: "4", 4: "8"}[a.dtype.itemsize]
    return np.multiply(a, b, dtype=a.dtype.kind + wide)


@instruction("mul.hi.{u16,s16,u32,s32}", "T = T, T")
def mul_high(a, b):
    return mul_wide(a, b) >> (8 * a.dtype.itemsize)


@instruction("mul.hi.{u64,s64}", "T = T, T")
def mul_high_64(a, b):
    """The sum of the products of 32-bit halves; the upper half of a signed number has the sign."""
    half, low = a.dtype.type(32), a.dtype.type(0xFFFFFFFF)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    lowest = (a_low.astype(np.uint64) * b_low.astype(np.uint64) >> np.uint64(32)).astype(a.dtype)
    middle = a_high * b_low + lowest
    other = a_low * b_high + (middle & low)
    return a_high * b_high + (middle >> half) + (other >> half)


@instruction("mad.lo.{u16,s16,u32,s32,u64,s64}", "T = T, T, T")
def mad_low(a, b, c):
    return a * b + c


@instruction("mad.wide.u32", "u64 = u32, u32, u64")
@instruction("mad.wide.s32", "s64 = s32, s32, s64")
def mad_wide(a, b, c):
    return mul_wide(a, b) + c


@instruction("div.{u16,u32,u64}", "T = T, T")
def div_unsigned(a, b):
    # "Division by zero yields an unspecified, machine-specific value."
    return np.where(b == 0, a.dtype.type(-1 % 2 ** (8 * a.dtype.itemsize)), a // np.where(b == 0, b.dtype.type(1), b))


@instruction("rem.{u16,u32,u64}", "T = T, T")
def rem_unsigned(a, b):
    return np.where(b == 0, a, a % np.where(b == 0, b.dtype.type(1), b))


@instruction("div.{s16,s32,s64}", "T = T, T")
def div_signed(a, b):
    """Rounds toward zero, where numpy rounds down."""
    divisor = np.where(b == 0, b.dtype.type(1), b)
    quotient = a // divisor
    quotient = quotient + ((quotient < 0) & (quotient * divisor != a))
    return np.where(b == 0, b.dtype.type(-1), quotient)


@instruction("rem.{s16,s32,s64}", "T = T, T")
def rem_signed(a, b):
    return np.where(b == 0, a, a - div_signed(a, b) * b)


@instruction("min.{u16,s16,u32,s32,u64,s64}", "T = T, T")
def min_integer(a, b):
    return np.minimum(a, b)


@instruction("max.{u16,s16,u32,s32,u64,s64}", "T = T, T")
def max_integer(a, b):
    return np.maximum(a, b)


@instruction("min.relu.s32", "s32 = s32, s32")
def min_relu(a, b):
    """ ".relu ... clamps the result to 0 if negative." """
    return np.maximum(np.minimum(a, b), np.int32(0))


@instruction("max.relu.s32", "s32 = s32, s32")
def max_relu(a, b):
    return np.maximum(np.maximum(a, b), np.int32(0))


@instruction("neg.{s16,s32,s64}", "T = T")
def neg_integer(a):
    return -a


@instruction("abs.{s16,s32,s64}", "T = T")
def abs_integer(a):
    return np.abs(a)


@instruction("popc.b32", "u32 = u32")
@instruction("popc.b64", "u32 = u64")
def popc(a):
    return np.bitwise_count(a)


# Sums with a carry, for which each thread has a register: CC.CF.


def _declare_carry(operation, part, count, total_of):
    """Declares an instruction that sets the carry, one that adds it, and one that does both."""
    for opcode, adds, sets in (
        (f"{operation}{part}.cc", False, True),
        (f"{operation}c{part}", True, False),
        (f"{operation}c{part}.cc", True, True),
    ):

        @action(f"{opcode}.u32", f"u32 = {', '.join(['u32'] * count)}")
        def with_carry(lanes, *values, adds=adds, sets=sets):
            total = total_of(*(value.astype(np.uint64) for value in values))
            if adds:
                total += lanes.cta.carry[lanes.threads]
            if sets:
                lanes.cta.carry[lanes.threads] = total >> np.uint64(32) != 0
            return total.astype(np.uint32)


_declare_carry("add", "", 2, lambda a, b: a + b)
_declare_carry("mad", ".lo", 3, lambda a, b, c: (a * b & np.uint64(0xFFFFFFFF)) + c)
_declare_carry("mad", ".hi", 3, lambda a, b, c: (a * b >> np.uint64(32)) + c)


# fp32

instruction("add{,.rn}.f32", "f32 = f32, f32")(numbers.add)
instruction("sub{,.rn}.f32", "f32 = f32, f32")(numbers.sub)
instruction("mul{,.rn}.f32", "f32 = f32, f32")(numbers.mul)
instruction("fma.rn.f32", "f32 = f32, f32, f32")(numbers.fma)
instruction("div.rn.f32", "f32 = f32, f32")(numbers.div)
instruction("sqrt.rn.f32", "f32 = f32")(numbers.sqrt)
for _name, _extreme in (("min", numbers.minimum), ("max", numbers.maximum)):
    for _suffix, _function in (("f32", _extreme), ("NaN.f32", functools.partial(_extreme, nan=True))):
        instruction(f"{_name}.{_suffix}", "f32 = f32, f32")(_function)
        # of three numbers: sm_100 and later
        instruction(f"{_name}.{_suffix}", "f32 = f32, f32, f32")(
            lambda a, b, c, function=_function: function(function(a, b), c)
        )
instruction("rcp.approx.f32", "f32 = f32")(numbers.approximate_rcp)
instruction("rsqrt.approx.f32", "f32 = f32")(numbers.approximate_rsqrt)
instruction("sqrt.approx.f32", "f32 = f32")(numbers.approximate_sqrt)
instruction("ex2.approx.f32", "f32 = f32")(numbers.approximate_ex2)
instruction("lg2.approx.f32", "f32 = f32")(numbers.approximate_lg2)
instruction("tanh.approx.f32", "f32 = f32")(numbers.approximate_tanh)
instruction("sin.approx.f32", "f32 = f32")(numbers.approximate_sin)
instruction("cos.approx.f32", "f32 = f32")(numbers.approximate_cos)

for _mode in ("rz", "rm", "rp"):
    instruction(f"add.{_mode}.f32", "f32 = f32, f32")(functools.partial(numbers.add, rounding=_mode))
    instruction(f"sub.{_mode}.f32", "f32 = f32, f32")(functools.partial(numbers.sub, rounding=_mode))
    instruction(f"mul.{_mode}.f32", "f32 = f32, f32")(functools.partial(numbers.mul, rounding=_mode))
    instruction(f"fma.{_mode}.f32", "f32 = f32, f32, f32")(functools.partial(numbers.fma, rounding=_mode))


@instruction("rcp.rn.f32", "f32 = f32")
def rcp(a):
    return numbers.div(np.float32(1), a)


@instruction("neg.f32", "f32 = f32")
def neg(a):
    return -a


@instruction("abs.f32", "f32 = f32")
def absolute(a):
    return np.abs(a)


@instruction("copysign.f32", "f32 = f32, f32")
def copysign(a, b):
    """ "Copy sign bit of a into value of b" """
    return np.copysign(b, a)


def _flushing(function):
    """.ftz: subnormal inputs and results become zeros of their sign."""

    def flushed(*values):
        return numbers.flush(function(*map(numbers.flush, values)))

    return flushed


instruction("add{,.rn}.ftz.f32", "f32 = f32, f32")(_flushing(numbers.add))
instruction("sub{,.rn}.ftz.f32", "f32 = f32, f32")(_flushing(numbers.sub))
instruction("fma.rn.ftz.f32", "f32 = f32, f32, f32")(_flushing(numbers.fma))
instruction("rcp.approx.ftz.f32", "f32 = f32")(_flushing(numbers.approximate_rcp))
instruction("rsqrt.approx.ftz.f32", "f32 = f32")(_flushing(numbers.approximate_rsqrt))
instruction("sqrt.approx.ftz.f32", "f32 = f32")(_flushing(numbers.approximate_sqrt))
instruction("ex2.approx.ftz.f32", "f32 = f32")(_flushing(numbers.approximate_ex2))
instruction("lg2.approx.ftz.f32", "f32 = f32")(_flushing(numbers.approximate_lg2))


@instruction("mul{,.rn}.ftz.f32", "f32 = f32, f32")
def mul_flushing(a, b):
    """An H200 also flushes a product that rounding would make normal."""
    a, b = numbers.flush(a), numbers.flush(b)
    result = numbers.mul(a, b)
    is_subnormal = np.abs(np.multiply(a, b, dtype=np.float64)) < 2.0**-126  # exact in fp64
    return np.where(is_subnormal, np.copysign(np.float32(0), result), result)


# fp64

instruction("add{,.rn}.f64", "f64 = f64, f64")(np.add)
instruction("sub{,.rn}.f64", "f64 = f64, f64")(np.subtract)
instruction("mul{,.rn}.f64", "f64 = f64, f64")(np.multiply)
instruction("div.rn.f64", "f64 = f64, f64")(np.divide)
instruction("fma.rn.f64", "f64 = f64, f64, f64")(numbers.fma_f64)
instruction("sqrt.rn.f64", "f64 = f64")(np.sqrt)
instruction("rcp.rn.f64", "f64 = f64")(np.reciprocal)
instruction("rcp.approx.ftz.f64", "f64 = f64")(numbers.coarse_rcp_f64)
instruction("rsqrt.approx.ftz.f64", "f64 = f64")(numbers.coarse_rsqrt_f64)
instruction("rsqrt.approx.f64", "f64 = f64")(lambda a: 1 / np.sqrt(a))
instruction("neg.f64", "f64 = f64")(np.negative)
instruction("abs.f64", "f64 = f64")(np.abs)
instruction("min.f64", "f64 = f64, f64")(numbers.minimum_f64)
instruction("max.f64", "f64 = f64, f64")(numbers.maximum_f64)
instruction("copysign.f64", "f64 = f64, f64")(lambda a, b: np.copysign(b, a))


# Pairs of fp32 numbers (sm_100)


def _pairwise(function):
    """A function of fp32 numbers, for pairs of them in 64-bit registers."""
    return functools.partial(numbers.each32, function)


for _mode in ("rn", "rz", "rm", "rp"):
    _rounding = "{,.rn}" if _mode == "rn" else f".{_mode}"
    for _name, _function in (("add", numbers.add), ("sub", numbers.sub), ("mul", numbers.mul)):
        instruction(f"{_name}{_rounding}.f32x2", "u64 = u64, u64")(
            _pairwise(functools.partial(_function, rounding=_mode))
        )
    instruction(f"fma.{_mode}.f32x2", "u64 = u64, u64, u64")(_pairwise(functools.partial(numbers.fma, rounding=_mode)))

# Mixed precision (sm_100): 16-bit operands are converted to fp32 first.


def _declare_mixed(type_, convert):
    @instruction(f"add{{,.rn}}.f32.{type_}", "f32 = u16, f32")
    def add(a, c):
        return numbers.add(convert(a), c)

    @instruction(f"sub{{,.rn}}.f32.{type_}", "f32 = u16, f32")
    def sub(a, c):
        return numbers.sub(convert(a), c)

    @instruction(f"fma.rn.f32.{type_}", "f32 = u16, u16, f32")
    def fma(a, b, c):
        return numbers.fma(convert(a), convert(b), c)


_declare_mixed("bf16", numbers.bf16_to_f32)
_declare_mixed("f16", numbers.f16_to_f32)

# bf16 and fp16, and pairs of them


def _declare_16_bits(type_, add, mul, fma, minimum, maximum):
    """Declares the instructions of bf16 or f16, and of pairs of them in 32-bit registers."""

    def sub(a, b):
        return add(a, b ^ np.uint16(0x8000))

    functions = {
        "add{,.rn}": (2, add),
        "sub{,.rn}": (2, sub),
        "mul{,.rn}": (2, mul),
        "fma.rn": (3, fma),
        "min": (2, minimum),
        "max": (2, maximum),
        "min.NaN": (2, functools.partial(minimum, nan=True)),
        "max.NaN": (2, functools.partial(maximum, nan=True)),
    }
    for name, (count, function) in functions.items():
        instruction(f"{name}.{type_}", f"u16 = {', '.join(['u16'] * count)}")(function)
        pairwise = functools.partial(numbers.each16, function)
        instruction(f"{name}.{type_}x2", f"u32 = {', '.join(['u32'] * count)}")(pairwise)


_declare_16_bits(
    "bf16", numbers.add_bf16, numbers.mul_bf16, numbers.fma_bf16, numbers.minimum_bf16, numbers.maximum_bf16
)
_declare_16_bits("f16", numbers.add_f16, numbers.mul_f16, numbers.fma_f16, numbers.minimum_f16, numbers.maximum_f16)
