"""Runs a launch: which CTAs are resident, whose turn it is, and when nothing can go on."""

import hashlib
import math
import operator
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from quackish.emulator import deadlocks
from quackish.emulator.barriers import ClusterBarrier
from quackish.emulator.clocks import Clocks
from quackish.emulator.completion import Completion
from quackish.emulator.dataflow import Flow
from quackish.emulator.decode import Program
from quackish.emulator.dependent_launches import DependentLaunch, Ended, running
from quackish.emulator.errors import Fault, Place
from quackish.emulator.findings import Findings
from quackish.emulator.global_races import GlobalRaces
from quackish.emulator.lane_order import LaneOrder
from quackish.emulator.memory import GlobalMemory
from quackish.emulator.profile import CountedGlobalRaces, CountedSharedRaces, Profile, Trace
from quackish.emulator.ptx import Instruction
from quackish.emulator.races import Races, SharedRaces
from quackish.emulator.threads import (
    VIEW_OF_TYPE,
    WARP,
    WARP_MASK,
    Cta,
    Lanes,
    num_warps,
    place_of,
    warp_masks,
    whole_warps,
)
from quackish.emulator.uninitialized import Uninitialized

MAX_CTAS_PER_SM = 32  # compute capabilities 9.0 and 10.x
RESERVED_SHARED_BYTES = 1024  # the system's part of each CTA's shared memory
BLOCKS_PER_TURN = 64  # blocks that a CTA runs before another CTA's turn
SPLIT_CHANCE = 0.25  # chance that only some of the warps at an instruction run
SLOW_CHANCE = 0.5  # chance that half of a launch's CTAs, and half of its warps, are slow
ROUNDS_OF_THE_QUICK = 100  # rounds until slow CTAs and warps get a turn even if others can go on
MAX_ROUNDS_WITHOUT_COPY = 1000  # threads that change memory while they poll must not starve a copy for longer


