"""Which registers instructions read and write, and which registers may be read before they are written."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.emulator import isa
from quackish.emulator.late_loads import Register
from quackish.emulator.operands import Operands, bits_of
from quackish.emulator.ptx import Address, Instruction
from quackish.emulator.ptx import Register as Operand

# Actions whose results depend on registers alone, those of other lanes included.
_PURE_ACTIONS = ("shfl", "vote", "redux", "match")


class Flow(NamedTuple):
    """The registers of one instruction, by what it does with them."""

    reads: tuple[Register, ...]  # all but those that wgmma updates
    writes: tuple[Register, ...]  # in the order of the operands
    guard: Register | None  # the predicate that says which threads execute it
    negated: bool  # threads whose predicate is false execute it
    addresses: tuple[Register, ...]  # of addresses and coordinates
    stored: tuple[Register, ...]  # values that it writes to global memory
    stored_bits: int  # the lowest bits of each of them
    is_pure: bool  # its results depend on `reads` alone, and executing it again changes nothing
    touches: frozenset[Register]  # all of them


class BlockFlow(NamedTuple):
    flows: list[Flow]  # of each instruction
    touches: frozenset[Register]  # the registers of all instructions


class Dataflow:
    """The flows of the instructions in an entry's blocks. They are computed when they are needed."""

    def __init__(self, blocks: list[list[Instruction]], forms: list[list[isa.Form]], operands: Operands):
        self._blocks, self._forms, self._operands = blocks, forms, operands
        self._known: dict[int, BlockFlow] = {}

    def of(self, block: int) -> BlockFlow:
        known = self._known.get(block)
        if known is None:
            pairs = zip(self._blocks[block], self._forms[block], strict=True)
            flows = [_flow_of(instruction, form, self._operands) for instruction, form in pairs]
            touches = frozenset[Register]().union(*(flow.touches for flow in flows))
            known = self._known[block] = BlockFlow(flows, touches)
        return known

    def read_first(self, following: list[list[int]]) -> list[Register]:
        """The registers that some path reads before it writes them. following: the blocks that may come after each"""
        needed: list[set[str]] = []  # what a block reads and has not written before
        written: list[set[str]] = []
        for instructions, forms in zip(self._blocks, self._forms, strict=True):
            reads, writes = set[str](), set[str]()
            for instruction, form in zip(instructions, forms, strict=True):
                results, sources = _split(instruction, form)
                reads.update(name for name in _names(sources) if name not in writes)
                if instruction.predicate is None:
                    writes.update(_names(results))
                elif instruction.predicate.name not in writes:
                    reads.add(instruction.predicate.name)
            needed.append(reads)
            written.append(writes)
        has_changed = True
        while has_changed:
            has_changed = False
            for i in reversed(range(len(needed))):
                more = set[str]().union(*(needed[j] for j in following[i])) - written[i] - needed[i]
                has_changed |= bool(more)
                needed[i] |= more
        return sorted(map(self._operands.key, needed[0]))


def _split(instruction: Instruction, form: isa.Form) -> tuple[list[Any], list[Any]]:
    """The operands that an instruction writes, and those that it reads."""
    count = len(form.results)
    results, sources = list(instruction.operands[:count]), list(instruction.operands[count:])
    if any("&" in declared for declared in form.operands):
        updated = [declared.strip().startswith("&") for declared in form.operands]
        results += [operand for operand, is_result in zip(sources, updated, strict=True) if is_result]
        sources = [operand for operand, is_result in zip(sources, updated, strict=True) if not is_result]
    return results, sources


def _flow_of(instruction: Instruction, form: isa.Form, operands: Operands) -> Flow:
    """The flow of an instruction that a form executes."""
    results, sources = _split(instruction, form)
    parts = instruction.opcode.split(".")
    values = [operand for operand in sources if not isinstance(operand, Address)]
    is_stored = parts[0] in ("st", "red", "atom") and "global" in parts

    def keys(of: Any) -> tuple[Register, ...]:
        return tuple(operands.key(name) for name in _names(of))

    guard = operands.key(instruction.predicate.name) if instruction.predicate is not None else None
    reads, writes = keys(sources) + (() if guard is None else (guard,)), keys(results)
    return Flow(
        reads,
        writes,
        guard,
        instruction.negated,
        keys([operand for operand in sources if isinstance(operand, Address)]),
        keys(values) if is_stored else (),
        bits_of(parts[-1]) if is_stored else 0,
        form.kind == "value" or parts[0] in _PURE_ACTIONS,
        frozenset(reads + writes),
    )


def _names(operand: Any) -> Iterator[str]:
    """The names of registers in operands and their parts, in order."""
    if isinstance(operand, Operand):
        yield operand.name
    elif isinstance(operand, (tuple, list)):
        for part in operand:
            yield from _names(part)
