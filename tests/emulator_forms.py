"""A tiny kernel for each form of instruction that the emulator knows, and what the PTX manual says it computes.

`cases()` are run by tests in the emulator and by scripts/record_ptx_forms.py on a GPU. A kernel loads its operands from
64-bit words, one per thread, executes the instruction, and stores its results in such words.
"""

import dataclasses
import functools
import itertools
import math
import operator
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import exact_arithmetic as exact
from exact_arithmetic import BF16, F16, INF, NAN, bits_of, float_of
from quackish.emulator import isa

PTX_VERSION = "8.6"
SCRATCH = 16  # bytes of global and of shared memory for each thread
REGISTERS = {1: "pred", 16: "b16", 32: "b32", 64: "b64"}


@dataclasses.dataclass(frozen=True)
class Case:
    """`body` uses %in0.., %out0.., %g and %s (this thread's scratch in global and shared memory), %base (all of shared
    memory) and %t (the thread). Expected values are integers, or None where the manual leaves them open.
    """

    name: str
    opcode: str
    body: str
    inputs: list[tuple[int, list[int]]]  # (bits of the register, a value for each thread)
    outputs: list[tuple[int, list[int | None]]]
    threads: int = 32
    target: str = "sm_90a"
    bound: Callable[[int, int, int], bool] | None = None  # (input, expected, a GPU's) -> within the manual's bound
    scratch: list[int] | None = None  # two 64-bit words for each thread
    shared_bytes: int = 4096
    relocated: tuple[int, ...] = ()  # indices of scratch words that are offsets of global scratch, to be addresses
    extra: int = 0  # further 64-bit words of global scratch

    @property
    def words(self) -> np.ndarray:
        """The kernel's memory: operands, then scratch. Registers get the low bits of words with garbage above."""
        garbage = 0xA5A5A5A5A5A5A5A5
        rows = []
        for bits, values in self.inputs:
            if bits == 1:
                rows.append(values)
            else:
                rows.append([value % (1 << bits) | (garbage >> bits << bits) % (1 << 64) for value in values])
        scratch = self.scratch or [0] * (2 * self.threads + self.extra)
        return np.array([*itertools.chain(*rows), *scratch], np.uint64)

    def ptx(self, entry: str) -> str:
        """An entry with parameters `words` and `results`."""
        lines = [f".visible .entry {entry}(.param .u64 {entry}_words, .param .u64 {entry}_results)"]
        lines += [f".maxntid {self.threads}, 1, 1", "{"]
        lines += [f".shared .align 1024 .b8 {entry}_shared[{self.shared_bytes}];"]
        lines += [".reg .b64 %words, %results, %offset, %g;", ".reg .b32 %t, %s, %base, %flag;"]
        for kind, registers in (("in", self.inputs), ("out", self.outputs)):
            lines += [f".reg .{REGISTERS[bits]} %{kind}{i};" for i, (bits, _) in enumerate(registers)]
        lines += ["mov.u32 %t, %tid.x;", "mul.wide.u32 %offset, %t, 8;"]
        lines += [f"ld.param.b64 %words, [{entry}_words];", f"ld.param.b64 %results, [{entry}_results];"]
        lines += ["add.u64 %g, %words, %offset;", "add.u64 %results, %results, %offset;"]
        for i, (bits, _) in enumerate(self.inputs):
            place = f"[%g+{8 * self.threads * i}]"
            if bits == 1:
                lines += [f"ld.global.b32 %flag, {place};", f"setp.ne.b32 %in{i}, %flag, 0;"]
            else:
                lines.append(f"ld.global.b{bits} %in{i}, {place};")
        # scratch: 16 bytes for each thread
        lines += [f"add.u64 %g, %g, {8 * self.threads * len(self.inputs)};", "add.u64 %g, %g, %offset;"]
        lines += [f"mov.u32 %base, {entry}_shared;", f"mad.lo.u32 %s, %t, {SCRATCH}, %base;"]
        lines += ["{", self.body, "}"]
        for i, (bits, _) in enumerate(self.outputs):
            place = f"[%results+{8 * self.threads * i}]"
            if bits == 1:
                lines += [f"selp.b32 %flag, 1, 0, %out{i};", f"st.global.b32 {place}, %flag;"]
            else:
                lines.append(f"st.global.b{bits} {place}, %out{i};")
        return "\n".join([*lines, "ret;", "}", ""])


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
FLOATS += [1 + 2.0**-12, 2.0**24 + 2, 88.7, 127.99, -126.5, -149.5, 0.7, 0.49999997, 65504.0, 65520.0, 2.0**31, -(2.0**31)]
FLOATS += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 3.4e38, 2.0**-24 * 1.5, 2.0**-133, 2.0**63, 6.0]


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
    if kind == "f32x2":
        values = pool("f32")
        return [low | high << 32 for low, high in zip(values, values[7:] + values[:7], strict=True)]
    return [value % (1 << int(kind[1:])) for value in INTEGERS]