class Cluster:
    """The CTAs of a cluster, and what they share. first: the index of its first CTA in the grid."""

    def __init__(self, grid: "Grid", first: tuple[int, int, int]):
        self.grid = grid
        self.size = math.prod(grid.cluster_dimensions)
        self.barrier = ClusterBarrier(self)
        self.meetings: dict[tuple, Any] = {}  # warps that wait for their peer CTA: see isa.tensor_allocation
        self.clocks = Clocks(self.size * -(-grid.num_threads // WARP), grid.num_clusters)
        self.lane_order = LaneOrder(self.clocks.num_warps)
        grid.num_clusters += 1
        x, y, _ = grid.cluster_dimensions
        self.ctas = [
            Cta(grid, self, rank, (first[0] + rank % x, first[1] + rank // x % y, first[2] + rank // (x * y)))
            for rank in range(self.size)
        ]
        for cta in self.ctas:
            cta.uninitialized = Uninitialized(cta)


class Grid:
    """One launch: which CTAs are resident, whose turn it is, and what is counted. Call `run` once."""

    def __init__(
        self,
        program: Program,
        launch: Any,  # host.Launch, or anything with its grid, block, cluster and shared_bytes
        parameters: bytes,
        gpu: Any,
        memory: GlobalMemory,
        completion: str = "at_once",
        seed: Any = 0,
        before: Ended | None = None,  # the launch before
        findings: Findings | None = None,  # by default the first finding is raised
        profile: bool = False,
        trace: Trace | None = None,
    ):
        self.program, self.parameters, self.gpu, self.memory = program, parameters, gpu, memory
        self.dimensions, self.block, self.cluster_dimensions = launch.grid, launch.block, launch.cluster
        self.num_threads = math.prod(launch.block)
        self.dynamic_shared_bytes = launch.shared_bytes
        dynamic = [offset for name, offset in program.symbols.items() if not program.entry.shared[name].size]
        self.shared_bytes = max([program.static_shared_bytes, *dynamic]) + launch.shared_bytes
        self.draw = random.Random(f"{seed}")
        self.seed = seed
        self.completion = Completion(completion, self.draw, self.place)
        self.findings = findings or Findings()
        self.profile, self.trace = Profile(self) if profile else None, trace
        self.races = Races(self)
        earlier = running(before, getattr(launch, "programmatic", False))
        self.shared_races = CountedSharedRaces if profile else SharedRaces
        global_races = CountedGlobalRaces if profile else GlobalRaces
        memory.races = global_races(self.races, DependentLaunch(earlier, self.found))
        self._running: tuple[Any, ...] = ()
        self.executing: Lanes  # the threads that execute the instruction, without those whose predicate is false
        self.has_slow = self.draw.random() < SLOW_CHANCE
        self.keeps_slow_back = False  # True if slow CTAs and warps get no turn in this round
        self.num_clusters = 0  # clusters that have begun
        self._expired: set = set()  # states in which time limits have passed
        self.num_events = 0  # grows with everything that a thread can wait for
        self.num_phases = 0  # completed phases of barriers
        # griddepcontrol; waits_first: some CTA waits before it lets the next launch begin
        self.waits_for_previous = self.waits_first = self.lets_next_begin = False
        self.mmas = self.flops = 0
        self.num_instructions = 0  # a warp's instruction counts once
        self.waiting: list[tuple[int, int, int]] = []  # first CTAs of clusters that have not begun; the next is last
        self.ctas_on_sm = [0] * gpu.sm_count
        self.tensor_memories: dict[int, Any] = {}  # SM -> tensor_memory.TensorMemory
        self.tensor_memory_columns = 0
        self.changed_tensor_maps: dict[int, int] = {}  # address -> when; see isa.tensor_maps
        self.cta_group = 0  # the .cta_group of all tcgen05 instructions; 0 before the first one
        self._check(getattr(launch, "cooperative", False))

    # Residency

    def _check(self, cooperative: bool) -> None:
        """Raises Fault if a GPU would refuse the launch."""
        required = self.program.entry.directives.get("reqntid")
        if required and (*required, 1, 1)[:3] != self.block:
            raise Fault("launch-config", f"a launch with {self.block} threads of a kernel that requires {required}")
        if any(n % size for n, size in zip(self.dimensions, self.cluster_dimensions, strict=True)):
            raise Fault(
                "launch-config",
                f"a grid of {self.dimensions} CTAs, which clusters of {self.cluster_dimensions} do not divide",
            )
        if self.num_threads > 1024 or not self.num_threads:
            raise Fault("launch-config", f"a CTA of {self.num_threads} threads; valid are 1 to 1024")
        if math.prod(self.cluster_dimensions) > 16:
            raise Fault("launch-config", f"a cluster of {self.cluster_dimensions} CTAs; at most 16 are possible")
        if self.shared_bytes > self.gpu.smem_bytes:
            raise Fault(
                "launch-config",
                f"a CTA takes {self.shared_bytes} bytes of shared memory; at most {self.gpu.smem_bytes} are possible",
            )
        if self.max_resident < math.prod(self.cluster_dimensions):
            raise Fault("launch-config", f"a cluster of {self.cluster_dimensions} CTAs does not fit: {self.residency}")
        if cooperative and self.max_resident < math.prod(self.dimensions):
            raise Fault(
                "launch-config", f"a cooperative launch of {self.dimensions} CTAs does not fit: {self.residency}"
            )

    @property
    def ctas_per_sm(self) -> int:
        """How many CTAs fit on an SM at once."""
        limits = [
            MAX_CTAS_PER_SM,
            self.gpu.threads_per_sm // (-(-self.num_threads // WARP) * WARP),
            self.gpu.smem_bytes_per_sm // (self.shared_bytes + RESERVED_SHARED_BYTES),
        ]
        if registers := self.program.entry.directives.get("maxnreg"):
            limits.append(self.gpu.registers_per_sm // (registers[0] * self.num_threads))
        return min(limits)

    @property
    def max_resident(self) -> int:
        """How many CTAs fit on the GPU at once."""
        return self.ctas_per_sm * self.gpu.sm_count

    @property
    def residency(self) -> str:
        return f"{self.ctas_per_sm} CTAs per SM on {self.gpu.sm_count} SMs"

    # The launch

    def run(self) -> None:
        """Runs all CTAs to their end. Raises Fault if they break a rule or deadlock."""
        x, y, z = self.cluster_dimensions
        grid_x, grid_y, grid_z = self.dimensions
        waiting = [(i, j, k) for k in range(0, grid_z, z) for j in range(0, grid_y, y) for i in range(0, grid_x, x)]
        waiting.reverse()
        self.waiting = waiting
        resident: list[Cluster] = []
        idle, rounds = _Idle(), 0
        with np.errstate(all="ignore"):
            while waiting or resident:
                while waiting and (len(resident) + 1) * x * y * z <= self.max_resident:
                    resident.append(self._admit(waiting.pop()))
                events = self.num_events
                ctas = [cta for cluster in resident for cta in cluster.ctas if cta.fragments]
                self.draw.shuffle(ctas)
                self.keeps_slow_back = not idle.rounds and (rounds + 1) % ROUNDS_OF_THE_QUICK != 0
                slow = [cta for cta in ctas if cta.is_slow] if self.keeps_slow_back else []
                busy = sum(self._turn(cta) for cta in ctas if cta not in slow)
                if not busy and events == self.num_events:
                    busy = sum(self._turn(cta) for cta in slow)
                resident = [cluster for cluster in resident if not self._retire(cluster)]
                rounds += 1
                if rounds % MAX_ROUNDS_WITHOUT_COPY == 0:
                    self.completion.complete_one_copy()
                if events != self.num_events or not resident:
                    idle.reset()
                    continue
                is_stuck = idle.round(resident)
                if (is_stuck or not busy) and self.completion.complete_one_copy():
                    idle.reset()
                elif is_stuck and self._expire_waits(resident):
                    idle.reset()
                elif is_stuck:
                    raise self._stuck(resident, len(waiting))
            self.completion.finish()
            self.memory.races.polls.finish()

    def _expire_waits(self, resident: list[Cluster]) -> bool:
        """Lets the time limits of waits pass. False if no thread waits, or if the same waits expired without effect.

        "Suspended thread resumes execution when the specified phase completes OR before the phase completes following a
        system-dependent time limit." (PTX, mbarrier.try_wait)
        """
        ctas = [cta for cluster in resident for cta in cluster.ctas]
        waits = [parked for cta in ctas for parked in cta.parked if parked.mbarrier is not None]
        state = self.num_events, frozenset((parked.cta, parked.block, parked.mask) for parked in waits)
        if not waits or state in self._expired:
            return False
        self._expired.add(state)
        for parked in waits:
            parked.mbarrier.waiting.remove(parked)
            parked.cta.expired_waits |= parked.mask
            parked.release()
        return True

    def _admit(self, first: tuple[int, int, int]) -> Cluster:
        """Makes a cluster resident, on the SMs with the fewest CTAs, each CTA on another SM if possible."""
        cluster, used, most = Cluster(self, first), set[int](), self.ctas_per_sm
        for cta in cluster.ctas:
            cta.sm = min(enumerate(self.ctas_on_sm), key=lambda item: (item[1] == most, item[0] in used, item[1]))[0]
            self.ctas_on_sm[cta.sm] += 1
            used.add(cta.sm)
        self._slow_down(cluster)
        return cluster

    def _retire(self, cluster: Cluster) -> bool:
        """True if all threads of a cluster have exited; then its CTAs' places are free."""
        if any(cta.live for cta in cluster.ctas):
            return False
        for cta in cluster.ctas:
            self.ctas_on_sm[cta.sm] -= 1
            if self.profile is not None:
                self.profile.retire(cta)
        return True

    def _slow_down(self, cluster: Cluster) -> None:
        """Makes some CTAs and warps slow, by chance: they run when no other one can go on.

        So a thread can be ahead of another one by all that no barrier forbids.
        """
        if not self.has_slow:
            return
        warps = [WARP_MASK << first for first in range(0, self.num_threads, WARP)]
        slow = self._half(cluster.ctas)
        for cta in cluster.ctas:
            cta.is_slow = cta in slow
            cta.slow_threads = sum(self._half(warps))

    def _half(self, items: list) -> list:
        """Half of the items, drawn at random; of an odd number perhaps one more."""
        return self.draw.sample(items, (len(items) + self.draw.randrange(2)) // 2)

    def _turn(self, cta: Cta) -> bool:
        """Runs fragments of a CTA until none can run or all have polled; True if its turn ends before."""
        cta.yielded.clear()
        blocks = 0
        while blocks < BLOCKS_PER_TURN:
            choices = self._runnable(cta)
            if not choices:
                return False
            block, mask = self.draw.choice(choices) if len(choices) > 1 else choices[0]
            mask = self._some_warps(block, mask)
            rest = cta.fragments.pop(block) & ~mask
            if rest:
                cta.fragments[block] = rest
            blocks += self._run(cta, block, mask, BLOCKS_PER_TURN - blocks)
        return True

    def _runnable(self, cta: Cta) -> list[tuple[int, int]]:
        """Returns (block, threads) that can run now: of a diverged warp, the part that is furthest behind.

        "furthest behind" is the block that comes first in the PTX, which lets the parts of a warp come together again.
        """
        choices, taken = [], 0
        for block in sorted(cta.fragments):
            mask = cta.fragments[block] & ~cta.yielded.get(block, 0) & ~taken
            mask = self.converged(cta, block, mask)
            if mask:
                choices.append((block, mask))
                taken |= whole_warps(mask)
        if cta.slow_threads and self.keeps_slow_back:
            quick = [(block, self.converged(cta, block, mask & ~cta.slow_threads)) for block, mask in choices]
            return [choice for choice in quick if choice[1]] or choices
        return choices

    def converged(self, cta: Cta, block: int, mask: int) -> int:
        """The threads of `mask` that can execute the block: all that must do so with them have come."""
        needed = self.program.blocks[block].converged
        if not needed or not mask:
            return mask
        if needed == "members":
            return self._with_members(cta, block, mask)
        size = WARP if needed == "warp" else 4 * WARP
        result, group, live = 0, (1 << size) - 1, cta.live
        for _ in range(-(-cta.num_threads // size)):
            wanted = live & group
            if mask & group and mask & wanted == wanted:
                result |= wanted
            group <<= size
        return result

    def _with_members(self, cta: Cta, block: int, mask: int) -> int:
        """`converged` where the block's instruction has a member mask."""
        current, result = self.program.blocks[block], 0
        read = current.members
        assert read is not None
        if current.chosen is not None:
            lanes = cta.lanes(mask)
            result = mask & ~lanes.subset_mask(current.chosen(lanes))  # they do not execute the instruction
        executing = mask & ~result
        for warp in warp_masks(executing):
            part = executing & warp
            lanes = cta.lanes(part)
            masks = lanes.active(read(lanes))
            if outside := lanes.subset_of_active(masks >> (lanes.threads % WARP).astype(np.uint32) & 1 == 0):
                return outside  # they are not in their own mask, which is a fault when they execute the instruction
            members = np.unique(masks)
            shift = (warp & -warp).bit_length() - 1
            for number in members.tolist():
                wanted = (number & WARP_MASK) << shift & cta.live
                if part & wanted == wanted:
                    result |= wanted
                    break  # threads with another mask execute the instruction on their own
        return result

    def _some_warps(self, block: int, mask: int) -> int:
        """The threads, or some warps of them: warps that are at the same instruction need not go on together."""
        if self.draw.random() >= SPLIT_CHANCE:
            return mask
        size = 4 * WARP if self.program.blocks[block].converged == "warp group" else WARP
        groups = [(1 << size) - 1 << first for first in range(0, mask.bit_length(), size)]
        groups = [group for group in groups if group & mask]
        if len(groups) == 1:
            return mask
        chosen = self.draw.sample(groups, self.draw.randrange(1, len(groups)))
        return mask & sum(chosen)

    def _run(self, cta: Cta, block: int, mask: int, budget: int) -> int:
        """Runs threads from a block on, for as long as nothing sets them apart. Returns the number of blocks run."""
        lanes, warps, count = cta.lanes(mask), num_warps(mask), 0
        others = self._others(cta, mask)
        uninitialized, undefined = cta.uninitialized, cta.uninitialized.others
        while True:
            current = self.program.blocks[block]
            cta.block = block
            cta.executed[block].append(mask)
            if self.trace is not None:
                self.trace.add(cta, block, mask)
            count += 1
            self.num_instructions += warps * current.size
            steps = iter(current.steps)
            self._running = cta, lanes, block, steps
            self.executing = lanes
            try:
                follows = bool(undefined) and not undefined.keys().isdisjoint(self.program.flows.of(block).touches)
                known = len(undefined)
                for step in steps:
                    if follows:
                        uninitialized.follow(lanes, step, self.flow)
                    else:
                        step(lanes)
                        follows = len(undefined) != known
                self._running = cta, lanes, block, None
                if follows and len(current.steps) < current.size:
                    uninitialized.check(lanes, self.flow)
                    uninitialized.forget(lanes, self.flow)
                following = current.end(lanes)
            except Fault as fault:
                fault.place = fault.place or self.place()()
                raise
            except Exception as error:
                raise self._located(error) from error
            if following is None:
                return count
            if current.polls:
                cta.add(following, mask)
                cta.yielded[following] = cta.yielded.get(following, 0) | mask
                return count
            if others or following in cta.fragments or count >= budget:
                cta.add(following, mask)
                return count
            if self.program.blocks[following].converged and self.converged(cta, following, mask) != mask:
                cta.add(following, mask)
                return count
            block = following

    def _others(self, cta: Cta, mask: int) -> bool:
        """True if other threads of the same warps are elsewhere."""
        warps = whole_warps(mask)
        return any(other & warps for other in cta.fragments.values()) or any(
            parked.mask & warps for parked in cta.parked
        )

    # Faults

    def _stuck(self, resident: list[Cluster], num_waiting: int) -> Fault:
        """The Fault of threads that cannot go on: see `deadlocks`."""
        ctas = [cta for cluster in resident for cta in cluster.ctas]
        not_begun = num_waiting * math.prod(self.cluster_dimensions)
        full = f"{not_begun} CTAs have not begun, because only {self.max_resident} fit at once: {self.residency}"
        return deadlocks.fault(ctas, full if num_waiting else "")

    def found(self, fault: Fault) -> None:
        """Takes a fault of the instruction that executes now. Raises it unless the run goes on."""
        fault.place = self.place()()
        self.findings.add(fault)

    def place(self) -> Callable[[], Place]:
        """Returns a function that returns the instruction that executes now, even if called later."""
        cta, lanes, block, steps = self._running
        step, count = self._index(block, steps), len(cta.executed[block])
        return lambda: place_of(lanes, block, step, count)

    @property
    def instruction(self) -> Instruction:
        """The instruction that executes now."""
        _, _, block, steps = self._running
        return self.program.blocks[block].instructions[self._index(block, steps)]

    @property
    def flow(self) -> Flow:
        """The registers of the instruction that executes now."""
        _, _, block, steps = self._running
        return self.program.flows.of(block).flows[self._index(block, steps)]

    @property
    def opcode(self) -> str:
        """The opcode of the instruction that executes now."""
        return self.instruction.opcode

    def _index(self, block: int, steps: Any) -> int:
        """The index in its block of the instruction that executes now."""
        current = self.program.blocks[block]
        return current.size - 1 if steps is None else len(current.steps) - operator.length_hint(steps) - 1

    def _located(self, error: Exception) -> Exception:
        """Adds where it happened to an error of the emulator's own."""
        prefix = f"the emulator failed: {type(error).__name__}: "
        if type(error) is NotImplementedError:
            prefix = "the emulator does not support this: "
        return RuntimeError(f"{prefix}{error}\n  executing: {self.place()()}")


class _Idle:
    """Consecutive rounds in which nothing happened that a thread could wait for."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        self.rounds, self.snapshot = 0, b""

    def round(self, resident: list[Cluster]) -> bool:
        """Counts a round. True if no thread runs, or all are where they were some rounds ago: none will ever go on.

        Threads that poll may count, and give up, so their registers are compared, but not in each round.
        """
        self.rounds += 1
        ctas = [cta for cluster in resident for cta in cluster.ctas]
        if not any(cta.fragments for cta in ctas):
            return True
        power = 1 << (self.rounds.bit_length() - 1)
        if self.rounds < 8 or self.rounds > power + 8:
            return False
        digest = _digest(ctas)
        if self.rounds == power:
            self.snapshot = digest
            return False
        return digest == self.snapshot


def _digest(ctas: list[Cta]) -> bytes:
    """A hash of the CTAs' registers, and of where their threads are."""
    digest = hashlib.blake2b()
    for cta in ctas:
        digest.update(repr((sorted(cta.fragments.items()), len(cta.parked))).encode())
        for view in ("pred", "u16", "u32", "u64", "u128"):  # all registers once
            digest.update(cta.registers.rows[VIEW_OF_TYPE[view]].tobytes())
    return digest.digest()
