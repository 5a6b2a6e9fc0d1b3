"""Finds accesses of global memory of which one writes, and which nothing orders in the same launch.

Clocks and events are those of `clocks`. Of several threads that have read the same bytes, the last one is known, and of
reads before the first write of a tensor, so many as MAX_READS. Bulk loads are compared with later launches only.

Threads of different clusters are ordered by strong operations on global memory:

    "A release pattern X synchronizes with an acquire pattern Y, if a write operation in X precedes a read operation in
    Y in observation order, and the first operation in X and the last operation in Y are morally strong." (PTX, Memory
    synchronization)

Strong operations are morally strong if the scope of each has the thread of the other. (PTX, Morally strong operations)
So a release is kept for each group of threads that its scope reaches: the CTA, the cluster and all threads. An acquire
sees what is kept for groups as wide as its own scope, or narrower.
"""

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator.clocks import (
    CLUSTER,
    CTA,
    GLOBAL,
    GPU,
    ORDERED,
    Clock,
    Clocks,
    Shadow,
    joined,
    merged,
    one_of_each,
    scope_of,
    threads_of,
)
from quackish.emulator.dependent_launches import DependentLaunch, Read
from quackish.emulator.errors import Fault, Place
from quackish.emulator.polls import Polls
from quackish.emulator.races import Races
from quackish.emulator.threads import Lanes


class Semantics(NamedTuple):
    """What the opcode of an access of global memory says about order."""

    is_strong: bool
    releases: bool
    acquires: bool
    writes: bool  # a load that also writes: an atomic operation
    is_not_coherent: bool  # ld.global.nc
    scope: int


@functools.cache
def semantics(opcode: str) -> Semantics:
    """Reads an opcode such as atom.acquire.gpu.global.add.u32."""
    # Without .sem, atom and red are relaxed. (PTX, atom and red)
    parts = opcode.split(".")
    is_atomic = parts[0] in ("atom", "red")
    orders = {"relaxed", "acquire", "release", "acq_rel", "volatile"} & set(parts)
    return Semantics(
        is_atomic or bool(orders),
        bool({"release", "acq_rel"} & orders),
        bool({"acquire", "acq_rel"} & orders),
        is_atomic,
        "nc" in parts,
        scope_of(opcode),
    )


_WORDS = 4, 8  # bytes of tickets and flags
MAX_READS = 1 << 14  # loads of a tensor that are kept until something writes it


class Load(NamedTuple):
    """A load of a tensor."""

    lanes: Lanes  # that execute it
    epochs: np.ndarray  # of their warps
    addresses: np.ndarray
    size: int
    which: Any  # the addresses that are in the tensor
    place: Callable[[], Place]


