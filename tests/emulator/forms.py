"""A tiny kernel for each form of instruction that the emulator knows, and what the PTX manual says it computes.

`cases()` are run by tests in the emulator and by scripts/record_ptx_forms.py on a GPU. A kernel loads its operands from
64-bit words, one per thread, executes the instruction, and stores its results in such words.
"""

import dataclasses
import functools
import hashlib
import itertools
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from quackish.emulator import isa
from tests.emulator import exact_arithmetic as exact
from tests.emulator.exact_arithmetic import BF16, F16, INF, NAN, bits_of, float_of

PTX_VERSION = "8.8"
PARAMETER_DATA = bytes(range(0x79, 0xF9))  # of a kernel that has no tensor map there
SCRATCH = 16  # bytes of global and of shared memory for each thread
REGISTERS = {1: "pred", 16: "b16", 32: "b32", 64: "b64"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A kernel of one CTA, or of a cluster of `ctas` that share the threads.

    `body` may use %in0.. and %out0.., %t (the thread), %g and %s (this thread's scratch in global and shared memory),
    %scratch and %base (all of it), and ENTRY_data, a parameter of 128 bytes.
    """

    name: str
    opcode: str
    body: str
    inputs: list[tuple[int, list[int]]]  # (bits of the register, a value for each thread)
    outputs: list[tuple[int, list[int | None]]]  # expected; None where the manual leaves a value open
    threads: int = 32
    target: str = "sm_90a"
    bound: Callable[[int, int, int], bool] | None = None  # (input, expected, a GPU's) -> within the manual's bound
    scratch: list[int] | None = None  # two 64-bit words for each thread, and more behind them
    shared_bytes: int = 4096
    tensor_map: bytes | None = None  # for ENTRY_data; its address is an offset of global scratch
    ctas: int = 1
    declarations: str = ""  # in front of the entry

    @property
    def words(self) -> np.ndarray:
        """The kernel's memory: operands, then scratch. Registers get the low bits of a word."""
        garbage = 0xA5A5A5A5A5A5A5A5
        rows = []
        for bits, values in self.inputs:
            if bits == 1:
                rows.append(values)
            else:
                rows.append([value % (1 << bits) | (garbage >> bits << bits) % (1 << 64) for value in values])
        scratch = self.scratch or [0] * (2 * self.threads)
        return np.array([*itertools.chain(*rows), *scratch], np.uint64)

    def data(self, address: int) -> bytes:
        """The parameter ENTRY_data, with the words at `address`."""
        if self.tensor_map is None:
            return PARAMETER_DATA
        offset = int.from_bytes(self.tensor_map[:8], "little")
        tensor = address + 8 * self.threads * len(self.inputs) + offset
        return tensor.to_bytes(8, "little") + self.tensor_map[8:]

    @property
    def results_size(self) -> int:
        """Words of results."""
        return self.threads * max(1, len(self.outputs))

    @property
    def digest(self) -> str:
        """A digest of everything that a recorded result depends on."""
        content = repr((self.ptx("K"), self.words.tobytes(), self.data(0), self.outputs, self.target))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def differences(self, results: np.ndarray, approximately: bool = False) -> list[str]:
        """What differs from the expected values, as sentences. `approximately` allows what the manual does."""
        found = []
        for i, ((_, expected), got) in enumerate(zip(self.outputs, results.reshape(-1, self.threads), strict=True)):
            for thread, (a, b) in enumerate(zip(expected, got.tolist(), strict=True)):
                if a is None or a == b:
                    continue
                if approximately and self.bound and self.bound(self.inputs[0][1][thread], a, b):
                    continue
                given = ", ".join(f"{column[thread]:#x}" for _, column in self.inputs)
                found.append(f"{self.name}: result {i} of thread {thread} for ({given}) is {b:#x}, expected {a:#x}")
        return found

    def ptx(self, entry: str) -> str:
        """An entry with the parameters words and results, which are addresses, and data."""
        parameters = [".param .u64 ENTRY_words", ".param .u64 ENTRY_results", ".param .align 64 .b8 ENTRY_data[128]"]
        lines = [f".visible .entry ENTRY({', '.join(parameters)})"]
        cluster = [f".reqnctapercluster {self.ctas}, 1, 1"] if self.ctas > 1 else []
        lines += [f".maxntid {self.threads // self.ctas}, 1, 1", *cluster, "{"]
        lines += [f".shared .align 1024 .b8 ENTRY_shared[{self.shared_bytes}];"]
        lines += [".reg .b64 %words, %results, %offset, %scratch, %g;", ".reg .b32 %t, %s, %base, %flag;"]
        for kind, registers in (("in", self.inputs), ("out", self.outputs)):
            lines += [f".reg .{REGISTERS[bits]} %{kind}{i};" for i, (bits, _) in enumerate(registers)]
        lines += ["mov.u32 %t, %tid.x;"]
        if self.ctas > 1:
            lines += ["mov.u32 %s, %cluster_ctarank;", f"mad.lo.u32 %t, %s, {self.threads // self.ctas}, %t;"]
        lines += ["mul.wide.u32 %offset, %t, 8;"]
        lines += ["ld.param.b64 %words, [ENTRY_words];", "ld.param.b64 %results, [ENTRY_results];"]
        lines += ["add.u64 %g, %words, %offset;", "add.u64 %results, %results, %offset;"]
        for i, (bits, _) in enumerate(self.inputs):
            place = f"[%g+{8 * self.threads * i}]"
            if bits == 1:
                lines += [f"ld.global.b32 %flag, {place};", f"setp.ne.b32 %in{i}, %flag, 0;"]
            else:
                lines.append(f"ld.global.b{bits} %in{i}, {place};")
        # scratch: 16 bytes for each thread
        lines += [f"add.u64 %scratch, %words, {8 * self.threads * len(self.inputs)};"]
        lines += ["mad.wide.u32 %g, %t, 16, %scratch;"]
        lines += ["mov.u32 %base, ENTRY_shared;", f"mad.lo.u32 %s, %t, {SCRATCH}, %base;"]
        lines += ["{", self.body, "}"]
        for i, (bits, _) in enumerate(self.outputs):
            place = f"[%results+{8 * self.threads * i}]"
            if bits == 1:
                lines += [f"selp.b32 %flag, 1, 0, %out{i};", f"st.global.b32 {place}, %flag;"]
            else:
                lines.append(f"st.global.b{bits} {place}, %out{i};")
        return (self.declarations + "\n".join([*lines, "ret;", "}", ""])).replace("ENTRY", entry)


def module(cases_by_entry: dict[str, Case]) -> str:
    (target,) = {case.target for case in cases_by_entry.values()}
    head = f".version {PTX_VERSION}\n.target {target}\n.address_size 64\n\n"
    return head + "\n".join(case.ptx(entry) for entry, case in cases_by_entry.items())


# Values


def random_of(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


INTEGERS = [0, 1, 2, 3, 5, 7, 8, 15, 16, 31, 32, 33, 63, 64, 65, 127, 128, 255, 256, 0x7FFF, 0x8000, 0xFFFF, 0x10000]
INTEGERS += [0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0xDEADBEEF, 0x01234567, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
INTEGERS += [0xFEDCBA9876543210, -2, -3, -100]

# ties, the ends of the range, subnormal numbers, and special values
FLOATS = [0.0, -0.0, 1.0, -1.0, 1.5, 3.0, -2.5, 0.1, INF, -INF, NAN, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-127]
FLOATS += [float_of(0x7F7FFFFF), float_of(0xFF7FFFFF), 1 + 2.0**-23, 1 + 2.0**-22, 2.0**-24, -(2.0**-24), 2.0**-25]
FLOATS += [
    1 + 2.0**-12,
    2.0**24 + 2,
    88.7,
    127.99,
    -126.5,
    -149.5,
    0.7,
    0.49999997,
    65504.0,
    65520.0,
    2.0**31,
    -(2.0**31),
]
FLOATS += [
    1 + 2.0**-8,
    1 + 3 * 2.0**-8,
    1 + 2.0**-11,
    1 + 3 * 2.0**-11,
    3.4e38,
    2.0**-24 * 1.5,
    2.0**-133,
    2.0**63,
    6.0,
]


def float_bits(value: float) -> int:
    return 0xFFC12345 if math.isnan(value) else bits_of(exact.nearest(value))


def sixteen_bits(form: exact.Format, value: float) -> int:
    """Bits of bf16 or fp16."""
    if math.isnan(value):
        return 0x7FFF
    value = value if value == 0 or math.isinf(value) else form.round(exact.Fraction(value))
    if form is BF16:
        return bits_of(value) >> 16
    return int(np.float16(value).view(np.uint16))


def sixteen_value(form: exact.Format, bits: int) -> float:
    return float_of(bits << 16) if form is BF16 else float(np.uint16(bits).view(np.float16))


def pool(kind: str) -> list[int]:
    if kind == "pred":
        return [0, 1]
    if kind == "f32":
        return [float_bits(value) for value in FLOATS]
    if kind in ("bf16", "f16"):
        form = {"bf16": BF16, "f16": F16}[kind]
        return [sixteen_bits(form, value) for value in FLOATS] + [0xFFC1 if form is BF16 else 0xFE01]
    if kind.endswith("x2"):
        values, bits = pool(kind.removesuffix("x2")), 32 if kind == "f32x2" else 16
        return [low | high << bits for low, high in zip(values, values[7:] + values[:7], strict=True)]
    return [value % (1 << int(kind[1:])) for value in INTEGERS]


# Operands that matter together: zeros of both signs, NaN on either side, ties, overflow, and sums that cancel.
TOGETHER = {
    2: [
        (0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (1.0, -1.0), (NAN, 1.0), (1.0, NAN), (NAN, NAN), (INF, -INF),
        (0.0, INF),
        (1.0, 2.0**-24), (1 + 2.0**-23, 2.0**-24), (-1.0, 2.0**-25), (float_of(0x7F7FFFFF), 2.0**103),
        (2.0**-149, 0.5),
        (2.0**-126, 1 - 2.0**-24), (2.0**-126, -(2.0**-149)), (float_of(0x7F7FFFFF), 2.0), (0.0, 0.0), (1.0, 3.0),
    ],
    3: [
        (1 + 2.0**-12, 1 + 2.0**-12, 2.0**-80), (1 + 2.0**-12, 1 + 2.0**-12, -(2.0**-80)), (0.0, INF, 1.0),
        (1 + 2.0**-12, 1 + 2.0**-12, 0.0), (1.0, 1.0, -1.0), (-1.0, 0.0, -0.0), (-1.0, 0.0, 0.0), (INF, 1.0, -INF),
        (2.0**-126, 2.0**-23, 2.0**-149), (2.0**-149, 0.5 + 2.0**-20, 0.0), (float_of(0x7F7FFFFF), 2.0, -INF),
        (float_of(0x7F7FFFFF), 2.0, -float_of(0x7F7FFFFF)), (1 + 2.0**-23, 1 - 2.0**-23, -1.0), (1.0, 1.0, NAN),
        (1 + 2.0**-8, 1 + 2.0**-8, 2.0**-60), (1 + 2.0**-7, 1 + 2.0**-7, -1.0),
    ],
}  # fmt: skip


def encoded(kind: str, value: float) -> int:
    if kind.endswith("x2"):
        half = encoded(kind.removesuffix("x2"), value)
        return half | half << (32 if kind == "f32x2" else 16)
    return float_bits(value) if kind == "f32" else sixteen_bits({"bf16": BF16, "f16": F16}[kind], value)


def chosen(name: str, kinds: list[str], threads: int) -> list[list[int]]:
    """Operands for each thread: those that matter together, and random ones of the pools."""
    pools, random = [pool(kind) for kind in kinds], random_of(name)
    if len(pools) == 1:
        return [[pools[0][i % len(pools[0])] for i in range(threads)]]
    columns = [[values[i] for i in random.integers(0, len(values), threads)] for values in pools]
    if set(kinds) <= {"f32", "bf16", "f16", "f32x2"}:
        for thread, values in enumerate(TOGETHER[len(kinds)]):
            for column, kind, value in zip(columns, kinds, values, strict=True):
                column[thread] = encoded(kind, value)
    return columns


def signed(value: int, bits: int) -> int:
    value %= 1 << bits
    return value - (1 << bits) if value >> (bits - 1) else value


# What the manual says: functions of the operands' bits


Meaning = Callable[..., Any]


def _typed(type_: str) -> tuple[int, Callable[[int], int]]:
    """(bits, the number that bits stand for) of an integer type."""
    bits = int(type_[1:])
    return bits, (lambda value: signed(value, bits)) if type_[0] == "s" else (lambda value: value % (1 << bits))


def _truncated(quotient: exact.Fraction) -> int:
    return math.trunc(quotient)


def _divide(a: int, b: int) -> int | None:
    return None if b == 0 else _truncated(exact.Fraction(a, b))


def _remainder(a: int, b: int) -> int | None:
    return None if b == 0 else a - b * _truncated(exact.Fraction(a, b))


INTEGER_OPERATIONS = {
    "add": operator.add, "sub": operator.sub, "mul.lo": operator.mul, "mul.wide": operator.mul, "min": min, "max": max,
    "mad.lo": lambda a, b, c: a * b + c, "mad.wide": lambda a, b, c: a * b + c, "div": _divide, "rem": _remainder,
    "min.relu": lambda a, b: max(min(a, b), 0), "max.relu": lambda a, b: max(a, b, 0), "neg": operator.neg, "abs": abs,
    "popc": lambda a: a.bit_count(), "and": operator.and_, "or": operator.or_, "xor": operator.xor,
    "not": operator.invert, "mov": lambda a: a, "cvta": lambda a: a,
}  # fmt: skip


def _integer_meaning(operation: str, type_: str) -> Meaning | None:
    bits, value = _typed(type_.replace("b", "u"))
    if operation == "mul.hi":
        return lambda a, b: value(a) * value(b) >> bits
    if operation == "mad.wide":
        return lambda a, b, c: value(a) * value(b) + c
    if operation == "shl":
        return lambda a, n: a << n if n < bits else 0
    if operation == "shr":
        return lambda a, n: value(a) >> min(n, bits)
    if operation == "selp":
        return lambda a, b, c: a if c else b
    if operation in INTEGER_OPERATIONS:
        function = INTEGER_OPERATIONS[operation]
        return lambda *operands: function(*map(value, operands))
    return None


COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip


def _compare(name: str, a: float, b: float) -> bool:
    """ "If either operand is NaN, the result is False", and for unordered ones True."""
    nan = isinstance(a, float) and (math.isnan(a) or math.isnan(b))
    if name in ("num", "nan"):
        return nan == (name == "nan")
    if name.removesuffix("u") in COMPARISONS and name.endswith("u"):
        return nan or COMPARISONS[name.removesuffix("u")](a, b)
    return not nan and COMPARISONS[name](a, b)


def _number(type_: str) -> Callable[[int], Any]:
    if type_ == "f32":
        return float_of
    if type_ in ("bf16", "f16"):
        return lambda bits: sixteen_value({"bf16": BF16, "f16": F16}[type_], bits)
    return _typed(type_.replace("b", "u"))[1]


def _setp_meaning(parts: list[str], results: int) -> Meaning:
    name, type_ = parts[1], parts[-1]
    value = _number(type_)
    combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.get(parts[2])

    def meaning(a, b, c=None):
        result = _compare(name, value(a), value(b))
        result = result if combine is None else combine(result, bool(c))
        return [int(result), int(not result)][:results]

    return meaning


def _minimum(a: float, b: float, choose: Callable, nan: bool) -> float:
    if math.isnan(a) or math.isnan(b):
        return NAN if nan or (math.isnan(a) and math.isnan(b)) else (b if math.isnan(a) else a)
    return choose((a, math.copysign(1, a)), (b, math.copysign(1, b)))[0]  # "+0.0 > -0.0"


def _sub(a: float, b: float, rounding: str = "rn", form: exact.Format = exact.F32) -> float:
    return exact.add(a, -b, rounding, form)


FLOAT_OPERATIONS = {"add": exact.add, "sub": _sub, "mul": exact.mul, "fma": exact.fma}


def _exp2(x: float) -> float:
    return x if x == INF or math.isnan(x) else 0.0 if x < -1000 else 2.0**x if x < 1000 else INF


def _log2(x: float) -> float:
    return NAN if x < 0 or math.isnan(x) else -INF if x == 0 else x if x == INF else math.log2(x)


def _sqrt(x: float) -> float:
    return NAN if x < 0 or math.isnan(x) else math.sqrt(x)


def _wave(function: Callable[[float], float]) -> Callable[[float], float]:
    return lambda x: function(x) if math.isfinite(x) else NAN


def _reciprocal(x: float) -> float:
    return exact.div(1.0, x)


# The function, and whether a GPU's result is within the manual's bound of the exact one.
APPROXIMATIONS = {
    "rcp": (_reciprocal, lambda x, true, got: _ulps(true, got) <= 1),
    "sqrt": (_sqrt, lambda x, true, got: _relative(true, got) <= 2**-23),
    "rsqrt": (lambda x: _reciprocal(_sqrt(x)), lambda x, true, got: _relative(true, got) <= 2**-22.9),
    "ex2": (_exp2, lambda x, true, got: _ulps(true, got) <= 2),
    "lg2": (_log2, lambda x, true, got: abs(true - got) <= 2**-22 if 0.5 < x < 2 else _relative(true, got) <= 2**-22),
    "tanh": (math.tanh, lambda x, true, got: _relative(true, got) <= 2**-11),
    "sin": (_wave(math.sin), lambda x, true, got: _within_wave(x, true, got)),
    "cos": (_wave(math.cos), lambda x, true, got: _within_wave(x, true, got)),
}


def _relative(true: float, got: float) -> float:
    # half a unit in the last place: `true` was rounded to fp32, which near zero is coarser than the bound
    return max(abs(true - got) - 2.0**-150, 0) / abs(true) - 2**-24


def _ulps(true: float, got: float) -> int:
    return abs(bits_of(true) - bits_of(got))


def _within_wave(x: float, true: float, got: float) -> bool:
    """ "Outside of the range [-100pi .. +100pi], only best effort is provided." """
    bound = 2**-20.5 if abs(x) <= 2 * math.pi else 2**-14.7 if abs(x) <= 100 * math.pi else INF
    return abs(true - got) <= bound + 2**-25


def _bound(operation: str, ftz: bool) -> Callable[[int, int, int], bool]:
    within = APPROXIMATIONS[operation][1]

    def bound(given: int, expected: int, got: int) -> bool:
        x, true, result = map(float_of, (given, expected, got))
        if math.isnan(true) or math.isinf(true) or true == 0:
            # an overflow or underflow that is one step away is within a bound of some units in the last place
            near = operation in ("ex2", "rcp") and not math.isnan(true) and _ulps(true, result) <= 2
            return expected == got or near or (math.isnan(true) and math.isnan(result))
        return within(exact.flushed(x) if ftz else x, true, result)

    return bound


def _float_meaning(parts: list[str]) -> Meaning | None:
    operation, modifiers = parts[0], parts[1:-1]
    ftz = exact.flushed if "ftz" in modifiers else (lambda value: value)
    rounding = next((m for m in modifiers if m in ("rn", "rz", "rm", "rp")), "rn")
    nan = "NaN" in modifiers

    def of_floats(function):
        return lambda *operands: bits_of(ftz(function(*(ftz(float_of(operand)) for operand in operands))))

    if operation == "mul" and "ftz" in modifiers:
        # An H200 flushes products that are subnormal before they are rounded. Products in fp64 are exact.
        return of_floats(lambda a, b: exact.flushed(a * b) and exact.mul(a, b, rounding=rounding))
    if operation in FLOAT_OPERATIONS:
        function = FLOAT_OPERATIONS[operation]
        return of_floats(lambda *operands: function(*operands, rounding=rounding))
    if operation in ("min", "max"):
        choose = {"min": min, "max": max}[operation]
        return of_floats(lambda *operands: functools.reduce(lambda a, b: _minimum(a, b, choose, nan), operands))
    if operation == "div":
        return of_floats(exact.div)
    if "approx" in modifiers or (operation in ("rcp", "sqrt") and rounding == "rn"):
        function = APPROXIMATIONS[operation][0]
        return of_floats(lambda x: NAN if math.isnan(x) else exact.nearest(function(x)))
    if operation == "copysign":
        return lambda a, b: (a & 0x80000000) | (b & 0x7FFFFFFF)
    if operation in ("neg", "abs"):  # "NaN inputs yield an unspecified NaN"
        change = {"neg": lambda a: a ^ 0x80000000, "abs": lambda a: a & 0x7FFFFFFF}[operation]
        return lambda a: None if math.isnan(float_of(a)) else change(a)
    if operation == "mov":
        return lambda a: a
    if operation == "selp":
        return lambda a, b, c: a if c else b
    return None


def _pairwise(meaning: Meaning, bits: int) -> Meaning:
    """A function of numbers of this many bits, on both halves of its operands."""

    def both(*operands):
        low = meaning(*(operand % (1 << bits) for operand in operands))
        return low | meaning(*(operand >> bits for operand in operands)) << bits

    return both


def _sixteen_meaning(parts: list[str]) -> Meaning:
    form, operation = {"bf16": BF16, "f16": F16}[parts[-1]], parts[0]
    if operation in FLOAT_OPERATIONS:
        function = functools.partial(FLOAT_OPERATIONS[operation], form=form)
    else:
        function = functools.partial(_minimum, choose={"min": min, "max": max}[operation], nan="NaN" in parts)
    return lambda *operands: sixteen_bits(form, function(*(sixteen_value(form, operand) for operand in operands)))


def _mixed_meaning(parts: list[str]) -> Meaning:
    """add, sub, fma of .f32.bf16 or .f32.f16: the last operand is fp32."""
    form = {"bf16": BF16, "f16": F16}[parts[-1]]
    function = FLOAT_OPERATIONS[parts[0]]

    def meaning(*operands):
        return bits_of(function(*(sixteen_value(form, operand) for operand in operands[:-1]), float_of(operands[-1])))

    return meaning


INTEGRAL = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}


def _saturated(value: float, rounding: str, type_: str) -> int:
    """A number that is rounded to an integer type."""
    bits, _ = _typed(type_)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    if math.isinf(value):
        return high if value > 0 else low
    return min(max(INTEGRAL[rounding](value), low), high)


def _to_integer(rounding: str, type_: str) -> Meaning:
    bits, _ = _typed(type_)

    def meaning(a):
        value = float_of(a)
        if math.isnan(value):
            return 0 if bits < 64 else 1 << 63
        return _saturated(value, rounding, type_)

    return meaning


def _to_integral(rounding: str) -> Meaning:
    def meaning(a):
        value = float_of(a)
        whole = math.copysign(float(INTEGRAL[rounding](value)), value) if math.isfinite(value) else value
        return bits_of(whole)

    return meaning


def _cvt_meaning(parts: list[str]) -> Meaning:
    to, source = parts[-2:]
    if source == "f32" and to in ("bf16", "f16", "bf16x2", "f16x2"):
        form = BF16 if to.startswith("bf16") else F16
        if to.endswith("x2"):
            return lambda a, b: sixteen_bits(form, float_of(a)) << 16 | sixteen_bits(form, float_of(b))
        return lambda a: sixteen_bits(form, float_of(a))
    if to == "f32" and source in ("bf16", "f16"):
        form = {"bf16": BF16, "f16": F16}[source]

        def widened(a):
            value = sixteen_value(form, a)
            return None if math.isnan(value) else bits_of(value)  # "NaN input yields unspecified NaN"

        return widened
    if source == "f32":
        return _to_integral(parts[1]) if to == "f32" else _to_integer(parts[1], to)
    _, value = _typed(source)
    if to == "f32":
        return lambda a: bits_of(float(exact.F32.round(exact.Fraction(value(a)))) if value(a) else 0.0)
    return lambda a: _typed(to)[1](value(a))


def _prmt(a: int, b: int, selector: int) -> int:
    byte_values = (b << 32 | a).to_bytes(8, "little")
    result = []
    for i in range(4):
        choice = selector >> 4 * i & 15
        byte = byte_values[choice & 7]
        result.append((255 if byte >> 7 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def meaning_of(opcode: str, results: int) -> Meaning | None:
    """The function that a form computes, or None if it is not known here."""
    parts = opcode.split(".")
    operation, type_ = parts[0], parts[-1]
    if operation == "setp":
        return _setp_meaning(parts, results)
    if operation == "prmt":
        return _prmt
    if operation == "cvt":
        return _cvt_meaning(parts)
    if type_ == "pred":
        functions = {"and": operator.and_, "or": operator.or_, "xor": operator.xor, "not": lambda a: 1 - a}
        return functions.get(operation, lambda a: a)
    if parts[-2:] in (["f32", "bf16"], ["f32", "f16"]):
        return _mixed_meaning(parts)
    if type_ == "f32x2":
        return _pairwise(_float_meaning([*parts[:-1], "f32"]), 32)
    if type_ in ("bf16", "f16"):
        return _sixteen_meaning(parts)
    if type_ in ("bf16x2", "f16x2"):
        return _pairwise(_sixteen_meaning([*parts[:-1], type_.removesuffix("x2")]), 16)
    if type_ == "f32" or (type_ == "f64" and operation == "mov"):
        return _float_meaning(parts)
    return _integer_meaning(".".join(parts[:-1]), type_)


# Cases for instructions that compute values


def _expand(declared: str) -> tuple[list[str], str]:
    """(types, text with {} for each register) of a result or an operand."""
    if declared.startswith("{"):
        type_, _, count = declared[1:-1].partition("*")
        return [type_] * int(count), "{{" + ", ".join(["{}"] * int(count)) + "}}"
    if "|" in declared:
        return declared.split("|"), "{}|{}"
    return [declared], "{}"


def _bits(type_: str, wide: bool) -> int:
    if type_ == "pred":
        return 1
    bits = int(re.sub(r"\D", "", type_))
    if type_.startswith("~") and (bits == 8 or (wide and type_[1] != "f")):
        return {8: 64 if wide else 16, 16: 32, 32: 64, 64: 64}[bits]
    return bits


def _pool_kinds(opcode: str, types: list[str]) -> list[str]:
    """The kinds of values that interest an instruction, where its signature says only how many bits it has."""
    parts = opcode.split(".")
    if parts[-1].endswith("x2") and parts[0] != "cvt":
        return [parts[-1]] * len(types)
    if parts[-1] in ("bf16", "f16"):
        return [parts[-1] if type_ == "u16" else type_ for type_ in types]
    return [type_.removeprefix("~") for type_ in types]


def value_cases(form: isa.Form) -> Iterator[Case]:
    results = [_expand(declared.strip()) for declared in form.results]
    operands = [_expand(declared.strip()) for declared in form.operands]
    declared = [type_ for types, _ in [*results, *operands] for type_ in types]
    for wide in (False, True) if any(type_.startswith("~") for type_ in declared) else (False,):
        if wide and all(_bits(type_, True) == _bits(type_, False) for type_ in declared):
            continue
        yield _value_case(form, results, operands, wide)


def _value_case(form: isa.Form, results: list, operands: list, wide: bool) -> Case:
    name = case_name(form) + (" wide" if wide else "")
    count = itertools.count()
    outs = [text.format(*(f"%out{next(count)}" for _ in types)) for types, text in results]
    count = itertools.count()
    ins = [text.format(*(f"%in{next(count)}" for _ in types)) for types, text in operands]
    in_types = [type_ for types, _ in operands for type_ in types]
    out_types = [type_ for types, _ in results for type_ in types]
    threads = 128
    values = chosen(name, _pool_kinds(form.opcode, in_types), threads)
    function = meaning_of(form.opcode, len(out_types))
    if form.opcode.startswith("mov.b") and (len(in_types) > 1 or len(out_types) > 1):
        function = _mov_meaning(in_types, out_types)
    if function is None:
        raise KeyError(f"no expectation for {form.opcode}")
    expected = []
    for operand in zip(*values, strict=True):
        result = function(*operand)
        expected.append(result if isinstance(result, list) else [result])
    outputs = []
    for i, type_ in enumerate(out_types):
        bits = _bits(type_, wide)
        # results narrower than their register are extended: see "Operand Size Exceeding Instruction-Type Size"
        outputs.append((bits, [None if row[i] is None else row[i] % (1 << bits) for row in expected]))
    inputs = [(_bits(type_, wide), column) for type_, column in zip(in_types, values, strict=True)]
    approximate = ".approx" in form.opcode
    bound = _bound(form.opcode.split(".")[0], ".ftz" in form.opcode) if approximate else None
    return Case(
        name,
        form.opcode,
        f"{form.opcode} {', '.join([*outs, *ins])};",
        inputs,
        outputs,
        threads,
        bound=bound,
    )


def is_of_three(form: isa.Form) -> bool:
    return form.opcode.startswith(("min.", "max.")) and len(form.operands) == 3


def _mov_meaning(ins: list[str], outs: list[str]) -> Meaning:
    def pack(*operands):
        bits = int(ins[0][1:])
        whole = sum(value << bits * i for i, value in enumerate(operands))
        if len(outs) == 1:
            return whole
        part = int(outs[0][1:])
        return [whole >> part * i & ((1 << part) - 1) for i in range(len(outs))]

    return pack


def case_name(form: isa.Form) -> str:
    signature = f"{','.join(form.results)}={','.join(form.operands)}".replace(" ", "")
    return f"{form.opcode} {signature}"


@functools.cache
def forms() -> list[isa.Form]:
    return [form for _, forms in sorted(isa.load().items()) for form in forms]


# Values that `value_cases` does not know: three-way logic, carries, fp64 and fp8.


def _column_case(form: isa.Form, body: str, inputs: list, outputs: list, suffix: str = "") -> Case:
    return Case(case_name(form) + suffix, form.opcode, body, inputs, outputs, len(inputs[0][1]))


def _of_32_bits(name: str, count: int) -> list[tuple[int, list[int]]]:
    return [(32, column) for column in chosen(name, ["u32"] * count, 128)]


def funnel_cases(form: isa.Form) -> Iterator[Case]:
    _, direction, mode, _ = form.opcode.split(".")
    inputs = _of_32_bits(form.opcode, 3)
    results = []
    for low, high, amount in zip(*(column for _, column in inputs), strict=True):
        amount = amount % 32 if mode == "wrap" else min(amount, 32)
        both = high << 32 | low
        results.append((both >> amount if direction == "r" else both << amount >> 32) & ALL)
    yield _column_case(form, f"{form.opcode} %out0, %in0, %in1, %in2;", inputs, [(32, results)])


def lop3_cases(form: isa.Form) -> Iterator[Case]:
    functions = {
        0x96: lambda a, b, c: a ^ b ^ c,
        0xCA: lambda a, b, c: (a & b) | (~a & c),  # selects
        0xE8: lambda a, b, c: (a & b) | (a & c) | (b & c),
        0x1A: lambda a, b, c: ((a & b) | c) ^ a,
    }
    for table, function in functions.items():
        inputs = _of_32_bits(f"{form.opcode} {table}", 3)
        results = [function(*row) & ALL for row in zip(*(column for _, column in inputs), strict=True)]
        body = f"{form.opcode} %out0, %in0, %in1, %in2, {table};"
        yield _column_case(form, body, inputs, [(32, results)], f" {table:#x}")


def carry_cases(form: isa.Form) -> Iterator[Case]:
    """A sum sets the carry before the instruction, and another one reads it after it."""
    parts = form.opcode.split(".")
    adds, sets = parts[0].endswith("c"), "cc" in parts
    inputs = _of_32_bits(form.opcode, 2 + len(form.operands))
    totals = []
    for x, y, *values in zip(*(column for _, column in inputs), strict=True):
        before = (x + y) >> 32
        product = values[0] * values[1] if len(values) == 3 else 0
        total = sum(values) if len(values) == 2 else (product >> 32 if "hi" in parts else product & ALL) + values[2]
        total += before if adds else 0
        totals.append((total & ALL, total >> 32 if sets else before))
    operands = ", ".join(f"%in{2 + i}" for i in range(len(form.operands)))
    body = f"add.cc.u32 %out0, %in0, %in1; {form.opcode} %out0, {operands}; addc.u32 %out1, 0, 0;"
    yield _column_case(form, body, inputs, [(32, list(column)) for column in zip(*totals, strict=True)])


def _f64_bits(value: float) -> int | None:
    return None if math.isnan(value) else int(np.float64(value).view(np.uint64))


F64 = exact.Format(53, -1074, 1023)


def _f64(bits: int) -> float:
    return float(np.uint64(bits).view(np.float64))


def _coarse(function: Callable[[float], float]) -> Callable[[float], float]:
    """.approx.ftz.f64: the upper 32 bits of the operand and of the result count, without subnormal numbers."""

    def upper(value: float) -> float:
        if math.isnan(value):
            return value
        kept = _f64((_f64_bits(value) or 0) >> 32 << 32)
        return kept if abs(kept) >= 2.0**-1022 else math.copysign(0.0, kept)

    return lambda x: x if math.isnan(x) else upper(function(upper(x)))


def _inverse(x: float) -> float:
    return math.copysign(INF, x) if x == 0 else 1 / x


def _inverse_root(x: float) -> float:
    return math.copysign(INF, x) if x == 0 else NAN if x < 0 else 1 / math.sqrt(x)


F64_OPERATIONS: dict[str, Callable[..., float]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg, "abs": abs,
    "div": np.divide, "fma": functools.partial(exact.fma, form=F64),
    "sqrt": _sqrt, "rcp.rn": _inverse, "rcp.approx": _coarse(_inverse), "rsqrt.approx": _inverse_root,
    "rsqrt.approx.ftz": _coarse(_inverse_root), "min": lambda a, b: _minimum(a, b, min, False),
    "max": lambda a, b: _minimum(a, b, max, False), "copysign": lambda a, b: math.copysign(b, a),
}  # fmt: skip


def _near(given: int, expected: int, got: int) -> bool:
    """Approximate results have 20 bits or more."""
    return abs(_f64(got) - _f64(expected)) <= 2.0**-19 * abs(_f64(expected))


def f64_cases(form: isa.Form) -> Iterator[Case]:
    """Numbers in fp64. What a NaN's bits are is left open."""
    parts, random = form.opcode.split("."), random_of(form.opcode)
    count = sum("f64" in operand or "f32" in operand for operand in form.operands) or 1
    columns = [[*FLOATS[:11], *random.normal(size=32 - 11).tolist()] for _ in range(count)]
    for column in columns[1:]:
        random.shuffle(column)
    if form.opcode in ("cvt.f64.f16", "cvt.f64.bf16"):
        half = {"f16": F16, "bf16": BF16}[parts[-1]]
        bits = [sixteen_bits(half, value) for value in columns[0]]
        results = [_f64_bits(sixteen_value(half, x)) for x in bits]
        yield _column_case(form, f"{form.opcode} %out0, %in0;", [(16, bits)], [(64, results)])
    elif parts[0] == "cvt" and parts[-1] == "f32":
        bits = [float_bits(value) for value in columns[0]]
        yield _column_case(
            form, f"{form.opcode} %out0, %in0;", [(32, bits)], [(64, [_f64_bits(float_of(x)) for x in bits])]
        )
    elif form.opcode == "cvt.rn.f32.f64":
        values = [value * (1 + 2.0**-30) for value in columns[0]]
        inputs = [(64, [int(np.float64(value).view(np.uint64)) for value in values])]
        results = [None if math.isnan(value) else float_bits(float(np.float32(value))) for value in values]
        yield _column_case(form, f"{form.opcode} %out0, %in0;", inputs, [(32, results)])
    elif parts[0] == "cvt" and parts[-1] != "f64":
        bits, value_of = _typed(parts[-1])
        numbers = pool(parts[-1])
        results = [_f64_bits(float(value_of(number))) for number in numbers]
        yield _column_case(form, f"{form.opcode} %out0, %in0;", [(bits, numbers)], [(64, results)])
    else:
        yield _f64_case(form, parts, columns)


def _f64_case(form: isa.Form, parts: list[str], columns: list[list[float]]) -> Case:
    """An instruction whose operands are fp64 numbers, and perhaps a predicate."""
    inputs = [(64, [int(np.float64(value).view(np.uint64)) for value in column]) for column in columns]
    rows = list(zip(*columns, strict=True))
    bound = None
    if parts[0] == "setp":
        predicates = [thread % 3 == 0 for thread in range(32)]
        combine = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.get(parts[2])
        found = [_compare(parts[1], *row) for row in rows]
        if combine:
            inputs.append((1, [int(value) for value in predicates]))
            found = [combine(a, b) for a, b in zip(found, predicates, strict=True)]
        outputs = [(1, [int(value) for value in found])]
        results = "%out0"
        if "|" in form.results[0]:
            outputs.append((1, [int(not value) for value in found]))
            results = "%out0|%out1"
    elif parts[0] == "selp":
        inputs.append((1, [thread % 3 % 2 for thread in range(32)]))
        chosen_bits = [inputs[0 if thread % 3 % 2 else 1][1][thread] for thread in range(32)]
        outputs, results = [(64, chosen_bits)], "%out0"
    elif parts[0] == "cvt" and parts[-2] != "f64":  # to an integer
        bits, _ = _typed(parts[-2])
        values = [1 << (bits - 1) if math.isnan(x) else _saturated(x, parts[1], parts[-2]) for (x,) in rows]
        outputs, results = [(bits, [value % (1 << bits) for value in values])], "%out0"
    else:
        if parts[0] == "cvt":
            function = _rounded_f64(parts[1])
        else:
            names = [".".join(parts[:3]), ".".join(parts[:2]), parts[0]]
            function = F64_OPERATIONS[next(name for name in names if name in F64_OPERATIONS)]
            bound = _near if "approx" in parts else None
        with np.errstate(all="ignore"):
            outputs, results = [(64, [_f64_bits(float(function(*row))) for row in rows])], "%out0"
    operands = ", ".join(f"%in{i}" for i in range(len(inputs)))
    case = _column_case(form, f"{form.opcode} {results}, {operands};", inputs, outputs)
    return dataclasses.replace(case, bound=bound)


def _rounded_f64(rounding: str) -> Callable[[float], float]:
    integral = INTEGRAL[rounding]
    return lambda x: x if not math.isfinite(x) else math.copysign(float(integral(x)), x)


def saturating_cases(form: isa.Form) -> Iterator[Case]:
    values = [*FLOATS, *FLOATS[: 64 - len(FLOATS)]]
    results = [bits_of(0.0 if math.isnan(x) or x <= 0 else min(x, 1.0)) for x in values]
    inputs = [(32, [float_bits(value) for value in values])]
    yield _column_case(form, f"{form.opcode} %out0, %in0;", inputs, [(32, results)])


def _fp8_value(bits: int, exponent_bits: int) -> float:
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1
    exponent, mantissa = (bits & 127) >> mantissa_bits, bits & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        size = math.ldexp(mantissa, 1 - bias - mantissa_bits)
    else:
        size = math.ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits)
    if exponent_bits == 5 and exponent == 31:
        size = NAN if mantissa else INF
    if exponent_bits == 4 and bits & 127 == 127:
        size = NAN
    return math.copysign(size, -1 if bits >> 7 else 1)


@functools.cache
def _fp8_numbers(exponent_bits: int) -> dict[int, float]:
    """The finite numbers that are not negative, by their bits."""
    numbers = {bits: _fp8_value(bits, exponent_bits) for bits in range(128)}
    return {bits: number for bits, number in numbers.items() if math.isfinite(number)}


def _fp8_bits(value: float, exponent_bits: int) -> int:
    """The nearest finite number, in a tie the even one."""
    if math.isnan(value):
        return 0x7F
    numbers = _fp8_numbers(exponent_bits)
    nearest = min(numbers, key=lambda bits: (abs(min(abs(value), 1e9) - numbers[bits]), bits % 2))
    return nearest | (128 if math.copysign(1, value) < 0 else 0)


def fp8_cases(form: isa.Form) -> Iterator[Case]:
    name = form.opcode
    exponent_bits = 4 if "e4m3" in name else 5
    if name.endswith(("m3x2", "m2x2")):  # from fp8, all of its numbers
        pairs = [low | (low + 37) % 256 << 8 for low in range(256)]
        numbers = [[_fp8_value(pair >> bit & 255, exponent_bits) for bit in (0, 8)] for pair in pairs]
        results = [sixteen_bits(F16, low) | sixteen_bits(F16, high) << 16 for low, high in numbers]
        yield _column_case(form, f"{name} %out0, %in0;", [(16, pairs)], [(32, results)])
        return
    # ties between neighbors, what is out of range, and random numbers
    ties = [
        (_fp8_value(bits, exponent_bits) + _fp8_value(bits + 1, exponent_bits)) / 2
        for bits in (0, 1, 7, 8, 50, 51, 119)
    ]
    values = [*ties, *FLOATS, 447.0, 449.0, 464.0, 480.0, 57343.0, 61440.0, *random_of(name).normal(size=75).tolist()][
        :128
    ]
    values += [0.0] * (128 - len(values))
    if name.endswith("f16x2"):
        halves = [sixteen_bits(F16, value) for value in values]
        bits = [_fp8_bits(sixteen_value(F16, half), exponent_bits) for half in halves]
        inputs = [(32, [low | high << 16 for low, high in zip(halves, halves[1:] + halves[:1], strict=True)])]
        body = f"{name} %out0, %in0;"
    else:
        singles = [float_bits(value) for value in values]
        bits = [_fp8_bits(float_of(single), exponent_bits) for single in singles]
        inputs = [(32, singles[1:] + singles[:1]), (32, singles)]
        body = f"{name} %out0, %in0, %in1;"
    results = [low | high << 8 for low, high in zip(bits, bits[1:] + bits[:1], strict=True)]
    yield _column_case(form, body, inputs, [(16, results)])


# Loads and stores. Scratch has the data; shared memory gets a copy of it.

TO_SHARED = """.reg .b64 %c0, %c1;
ld.global.b64 %c0, [%g]; st.shared.b64 [%s], %c0;
ld.global.b64 %c1, [%g+8]; st.shared.b64 [%s+8], %c1;
"""
FROM_SHARED = "ld.shared.b64 %out0, [%s]; ld.shared.b64 %out1, [%s+8];"
FROM_GLOBAL = "ld.global.b64 %out0, [%g]; ld.global.b64 %out1, [%g+8];"


def random_words(name: str, count: int) -> list[int]:
    return [int(value) for value in random_of(name).integers(0, 1 << 64, count, np.uint64)]


def scratch_bytes(words: list[int]) -> bytearray:
    return bytearray(np.array(words, np.uint64).tobytes())


def words_of(data: bytes) -> list[int]:
    return [int(word) for word in np.frombuffer(bytes(data), np.uint64)]


def _element(opcode: str) -> tuple[str, int]:
    """(type, elements) of a load or a store."""
    vector = re.search(r"\.v([248])\.", opcode)
    return opcode.rpartition(".")[2], int(vector[1]) if vector else 1


def load_cases(form: isa.Form) -> Iterator[Case]:
    type_, count = _element(form.opcode)
    size, threads = int(type_[1:]) // 8, 32
    for wide in (False, True):
        bits = _bits("~" + type_, wide)
        if wide and bits == _bits("~" + type_, False):
            continue
        name = case_name(form) + (" wide" if wide else "")
        words = random_words(name, 2 * threads)
        data, offset = scratch_bytes(words), size * count % 16
        outputs: list = [(bits, []) for _ in range(count)]
        for thread, i in itertools.product(range(threads), range(count)):
            begin = 16 * thread + offset + size * i
            source = PARAMETER_DATA[offset + size * i :] if ".param" in form.opcode else data[begin:]
            value = int.from_bytes(source[:size], "little", signed=type_[0] == "s")
            outputs[i][1].append(value % (1 << bits))
        outs = ", ".join(f"%out{i}" for i in range(count))
        place = "ENTRY_data" if ".param" in form.opcode else "%s" if ".shared" in form.opcode else "%g"
        body = f"{form.opcode} {outs if count == 1 else f'{{{outs}}}'}, [{place}+{offset}];"
        prefix = TO_SHARED if place == "%s" else ""
        yield Case(name, form.opcode, prefix + body, [], outputs, threads, scratch=words)


def store_cases(form: isa.Form) -> Iterator[Case]:
    type_, count = _element(form.opcode)
    size, threads = int(type_[1:]) // 8, 32
    shared = ".shared" in form.opcode
    for wide in (False, True):
        bits = _bits("~" + type_, wide)
        if wide and bits == _bits("~" + type_, False):
            continue
        name = case_name(form) + (" wide" if wide else "")
        words = random_words(name, 2 * threads)
        data, offset = scratch_bytes(words), size * count % 16
        inputs: list = [(bits, []) for _ in range(count)]
        values = iter(random_words(f"{name} values", threads * count))
        for thread, i in itertools.product(range(threads), range(count)):
            value = next(values) % (1 << bits)
            inputs[i][1].append(value)
            begin = 16 * thread + offset + size * i
            data[begin : begin + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
        ins = ", ".join(f"%in{i}" for i in range(count))
        body = f"{form.opcode} [{'%s' if shared else '%g'}+{offset}], {ins if count == 1 else f'{{{ins}}}'};\n"
        body = TO_SHARED + body + FROM_SHARED if shared else body + FROM_GLOBAL
        after = words_of(data)
        yield Case(name, form.opcode, body, inputs, [(64, after[::2]), (64, after[1::2])], threads, scratch=words)


def wide_access_cases(form: isa.Form) -> Iterator[Case]:
    """Accesses 256 bits: an even thread uses its own scratch and the next thread's."""
    type_, count = _element(form.opcode)
    bits, name, loads = int(type_[1:]), case_name(form), form.opcode.startswith("ld")
    words = random_words(name, 64)
    names = [f"%{'out' if loads else 'in'}{i}" for i in range(count)]
    vector = f"{{{', '.join(names)}}}"
    odd = ".reg .b32 %odd; .reg .pred %p; and.b32 %odd, %t, 1; setp.eq.u32 %p, %odd, 0;\n"
    if loads:
        data = np.array(words, np.uint64).view(f"u{bits // 8}").reshape(16, count)
        columns = [[int(data[t // 2, i]) if t % 2 == 0 else 0 for t in range(32)] for i in range(count)]
        zeros = "".join(f"mov.b{bits} {register}, 0; " for register in names)
        body = f"{odd}{zeros}@%p {form.opcode} {vector}, [%g];"
        yield Case(name, form.opcode, body, [], [(bits, column) for column in columns], scratch=words)
    else:
        stored = np.array(random_words(f"{name} values", 64), np.uint64).view(f"u{bits // 8}").reshape(16, count)
        inputs: list = [(bits, [int(stored[t // 2, i]) for t in range(32)]) for i in range(count)]
        after = words_of(stored.tobytes())
        body = f"{odd}@%p {form.opcode} [%g], {vector}; bar.warp.sync -1;\n{FROM_GLOBAL}"
        yield Case(name, form.opcode, body, inputs, [(64, after[::2]), (64, after[1::2])], scratch=words)


def local_cases(form: isa.Form) -> Iterator[Case]:
    """Each thread stores in an array of its own, at an index that differs between threads, and loads from it."""
    type_, count = _element(form.opcode)
    size, bits = int(type_[1:]) // 8, max(int(type_[1:]), 16)
    inputs: list = [
        (bits, [word % (1 << 8 * size) for word in random_words(f"{case_name(form)} {i}", 32)]) for i in range(count)
    ]
    vector, ins, outs = (
        "" if count == 1 else f".v{count}",
        *(", ".join(f"%{kind}{i}" for i in range(count)) for kind in ("in", "out")),
    )
    if count > 1:
        ins, outs = f"{{{ins}}}", f"{{{outs}}}"
    place = ".local .align 16 .b8 ENTRY_array[512]; .reg .b64 %array, %index; mov.b64 %array, ENTRY_array;\n"
    place += "mul.wide.u32 %index, %t, 16; add.u64 %array, %array, %index;\n"
    body = f"st.local{vector}.{type_} [%array], {ins}; ld.local{vector}.{type_} {outs}, [%array];"
    name = case_name(form)
    if form.opcode.startswith("st.param"):  # of a call that needs an argument of each width
        yield call_case(form, type_, inputs[0][1])
    elif form.opcode.startswith("cvta"):
        body = f"{form.opcode} %index, %array; sub.u64 %index, %index, %array; setp.ne.u64 %out0, %index, 0;"
        yield Case(name, form.opcode, f"{place}{body}", [], [(1, [1] * 32)])
    else:
        yield Case(name, form.opcode, f"{place}{body}", inputs, inputs)


def generic_cases(form: isa.Form) -> Iterator[Case]:
    """A third of the threads each accesses global, shared and local memory, which have the thread's scratch."""
    type_, count = _element(form.opcode)
    size, bits = int(type_[1:]) // 8, max(int(type_[1:]), 16)
    name, words = case_name(form), random_words(case_name(form), 64)
    data, offset = scratch_bytes(words), size * count % 16
    names = [f"%{'out' if form.opcode.startswith('ld') else 'in'}{i}" for i in range(count)]
    vector = names[0] if count == 1 else f"{{{', '.join(names)}}}"
    place = f"""{TO_SHARED}.local .align 16 .b8 ENTRY_array[16]; .reg .b64 %a, %b; .reg .b32 %kind; .reg .pred %p;
mov.b64 %a, ENTRY_array; st.local.b64 [%a], %c0; st.local.b64 [%a+8], %c1; cvta.local.u64 %a, %a;
rem.u32 %kind, %t, 3; setp.eq.u32 %p, %kind, 0; selp.b64 %a, %g, %a, %p;
cvt.u64.u32 %b, %s; cvta.shared.u64 %b, %b; setp.eq.u32 %p, %kind, 1; selp.b64 %a, %b, %a, %p;
"""
    spans = [[16 * thread + offset + size * i for thread in range(32)] for i in range(count)]
    if form.opcode.startswith("ld"):
        outputs = [(bits, [int.from_bytes(data[at : at + size], "little") for at in span]) for span in spans]
        yield Case(name, form.opcode, f"{place}{form.opcode} {vector}, [%a+{offset}];", [], outputs, scratch=words)
        return
    values = [[word % (1 << 8 * size) for word in random_words(f"{name} {i}", 32)] for i in range(count)]
    for span, column in zip(spans, values, strict=True):
        for at, value in zip(span, column, strict=True):
            data[at : at + size] = value.to_bytes(size, "little")
    body = f"{place}{form.opcode} [%a+{offset}], {vector}; ld.b64 %out0, [%a]; ld.b64 %out1, [%a+8];"
    after = words_of(data)
    inputs = [(bits, column) for column in values]
    yield Case(name, form.opcode, body, inputs, [(64, after[::2]), (64, after[1::2])], scratch=words)


def call_case(form: isa.Form, type_: str, values: list[int]) -> Case:
    """A call of vprintf that prints nothing: its text is empty."""
    body = f"""{{ .param .b64 text; .param .b64 arguments; .param .b32 result; .param .{type_} other;
.reg .b64 %text; mov.b64 %text, ENTRY_nothing; cvta.global.u64 %text, %text;
st.param.{type_} [other], %in0; st.param.b64 [text], %text; st.param.b64 [arguments], 0;
call.uni (result), vprintf, (text, arguments); }} mov.b{max(int(type_[1:]), 16)} %out0, %in0;"""
    column = [(max(int(type_[1:]), 16), values)]
    declarations = """.extern .func (.param .b32 result) vprintf (.param .b64 text, .param .b64 arguments);
.global .align 1 .b8 ENTRY_nothing[1] = {0};
"""
    return Case(case_name(form), form.opcode, body, column, column, declarations=declarations)


def call_cases(form: isa.Form) -> Iterator[Case]:
    yield call_case(form, "b32", list(range(32)))


def _float_add(a: int, b: int) -> int:
    """ "atom.add.f32 on global memory flushes subnormal inputs and results to sign-preserving zero" """
    return bits_of(exact.flushed(exact.add(exact.flushed(float_of(a)), exact.flushed(float_of(b)))))


def _atomic_meaning(name: str, type_: str) -> Callable[[int, int], int]:
    if type_ == "f32":
        return _float_add
    bits, value = _typed(type_.replace("b", "u"))
    functions = {
        "add": operator.add, "min": min, "max": max, "and": operator.and_, "or": operator.or_, "xor": operator.xor,
        "exch": lambda old, new: new, "inc": lambda old, limit: 0 if old >= limit else old + 1,
        "dec": lambda old, limit: limit if old == 0 or old > limit else old - 1,
    }  # fmt: skip
    return lambda old, operand: functions[name](value(old), value(operand)) % (1 << bits)


def atomic_cases(form: isa.Form) -> Iterator[Case]:
    """Each thread has a word of its own: what threads do to the same one depends on their order."""
    parts, threads, name = form.opcode.split("."), 32, case_name(form)
    operation, type_ = parts[-2:]
    bits = int(type_[1:])
    swap = operation == "cas"
    columns = chosen(name, [type_] * (3 if swap else 2), threads)
    old, operands = columns[0], columns[1:]
    if swap:
        operands[0] = [value if i % 2 else old[i] for i, value in enumerate(operands[0])]
        new = [b if current == a else current for current, a, b in zip(old, *operands, strict=True)]
    else:
        meaning = _atomic_meaning(operation, type_)
        if type_ == "f32" and ".shared" in form.opcode:  # "supports subnormal numbers"
            meaning = lambda old, value: bits_of(exact.add(float_of(old), float_of(value)))  # noqa: E731
        new = [meaning(current, value) for current, value in zip(old, operands[0], strict=True)]
    scratch = [word for value in old for word in (value, 0)]
    ins = ", ".join(f"%in{i}" for i in range(len(operands)))
    returns = parts[0] == "atom"
    body = f"{form.opcode} {'%out1, ' if returns else ''}[%g], {ins};\nld.global.b{bits} %out0, [%g];"
    if ".shared" in form.opcode:
        body = TO_SHARED + body.replace("%g", "%s").replace("ld.global", "ld.shared")
    outputs: list = [(bits, new), *([(bits, old)] if returns else [])]
    yield Case(name, form.opcode, body, [(bits, column) for column in operands], outputs, threads, scratch=scratch)


def vector_red_cases(form: isa.Form) -> Iterator[Case]:
    """A vector is added to the same thread's scratch, element by element."""
    count, name = int(re.search(r"\.v(\d)\.", form.opcode)[1]), case_name(form)
    old, *columns = chosen(name, ["f32"] * 3, 32)
    columns = [columns[i % 2] for i in range(count)]
    add = _atomic_meaning("add", "f32")
    after = [[add(a, b) for a, b in zip(old, column, strict=True)] for column in columns]
    scratch = [word for value in old for word in (value | value << 32,) * 2]
    operands = ", ".join(f"%in{i}" for i in range(count))
    body = f"{form.opcode} [%g], {{{operands}}};\n" + "".join(
        f"ld.global.b32 %out{i}, [%g+{4 * i}];" for i in range(count)
    )
    outputs = [(32, column) for column in after]
    yield Case(name, form.opcode, body, [(32, column) for column in columns], outputs, scratch=scratch)


# Instructions of a warp

ALL = 0xFFFFFFFF


def _shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The pseudo code of shfl.sync: (source lane, predicate)."""
    lane_bits, clamp, segments = b & 31, c & 31, c >> 8 & 31
    most, least = lane & segments | clamp & ~segments & 31, lane & segments
    if mode == "up":
        source, valid = lane - lane_bits, lane - lane_bits >= most
    elif mode == "down":
        source, valid = lane + lane_bits, lane + lane_bits <= most
    elif mode == "bfly":
        source, valid = lane ^ lane_bits, lane ^ lane_bits <= most
    else:
        source = least | lane_bits & ~segments
        valid = source <= most
    return source if valid else lane, valid


def shuffle_cases(form: isa.Form) -> Iterator[Case]:
    mode = form.opcode.split(".")[2]
    for control in (0x1F, 0x00, 0x1C03, 0x1800, 0x181F):
        name = f"{case_name(form)} {control:#x}"
        a = [word & ALL for word in random_words(name, 32)]
        b = [int(value) for value in random_of(name).integers(0, 32, 32)]
        moved = [_shuffled(mode, lane, b[lane], control) for lane in range(32)]
        outputs: list = [(32, [a[source] for source, _ in moved]), (1, [int(valid) for _, valid in moved])]
        body = f"{form.opcode} %out0|%out1, %in0, %in1, {control}, -1;"
        yield Case(name, form.opcode, body, [(32, a), (32, b)], outputs)


def redux_cases(form: isa.Form) -> Iterator[Case]:
    _, _, operation, type_ = form.opcode.split(".")
    _, value = _typed(type_.replace("b", "u"))
    name = case_name(form)
    a = [word & ALL for word in random_words(name, 32)]
    function = {"add": operator.add, **{k: INTEGER_OPERATIONS[k] for k in ("min", "max", "and", "or", "xor")}}[
        operation
    ]
    for members in (ALL, 0x0000FFF0):
        inside = [members >> lane & 1 for lane in range(32)]
        result = functools.reduce(function, (value(a[lane]) for lane in range(32) if inside[lane])) & ALL
        body = f"mov.b32 %out0, 0; setp.eq.u32 %p, %in1, 0;\n@%p bra SKIP; {form.opcode} %out0, %in0, {members}; SKIP:"
        expected = [result if inside[lane] else 0 for lane in range(32)]
        yield Case(
            f"{name} {members:#x}", form.opcode, f".reg .pred %p; {body}", [(32, a), (32, inside)], [(32, expected)]
        )


def float_redux_cases(form: isa.Form) -> Iterator[Case]:
    parts, name = form.opcode.split("."), case_name(form)
    choose, nan = {"min": min, "max": max}[parts[2]], "NaN" in parts
    for label, values in (
        ("numbers", random_of(name).normal(size=32).tolist()),
        ("NaN", FLOATS[:32]),
        ("all NaN", [NAN] * 32),
    ):
        bits = [float_bits(value) for value in values]
        for members in (ALL, 0x0000FFF0):
            inside = [members >> lane & 1 for lane in range(32)]
            sizes = [abs(value) if "abs" in parts else value for value in values]
            chosen_ones = [size for size, is_in in zip(sizes, inside, strict=True) if is_in]
            result = bits_of(functools.reduce(lambda a, b: _minimum(a, b, choose, nan), chosen_ones))
            body = ".reg .pred %p; mov.b32 %out0, 0; setp.eq.u32 %p, %in1, 0;\n"
            body += f"@%p bra SKIP; {form.opcode} %out0, %in0, {members}; SKIP:"
            expected = [result if is_in else 0 for is_in in inside]
            yield Case(f"{name} {label} {members:#x}", form.opcode, body, [(32, bits), (32, inside)], [(32, expected)])


def vote_cases(form: isa.Form) -> Iterator[Case]:
    mode = form.opcode.split(".")[2]
    for label, votes in (("none", [0] * 32), ("some", random_of(mode).integers(0, 2, 32).tolist()), ("all", [1] * 32)):
        ballot = sum(vote << lane for lane, vote in enumerate(votes))
        result = {"ballot": ballot, "any": int(any(votes)), "all": int(all(votes)), "uni": int(len({*votes}) == 1)}[
            mode
        ]
        bits = 32 if mode == "ballot" else 1
        body = f"{form.opcode} %out0, %in0, -1;"
        yield Case(f"{case_name(form)} {label}", form.opcode, body, [(1, votes)], [(bits, [result] * 32)])


def elect_cases(form: isa.Form) -> Iterator[Case]:
    body = f"{form.opcode} %out0|%out1, -1;"
    yield Case(case_name(form), form.opcode, body, [], [(32, [0] * 32), (1, [1] + [0] * 31)])


def _matrix_place(transposed: bool, thread: int, half: int) -> tuple[int, int]:
    """(row, column) of an 8 x 8 matrix of which a thread's register has element `half`."""
    row, column = thread // 4, thread % 4 * 2 + half
    return (column, row) if transposed else (row, column)


def matrix_cases(form: isa.Form) -> Iterator[Case]:
    """Matrix i has its rows in the scratch of threads 8 i to 8 i + 7, which give their addresses."""
    name, transposed = case_name(form), ".trans" in form.opcode
    count = int(re.search(r"\.x([124])\.", form.opcode)[1])
    words = random_words(name, 64)
    memory = np.array(words, np.uint64).view(np.uint16).reshape(32, 8)
    fragments = np.zeros((count, 32, 2), np.uint16)
    stores = form.opcode.startswith("stmatrix")
    if stores:
        fragments[:] = random_of(name).integers(0, 1 << 16, fragments.shape)
    for i, thread, half in np.ndindex(fragments.shape):
        row, column = _matrix_place(transposed, thread, half)
        if stores:
            memory[8 * i + row, column] = fragments[i, thread, half]
        else:
            fragments[i, thread, half] = memory[8 * i + row, column]
    registers: list = [(32, row.view(np.uint32)[:, 0].tolist()) for row in fragments]
    names = ", ".join(f"%{'in' if stores else 'out'}{i}" for i in range(count))
    if stores:
        after = words_of(memory.tobytes())
        body = f"{TO_SHARED} bar.sync 0; {form.opcode} [%s], {{{names}}}; bar.sync 0;\n{FROM_SHARED}"
        yield Case(name, form.opcode, body, registers, [(64, after[::2]), (64, after[1::2])], scratch=words)
    else:
        body = f"{TO_SHARED} bar.sync 0; {form.opcode} {{{names}}}, [%s];"
        yield Case(name, form.opcode, body, [], registers, scratch=words)


def byte_matrix_cases(form: isa.Form) -> Iterator[Case]:
    """Matrix i has its columns in the scratch of threads 8 i to 8 i + 7, which give their addresses."""
    count, name = int(re.search(r"\.x([124])\.", form.opcode)[1]), case_name(form)
    words = random_words(name, 64)
    memory = np.array(words, np.uint64).view(np.uint8).reshape(32, 16)
    fragments = random_of(name).integers(0, 256, (count, 32, 4)).astype(np.uint8)
    for i, thread, element in np.ndindex(fragments.shape):
        row, column = thread // 4 + 8 * (element // 2), thread % 4 * 2 + element % 2
        memory[8 * i + column, row] = fragments[i, thread, element]
    registers: list = [(32, row.view(np.uint32)[:, 0].tolist()) for row in fragments]
    names, after = ", ".join(f"%in{i}" for i in range(count)), words_of(memory.tobytes())
    body = f"{TO_SHARED} bar.sync 0; {form.opcode} [%s], {{{names}}}; bar.sync 0;\n{FROM_SHARED}"
    yield Case(name, form.opcode, body, registers, [(64, after[::2]), (64, after[1::2])], scratch=words)


# Barriers: two warps exchange words through shared memory.


def exchange_case(form: isa.Form, barrier: str, one_way: bool = False) -> Case:
    """Thread t gets the word of thread t ^ 32; `one_way`, only threads from 32 on do, and others keep their own."""
    name = case_name(form)
    words = [word & ALL for word in random_words(name, 64)]
    expected = [words[t] if one_way and t < 32 else words[t ^ 32] for t in range(64)]
    body = f""".reg .pred %p; .reg .b32 %other;
st.shared.b32 [%s], %in0;
setp.lt.u32 %p, %t, 32;
xor.b32 %other, %t, 32;
mad.lo.u32 %other, %other, 16, %base;
mov.b32 %out0, %in0;
{barrier}
{"@!%p " if one_way else ""}ld.shared.b32 %out0, [%other];"""
    return Case(name, form.opcode, body, [(32, words)], [(32, expected)], 64)


def barrier_cases(form: isa.Form) -> Iterator[Case]:
    opcode = form.opcode
    if opcode == "bar.warp.sync":
        words = [word & ALL for word in random_words(opcode, 32)]
        body = f""".reg .b32 %other; st.shared.b32 [%s], %in0;
xor.b32 %other, %t, 1; mad.lo.u32 %other, %other, 16, %base;
{opcode} -1;
ld.shared.b32 %out0, [%other];"""
        yield Case(case_name(form), opcode, body, [(32, words)], [(32, [words[t ^ 1] for t in range(32)])])
    elif ".cluster.arrive" in opcode:
        fence = "fence.acq_rel.cluster; " if ".relaxed" in opcode else ""
        yield exchange_case(form, f"{fence}{opcode}; barrier.cluster.wait;")
    elif ".cluster.wait" in opcode:
        yield exchange_case(form, f"barrier.cluster.arrive; {opcode};")
    elif ".red." in opcode:  # of both warps' predicates
        operation = "popc" if ".popc." in opcode else "and" if ".and." in opcode else "or"
        count = ", 64" if len(form.operands) == 3 else ""
        for label, votes in (("none", [0] * 64), ("one", [int(t == 40) for t in range(64)]), ("all", [1] * 64)):
            result = {"popc": sum(votes), "and": int(all(votes)), "or": int(any(votes))}[operation]
            body = f"{opcode} %out0, 3{count}, %in0;"
            outputs: list = [(32 if operation == "popc" else 1, [result] * 64)]
            yield Case(f"{case_name(form)} {label}", opcode, body, [(1, votes)], outputs, 64)
    elif ".arrive" in opcode:
        sync = opcode.replace("arrive", "sync")
        yield exchange_case(form, f"@%p {opcode} 1, 64;\n@!%p {sync} 1, 64;", one_way=True)
    else:
        yield exchange_case(form, f"{opcode} 3{', 64' if len(form.operands) == 2 else ''};")


# mbarriers: one thread uses them, at the beginning of shared memory; its results are what waiting for phases returned.

TEST = "mbarrier.test_wait.parity.shared.b64"


def one_thread_case(
    form: isa.Form, body: str, outputs: list[tuple[int, int | None]], suffix: str = "", **kwargs
) -> Case:
    """Thread 0 executes the body; others return zeros."""
    zeros = "".join(
        f"mov.b64 %out{i}, 0;" if bits == 64 else f"mov.b32 %out{i}, 0;" for i, (bits, _) in enumerate(outputs)
    )
    text = f"""{zeros}
.reg .pred %p, %q; .reg .b32 %bar; .reg .b64 %state, %policy;
mov.b32 %bar, %base; mov.b64 %policy, 0x1000000000000000;
setp.ne.u32 %p, %t, 0;
@%p bra SKIP;
{body}
SKIP:"""
    values: list = [(bits, [value, *[0] * 31]) for bits, value in outputs]
    return Case(case_name(form) + suffix, form.opcode, text, [], values, **kwargs)


def _test(output: int, parity: int) -> str:
    return f"{TEST} %q, [%bar], {parity}; selp.b32 %out{output}, 1, 0, %q;"


def _copy_16(barrier: str = "%bar") -> str:
    """16 bytes of scratch to offset 64 of shared memory."""
    return (
        f".reg .b32 %to; add.u32 %to, %base, 64;\n"
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%to], [%scratch], 16, [{barrier}];"
    )


def _wait(parity: int) -> str:
    return f"WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%bar], {parity}; @!%q bra WAIT;"


INIT = "mbarrier.init.shared.b64 [%bar], {}; fence.mbarrier_init.release.cluster;"
READ_COPY = "ld.shared.b64 %out{}, [%to]; ld.shared.b64 %out{}, [%to+8];"


def mbarrier_cases(form: isa.Form) -> Iterator[Case]:
    opcode, operands = form.opcode, len(form.operands)
    words = random_words(opcode, 64)
    sink = "_" if "::cluster" in opcode else "%state"
    if opcode.startswith("mbarrier.init"):
        arrive = "mbarrier.arrive.shared.b64 %state, [%bar];"
        body = f"{opcode} [%bar], 2;\n{arrive} {_test(0, 0)}\n{arrive} {_test(1, 0)} {_test(2, 1)}"
        yield one_thread_case(form, body, [(32, 0), (32, 1), (32, 0)])
    elif opcode.startswith("mbarrier.inval"):
        yield one_thread_case(form, f"{INIT.format(1)} {opcode} [%bar]; mov.b32 %out0, 1;", [(32, 1)])
    elif ".expect_tx" in opcode:
        # The phase ends when the bytes have come, not before.
        if "arrive" in opcode:
            begin = f"{opcode} {sink}, [%bar], 16;"
        else:
            begin = f"{opcode} [%bar], 16; mbarrier.arrive.shared.b64 %state, [%bar];"
        body = f"{INIT.format(1)} {begin} {_test(0, 0)}\n{_copy_16()}\n{_wait(0)}\n{READ_COPY.format(1, 2)}"
        yield one_thread_case(form, body, [(32, 0), (64, words[0]), (64, words[1])], scratch=words)
    elif ".arrive" in opcode:
        count = ", 2" if operands == 2 else ""
        body = f"{INIT.format(3 if count else 2)} {opcode} {sink}, [%bar]{count}; {_test(0, 0)}\n"
        body += f"mbarrier.arrive.shared.b64 %state, [%bar]; {_test(1, 0)} {_test(2, 1)}"
        yield one_thread_case(form, body, [(32, 0), (32, 1), (32, 0)])
    elif ".parity" not in opcode:  # waits for the phase of an arrival, which a second arrival ends
        limit = ", 100000" if operands == 3 else ""
        wait = f"{opcode} %q, [%bar], %first{limit}; selp.b32 %out{{}}, 1, 0, %q;"
        body = f".reg .b64 %first; {INIT.format(2)} mbarrier.arrive.shared.b64 %first, [%bar];\n"
        body += f"{wait.format(0) if 'test' in opcode else 'mov.b32 %out0, 0;'}\n"
        body += f"mbarrier.arrive.shared.b64 %state, [%bar]; {wait.format(1)}"
        yield one_thread_case(form, body, [(32, 0), (32, 1)])
    else:  # try_wait and test_wait; the phase before the first one counts as complete
        limit = ", 100000" if operands == 3 else ""
        wait = f"{opcode} %q, [%bar], {{}}{limit}; selp.b32 %out{{}}, 1, 0, %q;"
        body = f"{INIT.format(1)} {wait.format(1, 0)}\nmbarrier.arrive.shared.b64 %state, [%bar]; {wait.format(0, 1)}"
        yield one_thread_case(form, body, [(32, 1), (32, 1)])


# Bulk copies

FENCE = "fence.proxy.async.shared::cta;"


def bulk_cases(form: isa.Form) -> Iterator[Case]:
    opcode, words = form.opcode, random_words(form.opcode, 64)
    policy = ", %policy" if "L2::cache_hint" in opcode else ""
    wait = "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    if "mbarrier" in opcode:
        body = f"{INIT.format(1)} mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 16;\n"
        body += f".reg .b32 %to; add.u32 %to, %base, 64;\n{opcode} [%to], [%scratch+32], 16, [%bar]{policy};\n"
        body += f"{_wait(0)}\n{READ_COPY.format(0, 1)}"
        yield one_thread_case(form, body, [(64, words[4]), (64, words[5])], scratch=words)
        return
    if ".global.shared" in opcode:
        copy = f"{opcode} [%scratch+64], [%base], 16{policy};\n{wait}"
    else:
        copy = "cp.async.bulk.global.shared::cta.bulk_group [%scratch+64], [%base], 16;\n"
        last = opcode if "wait_group" in opcode else "cp.async.bulk.wait_group"
        copy += f"cp.async.bulk.commit_group; {last} 0;"
        copy += " cp.async.bulk.wait_group 0;" if ".read" in opcode else ""
    after = words[20:22]
    if "reduce" in opcode:  # the numbers at the destination are added
        dtype = np.dtype(opcode.rpartition(".")[2].replace("u", "uint").replace("s", "int").replace("f", "float"))
        numbers = (
            np.arange(-3, 16 // dtype.itemsize - 3).astype(dtype),
            np.arange(1, 1 + 16 // dtype.itemsize).astype(dtype),
        )
        words[8:10], words[20:22], after = (words_of(x.tobytes()) for x in (*numbers, numbers[0] + numbers[1]))
    body = f"st.shared.b64 [%base], {words[20]}; st.shared.b64 [%base+8], {words[21]}; {FENCE}\n{copy}\n"
    body += "ld.global.b64 %out0, [%scratch+64]; ld.global.b64 %out1, [%scratch+72];"
    yield one_thread_case(form, body, [(64, after[0]), (64, after[1])], scratch=words)


def prefetch_cases(form: isa.Form) -> Iterator[Case]:
    policy = ", %policy" if "L2::cache_hint" in form.opcode else ""
    if ".tensor" in form.opcode:
        rank = int(re.search(r"\.([1-5])d\.", form.opcode)[1])
        operands = f"[%map, {{{', '.join(['0'] * rank)}}}]{policy}"
        head, tensor_map = f".reg .b64 %map; {MAP}", _tensor_map(rank)
    else:
        head, operands, tensor_map = "", f"[%scratch], 16{policy}", None
    body = f"{head} {form.opcode} {operands}; mov.b32 %out0, 1;"
    yield one_thread_case(form, body, [(32, 1)], scratch=[0] * (64 + TENSOR_WORDS), tensor_map=tensor_map)


def copy_between_ctas_cases(form: isa.Form) -> Iterator[Case]:
    """Two CTAs copy 16 bytes to each other."""
    words = random_words(form.opcode, 4)
    body = f""".reg .pred %p, %q; .reg .b32 %i, %bar, %to, %other, %far, %far_bar; .reg .b64 %state, %x, %y;
mov.b32 %bar, %base; add.u32 %to, %base, 64; mov.u32 %i, %tid.x; setp.ne.u32 %p, %i, 0;
mov.u32 %other, %cluster_ctarank; setp.eq.u32 %q, %other, 0; xor.b32 %other, %other, 1;
selp.b64 %x, {words[0]}, {words[2]}, %q; selp.b64 %y, {words[1]}, {words[3]}, %q;
@%p bra READY;
st.shared.b64 [%base+32], %x; st.shared.b64 [%base+40], %y; {FENCE}
{INIT.format(1)} mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 16;
READY:
{CLUSTER_BARRIER}
@%p bra SKIP;
mapa.shared::cluster.u32 %far, %to, %other; mapa.shared::cluster.u32 %far_bar, %bar, %other; add.u32 %i, %base, 32;
{form.opcode} [%far], [%i], 16, [%far_bar];
{_wait(0)}
SKIP:
{CLUSTER_BARRIER}
ld.shared.b64 %out0, [%to]; ld.shared.b64 %out1, [%to+8];"""
    outputs: list = [(64, [words[2 + i]] * 32 + [words[i]] * 32) for i in range(2)]
    yield Case(case_name(form), form.opcode, body, [], outputs, threads=64, ctas=2)


def thread_copy_cases(form: isa.Form) -> Iterator[Case]:
    """cp.async: each thread copies from its scratch to its shared memory."""
    opcode, operands = form.opcode, [operand.strip() for operand in form.operands]
    words = random_words(opcode, 64)
    data, size = scratch_bytes(words), 16
    copy = "cp.async.ca.shared.global [%s], [%g], 16;"
    wait = "cp.async.commit_group; cp.async.wait_group 0;"
    if opcode in ("cp.async.wait_all", "cp.async.commit_group"):
        wait = f"{opcode};" + (" cp.async.wait_group 0;" if "commit" in opcode else "")
    elif "mbarrier" in opcode:  # 32 threads arrive when their copies are complete, and then by themselves
        count = 64 if "noinc" in opcode else 32
        wait = f""".reg .b64 %state; .reg .b32 %bar; add.u32 %bar, %base, 2048; setp.eq.u32 %p, %t, 0;
@%p mbarrier.init.shared.b64 [%bar], {count}; bar.sync 0;
{opcode} [%bar]; mbarrier.arrive.shared.b64 %state, [%bar];
WAIT: mbarrier.try_wait.parity.shared.b64 %q, [%bar], 0; @!%q bra WAIT;"""
    elif opcode != "cp.async.wait_group":
        size = 16 if ".cg" in opcode else 8
        policy = ", %policy" if operands[-1] == "u64" else ""
        copied = [size] * 32
        extra = ""
        if operands[3:4] == ["u32"]:
            extra, copied = ", %size", [t % (size + 1) for t in range(32)]
        elif operands[3:4] == ["pred"]:
            extra, copied = ", %p", [0 if t % 2 else size for t in range(32)]
        for t, count in enumerate(copied):
            data[16 * t + count : 16 * t + size] = bytes(size - count)
        copy = f""".reg .b32 %size, %odd; .reg .b64 %policy; mov.b64 %policy, 0x1000000000000000;
rem.u32 %size, %t, {size + 1}; and.b32 %odd, %t, 1; setp.eq.u32 %p, %odd, 1;
{opcode} [%s], [%g], {size}{extra}{policy};"""
    kept = "ld.global.b64 %out1, [%g+8]; st.shared.b64 [%s+8], %out1;\n" if size == 8 else ""
    body = f".reg .pred %p, %q;\n{kept}{copy}\n{wait}\n{FROM_SHARED}"
    after = words_of(data)
    yield Case(case_name(form), opcode, body, [], [(64, after[::2]), (64, after[1::2])], scratch=words)


def wide_move_cases(form: isa.Form) -> Iterator[Case]:
    """Registers of 128 bits: there and back."""
    low, high = random_words(f"{form.opcode} low", 32), random_words(f"{form.opcode} high", 32)
    body = ".reg .b128 %w; mov.b128 %w, {%in0, %in1}; mov.b128 {%out0, %out1}, %w;"
    yield Case(case_name(form), form.opcode, body, [(64, low), (64, high)], [(64, low), (64, high)])


def launch_control_cases(form: isa.Form) -> Iterator[Case]:
    """A launch of one cluster: there is none to cancel, and the first CTA of none is open."""
    opcode = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128"
    opcode = form.opcode if "try_cancel" in form.opcode else opcode
    query = "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %q, %w;"
    if "get_first" in form.opcode:
        result = "{%x0, %x1, %x2, %x3}" if ".v4" in form.opcode else "%x0"
        query += f" {form.opcode} {result}, %w; mov.b32 %out1, %x0;"
    body = f"""{INIT.format(1)} mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], 16;
.reg .b32 %to; .reg .b32 %x<4>; .reg .b64 %low, %high; .reg .b128 %w; add.u32 %to, %base, 64; mov.b32 %out1, 0;
{opcode} [%to], [%bar];
{_wait(0)}
ld.shared.v2.b64 {{%low, %high}}, [%to]; mov.b128 %w, {{%low, %high}};
{query} selp.b32 %out0, 1, 0, %q;"""
    yield one_thread_case(form, body, [(32, 0), (32, None)])


CLUSTER_BARRIER = "barrier.cluster.arrive; barrier.cluster.wait;"


def async_store_cases(form: isa.Form) -> Iterator[Case]:
    """Two CTAs store to each other's shared memory."""
    type_, count = _element(form.opcode)
    bits = int(type_[1:])
    values = [word % (1 << bits) for word in random_words(form.opcode, count)]
    names = [f"%out{i}" for i in range(count)]
    operand = f"{{{', '.join(names)}}}" if count > 1 else names[0]
    body = f"""{" ".join(f"mov.b{bits} {name}, {value};" for name, value in zip(names, values, strict=True))}
.reg .pred %p, %q; .reg .b32 %i, %bar, %to, %other, %far, %far_bar; .reg .b64 %state;
mov.b32 %bar, %base; add.u32 %to, %base, 64; mov.u32 %i, %tid.x; setp.ne.u32 %p, %i, 0;
@%p bra READY;
{INIT.format(1)} mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], {bits // 8 * count};
READY:
{CLUSTER_BARRIER}
@%p bra SKIP;
mov.u32 %other, %cluster_ctarank; xor.b32 %other, %other, 1;
mapa.shared::cluster.u32 %far, %to, %other; mapa.shared::cluster.u32 %far_bar, %bar, %other;
{form.opcode} [%far], {operand}, [%far_bar];
{_wait(0)}
SKIP:
{CLUSTER_BARRIER}
{" ".join(f"ld.shared.b{bits} {name}, [%to+{bits // 8 * i}];" for i, name in enumerate(names))}"""
    outputs: list = [(bits, [value] * 64) for value in values]
    yield Case(case_name(form), form.opcode, body, [], outputs, threads=64, ctas=2)


# Copies by tensor maps: fp32 tensors of up to (12, 3, 3, 2, 2) in boxes of (8, 2, 2, 2, 2), partly outside.

MAP = "mov.b64 %map, ENTRY_data; cvta.param.u64 %map, %map;"
SIZES, BOX = (12, 3, 3, 2, 2), (8, 2, 2, 2, 2)
LOADED_AT, STORED_AT = (8, -1, 2, 0, 1), (8, 1, 2, 0, 1)  # only loads may begin before the tensor
TENSOR_AT = 64  # words of scratch: two for each of 32 threads come before it
TENSOR_WORDS = 216  # 432 numbers


def _pitches(rank: int) -> list[int]:
    """Bytes between elements of each dimension."""
    return [4, *(48 * math.prod(SIZES[1:i]) for i in range(1, rank))]


def _tensor_map(rank: int) -> bytes:
    """See quackish/emulator/tensor_map.py for the format."""
    halves = [0] * 32
    halves[0] = 8 * TENSOR_AT
    halves[2] = 0x240002 | (rank - 1) << 4 | 7 << 7
    for i, pitch in enumerate(_pitches(rank)[1:]):
        halves[3 + i] = pitch // 16
    for i in range(rank):
        halves[8 + i] = SIZES[i] - 1
    halves[13] = (BOX[0] - 1) << 24
    halves[14] = sum((BOX[i] - 1) << 8 * (i - 1) for i in range(1, rank))
    return np.array(halves, np.uint32).tobytes()


def tensor_cases(form: isa.Form) -> Iterator[Case]:
    """One thread copies a box. Multicast: to both CTAs of a cluster."""
    yield _tensor_case(form)
    if ".2d.global" in form.opcode:
        yield _tensor_case(form, whole_warp=True)


def _tensor_case(form: isa.Form, whole_warp: bool = False) -> Case:
    """With whole_warp, 32 threads issue the same copy: one that adds does so 32 times."""
    opcode = form.opcode
    rank = int(re.search(r"\.([1-5])d\.", opcode)[1])
    random = random_of(opcode)
    tensor = random.integers(-1000, 1000, 2 * TENSOR_WORDS).astype(np.float32)
    box = random.integers(-1000, 1000, math.prod(BOX[:rank])).astype(np.float32)
    loads, adds = "mbarrier" in opcode, "reduce" in opcode
    before = words_of(tensor.tobytes())
    start = LOADED_AT if loads else STORED_AT
    pitches = _pitches(rank)
    for index, place in enumerate(itertools.product(*(range(extent) for extent in reversed(BOX[:rank])))):
        at = [first + i for first, i in zip(start, reversed(place), strict=False)]
        inside = all(0 <= x < size for x, size in zip(at, SIZES, strict=False))
        element = sum(x * pitch for x, pitch in zip(at, pitches, strict=True)) // 4
        if loads:
            box[index] = tensor[element] if inside else 0
        elif inside:
            tensor[element] = (tensor[element] + (32 if whole_warp else 1) * box[index]) if adds else box[index]
    coordinates = f"{{{', '.join(map(str, start[:rank]))}}}"
    policy = ", %policy" if "L2::cache_hint" in opcode else ""
    head = f".reg .b64 %map, %policy, %state; .reg .pred %p, %q; .reg .b32 %bar, %to;\n{MAP}\n"
    head += (
        ".reg .b32 %i; mov.u32 %i, %tid.x; setp.ne.u32 %p, %i, 0;\n"
        "mov.b64 %policy, 0x1000000000000000; mov.b32 %bar, %base; add.u32 %to, %base, 1024;\n"
    )
    size = 4 * len(box)
    slot = "mad.lo.u32 %s, %i, 16, %to;\n"
    contents = [*words_of(box.tobytes()), *[0] * 64][:64]
    scratch = [*([0] * 64 if loads else contents), *before]
    if loads:
        multicast = ".multicast::cluster" in opcode
        mask, ctas = (", %mask", 2) if multicast else ("", 1)
        barrier = CLUSTER_BARRIER if multicast else "bar.sync 0;"
        # With .cta_group::2 all signals go to the mbarrier of the first CTA, which has the parity of %bar's CTA.
        expected = (2 * size, 0) if multicast and ".cta_group::2" in opcode else (size, size)
        body = (
            head
            + f"""{slot}.reg .b16 %mask; mov.b16 %mask, 3;
.reg .b32 %rank, %expected; .reg .pred %first; mov.u32 %rank, %cluster_ctarank; setp.eq.u32 %first, %rank, 0;
selp.b32 %expected, {expected[0]}, {expected[1]}, %first;
st.shared.b64 [%s], 0; st.shared.b64 [%s+8], 0; {FENCE}
@%p bra READY;
{INIT.format(1)}
mbarrier.arrive.expect_tx.shared.b64 %state, [%bar], %expected;
READY:
{barrier}
@%p bra SKIP;
@%first {opcode} [%to], [%map, {coordinates}], [%bar]{mask}{policy};
{_wait(0)}
SKIP:
{barrier}
{FROM_SHARED}"""
        )
        outputs: list = [(64, contents[::2] * ctas), (64, contents[1::2] * ctas)]
    else:
        body = (
            head
            + slot
            + TO_SHARED
            + f"""{FENCE} bar.sync 0;
{"" if whole_warp else "@%p bra SKIP;"}
{opcode} [%map, {coordinates}], [%to]{policy};
cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
SKIP:
bar.sync 0;
.reg .b64 %tensor; mad.wide.u32 %tensor, %t, 8, %scratch;
"""
        )
        after = words_of(tensor.tobytes())
        outputs = []
        for i in range(TENSOR_WORDS // 32 + 1):
            words = [after[t + 32 * i] if t + 32 * i < TENSOR_WORDS else 0 for t in range(32)]
            outputs.append((64, words))
            body += f"ld.global.b64 %out{i}, [%tensor+{8 * (TENSOR_AT + 32 * i)}];\n"
        scratch += [0] * 32
        ctas = 1
    name = case_name(form) + (" by a whole warp" if whole_warp else "")
    return Case(name, opcode, body, [], outputs, 32 * ctas, scratch=scratch, tensor_map=_tensor_map(rank), ctas=ctas)


def tensor_prefetch_cases(form: isa.Form) -> Iterator[Case]:
    """Also cvta.param: what it returns is only of use for a tensor map."""
    words = [word & ALL for word in random_words(form.opcode, 32)]
    prefetch = "" if form.opcode.startswith("cvta") else f"{form.opcode} [%map];"
    place = "mov.b64 %map, ENTRY_data;" if ".param.tensormap" in form.opcode else MAP
    body = f".reg .b64 %map; {place} {prefetch} mov.b32 %out0, %in0;"
    yield Case(case_name(form), form.opcode, body, [(32, words)], [(32, words)], tensor_map=_tensor_map(2))


# wgmma on small integers: (-A)(-B) is added to A B, so that the result is 2 A B.


def _shared_layout(matrix: np.ndarray, width: int) -> bytes:
    """K-major without a swizzle: cores of 8 rows of 16 bytes, which are contiguous; two along k, then along rows."""
    rows = np.ascontiguousarray(matrix).view(np.uint8).reshape(len(matrix) // 8, 8, 2, 16)
    return rows.transpose(0, 2, 1, 3).tobytes()


def wgmma_cases(form: isa.Form) -> Iterator[Case]:
    n, k = map(int, re.search(r"m64n(\d+)k(\d+)", form.opcode).groups())
    element = form.opcode.rpartition(".")[2]
    from_registers = form.operands[1].strip().startswith("&")
    random = random_of(form.opcode)
    a, b = (random.integers(-8, 9, (rows, k)).astype(np.float32) for rows in (64, n))
    encoders = {
        "bf16": lambda x: (x.view(np.uint32) >> 16).astype(np.uint16),
        "f16": np.float16,
        "tf32": np.float32,
        "e4m3": lambda x: np.array([_fp8_bits(value, 4) for value in range(-2, 2)], np.uint8)[x.astype(int) + 2],
        "e5m2": lambda x: np.array([_fp8_bits(value, 5) for value in range(-2, 2)], np.uint8)[x.astype(int) + 2],
    }
    encode = encoders[form.opcode.split(".")[-2]]
    if element in ("e4m3", "e5m2"):  # e5m2 lacks odd numbers from 9 on
        a, b = (x % 4 - 2 for x in (a, b))
    data = _shared_layout(encode(a), 1) + _shared_layout(encoders[element](b), 1)
    data += bytes(-len(data) % (8 * 128))
    copies = len(data) // (8 * 128)
    d = 2 * a @ b.T
    inputs: list = []
    if from_registers:
        raw = np.ascontiguousarray(encode(a)).view(np.uint32).reshape(64, 8)
        for i in range(4):
            rows = [16 * (t // 32) + t % 32 // 4 + 8 * (i % 2) for t in range(128)]
            inputs.append((32, [int(raw[row, t % 4 + 4 * (i // 2)]) for t, row in enumerate(rows)]))
    outputs: list = []
    thread = np.arange(128)
    for i in range(n // 2):
        row = 16 * (thread // 32) + 8 * (i // 2 % 2) + thread % 32 // 4
        column = 8 * (i // 4) + 2 * (thread % 4) + i % 2
        outputs.append((32, d[row, column].view(np.uint32).tolist()))
    copy = "".join(
        f"ld.global.b64 %c, [%from+{1024 * i}]; st.shared.b64 [%into+{1024 * i}], %c;\n" for i in range(copies)
    )
    registers = ", ".join(f"%out{i}" for i in range(n // 2))
    zeros = "".join(f"mov.b32 %out{i}, 0x7fc00000;\n" for i in range(n // 2))
    operand_a = "{%in0, %in1, %in2, %in3}" if from_registers else "%da"
    transposes = "" if element not in ("bf16", "f16") else ", 0" if from_registers else ", 0, 0"
    issue = f"{form.opcode} {{{registers}}}, {operand_a}, %db"
    body = f""".reg .b64 %from, %c, %da, %db, %wide; .reg .b32 %into, %first; .reg .pred %no, %yes;
mad.wide.u32 %from, %t, 8, %scratch; mad.lo.u32 %into, %t, 8, %base;
{copy}{FENCE} bar.sync 0;
shr.u32 %first, %base, 4; cvt.u64.u32 %wide, %first; or.b64 %da, %wide, {128 >> 4 << 16 | 256 >> 4 << 32};
add.u64 %db, %da, {64 * 32 >> 4};
setp.ne.u32 %no, %base, %base; setp.eq.u32 %yes, %base, %base;
{zeros}wgmma.fence.sync.aligned;
{issue}, %no, 1, 1{transposes};
{issue}, %yes, -1, -1{transposes};
wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
"""
    yield Case(case_name(form), form.opcode, body, inputs, outputs, 128, scratch=words_of(data), shared_bytes=16384)


# Instructions without a result that a single kernel can see: they must be accepted, and leave registers alone.


def plain_cases(form: isa.Form) -> Iterator[Case]:
    opcode = form.opcode
    words = [word & ALL for word in random_words(opcode, 32)]
    argument = ""
    threads = 32
    if opcode.startswith("prefetch.global"):
        argument = " [%g]"
    elif opcode.startswith("nanosleep"):
        argument = " 20"
    elif opcode.startswith("setmaxnreg"):
        argument, threads = " 40", 128
        words *= 4
    elif opcode.startswith("wgmma.wait_group"):
        argument, threads = " 0", 128
        words *= 4
    elif opcode.startswith("wgmma"):
        threads = 128
        words *= 4
    body = f"{opcode}{argument}; mov.b32 %out0, %in0;"
    yield Case(case_name(form), opcode, body, [(32, words)], [(32, words)], threads)


def control_cases(form: isa.Form) -> Iterator[Case]:
    opcode = form.opcode
    words = [word & ALL for word in random_words(opcode, 32)]
    odd = ".reg .pred %p; .reg .b32 %low; and.b32 %low, %t, 1; setp.ne.u32 %p, %low, 0;\n"
    if opcode.startswith("bra"):
        body = f"{opcode} OVER; mov.b32 %out0, 1; OVER: mov.b32 %out0, %in0;"
        yield Case(case_name(form), opcode, body, [(32, words)], [(32, words)])
        if opcode == "bra":
            body = odd + "mov.b32 %out0, %in0; @%p bra OVER; not.b32 %out0, %in0; OVER:"
            expected = [word if t % 2 else word ^ ALL for t, word in enumerate(words)]
            yield Case(case_name(form) + " divergent", opcode, body, [(32, words)], [(32, expected)])
    else:
        body = f"{odd}mov.b32 %out0, %in0; @%p {opcode};"
        yield Case(
            case_name(form), opcode, body, [(32, words)], [(32, [0 if t % 2 else w for t, w in enumerate(words)])]
        )


# Addresses: what they are is open, so they are used.


def address_cases(form: isa.Form) -> Iterator[Case]:
    opcode = form.opcode
    words = random_words(opcode, 64)
    if opcode == "mapa.shared::cluster.u32":
        body = f"{INIT.format(1)} .reg .b32 %far; {opcode} %far, %bar, 0;\n"
        body += f"mbarrier.arrive.shared::cluster.b64 _, [%far]; {_test(0, 0)}"
        yield one_thread_case(form, body, [(32, 1)])
    elif ".global" in opcode:
        body = f".reg .b64 %a; {opcode} %a, %g; ld.global.b64 %out0, [%a];"
        yield Case(case_name(form), opcode, body, [], [(64, words[::2])], scratch=words)
    elif ".shared" in opcode:  # there and back
        forth = "cvta.shared.u64" if ".to." in opcode else opcode
        back = opcode if ".to." in opcode else "cvta.to.shared.u64"
        body = f"{TO_SHARED}.reg .b64 %a; cvt.u64.u32 %a, %s; {forth} %a, %a; {back} %a, %a;\n"
        body += ".reg .b32 %n; cvt.u32.u64 %n, %a; ld.shared.b64 %out0, [%n];"
        yield Case(case_name(form), opcode, body, [], [(64, words[::2])], scratch=words)


def tcgen05_cases(form: isa.Form) -> Iterator[Case]:
    from tests.emulator import tcgen05_forms as emulator_tcgen05_forms  # which imports this module

    return emulator_tcgen05_forms.cases(form)


def mma_cases(form: isa.Form) -> Iterator[Case]:
    from tests.emulator import mma_forms  # which imports this module

    return mma_forms.cases(form)


def tensor_map_cases(form: isa.Form) -> Iterator[Case]:
    from tests.emulator import tensor_map_forms  # which imports this module

    return tensor_map_forms.cases(form)


FAMILIES: list[tuple[str, Callable[[isa.Form], Iterator[Case]]]] = [
    (r"cvta\.(global|shared|to)|mapa\.", address_cases),
    (r"shf\.", funnel_cases),
    (r"lop3\.", lop3_cases),
    (r"(add|mad)c?(\..*)?\.cc\.|(add|mad)c\.", carry_cases),
    (r"(add|sub|mul|div|fma|sqrt|rcp|rsqrt|neg|abs|min|max|copysign|setp|selp)\..*f64$|cvt\..*f64", f64_cases),
    (r"cvt\.sat\.f32", saturating_cases),
    (r"cvt\..*(e4m3|e5m2)", fp8_cases),
    (r"(ld|st)\.local|st\.param|cvta\.local", local_cases),
    (r"call\.", call_cases),
    (r"(ld|st)(\.v[24])?\.b\d+$", generic_cases),
    (r"(ld|st)\..*(v8|v4\.[bu]64)", wide_access_cases),
    (r"ld\.", load_cases),
    (r"st\.async", async_store_cases),
    (r"st\.", store_cases),
    (r"red\..*\.v[24]\.", vector_red_cases),
    (r"(atom|red)\.", atomic_cases),
    (r"shfl\.", shuffle_cases),
    (r"redux\..*f32", float_redux_cases),
    (r"redux\.", redux_cases),
    (r"vote\.", vote_cases),
    (r"elect\.", elect_cases),
    (r"stmatrix\..*b8", byte_matrix_cases),
    (r"(ld|st)matrix\.", matrix_cases),
    (r"bar(rier)?\.", barrier_cases),
    (r"mbarrier\.", mbarrier_cases),
    (r"cp\.async\.bulk\.prefetch", prefetch_cases),
    (r"cp\.async\.bulk\.shared::cluster\.shared", copy_between_ctas_cases),
    (r"cp\.(reduce\.)?async\.bulk\.tensor\.", tensor_cases),
    (r"prefetch.*\.tensormap", tensor_prefetch_cases),
    (r"cvta\.param", tensor_prefetch_cases),
    (r"tensormap\.|fence\.proxy\.tensormap", tensor_map_cases),
    (r"cp\.(reduce\.)?async\.bulk\.", bulk_cases),
    (r"cp\.async\.", thread_copy_cases),
    (r"clusterlaunchcontrol\.", launch_control_cases),
    (r"mov\.b128", wide_move_cases),
    (r"wgmma\.mma_async\.", wgmma_cases),
    (r"mma\.", mma_cases),
    (r"tcgen05\.", tcgen05_cases),
    (r"(bra|ret|exit)\b", control_cases),
    (r"(fence|membar|nanosleep|griddepcontrol|setmaxnreg|prefetch\.global|wgmma)\b", plain_cases),
]

SM_100 = re.compile(
    r"(add|sub|mul|fma)\..*(f32x2|f32\.bf16|f32\.f16)$|tcgen05\.|clusterlaunchcontrol\.|cp\..*\.cta_group|redux\..*f32|(ld|st)\..*(v8|v4\.[bu]64)|stmatrix.*b8|tensormap.*atomicity"
)
# Some forms differ in nothing but a shape, a number of registers or a hint. These are enough for every run.
MANY = re.compile(r"wgmma\.mma_async|tcgen05\.(ld|st|mma)\.")
ENOUGH = re.compile(
    r"wgmma\..*m64n(8|24|64|128|192|256)k(8|16)\.|wgmma\..*m64n(64|256)k32|tcgen05\.(ld|st)\..*\.x(2|16)\.|tcgen05\.mma\..*(kind::\w+|f16.*lastuse)$"
)


def is_one_of_many(case: Case) -> bool:
    return MANY.match(case.opcode) is not None and not ENOUGH.match(case.opcode)


@functools.cache
def cases_of(form: isa.Form) -> list[Case]:
    matching = [family for pattern, family in FAMILIES if re.match(pattern, form.opcode)]
    family = matching[0] if matching else value_cases if form.kind == "value" else None
    found = list(family(form)) if family else []
    return (
        [dataclasses.replace(case, target="sm_100a") for case in found]
        if SM_100.match(form.opcode) or is_of_three(form)
        else found
    )


@functools.cache
def cases() -> list[Case]:
    found = [case for form in forms() for case in cases_of(form)]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), "two cases have the same name"
    return found
