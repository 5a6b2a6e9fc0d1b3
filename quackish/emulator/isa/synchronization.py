"""Barriers, mbarriers, fences and atomic operations."""

import numpy as np

from quackish.emulator import barriers, numbers, waits
from quackish.emulator.clocks import CLUSTER, CTA, joined
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action, control
from quackish.emulator.isa.data_movement import by_cta, cta_of, offsets_in_cta
from quackish.emulator.memory import OFFSET_MASK

# Barriers of a CTA. A barrier's number may differ between the warps that execute an instruction together. Without
# .aligned, threads of a warp may come apart; they count when the whole warp has come.


def _by_number(lanes, numbers):
    """Yields (barrier, mask of its threads) for each number."""
    for number in np.unique(numbers).tolist():
        chosen = numbers == number
        mask = lanes.mask if chosen.all() else lanes.subset_of_active(chosen)
        yield barriers.named_barrier(lanes.cta, number), mask


def _arrive(lanes, numbers, count, following=None):
    """The threads arrive and, if `following` is a block, wait and go on there."""
    for barrier, mask in _by_number(lanes, numbers):
        barrier.arrive(mask, count)
        if following is not None:
            barrier.waiting.append(lanes.cta.park(mask, following, barrier.__str__))
        barrier.check()


def _one_count(counts):
    """The thread count of a barrier, which all threads must give alike."""
    if (counts != counts[0]).any():
        raise Fault("non-uniform", "threads of a warp give different thread counts to a barrier")
    return int(counts[0])


@control("bar.sync", "u32", converged="warp")
@control("barrier.sync{,.aligned}", "u32", converged="warp")
def barrier_of_all(lanes, following, writers, numbers):
    _arrive(lanes, numbers, None, following)


@control("bar.sync", "u32, u32", converged="warp")
@control("barrier.sync{,.aligned}", "u32, u32", converged="warp")
def barrier_of_some(lanes, following, writers, numbers, counts):
    _arrive(lanes, numbers, _one_count(counts), following)


@action("bar.arrive", "u32, u32", converged="warp")
@action("barrier.arrive{,.aligned}", "u32, u32", converged="warp")
def barrier_arrive(lanes, numbers, counts):
    _arrive(lanes, numbers, _one_count(counts))


def _declare_barrier_reduction(name, type_, reduce):
    """Declares barriers that return one value of all threads' predicates."""

    @control(
        f"{{bar.red.{name},barrier.red.{name},barrier.red.{name}.aligned}}.{type_}",
        f"{type_} = u32, pred",
        "warp",
    )
    def reduce_all(lanes, following, writers, numbers, votes):
        _vote(lanes, following, writers, numbers, None, votes)

    @control(
        f"{{bar.red.{name},barrier.red.{name},barrier.red.{name}.aligned}}.{type_}",
        f"{type_} = u32, u32, pred",
        "warp",
    )
    def reduce_some(lanes, following, writers, numbers, counts, votes):
        _vote(lanes, following, writers, numbers, _one_count(counts), votes)

    def _vote(lanes, following, writers, numbers, count, votes):
        (write,) = writers
        for number in np.unique(numbers).tolist():
            chosen = numbers == number
            part = lanes.cta.lanes(lanes.subset_of_active(chosen))
            barrier = barriers.named_barrier(lanes.cta, number)
            barrier.votes.append(votes[chosen])
            barrier.results.append(lambda votes, part=part: write(part, np.full(part.count, reduce(votes))))
            _arrive(part, numbers[chosen], count, following)


_declare_barrier_reduction("popc", "u32", lambda votes: np.uint32(np.count_nonzero(votes)))
_declare_barrier_reduction("and", "pred", np.all)
_declare_barrier_reduction("or", "pred", np.any)


# The barrier of a cluster. Without .aligned, threads of a warp may come apart.


@action("barrier.cluster.arrive{,.relaxed,.release}", "")
@action("barrier.cluster.arrive{,.relaxed,.release}.aligned", "", converged="warp")
def cluster_arrive(lanes):
    lanes.cta.cluster.barrier.arrive(lanes.cta, lanes.mask)


@control("barrier.cluster.wait{,.acquire}", "")
@control("barrier.cluster.wait{,.acquire}.aligned", "", converged="warp")
def cluster_wait(lanes, following, writers):
    lanes.cta.cluster.barrier.wait(lanes.cta, lanes.mask, following)


# mbarriers


def mbarrier_at(lanes, address):
    """The mbarrier at an address of shared::cluster."""
    return _used(lanes, barriers.mbarrier_at(cta_of(lanes, address), address & OFFSET_MASK))


