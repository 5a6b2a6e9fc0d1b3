"""Vector clocks, which say what precedes what, and the accesses of memory that they are compared with.

Each warp of a cluster counts epochs, and knows for every other warp the latest epoch that precedes its own present.
Work that is asynchronous has components of its own in these clocks: an mbarrier (the copies that it tracks; an epoch is
a phase) and each owner of groups (bulk stores, wgmma; an epoch is a group). Memory has a shadow: which event wrote a
granule last, and which event of each component read it last.
"""

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator.errors import Place

WARP = 32
WAITED = "griddepcontrol.wait"  # the owner of a component whose epoch is 1 once a thread has executed it
GRANULE = 16  # bytes; a shadow becomes finer when a smaller access comes

# The rows of `Clock.seen`. Each has the latest epoch of a component for which it holds that:
ORDERED = 0  # it precedes
SHARED, GLOBAL = 1, 2  # it precedes, and a fence for the async proxy's accesses of this memory is in between
INITIALIZED = 3  # each mbarrier.init in it precedes
FENCED = 3  # for accesses of tensor memory: it precedes, and a tcgen05.fence::before_thread_sync is in between
POLLED = 4  # it precedes what a strong operation, not of an order that releases and acquires, has found
_ROWS = 5

# Scopes: which other threads an operation is ordered with. Those of .sys are here all threads of the GPU.
CTA, CLUSTER, GPU = range(3)
_SCOPES = {"cta": CTA, "cluster": CLUSTER, "gpu": GPU, "gl": GPU, "sys": GPU}


@functools.cache
def scope_of(opcode: str) -> int:
    """The scope of a fence, or of a strong operation on global memory; of most that name none it is .gpu or wider."""
    return next((_SCOPES[part] for part in opcode.split(".") if part in _SCOPES), GPU)


class Clock(NamedTuple):
    """What precedes something: epochs of the cluster's components, and of other clusters by number."""

    seen: np.ndarray  # (_ROWS, components) of int32. Later components have not been seen.
    others: dict[int, np.ndarray]


def joined(a: Clock | None, b: Clock | None) -> Clock | None:
    """The clock of what precedes either of two things. None precedes nothing."""
    if a is None or b is None:
        return b if a is None else a
    return Clock(_maximum(a.seen, b.seen), merged(a.others, b.others))


