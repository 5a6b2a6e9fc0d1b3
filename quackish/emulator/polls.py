"""Finds stores that take back what another thread polls: a ticket or flag that is reset too early.

A thread loads a word until its value lets it go on. If nothing orders a store of a lower value after that load, the
store may also come before it, and the thread waits forever. Whether the last load of a thread was such a load is known
once the launch has ended, because a thread that still waits loads again.

What a thread does after its wait depends on the value that it has loaded. So if it counts itself by an atomic
operation, those that find this count come after its wait, even if the operations are relaxed: `clocks.POLLED`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator.clocks import ORDERED, POLLED, Clocks, merged
from quackish.emulator.errors import Fault, Place


class _Load(NamedTuple):
    """The latest strong load of a word by a warp."""

    value: int
    epoch: int
    clocks: Clocks
    place: Callable[[], Place]


class Polls:
    """The words of global memory that warps load by strong operations, in one launch."""

    def __init__(self, grid: Any):
        self.grid = grid
        self._loads: dict[int, dict[tuple[int, int], _Load]] = {}  # address -> (cluster, warp) -> load
        self._counts: dict[int, dict[int, np.ndarray]] = {}  # address -> what precedes strong writes there, by cluster
        self._early: dict[tuple[int, tuple[int, int]], Fault] = {}  # (address, cluster and warp) -> what a store did

    def load(self, addresses: np.ndarray, size: int, warps: np.ndarray) -> None:
        """The executing threads load words of `size` bytes. warps: the warp of each address"""
        clocks, place = self.grid.executing.cta.cluster.clocks, self.grid.place()
        for address, warp in {*zip(addresses.tolist(), warps.tolist(), strict=True)}:
            value = int.from_bytes(self.grid.memory.bytes_at(address, size).tobytes(), "little")
            who = clocks.number, warp
            epoch = int(clocks.seen[ORDERED, warp, warp])
            self._loads.setdefault(address, {})[who] = _Load(value, epoch, clocks, place)
            self._early.pop((address, who), None)

    def store(self, addresses: np.ndarray, values: np.ndarray, warps: np.ndarray) -> None:
        """The executing threads store words. warps: the warp of each address"""
        clocks = self.grid.executing.cta.cluster.clocks
        clocks.learn_found(set(warps.tolist()))
        for address, value, warp in zip(addresses.tolist(), values.tolist(), warps.tolist(), strict=True):
            for (number, other), load in self._loads.get(address, {}).items():
                seen = clocks.seen[:, warp] if number == clocks.number else clocks.others[warp].get(number)
                known = 0 if seen is None or other >= seen.shape[1] else seen[[ORDERED, POLLED], other].max()
                if value < load.value and load.epoch > known:
                    self._early[address, (number, other)] = self._fault(address, value, load)

    def count(self, places: set[int], warps: np.ndarray) -> None:
        """Warps write to places by strong operations."""
        if self._loads:
            clocks = self.grid.executing.cta.cluster.clocks
            clock = clocks.release(warps)
            for place in places:
                self._counts[place] = merged(self._counts.get(place, {}), clock.others | {clocks.number: clock.seen})

    def find(self, places: set[int], warps: np.ndarray) -> None:
        """Warps read at places by strong operations."""
        found = {place: self._counts[place] for place in places & self._counts.keys()}
        for warp in warps.tolist() if found else ():
            self.grid.executing.cta.cluster.clocks.found.setdefault(warp, {}).update(found)

    def _fault(self, address: int, value: int, load: _Load) -> Fault:
        base, size = self.grid.memory.tensor_at(np.array([address], np.uint64), 1)
        fault = Fault(
            "global-race",
            f"byte {address - base} of {size} at {base:#x} is set from {load.value} to {value}, and nothing orders "
            f"this after the load of {load.value} by which another thread went on: it might have waited forever",
            advice="the last thread to use a ticket must reset it, behind an acquire of what the others release",
            tensor=self.grid.memory.name_of(base, size),
            second=load.place(),
            second_is="the load",
        )
        fault.place = self.grid.place()()
        return fault

    def finish(self) -> None:
        """The launch has ended: threads whose values were taken back had gone on."""
        for fault in self._early.values():
            self.grid.findings.add(fault)
