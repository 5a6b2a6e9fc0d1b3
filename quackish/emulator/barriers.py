"""Barriers: mbarriers in shared memory, named barriers of a CTA, and the barrier of a cluster."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator import waits
from quackish.emulator.clocks import Clock, joined
from quackish.emulator.errors import Fault, Place
from quackish.emulator.threads import Cta, Parked, num_warps

# The limit of tx-count and of the counts of arrivals (PTX, Contents of the mbarrier object): the counts of
# arrivals go from 1 (a pending count from 0), tx-count from the negative limit, to 2^20 - 1.
MAX_COUNT = (1 << 20) - 1


class Arrival(NamedTuple):
    """The latest arrival at an mbarrier by a component of another CTA's clocks."""

    epoch: int
    phase: int
    place: Callable[[], Place]
    # Of a tcgen05.commit with products: the component and epoch of its issue, and the latest epoch with products.
    issued: tuple[int, int, int] | None

    def is_under_way(self, component: int, seen: np.ndarray) -> bool:
        """True if only a commit's signal may be late: `seen` has its issue, and the products of its component."""
        if self.issued is None:
            return False
        warp, epoch, products = self.issued
        return bool(epoch <= seen[warp] and products <= seen[component])


class Mbarrier:
    """An mbarrier object. A phase ends when no arrival and no transaction is pending."""

    def __init__(self, cta: Cta, offset: int, count: int):
        if not 1 <= count <= MAX_COUNT:
            raise Fault("mbarrier-count", f"mbarrier.init with a count of {count}; valid are 1 to {MAX_COUNT}")
        self.cta, self.offset, self.count = cta, offset, count
        self.pending, self.transactions, self.phase = count, 0, 0
        self.arrived: Clock | None = None  # what precedes the arrivals so far
        self.completed: Clock | None = None  # what precedes the end of the last phase
        self.initialized: tuple[int, int] = (0, 0)  # (warp, epoch)
        self.users: set[tuple[int, int]] = set()  # see races.Races.check_initialized
        self.remote: dict[int, Arrival] = {}  # by component
        # The components of the warps that have arrived in this phase and in the one before -> the epoch of the arrival.
        self.arrivals: dict[int, int] = {}
        self.last_arrivals: dict[int, int] = {}
        self.waits: dict[int, waits.Wait] = {}  # by component of the warp
        self.observed = 0  # threads have waited for the ends of so many phases
        self.waiting: list[Parked] = []

    def __str__(self) -> str:
        return (
            f"mbarrier at {self.offset:#x} of {self.cta}: phase {self.phase}, {self.pending} of {self.count} arrivals "
            f"and {self.transactions} bytes pending"
        )

    def arrived_from(
        self, component: int, epoch: int, place: Callable[[], Place], issued: tuple[int, int, int] | None = None
    ) -> None:
        """Records an arrival from another CTA."""
        self.remote[component] = Arrival(epoch, self.phase, place, issued)

    @property
    def is_unused(self) -> bool:
        """True if the mbarrier is as `mbarrier.init` leaves it."""
        return (self.phase, self.pending, self.transactions) == (0, self.count, 0) and not self.waiting

    def arrive(self, count: int) -> None:
        """Counts arrivals, which may end the phase. Raises Fault if the phase expects fewer."""
        # An arrival beyond the pending count would make it negative, which is outside its range.
        if not 1 <= count <= self.pending:
            raise Fault("mbarrier-count", f"{count} arrivals at an mbarrier that expects {self.pending} more: {self}")
        self.pending -= count
        self._check()

    def expect(self, size: int) -> None:
        """Adds `size` bytes to the pending transactions (expect-tx)."""
        self._add_transactions(size)

    def complete(self, size: int) -> None:
        """Takes `size` bytes off the pending transactions (complete-tx), which may end the phase."""
        self._add_transactions(-size)
        self._check()

    def _add_transactions(self, size: int) -> None:
        self.transactions += size
        if abs(self.transactions) > MAX_COUNT:
            raise Fault("mbarrier-count", f"transaction bytes outside -(2^20 - 1) to 2^20 - 1: {self}")

    def _check(self) -> None:
        """If nothing is pending, ends the phase and releases the threads that wait for it."""
        self.cta.grid.num_events += 1
        if self.pending == 0 and self.transactions == 0:
            waits.check(self)
            self.phase += 1
            self.pending = self.count
            self.last_arrivals, self.arrivals = self.arrivals, {}
            self._order()
            self.cta.grid.num_phases += 1
            waiting, self.waiting = self.waiting, []
            for parked in waiting:
                parked.release()

    def _order(self) -> None:
        """Orders the arrivals and copies of the phase that ends now before what waits for it."""
        copies = self.cta.cluster.clocks.of_epoch(self, self.phase)
        self.completed = joined(joined(self.completed, self.arrived), copies)

    def has_completed(self, parity: int) -> bool:
        """True if the phase with this parity, which is the current or the previous one, has completed."""
        return self.phase & 1 != parity & 1


def mbarrier_at(cta: Cta, offset: int) -> Mbarrier:
    """The mbarrier at an offset of a CTA's shared memory. Raises Fault if none is initialized there."""
    barrier = cta.mbarriers.get(offset)
    if barrier is None:
        raise Fault("mbarrier-uninitialized", f"there is no initialized mbarrier at {offset:#x} of {cta}")
    return barrier