def _maximum(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.shape[1] < b.shape[1]:
        a, b = b, a
    result = a.copy()
    np.maximum(result[:, : b.shape[1]], b, out=result[:, : b.shape[1]])
    return result


def merged(a: dict[int, np.ndarray], b: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Joins what two clocks know of other clusters."""
    if a is b or not b:
        return a
    if not a:
        return b
    news = ((cluster, seen, a.get(cluster)) for cluster, seen in b.items())
    return a | {cluster: seen if old is None else _maximum(old, seen) for cluster, seen, old in news if old is not seen}


def _of_epoch(component: int, epoch: int) -> np.ndarray:
    """A `Clock.seen` that knows one epoch of one component, in all rows."""
    seen = np.zeros((_ROWS, component + 1), np.int32)
    seen[:, component] = epoch
    return seen


def _fenced(seen: np.ndarray) -> np.ndarray:
    """A copy of `Clock.seen` behind a fence for the async proxy's accesses of global memory."""
    result = seen.copy()
    result[GLOBAL] = result[ORDERED]
    return result


class Clocks:
    """The clocks of a cluster's warps. Warps are the first components."""

    def __init__(self, num_warps: int, number: int):
        self.num_warps, self.number = num_warps, number
        self.components: dict[Hashable, int] = {}
        self.products: set[int] = set()  # the components of tcgen05.mma
        self.loads_and_stores: set[int] = set()  # the components of tcgen05.ld and tcgen05.st
        # The accesses of tensor memory that need no tcgen05.fence any more: for each warp, the epochs of components.
        self.fenced = np.zeros((num_warps, num_warps + 16), np.int32)
        self.seen = np.zeros((_ROWS, num_warps, num_warps + 16), np.int32)
        own = np.arange(num_warps)
        self.seen[ORDERED, own, own] = 1
        self.others: list[dict[int, np.ndarray]] = [{} for _ in range(num_warps)]  # other clusters, of each warp
        self.at_fence: dict[tuple[int, int], Clock] = {}  # (warp, scope) -> its clock at its latest fence so wide
        self.has_relaxed_arrivals = False  # at mbarriers, or waits there
        # (warp, scope) -> what a fence at least so wide lets it see, after a relaxed load
        self.until_fence: dict[tuple[int, int], Clock | None] = {}
        # warp -> address -> what strong writes there come after, by cluster: `POLLED`. It is learned when it matters,
        # because a thread that polls finds much of it many times.
        self.found: dict[int, dict[int, dict[int, np.ndarray]]] = {}
        # warp -> asynchronous work that its relaxed waits have found complete; what it issues later comes after that
        self.completed: dict[int, Clock] = {}

    def component(self, owner: Hashable) -> int:
        """The number of an owner's component; a new owner gets the next number."""
        number = self.components.get(owner)
        if number is None:
            number = self.components[owner] = self.num_warps + len(self.components)
            if number >= self.seen.shape[2]:
                self.seen = np.pad(self.seen, ((0, 0), (0, 0), (0, number)))
                self.fenced = np.pad(self.fenced, ((0, 0), (0, number)))
        return number

    def of_epoch(self, owner: Hashable, epoch: int) -> Clock | None:
        """A clock that knows an epoch of asynchronous work and its proxy fence. None if there was no such work."""
        if owner not in self.components:
            return None
        return Clock(_of_epoch(self.components[owner], epoch), {})

    def complete(self, warp: int, clock: Clock | None) -> None:
        """Records that a relaxed wait of a warp has found the asynchronous work in a clock complete."""
        if clock is not None:
            seen = clock.seen.copy()
            seen[:, : self.num_warps] = 0
            known = joined(self.completed.get(warp), Clock(seen, {}))
            assert known is not None
            self.completed[warp] = known

    def before_work(self, row: int, warps: Any) -> np.ndarray:
        """The epochs of each component that precede asynchronous work which all of these warps issue now."""
        seen = self.seen[row, warps]
        for i, warp in enumerate(warps):
            if warp in self.completed:
                known = self.completed[warp].seen[row]
                seen[i, : len(known)] = np.maximum(seen[i, : len(known)], known)
        return seen.min(axis=0)

    def tick(self, warps: Any) -> None:
        """Starts a new epoch of each warp: clocks that others have got do not cover it."""
        self.seen[ORDERED, warps, warps] += 1

    def release(self, warps: Any) -> Clock:
        """The clock of all that the warps did until now. What they do next is in a new epoch."""
        if self.found:
            self.learn_found(warps)
        clock = Clock(self.seen[:, warps].max(axis=1), functools.reduce(merged, [self.others[w] for w in warps]))
        self.tick(warps)
        return clock

    def learn_found(self, warps: Any) -> None:
        """Records what the warps have `found`."""
        for warp in warps:
            for number, seen in (item for counts in self.found.pop(warp, {}).values() for item in counts.items()):
                latest = np.maximum(seen[ORDERED], seen[POLLED])
                if number == self.number:
                    known = self.seen[POLLED, warp, : len(latest)]
                    np.maximum(known, latest, out=known)
                else:
                    only = np.zeros_like(seen)
                    only[POLLED] = latest
                    self.others[warp] = merged(self.others[warp], {number: only})

    def found_by(self, warp: int) -> Clock:
        """The clock of what comes after something that a warp does now only because it does that: see `POLLED`."""
        seen = np.zeros_like(self.seen[:, warp])
        seen[POLLED] = np.maximum(self.seen[ORDERED, warp], self.seen[POLLED, warp])
        return Clock(seen, {})

    def acquire(self, warps: Any, clock: Clock | None) -> None:
        """Orders what a clock knows before what the warps do from now on."""
        if clock is not None:
            width = clock.seen.shape[1]
            self.seen[:, warps, :width] = np.maximum(self.seen[:, warps, :width], clock.seen[:, None])
            if clock.others:
                for warp in warps:
                    self.others[warp] = merged(self.others[warp], clock.others)

    def fence_others(self, warp: int) -> None:
        """Puts an async proxy fence for global memory behind what a warp knows of other clusters."""
        self.others[warp] = {number: _fenced(seen) for number, seen in self.others[warp].items()}

    def fence_before_sync(self, warps: Any) -> None:
        """Records tcgen05.fence::before_thread_sync."""
        components = list(self.loads_and_stores)
        for warp in warps:
            self.seen[FENCED, warp, components] = self.seen[ORDERED, warp, components]

    def fence_after_sync(self, warps: Any) -> None:
        """Records tcgen05.fence::after_thread_sync."""
        self.fenced[warps] = np.maximum(self.fenced[warps], self.seen[FENCED, warps])

    def own_tensor_access(self, warp: int, component: int) -> None:
        """Records that a component has accesses of tensor memory by a warp, which itself needs no fence for them."""
        self.fenced[warp, component] = np.iinfo(np.int32).max

    def learn(self, warps: Any, component: int, epoch: int) -> None:
        """Records that the warps have waited for an epoch of asynchronous work."""
        self.seen[:INITIALIZED, warps, component] = np.maximum(self.seen[:INITIALIZED, warps, component], epoch)


class Threads(NamedTuple):
    """The threads of an access, in the order of its addresses."""

    warps: np.ndarray  # the warps, in order
    which: np.ndarray  # the index of each thread's warp in `warps`
    warp: np.ndarray  # the warp of each thread
    lane: np.ndarray


@functools.lru_cache(4096)
def threads_of(mask: int) -> Threads:
    """The threads of a mask of a CTA's threads, in order."""
    data = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
    threads = np.flatnonzero(np.unpackbits(data, bitorder="little"))
    warps, which = np.unique(threads // WARP, return_inverse=True)
    return Threads(warps, which, threads // WARP, (threads % WARP).astype(np.int8))


class Events:
    """Accesses, numbered from 1. Number 0 precedes everything."""

    def __init__(self):
        self.cluster = np.zeros(1024, np.int32)
        self.component = np.zeros(1024, np.int32)
        self.epoch = np.zeros(1024, np.int32)
        self.is_async = np.zeros(1024, np.bool_)
        self.is_atomic = np.zeros(1024, np.bool_)  # an atomic operation on shared memory, or a strong one on global
        self.scope = np.zeros(1024, np.int8)  # of a strong operation on global memory
        self.places: list[Callable[[], Place] | None] = [None]

    def add(
        self,
        clocks: Clocks,
        components: Any,
        epochs: Any,
        is_async: bool,
        place: Callable[[], Place],
    ) -> np.ndarray:
        """Adds an event for each component, all at the same place. Returns their numbers."""
        first, count = len(self.places), len(components)
        if first + count > len(self.component):
            for name in ("cluster", "component", "epoch", "is_async", "is_atomic", "scope"):
                old = getattr(self, name)
                setattr(self, name, np.concatenate([old, np.zeros_like(old)]))
        self.places += [place] * count
        self.cluster[first : first + count] = clocks.number
        self.component[first : first + count] = components
        self.epoch[first : first + count] = epochs
        self.is_async[first : first + count] = is_async
        return np.arange(first, first + count, dtype=np.int32)

    @property
    def count(self) -> int:
        return len(self.places)

    def place(self, event: int) -> Place:
        """The threads and the instruction of an event."""
        place = self.places[event]
        assert place is not None
        return place()


def one_of_each(events: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """The indices of the first chosen occurrence of each event, in order: an array (events, dimensions)."""
    first = np.unique(events[chosen], return_index=True)[1]
    return np.argwhere(chosen)[np.sort(first)]


class Shadow:
    """Who accessed each granule of some memory last."""

    def __init__(self, size: int):
        self.granule = GRANULE
        count = -(-size // GRANULE)
        self.writes = np.zeros(count, np.int32)  # events
        self.write_lanes = np.zeros(count, np.int8)
        self.columns: dict[int, int] = {}  # component -> the column of its reads
        self.reads = np.zeros((count, 16), np.int32)
        self.read_lanes = np.zeros((count, 16), np.int8)

    def granules(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """The granules of accesses of `size` bytes each, with shape (accesses, granules per access)."""
        if size < self.granule:
            self.refine(size)
        first = offsets.astype(np.intp) // self.granule
        steps = size // self.granule
        return first[:, None] if steps == 1 else first[:, None] + np.arange(steps)

    def of_chunks(self, chunks: np.ndarray) -> np.ndarray:
        """The granules of numbered chunks of 16 bytes."""
        steps = GRANULE // self.granule
        return chunks if steps == 1 else (chunks[:, None] * steps + np.arange(steps)).reshape(-1)

    def refine(self, size: int) -> None:
        """Makes granules `size` bytes large; each gets the events of the larger one that it was in."""
        steps, self.granule = self.granule // size, size
        self.writes, self.write_lanes = self.writes.repeat(steps), self.write_lanes.repeat(steps)
        self.reads, self.read_lanes = self._repeated(self.reads, steps), self._repeated(self.read_lanes, steps)

    def _repeated(self, old: np.ndarray, steps: int) -> np.ndarray:
        """Repeats each row `steps` times. Columns that no component uses yet stay untouched memory."""
        new = np.zeros((len(old) * steps, old.shape[1]), old.dtype)
        used = len(self.columns)
        if used:
            new[:, :used] = old[:, :used].repeat(steps, axis=0)
        return new

    def column(self, component: int) -> int:
        """The column of a component's reads. Adding one may replace `reads` and `read_lanes`."""
        number = self.columns.get(component)
        if number is None:
            number = self.columns[component] = len(self.columns)
            if number == self.reads.shape[1]:
                self.reads, self.read_lanes = (
                    np.concatenate([old, np.zeros_like(old)], axis=1) for old in (self.reads, self.read_lanes)
                )
        return number

    def components(self) -> np.ndarray:
        """The component of each column."""
        return np.array(list(self.columns), np.intp)
