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


for _to in ("u32", "s32", "u64", "s64"):
    for _rounding in ("rni", "rzi", "rmi", "rpi"):
        instruction(f"cvt.{_rounding}.{_to}.f32", f"{_to} = f32")(
            functools.partial(
                numbers.f32_to_integer,
                rounding=_rounding,
                dtype=np.dtype(f"{_to[0].replace('s', 'i')}{int(_to[1:]) // 8}").type,
            )
        )

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