def _used(lanes, barrier):
    """Returns the barrier. Raises Fault if its mbarrier.init need not precede this use."""
    lanes.cta.grid.races.check_initialized(lanes, barrier)
    return barrier


@action("mbarrier.init.shared{,::cta}.b64", "[u32], u32")
def mbarrier_init(lanes, addresses, counts):
    for offset, count in zip(offsets_in_cta(lanes, addresses).tolist(), counts.tolist(), strict=True):
        _check_alignment(offset)
        lanes.cta.shared.check(offset, offset + 8)
        if (old := lanes.cta.mbarriers.get(offset)) is not None:
            _check_second_init(lanes, old, count)
        lanes.cta.mbarriers[offset] = barriers.Mbarrier(lanes.cta, offset, count)
        lanes.cta.shared.set_mbarrier(offset, True)
        lanes.cta.mbarriers[offset].initialized = lanes.cta.grid.races.now(lanes)


def _check_second_init(lanes, old, count):
    # "Performing any non-mbarrier or mbarrier.init operations on an initialized mbarrier object results in undefined
    # behavior." (PTX, mbarrier). Cards write the state of an unused mbarrier, which changes nothing if it is the same.
    if old.is_unused and old.count == count:
        why = "an mbarrier is initialized twice, with the same count and unused in between"
        lanes.cta.grid.found(Fault("mbarrier-init-twice", f"{why}: {old}"))
    else:
        raise Fault(
            "mbarrier-memory",
            f"mbarrier.init with a count of {count} where an initialized mbarrier is: {old}",
            advice="mbarrier.inval must come first",
        )


def _check_alignment(offset):
    if offset % 8:  # PTX, Size and alignment of mbarrier object
        raise Fault("misaligned", f"an mbarrier at {offset:#x}, which is not a multiple of 8")


@action("mbarrier.inval.shared{,::cta}.b64", "[u32]")
def mbarrier_invalidate(lanes, addresses):
    for offset in offsets_in_cta(lanes, addresses).tolist():
        barriers.mbarrier_at(lanes.cta, offset)
        del lanes.cta.mbarriers[offset]
        lanes.cta.shared.set_mbarrier(offset, False)


# The state that an arrival returns is opaque; here it is the phase.


def _arrive_at(lanes, addresses, counts, sizes=None):
    """Each thread arrives at its mbarrier; with sizes, it expects these bytes first. Returns states."""
    states = []
    races, is_relaxed = lanes.cta.grid.races, ".relaxed" in lanes.cta.grid.opcode
    at = [mbarrier_at(lanes, address) for address in addresses.tolist()]
    for barrier in at:
        races.arrive_remotely(lanes, barrier)
    lanes.cta.cluster.clocks.has_relaxed_arrivals |= is_relaxed
    for barrier in set(at):
        _check_phase(lanes.cta.lanes(lanes.subset_of_active(np.array([each is barrier for each in at]))), barrier)
    if is_relaxed:
        clock = races.release_relaxed(lanes, within_cta=all(barrier.cta is lanes.cta for barrier in at))
    else:
        clock = races.arrive(lanes)
    for i, barrier in enumerate(at):
        barrier.arrived = joined(barrier.arrived, clock)
        states.append(barrier.phase)
        if sizes is not None:
            barrier.expect(int(sizes[i]))
        barrier.arrive(int(counts[i]) if np.ndim(counts) else counts)
    if len(set(zip(at, states, strict=True))) > len(set(at)):
        lanes.cta.grid.found(Fault("barrier-phase", f"threads arrive together, and not in the same phase: {at[0]}"))
    return np.array(states, np.uint64)


def _check_phase(lanes, barrier):
    """Checks that arrivals come after those of the last phase; of relaxed ones it is not known what they come after."""
    races = lanes.cta.grid.races
    if barrier.last_arrivals and not lanes.cta.cluster.clocks.has_relaxed_arrivals:
        races.check_arrival(lanes, barrier, barrier.last_arrivals)
    barrier.arrivals |= races.epochs(lanes)


@action(
    "mbarrier.arrive{,.release.cta,.release.cluster,.relaxed.cta,.relaxed.cluster}.shared{,::cta,::cluster}.b64",
    "u64 = [u32]",
)
def mbarrier_arrive(lanes, addresses):
    return _arrive_at(lanes, addresses, 1)


