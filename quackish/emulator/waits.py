"""Finds waits at mbarriers that might come too late, and then wait for another phase.

A wait names the parity of a phase, which is the current one or the one before. (PTX, mbarrier.test_wait) So it passes
while this phase is the last one that has ended, and again two phases later. Whatever ends the next phase must come
after the wait has passed: another thread's arrival that depends on it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish.emulator.clocks import ORDERED, POLLED
from quackish.emulator.errors import Fault, Place


class Wait(NamedTuple):
    """The latest wait of a warp that has passed at an mbarrier."""

    phase: int  # how many phases were complete
    epoch: int
    place: Callable[[], Place]


def passed(lanes: Any, barrier: Any) -> None:
    """Records that a wait of these threads at an mbarrier has passed."""
    races, clocks = lanes.cta.grid.races, lanes.cta.cluster.clocks
    clocks.tick(races.warps(lanes))  # what they released before does not have this wait
    place = races.grid.place()
    for warp, epoch in races.epochs(lanes).items():
        barrier.waits[warp] = Wait(barrier.phase, epoch, place)


def check(barrier: Any) -> None:
    """Checks that the end of an mbarrier's phase, which comes now, is behind the waits for the phase before."""
    clocks, clock = barrier.cta.cluster.clocks, barrier.arrived
    if clocks.has_relaxed_arrivals:  # it is not known what they come after
        return
    for warp, wait in barrier.waits.items():
        known = clock.seen[[ORDERED, POLLED], warp].max() if clock and warp < clock.seen.shape[1] else 0
        if wait.phase == barrier.phase and wait.epoch > known:
            fault = Fault(
                "barrier-phase",
                f"a wait has passed before the end of phase {barrier.phase}, and nothing orders this: if the wait came "
                f"later, it would be for the end of phase {barrier.phase + 1}: {barrier}",
                advice="its parity may be that of another phase; what ends the next phase must come after the wait",
            )
            fault.place = wait.place()
            barrier.cta.grid.findings.add(fault)
