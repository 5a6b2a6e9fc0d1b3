"""Finds accesses of memory that nothing orders, and generic writes that the async proxy may not see.

    "Two conflicting memory operations are said to be in a data-race if they are not related in causality order and they
    are not morally strong." (PTX, Conflict and Data-races)

Causality order is followed by vector clocks, those of `clocks`. A warp's arrival at a barrier counts for all of its
threads. Threads of one warp are told apart only against each other.
"""

from collections.abc import Hashable
from typing import Any

import numpy as np

from quackish.emulator import lane_order
from quackish.emulator.advice import Access, barrier_between
from quackish.emulator.clocks import (
    CLUSTER,
    CTA,
    GLOBAL,
    GRANULE,
    INITIALIZED,
    ORDERED,
    SHARED,
    WAITED,
    WARP,
    Clock,
    Clocks,
    Events,
    Shadow,
    Threads,
    joined,
    one_of_each,
    scope_of,
    threads_of,
)
from quackish.emulator.errors import Fault


class AsyncRaces:
    """The accesses of memory of one CTA by asynchronous work. Methods report races to `grid.found`."""

    rule = ""  # which races here break

    def __init__(self, races: "Races", cta: Any, size: int):
        self.races, self.cta = races, cta
        self.clocks: Clocks = cta.cluster.clocks
        self.shadow = Shadow(size)

    # Asynchronous work. Its issuer is one warp, or the four of a warp group.

    def read_later(self, granules: np.ndarray, warps: list[int], component: int, epoch: int) -> None:
        """Records work that reads granules until its component reaches an epoch."""
        self._check_issue(granules, warps, component, "reads")
        column = self.shadow.column(component)  # may replace the arrays
        self.shadow.reads[granules, column] = self._async_event(component, epoch)

    def write_later(self, granules: np.ndarray, warps: list[int], component: int, epoch: int) -> None:
        """Records work that writes granules until its component reaches an epoch."""
        self._check_issue(granules, warps, component, "writes")
        shadow = self.shadow
        width = len(shadow.columns)
        found = shadow.reads[granules, :width]
        seen = self.clocks.before_work(ORDERED, warps)
        late = self.races.events.epoch[found] > seen[shadow.components()]
        if late.any():
            late &= ~self._in_order(shadow.components(), component)
        if late.any():
            for i, column in one_of_each(found, late):
                self._found(granules[i], "writes", "asynchronous work", found[i, column], "read")
        self._check_fences(granules, found, late, warps, component)
        shadow.writes[granules] = self._async_event(component, epoch)

    def _async_event(self, component: int, epoch: int) -> int:
        """Adds the event of work that is issued now."""
        return int(self.races.events.add(self.clocks, [component], epoch, True, self.races.grid.place())[0])

    def _check_issue(self, granules: np.ndarray, warps: list[int], component: int, verb: str) -> np.ndarray:
        """Checks that the last writes of granules precede work that `warps` issue now."""
        found, events = self.shadow.writes[granules], self.races.events
        seen = self.clocks.before_work(ORDERED, warps)
        late = events.epoch[found] > seen[events.component[found]]
        if late.any():
            late &= ~self._in_order(events.component[found], component)
        if late.any():
            for (i,) in one_of_each(found, late):
                self._found(granules[i], verb, "asynchronous work", found[i], "write")
        self._check_fences(granules, found, late, warps, component)
        return found

    def _check_fences(
        self, granules: np.ndarray, found: np.ndarray, late: np.ndarray, warps: list[int], component: int
    ) -> None:
        """Checks fences between earlier events and work that `warps` issue now. late: events that are reported"""

    def _in_order(self, earlier: np.ndarray, component: int) -> np.ndarray:
        """True for earlier components that finish before this one's work without being waited for."""
        # "some specific pairs of the asynchronous tcgen05 instructions form tcgen05 pipelines, where in the two
        # asynchronous operations are guaranteed to execute in the same order as the instructions that issued them",
        # such as tcgen05.mma and tcgen05.mma. (PTX, Pipelined tcgen05 Instructions)
        products = list(self.clocks.products)
        return np.isin(earlier, products) & (component in self.clocks.products)

    # Faults

    def _where(self, granule: int) -> str:
        """The place of a granule in words."""
        raise NotImplementedError

    def _found(self, granule: int, verb: str, by: str, event: int, other: str, warp: int | None = None) -> None:
        """Reports a race. verb: "reads" or "writes"; other: what the earlier event does, read or write.

        warp: the component of the warp that accesses memory now; None for asynchronous work
        """
        events = self.races.events
        if events.is_async[event]:
            why = f"and nothing has waited for the end of asynchronous work that {other}s it"
        else:
            why = f"and no barrier, mbarrier or fence puts this after the {other} of it by warp {self._warp(event)}"
        self.races.grid.found(
            Fault(
                self.rule,
                f"{by} {verb} {self._where(granule)}, {why}",
                advice="" if warp is None else self.races.advice(self.cta.cluster, warp, event),
                second=events.place(event),
                second_is=f"the {other}",
            )
        )

    def _warp(self, event: int) -> str:
        """The warp of an event and its CTA in words."""
        rank, warp = divmod(int(self.races.events.component[event]), self.cta.num_warps)
        return f"{warp} of {self.cta.cluster.ctas[rank]}"


