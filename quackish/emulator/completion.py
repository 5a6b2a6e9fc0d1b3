"""When asynchronous work happens: at once, or as late as a wait permits.

Real hardware may complete asynchronous work at any time between these two. A kernel that misses a wait, waits for the
wrong thing, or reuses memory too early computes something else in one of them.

Two kinds of work are told apart. Copies that signal an mbarrier complete on their own: late, one at a time, whenever no
thread can go on. Groups (bulk stores, wgmma) complete when a thread waits for them. A fault then names the instruction
that issued the work.
"""

import random
from collections.abc import Callable
from typing import Any

from quackish.emulator.errors import Fault

AT_ONCE, LATE = "at_once", "late"
COMPLETIONS = (AT_ONCE, LATE)


# Takes what the work needs, and returns what is left to do: its writes.
Read = Callable[[], Callable[[], None]]


class _Groups:
    """The groups of one owner: committed ones, oldest first, and the open one."""

    def __init__(self):
        self.open: list[Read] = []
        self.committed: list[list[Read]] = []
        self.reads_done: list[list[Callable[[], None]]] = []  # groups older than `committed`: writes to do


class Completion:
    """The asynchronous work of one launch."""

    def __init__(self, kind: str, draw: random.Random, place: Callable[[], Callable[[], str]]):
        """place: returns a function that describes the instruction which executes now."""
        if kind not in COMPLETIONS:
            raise ValueError(f"completion: {kind!r}; expected one of {', '.join(map(repr, COMPLETIONS))}")
        self.late = kind == LATE
        self._draw, self._place = draw, place
        self._copies: list[Callable[[], None]] = []
        self._groups: dict[tuple, _Groups] = {}

    # Copies that signal an mbarrier

    def copy(self, action: Callable[[], None]) -> None:
        if self.late:
            self._copies.append(_placed(action, self._place()))
        else:
            action()

    def complete_one_copy(self) -> bool:
        """Completes a copy, chosen by chance. False if there is none."""
        if not self._copies:
            return False
        self._copies.pop(self._draw.randrange(len(self._copies)))()
        return True

    # Groups. An owner is (CTA, kind of work, thread or warp group).

    def issue(self, owner: tuple, read: Read) -> None:
        if self.late:
            place = self._place()
            placed = _placed(lambda: _placed(read(), place), place)
            self._groups.setdefault(owner, _Groups()).open.append(placed)
        else:
            read()()

    def commit(self, owner: tuple) -> None:
        if self.late:
            groups = self._groups.setdefault(owner, _Groups())
            groups.committed.append(groups.open)  # perhaps empty, which counts too
            groups.open = []

    def wait(self, owner: tuple, allowed: int, only_reads: bool = False) -> None:
        """Completes all committed groups but the latest `allowed` ones; with `only_reads`, their reads alone."""
        groups = self._groups.get(owner)
        if groups is None:
            return
        for _ in range(len(groups.committed) - allowed):
            groups.reads_done.append([read() for read in groups.committed.pop(0)])
        if not only_reads:
            outstanding = len(groups.committed)
            _write(groups, max(len(groups.reads_done) - max(allowed - outstanding, 0), 0))

    def cta_exits(self, cta: Any) -> None:
        """Shared memory is gone after this, so what reads it is done now. Writes wait for the end of the launch."""
        for owner, groups in self._groups.items():
            if owner[0] is cta:
                for group in [*groups.committed, groups.open]:
                    groups.reads_done.append([read() for read in group])
                groups.committed, groups.open = [], []

    def finish(self) -> None:
        """The end of the launch."""
        for groups in self._groups.values():
            _write(groups, len(groups.reads_done))
        while self.complete_one_copy():
            pass


def _placed(work: Callable[[], Any], place: Callable[[], str]) -> Callable[[], Any]:
    """Work that happens later than its instruction, which its faults name."""

    def do():
        try:
            return work()
        except (Fault, ValueError) as error:
            raise Fault(f"{error}\n  asynchronous work of {place()}") from None

    return do


def _write(groups: _Groups, count: int) -> None:
    for group in groups.reads_done[:count]:
        for write in group:
            write()
    del groups.reads_done[:count]
