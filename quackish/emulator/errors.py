"""The errors of the emulator."""

import dataclasses
from typing import Any

from quackish.emulator.rules import FAULT, RULES


@dataclasses.dataclass(frozen=True)
class Place:
    """An instruction that threads executed."""

    file: str  # of the source; "" if the PTX does not say
    line: int
    ptx_line: int
    instruction: str
    cta: tuple[int, int, int]
    rank: int | None  # of the CTA in its cluster; None in clusters of one
    warps: tuple[int, ...]
    threads: str  # such as "lanes 0x1 of warp 3"
    execution: int  # how often the first of the warps has executed it, this time included; 0 if it only waits there

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank} of its cluster"
        source = f"{self.file}:{self.line}" if self.file else "no source line"
        which = f"{ordinal(self.execution)} execution of " if self.execution > 1 else ""
        at = f"at {which}PTX line {self.ptx_line}, {source}: {self.instruction}"
        return f"CTA {self.cta}{rank}, {self.threads}\n    {at}"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, ..., 11th, ..., 21st."""
    suffix = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{suffix}"


@dataclasses.dataclass(frozen=True)
class Circumstances:
    """The launch in which something happened, and how to repeat it."""

    launch: int  # its number in the report, from 0
    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int  # dynamic shared memory
    gpu: str
    sm_count: int
    completion: str
    seed: Any
    how_to_repeat: str

    def __str__(self) -> str:
        return (
            f"  launch {self.launch}, counted from 0: kernel {self.kernel}\n"
            f"  grid {self.grid}, block {self.block}, cluster {self.cluster}, "
            f"{self.shared_bytes} bytes of dynamic shared memory\n"
            f"  gpu {self.gpu} with {self.sm_count} SMs, completion={self.completion!r}, seed={self.seed!r}\n"
            f"  to repeat it: the same call {self.how_to_repeat}"
        )


@dataclasses.dataclass(eq=False)
class Fault(RuntimeError):
    """The emulated program did something that the PTX manual forbids.

    rule: a name in the table of rules, which also gives the severity. Only faults are raised: `Report.findings` has
        what is "formal" or a "note", and what `emulator.record` collects or is told not to raise.
    place: the instruction that did it. `file`, `line`, `ptx_line`, `cta` and `warps` are fields of it, or of
        `issued_by`, if asynchronous work did it while no instruction was executing.
    second: another instruction, with which it conflicts

    `dataclasses.asdict` makes a dictionary for JSON.
    """

    rule: str
    message: str
    advice: str = ""  # what would repair it
    tensor: str = ""  # the argument that is accessed
    second: Place | None = None
    second_is: str = ""  # what the second instruction does, such as "the write"
    details: str = ""  # of a deadlock: what all threads wait for
    place: Place | None = None  # None if no instruction did it
    issued_by: Place | None = None  # what issued the asynchronous work that did it
    launch: Circumstances | None = None
    severity: str = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.severity = RULES[self.rule].severity

    @property
    def _at(self) -> Place | None:
        return self.place or self.issued_by

    @property
    def file(self) -> str:
        return self._at.file if self._at else ""

    @property
    def line(self) -> int:
        return self._at.line if self._at else 0

    @property
    def ptx_line(self) -> int:
        return self._at.ptx_line if self._at else 0

    @property
    def cta(self) -> tuple[int, int, int] | None:
        return self._at.cta if self._at else None

    @property
    def warps(self) -> tuple[int, ...]:
        return self._at.warps if self._at else ()

    def __str__(self) -> str:
        severity = "" if self.severity == FAULT else f"{self.severity}: "
        lines = [f"{severity}{self.rule}: {self.message}"]
        if self.advice:
            lines.append(f"  {self.advice}")
        if self.tensor:
            lines.append(f"  the tensor is {self.tensor}")
        if self.second:
            lines.append(f"  {self.second_is} is of {self.second}")
        if self.issued_by:
            lines.append(f"  asynchronous work of {self.issued_by}")
        if self.place:
            lines.append(f"  executing: {self.place}")
        if self.details:
            lines.append(self.details)
        if self.launch:
            lines.append(f"{self.launch}")
        return "\n".join(lines)


class ToolMissing(RuntimeError):
    """This machine lacks a program that the emulator needs."""


class PtxError(ValueError):
    """The PTX cannot be read, or has an instruction that the emulator does not know."""
