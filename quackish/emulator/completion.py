"""When asynchronous work happens: at once, or as late as a wait permits.

Real hardware may complete asynchronous work at any time between these two. A kernel that misses a wait, waits for the
wrong thing, or reuses memory too early computes something else in one of them.

Three kinds of work are told apart. Copies that signal an mbarrier complete on their own: late, one at a time, whenever
no thread can go on. Groups (bulk stores, wgmma, stores to tensor memory) complete when a thread waits for them. Queued
work (tcgen05.mma) completes in order, as a part of the copy that announces it; that of half of the CTAs is done at
once, so that it can come before other work that is late. A fault then names the instruction that issued the work.
"""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

from quackish.emulator.errors import Fault, Place

AT_ONCE, LATE = "at_once", "late"
COMPLETIONS = (AT_ONCE, LATE)


# A function that reads what the work needs, and returns a function that does its writes.
Read = Callable[[], Callable[[], None]]


class _Groups:
    """The groups of one owner: committed ones, oldest first, and the open one."""

    def __init__(self):
        self.open: list[Read] = []
        self.committed: list[list[Read]] = []
        self.reads_done: list[list[Callable[[], None]]] = []  # groups older than `committed`: writes to do


class _Queue:
    """Work of a CTA in the order of its issue."""

    def __init__(self, is_late: bool):
        self.is_late = is_late
        self.work: deque[Callable[[], None]] = deque()
        self.num_done = 0
        self.issued_by: dict[int, int] = {}  # thread -> how much had been issued after its latest work

    def complete(self, count: int) -> None:
        """Completes the first `count` pieces of work, counted from the beginning of the launch."""
        while self.num_done < count:
            self.num_done += 1
            self.work.popleft()()

    def complete_all(self) -> None:
        self.complete(self.num_done + len(self.work))


class Completion:
    """The asynchronous work of one launch."""

    def __init__(self, kind: str, draw: random.Random, place: Callable[[], Callable[[], Place]]):
        """place: returns a function that returns the instruction which executes now."""
        if kind not in COMPLETIONS:
            raise ValueError(f"completion: {kind!r}; expected one of {', '.join(map(repr, COMPLETIONS))}")
        self.late = kind == LATE
        self._draw, self._place = draw, place
        self._copies: list[Callable[[], None]] = []
        self._groups: dict[tuple, _Groups] = {}
        self._queues: dict[Any, _Queue] = {}

    def located(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps work that happens later, so that its faults name the instruction that executes now."""
        return _placed(work, self._place())

    # Copies that signal an mbarrier

    def copy(self, action: Callable[[], None]) -> None:
        """Runs an action at once, or with late completion when no thread can go on."""
        if self.late:
            self._copies.append(_placed(action, self._place()))
        else:
            action()

    def complete_one_copy(self) -> bool:
        """Completes a copy, chosen at random. Returns False if there is none."""
        if not self._copies:
            return False
        self._copies.pop(self._draw.randrange(len(self._copies)))()
        return True

    # Work of a CTA that completes in the order of its issue

    def queue(self, cta: Any, thread: int, work: Callable[[], None]) -> None:
        """Queues a thread's work. It runs at once if the CTA's queue is not late."""
        queue = self._queue_of(cta)
        if queue.is_late:
            queue.work.append(_placed(work, self._place()))
            queue.issued_by[thread] = queue.num_done + len(queue.work)
        else:
            work()

    def _queue_of(self, cta: Any) -> _Queue:
        """The CTA's queue. With late completion half of the queues are late."""
        if cta not in self._queues:
            self._queues[cta] = _Queue(self.late and self._draw.random() < 0.5)
        return self._queues[cta]

    def announce(self, cta: Any, thread: int, signal: Callable[[], None]) -> None:
        """Calls `signal` once all that the thread has queued is complete."""
        queue = self._queue_of(cta)
        count = queue.issued_by.get(thread, 0)

        def complete():
            queue.complete(count)
            signal()

        self.copy(complete)

    # Groups. An owner is (CTA, kind of work, thread or warp group).

    def issue(self, owner: tuple, read: Read) -> None:
        """Adds work to the owner's open group. It runs at once if completion is not late."""
        if self.late:
            place = self._place()
            placed = _placed(lambda: _placed(read(), place), place)
            self._groups.setdefault(owner, _Groups()).open.append(placed)
        else:
            read()()

    def commit(self, owner: tuple) -> None:
        """Closes the owner's open group."""
        if self.late:
            groups = self._groups.setdefault(owner, _Groups())
            groups.committed.append(groups.open)  # perhaps empty, which counts too
            groups.open = []

    def wait(self, owner: tuple, allowed: int, only_reads: bool = False) -> None:
        """Completes all committed groups but the latest `allowed` ones; `only_reads` leaves their writes."""
        groups = self._groups.get(owner)
        if groups is None:
            return
        for _ in range(len(groups.committed) - allowed):
            groups.reads_done.append([read() for read in groups.committed.pop(0)])
        if not only_reads:
            outstanding = len(groups.committed)
            _write(groups, max(len(groups.reads_done) - max(allowed - outstanding, 0), 0))

    def cta_exits(self, cta: Any) -> None:
        """Does the reads of a CTA's work, because its shared memory is gone after this.

        Writes wait for the end of the launch.
        """
        if cta in self._queues:
            self._queues[cta].complete_all()
        for owner, groups in self._groups.items():
            if owner[0] is cta:
                for group in [*groups.committed, groups.open]:
                    groups.reads_done.append([read() for read in group])
                groups.committed, groups.open = [], []

    def finish(self) -> None:
        """Completes all work that is left at the end of the launch."""
        for groups in self._groups.values():
            _write(groups, len(groups.reads_done))
        while self.complete_one_copy():
            pass


def _placed(work: Callable[..., Any], place: Callable[[], Place]) -> Callable[..., Any]:
    """Wraps work that happens later, so that its faults name the instruction that issued it."""

    def do(*args):
        try:
            return work(*args)
        except Fault as fault:
            fault.issued_by = fault.issued_by or place()  # queued work names its own instruction
            raise

    return do


def _write(groups: _Groups, count: int) -> None:
    """Does the writes of the oldest `count` groups whose reads are done."""
    for group in groups.reads_done[:count]:
        for write in group:
            write()
    del groups.reads_done[:count]