class GlobalRaces:
    """The accesses of global memory of one launch."""

    def __init__(self, races: Races, dependent: DependentLaunch):
        self.races, self.events = races, races.events
        self.dependent, self.polls = dependent, Polls(races.grid)
        self.shadows: dict[tuple[int, int], Shadow] = {}  # by tensor: (address, bytes)
        self.loads: dict[tuple[int, int], list[Load]] = {}  # of tensors without a shadow
        self.bulk_loads: dict[tuple[int, int], list[Read]] = {}
        # address -> group of threads -> what an acquire of these threads there sees, by cluster
        self.released: dict[int, dict[Hashable, dict[int, np.ndarray]]] = {}
        # (cluster, warp, group) -> what the warp has acquired last, one of those dictionaries
        self.acquired: dict[tuple[int, int, Hashable], dict[int, np.ndarray]] = {}
        # If no scope of the program is narrow, all threads are the only group.
        self.scopes = (CTA, CLUSTER, GPU) if races.grid.program.has_narrow_scopes else (GPU,)

    # Instructions of threads. A tensor is (address, bytes).

    def read(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any = slice(None)) -> None:
        """Threads read `size` bytes at addresses; those that `which` selects are in the tensor."""
        meaning = semantics(self.races.grid.opcode)
        self._check_launch(tensor, addresses[which], size, "reads")
        if meaning.is_strong:
            self._check_scopes(tensor, addresses, size, which, meaning)
            self._synchronize(addresses, meaning)
            if meaning.writes:
                self._record(tensor, addresses, size, which)
            elif size in _WORDS:
                self.polls.load(addresses[which], size, self._warps(len(addresses))[2][which])
            return
        if (shadow := self.shadows.get(tensor)) is not None:
            self._check(tensor, shadow, addresses, size, which)
            if meaning.is_not_coherent:
                self._check_not_written(tensor, shadow, addresses, size, which)
        self._record_read(tensor, addresses, size, which)

    def write(
        self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any, changes: Callable[[], np.ndarray]
    ) -> None:
        """Threads write `size` bytes at addresses; those that `which` selects are in the tensor.

        changes: returns which of them write other bytes than those that are there
        """
        meaning = semantics(self.races.grid.opcode)
        self._check_launch(tensor, addresses[which], size, "writes")
        if meaning.is_strong:
            self._check_scopes(tensor, addresses, size, which, meaning)
            self._synchronize(addresses, meaning, is_store=True)
        elif (shadow := self.shadows.get(tensor)) is not None:
            self._check(tensor, shadow, addresses, size, which, changes)
        if not meaning.is_strong and (tensor in self.loads or tensor in self.shadows):
            self._check_reads(tensor, addresses, size, which, changes)
        self._record(tensor, addresses, size, which)

    def store_word(self, addresses: np.ndarray, values: np.ndarray) -> None:
        """Threads are about to store one value each."""
        if values.dtype.itemsize in _WORDS and semantics(self.races.grid.opcode).is_strong:
            self.polls.store(addresses, values, self._warps(len(addresses))[2])

    def _check_launch(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, verb: str) -> None:
        """Reports an access of what an earlier launch may still write."""
        if self.dependent.running:
            lanes, memory = self.races.grid.executing, self.races.grid.memory
            name = functools.partial(memory.name_of, *tensor)
            for warp in self.races.warps(lanes).tolist():
                self.dependent.check(tensor, addresses, size, lanes.cta.cluster.clocks, warp, verb, name)

    def reads_of(self, tensor: tuple[int, int]) -> Iterator[Read]:
        """The last reads of a tensor by weak loads, and all by bulk loads."""
        for load in self.loads.get(tensor, ()):
            yield Read(load.addresses[load.which], load.size, load.place)
        yield from self.bulk_loads.get(tensor, ())
        if (shadow := self.shadows.get(tensor)) is not None and 0 in shadow.columns:
            events = shadow.reads[:, shadow.columns[0]]
            for event in np.unique(events[events > 0]).tolist():
                granules = np.flatnonzero(events == event).astype(np.uint64)
                addresses = np.uint64(tensor[0]) + granules * np.uint64(shadow.granule)
                yield Read(addresses, shadow.granule, functools.partial(self.events.place, event))

    def _shadow(self, tensor: tuple[int, int]) -> Shadow:
        shadow = self.shadows.get(tensor)
        if shadow is None:
            shadow = self.shadows[tensor] = Shadow(tensor[1])
            for load in self.loads.pop(tensor, []):
                self._add_load(tensor, load)
        return shadow

    def _record_read(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any) -> None:
        """Records the executing warps as the last readers, or keeps the read until something writes the tensor."""
        loads = None if tensor in self.shadows else self.loads.setdefault(tensor, [])
        if loads is not None and len(loads) == MAX_READS:
            return
        lanes = self.races.grid.executing
        warps = self.races.warps(lanes)
        epochs = lanes.cta.cluster.clocks.seen[ORDERED, warps, warps]
        load = Load(lanes, epochs, addresses, size, which, self.races.grid.place())
        if loads is None:
            self._add_load(tensor, load)
        else:
            loads.append(load)

    def _add_load(self, tensor: tuple[int, int], load: Load) -> None:
        shadow, clocks = self.shadows[tensor], load.lanes.cta.cluster.clocks
        events = self.events.add(clocks, self.races.warps(load.lanes), load.epochs, False, load.place)
        granules = shadow.granules(load.addresses[load.which] - np.uint64(tensor[0]), load.size)
        event = events[threads_of(load.lanes.mask).which[load.which]]
        shadow.reads[granules, shadow.column(0)] = event[:, None]

    def _check_reads(
        self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any, changes: Callable[[], np.ndarray]
    ) -> None:
        """Reports writes that nothing orders after the last read of their granules. changes: see `write`"""
        shadow = self._shadow(tensor)
        granules = shadow.granules(addresses[which] - np.uint64(tensor[0]), size)
        found = shadow.reads[granules, shadow.column(0)]
        if not found.any():
            return
        clocks, _, warp = self._warps(len(addresses))
        warp = warp[which]
        late = self._late(found, clocks, warp[:, None], ORDERED)
        if late.any():
            late &= changes()[:, None]
        for i, j in one_of_each(found, late) if late.any() else ():
            who = f"warp {warp[i] % self.races.grid.executing.cta.num_warps} writes"
            self._found(tensor, int(granules[i, j]) * shadow.granule, who, found[i, j], warp[i], "read")

    def _warps(self, count: int) -> tuple[Clocks, np.ndarray, np.ndarray]:
        """Returns (clocks, the warps that execute the instruction, the warp of each of its addresses)."""
        lanes = self.races.grid.executing
        warps = self.races.warps(lanes)
        if count != lanes.count:  # one of several threads' atomic operations
            return lanes.cta.cluster.clocks, warps, np.repeat(warps[:1], count)
        threads, first = self.races.threads(count)
        return lanes.cta.cluster.clocks, warps, threads.warp + first

    def _record(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any) -> None:
        """Records the executing warps as the last writers of the granules."""
        clocks, warps, warp = self._warps(len(addresses))
        shadow = self._shadow(tensor)
        events = self.events.add(clocks, warps, clocks.seen[ORDERED, warps, warps], False, self.races.grid.place())
        meaning = semantics(self.races.grid.opcode)
        self.events.is_atomic[events], self.events.scope[events] = meaning.is_strong, meaning.scope
        granules = shadow.granules(addresses[which] - np.uint64(tensor[0]), size)
        shadow.writes[granules] = events[np.searchsorted(warps, warp[which])][:, None]

    def _check(
        self,
        tensor: tuple[int, int],
        shadow: Shadow,
        addresses: np.ndarray,
        size: int,
        which: Any,
        changes: Callable[[], np.ndarray] | None = None,
    ) -> None:
        """Reports accesses that nothing orders after the last write of their granules. changes: see `write`

        Of writes, weak ones count, if they change what a weak write of another warp has left there.
        """
        granules = shadow.granules(addresses[which] - np.uint64(tensor[0]), size)
        found = shadow.writes[granules]
        if not found.any():
            return
        clocks, _, warp = self._warps(len(addresses))
        warp = warp[which]
        late = self._late(found, clocks, warp[:, None], ORDERED)
        if changes is not None and late.any():
            late &= ~self.events.is_atomic[found] & changes()[:, None]
        if late.any():
            verb = "reads" if changes is None else "writes"
            for i, j in one_of_each(found, late):
                who = f"warp {warp[i] % self.races.grid.executing.cta.num_warps} {verb}"
                self._found(tensor, int(granules[i, j]) * shadow.granule, who, found[i, j], warp[i])

    def _check_scopes(
        self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any, meaning: Semantics
    ) -> None:
        """Reports a strong operation and a strong write before it that nothing orders, if a scope lacks a thread."""
        shadow = self.shadows.get(tensor)
        if len(self.scopes) == 1 or shadow is None:
            return
        granules = shadow.granules(addresses[which] - np.uint64(tensor[0]), size)
        found = shadow.writes[granules]
        clocks, _, warp = self._warps(len(addresses))
        warp = warp[which]
        late = self._late(found, clocks, warp[:, None], ORDERED) & self.events.is_atomic[found]
        cta = self.races.grid.executing.cta
        in_cluster = self.events.cluster[found] == clocks.number
        in_cta = in_cluster & (self.events.component[found] // cta.num_warps == cta.rank)
        scope = np.minimum(self.events.scope[found], meaning.scope)
        late &= (scope < GPU) & ~np.where(scope == CTA, in_cta, in_cluster)
        for i, j in one_of_each(found, late) if late.any() else ():
            where = self._where(tensor, int(granules[i, j]) * shadow.granule)
            self.races.grid.found(
                Fault(
                    "global-race",
                    f"warp {warp[i] % cta.num_warps} accesses {where} by a strong operation, and the scope of this or "
                    "of the strong write before it does not have both threads",
                    advice="scope .gpu has the threads of all CTAs, .cluster those of a cluster",
                    tensor=self.races.grid.memory.name_of(*tensor),
                    second=self.events.place(found[i, j]),
                    second_is="the write",
                )
            )

    def _check_not_written(
        self, tensor: tuple[int, int], shadow: Shadow, addresses: np.ndarray, size: int, which: Any
    ) -> None:
        # ld.global.nc: "cache in non-coherent read-only cache" (PTX). What the cache has may be older than a write of
        # the same launch, even one that precedes the load.
        granules = shadow.granules(addresses[which] - np.uint64(tensor[0]), size)
        found = shadow.writes[granules]
        if found.any():
            i, j = np.argwhere(found)[0]
            self.races.grid.found(
                Fault(
                    "non-coherent-load",
                    f"a non-coherent load of {self._where(tensor, int(granules[i, j]) * shadow.granule)}, which this "
                    "launch has written",
                    advice="a load without .nc sees the write",
                    tensor=self.races.grid.memory.name_of(*tensor),
                    second=self.events.place(found[i, j]),
                    second_is="the write",
                )
            )

    def _late(self, found: np.ndarray, clocks: Clocks, warp: Any, row: int) -> np.ndarray:
        """Returns which of the found events the warps' clocks do not cover. row: ORDERED or GLOBAL."""
        cluster, component = self.events.cluster[found], self.events.component[found]
        epoch = self.events.epoch[found]
        is_own = cluster == clocks.number
        late = is_own & (epoch > clocks.seen[row, warp, np.where(is_own, component, 0)])
        foreign = ~is_own & (found > 0)
        if foreign.any():
            warp = np.broadcast_to(warp, found.shape)
            for number, one in {*zip(cluster[foreign].tolist(), warp[foreign].tolist(), strict=True)}:
                these = foreign & (cluster == number) & (warp == one)
                seen = clocks.others[one].get(number)
                if seen is None:
                    late |= these
                else:
                    known = np.pad(seen[row], (0, max(int(component[these].max()) + 1 - seen.shape[1], 0)))
                    late[these] = epoch[these] > known[component[these]]
        return late

    # Strong operations

    def _synchronize(self, addresses: np.ndarray, meaning: Semantics, is_store: bool = False) -> None:
        """Lets strong operations at these addresses release and acquire clocks."""
        lanes = self.races.grid.executing
        clocks, warps = lanes.cta.cluster.clocks, self.races.warps(lanes)
        places = set(addresses.tolist())
        groups = {CTA: (clocks.number, lanes.cta.rank), CLUSTER: clocks.number, GPU: None}
        reached = [(scope, groups[scope]) for scope in self.scopes if scope <= meaning.scope]
        if not is_store:
            self.polls.find(places, warps)
            self._acquire(clocks, warps, places, reached, meaning)
        if meaning.writes or is_store:
            self.polls.count(places, warps)
            now = clocks.release(warps) if meaning.releases else None
            if is_store:  # it hides earlier releases
                for place in places:
                    self.released.pop(place, None)
            for scope, group in reached:
                clock = now
                for warp in warps.tolist():
                    clock = joined(clock, clocks.at_fence.get((warp, scope)))
                if clock is not None:
                    for place in places:
                        self._release(self.released.setdefault(place, {}), group, clock, clocks.number)

    @staticmethod
    def _release(released: dict, group: Hashable, clock: Clock, cluster: int) -> None:
        """Adds a clock of a cluster to what is released for a group of threads.

        Earlier releases are still there: observation order passes through atomic operations.
        """
        released[group] = merged(released.get(group, {}), clock.others | {cluster: clock.seen})

    def _acquire(
        self,
        clocks: Clocks,
        warps: np.ndarray,
        places: set[int],
        groups: list[tuple[int, Hashable]],
        meaning: Semantics,
    ) -> None:
        """Lets warps see what was released at the places; with a relaxed operation, after their next fence.

        groups: (scope, group of threads) of those whose releases the operation sees
        """
        if self.races.grid.opcode.startswith("red"):
            # "atomic reductions conceptually perform a strong read as part of its read-modify-write sequence, this
            # strong read does not form an acquire pattern." (PTX, Release and Acquire Patterns)
            return
        released = [self.released[place] for place in places if place in self.released]
        for scope, group in groups if released else ():
            found = [of_groups[group] for of_groups in released if group in of_groups]
            if not found:
                continue
            who = clocks.number, int(warps[0]), group
            if meaning.acquires and len(warps) == len(found) == 1:
                if self.acquired.get(who) is found[0]:
                    continue  # a thread that polls finds the same many times
                self.acquired[who] = found[0]
            seen = functools.reduce(merged, found)
            own = seen.get(clocks.number, clocks.seen[:, 0, :0])
            clock = Clock(own, {cluster: other for cluster, other in seen.items() if cluster != clocks.number})
            if meaning.acquires:
                clocks.acquire(warps, clock)
            else:
                for warp in warps.tolist():
                    clocks.until_fence[warp, scope] = joined(clocks.until_fence.get((warp, scope)), clock)

    # The async proxy

    def write_later(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, issuer: tuple, epoch: int) -> None:
        """A bulk store writes rows of `size` bytes. `issuer` is (clocks, component, warp)."""
        clocks, component, warp = issuer
        self._check_launch(tensor, addresses, size, "writes")
        shadow, granules = self._rows(tensor, addresses, size)
        adds = self.races.grid.opcode.startswith("cp.reduce")
        found = shadow.writes[granules]
        if found.any():
            # Threads of a warp may issue the same store, so bulk stores are not compared with each other.
            late = self._late(found, clocks, warp, ORDERED) & ~self.events.is_async[found]
            if adds:
                late &= ~self.events.is_atomic[found]
            if late.any():
                for (i,) in one_of_each(found, late):
                    self._found(tensor, int(granules[i]) * shadow.granule, "asynchronous work writes", found[i])
        found = shadow.reads[granules, shadow.column(0)]
        if found.any():
            late = self._late(found, clocks, warp, ORDERED)
            for (i,) in one_of_each(found, late) if late.any() else ():
                where = int(granules[i]) * shadow.granule
                self._found(tensor, where, "asynchronous work writes", found[i], verb="read")
        event = self.events.add(clocks, [component], epoch, True, self.races.grid.place())[0]
        self.events.is_atomic[event], self.events.scope[event] = adds, GPU
        shadow.writes[granules] = event

    def read_later(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, clocks: Clocks, warp: int) -> None:
        """A bulk load reads rows of `size` bytes."""
        self._check_launch(tensor, addresses, size, "reads")
        self.bulk_loads.setdefault(tensor, []).append(Read(addresses, size, self.races.grid.place()))
        if tensor not in self.shadows:
            return
        shadow, granules = self._rows(tensor, addresses, size)
        found = shadow.writes[granules]
        if not found.any():
            return
        late = self._late(found, clocks, warp, ORDERED)
        if late.any():
            for (i,) in one_of_each(found, late):
                self._found(tensor, int(granules[i]) * shadow.granule, "asynchronous work reads", found[i])
        # "Accessing the same memory location across multiple proxies needs a cross-proxy fence. For the async proxy,
        # fence.proxy.async should be used to synchronize memory between generic proxy and the async proxy."
        # (PTX, Async Proxy)
        late = self._late(found, clocks, warp, GLOBAL) & ~self.events.is_async[found]
        if late.any():
            i = int(np.argmax(late))
            self.races.grid.found(
                Fault(
                    "proxy-fence",
                    f"the async proxy reads {self._where(tensor, int(granules[i]) * shadow.granule)}, and no "
                    "fence.proxy.async is between this and the write of it by a thread",
                    tensor=self.races.grid.memory.name_of(*tensor),
                    second=self.events.place(found[i]),
                    second_is="the write",
                )
            )

    def _rows(self, tensor: tuple[int, int], addresses: np.ndarray, size: int) -> tuple[Shadow, np.ndarray]:
        """The tensor's shadow, and the granules of rows of `size` bytes, which may have to be refined."""
        shadow = self._shadow(tensor)
        offsets = addresses - np.uint64(tensor[0])
        common = int(np.bitwise_or.reduce(offsets)) | size | shadow.granule
        common &= -common
        if common < shadow.granule:
            shadow.refine(common)
        first = offsets.astype(np.intp) // shadow.granule
        return shadow, (first[:, None] + np.arange(size // shadow.granule)).reshape(-1)

    # Faults

    @staticmethod
    def _where(tensor: tuple[int, int], offset: int) -> str:
        return f"global memory, byte {offset} of {tensor[1]} at {tensor[0]:#x}"

    def _found(
        self, tensor: tuple[int, int], offset: int, who: str, event: int, warp: int | None = None, verb: str = "write"
    ) -> None:
        """Reports an access, and that nothing orders the `event` before it: a write, or a read if the verb says so."""
        cluster, advice = self.races.grid.executing.cta.cluster, ""
        if self.events.is_async[event]:
            missing = "nothing has waited for the end (cp.async.bulk.wait_group, without .read) of asynchronous work"
        elif self.events.cluster[event] == cluster.clocks.number:
            missing = f"no barrier, or release and acquire, puts this after the {verb}"
            advice = "" if warp is None else self.races.advice(cluster, warp, event)
        else:
            missing = (
                f"no release after the {verb}, by its thread or behind a barrier, and acquire before this (such as a "
                "fence.acq_rel.gpu and an atomic operation) order them; that is of another cluster"
            )
        self.races.grid.found(
            Fault(
                "global-race",
                f"{who} {self._where(tensor, offset)}, and {missing}",
                advice=advice,
                tensor=self.races.grid.memory.name_of(*tensor),
                second=self.events.place(event),
                second_is=f"the {verb}",
            )
        )
