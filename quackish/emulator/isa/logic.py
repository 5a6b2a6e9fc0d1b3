"""Logic, shifts, comparison and selection."""

import operator

import numpy as np

from quackish.emulator import numbers
from quackish.emulator.isa import action, instruction

# Logic

instruction("and.{pred,b16,b32,b64}", "T = T, T")(operator.and_)
instruction("or.{pred,b16,b32,b64}", "T = T, T")(operator.or_)
instruction("xor.{pred,b16,b32,b64}", "T = T, T")(operator.xor)
instruction("not.{pred,b16,b32,b64}", "T = T")(np.invert)


# "Shift amounts greater than the register width N are clamped to N." (PTX, shl and shr)


@instruction("shl.{b16,b32,b64}", "T = T, u32")
def shl(a, amount):
    bits = 8 * a.dtype.itemsize
    kept = np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount < bits, np.left_shift(a, kept), a.dtype.type(0))


@instruction("shr.{b16,u16,b32,u32,b64,u64}", "T = T, u32")
def shr_unsigned(a, amount):
    bits = 8 * a.dtype.itemsize
    kept = np.minimum(amount, bits - 1).astype(a.dtype)
    return np.where(amount < bits, np.right_shift(a, kept), a.dtype.type(0))


@instruction("shr.{s16,s32,s64}", "T = T, u32")
def shr_signed(a, amount):
    """ "Signed shifts fill with the sign bit": N places leave what N - 1 leave."""
    return np.right_shift(a, np.minimum(amount, 8 * a.dtype.itemsize - 1).astype(a.dtype))


# Two registers as one of 64 bits, shifted. `.wrap` takes the amount modulo 32, `.clamp` at most 32. (PTX, shf)


def _declare_funnel(direction, mode):
    @instruction(f"shf.{direction}.{mode}.b32", "u32 = u32, u32, u32")
    def shift(low, high, amount):
        both = np.asarray(high).astype(np.uint64) << np.uint64(32) | np.asarray(low).astype(np.uint64)
        amount = amount & np.uint32(31) if mode == "wrap" else np.minimum(amount, np.uint32(32))
        distance = np.asarray(amount).astype(np.uint64)
        return (both >> (distance if direction == "r" else np.uint64(32) - distance)).astype(np.uint32)


for _direction in ("l", "r"):
    for _mode in ("wrap", "clamp"):
        _declare_funnel(_direction, _mode)


@action("lop3.b32", "u32 = u32, u32, u32, immediate")
def lop3(lanes, a, b, c, table):
    """Any function of three bits: `table` has the result for each of their values."""
    result = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            result |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return result


# Comparison. Floating-point comparisons are ordered: false if an operand is NaN. Those that end in "u" are unordered.

_COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip
_UNSIGNED = {"lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
_OPPOSITE = {"eq": "ne", "lt": "ge", "le": "gt", "gt": "le", "ge": "lt"}


def _ordered(name):
    """A comparison that is false if an operand is NaN."""
    compare = _COMPARISONS[name]
    if name == "ne":  # numpy's != is true for NaN
        return lambda a, b: (a < b) | (a > b)
    return compare


def _unordered(name):
    """A comparison that is true if an operand is NaN."""
    if name == "ne":
        return operator.ne
    opposite = _ordered(_OPPOSITE[name])
    return lambda a, b: ~opposite(a, b)


def _is_number(a, b):
    return (a == a) & (b == b)


def _is_nan(a, b):
    return ~_is_number(a, b)


_FLOAT_COMPARISONS = {
    **{name: _ordered(name) for name in _COMPARISONS},
    **{f"{name}u": _unordered(name) for name in _COMPARISONS},
    "num": _is_number,
    "nan": _is_nan,
}

_COMBINATIONS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _declare_comparison(name, type_, compare, declared=None):
    """Declares setp with one result, with its opposite as another, and combined with a predicate."""
    declared = declared or type_

    def both(a, b):
        result = compare(a, b)
        return result, ~result

    instruction(f"setp.{name}.{type_}", f"pred = {declared}, {declared}")(compare)
    if type_ not in ("bf16", "f16"):  # those have one result
        instruction(f"setp.{name}.{type_}", f"pred|pred = {declared}, {declared}")(both)
    for combination, combine in _COMBINATIONS.items():

        def combined(a, b, c, combine=combine):
            return combine(compare(a, b), c)

        instruction(f"setp.{name}.{combination}.{type_}", f"pred = {declared}, {declared}, pred")(combined)


for _name, _compare in _COMPARISONS.items():
    for _type in ("u16", "s16", "u32", "s32", "u64", "s64"):
        _declare_comparison(_name, _type, _compare)
    if _name in ("eq", "ne"):
        for _type in ("b16", "b32", "b64"):
            _declare_comparison(_name, _type, _compare)
for _name, _compare in _UNSIGNED.items():
    for _type in ("u16", "u32", "u64"):
        _declare_comparison(_name, _type, _compare)
for _name, _compare in _FLOAT_COMPARISONS.items():
    _declare_comparison(_name, "f32", _compare)
    _declare_comparison(_name, "f64", _compare)

    for _type, _widen in (("bf16", numbers.bf16_to_f32), ("f16", numbers.f16_to_f32)):

        def _compare_16_bits(a, b, compare=_compare, widen=_widen):
            return compare(widen(a), widen(b))

        _declare_comparison(_name, _type, _compare_16_bits)

# Selection


@instruction("selp.{b16,u16,s16,b32,u32,s32,f32,b64,u64,s64,f64}", "T = T, T, pred")
def selp(a, b, condition):
    return np.where(condition, a, b)


@instruction("prmt.b32", "u32 = u32, u32, u32")
def prmt(a, b, selectors):
    """Each nibble of `selectors` picks a byte of b:a; its bit 3 replicates the sign of that byte."""
    both = np.asarray(a).astype(np.uint64) | np.asarray(b).astype(np.uint64) << np.uint64(32)
    result = np.zeros(np.broadcast_shapes(np.shape(both), np.shape(selectors)), np.uint32)
    for i in range(4):
        selector = np.asarray(selectors) >> np.uint32(4 * i) & np.uint32(15)
        byte = (both >> ((selector & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(selector & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return result
