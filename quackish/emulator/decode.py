"""Turns the instructions of an entry into blocks of Python functions over the threads that execute them."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator import isa, late_loads
from quackish.emulator.errors import PtxError
from quackish.emulator.memory import RANK_SHIFT, SYSTEM_SHARED_BYTES
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
    Vector,
)
from quackish.emulator.threads import U128, VIEW_OF_TYPE, Lanes
from quackish.emulator.wgmma_registers import bits_of_registers, registers_of

Step = Callable[[Lanes], None]
Reader = Callable[[Lanes], Any]

_CONVERGENCE = {"": 0, "members": 1, "warp": 2, "warp group": 3}


class Block(NamedTuple):
    """Instructions without a branch between them. All but the last are steps."""

    steps: list[Step]
    end: Callable[[Lanes], int | None]  # the next block, or None if the threads have been put somewhere else
    instructions: list[Instruction]  # one for each step, and the end's if it has one
    converged: str  # see isa.Form
    members: Reader | None  # for "members": the mask of each thread
    chosen: Reader | None  # of the first instruction, if it is predicated: the other threads need not converge
    polls: bool

    @property
    def size(self) -> int:
        return len(self.instructions)


class Program(NamedTuple):
    """An entry, ready to run."""

    entry: Entry
    blocks: list[Block]
    register_counts: dict[str, int]
    static_shared_bytes: int
    symbols: dict[str, int]  # offsets of shared symbols
    wgmma_bits: dict[int, int]  # row of a 32-bit register that wgmma uses -> its bit

    def location(self, block: int, index: int) -> str:
        instruction = self.blocks[block].instructions[index]
        return f"PTX line {instruction.line}, {instruction.source or 'no source line'}: {instruction.text[:120]}"

    def location_of_end(self, block: int) -> str:
        return self.location(block, -1) if self.blocks[block].instructions else ""


def decode(entry: Entry) -> Program:
    return _Decoder(entry).program()


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


def _width(type_: str) -> str:
    return "pred" if type_ == "pred" else f"b{max(_bits(type_), 16)}"


def _bits(type_: str) -> int:
    return int(_view(type_)[1:])


_DTYPES: dict[str, Any] = {
    "pred": np.bool_, "u8": np.uint8, "s8": np.int8, "u16": np.uint16, "s16": np.int16, "u32": np.uint32,
    "s32": np.int32, "f32": np.float32, "u64": np.uint64, "s64": np.int64, "f64": np.float64, "u128": U128,
}  # fmt: skip


def dtype_of(type_: str) -> Any:
    return _DTYPES["pred" if type_ == "pred" else _view(type_)]


class _Decoder:
    def __init__(self, entry: Entry):
        self.entry = entry
        self.table = isa.load()
        self.rows: dict[str, int] = {}  # register -> its row among those of its width
        self.register_counts: dict[str, int] = {}
        for name in self._registers_in_use():
            width = entry.registers[name]
            self.rows[name] = self.register_counts.get(width, 0)
            self.register_counts[width] = self.rows[name] + 1
        self.symbols, self.static_shared_bytes = _layout(entry)
        self.wgmma_bits = bits_of_registers(entry)
        self.block_of_label: dict[str, int] = {}
        self.loaded_late: set[str] = set()  # registers that instructions write which do not wait for their data

    def _registers_in_use(self) -> dict[str, None]:
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

    # Blocks

    def program(self) -> Program:
        forms = [self._form(instruction) for instruction in self.entry.instructions]
        self.loaded_late = self._loaded_late(forms)
        starts = self._starts(forms)
        for label, index in self.entry.labels.items():
            self.block_of_label[label] = starts.index(index) if index < len(forms) else len(starts)
        ends = [*starts[1:], len(forms)]
        blocks = [
            self._block(i, begin, forms[begin:end]) for i, (begin, end) in enumerate(zip(starts, ends, strict=True))
        ]
        # An entry that ends without `ret` exits.
        blocks.append(Block([], lambda lanes: lanes.cta.exit(lanes.mask), [], "", None, None, False))
        return Program(
            self.entry, blocks, self.register_counts, self.static_shared_bytes, self.symbols, self._bits_of_rows()
        )

    def _bits_of_rows(self) -> dict[int, int]:
        return {self.rows[name]: bit for name, bit in self.wgmma_bits.items()}

    def _loaded_late(self, forms: list[isa.Form]) -> set[str]:
        """Registers that late loads write, and those that they are moved to."""
        found: set[str] = set()
        moves = []
        for instruction, form in zip(self.entry.instructions, forms, strict=True):
            if form.loads_late:
                found |= _registers(instruction.operands[: len(form.operands) - 1])
            elif _is_move(instruction):
                moves.append((_registers(instruction.operands[:1]), _registers(instruction.operands[1:])))
        while more := {name for targets, sources in moves if sources & found for name in targets - found}:
            found |= more
        return found

    def _starts(self, forms: list[isa.Form]) -> list[int]:
        """The indices of instructions that begin a block."""
        targets = set(self.entry.labels.values())
        starts, converged = [], 0
        for index, form in enumerate(forms):
            needed = _CONVERGENCE[self._converged(self.entry.instructions[index], form)]
            begins = index == 0 or index in targets or forms[index - 1].kind == "control"
            if begins or form.repeats or needed == 1 or needed > converged:
                starts.append(index)
                converged = 0 if needed == 1 else needed
        return starts

    def _block(self, number: int, begin: int, forms: list[isa.Form]) -> Block:
        instructions = self.entry.instructions[begin : begin + len(forms)]
        steps = [
            self._step(instruction, form)
            for instruction, form in zip(instructions, forms, strict=True)
            if form.kind != "control"
        ]
        following = number + 1
        end = (
            self._end(instructions[-1], forms[-1], following)
            if forms[-1].kind == "control"
            else lambda lanes: following
        )
        first = instructions[0]
        converged = self._converged(first, forms[0])
        members = self._reader("b32", first.operands[-1], first) if converged == "members" else None
        chosen = self._reader("pred", self._predicate(first), first) if first.predicate is not None else None
        return Block(steps, end, instructions, converged, members, chosen, any(form.polls for form in forms))

    def _converged(self, instruction: Instruction, form: isa.Form) -> str:
        if form.converged == "members" and instruction.predicate is None:
            members = instruction.operands[-1]
            if isinstance(members, Immediate) and members.bits % (1 << 32) == (1 << 32) - 1:
                return "warp"
        return form.converged

    def _end(self, instruction: Instruction, form: isa.Form, following: int) -> Callable[[Lanes], int | None]:
        if form.opcode in ("bra", "bra.uni") and instruction.predicate is not None:
            return self._branch(instruction, following)
        execute = self._control(instruction, form, following)
        if instruction.predicate is None:
            return execute
        chosen = self._reader("pred", self._predicate(instruction), instruction)

        def end(lanes):
            mask = lanes.subset_mask(chosen(lanes))
            if mask == lanes.mask:
                return execute(lanes)
            lanes.cta.add(following, lanes.mask & ~mask)
            if mask and (next_block := execute(lanes.cta.lanes(mask))) is not None:
                lanes.cta.add(next_block, mask)
            return None

        return end

    def _branch(self, instruction: Instruction, following: int) -> Callable[[Lanes], int | None]:
        target = self.block_of_label[instruction.operands[0].name]
        taken = self._reader("pred", self._predicate(instruction), instruction)

        def branch(lanes):
            mask = lanes.subset_mask(taken(lanes))
            if mask == lanes.mask:
                return target
            if not mask:
                return following
            lanes.cta.add(target, mask)
            lanes.cta.add(following, lanes.mask & ~mask)
            return None

        return branch

    def _control(self, instruction: Instruction, form: isa.Form, following: int) -> Callable[[Lanes], int | None]:
        if form.operands == ("symbol",):
            target = self.block_of_label[instruction.operands[0].name]
            return lambda lanes: target
        function = form.function
        readers = self._operand_readers(instruction, form)
        writers = [self._writer(*pair, instruction) for pair in self._results(instruction, form)]

        def execute(lanes):
            return function(lanes, following, writers, *[read(lanes) for read in readers])

        return execute

    # Instructions

    def _form(self, instruction: Instruction) -> isa.Form:
        forms = self.table.get(instruction.opcode)
        if forms is None:
            self._refuse(instruction, "unknown instruction")
        for form in forms:
            if self._fits(instruction, form):
                return form
        known = "; ".join(f"{', '.join(form.results)} = {', '.join(form.operands)}" for form in forms)
        self._refuse(instruction, f"operands fit none of the known forms ({known})")
        raise AssertionError

    def _refuse(self, instruction: Instruction, why: str) -> None:
        raise PtxError(
            f"{why}: {instruction.opcode}\n  {instruction.text[:200]}\n  PTX line {instruction.line}, "
            f"{instruction.source or 'no source line'}, kernel {self.entry.title}"
        )

    def _fits(self, instruction: Instruction, form: isa.Form) -> bool:
        declared = [*form.results, *form.operands]
        if len(declared) != len(instruction.operands):
            return False
        return all(map(self._operand_fits, declared, instruction.operands))

    def _operand_fits(self, declared: str, operand: Any) -> bool:
        declared = declared.strip().removeprefix("&")
        if declared.startswith("{"):
            count = int(declared[1:-1].partition("*")[2] or 1)
            return isinstance(operand, Vector) and len(operand.items) == count
        if declared.startswith("["):
            count = int(declared[1:-1].partition(";")[2] or 0)
            return isinstance(operand, Address) and len(operand.coordinates) == count
        if declared == "immediate":
            return isinstance(operand, Immediate) and operand.kind == "integer"
        if declared == "symbol":
            return isinstance(operand, Symbol)
        first, pair, second = declared.partition("|")
        if isinstance(operand, Pair):
            return bool(pair) and self._value_fits(first, operand.first) and self._value_fits(second, operand.second)
        return self._value_fits(first, operand)

    def _value_fits(self, declared: str, operand: Any) -> bool:
        if isinstance(operand, Not):
            return declared == "pred" and self._value_fits(declared, operand.operand)
        if isinstance(operand, Register):
            width, wanted = self.entry.registers[operand.name], declared.removeprefix("~")
            if width == _width(wanted):
                return True
            narrower = declared.startswith("~") and "pred" not in (width, wanted)
            return narrower and int(width[1:]) >= _bits(wanted)
        return isinstance(operand, (Immediate, Special, Symbol, Sink))

    def _predicate(self, instruction: Instruction) -> Any:
        assert instruction.predicate is not None
        return Not(instruction.predicate) if instruction.negated else instruction.predicate

    def _step(self, instruction: Instruction, form: isa.Form) -> Step:
        step = self._value_step(instruction, form) if form.kind == "value" else self._action_step(instruction, form)
        if bits := self._wgmma_bits_of(instruction):
            step = _touching(step, bits, _is_move(instruction))
        if instruction.predicate is None:
            return self._deferred_move(instruction, step) if _is_move(instruction) else step
        chosen = self._reader("pred", self._predicate(instruction), instruction)

        def predicated(lanes):
            mask = lanes.subset_mask(chosen(lanes))
            if mask == lanes.mask:
                step(lanes)
            elif mask:
                grid, chosen_lanes = lanes.cta.grid, lanes.cta.lanes(mask)
                grid.executing = chosen_lanes
                step(chosen_lanes)
                grid.executing = lanes

        return predicated

    def _deferred_move(self, instruction: Instruction, step: Step) -> Step:
        """The step, which happens after the load of its sources if that is late."""
        sources = _registers(instruction.operands[1:])
        if not sources or not sources <= self.loaded_late:
            return step
        source_keys, target_keys = (
            {self._key(name) for name in names} for names in (sources, _registers(instruction.operands[:1]))
        )

        def move(lanes):
            if not (lanes.cta.pending_loads and late_loads.defer(lanes, source_keys, target_keys, step)):
                step(lanes)

        return move

    def _key(self, register: str) -> late_loads.Register:
        return self.entry.registers[register], self.rows[register]

    def _finishing_loads(self, register: Register, access: Callable) -> Callable:
        """An access of a register, after the late loads that write it."""
        if register.name not in self.loaded_late:
            return access
        key = self._key(register.name)

        def finishing(lanes, *values):
            if lanes.cta.pending_loads:
                late_loads.finish(lanes, key)
            return access(lanes, *values)

        return finishing

    def _wgmma_bits_of(self, instruction: Instruction) -> int:
        """The registers of `wgmma` that another instruction accesses."""
        if not self.wgmma_bits or instruction.opcode.startswith("wgmma.mma_async"):
            return 0
        bits = 0
        for name in registers_of(instruction.operands):
            bits |= self.wgmma_bits.get(name, 0)
        return bits

    def _operand_readers(self, instruction: Instruction, form: isa.Form) -> list[Reader]:
        readers = []
        for declared, operand in zip(form.operands, instruction.operands[len(form.results) :], strict=True):
            read = self._operand_reader(declared.strip(), operand, instruction)
            readers.append(read)
        return readers

    def _operand_reader(self, declared: str, operand: Any, instruction: Instruction) -> Reader:
        """A reader for actions and control instructions: values of the executing threads alone."""
        if declared.startswith("&"):
            indices = tuple(self.rows[register.name] for register in operand.items)
            return lambda lanes: indices
        if declared == "immediate":
            value = operand.bits
            return lambda lanes: value
        if declared.startswith("{"):
            type_ = declared[1:-1].partition("*")[0]
            parts = [self._operand_reader(type_, item, instruction) for item in operand.items]
            return lambda lanes: [part(lanes) for part in parts]
        if declared.startswith("[") and ";" in declared:
            base = self._operand_reader(declared[1:-1].partition(";")[0], operand.base, instruction)
            coordinates = [self._operand_reader("s32", item, instruction) for item in operand.coordinates]
            return lambda lanes: (base(lanes), [coordinate(lanes) for coordinate in coordinates])
        read = self._reader(declared, operand, instruction)
        return lambda lanes: lanes.active(read(lanes))

    def _results(self, instruction: Instruction, form: isa.Form) -> list[tuple[str, Any]]:
        """(type, operand) of each result, pairs and vectors taken apart."""
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

    def _action_step(self, instruction: Instruction, form: isa.Form) -> Step:
        function = form.function
        readers = self._operand_readers(instruction, form)
        writers = [self._writer(*pair, instruction) for pair in self._results(instruction, form)]
        if not writers:
            return lambda lanes: function(lanes, *[read(lanes) for read in readers])
        if len(writers) == 1:
            (write,) = writers
            return lambda lanes: write(lanes, function(lanes, *[read(lanes) for read in readers]))

        def act(lanes):
            for write, value in zip(writers, function(lanes, *[read(lanes) for read in readers]), strict=True):
                write(lanes, value)

        return act

    def _value_step(self, instruction: Instruction, form: isa.Form) -> Step:
        function = form.function
        readers = []
        for declared, operand in zip(form.operands, instruction.operands[len(form.results) :], strict=True):
            declared = declared.strip()
            if declared.startswith("{"):
                readers += [self._reader(declared[1:-1].partition("*")[0], item, instruction) for item in operand.items]
            elif declared == "immediate":
                readers.append(self._operand_reader(declared, operand, instruction))
            else:
                readers.append(self._reader(declared, operand, instruction))
        results = self._results(instruction, form)
        if len(results) > 1:
            puts = [self._span_writer(*pair, instruction) for pair in results]

            def several(lanes):
                for put, value in zip(puts, function(*[read(lanes) for read in readers]), strict=True):
                    put(lanes, value)

            return several
        put = self._span_writer(*results[0], instruction)
        if len(readers) == 1:
            (first,) = readers
            return lambda lanes: put(lanes, function(first(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: put(lanes, function(first(lanes), second(lanes)))
        return lambda lanes: put(lanes, function(*[read(lanes) for read in readers]))

    # Operands

    def _row(self, type_: str, register: Register, instruction: Instruction) -> tuple[int, int]:
        """(view, row) of a register seen as a type of its width."""
        return VIEW_OF_TYPE["pred" if type_ == "pred" else _view(type_)], self.rows[register.name]

    def _reader(self, declared: str, operand: Any, instruction: Instruction) -> Reader:
        """Values over the span of the lanes, or one value for all."""
        type_ = declared.removeprefix("~")
        if isinstance(operand, Address):
            return self._address_reader(type_[1:-1], operand, instruction)
        if isinstance(operand, Not):
            read = self._reader(type_, operand.operand, instruction)
            return lambda lanes: ~read(lanes)
        if isinstance(operand, Register):
            return self._register_reader(type_, operand, instruction)
        if isinstance(operand, Special):
            return self._special_reader(type_, operand, instruction)
        if isinstance(operand, Symbol):
            return self._symbol_reader(type_, operand, instruction)
        if isinstance(operand, Immediate):
            value = immediate(type_, operand)
            return lambda lanes: value
        self._refuse(instruction, f"operand {operand}")
        raise AssertionError

    def _register_reader(self, type_: str, register: Register, instruction: Instruction) -> Reader:
        return self._finishing_loads(register, self._plain_register_reader(type_, register, instruction))

    def _plain_register_reader(self, type_: str, register: Register, instruction: Instruction) -> Reader:
        width = self.entry.registers[register.name]
        if width == _width(type_) and _bits_or_0(type_) != 8:
            view, row = self._row(type_, register, instruction)
            return lambda lanes: lanes.rows[view][row]
        view, row = VIEW_OF_TYPE["u" + width[1:]], self.rows[register.name]
        unsigned, dtype = _DTYPES[f"u{_bits(type_)}"], dtype_of(type_)
        return lambda lanes: lanes.rows[view][row].astype(unsigned).view(dtype)

    def _special_reader(self, type_: str, special: Special, instruction: Instruction) -> Reader:
        name, dtype = special.name, dtype_of(type_)
        if not re.fullmatch(
            r"%(tid|ntid|ctaid|nctaid|(n?cluster|cluster_(n?cta))id)\.[xyz]|%laneid|%warpid|%lanemask_lt|%cluster_n?ctarank",
            name,
        ):
            self._refuse(instruction, f"special register {name}")

        def read(lanes):
            values = lanes.cta.special[name]
            return (values[lanes.span] if values.ndim else values).astype(dtype)

        return read

    def _symbol_reader(self, type_: str, symbol: Symbol, instruction: Instruction) -> Reader:
        dtype = dtype_of(type_)
        if symbol.name in self.entry.parameters:
            value = dtype(self.entry.parameters[symbol.name].offset + symbol.offset)
            return lambda lanes: value
        if symbol.name not in self.symbols:
            self._refuse(instruction, f"unknown symbol {symbol.name}")
        offset = SYSTEM_SHARED_BYTES + self.symbols[symbol.name] + symbol.offset
        return lambda lanes: dtype((lanes.cta.rank << RANK_SHIFT) + offset)

    def _address_reader(self, type_: str, address: Address, instruction: Instruction) -> Reader:
        read = self._reader(type_, address.base, instruction)
        if not address.offset:
            return read
        dtype = dtype_of(type_)
        offset = dtype(address.offset % (1 << _bits(type_)))
        return lambda lanes: read(lanes) + offset

    def _writer(self, declared: str, operand: Any, instruction: Instruction) -> Callable[[Lanes, Any], None]:
        """Stores values of the executing threads alone."""
        if isinstance(operand, Sink):
            return lambda lanes, values: None
        view, row, convert = self._destination(declared, operand, instruction)

        def write(lanes, values):
            if lanes.where is None:
                lanes.rows[view][row] = convert(values)
            else:
                lanes.rows[view][row][lanes.where] = convert(values)

        return self._finishing_loads(operand, write)

    def _span_writer(self, declared: str, operand: Any, instruction: Instruction) -> Callable[[Lanes, Any], None]:
        """Stores values over the span, for the executing threads."""
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
        """(view, row, conversion) of a register that gets values of a type, perhaps a narrower one."""
        if not isinstance(operand, Register):
            self._refuse(instruction, f"{operand} cannot be a result")
        type_ = declared.removeprefix("~")
        width = self.entry.registers[operand.name]
        if width == _width(type_) and _bits_or_0(type_) != 8:
            return *self._row(type_, operand, instruction), _unconverted
        # A wider register gets signed values sign-extended, others zero-extended. (PTX, Operand Size Exceeding
        # Instruction-Type Size)
        kind = "s" if type_[0] == "s" else "u"
        dtype = dtype_of(f"{kind}{_bits(type_)}")
        wide = _DTYPES[f"{kind}{width[1:]}"]
        return (
            VIEW_OF_TYPE[kind + width[1:]],
            self.rows[operand.name],
            lambda values: np.asarray(values).view(dtype).astype(wide),
        )


def _is_move(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] == "mov"


def _registers(operands: Any) -> set[str]:
    """The names of the registers among operands and in their parts."""
    if isinstance(operands, Register):
        return {operands.name}
    return set().union(*map(_registers, operands)) if isinstance(operands, tuple) else set()


def _touching(step: Step, bits: int, is_move: bool) -> Step:
    def touch(lanes):
        lanes.cta.wgmma_registers.touch(lanes.warps(), bits, is_move)
        step(lanes)

    return touch


def _unconverted(values):
    return values


def _bits_or_0(type_: str) -> int:
    return 0 if type_ == "pred" else _bits(type_)


def immediate(type_: str, operand: Immediate) -> Any:
    """The value of an immediate used as a type."""
    if type_ == "pred":
        return np.bool_(operand.bits != 0)
    dtype = dtype_of(type_)
    unsigned = _DTYPES[f"u{_bits(type_)}"]
    if operand.kind == "integer" or (operand.kind == "f32" and _bits(type_) == 32):
        return unsigned(operand.bits % (1 << _bits(type_))).view(dtype)
    if operand.kind == "f64" and _bits(type_) == 64:
        return unsigned(operand.bits).view(dtype)
    raise PtxError(f"a {operand.kind} immediate where {type_} is expected")


def _layout(entry: Entry) -> tuple[dict[str, int], int]:
    """Offsets of shared symbols, and the bytes that the static ones take. Dynamic shared memory comes after them."""
    offsets, size = {}, 0
    for name, symbol in entry.shared.items():
        if symbol.size:
            size = -(-size // symbol.align) * symbol.align
            offsets[name] = size
            size += symbol.size
    for name, symbol in entry.shared.items():
        if not symbol.size:
            offsets[name] = -(-size // symbol.align) * symbol.align
    return offsets, size
