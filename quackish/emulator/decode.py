"""Turns the instructions of an entry into blocks of Python functions over the threads that execute them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from quackish.emulator import dataflow, isa, late_loads
from quackish.emulator.clocks import GPU, scope_of
from quackish.emulator.operands import Operands, Reader, bits_of, refuse, registers_in, width_of
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
    parse,
)
from quackish.emulator.threads import Lanes
from quackish.emulator.wgmma_registers import bits_of_registers, registers_of

Step = Callable[[Lanes], None]

KEPT_MODULES = 64  # that are decoded; decoding a GEMM takes a tenth of its run
_CONVERGENCE = {"": 0, "members": 1, "warp": 2, "warp group": 3}


class BasicBlock(NamedTuple):
    """Instructions without a branch between them. All but the last are steps."""

    steps: list[Step]
    end: Callable[[Lanes], int | None]  # the next block, or None if the threads have been put somewhere else
    instructions: list[Instruction]  # one for each step, and the end's if it has one
    converged: str  # see isa.Form
    members: Reader | None  # for "members": the mask of each thread
    chosen: Reader | None  # the first instruction's predicate, if it has one: the other threads need not converge
    polls: bool  # see isa.Form

    @property
    def size(self) -> int:
        return len(self.instructions)


class Program(NamedTuple):
    """An entry, ready to run."""

    entry: Entry
    blocks: list[BasicBlock]
    register_counts: dict[str, int]
    static_shared_bytes: int
    local_bytes: int  # of each thread
    symbols: dict[str, int]  # offsets of shared symbols
    wgmma_bits: dict[int, int]  # row of a 32-bit register that wgmma uses -> its bit
    flows: dataflow.Dataflow
    read_first: list[late_loads.Register]  # registers that may be read before they are written
    has_narrow_scopes: bool  # a fence, or a strong operation on global memory, of scope .cta or .cluster

    def location(self, block: int, index: int) -> str:
        """Where an instruction comes from: its line in the PTX, its source line and its text."""
        instruction = self.blocks[block].instructions[index]
        return f"PTX line {instruction.line}, {instruction.source or 'no source line'}: {instruction.text[:120]}"

    def location_of_end(self, block: int) -> str:
        """The location of a block's last instruction; empty for a block without instructions."""
        return self.location(block, -1) if self.blocks[block].instructions else ""


@functools.lru_cache(KEPT_MODULES)
def programs(text: str) -> tuple[str, dict[str, Program]]:
    """The target of a module's PTX, and the programs of its entries. Raises PtxError."""
    module = parse(text)
    return module.target, {name: decode(entry) for name, entry in module.entries.items()}


def decode(entry: Entry) -> Program:
    """Decodes an entry. Raises PtxError for an instruction that no chapter of `isa` declares."""
    return _Decoder(entry).program()


