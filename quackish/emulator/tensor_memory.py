"""Tensor memory: 128 lanes of 512 columns of 32 bits on each SM, and who has allocated which columns.

Quotations are from the PTX ISA, Tensor Memory Allocation and Management Instructions.
"""

from typing import Any

import numpy as np

from quackish.emulator.errors import Fault
from quackish.emulator.threads import Cta, Parked

LANES, COLUMNS = 128, 512
POISON = 0xFFFFFFFF  # a word that nobody has written: NaN as a float


class TensorMemory:
    """The tensor memory of one SM, which its CTAs share."""

    def __init__(self):
        self.words = np.full((LANES, COLUMNS), POISON, np.uint32)
        self.owners: list[Cta | None] = [None] * COLUMNS
        self.waiting: list[Parked] = []  # warps that wait for free columns

    def first_free(self, count: int, other: "TensorMemory | None" = None) -> int | None:
        """The first column of a free range, also free in the `other` memory; None if there is no such range."""
        memories = [self] if other is None else [self, other]
        for column in range(0, COLUMNS, count):
            if not any(owner for memory in memories for owner in memory.owners[column : column + count]):
                return column
        return None


class Share:
    """What one CTA has of its SM's tensor memory."""

    def __init__(self, cta: Cta, memory: TensorMemory):
        self.cta, self.memory = cta, memory
        self.allocated: dict[int, int] = {}  # first column -> columns
        self.last_count = COLUMNS  # columns of the latest allocation
        self.has_permit = True  # it may allocate
        self.has_collected = False  # the collector buffer holds an A that may be used again

    def check_allocation(self, count: int) -> None:
        if not self.has_permit:
            # "it is illegal for a CTA to perform tcgen05.alloc after any of its constituent threads execute
            # tcgen05.relinquish_alloc_permit."
            raise Fault("tensor-allocation", "tcgen05.alloc after tcgen05.relinquish_alloc_permit")
        # "The number of columns must be a power of 2. The operand nCols must be within the range [32, 512]."
        if not 32 <= count <= COLUMNS or count & (count - 1):
            raise Fault(
                "tensor-allocation", f"tcgen05.alloc of {count} columns; valid are powers of 2 from 32 to {COLUMNS}"
            )
        # "The number of columns allocated should not increase between any two allocations in the execution order
        # within the CTA."
        if count > self.last_count:
            raise Fault(
                "tensor-allocation",
                f"tcgen05.alloc of {count} columns after one of {self.last_count}; they may not increase",
            )

    def allocate(self, column: int, count: int) -> None:
        """Gives free columns to the CTA, and poisons them."""
        self.allocated[column] = self.last_count = count
        self.memory.owners[column : column + count] = [self.cta] * count
        self.memory.words[:, column : column + count] = POISON
        grid = self.cta.grid
        grid.tensor_memory_columns = max(grid.tensor_memory_columns, sum(self.allocated.values()))
        grid.num_events += 1

    def free(self, column: int, count: int) -> None:
        """Frees an allocation, and lets warps that wait for columns try again."""
        # "The operand taddr must point to a previous Tensor Memory allocation."
        if self.allocated.get(column) != count:
            raise Fault("tensor-allocation", f"tcgen05.dealloc of {count} columns at {column}; {self._has()}")
        del self.allocated[column]
        self.memory.owners[column : column + count] = [None] * count
        self.cta.grid.num_events += 1
        waiting, self.memory.waiting = self.memory.waiting, []
        for parked in waiting:
            parked.release()

    def check(self, lane: int, column: int, count: int) -> None:
        """Raises Fault unless the CTA has allocated `count` columns from `column` on."""
        end = column + count
        if lane >= LANES or end > COLUMNS or any(owner is not self.cta for owner in self.memory.owners[column:end]):
            raise Fault(
                "out-of-bounds",
                f"access of tensor memory at lane {lane}, columns {column} to {end - 1}, of {self.cta}; {self._has()}",
            )

    def _has(self) -> str:
        ranges = [f"{first} to {first + count - 1}" for first, count in sorted(self.allocated.items())]
        return f"it has allocated {'columns ' + ', '.join(ranges) if ranges else 'none'}"

    def check_exit(self) -> None:
        # "All of the Tensor Memory that was allocated using tcgen05.alloc instruction in a kernel, must be explicitly
        # deallocated using tcgen05.dealloc before the kernel exits."
        if self.allocated:
            raise Fault("tensor-allocation", f"{self.cta} exits without tcgen05.dealloc; {self._has()}")


def share_of(cta: Cta) -> Share:
    """The CTA's share of its SM's tensor memory, created on first use."""
    if cta.tensor_memory is None:
        cta.tensor_memory = Share(cta, cta.grid.tensor_memories.setdefault(cta.sm, TensorMemory()))
    return cta.tensor_memory


def peer_of(cta: Cta) -> Cta:
    """The other CTA of a pair.

    "Any 2 CTAs within the cluster whose %cluster_ctarank differs by the last bit only is said to form a CTA pair."
    """
    rank = cta.rank ^ 1
    if rank >= cta.cluster.size:
        raise Fault(
            "cta-pair", f".cta_group::2 in {cta.describe()}, which has no peer CTA in a cluster of {cta.cluster.size}"
        )
    peer = cta.cluster.ctas[rank]
    if peer.sm == cta.sm:  # which no GPU does: each CTA of a pair has the tensor memory of an SM
        raise Fault("cta-pair", f"both CTAs of a pair are on SM {cta.sm}; emulate a GPU with two or more SMs")
    return peer


def pair_of(cta: Cta) -> list[Cta]:
    """The CTAs of a pair, the even one first. They have not exited."""
    pair = sorted([cta, peer_of(cta)], key=lambda cta: cta.rank)
    for member in pair:
        # "When the current CTA issues the operation, the peer CTA should be active and should not have exited."
        # (Issue Granularity)
        if not member.live:
            raise Fault("cta-pair", f".cta_group::2 in {cta.describe()}, whose peer CTA has exited")
    return pair


class Meeting:
    """A warp of one CTA that waits for a warp of its peer CTA to allocate or to free with it."""

    def __init__(self, cta: Cta, parked: Parked, operands: Any):
        self.cta, self.parked, self.operands = cta, parked, operands
