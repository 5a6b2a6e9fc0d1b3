"""cvt: conversion between integers, fp32, bf16 and fp16."""

import functools

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.isa import instruction

_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _integer(to, a):
    """Drops the upper bits, or extends by the sign of the source's type, as numpy's conversion does."""
    return np.asarray(a).astype(np.dtype(f"{to[0].replace('s', 'i')}{int(to[1:]) // 8}"))


for _to in _INTEGERS:
    for _from in _INTEGERS:
        if _to != _from:
            instruction(f"cvt.{_to}.{_from}", f"~{_to} = ~{_from}")(functools.partial(_integer, _to))

for _from in ("u16", "s16", "u32", "s32", "u64", "s64"):

    @instruction(f"cvt.rn.f32.{_from}", f"f32 = {_from}")
    def integer_to_f32(a):
        return np.asarray(a).astype(np.float32)


for _to in ("u16", "s16", "u32", "s32", "u64", "s64"):
    for _rounding in ("rni", "rzi", "rmi", "rpi"):
        _dtype = np.dtype(f"{_to[0].replace('s', 'i')}{int(_to[1:]) // 8}").type
        _convert = functools.partial(numbers.float_to_integer, rounding=_rounding, dtype=_dtype)
        instruction(f"cvt.{_rounding}.{_to}.f32", f"{_to} = f32")(_convert)
        instruction(f"cvt.{_rounding}.{_to}.f64", f"{_to} = f64")(functools.partial(_convert, is_f64=True))
for _rounding in ("rni", "rzi", "rmi", "rpi"):
    instruction(f"cvt.{_rounding}.{{f32.f32,f64.f64}}", "T = T")(
        functools.partial(numbers.to_integral, rounding=_rounding)
    )

instruction("cvt.f64.f32", "f64 = f32")(lambda a: np.asarray(a).astype(np.float64))
instruction("cvt.f64.f16", "f64 = u16")(lambda a: numbers.f16_to_f32(a).astype(np.float64))
instruction("cvt.f64.bf16", "f64 = u16")(lambda a: numbers.bf16_to_f32(a).astype(np.float64))
instruction("cvt.rn.f32.f64", "f32 = f64")(lambda a: numbers.canonical(np.asarray(a).astype(np.float32)))
instruction("cvt.rn.f64.{u32,s32,u64,s64}", "f64 = T")(lambda a: np.asarray(a).astype(np.float64))


@instruction("cvt.sat.f32.f32", "f32 = f32")
def saturated(a):
    """ ".sat limits the result to [0.0, 1.0]. NaN results are flushed to +0.0f." (PTX, cvt: .sat)"""
    a = np.asarray(a)
    return np.where(a > 0, np.minimum(a, np.float32(1)), np.float32(0))


instruction("cvt.f32.bf16", "f32 = u16")(numbers.bf16_to_f32)
instruction("cvt.f32.f16", "f32 = u16")(numbers.f16_to_f32)
instruction("cvt.rn.bf16.f32", "u16 = f32")(numbers.f32_to_bf16)
instruction("cvt.rn.f16.f32", "u16 = f32")(numbers.f32_to_f16)


@instruction("cvt.rn.bf16x2.f32", "u32 = f32, f32")
def f32_to_bf16x2(high, low):
    """ "the value converted from input a is stored in the upper half of d" (PTX, cvt)"""
    return numbers.pack16(numbers.f32_to_bf16(low), numbers.f32_to_bf16(high))


@instruction("cvt.rn.f16x2.f32", "u32 = f32, f32")
def f32_to_f16x2(high, low):
    return numbers.pack16(numbers.f32_to_f16(low), numbers.f32_to_f16(high))


# fp8, in pairs: "the value converted from input a is stored in the upper half of d" (PTX, cvt)

for _type, _to_f32, _from_f32 in (
    ("e4m3x2", numbers.e4m3_to_f32, numbers.f32_to_e4m3),
    ("e5m2x2", numbers.e5m2_to_f32, numbers.f32_to_e5m2),
):

    @instruction(f"cvt.rn.satfinite.{_type}.f32", "u16 = f32, f32")
    def f32_to_fp8x2(high, low, convert=_from_f32):
        return convert(low).astype(np.uint16) | convert(high).astype(np.uint16) << np.uint16(8)

    @instruction(f"cvt.rn.satfinite.{_type}.f16x2", "u16 = u32")
    def f16x2_to_fp8x2(a, convert=f32_to_fp8x2):
        low, high = (numbers.f16_to_f32((np.asarray(a) >> np.uint32(bit)).astype(np.uint16)) for bit in (0, 16))
        return convert(high, low)

    @instruction(f"cvt.rn.f16x2.{_type}", "u32 = u16")
    def fp8x2_to_f16x2(a, convert=_to_f32):
        """Exact: fp16 has all numbers of both types."""
        a = np.asarray(a)
        low, high = (convert((a >> np.uint16(bit)).astype(np.uint8)) for bit in (0, 8))
        return numbers.pack16(numbers.f32_to_f16(low), numbers.f32_to_f16(high))
