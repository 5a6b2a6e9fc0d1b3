"""Counts for each source line and opcode, and a trace of one warp: what `emulator.record` takes on demand."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from quackish.emulator.errors import Place
from quackish.emulator.global_races import GlobalRaces, semantics
from quackish.emulator.ptx import Instruction
from quackish.emulator.races import SharedRaces
from quackish.emulator.threads import WARP, Cta, num_warps, place_of

BANKS, BANK_BYTES = 32, 4


@dataclasses.dataclass
class LineCounts:
    """What the instructions of a source line with one opcode did in a launch. Bytes are requested ones."""

    file: str
    line: int
    opcode: str
    instructions: int = 0  # counted once per warp, also where the predicate is false
    global_bytes_read: int = 0  # as in LaunchReport; those of asynchronous work are counted where it is issued
    global_bytes_written: int = 0
    shared_bytes_read: int = 0
    shared_bytes_written: int = 0
    # Times that a warp's access of shared memory takes beyond the fewest. Threads conflict if they access different
    # words in one of the 32 banks of 4 bytes. Half a warp accesses words of 8 bytes at once, and 8 threads 16 bytes.
    bank_conflicts: int = 0


class Profile:
    """The counts of one launch."""

    def __init__(self, grid: Any):
        self._grid = grid
        self._counts: dict[tuple[str, str], LineCounts] = {}  # by (source, opcode)

    def here(self) -> LineCounts:
        """The counts of the instruction that executes now."""
        return self._of(self._grid.instruction)

    def retire(self, cta: Cta) -> None:
        """Counts the instructions of a CTA that has ended."""
        for block, masks in zip(cta.grid.program.blocks, cta.executed, strict=True):
            warps = sum(map(num_warps, masks))
            for instruction in block.instructions if warps else ():
                self._of(instruction).instructions += warps

    def lines(self) -> list[LineCounts]:
        """All counts, by file and line."""
        return sorted(self._counts.values(), key=lambda counts: (counts.file, counts.line, counts.opcode))

    def _of(self, instruction: Instruction) -> LineCounts:
        key = instruction.source, instruction.opcode
        if key not in self._counts:
            file, _, line = instruction.source.rpartition(":")
            self._counts[key] = LineCounts(file, int(line or 0), instruction.opcode)
        return self._counts[key]


class CountedSharedRaces(SharedRaces):
    """`SharedRaces` that count the accesses of which they are told."""

    def read(self, offsets: np.ndarray, size: int) -> None:
        super().read(offsets, size)
        counts = self._count_conflicts(offsets, size)
        counts.shared_bytes_read += len(offsets) * size

    def write(self, offsets: np.ndarray, size: int) -> None:
        super().write(offsets, size)
        counts = self._count_conflicts(offsets, size)
        counts.shared_bytes_written += len(offsets) * size

    def change(self, offsets: np.ndarray, size: int) -> None:
        super().change(offsets, size)
        counts = self._count_conflicts(offsets, size)
        counts.shared_bytes_read += len(offsets) * size
        counts.shared_bytes_written += len(offsets) * size

    def read_later(self, granules: np.ndarray, warps: list[int], component: int, epoch: int) -> None:
        super().read_later(granules, warps, component, epoch)
        self.races.grid.profile.here().shared_bytes_read += len(granules) * self.shadow.granule

    def write_later(self, granules: np.ndarray, warps: list[int], component: int, epoch: int) -> None:
        super().write_later(granules, warps, component, epoch)
        self.races.grid.profile.here().shared_bytes_written += len(granules) * self.shadow.granule

    def _count_conflicts(self, offsets: np.ndarray, size: int) -> LineCounts:
        threads, _ = self.races.threads(len(offsets))
        per_warp = np.arange(len(offsets)) % (len(offsets) // len(threads.warps))  # of rows of matrices
        lanes = np.where(threads.lane < 0, per_warp, threads.lane)
        counts = self.races.grid.profile.here()
        counts.bank_conflicts += bank_conflicts(threads.warp, lanes, offsets, size)
        return counts


def bank_conflicts(warps: np.ndarray, lanes: np.ndarray, offsets: np.ndarray, size: int) -> int:
    """The times that accesses of `size` bytes take beyond the fewest. Each has a warp, a lane and an offset."""
    threads_at_once = min(WARP, WARP * BANK_BYTES // size)
    groups = warps.astype(np.int64) * WARP + lanes // threads_at_once
    words = offsets.astype(np.int64)[:, None] // BANK_BYTES + np.arange(max(size // BANK_BYTES, 1))
    accesses = np.unique(np.stack([np.broadcast_to(groups[:, None], words.shape), words], -1).reshape(-1, 2), axis=0)
    banks, times = np.unique(accesses[:, 0] * BANKS + accesses[:, 1] % BANKS, return_counts=True)
    slowest: dict[int, int] = collections.defaultdict(int)  # group -> words of its busiest bank
    for group, count in zip((banks // BANKS).tolist(), times.tolist(), strict=True):
        slowest[group] = max(slowest[group], count)
    return sum(slowest.values()) - len(slowest)


class CountedGlobalRaces(GlobalRaces):
    """`GlobalRaces` that count the accesses of which they are told, as LaunchReport does."""

    def read(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any = slice(None)) -> None:
        super().read(tensor, addresses, size, which)
        instruction, counts = self.races.grid.instruction, self.races.grid.profile.here()
        if not polls(instruction.opcode):
            counts.global_bytes_read += len(addresses[which]) * size
            if semantics(instruction.opcode).writes:
                counts.global_bytes_written += len(addresses[which]) * size

    def write(
        self, tensor: tuple[int, int], addresses: np.ndarray, size: int, which: Any, changes: Callable[[], np.ndarray]
    ) -> None:
        super().write(tensor, addresses, size, which, changes)
        self.races.grid.profile.here().global_bytes_written += len(addresses[which]) * size

    def write_later(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, issuer: tuple, epoch: int) -> None:
        super().write_later(tensor, addresses, size, issuer, epoch)
        counts = self.races.grid.profile.here()
        counts.global_bytes_written += len(addresses) * size
        if counts.opcode.startswith("cp.reduce"):
            counts.global_bytes_read += len(addresses) * size

    def read_later(self, tensor: tuple[int, int], addresses: np.ndarray, size: int, *issuer: Any) -> None:
        super().read_later(tensor, addresses, size, *issuer)
        self.races.grid.profile.here().global_bytes_read += len(addresses) * size


def polls(opcode: str) -> bool:
    """True for accesses whose number depends on the order of threads, so that LaunchReport does not count them."""
    return ".cas." in opcode or (opcode.startswith("ld") and semantics(opcode).is_strong)


class Trace:
    """The instructions of one warp, in the order of their execution."""

    def __init__(self, cta: tuple[int, int, int], warp: int):
        if not isinstance(cta, tuple) or len(cta) != 3:
            raise ValueError(f"emulator.record: trace is {(cta, warp)}; expected (CTA, warp), such as ((0, 0, 0), 3)")
        self.cta, self.warp = cta, warp
        self.places: list[Place] = []

    def add(self, cta: Cta, block: int, mask: int) -> None:
        """Adds the instructions of a block that threads of a CTA execute now."""
        if cta.index == self.cta and (mine := mask & (((1 << WARP) - 1) << WARP * self.warp)):
            steps = range(cta.grid.program.blocks[block].size)
            self.places += [place_of(cta.lanes(mine), block, step) for step in steps]