@action(
    "mbarrier.arrive{,.release.cta,.release.cluster,.relaxed.cta,.relaxed.cluster}.shared{,::cta,::cluster}.b64",
    "u64 = [u32], u32",
)
def mbarrier_arrive_count(lanes, addresses, counts):
    return _arrive_at(lanes, addresses, counts)


@action(
    "mbarrier.arrive.expect_tx{,.release.cta,.release.cluster,.relaxed.cta,.relaxed.cluster}.shared{,::cta,::cluster}.b64",
    "u64 = [u32], u32",
)
def mbarrier_arrive_expect(lanes, addresses, sizes):
    """ "an expect-tx operation is performed prior to the arrive-on operation" """
    return _arrive_at(lanes, addresses, 1, sizes)


@action("mbarrier.expect_tx.relaxed.{cta,cluster}.shared{,::cta,::cluster}.b64", "[u32], u32")
def mbarrier_expect(lanes, addresses, sizes):
    for address, size in zip(addresses.tolist(), sizes.tolist(), strict=True):
        barrier = mbarrier_at(lanes, address)
        lanes.cta.grid.races.arrive_remotely(lanes, barrier)
        barrier.expect(size)


_SCOPES = "{,.acquire.cta,.acquire.cluster,.relaxed.cta,.relaxed.cluster}.shared{,::cta}.b64"


@control(f"mbarrier.try_wait{_SCOPES}", "pred = [u32], u64", repeats=True)
@control(f"mbarrier.try_wait{_SCOPES}", "pred = [u32], u64, u32", repeats=True)
def mbarrier_try_wait_for_state(lanes, following, writers, addresses, states, time_limit=None):
    return mbarrier_try_wait(lanes, following, writers, addresses, _parities(states))


def _parities(states):
    """The parities of the phases in which arrivals returned these states.

    Such a phase is the current one or the one before. (PTX, mbarrier.test_wait)
    """
    return (states & np.uint64(1)).astype(np.uint32)


@control(f"mbarrier.try_wait.parity{_SCOPES}", "pred = [u32], u32", repeats=True)
@control(f"mbarrier.try_wait.parity{_SCOPES}", "pred = [u32], u32, u32", repeats=True)
def mbarrier_try_wait(lanes, following, writers, addresses, parities, time_limit=None):
    """Waits for the end of a phase, or until a time limit passes, which is the machine's choice."""
    offsets = offsets_in_cta(lanes, addresses)
    if (offsets == offsets[0]).all() and (parities == parities[0]).all():
        return _try_wait(lanes, following, writers, int(offsets[0]), int(parities[0]))
    for offset, parity in np.unique(np.stack([offsets, parities]), axis=1).T.tolist():
        mask = lanes.subset_of_active((offsets == offset) & (parities == parity))
        subset = lanes.cta.lanes(mask)
        if _try_wait(subset, following, writers, offset, parity) is not None:
            lanes.cta.add(following, mask)
    return None


def _try_wait(lanes, following, writers, offset, parity):
    """Waits at one mbarrier. Returns the next block, or None if the threads are parked."""
    cta, (write,) = lanes.cta, writers
    barrier = _used(lanes, barriers.mbarrier_at(cta, offset))
    completed = barrier.has_completed(parity)
    if not completed and not cta.expired_waits & lanes.mask:
        attempt = (cta.block, lanes.mask, offset, barrier.phase)
        if not cta.grid.completion.late or attempt in cta.failed_waits:
            waits_for = f"waits for the end of a phase with parity {parity & 1}"
            parked = cta.park(lanes.mask, cta.block, lambda: f"{waits_for}: {barrier}")
            parked.mbarrier = barrier
            barrier.waiting.append(parked)
            return None
        cta.failed_waits.add(attempt)  # the time limit has passed at once
        cta.grid.num_events += 1
    if completed:
        _observe(lanes, barrier)
    cta.expired_waits &= ~lanes.mask
    write(lanes, np.full(lanes.count, completed))
    return following


def _observe(lanes, barrier):
    """Orders the end of the mbarrier's last phase before what these threads do next; `.relaxed`, behind a fence."""
    races, barrier.observed = lanes.cta.grid.races, barrier.phase
    waits.passed(lanes, barrier)
    if ".relaxed" in lanes.cta.grid.opcode:
        lanes.cta.cluster.clocks.has_relaxed_arrivals = True
        races.acquire_at_fence(lanes, barrier.completed, CLUSTER if barrier.remote else CTA)
    else:
        races.acquire(lanes, barrier.completed)


@action(f"mbarrier.test_wait{_SCOPES}", "pred = [u32], u64", polls=True)
def mbarrier_test_wait_for_state(lanes, addresses, states):
    return mbarrier_test_wait(lanes, addresses, _parities(states))


