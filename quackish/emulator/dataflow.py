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


def flow_of(instruction: Instruction, form: isa.Form, operands: Operands) -> Flow:
    """The flow of an instruction that a form executes."""
    count = len(form.results)
    results, sources = list(instruction.operands[:count]), list(instruction.operands[count:])
    if any("&" in declared for declared in form.operands):
        updated = [declared.strip().startswith("&") for declared in form.operands]
        results += [operand for operand, is_result in zip(sources, updated, strict=True) if is_result]
        sources = [operand for operand, is_result in zip(sources, updated, strict=True) if not is_result]
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


def read_first(flows: list[list[Flow]], following: list[list[int]]) -> list[Register]:
    """The registers that some path reads before it writes them. following: the blocks that may come after each one"""
    needed: list[set[Register]] = []  # what a block reads and has not written before
    written: list[set[Register]] = []
    for block in flows:
        needed.append(set())
        written.append(set())
        for flow in block:
            needed[-1].update(register for register in flow.reads if register not in written[-1])
            if flow.guard is None:
                written[-1].update(flow.writes)
    has_changed = True
    while has_changed:
        has_changed = False
        for i in reversed(range(len(flows))):
            more = set().union(*(needed[j] for j in following[i])) - written[i] - needed[i]
            has_changed |= bool(more)
            needed[i] |= more
    return sorted(needed[0])
