"""Finds accesses, ahead of `griddepcontrol.wait`, of memory that a launch before may still write, or still read.

    "If the prerequisite grid is using griddepcontrol.launch_dependents, then the dependent grid must use
    griddepcontrol.wait to ensure correct functional execution." (PTX, griddepcontrol)

The emulator sees launches, and not the operations of PyTorch between them, which would end whatever came before. It
notices one if that changes memory that a launch wrote.
"""

import dataclasses
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from quackish.emulator.clocks import ORDERED, WAITED, Events, Shadow
from quackish.emulator.errors import Fault, Place
from quackish.emulator.memory import POISON


class Read(NamedTuple):
    """What an instruction read of one tensor: `size` bytes at each address."""

    addresses: np.ndarray
    size: int
    place: Callable[[], Place]


@dataclasses.dataclass
class Ended:
    """A launch in the past, as seen by later ones, which may run at the same time on a GPU."""

    name: str
    events: Events
    written: dict[tuple[int, int], Shadow]  # tensor (address, bytes) -> which event wrote what
    lets_next_begin: bool
    waited_first: bool  # a thread executed griddepcontrol.wait before its CTA executed launch_dependents
    running: list["Ended"]  # the launches that may still run when this one begins
    reads_of: Callable[[tuple[int, int]], Iterable[Read]]  # of a tensor
    contents: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict)  # checksums at its end
    # tensor -> which of its reads, counted from 1, was the last one of each byte
    last_reads: dict[tuple[int, int], tuple[np.ndarray, list[Read]]] = dataclasses.field(default_factory=dict)

    def remember(self, bytes_at: Callable[[int, int], np.ndarray]) -> None:
        """Keeps checksums of the tensors that it wrote, if the next launch may overlap it."""
        if self.lets_next_begin:
            self.contents = {tensor: _checksum(bytes_at(*tensor)) for tensor in self.written}

    def has_been_overwritten(self, regions: Iterable[tuple[int, int]], bytes_at: Callable) -> bool:
        """True if something other than a launch has written to tensors that are still there.

        Memory full of poison is a new tensor at the address of an old one.
        """
        alive = set(regions)
        return any(
            tensor in alive and _checksum(bytes_at(*tensor)) != checksum and not (bytes_at(*tensor) == POISON).all()
            for tensor, checksum in self.contents.items()
        )

    def writer(self, addresses: np.ndarray, size: int) -> int:
        """An event that wrote to one of the addresses, or 0."""
        for (base, length), shadow in self.written.items():
            inside = addresses[(addresses >= np.uint64(base)) & (addresses < np.uint64(base + length))]
            if inside.size:
                first = (inside - np.uint64(base)).astype(np.intp) // shadow.granule
                steps = np.arange(-(-size // shadow.granule))
                events = shadow.writes[np.minimum(first[:, None] + steps, len(shadow.writes) - 1)]
                if events.any():
                    return int(events.max())
        return 0

    def reader(self, tensor: tuple[int, int], addresses: np.ndarray, size: int) -> Callable[[], Place] | None:
        """The place of an instruction that read one of the addresses, all in one tensor."""
        if tensor not in self.last_reads:
            reads, last = list(self.reads_of(tensor)), np.zeros(tensor[1], np.int32)
            for i, read in enumerate(reads):
                last[(read.addresses - np.uint64(tensor[0])).astype(np.intp)[:, None] + np.arange(read.size)] = i + 1
            self.last_reads[tensor] = last, reads
        last, reads = self.last_reads[tensor]
        found = last[(addresses - np.uint64(tensor[0])).astype(np.intp)[:, None] + np.arange(size)].max()
        return reads[found - 1].place if found else None


def _checksum(data: np.ndarray) -> int:
    return zlib.crc32(data.data)


def running(before: Ended | None, programmatic: bool) -> list[Ended]:
    """The launches that may still run when the next one begins.

    The launch before does if it executed launch_dependents: "signals that specific dependents the runtime system
    designated to react to this instruction can be scheduled as soon as all other CTAs in the grid issue the same
    instruction or have completed". So do those in front of it, unless it waited for them first.
    """
    if before is None or not programmatic or not before.lets_next_begin:
        return []
    return [before, *([] if before.waited_first else before.running)]


class DependentLaunch:
    """Checks the accesses of one launch."""

    def __init__(self, running: list[Ended], found: Callable[[Fault], None]):
        """found: gets the faults, and raises most of them"""
        self.running, self._found = running, found

    def check(
        self,
        tensor: tuple[int, int],
        addresses: np.ndarray,
        size: int,
        clocks: Any,
        warp: int,
        verb: str,
        name: Callable[[], str],
    ) -> None:
        """Reports that a warp accesses what an earlier launch may still write, or writes what that may still read.

        verb: "reads" or "writes"; name: for the message
        """
        # ".wait modifier causes the executing thread to wait until all prerequisite grids in flight have completed and
        # all the memory operations from the prerequisite grids are performed and made visible to the current grid."
        component = clocks.components.get(WAITED)
        if component is not None and clocks.seen[ORDERED, warp, component]:
            return
        for launch in self.running:
            event, place = launch.writer(addresses, size), None
            if not event and verb == "writes":
                place = launch.reader(tensor, addresses, size)
            if event or place:
                other = "write" if event else "read"
                self._found(
                    Fault(
                        "launch-race",
                        f"a thread {verb} global memory that an earlier launch, {launch.name}, may still {other}; it "
                        "has not executed griddepcontrol.wait, and no barrier puts it after a thread that has",
                        tensor=name(),
                        second=place() if place else launch.events.place(event),
                        second_is=f"the {other}",
                    )
                )