def chosen(name: str, kinds: list[str], threads: int) -> list[list[int]]:
    """Operands for each thread: all values of one operand, all pairs as far as there are threads."""
    pools, random = [pool(kind) for kind in kinds], random_of(name)
    if len(pools) == 1:
        return [[pools[0][i % len(pools[0])] for i in range(threads)]]
    return [[values[i] for i in random.integers(0, len(values), threads)] for values in pools]


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
    """"If either operand is NaN, the result is False", and for unordered ones True."""
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


FLOAT_OPERATIONS = {
    "add": exact.add, "sub": lambda a, b, rounding="rn": exact.add(a, -b, rounding), "mul": exact.mul, "fma": exact.fma,
}  # fmt: skip


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
    """"Outside of the range [-100pi .. +100pi], only best effort is provided." """
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

    if operation in FLOAT_OPERATIONS:
        function = FLOAT_OPERATIONS[operation]
        return of_floats(lambda *operands: function(*operands, rounding=rounding))
    if operation in ("min", "max"):
        choose = {"min": min, "max": max}[operation]
        return of_floats(lambda a, b: _minimum(a, b, choose, nan))
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


def _pairwise(meaning: Meaning) -> Meaning:
    def both(*operands):
        low = meaning(*(operand & 0xFFFFFFFF for operand in operands))
        return low | meaning(*(operand >> 32 for operand in operands)) << 32

    return both


def _mixed_meaning(parts: list[str]) -> Meaning:
    """add, sub, fma of .f32.bf16 or .f32.f16: the last operand is fp32."""
    form = {"bf16": BF16, "f16": F16}[parts[-1]]
    function = FLOAT_OPERATIONS[parts[0]]

    def meaning(*operands):
        return bits_of(function(*(sixteen_value(form, operand) for operand in operands[:-1]), float_of(operands[-1])))

    return meaning


def _to_integer(rounding: str, type_: str) -> Meaning:
    bits, _ = _typed(type_)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if type_[0] == "s" else (0, (1 << bits) - 1)
    integral = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[rounding]

    def meaning(a):
        value = float_of(a)
        if math.isnan(value):
            return 0 if bits < 64 else 1 << 63
        if math.isinf(value):
            return high if value > 0 else low
        return min(max(integral(value), low), high)

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
        return _to_integer(parts[1], to)
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
        return _pairwise(_float_meaning([*parts[:-1], "f32"]))
    if type_ in ("bf16", "f16"):
        form, choose = {"bf16": BF16, "f16": F16}[type_], {"min": min, "max": max}[operation]
        return lambda a, b: sixteen_bits(
            form, _minimum(sixteen_value(form, a), sixteen_value(form, b), choose, "NaN" in parts)
        )
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
    if parts[-1] == "f32x2":
        return ["f32x2"] * len(types)
    if parts[-1] in ("bf16", "f16"):
        return [parts[-1] if type_ == "u16" else type_ for type_ in types]
    return [type_.removeprefix("~") for type_ in types]


SM_100 = re.compile(r"(add|sub|mul|fma)\..*(f32x2|f32\.bf16|f32\.f16)$")


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
        "sm_100a" if SM_100.match(form.opcode) else "sm_90a",
        bound,
    )


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
