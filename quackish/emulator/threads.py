"""The threads of one CTA: registers, and fragments (threads that are at the same instruction)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from quackish.emulator.errors import Place
from quackish.emulator.memory import POISON, LocalMemory, SharedMemory
from quackish.emulator.register_pool import RegisterPool, registers_at_launch
from quackish.emulator.tensor_races import TensorRaces
from quackish.emulator.wgmma_registers import WgmmaRegisters

WARP = 32
WARP_MASK = (1 << WARP) - 1

U128 = np.dtype([("low", np.uint64), ("high", np.uint64)])

# The views of registers, by PTX type. A row of such a view is a register, a column a thread.
_VIEWS: dict[str, tuple[str, Any]] = {
    "pred": ("pred", np.bool_),
    **{f"{kind}16": ("b16", dtype) for kind, dtype in (("u", np.uint16), ("s", np.int16))},
    **{f"{kind}32": ("b32", dtype) for kind, dtype in (("u", np.uint32), ("s", np.int32), ("f", np.float32))},
    **{f"{kind}64": ("b64", dtype) for kind, dtype in (("u", np.uint64), ("s", np.int64), ("f", np.float64))},
    "u128": ("b128", U128),
}
VIEW_OF_TYPE = {name: index for index, name in enumerate(_VIEWS)}  # index in Lanes.rows
_STORAGE: dict[str, Any] = {"pred": np.uint8, "b16": np.uint16, "b32": np.uint32, "b64": np.uint64, "b128": U128}


class Registers:
    """All registers of a CTA, poisoned at first. `counts` has the number of registers of each width.

    `rows[VIEW_OF_TYPE[type]]` is a view of shape (registers, threads).
    """

    def __init__(self, counts: dict[str, int], num_threads: int):
        storage: dict[str, np.ndarray] = {}
        for width, kind in _STORAGE.items():
            shape = counts.get(width, 0), num_threads * np.dtype(kind).itemsize
            poisoned: np.ndarray = np.full(shape, 0 if width == "pred" else POISON, np.uint8)
            storage[width] = poisoned.view(kind)
        self.rows: list[np.ndarray] = [storage[width].view(dtype) for width, dtype in _VIEWS.values()]


class Lanes:
    """Threads of a CTA that execute an instruction together.

    `mask` has a bit for each thread of the CTA. Rows of registers are slices over `span`, the smallest range of threads
    that has all of them; `where` says which threads of the span they are, or is None if they are all.
    """

    __slots__ = ("_threads", "_warps", "count", "cta", "mask", "rows", "span", "where")

    def __init__(self, cta: "Cta", mask: int):
        self.cta, self.mask, self.count = cta, mask, mask.bit_count()
        first, end = (mask & -mask).bit_length() - 1, mask.bit_length()
        self.span = slice(first, end)
        self.where = None if self.count == end - first else _bits(mask >> first, end - first)
        self.rows = [view[:, self.span] for view in cta.registers.rows]
        self._threads: np.ndarray | None = None
        self._warps: list[int] | None = None

    @property
    def threads(self) -> np.ndarray:
        """The numbers of the threads in the CTA."""
        if self._threads is None:
            span = np.arange(self.span.start, self.span.stop)
            self._threads = span if self.where is None else span[self.where]
        return self._threads

    @property
    def num_warps(self) -> int:
        return num_warps(self.mask)

    def warps(self) -> list[int]:
        """The numbers of the warps that have any of the threads."""
        if self._warps is None:
            self._warps = np.unique(self.threads // WARP).tolist()
        return self._warps

    def describe(self) -> str:
        """Which threads these are, for people: "warps 0, 2" or "lanes 0x1 of warp 3"."""
        parts: dict[int, list[int]] = {}  # lanes of a warp -> the warps
        for warp in self.warps():
            parts.setdefault(self.mask >> WARP * warp & WARP_MASK, []).append(warp)
        return " and ".join(
            f"{'' if lanes == WARP_MASK else f'lanes {lanes:#x} of '}warp{'s' * (len(warps) > 1)} "
            f"{', '.join(map(str, warps))}"
            for lanes, warps in parts.items()
        )

    def warp_groups(self) -> list[int]:
        """The numbers of the warp groups that have any of the threads."""
        return np.unique(self.threads // (4 * WARP)).tolist()

    def active(self, values: Any) -> np.ndarray:
        """Returns the values of these threads alone. values: one per thread of the span, or one for all."""
        if np.ndim(values) == 0:
            return np.full(self.count, values)
        return values if self.where is None else values[self.where]

    def subset_mask(self, chosen: np.ndarray) -> int:
        """The mask of the threads that `chosen`, an array of bools over the span, selects."""
        if self.where is not None:
            chosen = chosen & self.where
        return int.from_bytes(np.packbits(chosen, bitorder="little").tobytes(), "little") << self.span.start

    def subset_of_active(self, chosen: np.ndarray) -> int:
        """The mask of the threads that `chosen`, an array of bools over these threads alone, selects."""
        if self.where is None:
            return self.subset_mask(chosen)
        spread = np.zeros(len(self.where), np.bool_)
        spread[self.where] = chosen
        return self.subset_mask(spread)


def _bits(mask: int, length: int) -> np.ndarray:
    """The lowest `length` bits of a mask as an array of bools."""
    data = np.frombuffer(mask.to_bytes(-(-length // 8), "little"), np.uint8)
    return np.unpackbits(data, count=length, bitorder="little").view(np.bool_)


def warp_mask(warp: int) -> int:
    return WARP_MASK << WARP * warp


def warp_masks(mask: int) -> list[int]:
    """The masks of all threads of each warp that has a thread in `mask`."""
    masks, warp = [], 0
    while mask >> warp:
        if mask >> warp & WARP_MASK:
            masks.append(WARP_MASK << warp)
        warp += WARP
    return masks


def count_of_warp(masks: list[int], warp: int) -> int:
    """How many masks have a thread of a warp."""
    whole = warp_mask(warp)
    return sum(1 for mask in masks if mask & whole)


@functools.lru_cache(65536)
def whole_warps(mask: int) -> int:
    """The mask of all threads of the warps that have a thread in `mask`."""
    return sum(warp_masks(mask))


@functools.lru_cache(65536)
def num_warps(mask: int) -> int:
    """The number of warps that have a thread in `mask`."""
    return len(warp_masks(mask))


def place_of(lanes: "Lanes", block: int, step: int, count: int | None = None) -> Place:
    """The place of an instruction of a block, for the threads that execute it.

    count: how often threads of the CTA had executed the block then; by default, until now
    """
    cta = lanes.cta
    instruction, warps = cta.grid.program.blocks[block].instructions[step], lanes.warps()
    file, _, line = instruction.source.rpartition(":")
    return Place(
        file=file,
        line=int(line or 0),
        ptx_line=instruction.line,
        instruction=instruction.text[:120],
        cta=cta.index,
        rank=cta.rank if cta.cluster.size > 1 else None,
        warps=tuple(warps),
        threads=lanes.describe(),
        execution=count_of_warp(cta.executed[block][:count], warps[0]),
    )


@dataclasses.dataclass
class Parked:
    """Threads that wait for something. `release` lets them go on at `block`."""

    cta: "Cta"
    mask: int
    block: int
    reason: Callable[[], str]  # what they wait for, for the report of a deadlock
    location: str = ""
    mbarrier: Any = None  # the one that a wait with a time limit waits for

    def release(self) -> None:
        self.cta.parked.remove(self)
        self.cta.add(self.block, self.mask)


class Cta:
    """One CTA. The scheduler in `grid` runs its fragments."""

    def __init__(self, grid: Any, cluster: Any, rank: int, index: tuple[int, int, int]):
        self.grid, self.cluster, self.rank, self.index = grid, cluster, rank, index
        self.num_threads = grid.num_threads
        self.all_threads = (1 << self.num_threads) - 1
        self.exited = 0
        self.registers = Registers(grid.program.register_counts, self.num_threads)
        self.carry = np.zeros(self.num_threads, np.bool_)  # CC.CF of each thread
        self.num_warps = -(-self.num_threads // WARP)
        directives = grid.program.entry.directives
        self.register_pool = RegisterPool(self, registers_at_launch(directives, self.num_threads, grid.gpu))
        self.uninitialized: Any = None  # uninitialized.Uninitialized, which `grid.Cluster` sets
        self.shared = SharedMemory(grid.shared_bytes)
        self.local = LocalMemory(self.num_threads, grid.program.local_bytes)
        self.shared.races = grid.shared_races(grid.races, self)
        self.tensor_races = TensorRaces(grid.races, self)
        self.wgmma_registers = WgmmaRegisters(self.num_warps, grid.found)
        self.special = special_registers(grid, cluster, rank, index)
        self.fragments: dict[int, int] = {0: self.all_threads}  # block -> threads that are at its beginning
        self.parked: list[Parked] = []
        self.yielded: dict[int, int] = {}  # block -> threads that polled memory since others last ran
        self.is_slow, self.slow_threads = False, 0  # see grid.Grid._slow_down
        self.mbarriers: dict[int, Any] = {}  # offset in shared memory -> barriers.Mbarrier
        self.named_barriers: dict[int, Any] = {}
        self.past_barriers: dict[int, dict[int, int]] = {}  # number -> arrivals of its last phase
        self.failed_waits: set = set()  # attempts of mbarrier.try_wait; with late completion, each fails once
        self.expired_waits = 0  # threads whose time limit in mbarrier.try_wait has passed; see grid.Grid._expire_waits
        self.sm = 0  # the SM where it is resident
        self.tensor_memory: Any = None  # its tensor_memory.Share, once it has one
        self.thread_copies: Any = None  # isa.thread_copy.ThreadCopies, once it has any
        self.acquired_tensor_maps: dict[int, int] = {}  # address -> the change that a thread has acquired
        self.saw_no_cluster = False  # see isa.launch_control
        self.pending_loads: dict[int, list] = {}  # warp -> late_loads.Load, oldest first
        self.block = 0  # the block that runs now
        self.executed: list[list[int]] = [[] for _ in grid.program.blocks]  # the threads of each execution of a block
        self.lets_next_begin = False  # a thread has executed griddepcontrol.launch_dependents
        self._lanes: dict[int, Lanes] = {}

    def __repr__(self) -> str:
        return f"CTA {self.index}"

    def describe(self) -> str:
        return f"{self}" + (f", rank {self.rank} of its cluster" if self.cluster.size > 1 else "")

    def lanes(self, mask: int) -> Lanes:
        """The Lanes of a mask. They are cached, because the same masks come again and again."""
        lanes = self._lanes.get(mask)
        if lanes is None:
            if len(self._lanes) > 4096:
                self._lanes.clear()
            lanes = self._lanes[mask] = Lanes(self, mask)
        return lanes

    def executions(self, warp: int, ptx_line: int, now: int = 0) -> int:
        """How often a warp has executed the instruction at a line of the PTX.

        now: the line that the warp executes now, if it does; the lines behind it in its block are still to come
        """
        blocks = self.grid.program.blocks
        at = next(i for i, block in enumerate(blocks) if any(x.line == ptx_line for x in block.instructions))
        return count_of_warp(self.executed[at], warp) - (at == self.block and 0 < now < ptx_line)

    @property
    def live(self) -> int:
        """The mask of the threads that have not exited."""
        return self.all_threads & ~self.exited

    def add(self, block: int, mask: int) -> None:
        """Puts threads at the beginning of a block."""
        if mask:
            self.fragments[block] = self.fragments.get(block, 0) | mask

    def park(self, mask: int, block: int, reason: Callable[[], str]) -> Parked:
        """Makes threads wait until they are released; then they go on at `block`."""
        parked = Parked(self, mask, block, reason, self.grid.program.location_of_end(self.block))
        self.parked.append(parked)
        return parked

    def exit(self, mask: int) -> None:
        """Ends threads. That may complete barriers; the last thread ends the CTA."""
        self.exited |= mask
        self.grid.num_events += 1
        for barrier in list(self.named_barriers.values()):
            barrier.check()
        self.cluster.barrier.check()
        if self.exited == self.all_threads:
            self.shared.races.check_exit()
            self.grid.completion.cta_exits(self)
            if self.tensor_memory is not None:
                self.tensor_memory.check_exit()


def lane_masks(lane: np.ndarray) -> dict[str, np.ndarray]:
    """The masks of the lanes that equal a thread's own one, that are less, and so on."""
    own = np.uint32(1) << lane
    less = own - np.uint32(1)
    masks = {"eq": own, "lt": less, "le": less | own, "ge": ~less, "gt": ~(less | own)}
    return {f"%lanemask_{name}": mask for name, mask in masks.items()}


