"""Reads and writes the operands of an entry's instructions, for the threads that execute them."""

import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from quackish.emulator import isa, late_loads
from quackish.emulator.errors import PtxError
from quackish.emulator.memory import CONSTANT_WINDOW, RANK_SHIFT, SYSTEM_SHARED_BYTES
from quackish.emulator.ptx import (
    Address,
    Entry,
    Immediate,
    Instruction,
    Not,
    Pair,
    Register,
    Sink,
    Special,
    Symbol,
    Variable,
    Vector,
)
from quackish.emulator.threads import U128, VIEW_OF_TYPE, Lanes

Reader = Callable[[Lanes], Any]


def refuse(entry: Entry, instruction: Instruction, why: str) -> NoReturn:
    """Raises PtxError about an instruction."""
    raise PtxError(
        f"{why}: {instruction.opcode}\n  {instruction.text[:200]}\n  PTX line {instruction.line}, "
        f"{instruction.source or 'no source line'}, kernel {entry.title}"
    )


# Types. A signature's type names a view of registers.


def _view(type_: str) -> str:
    """The name of the view in which values of a PTX type are computed."""
    if type_ in ("bf16", "f16"):
        return "u16"
    if type_ in ("bf16x2", "f16x2"):
        return "u32"
    if type_ == "f32x2":
        return "u64"
    return "u" + type_[1:] if type_[0] == "b" else type_


def width_of(type_: str) -> str:
    """The width of registers that hold a type: pred, or b16 and wider."""
    return "pred" if type_ == "pred" else f"b{max(bits_of(type_), 16)}"


def bits_of(type_: str) -> int:
    return int(_view(type_)[1:])


_DTYPES: dict[str, Any] = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "u128": U128,
}  # fmt: skip


def dtype_of(type_: str) -> Any:
    """The numpy type in which values of a PTX type are computed."""
    return _DTYPES["pred" if type_ == "pred" else _view(type_)]