class _Decoder:
    def __init__(self, entry: Entry):
        self.entry = entry
        self.table = isa.load()
        self.operands = Operands(entry)
        self.wgmma_bits = bits_of_registers(entry)
        self.block_of_label: dict[str, int] = {}

    def program(self) -> Program:
        forms = [self._form(instruction) for instruction in self.entry.instructions]
        self.operands.loaded_late = self._loaded_late(forms)
        starts = self._starts(forms)
        for label, index in self.entry.labels.items():
            self.block_of_label[label] = starts.index(index) if index < len(forms) else len(starts)
        ends = [*starts[1:], len(forms)]
        blocks = [
            self._block(i, begin, forms[begin:end]) for i, (begin, end) in enumerate(zip(starts, ends, strict=True))
        ]
        # An entry that ends without `ret` exits.
        blocks.append(BasicBlock([], lambda lanes: lanes.cta.exit(lanes.mask), [], "", None, None, False))
        following = [self._following(number, block) for number, block in enumerate(blocks)]
        of_blocks = [forms[begin:end] for begin, end in zip(starts, ends, strict=True)]
        flows = dataflow.Dataflow([block.instructions for block in blocks], [*of_blocks, []], self.operands)
        return Program(
            self.entry,
            blocks,
            self.operands.register_counts,
            self.operands.static_shared_bytes,
            self.operands.local_bytes,
            self.operands.symbols,
            self._bits_of_rows(),
            flows,
            flows.read_first(following),
            any(_is_narrow(instruction.opcode) for instruction in self.entry.instructions),
        )

    def _following(self, number: int, block: BasicBlock) -> list[int]:
        """The blocks that may come after a block."""
        if not block.instructions:
            return []
        last = block.instructions[-1]
        is_branch, is_end = last.opcode in ("bra", "bra.uni"), last.opcode in ("ret", "exit")
        targets = [self.block_of_label[last.operands[0].name]] if is_branch else []
        return targets if (is_branch or is_end) and last.predicate is None else [*targets, number + 1]

    def _bits_of_rows(self) -> dict[int, int]:
        return {self.operands.rows[name]: bit for name, bit in self.wgmma_bits.items()}

    def _loaded_late(self, forms: list[isa.Form]) -> set[str]:
        """The names of registers that late loads write, and of registers that these are moved to."""
        found: set[str] = set()
        moves = []
        for instruction, form in zip(self.entry.instructions, forms, strict=True):
            if form.loads_late:
                found |= registers_in(instruction.operands[: len(form.operands) - 1])
            elif _is_move(instruction):
                moves.append((registers_in(instruction.operands[:1]), registers_in(instruction.operands[1:])))
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

    def _block(self, number: int, begin: int, forms: list[isa.Form]) -> BasicBlock:
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
        members = self.operands.reader("b32", first.operands[-1], first) if converged == "members" else None
        chosen = self.operands.reader("pred", self._predicate(first), first) if first.predicate is not None else None
        return BasicBlock(steps, end, instructions, converged, members, chosen, any(form.polls for form in forms))

    def _converged(self, instruction: Instruction, form: isa.Form) -> str:
        """`form.converged`, except that a constant member mask of all threads means the warp."""
        if form.converged == "members" and instruction.predicate is None:
            members = instruction.operands[-1]
            if isinstance(members, Immediate) and members.bits % (1 << 32) == (1 << 32) - 1:
                return "warp"
        return form.converged

    def _end(self, instruction: Instruction, form: isa.Form, following: int) -> Callable[[Lanes], int | None]:
        """The function that ends a block. It returns the next block, or None if it has placed the threads."""
        if form.opcode in ("bra", "bra.uni") and instruction.predicate is not None:
            return self._branch(instruction, following)
        execute = self._control(instruction, form, following)
        if instruction.predicate is None:
            return execute
        chosen = self.operands.reader("pred", self._predicate(instruction), instruction)

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
        taken = self.operands.reader("pred", self._predicate(instruction), instruction)

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
        readers = self.operands.readers(instruction, form)
        writers = [self.operands.writer(*pair, instruction) for pair in self.operands.results(instruction, form)]

        def execute(lanes):
            return function(lanes, following, writers, *[read(lanes) for read in readers])

        return execute

    # Instructions

    def _form(self, instruction: Instruction) -> isa.Form:
        """The first declared form that an instruction's operands fit. Raises PtxError if none does."""
        forms = self.table.get(instruction.opcode)
        if forms is None:
            refuse(self.entry, instruction, "unknown instruction")
        for form in forms:
            if self._fits(instruction, form):
                return form
        known = "; ".join(f"{', '.join(form.results)} = {', '.join(form.operands)}" for form in forms)
        refuse(self.entry, instruction, f"operands fit none of the known forms ({known})")

    def _fits(self, instruction: Instruction, form: isa.Form) -> bool:
        declared = [*form.results, *form.operands]
        if len(declared) != len(instruction.operands):
            return False
        return all(map(self._operand_fits, declared, instruction.operands))

    def _operand_fits(self, declared: str, operand: Any) -> bool:
        """True if an operand fits a part of a signature, whose syntax `isa` describes."""
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
            if width == width_of(wanted):
                return True
            narrower = declared.startswith("~") and "pred" not in (width, wanted)
            return narrower and int(width[1:]) >= bits_of(wanted)
        return isinstance(operand, (Immediate, Special, Symbol, Sink))

    def _predicate(self, instruction: Instruction) -> Any:
        assert instruction.predicate is not None
        return Not(instruction.predicate) if instruction.negated else instruction.predicate

    def _step(self, instruction: Instruction, form: isa.Form) -> Step:
        """The function that executes an instruction which does not end its block."""
        step = self._value_step(instruction, form) if form.kind == "value" else self._action_step(instruction, form)
        if bits := self._wgmma_bits_of(instruction):
            step = _touching(step, bits, _is_move(instruction))
        if instruction.predicate is None:
            return self._deferred_move(instruction, step) if _is_move(instruction) else step
        chosen = self.operands.reader("pred", self._predicate(instruction), instruction)

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
        """Wraps a move. It happens after the load of its sources if that is pending."""
        sources = registers_in(instruction.operands[1:])
        if not sources or not sources <= self.operands.loaded_late:
            return step
        source_keys, target_keys = (
            {self.operands.key(name) for name in names} for names in (sources, registers_in(instruction.operands[:1]))
        )

        def move(lanes):
            if not (lanes.cta.pending_loads and late_loads.defer(lanes, source_keys, target_keys, step)):
                step(lanes)

        return move

    def _wgmma_bits_of(self, instruction: Instruction) -> int:
        """The registers of `wgmma`, as bits, that an instruction other than `wgmma` accesses."""
        if not self.wgmma_bits or instruction.opcode.startswith("wgmma.mma_async"):
            return 0
        bits = 0
        for name in registers_of(instruction.operands):
            bits |= self.wgmma_bits.get(name, 0)
        return bits

    def _action_step(self, instruction: Instruction, form: isa.Form) -> Step:
        """The step of an action: its function gets the values of the executing threads alone."""
        function = form.function
        readers = self.operands.readers(instruction, form)
        writers = [self.operands.writer(*pair, instruction) for pair in self.operands.results(instruction, form)]
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
        """The step of a value: its function computes over the whole span of the threads."""
        function = form.function
        readers = []
        for declared, operand in zip(form.operands, instruction.operands[len(form.results) :], strict=True):
            declared = declared.strip()
            if declared.startswith("{"):
                readers += [
                    self.operands.reader(declared[1:-1].partition("*")[0], item, instruction) for item in operand.items
                ]
            elif declared == "immediate":
                readers.append(self.operands.executing_reader(declared, operand, instruction))
            else:
                readers.append(self.operands.reader(declared, operand, instruction))
        results = self.operands.results(instruction, form)
        if len(results) > 1:
            puts = [self.operands.span_writer(*pair, instruction) for pair in results]

            def several(lanes):
                for put, value in zip(puts, function(*[read(lanes) for read in readers]), strict=True):
                    put(lanes, value)

            return several
        put = self.operands.span_writer(*results[0], instruction)
        if len(readers) == 1:
            (first,) = readers
            return lambda lanes: put(lanes, function(first(lanes)))
        if len(readers) == 2:
            first, second = readers
            return lambda lanes: put(lanes, function(first(lanes), second(lanes)))
        return lambda lanes: put(lanes, function(*[read(lanes) for read in readers]))


def _is_narrow(opcode: str) -> bool:
    if opcode.startswith(("fence.mbarrier_init.", "fence.proxy.")):
        return False
    return (opcode.startswith(("fence.", "membar.")) or ".global" in opcode) and scope_of(opcode) != GPU


def _is_move(instruction: Instruction) -> bool:
    return instruction.opcode.split(".")[0] == "mov"


def _touching(step: Step, bits: int, is_move: bool) -> Step:
    """Wraps a step that accesses registers of `wgmma`: see `WgmmaRegisters.touch`."""

    def touch(lanes):
        lanes.cta.wgmma_registers.touch(lanes.warps(), bits, is_move)
        step(lanes)

    return touch