def special_registers(grid: Any, cluster: Any, rank: int, index: tuple[int, int, int]) -> dict[str, Any]:
    """Values of special registers: an array over the CTA's threads, or one for all. (PTX, Special Registers)"""
    threads = np.arange(grid.num_threads, dtype=np.uint32)
    x, y, _ = (np.uint32(size) for size in grid.block)
    lane = threads % np.uint32(WARP)
    values: dict[str, Any] = {
        "%tid.x": threads % x,
        "%tid.y": threads // x % y,
        "%tid.z": threads // (x * y),
        "%laneid": lane,
        "%warpid": threads // np.uint32(WARP),
        "%nwarpid": np.uint32(-(-grid.num_threads // WARP)),
        "%dynamic_smem_size": np.uint32(grid.dynamic_shared_bytes),
        **lane_masks(lane),
        "%cluster_ctarank": np.uint32(rank),
        "%cluster_nctarank": np.uint32(cluster.size),
    }
    triples = {
        "%ntid": grid.block,
        "%ctaid": index,
        "%nctaid": grid.dimensions,
        "%cluster_ctaid": tuple(i % size for i, size in zip(index, grid.cluster_dimensions, strict=True)),
        "%cluster_nctaid": grid.cluster_dimensions,
        "%clusterid": tuple(i // size for i, size in zip(index, grid.cluster_dimensions, strict=True)),
        "%nclusterid": tuple(n // size for n, size in zip(grid.dimensions, grid.cluster_dimensions, strict=True)),
    }
    for name, triple in triples.items():
        for axis, value in zip("xyz", triple, strict=True):
            values[f"{name}.{axis}"] = np.uint32(value)
    return values