@action(f"mbarrier.test_wait.parity{_SCOPES}", "pred = [u32], u32", polls=True)
def mbarrier_test_wait(lanes, addresses, parities):
    offsets = offsets_in_cta(lanes, addresses)
    results = []
    for i, (offset, parity) in enumerate(zip(offsets.tolist(), parities.tolist(), strict=True)):
        barrier = _used(lanes, barriers.mbarrier_at(lanes.cta, offset))
        results.append(barrier.has_completed(parity))
        if results[-1]:
            _observe(lanes.cta.lanes(1 << int(lanes.threads[i])), barrier)
    return np.array(results)


# Fences order memory accesses. Here memory is sequentially consistent, so they only tell what is ordered; see `races`.


@action("fence.{sc,acq_rel}.{cta,cluster,gpu,sys}", "")
@action("fence.acquire.sync_restrict::shared::cluster.cluster", "")
@action("fence.release.sync_restrict::shared::cta.cluster", "")
@action("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster", "")
@action("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster", "")
@action("fence.mbarrier_init.release.cluster", "")
@action("fence.proxy.async{,.global,.shared::cta,.shared::cluster}", "")
@action("membar.{cta,gl,sys}", "")
def fence(lanes):
    lanes.cta.grid.races.fence(lanes, lanes.cta.grid.opcode)


# Atomic operations: one thread after another, in the order of threads.


def _increment(old, limit):
    """atom.inc: counts up to a limit, then from 0 again."""
    return 0 if old >= limit else old + 1


def _decrement(old, limit):
    """atom.dec: counts down to 0, then from a limit again."""
    return limit if old == 0 or old > limit else old - 1


def _exchange(old, new):
    return new


_OPERATIONS = {
    "add": (lambda old, value: old + value, ("u32", "s32", "u64", "f32")),
    "inc": (_increment, ("u32",)),
    "dec": (_decrement, ("u32",)),
    "min": (min, ("u32", "s32", "u64", "s64")),
    "max": (max, ("u32", "s32", "u64", "s64")),
    "and": (lambda old, value: old & value, ("b32", "b64")),
    "or": (lambda old, value: old | value, ("b32", "b64")),
    "xor": (lambda old, value: old ^ value, ("b32", "b64")),
    "exch": (_exchange, ("b32", "b64")),
}


def _wrapped(value, dtype):
    """Converts a Python number to the type. Integers wrap around."""
    if dtype.kind == "f":
        # "atom.add.f32 on global memory flushes subnormal inputs and results to sign-preserving zero" (PTX, atom)
        return numbers.canonical(numbers.flush(dtype.type(value)))
    size = 8 * dtype.itemsize
    value %= 1 << size
    return value - (1 << size) if dtype.kind == "i" and value >> (size - 1) else value


def _atomically(lanes, addresses, operation, values, dtype, counted=True):
    """Applies an operation for one thread after another. Returns the old values."""
    memory = lanes.cta.grid.memory
    old = memory.load(addresses, dtype.itemsize, 1, counted)[:, 0].view(dtype)  # checks the addresses
    flush = numbers.flush if dtype.kind == "f" else lambda value: value
    values = flush(values)
    for i, (address, value) in enumerate(zip(addresses.tolist(), values.tolist(), strict=True)):
        cell = memory.bytes_at(address, dtype.itemsize).view(dtype)
        old[i] = cell[0]
        new = dtype.type(_wrapped(operation(flush(cell[0]).item(), value), dtype))
        if new.tobytes() != cell.tobytes():
            cell[0] = new
            lanes.cta.grid.num_events += 1
    memory.bytes_written += old.nbytes * counted
    return old


