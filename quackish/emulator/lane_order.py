"""Finds lanes that go on as if a barrier at which another lane of their warp arrived or waited were their own.

Clocks are those of warps. What is kept here says which lanes of a warp a clock leaves out: those that accessed shared
memory before one of them arrived at a barrier alone, and those that go on after one of them has waited alone. A barrier
of the warp, or one at which all of its lanes arrive, orders them.

    "bar.warp.sync also guarantees memory ordering among threads participating in barrier. Thus, threads within warp
    that wish to communicate via memory can store to memory, execute bar.warp.sync, and then safely access values stored
    by other threads in warp." (PTX, bar.warp.sync)
"""

from typing import Any, NamedTuple

import numpy as np

from quackish.emulator.clocks import ORDERED, WARP, one_of_each, threads_of
from quackish.emulator.errors import Fault

WARP_MASK = (1 << WARP) - 1


class Release(NamedTuple):
    """An arrival by some lanes of a warp."""

    since: int  # the first event that it does not cover if another lane did it
    lanes: int  # the mask of the lanes that have arrived since then


class Wait(NamedTuple):
    """What lanes know that have not waited, while others of their warp have."""

    lanes: int  # the mask of those that have waited
    seen: np.ndarray  # the epochs of each component that the warp knew before


class LaneOrder:
    """The lanes of a cluster's warps."""

    def __init__(self, num_warps: int):
        # Event numbers: earlier events of the same warp precede what each thread does now.
        self.in_warp = np.zeros((num_warps, WARP), np.int32)
        self.last_access = np.zeros(num_warps, np.int32)  # the event of each warp's latest access of shared memory
        self.last_release = np.zeros(num_warps, np.int32)  # the next event at each warp's latest arrival of all lanes
        self.releases: dict[tuple[int, int], Release] = {}  # (warp, epoch) of those that leave accesses out
        self.latest: dict[int, Release] = {}  # by warp
        self.waits: dict[int, Wait] = {}  # by warp, until a barrier of its lanes

    def synchronize(self, lanes: Any, first_warp: int, now: int) -> None:
        """Orders what threads of these warps did before what the others do from now on. now: the next event"""
        threads = threads_of(lanes.mask)
        self.in_warp[threads.warp + first_warp, threads.lane] = now
        for warp in threads.warps.tolist() if self.waits else ():
            mine, live = _lanes_of(warp, lanes)
            if (wait := self.waits.get(first_warp + warp)) is not None:
                self.waits[first_warp + warp] = wait._replace(lanes=wait.lanes | mine)
                if (wait.lanes | mine) & live == live:
                    del self.waits[first_warp + warp]

    def release(self, lanes: Any, clocks: Any, first_warp: int, now: int) -> None:
        """Records an arrival of these threads at a barrier, before their release."""
        warps = threads_of(lanes.mask).warps
        if lanes.mask == lanes.cta.live:
            self.last_release[warps + first_warp] = now
            return
        for warp in warps.tolist():
            number, (mine, live) = first_warp + warp, _lanes_of(warp, lanes)
            if mine == live:
                self.last_release[number] = now
                continue
            since = max(int(self.in_warp[number, (mine & -mine).bit_length() - 1]), int(self.last_release[number]))
            if self.last_access[number] >= since:
                latest = self.latest.get(number)
                if latest and latest.since == since:
                    mine |= latest.lanes  # lanes that arrive one after another
                release = self.latest[number] = Release(since, mine)
                self.releases[number, int(clocks.seen[ORDERED, number, number])] = release

    def wait(self, lanes: Any, clocks: Any, first_warp: int) -> None:
        """Records that these threads have waited at a barrier, before their acquire."""
        if lanes.mask == lanes.cta.live:
            return
        for warp in threads_of(lanes.mask).warps.tolist():
            number, (mine, live) = first_warp + warp, _lanes_of(warp, lanes)
            if mine != live and number not in self.waits:
                self.waits[number] = Wait(mine, clocks.seen[ORDERED, number].copy())

    def left_out(self, events: np.ndarray, components: np.ndarray, epochs: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """True for events of lanes that the epochs which are known of their warps do not cover."""
        result = np.zeros(events.shape, np.bool_)
        # Pairs in one number are sorted faster than rows of two.
        pairs = np.unique(components[events > 0].astype(np.int64) << 32 | epochs[events > 0])
        for warp, epoch in zip((pairs >> 32).tolist(), (pairs & 0xFFFFFFFF).tolist(), strict=True):
            if release := self.releases.get((warp, epoch)):
                of_others = (release.lanes >> np.maximum(lanes, 0).astype(np.int64) & 1) == 0
                result |= (components == warp) & (epochs == epoch) & (events >= release.since) & of_others
        return result & (lanes >= 0)

    def unknown(self, components: np.ndarray, epochs: np.ndarray, warps: np.ndarray, lanes: np.ndarray) -> np.ndarray:
        """True for events that are not known to the lanes of these warps which access the same memory now."""
        result = np.zeros(epochs.shape, np.bool_)
        for warp in set(warps.tolist()) & self.waits.keys():
            wait = self.waits[warp]
            mine = (warps == warp) & (lanes >= 0) & (wait.lanes >> np.maximum(lanes, 0).astype(np.int64) & 1 == 0)
            seen = np.zeros(max(int(components.max()) + 1, len(wait.seen)), np.int32)
            seen[: len(wait.seen)] = wait.seen
            mine = mine.reshape(-1, *[1] * (epochs.ndim - 1))
            result |= mine & (epochs > seen[components]) & (components != warp)
        return result


def _lanes_of(warp: int, lanes: Any) -> tuple[int, int]:
    """The masks of these threads and of all live threads in one of their warps."""
    return lanes.mask >> WARP * warp & WARP_MASK, lanes.cta.live >> WARP * warp & WARP_MASK


# Checks. `races` is a races.SharedRaces.


def check_released(races: Any, granules: np.ndarray, found: np.ndarray, late: np.ndarray, epochs: np.ndarray) -> None:
    """Reports accesses by lanes for which another lane of their warp has arrived. late: those reported already

    found: the last writes of granules, or with one more dimension their last reads; epochs: those that are known of the
    components of `found`
    """
    shadow, events = races.shadow, races.races.events
    verb = "write" if found.ndim == granules.ndim else "read"
    lanes = shadow.write_lanes[granules] if verb == "write" else shadow.read_lanes[granules, : len(shadow.columns)]
    missing = races.lane_order.left_out(found, events.component[found], epochs, lanes) & ~late
    for index in one_of_each(found, missing) if missing.any() else ():
        event, granule = found[tuple(index)], granules[tuple(index[: granules.ndim])]
        _found(
            races,
            f"another lane of warp {races._warp(event)} has arrived at a barrier, and nothing orders that after the "
            f"{verb} of {races._where(granule)} by lane {lanes[tuple(index)]}",
            "bar.warp.sync belongs in front of the arrival",
            event,
            verb,
        )


def check_waited(
    races: Any, granules: np.ndarray, found: np.ndarray, late: np.ndarray, warps: np.ndarray, lanes: np.ndarray
) -> None:
    """Reports accesses now by lanes of `warps`, for which another lane has waited. found, late: see `check_released`"""
    events = races.races.events
    unknown = races.lane_order.unknown(events.component[found], events.epoch[found], warps, lanes)
    unknown &= ~late
    for index in one_of_each(found, unknown) if unknown.any() else ():
        event, granule = found[tuple(index)], granules[tuple(index[: granules.ndim])]
        verb = "write" if found.ndim == granules.ndim else "read"
        _found(
            races,
            f"another lane than {lanes[index[0]]} of its warp has waited for the {verb} of {races._where(granule)} by "
            f"warp {races._warp(event)}, and nothing orders this access after that",
            "bar.warp.sync belongs behind the wait",
            event,
            verb,
        )


def check_issuer(races: Any, granules: np.ndarray, warp: int, lane: int) -> None:
    """Checks that the writes by other lanes of a warp precede work that one of its lanes issues."""
    found, lanes = races.shadow.writes[granules], races.shadow.write_lanes[granules]
    late = (found >= races.lane_order.in_warp[warp, lane]) & (lanes != lane) & (lanes >= 0)
    late &= (races.races.events.component[found] == warp) & (found > 0)
    for (i,) in one_of_each(found, late) if late.any() else ():
        _found(
            races,
            f"lane {lane} issues work that reads {races._where(granules[i])}, and nothing orders that after the write "
            f"by lane {lanes[i]} of the same warp",
            "bar.warp.sync belongs in front of the work",
            found[i],
            "write",
        )


def _found(races: Any, message: str, advice: str, event: int, verb: str) -> None:
    second = races.races.events.place(event)
    races.races.grid.found(Fault("lane-race", message, advice=advice, second=second, second_is=f"the {verb}"))