class NamedBarrier:
    """One of a CTA's 16 barriers."""

    def __init__(self, cta: Cta, number: int):
        self.cta, self.number = cta, number
        self.expected: int | None = None  # number of threads, or None for all of the CTA
        self.warps = self.arrived = 0
        self.clock: Clock | None = None  # what precedes the arrivals
        self.arrivals: dict[int, int] = {}  # as those of an Mbarrier; empty if all threads of the CTA take part
        self.waiting: list[Parked] = []
        self.votes: list[np.ndarray] = []  # predicates of the threads that have arrived with one: barrier.red
        self.results: list[Callable[[np.ndarray], None]] = []  # called with all predicates

    def __str__(self) -> str:
        expected = "all" if self.expected is None else self.expected
        return f"barrier {self.number} of {self.cta}: {32 * self.warps} of {expected} threads arrived"

    def arrive(self, lanes_mask: int, expected: int | None) -> None:
        """Counts the warps of these threads. expected: the barrier's threads, or None for all of the CTA."""
        if self.warps and expected != self.expected:
            raise Fault("barrier-count", f"a thread expects {expected} threads, others {self.expected}: {self}")
        # "When specifying a thread count, the value must be a multiple of the warp size." (PTX, bar)
        if expected is not None and (expected % 32 or expected == 0):
            raise Fault("barrier-count", f"a barrier of {expected} threads, which is not a multiple of 32")
        self.expected = expected
        races, lanes = self.cta.grid.races, self.cta.lanes(lanes_mask)
        if past := self.cta.past_barriers.get(self.number):
            races.check_arrival(lanes, self, past)
        if expected is not None:
            self.arrivals |= races.epochs(lanes)
        self.clock = joined(self.clock, races.arrive(lanes))
        self.warps += num_warps(lanes_mask)
        self.arrived |= lanes_mask

    def check(self) -> None:
        """Releases the waiting threads if all have arrived."""
        if not self.warps:
            return
        live_warps = num_warps(self.cta.live)
        needed = live_warps if self.expected is None else self.expected // 32
        if self.warps > needed and self.expected is not None:
            raise Fault("barrier-count", f"more threads arrived than a barrier expects: {self}")
        if self.warps >= needed:
            self.cta.grid.num_events += 1
            self.cta.grid.num_phases += 1
            del self.cta.named_barriers[self.number]
            self.cta.past_barriers[self.number] = self.arrivals
            for write in self.results:
                write(np.concatenate(self.votes))
            for parked in self.waiting:
                # "when the barrier completes, prior memory accesses requested by this thread are performed relative
                # to all threads participating in the barrier" (PTX, bar)
                self.cta.grid.races.acquire(self.cta.lanes(parked.mask), self.clock)
                parked.release()


def named_barrier(cta: Cta, number: int) -> NamedBarrier:
    """The CTA's barrier with this number, created if no thread has arrived at it."""
    # "Source operand a specifies a logical barrier resource as an immediate constant or register with value 0 through
    # 15." (PTX, bar)
    if not 0 <= number < 16:
        raise Fault("invalid-operand", f"barrier number {number}; valid are 0 to 15")
    return cta.named_barriers.setdefault(number, NamedBarrier(cta, number))


class ClusterBarrier:
    """The barrier of all threads of a cluster."""

    def __init__(self, cluster: Any):
        self.cluster = cluster
        self.arrived: dict[int, int] = {}  # rank -> threads
        self.passed: dict[int, int] = {}  # rank -> threads that have waited: they know that all CTAs have started
        self.clock: Clock | None = None  # what precedes the arrivals
        self.completed: Clock | None = None  # what precedes the end of the last phase
        self.waiting: list[Parked] = []

    def __str__(self) -> str:
        arrived = {f"rank {rank}": f"{mask.bit_count()} threads" for rank, mask in sorted(self.arrived.items())}
        return f"barrier of the cluster: arrived {arrived}"

    def arrive(self, cta: Cta, mask: int) -> None:
        arrived = self.arrived.get(cta.rank, 0)
        # A thread must wait between two arrivals; otherwise the behavior is undefined. (PTX, barrier.cluster)
        if arrived & mask:
            raise Fault("barrier-count", "barrier.cluster.arrive by threads that have arrived and not waited")
        self.arrived[cta.rank] = arrived | mask
        # "The optional .relaxed qualifier on barrier.cluster.arrive specifies that there are no memory ordering and
        # visibility guarantees provided for the memory accesses performed prior to barrier.cluster.arrive." (PTX)
        races, lanes = cta.grid.races, cta.lanes(mask)
        if ".relaxed" in cta.grid.opcode:
            clock = races.release_relaxed(lanes, within_cta=self.cluster.size == 1)
        else:
            clock = races.release(lanes)
        self.clock = joined(self.clock, clock)
        cta.grid.num_events += 1
        self.check()

    def check(self) -> None:
        # The phase ends when all threads of the cluster that have not exited have arrived. (PTX, barrier.cluster)
        if not self.arrived:
            return
        if any(cta.live & ~self.arrived.get(cta.rank, 0) for cta in self.cluster.ctas):
            return
        self.arrived = {}
        self.completed, self.clock = self.clock, None
        self.cluster.grid.num_phases += 1
        waiting, self.waiting = self.waiting, []
        for parked in waiting:
            parked.cta.grid.races.acquire(parked.cta.lanes(parked.mask), self.completed)
            parked.release()

    def wait(self, cta: Cta, mask: int, block: int) -> None:
        """Parks the threads whose phase is not complete; the other threads go on at `block`."""
        self.passed[cta.rank] = self.passed.get(cta.rank, 0) | mask  # they go on once all have arrived
        pending = self.arrived.get(cta.rank, 0) & mask
        if pending:
            self.waiting.append(cta.park(pending, block, self.__str__))
        if mask & ~pending:
            cta.grid.races.acquire(cta.lanes(mask & ~pending), self.completed)
        cta.add(block, mask & ~pending)