def _atomically_in_shared(lanes, addresses, new_of, dtype):
    """Changes words of shared memory, one thread after another. The operations are relaxed: they order nothing.

    new_of: a function of the old value and the position of the thread. Returns the old values.
    """
    old = np.empty(len(addresses), dtype)
    for shared, chosen, offsets in by_cta(lanes, addresses):
        shared.check_atomic(offsets, dtype.itemsize)
        cells = shared.views[dtype.itemsize].view(dtype)
        for i, cell in zip(np.flatnonzero(chosen).tolist(), (offsets // dtype.itemsize).tolist(), strict=True):
            old[i] = cells[cell]
            new = new_of(old[i].item(), i)
            # "atom.add.f32 on shared memory supports subnormal numbers" (PTX, atom)
            cells[cell] = numbers.canonical(dtype.type(new)) if dtype.kind == "f" else _wrapped(new, dtype)
    lanes.cta.grid.num_events += 1
    return old


# PTX has the order and scope in front of the space; ptxas also takes them after it, where the scope is .gpu if missing.
_ATOMS = "atom.{relaxed,acquire,release,acq_rel}.gpu.global", "atom.global{,.relaxed,.acquire,.release,.acq_rel}"
_REDS = "red.{relaxed,release}.gpu.global", "red.global"
# Of tickets and locks
_ATOMS_OF_OTHER_SCOPES = "atom.{relaxed,acquire,release,acq_rel}.{cta,cluster,sys}.global"
_REDS_OF_OTHER_SCOPES = "red.{relaxed,release}.{cta,cluster,sys}.global"
_WITH_OTHER_SCOPES = "add.u32", "inc.u32", "or.b32", "exch.b32"


def _declare_atomic(name, operation, type_):
    dtype = np.dtype({"b": "u", "u": "u", "s": "i", "f": "f"}[type_[0]] + str(int(type_[1:]) // 8))

    def atom(lanes, addresses, values):
        return _atomically(lanes, addresses, operation, values, dtype)

    has_other_scopes = f"{name}.{type_}" in _WITH_OTHER_SCOPES
    for opcode in (*_ATOMS, _ATOMS_OF_OTHER_SCOPES) if has_other_scopes else _ATOMS:
        action(f"{opcode}.{name}.{type_}", f"{type_} = [u64], {type_}", polls=True)(atom)

    @action(f"atom.shared.{name}.{type_}", f"{type_} = [u32], {type_}", polls=True)
    def atom_shared(lanes, addresses, values):
        return _atomically_in_shared(lanes, addresses, lambda old, i: operation(old, values[i].item()), dtype)

    if name == "exch":  # there is no red.exch
        return

    spaces = "{.shared,.relaxed.cta.shared::cta,.relaxed.cluster.shared::cluster}" if name == "add" else ".shared"

    @action(f"red{spaces}.{name}.{type_}", f"[u32], {type_}")
    def red_shared(lanes, addresses, values):
        atom_shared(lanes, addresses, values)

    def red(lanes, addresses, values):
        _atomically(lanes, addresses, operation, values, dtype)

    for opcode in (*_REDS, _REDS_OF_OTHER_SCOPES) if has_other_scopes else _REDS:
        action(f"{opcode}.{name}.{type_}", f"[u64], {type_}")(red)


def _declare_vector_add(count):
    """Declares red of a vector, whose elements are atomic one by one. (PTX, red)"""
    add, _ = _OPERATIONS["add"]

    def red(lanes, addresses, values):
        if (addresses % np.uint64(4 * count)).any():
            raise Fault(
                "misaligned", f"misaligned access of {4 * count} bytes of global memory at {int(addresses[0]):#x}"
            )
        for i, value in enumerate(values):
            _atomically(lanes, addresses + np.uint64(4 * i), add, value, value.dtype)

    for opcode in _REDS:
        action(f"{opcode}.add.v{count}.f32", f"[u64], {{f32*{count}}}")(red)


for _count in (2, 4):
    _declare_vector_add(_count)


for _name, (_operation, _types) in _OPERATIONS.items():
    for _type in _types:
        _declare_atomic(_name, _operation, _type)


@action(f"{_ATOMS[0]}.cas.{{b32,b64}}", "T = [u64], T, T", polls=True)
@action(f"{_ATOMS[1]}.cas.{{b32,b64}}", "T = [u64], T, T", polls=True)
@action(f"{_ATOMS_OF_OTHER_SCOPES}.cas.b32", "T = [u64], T, T", polls=True)
def compare_and_swap(lanes, addresses, expected, new):
    old = np.empty_like(expected)
    for i in range(lanes.count):
        wanted, value = expected[i].item(), new[i].item()
        old[i] = _atomically(
            lanes,
            addresses[i : i + 1],
            lambda current, value, wanted=wanted: value if current == wanted else current,
            np.array([value], expected.dtype),
            expected.dtype,
            counted=False,  # a loop may try until it finds what it expects, which depends on the order of threads
        )[0]
    return old


@action("atom.shared.cas.{b32,b64}", "T = [u32], T, T", polls=True)
def compare_and_swap_shared(lanes, addresses, expected, new):
    def new_of(old, i):
        return new[i].item() if old == expected[i] else old

    return _atomically_in_shared(lanes, addresses, new_of, expected.dtype)
