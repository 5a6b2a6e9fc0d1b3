"""What PTX instructions mean, by chapter of the PTX manual.

An entry of the table is an opcode with all its modifiers, as PTX writes it, and a signature. Opcodes are written with
alternatives in braces: "add{,.rn}.{f32,f64}" stands for four opcodes. What is not in the table is refused, so a
modifier that changes nothing here is listed because somebody looked at it.

A signature says what operands are: "results = operands".

    f32         a value of a register or an immediate; a register has the type's width
    ~f32        the same, and the register may be wider (ld, st, cvt)
    T           the type that ends the opcode
    pred        a predicate
    b32|pred    a pair of results, of which the second may be missing in the PTX
    {b32*4}     a vector of four
    [u64]       an address
    [u64;4]     an address and four coordinates of a tensor
    immediate   a Python integer
    symbol      the name of a label
    &{f32*64}   a vector of registers that the instruction updates itself: the indices of their rows

Types are u, s, f with a width; b is u; bf16 and f16 are u16, and packed types u32 or u64: functions in `numbers` take
and return bits.
"""

import importlib
import itertools
import re
from collections.abc import Callable
from typing import NamedTuple


class Form(NamedTuple):
    """One meaning of an opcode: which operands it takes, and the function that executes it."""

    opcode: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    function: Callable
    # "value": a function of arrays over the threads' span, whose results are stored for the threads that execute it.
    # "action": a function of the Lanes that execute it and arrays over these alone. It returns its results.
    # "control": like an action, and the last instruction of its block. It returns the next block, or None if it has
    # put its threads somewhere itself.
    kind: str
    # Threads that must have come to the instruction before any executes it: "" (none), "members" (those in the
    # instruction's last operand), "warp" (all of the warp that have not exited) or "warp group".
    converged: str
    polls: bool  # other threads shall run before it is executed again
    repeats: bool  # threads that it lets wait execute it again
    loads_late: bool  # its "&" operands are results, which may come after the instruction; see tcgen05.ld


TABLE: dict[str, list[Form]] = {}  # by opcode with all modifiers; filled by `load`
_CHAPTERS = (
    "arithmetic",
    "async_copy",
    "calls",
    "control_flow",
    "conversion",
    "data_movement",
    "launch_control",
    "logic",
    "mma",
    "synchronization",
    "tcgen05",
    "tensor_allocation",
    "tensor_maps",
    "thread_copy",
    "warp",
    "wgmma",
)


def instruction(
    opcodes: str,
    signature: str,
    kind: str = "value",
    converged: str = "",
    polls: bool = False,
    repeats: bool = False,
    loads_late: bool = False,
):
    """Declares that the decorated function executes the opcodes. `Form` explains the arguments."""

    def declare(function):
        for opcode in expanded(opcodes):
            results, operands = _signature(signature.replace("T", _type_of(opcode)))
            forms = TABLE.setdefault(opcode, [])
            if any((form.results, form.operands) == (results, operands) for form in forms):
                raise AssertionError(f"{opcode} is declared twice with {signature}")
            forms.append(Form(opcode, results, operands, function, kind, converged, polls, repeats, loads_late))
        return function

    return declare


def action(opcodes: str, signature: str, converged: str = "", polls: bool = False, loads_late: bool = False):
    """`instruction` for a function of the executing Lanes, which returns its results."""
    return instruction(opcodes, signature, "action", converged, polls, loads_late=loads_late)


def control(opcodes: str, signature: str, converged: str = "", repeats: bool = False):
    """`instruction` for a function that ends its block and returns the next one."""
    return instruction(opcodes, signature, "control", converged, repeats=repeats)


def expanded(opcodes: str) -> list[str]:
    """All opcodes that a string with alternatives in braces stands for."""
    parts = re.split(r"\{([^}]*)\}", opcodes)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in itertools.product(*choices)]


def _type_of(opcode: str) -> str:
    return opcode.rpartition(".")[2]


def _signature(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Splits a signature into (results, operands)."""
    results, operands = text.split("=") if "=" in text else ("", text)
    return tuple(results.split(",") if results.strip() else ()), tuple(operands.split(",") if operands.strip() else ())


def load() -> dict[str, list[Form]]:
    """Imports all chapters, which declare their instructions. Returns the table."""
    for chapter in _CHAPTERS:
        importlib.import_module(f"{__name__}.{chapter}")
    return TABLE
