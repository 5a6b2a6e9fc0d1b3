"""Follows values that nobody wrote to where they decide something: a branch, an address or global memory.

Registers, shared memory and tensor memory hold anything until they are written. To read them is allowed, and kernels do
it where they do not use the value. So each register with such a value has two more values: those that it would have if
the unwritten bits were others. Instructions compute with all three. Where they differ, the value is not defined.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from quackish.emulator.dataflow import Flow
from quackish.emulator.errors import Fault, Place
from quackish.emulator.late_loads import Register
from quackish.emulator.threads import VIEW_OF_TYPE, Cta, Lanes

# What the unwritten bits might be. 0x3F80 is 1 as bf16; the emulator's own value, POISON, is NaN and -1.
_OTHER_BITS = np.array([[0], [0x3F803F803F803F80]], np.uint64)

# The views of registers, by width. Those of b128 are not followed.
_VIEWS = {"pred": VIEW_OF_TYPE["pred"], **{f"b{bits}": VIEW_OF_TYPE[f"u{bits}"] for bits in (16, 32, 64)}}

_ADVICE = "if another thread writes it later, a barrier is missing: emulator.record(all_races=True) shows where"


class Other(NamedTuple):
    """What a register would hold if unwritten bits were others."""

    differs: np.ndarray  # the threads in which it is another value
    values: np.ndarray  # (values, threads)
    what: str  # what nobody wrote, in words
    place: Callable[[], Place] | None  # where it was read; None if it is a register


class Uninitialized:
    """The registers of a CTA whose values depend on what nobody wrote."""

    def __init__(self, cta: Cta):
        self.cta = cta
        self.others: dict[Register, Other] = {}
        self.partly: dict[Register, np.ndarray] = {}  # which bits nobody wrote, of registers that are not used yet
        for register in cta.grid.program.read_first:
            self.mark(register, np.ones(cta.num_threads, np.bool_), "a register", None)

    def mark(self, register: Register, differs: np.ndarray, what: str, place: Callable[[], Place] | None) -> None:
        """Records that a register has got what nobody wrote, in the threads where it `differs`."""
        if register[0] in _VIEWS:
            values = np.broadcast_to(_OTHER_BITS, (len(_OTHER_BITS), self.cta.num_threads))
            self.partly.pop(register, None)
            self._set(register, differs, values.astype(self._row(register).dtype), what, place)

    def mark_results(self, lanes: Lanes, is_unwritten: np.ndarray, what: str) -> None:
        """Records that the load which executes now reads what nobody wrote.

        is_unwritten: for each of its threads, and each of equal parts of what a thread loads
        """
        grid = self.cta.grid
        results, place = grid.flow.writes, grid.place()
        parts = is_unwritten.shape[1]
        for i, register in enumerate(results):
            first = i * parts // len(results)
            of_register = is_unwritten[:, first : max(first + 1, (i + 1) * parts // len(results))]
            differs = np.zeros(self.cta.num_threads, np.bool_)
            differs[lanes.threads[of_register.any(axis=1)]] = True
            self.mark(register, differs, what, place)
            if register in self.others and not of_register.all():
                self.partly[register] = self._bits(register, lanes, of_register)

    def _bits(self, register: Register, lanes: Lanes, is_unwritten: np.ndarray) -> np.ndarray:
        """The bits of a register that nobody wrote, by thread. is_unwritten: of its equal parts, in these threads."""
        row = self._row(register)
        bits, width = np.zeros(self.cta.num_threads, np.uint64), 8 * row.itemsize // is_unwritten.shape[1]
        for part in range(is_unwritten.shape[1]):
            bits[lanes.threads[is_unwritten[:, part]]] |= np.uint64((1 << width) - 1 << part * width)
        return bits.astype(row.dtype)

    def _settle(self, flow: Flow) -> None:
        """Gives registers that are used now their loaded bits: a load has ended before its results are used."""
        for register in self.partly.keys() & flow.touches:
            other, bits = self.others.get(register), self.partly.pop(register)
            if other is not None:
                values = (other.values & bits) | (self._row(register) & ~bits)
                self.others[register] = other._replace(values=values)

    def follow(self, lanes: Lanes, step: Callable[[Lanes], None], flow: Flow) -> None:
        """Executes a step of these threads."""
        if self.others.keys().isdisjoint(flow.touches):
            return step(lanes)
        self.check(lanes, flow)
        sources = [register for register in flow.reads if register in self.others]
        if not sources or not flow.is_pure or any(width not in _VIEWS for width, _ in flow.touches):
            self.forget(lanes, flow)
            return step(lanes)
        results = [self._with_others(i, lanes, step, flow, sources) for i in range(len(_OTHER_BITS))]
        source, threads = self.others[sources[0]], self._executing(lanes, flow)
        step(lanes)
        for register, *rows in zip(flow.writes, *results, strict=True):
            old, values = self.others.get(register), np.stack(rows)
            differs = threads & (values != self._row(register)).any(axis=0)
            if old is not None:
                differs |= old.differs & ~threads
                values = np.where(threads, values, old.values)
            self._set(register, differs, values, source.what, source.place)

    def check(self, lanes: Lanes, flow: Flow) -> None:
        """Reports an instruction of these threads that decides something by a value that is not defined."""
        self._settle(flow)
        if flow.guard in self.others:
            self._report(self.others[flow.guard], "a branch or a predicate depends on", self._threads(lanes))
        executing = self._executing(lanes, flow)
        for register in flow.addresses:
            if register in self.others:
                self._report(self.others[register], "an address depends on", executing)
        # A vector of which one element is defined is the end of a row, whose padding nobody reads.
        if flow.stored and all(register in self.others for register in flow.stored):
            for register in flow.stored:
                bits = np.bitwise_or.reduce(self.others[register].values ^ self._row(register))
                executing &= self.others[register].differs
                for start in range(0, flow.stored_bits, 32):  # a register of 64 bits has two elements
                    width = min(flow.stored_bits - start, 32)
                    executing &= (bits >> bits.dtype.type(start) & bits.dtype.type((1 << width) - 1)) != 0
            self._report(self.others[flow.stored[0]], "global memory gets", executing)

    def _report(self, other: Other, does: str, executing: np.ndarray) -> None:
        threads = np.flatnonzero(other.differs & executing)
        if threads.size:
            self.cta.grid.found(
                Fault(
                    "uninitialized",
                    f"{does} {other.what} that nothing wrote, in thread {threads[0]} of {self.cta}",
                    advice=_ADVICE if other.place else "",
                    second=other.place() if other.place else None,
                    second_is="the read",
                )
            )

    def forget(self, lanes: Lanes, flow: Flow) -> None:
        """Records that an instruction of these threads writes its results, perhaps later."""
        for register in flow.writes:
            if (old := self.others.get(register)) is not None:
                self._set(register, old.differs & ~self._executing(lanes, flow), old.values, old.what, old.place)

    def _with_others(
        self, i: int, lanes: Lanes, step: Callable, flow: Flow, sources: list[Register]
    ) -> list[np.ndarray]:
        """The results of a step with the sources' i-th other values. All registers stay as they are."""
        rows = [self._row(register) for register in sources]
        targets = [self._row(register) for register in flow.writes]
        saved = [row.copy() for row in rows + targets]
        for row, register in zip(rows, sources, strict=True):
            other = self.others[register]
            row[other.differs] = other.values[i, other.differs]
        step(lanes)
        results = [row.copy() for row in targets]
        for row, values in zip(rows + targets, saved, strict=True):
            row[:] = values
        return results

    def _set(
        self, register: Register, differs: np.ndarray, values: np.ndarray, what: str, place: Callable | None
    ) -> None:
        if differs.any():
            self.others[register] = Other(differs, values, what, place)
        else:
            self.others.pop(register, None)

    def _threads(self, lanes: Lanes) -> np.ndarray:
        chosen = np.zeros(self.cta.num_threads, np.bool_)
        chosen[lanes.threads] = True
        return chosen

    def _executing(self, lanes: Lanes, flow: Flow) -> np.ndarray:
        """Which threads execute an instruction that these threads have come to."""
        threads = self._threads(lanes)
        return threads if flow.guard is None else threads & (self._row(flow.guard) != flow.negated)

    def _row(self, register: Register) -> np.ndarray:
        width, row = register
        return self.cta.registers.rows[_VIEWS[width]][row]