class SharedRaces(AsyncRaces):
    """The accesses of the shared memory of one CTA. `races` knows who accesses it now."""

    rule = "shared-race"

    def __init__(self, races: "Races", cta: Any):
        super().__init__(races, cta, cta.shared.size)
        self.lane_order = cta.cluster.lane_order

    def _where(self, granule: int) -> str:
        return f"shared memory at {granule * self.shadow.granule:#x} of {self.cta}"

    def granules(self, offset: int, size: int) -> np.ndarray:
        """The granules of `size` bytes at an offset, of which both are multiples of a common power of two."""
        common = (offset | size | GRANULE) & -(offset | size | GRANULE)
        if common < self.shadow.granule:
            self.shadow.refine(common)
        return np.arange(offset // self.shadow.granule, (offset + size) // self.shadow.granule)

    def granules_of_box(self, places: np.ndarray) -> np.ndarray:
        """The granules of a tensor map's box, whose bytes are at `places`."""
        return self.shadow.of_chunks(places[::GRANULE] // GRANULE)  # rows and swizzles consist of 16 bytes

    # Instructions of threads

    def read(self, offsets: np.ndarray, size: int) -> None:
        """The executing threads read `size` bytes at offsets."""
        threads, rank_warp = self.races.threads(len(offsets))
        shadow = self.shadow
        granules = shadow.granules(offsets, size)
        found = self._check_writes(granules, threads, rank_warp, "reads")
        if not found.all() and threads.lane[0] >= 0:
            self._unwritten(offsets, found == 0)
        numbers = self._event(threads, rank_warp)
        columns = np.array([shadow.column(warp + rank_warp) for warp in threads.warps.tolist()])
        column = columns[threads.which][:, None]
        shadow.reads[granules, column] = numbers[threads.which][:, None]
        shadow.read_lanes[granules, column] = threads.lane[:, None]

    def _unwritten(self, offsets: np.ndarray, is_unwritten: np.ndarray) -> None:
        """The executing threads load what nobody wrote. is_unwritten: of each offset, and each granule after it"""
        lanes = self.races.grid.executing
        what = f"shared memory at {offsets[is_unwritten.any(axis=1)][0]:#x} of {self.cta}"
        lanes.cta.uninitialized.mark_results(lanes, is_unwritten, what)

    def write(self, offsets: np.ndarray, size: int) -> None:
        """The executing threads write `size` bytes at offsets."""
        threads, rank_warp = self.races.threads(len(offsets))
        shadow = self.shadow
        granules = shadow.granules(offsets, size)
        self._check_writes(granules, threads, rank_warp, "writes")
        self._check_reads(granules, threads, rank_warp)
        numbers = self._event(threads, rank_warp)
        mine = numbers[threads.which][:, None]
        shadow.writes[granules] = mine
        shadow.write_lanes[granules] = threads.lane[:, None]
        if len(numbers) > 1 and (shadow.writes[granules] != mine).any():
            i, j = np.argwhere(shadow.writes[granules] != mine)[0]
            self.races.grid.found(
                Fault(
                    self.rule,
                    f"{self._thread(threads, i)} and warp {self._warp(shadow.writes[granules[i, j]])} write "
                    f"{self._where(granules[i, j])}, and nothing orders these writes",
                )
            )

    def change(self, offsets: np.ndarray, size: int) -> None:
        """The executing threads change `size` bytes at offsets, each by an atomic operation.

        Atomic operations need no order among themselves. Of several warps that have changed a granule, only the last
        one is known to later accesses.
        """
        threads, rank_warp = self.races.threads(len(offsets))
        granules = self.shadow.granules(offsets, size)
        self._check_writes(granules, threads, rank_warp, "changes", is_atomic=True)
        self._check_reads(granules, threads, rank_warp)
        numbers = self._event(threads, rank_warp)
        self.races.events.is_atomic[numbers] = True
        self.shadow.writes[granules] = numbers[threads.which][:, None]
        self.shadow.write_lanes[granules] = threads.lane[:, None]

    def _event(self, threads: Threads, rank_warp: int) -> np.ndarray:
        """Adds an event for each warp of the executing threads."""
        actors = threads.warps + rank_warp
        events = self.races.events.add(
            self.clocks, actors, self.clocks.seen[ORDERED, actors, actors], False, self.races.grid.place()
        )
        self.lane_order.last_access[actors] = events
        return events

    def _check_fences(
        self, granules: np.ndarray, found: np.ndarray, late: np.ndarray, warps: list[int], component: int
    ) -> None:
        if self.lane_order.releases:
            components = self.races.events.component[found]
            epochs = self.clocks.before_work(ORDERED, warps)[components]
            lane_order.check_released(self, granules, found, late, epochs)

    def _check_writes(
        self, granules: np.ndarray, threads: Threads, rank_warp: int, verb: str, is_atomic: bool = False
    ) -> np.ndarray:
        """Checks that the last writes of granules precede the threads' accesses, unless both are atomic.

        Returns these writes.
        """
        found = self.shadow.writes[granules]
        if not found.any():
            return found
        events = self.races.events
        actor = (threads.warp + rank_warp)[:, None]
        component = events.component[found]
        known = self.clocks.seen[ORDERED, actor, component]
        late = events.epoch[found] > known
        same = component == actor
        if self.lane_order.releases:
            lane_order.check_released(self, granules, found, late | same, known)
        if self.lane_order.waits:
            lane_order.check_waited(self, granules, found, late | same, threads.warp + rank_warp, threads.lane)
        if same.any():
            lane = threads.lane[:, None]
            late |= (
                same
                & (self.shadow.write_lanes[granules] != lane)
                & (found >= self.lane_order.in_warp[actor, lane])
                & (lane >= 0)
            )
        if is_atomic and late.any():
            late &= ~events.is_atomic[found]
        if late.any():
            for i, j in one_of_each(found, late):
                self._found(granules[i, j], verb, self._thread(threads, i), found[i, j], "write", actor[i, 0])
        return found

    def _check_reads(self, granules: np.ndarray, threads: Threads, rank_warp: int) -> None:
        """Checks that the last reads of granules precede the threads' writes."""
        shadow, events = self.shadow, self.races.events
        width = len(shadow.columns)
        found = shadow.reads[granules, :width]
        if not found.any():
            return
        actor = threads.warp + rank_warp
        columns = shadow.components()
        known = self.clocks.seen[ORDERED][actor[:, None], columns][:, None]
        late = events.epoch[found] > known
        same = columns == actor[:, None]
        if self.lane_order.releases:
            epochs = np.broadcast_to(known, found.shape)
            lane_order.check_released(self, granules, found, late | same[:, None], epochs)
        if self.lane_order.waits:
            lane_order.check_waited(self, granules, found, late | same[:, None], actor, threads.lane)
        if same.any():
            lane = threads.lane[:, None, None]
            late |= (
                same[:, None]
                & (shadow.read_lanes[granules, :width] != lane)
                & (found >= self.lane_order.in_warp[actor, threads.lane][:, None, None])
                & (lane >= 0)
            )
        if late.any():
            for i, j, column in one_of_each(found, late):
                self._found(granules[i, j], "writes", self._thread(threads, i), found[i, j, column], "read", actor[i])

    @staticmethod
    def _thread(threads: Threads, i: int) -> str:
        return f"thread {WARP * threads.warp[i] + max(threads.lane[i], 0)}"

    # The async proxy

    def read_later(self, granules: np.ndarray, warps: list[int], component: int, epoch: int) -> None:
        self._check_proxy(granules, warps)
        super().read_later(granules, warps, component, epoch)

    def _check_proxy(self, granules: np.ndarray, warps: list[int]) -> None:
        # "Accessing the same memory location across multiple proxies needs a cross-proxy fence. For the async proxy,
        # fence.proxy.async should be used to synchronize memory between generic proxy and the async proxy."
        # (PTX, Async Proxy)
        found, events = self.shadow.writes[granules], self.races.events
        seen = self.clocks.before_work(SHARED, warps)
        late = (events.epoch[found] > seen[events.component[found]]) & ~events.is_async[found]
        for (i,) in one_of_each(found, late) if late.any() else ():
            place = events.place(found[i])
            is_copy = place.instruction.partition(" ")[0].startswith("cp.async.")
            self.races.grid.found(
                Fault(
                    "proxy-fence-of-copy" if is_copy else "proxy-fence",
                    f"the async proxy reads {self._where(granules[i])}, and no fence.proxy.async is between this and "
                    f"the write of it by a thread of warp {self._warp(found[i])}",
                    second=place,
                    second_is="the write",
                )
            )

    # The end of the CTA

    def check_exit(self) -> None:
        """Checks that all accesses of this shared memory precede the CTA's exit, which happens now."""
        # A CTA has its shared memory until its last thread exits. All operations on distributed shared memory must
        # happen before the exit of the block that it belongs to. (CUDA Programming Guide, Distributed Shared Memory)
        seen = self._seen_at_exit()
        events, shadow = self.races.events, self.shadow
        reads = shadow.reads[:, : len(shadow.columns)]
        # Epochs of a column grow, so its last read says whether any is late. This is done for each CTA.
        last = reads.max(axis=0, initial=0)
        all_before = (events.epoch[last] <= seen[shadow.components()]).all()
        for found, verb in ((shadow.writes, "write"), *([] if all_before else [(reads, "read")])):
            late = events.epoch[found] > seen[events.component[found]]
            if late.any():
                for index in one_of_each(found, late):
                    self._found_at_exit(f"{verb}s {self._where(index[0])}", found[tuple(index)], verb)
        for barrier in self.cta.mbarriers.values():
            for component, arrival in barrier.remote.items():
                if arrival.phase >= barrier.observed and arrival.epoch > seen[component]:
                    self.races.grid.found(
                        Fault(
                            "exit-before-signal" if arrival.is_under_way(component, seen) else "exited-cta",
                            f"{self.cta} may exit before an arrival of another CTA at its mbarrier, because it has not "
                            f"waited for that phase, and no barrier of the cluster orders them: {barrier}",
                            second=arrival.place(),
                            second_is="the arrival",
                        )
                    )

    def _seen_at_exit(self) -> np.ndarray:
        """The latest epoch of each component that precedes the end of the CTA's last thread."""
        first = self.races.first_warp(self.cta)
        warps = range(first, first + self.cta.num_warps)
        seen = self.clocks.seen[ORDERED, warps].max(axis=0)
        for warp in warps:
            if warp in self.clocks.completed:
                known = self.clocks.completed[warp].seen[ORDERED]
                seen[: len(known)] = np.maximum(seen[: len(known)], known)
        return seen

    def _found_at_exit(self, does: str, event: int, verb: str) -> None:
        if self.races.events.is_async[event]:
            rule = "exit-with-work" if verb == "write" else "exit-with-read"
            why = "exits, and no thread of it has waited for the end of asynchronous work that"
        else:
            rule, why = "exited-cta", f"may exit before warp {self._warp(event)}"
        self.races.grid.found(
            Fault(
                rule,
                f"{self.cta} {why} {does}",
                second=self.races.events.place(event),
                second_is=f"the {verb}",
            )
        )


class Races:
    """The order of all accesses of one launch."""

    def __init__(self, grid: Any):
        self.grid = grid
        self.events = Events()
        self.groups: dict[Hashable, int] = {}  # owner -> how many groups it has committed
        self.products: dict[tuple[Any, int], int] = {}  # (CTA, thread) -> the epoch of its latest tcgen05.mma

    def advice(self, cluster: Any, warp: int, event: int) -> str:
        """Where a barrier belongs between an event and what a warp does now; "" for asynchronous work."""
        if self.events.is_async[event]:
            return ""
        now, earlier = self.grid.place()(), self.events.place(event)
        return barrier_between(cluster, Access(int(warp), now), Access(int(self.events.component[event]), earlier))

    # Who acts now

    def warps(self, lanes: Any) -> np.ndarray:
        """The components of the warps of these threads."""
        return threads_of(lanes.mask).warps + self.first_warp(lanes.cta)

    def first_warp(self, cta: Any) -> int:
        """The component of a CTA's first warp."""
        return cta.rank * cta.num_warps

    def threads(self, count: int) -> tuple[Threads, int]:
        """Returns the threads of the executing instruction's `count` addresses, and their CTA's `first_warp`."""
        lanes = self.grid.executing
        threads = threads_of(lanes.mask)
        if len(threads.warp) != count:  # addresses of rows of matrices, which belong to warps
            which = np.repeat(np.arange(len(threads.warps)), count // len(threads.warps))
            threads = Threads(threads.warps, which, threads.warps[which], np.full(count, -1, np.int8))
        return threads, self.first_warp(lanes.cta)

    # Order

    def arrive(self, lanes: Any) -> Clock:
        """`release` at a barrier, where lanes of a warp may arrive without the others."""
        clocks = lanes.cta.cluster.clocks
        lanes.cta.cluster.lane_order.release(lanes, clocks, self.first_warp(lanes.cta), self.events.count)
        return self.release(lanes)

    def release(self, lanes: Any) -> Clock:
        """The clock of what the warps of these threads did until now."""
        return lanes.cta.cluster.clocks.release(self.warps(lanes))

    def acquire(self, lanes: Any, clock: Clock | None) -> None:
        """Orders what a clock knows before what these threads do from now on."""
        clocks, warps = lanes.cta.cluster.clocks, self.warps(lanes)
        lanes.cta.cluster.lane_order.wait(lanes, clocks, self.first_warp(lanes.cta))
        clocks.acquire(warps, clock)
        self.order_warp(lanes)

    def acquire_at_fence(self, lanes: Any, clock: Clock | None, scope: int) -> None:
        """Orders what a clock knows before what these threads do after their next fence of this scope or a wider one.

        Asynchronous work in it is complete, so what the threads issue next comes after it even without a fence.
        """
        clocks = lanes.cta.cluster.clocks
        until_fence = clocks.until_fence
        for warp in self.warps(lanes).tolist():
            until_fence[warp, scope] = joined(until_fence.get((warp, scope)), clock)
            clocks.complete(warp, clock)

    def meet(self, lanes: Any, others: Any) -> None:
        """Threads of two CTAs of a cluster wait for each other."""
        clock = joined(self.release(lanes), self.release(others))
        self.acquire(lanes, clock)
        self.acquire(others, clock)

    def order_warp(self, lanes: Any) -> None:
        """Orders what threads of these warps did before what the others do from now on."""
        lanes.cta.cluster.lane_order.synchronize(lanes, self.first_warp(lanes.cta), self.events.count)

    def now(self, lanes: Any) -> tuple[int, int]:
        """Returns (warp, epoch) of what the first of the threads does now."""
        warp = int(self.warps(lanes)[0])
        return warp, int(lanes.cta.cluster.clocks.seen[ORDERED, warp, warp])

    def epochs(self, lanes: Any) -> dict[int, int]:
        """The components of the warps of these threads, and their epochs now."""
        warps = self.warps(lanes)
        return dict(zip(warps.tolist(), lanes.cta.cluster.clocks.seen[ORDERED, warps, warps].tolist(), strict=True))

    def check_arrival(self, lanes: Any, barrier: Any, last: dict[int, int]) -> None:
        """Checks that arrivals of these threads come after those of the barrier's last phase, those of their CTA."""
        # Threads that arrive at a barrier before or after it completes, as it happens, take part in another phase.
        clocks, warps, first = lanes.cta.cluster.clocks, self.warps(lanes), self.first_warp(lanes.cta)
        components, epochs = np.array(list(last), np.intp), np.array(list(last.values()))
        late = clocks.seen[ORDERED, warps[:, None], components] < epochs
        late &= (first <= components) & (components < first + lanes.cta.num_warps)
        if late.any():
            i, j = np.argwhere(late)[0]
            self.grid.found(
                Fault(
                    "barrier-phase",
                    f"nothing orders an arrival of warp {warps[i] - first} after the last phase, in which warp "
                    f"{components[j] - first} has arrived: it might have come in that phase: {barrier}",
                    advice="each group of threads needs a barrier of its own, which expects all of its arrivals",
                )
            )

    def check_initialized(self, lanes: Any, barrier: Any) -> None:
        # "Performing any mbarrier operation except mbarrier.init on an uninitialized mbarrier object results in
        # undefined behavior." (PTX, mbarrier)
        user = lanes.cta.rank, lanes.mask
        if user in barrier.users:
            return
        warp, epoch = barrier.initialized
        seen = lanes.cta.cluster.clocks.seen[:, self.warps(lanes), warp]
        if (epoch > np.maximum(seen[ORDERED], seen[INITIALIZED])).any():
            how = (
                "a barrier such as bar.sync must be in between"
                if barrier.cta is lanes.cta
                else "fence.mbarrier_init and a barrier of the cluster, or one with .release, must be in between"
            )
            self.grid.found(
                Fault(
                    "mbarrier-init-race",
                    f"{lanes.describe()} may use an mbarrier before its mbarrier.init: {how}: {barrier}",
                )
            )
        barrier.users.add(user)

    def fence(self, lanes: Any, opcode: str) -> None:
        """Records a fence or membar of these threads."""
        clocks, warps = lanes.cta.cluster.clocks, self.warps(lanes)
        if opcode.startswith("fence.mbarrier_init"):
            # "the synchronizing effect of the fence only applies to the prior mbarrier.init operations executed by the
            # same thread on mbarrier objects in .shared::cta state space" (PTX, fence)
            clocks.seen[INITIALIZED, warps, warps] = clocks.seen[ORDERED, warps, warps]
        elif opcode.startswith("fence.proxy.async"):
            # "If no state space is specified, then the memory ordering applies on all state spaces." (PTX, fence)
            if not opcode.endswith(".global"):
                clocks.seen[SHARED, warps] = clocks.seen[ORDERED, warps]
            if "shared" not in opcode:
                clocks.seen[GLOBAL, warps] = clocks.seen[ORDERED, warps]
                for warp in warps.tolist():
                    clocks.fence_others(warp)
        else:
            # The scope is "the set of threads" to which the fence applies. (PTX, Scope)
            scopes = range(scope_of(opcode) + 1)
            for warp in warps.tolist():
                for scope in scopes:
                    clocks.acquire([warp], clocks.until_fence.pop((warp, scope), None))
                clock = Clock(clocks.seen[:, warp].copy(), clocks.others[warp])
                for scope in scopes:
                    clocks.at_fence[warp, scope] = clock
        clocks.tick(warps)

    def wait_for_launch_before(self, lanes: Any) -> None:
        """Records griddepcontrol.wait of these threads."""
        clocks = lanes.cta.cluster.clocks
        clocks.learn(self.warps(lanes), clocks.component(WAITED), 1)

    def release_relaxed(self, lanes: Any, within_cta: bool) -> Clock:
        """What a relaxed operation releases: what came before a fence whose scope has those who wait for it."""
        clocks, result = lanes.cta.cluster.clocks, None
        for warp in self.warps(lanes).tolist():
            result = joined(result, clocks.at_fence.get((warp, CTA if within_cta else CLUSTER)))
            initialized = np.zeros_like(clocks.seen[:, warp])
            initialized[INITIALIZED] = clocks.seen[INITIALIZED, warp]
            result = joined(result, Clock(initialized, {}))
        assert result is not None
        return result

    # Asynchronous work

    def copy_to(self, cta: Any, granules: np.ndarray, thread: int, issuer: Any, barrier: Any) -> None:
        """Records a copy to a CTA's shared memory that an mbarrier tracks. issuer: the CTA of `thread`."""
        clocks, warp = cta.cluster.clocks, self.first_warp(issuer) + thread // WARP
        cta.shared.races.write_later(granules, [warp], clocks.component(barrier), barrier.phase + 1)
        barrier.arrived = joined(barrier.arrived, clocks.found_by(warp))

    def carry(self, lanes: Any, thread: int, barrier: Any) -> None:
        """Orders what the thread did before this instruction before the end of the mbarrier's phase."""
        clocks, warp = lanes.cta.cluster.clocks, self.first_warp(lanes.cta) + thread // WARP
        barrier.arrived = joined(barrier.arrived, clocks.release([warp]))

    def store_from(self, cta: Any, granules: np.ndarray, thread: int) -> None:
        """A thread issues a bulk store, which reads shared memory."""
        component, epoch = self.group(cta, ("bulk", thread))
        warp = self.first_warp(cta) + thread // WARP
        cta.shared.races.read_later(granules, [warp], component, epoch)
        lane_order.check_issuer(cta.shared.races, granules, warp, thread % WARP)

    def store_to(self, cta: Any, addresses: np.ndarray, size: int, thread: int) -> None:
        """A thread issues a bulk store, which writes rows of global memory."""
        if len(addresses) and size:
            _, epoch = self.group(cta, ("bulk", thread))
            component = cta.cluster.clocks.component((cta.rank, ("bulk write", thread)))
            issuer = cta.cluster.clocks, component, self.first_warp(cta) + thread // WARP
            memory = cta.grid.memory
            memory.races.write_later(memory.tensor_at(addresses, size), addresses, size, issuer, epoch)

    def load_from(self, cta: Any, addresses: np.ndarray, size: int, thread: int) -> None:
        """A thread issues a bulk load, which reads rows of global memory."""
        if len(addresses) and size:
            memory, warp = cta.grid.memory, self.first_warp(cta) + thread // WARP
            memory.races.read_later(memory.tensor_at(addresses, size), addresses, size, cta.cluster.clocks, warp)

    def multiply_from(self, cta: Any, warp_group: int, granules: np.ndarray) -> None:
        """A warp group issues a product, which reads shared memory."""
        component, epoch = self.group(cta, ("wgmma", warp_group))
        first = self.first_warp(cta) + 4 * warp_group
        cta.shared.races.read_later(granules, list(range(first, first + 4)), component, epoch)

    def product_of(self, cta: Any, thread: int) -> tuple[list[int], int, int]:
        """Returns ([warp], component, epoch) of a tcgen05.mma that a thread issues."""
        component, epoch = self.group(cta, ("tcgen05.mma", thread))
        self.products[cta, thread] = epoch
        warp = self.first_warp(cta) + thread // WARP
        cta.cluster.clocks.products.add(component)
        cta.cluster.clocks.own_tensor_access(warp, component)
        return [warp], component, epoch

    def arrive_remotely(self, lanes: Any, barrier: Any) -> None:
        """Records an arrival of these threads, before its release, if the mbarrier is in another CTA."""
        if barrier.cta is not lanes.cta:
            clocks, place = lanes.cta.cluster.clocks, self.grid.place()
            for warp in self.warps(lanes).tolist():
                barrier.arrived_from(warp, int(clocks.seen[ORDERED, warp, warp]), place)

    def commit_remotely(self, cta: Any, thread: int, barrier: Any) -> None:
        """Records a tcgen05.commit, before its products are committed, if the mbarrier is in another CTA."""
        if barrier.cta is not cta:
            warp, products = self.first_warp(cta) + thread // WARP, self.products.get((cta, thread))
            issued = products and (warp, int(cta.cluster.clocks.seen[ORDERED, warp, warp]), products)
            barrier.arrived_from(*self.group(cta, ("tcgen05.mma", thread)), self.grid.place(), issued)

    def commit_products(self, cta: Any, thread: int) -> Clock | None:
        """What precedes the arrival of a tcgen05.commit: the products of the thread, and what came before them."""
        clocks, owner = cta.cluster.clocks, ("tcgen05.mma", thread)
        _, epoch = self.group(cta, owner)
        self.commit(cta, owner)
        warp = self.first_warp(cta) + thread // WARP
        before = joined(clocks.release([warp]), clocks.completed.get(warp))
        return joined(before, clocks.of_epoch((cta.rank, owner), epoch))

    def group(self, cta: Any, owner: Hashable) -> tuple[int, int]:
        """Returns (component, epoch) of the open group of an owner."""
        return cta.cluster.clocks.component((cta.rank, owner)), self.groups.get((cta, owner), 0) + 1

    def commit(self, cta: Any, owner: Hashable) -> None:
        """Closes the open group of an owner."""
        self.groups[cta, owner] = self.groups.get((cta, owner), 0) + 1

    def wait(self, lanes: Any, owner: Hashable, allowed: int, writes: Hashable = None) -> None:
        """The warps of `lanes` have waited until all committed groups of an owner but `allowed` are complete.

        writes: the owner of the writes of the same groups, if the warps have waited for these too
        """
        clocks = lanes.cta.cluster.clocks
        done = self.groups.get((lanes.cta, owner), 0) - allowed
        for component in (lanes.cta.rank, owner), (lanes.cta.rank, writes):
            if done > 0 and component in clocks.components:
                clocks.learn(self.warps(lanes), clocks.component(component), done)