class Operands:
    """The registers and symbols of an entry, and functions that read and write them."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.rows: dict[str, int] = {}  # register -> its row among those of its width
        self.register_counts: dict[str, int] = {}
        for name in self._registers_in_use():
            width = entry.registers[name]
            self.rows[name] = self.register_counts.get(width, 0)
            self.register_counts[width] = self.rows[name] + 1
        self.symbols, self.static_shared_bytes = _layout(entry.shared)
        self.local_symbols, self.local_bytes = _layout(entry.local)
        self.loaded_late: set[str] = set()  # registers that late loads write, or moves of these; set by `decode`

    def _registers_in_use(self) -> dict[str, None]:
        """The names of registers in instructions, in the order of their rows."""
        used: dict[str, None] = {}

        def visit(operand):
            if isinstance(operand, Register):
                used[operand.name] = None
            elif isinstance(operand, tuple):
                for part in operand:
                    visit(part)

        # Long vectors first: their registers then have consecutive rows.
        for instruction in self.entry.instructions:
            for operand in instruction.operands:
                if isinstance(operand, Vector) and len(operand.items) > 4:
                    visit(operand)
        for instruction in self.entry.instructions:
            visit(instruction.predicate)
            visit(instruction.operands)
        return used

    def key(self, register: str) -> late_loads.Register:
        """A register as `late_loads` knows it."""
        return self.entry.registers[register], self.rows[register]

    def _finishing_loads(self, register: Register, access: Callable) -> Callable:
        """Wraps an access of a register: late loads that write it finish first."""
        if register.name not in self.loaded_late:
            return access
        key = self.key(register.name)

        def finishing(lanes, *values):
            if lanes.cta.pending_loads:
                late_loads.finish(lanes, key)
            return access(lanes, *values)

        return finishing

    # Readers

    def readers(self, instruction: Instruction, form: isa.Form) -> list[Reader]:
        """Readers of all operands for an action or a control instruction."""
        pairs = zip(form.operands, instruction.operands[len(form.results) :], strict=True)
        return [self.executing_reader(declared.strip(), operand, instruction) for declared, operand in pairs]

    def executing_reader(self, declared: str, operand: Any, instruction: Instruction) -> Reader:
        """A reader of values of the executing threads alone."""
        if declared.startswith("&"):
            indices = tuple(self.rows[register.name] for register in operand.items)
            return lambda lanes: indices
        if declared == "immediate":
            value = operand.bits
            return lambda lanes: value
        if declared == "symbol":
            return lambda lanes: operand.name
        if declared.startswith("{"):
            type_ = declared[1:-1].partition("*")[0]
            parts = [self.executing_reader(type_, item, instruction) for item in operand.items]
            return lambda lanes: [part(lanes) for part in parts]
        if declared.startswith("[") and ";" in declared:
            base = self.executing_reader(declared[1:-1].partition(";")[0], operand.base, instruction)
            coordinates = [self.executing_reader("s32", item, instruction) for item in operand.coordinates]
            return lambda lanes: (base(lanes), [coordinate(lanes) for coordinate in coordinates])
        read = self.reader(declared, operand, instruction)
        return lambda lanes: lanes.active(read(lanes))

    def reader(self, declared: str, operand: Any, instruction: Instruction) -> Reader:
        """A reader of values over the span of the lanes, or of one value for all."""
        type_ = declared.removeprefix("~")
        if isinstance(operand, Address):
            return self._address_reader(type_[1:-1], operand, instruction)
        if isinstance(operand, Not):
            read = self.reader(type_, operand.operand, instruction)
            return lambda lanes: ~read(lanes)
        if isinstance(operand, Register):
            return self._register_reader(type_, operand)
        if isinstance(operand, Special):
            return self._special_reader(type_, operand, instruction)
        if isinstance(operand, Symbol):
            return self._symbol_reader(type_, operand, instruction)
        if isinstance(operand, Immediate):
            value = immediate(type_, operand)
            return lambda lanes: value
        refuse(self.entry, instruction, f"operand {operand}")

    def _register_reader(self, type_: str, register: Register) -> Reader:
        return self._finishing_loads(register, self._plain_register_reader(type_, register))

    def _plain_register_reader(self, type_: str, register: Register) -> Reader:
        width = self.entry.registers[register.name]
        if width == width_of(type_) and _bits_or_0(type_) != 8:
            view, row = self._row(type_, register)
            return lambda lanes: lanes.rows[view][row]
        view, row = VIEW_OF_TYPE["u" + width[1:]], self.rows[register.name]
        unsigned, dtype = _DTYPES[f"u{bits_of(type_)}"], dtype_of(type_)
        return lambda lanes: lanes.rows[view][row].astype(unsigned).view(dtype)

    def _special_reader(self, type_: str, special: Special, instruction: Instruction) -> Reader:
        name, dtype = special.name, dtype_of(type_)
        if not re.fullmatch(
            r"%(tid|ntid|ctaid|nctaid|(n?cluster|cluster_(n?cta))id)\.[xyz]|%laneid|%n?warpid|%cluster_n?ctarank"
            r"|%lanemask_(eq|le|lt|ge|gt)|%dynamic_smem_size",
            name,
        ):
            refuse(self.entry, instruction, f"special register {name}")

        def read(lanes):
            values = lanes.cta.special[name]
            return (values[lanes.span] if values.ndim else values).astype(dtype)

        return read

    def _symbol_reader(self, type_: str, symbol: Symbol, instruction: Instruction) -> Reader:
        """A reader of a parameter's or a thread's variable's offset, or of a shared variable's address."""
        dtype = dtype_of(type_)
        if symbol.name in self.entry.parameters:
            value = dtype(self.entry.parameters[symbol.name].offset + symbol.offset)
            return lambda lanes: value
        if symbol.name in self.local_symbols:
            return lambda lanes: dtype(self.local_symbols[symbol.name] + symbol.offset)
        if symbol.name in self.entry.constants:
            place = list(self.entry.constants).index(symbol.name)
            return lambda lanes: dtype(CONSTANT_WINDOW + (place << 32) + symbol.offset)
        if symbol.name not in self.symbols:
            refuse(self.entry, instruction, f"unknown symbol {symbol.name}")
        offset = SYSTEM_SHARED_BYTES + self.symbols[symbol.name] + symbol.offset
        return lambda lanes: dtype((lanes.cta.rank << RANK_SHIFT) + offset)

    def _address_reader(self, type_: str, address: Address, instruction: Instruction) -> Reader:
        read = self.reader(type_, address.base, instruction)
        if not address.offset:
            return read
        dtype = dtype_of(type_)
        offset = dtype(address.offset % (1 << bits_of(type_)))
        return lambda lanes: read(lanes) + offset

    def _row(self, type_: str, register: Register) -> tuple[int, int]:
        """Returns (view, row) of a register seen as a type of its width."""
        return VIEW_OF_TYPE["pred" if type_ == "pred" else _view(type_)], self.rows[register.name]

    # Writers

    def results(self, instruction: Instruction, form: isa.Form) -> list[tuple[str, Any]]:
        """Returns (type, operand) for each result; pairs and vectors are taken apart."""
        results: list[tuple[str, Any]] = []
        for declared, operand in zip(form.results, instruction.operands, strict=False):
            declared = declared.strip()
            if declared.startswith("{"):
                type_ = declared[1:-1].partition("*")[0]
                results += [(type_, item) for item in operand.items]
            elif "|" in declared:
                first, second = declared.split("|")
                pair = (operand.first, operand.second) if isinstance(operand, Pair) else (operand, Sink())
                results += [(first, pair[0]), (second, pair[1])]
            else:
                results.append((declared, operand))
        return results

    def writer(self, declared: str, operand: Any, instruction: Instruction) -> Callable[[Lanes, Any], None]:
        """A writer that takes values of the executing threads alone."""
        if isinstance(operand, Sink):
            return lambda lanes, values: None
        view, row, convert = self._destination(declared, operand, instruction)

        def write(lanes, values):
            if lanes.where is None:
                lanes.rows[view][row] = convert(values)
            else:
                lanes.rows[view][row][lanes.where] = convert(values)

        return self._finishing_loads(operand, write)

    def span_writer(self, declared: str, operand: Any, instruction: Instruction) -> Callable[[Lanes, Any], None]:
        """A writer that takes values over the span, and stores those of the executing threads."""
        if isinstance(operand, Sink):
            return lambda lanes, values: None
        view, row, convert = self._destination(declared, operand, instruction)
        copyto = np.copyto

        def write(lanes, values):
            where = lanes.where
            if where is None:
                lanes.rows[view][row] = convert(values)
            else:
                copyto(lanes.rows[view][row], convert(values), where=where)

        def write_unconverted(lanes, values):
            where = lanes.where
            if where is None:
                lanes.rows[view][row] = values
            else:
                copyto(lanes.rows[view][row], values, casting="unsafe", where=where)

        return self._finishing_loads(operand, write_unconverted if convert is _unconverted else write)

    def _destination(self, declared: str, operand: Any, instruction: Instruction):
        """Returns (view, row, conversion) of a register that gets values of a type, perhaps a narrower one."""
        if not isinstance(operand, Register):
            refuse(self.entry, instruction, f"{operand} cannot be a result")
        type_ = declared.removeprefix("~")
        width = self.entry.registers[operand.name]
        if width == width_of(type_) and _bits_or_0(type_) != 8:
            return *self._row(type_, operand), _unconverted
        # A wider register gets signed values sign-extended, others zero-extended. (PTX, Operand Size Exceeding
        # Instruction-Type Size)
        kind = "s" if type_[0] == "s" else "u"
        dtype = dtype_of(f"{kind}{bits_of(type_)}")
        wide = _DTYPES[f"{kind}{width[1:]}"]
        return (
            VIEW_OF_TYPE[kind + width[1:]],
            self.rows[operand.name],
            lambda values: np.asarray(values).view(dtype).astype(wide),
        )


def registers_in(operands: Any) -> set[str]:
    """The names of the registers among operands and in their parts."""
    if isinstance(operands, Register):
        return {operands.name}
    return set().union(*map(registers_in, operands)) if isinstance(operands, tuple) else set()


def _unconverted(values):
    return values


def _bits_or_0(type_: str) -> int:
    return 0 if type_ == "pred" else bits_of(type_)


def immediate(type_: str, operand: Immediate) -> Any:
    """The value of an immediate used as a type."""
    if type_ == "pred":
        return np.bool_(operand.bits != 0)
    dtype = dtype_of(type_)
    unsigned = _DTYPES[f"u{bits_of(type_)}"]
    if operand.kind == "integer" or (operand.kind == "f32" and bits_of(type_) == 32):
        return unsigned(operand.bits % (1 << bits_of(type_))).view(dtype)
    if operand.kind == "f64" and bits_of(type_) == 64:
        return unsigned(operand.bits).view(dtype)
    raise PtxError(f"an immediate of type {operand.kind} where {type_} is expected")


def _layout(variables: dict[str, Variable]) -> tuple[dict[str, int], int]:
    """Offsets of variables, and the bytes that they take. Dynamic shared memory, of size 0, comes after the others."""
    offsets, size = {}, 0
    for name, symbol in variables.items():
        if symbol.size:
            size = -(-size // symbol.align) * symbol.align
            offsets[name] = size
            size += symbol.size
    for name, symbol in variables.items():
        if not symbol.size:
            offsets[name] = -(-size // symbol.align) * symbol.align
    return offsets, size
