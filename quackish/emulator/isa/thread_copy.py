"""cp.async: asynchronous copies of 4 to 16 bytes, which each thread issues and waits for itself.

Groups are those of a thread. Copies of all threads that execute an instruction are kept together, as arrays.
"""

from typing import NamedTuple

import numpy as np

from quackish.emulator.clocks import joined
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.data_movement import offsets_in_cta
from quackish.emulator.isa.synchronization import mbarrier_at


class Copies(NamedTuple):
    """The copies that the threads issue with one instruction."""

    threads: np.ndarray
    groups: np.ndarray  # which group of its thread a copy is in, from 0
    offsets: np.ndarray  # in shared memory
    sources: np.ndarray
    sizes: np.ndarray  # bytes that are copied, up to `size`; zeros follow
    size: int

    def chosen(self, which: np.ndarray) -> "Copies":
        return Copies(
            self.threads[which],
            self.groups[which],
            self.offsets[which],
            self.sources[which],
            self.sizes[which],
            self.size,
        )


class ThreadCopies:
    """The copies of one CTA that have not completed, in the order of their issue."""

    def __init__(self, cta):
        self.cta = cta
        self.committed = np.zeros(cta.num_threads, np.int64)  # number of groups of each thread
        self.pending = []  # (number of the instruction, Copies, what completes Copies)
        self.num_issued = 0

    def issue(self, copies):
        """Copies at once, or with late completion when threads wait for the copies."""
        completion = self.cta.grid.completion
        if completion.late:
            self.pending.append((self.num_issued, copies, completion.located(lambda copies: _copy(self.cta, copies))))
            self.num_issued += 1
        else:
            _copy(self.cta, copies)

    def complete(self, threads, first_kept, num_issued):
        """Completes copies of the threads in groups before `first_kept`, which is an array over threads.

        Only the first `num_issued` instructions of the CTA count.
        """
        bound = np.zeros(self.cta.num_threads, np.int64)
        bound[threads] = first_kept
        pending, self.pending = self.pending, []
        for number, copies, complete in pending:
            done = (copies.groups < bound[copies.threads]) & (number < num_issued)
            if done.any():
                complete(copies.chosen(done))
            if not done.all():
                self.pending.append((number, copies.chosen(~done), complete))


def _copies_of(cta):
    """The CTA's ThreadCopies, created on first use."""
    if cta.thread_copies is None:
        cta.thread_copies = ThreadCopies(cta)
    return cta.thread_copies


def _copy(cta, copies):
    """Copies rows to shared memory, filled up with zeros."""
    size, memory = copies.size, cta.grid.memory
    rows = np.zeros((len(copies.threads), size), np.uint8)
    for count in np.unique(copies.sizes).tolist():
        if count:
            which = copies.sizes == count
            rows[which, :count] = memory.read_rows(copies.sources[which], count)
    words = rows.view({4: np.uint32, 8: np.uint64, 16: np.uint64}[size])
    cta.shared.put(copies.offsets, [np.ascontiguousarray(word) for word in words.T])
    cta.grid.num_events += 1


def _issue(lanes, addresses, sources, size, sizes):
    """Checks the copies of an instruction and issues them. sizes: bytes per thread, at most `size`."""
    offsets = offsets_in_cta(lanes, addresses)
    if (sizes > size).any():
        raise Fault(
            "invalid-operand", f'cp.async of {size} bytes: "src-size larger than cp-size results in undefined behavior"'
        )
    misaligned = (offsets | (sources % np.uint64(size)).astype(np.uint32)) % np.uint32(size) != 0
    if misaligned.any():
        raise Fault("misaligned", f"cp.async of {size} bytes from or to an address that is not a multiple of {size}")
    lanes.cta.shared.check(int(offsets.min()), int(offsets.max()) + size)
    # A race with threads that know of the instruction, and do not wait for the copy, is one of late completion alone.
    lanes.cta.shared.races.write(offsets, size)
    lanes.cta.grid.memory.announce_read(sources, size, sizes > 0)
    copies = _copies_of(lanes.cta)
    groups = copies.committed[lanes.threads]
    copies.issue(Copies(lanes.threads, groups, offsets, sources, sizes.astype(np.int64), size))


def _declare(level, sizes):
    """Declares cp.async.ca or .cg. sizes: the valid numbers of bytes."""

    def copy(lanes, addresses, sources, size, source_sizes=None, policies=None):
        if size not in sizes:
            raise Fault("invalid-operand", f"cp.async.{level} of {size} bytes; valid are {', '.join(map(str, sizes))}")
        _issue(lanes, addresses, sources, size, np.full(lanes.count, size) if source_sizes is None else source_sizes)

    def copy_with_policy(lanes, addresses, sources, size, policies):
        copy(lanes, addresses, sources, size)

    def copy_unless(lanes, addresses, sources, size, ignored, policies=None):
        copy(lanes, addresses, sources, size, np.where(ignored, 0, size))

    prefetches = "{,.L2::64B,.L2::128B,.L2::256B}"
    opcode = f"cp.async.{level}.shared{{,::cta}}.global"
    action(f"{opcode}{prefetches}", "[u32], [u64], immediate")(copy)
    action(f"{opcode}{prefetches}", "[u32], [u64], immediate, u32")(copy)
    action(f"{opcode}{prefetches}", "[u32], [u64], immediate, pred")(copy_unless)
    action(f"{opcode}.L2::cache_hint", "[u32], [u64], immediate, u64")(copy_with_policy)
    action(f"{opcode}.L2::cache_hint", "[u32], [u64], immediate, u32, u64")(copy)
    action(f"{opcode}.L2::cache_hint", "[u32], [u64], immediate, pred, u64")(copy_unless)


_declare("ca", (4, 8, 16))
_declare("cg", (16,))


@action("cp.async.commit_group", "")
def commit(lanes):
    _copies_of(lanes.cta).committed[lanes.threads] += 1


@action("cp.async.wait_group", "immediate")
def wait(lanes, allowed):
    copies = _copies_of(lanes.cta)
    copies.complete(lanes.threads, copies.committed[lanes.threads] - allowed, copies.num_issued)


@action("cp.async.wait_all", "")
def wait_for_all(lanes):
    """ "equivalent to: cp.async.commit_group; cp.async.wait_group 0;" """
    commit(lanes)
    wait(lanes, 0)


def _arrive(lanes, addresses, increments):
    """Arrives once all prior copies of the thread are complete."""
    copies, threads = _copies_of(lanes.cta), lanes.threads
    barriers = [mbarrier_at(lanes, address) for address in addresses.tolist()]
    first_kept, num_issued = copies.committed[threads] + 1, copies.num_issued  # those of the open group too
    clock = lanes.cta.grid.races.release(lanes)
    if increments:
        # "When .noinc modifier is not specified, the pending count of the mbarrier object is incremented by 1 prior to
        # the asynchronous arrive-on operation."
        for barrier in barriers:
            barrier.pending += 1

    def arrive():
        copies.complete(threads, first_kept, num_issued)
        for barrier in barriers:
            barrier.arrived = joined(barrier.arrived, clock)
            barrier.arrive(1)

    lanes.cta.grid.completion.copy(arrive)


@action("cp.async.mbarrier.arrive.shared{,::cta}.b64", "[u32]")
def arrive(lanes, addresses):
    offsets_in_cta(lanes, addresses)
    _arrive(lanes, addresses, increments=True)


@action("cp.async.mbarrier.arrive.noinc.shared{,::cta}.b64", "[u32]")
def arrive_counted(lanes, addresses):
    offsets_in_cta(lanes, addresses)
    _arrive(lanes, addresses, increments=False)
