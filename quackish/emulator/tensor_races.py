"""Finds accesses of tensor memory that nothing orders: all of them are asynchronous. Clocks are those of `clocks`."""

from typing import Any

import numpy as np

from quackish.emulator.clocks import FENCED, GRANULE, ORDERED, one_of_each
from quackish.emulator.errors import Fault
from quackish.emulator.races import AsyncRaces, Races

LANES, COLUMNS = 128, 512
GROUP = 16  # lanes that instructions access together


class TensorRaces(AsyncRaces):
    """The accesses of the tensor memory that one CTA has allocated. A granule is a column of a group of lanes."""

    rule = "tensor-race"

    def __init__(self, races: Races, cta: Any):
        super().__init__(races, cta, LANES // GROUP * COLUMNS * GRANULE)

    def _where(self, granule: int) -> str:
        group, column = divmod(int(granule), COLUMNS)
        return f"tensor memory, column {column} of lanes {GROUP * group} to {GROUP * group + GROUP - 1}, of {self.cta}"

    @staticmethod
    def granules(lanes: np.ndarray, column: int, count: int) -> np.ndarray:
        """The granules of `count` columns in the groups of these lanes."""
        groups = np.flatnonzero(np.bincount(lanes.reshape(-1) // GROUP, minlength=LANES // GROUP))
        return (groups[:, None] * COLUMNS + np.arange(column, column + count)).reshape(-1)

    def _check_fences(
        self, granules: np.ndarray, found: np.ndarray, late: np.ndarray, warps: list[int], component: int
    ) -> None:
        # "The tcgen05.fence::before_thread_sync orders all the prior asynchronous tcgen05 operations with respect to
        # the subsequent tcgen05 and the execution ordering operations. The tcgen05.fence::after_thread_sync orders all
        # the subsequent asynchronous tcgen05 operations with respect to the prior tcgen05 and the execution ordering
        # operations." tcgen05.commit implies the first one. (PTX, tcgen05.fence and tcgen05.commit)
        (warp,), events, clocks = warps, self.races.events, self.clocks
        missing = (events.epoch[found] > clocks.fenced[warp, events.component[found]]) & ~late
        if missing.any():
            missing &= ~self._in_order(events.component[found], component)
        for index in one_of_each(found, missing) if missing.any() else ():
            event = found[tuple(index)]
            is_before = events.epoch[event] <= clocks.seen[FENCED, warp, events.component[event]]
            which = "after_thread_sync behind" if is_before else "before_thread_sync in front of"
            self.races.grid.found(
                Fault(
                    "tensor-memory-fence",
                    f"no tcgen05.fence::{which} the barrier between two threads' accesses of "
                    f"{self._where(granules[index[0]])}",
                    second=events.place(event),
                    second_is="the first access",
                )
            )

    # Loads and stores of a warp

    def load(self, warp: int, lanes: np.ndarray, column: int, count: int) -> int:
        """A warp issues a load. Returns its number."""
        warps, component, number = self._begin("tcgen05.ld", warp)
        self.read_later(self.granules(lanes, column, count), warps, component, number)
        return number

    def are_written(self, lanes: np.ndarray, column: int, count: int) -> bool:
        """True if `count` columns in the groups of these lanes have been written since their allocation."""
        return bool(self.shadow.writes[self.granules(lanes, column, count)].all())

    def unwritten(self, lanes: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Which of these words have not been written since their allocation."""
        return self.shadow.writes[lanes // GROUP * COLUMNS + columns] == 0

    def loaded(self, warp: int, number: int) -> None:
        """A warp has waited for its loads, or computes with a register that the load wrote.

        "This form of register dependency does not imply any other form of ordering." (PTX, Register dependencies, same
        thread) But kernels rely on it, and are right: what has come to a register has been read.
        """
        self._learn("tcgen05.ld", warp, number)

    def store(self, warp: int, lanes: np.ndarray, column: int, count: int) -> None:
        """A warp issues a store."""
        self.write_later(self.granules(lanes, column, count), *self._begin("tcgen05.st", warp))

    def stored(self, warp: int) -> None:
        """A warp has waited for its stores."""
        self._learn("tcgen05.st", warp, self.races.group(self.cta, ("tcgen05.st", warp))[1] - 1)

    def _begin(self, kind: str, warp: int) -> tuple[list[int], int, int]:
        """Starts a group of one access. Returns (warps, component, epoch), as `read_later` takes them."""
        component, epoch = self.races.group(self.cta, (kind, warp))
        self.races.commit(self.cta, (kind, warp))
        number = self.races.first_warp(self.cta) + warp
        self.clocks.loads_and_stores.add(component)
        self.clocks.own_tensor_access(number, component)
        return [number], component, epoch

    def _learn(self, kind: str, warp: int, number: int) -> None:
        """Records that a warp has waited for its accesses up to a number."""
        component, _ = self.races.group(self.cta, (kind, warp))
        self.clocks.learn([self.races.first_warp(self.cta) + warp], component, number)

    # Allocation

    def free(self, column: int, count: int, warp: int) -> None:
        """A warp frees columns. Reports work that may still access them."""
        granules, events = self.granules(np.arange(LANES), column, count), self.races.events
        width = len(self.shadow.columns)
        found = np.concatenate([self.shadow.writes[granules, None], self.shadow.reads[granules, :width]], axis=1)
        late = events.epoch[found] > self.clocks.seen[ORDERED, warp, events.component[found]]
        if late.any():
            i, j = np.argwhere(late)[0]
            self.races.grid.found(
                Fault(
                    self.rule,
                    f"tcgen05.dealloc of {self._where(granules[i])}, and nothing has waited for the end of work that "
                    "accesses it",
                    second=events.place(found[i, j]),
                    second_is="the work",
                )
            )
        self.shadow.writes[granules] = 0
        self.shadow.reads[granules] = 0
