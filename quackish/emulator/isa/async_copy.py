"""Asynchronous copies: bulk copies, copies of tensors by tensor maps, and st.async."""

import functools

import numpy as np

from quackish.emulator import numbers, tensor_map
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.data_movement import check_present, cta_of
from quackish.emulator.isa.synchronization import mbarrier_at
from quackish.emulator.isa.tensor_maps import check_acquired
from quackish.emulator.memory import OFFSET_MASK, PARAMETER_WINDOW, RANK_SHIFT
from quackish.emulator.threads import WARP

# Addresses are aligned to 16 bytes, and the size is a multiple of 16. (PTX, cp.async.bulk)


def _check_bulk(source, destination, size):
    if (source | destination | size) % 16:
        raise Fault(
            "misaligned",
            f"cp.async.bulk of {size} bytes from {source:#x} to {destination:#x}; all must be multiples of 16",
        )


@action("cp.async.bulk.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes", "[u32], [u64], u32, [u32]")
@action(
    "cp.async.bulk.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes.L2::cache_hint",
    "[u32], [u64], u32, [u32], u64",
)
def bulk_load(lanes, destinations, sources, sizes, barriers, policies=None):
    for operands in zip(*(x.tolist() for x in (lanes.threads, destinations, sources, sizes, barriers)), strict=True):
        _bulk_load(lanes, *operands)


def _bulk_load(lanes, thread, destination, source, size, barrier_address):
    """Issues the copy of one thread from global memory to a CTA of its cluster."""
    _check_bulk(source, destination, size)
    memory, cta = lanes.cta.grid.memory, cta_of(lanes, destination)
    barrier, offset = mbarrier_at(lanes, barrier_address), destination & OFFSET_MASK
    target, data = cta.shared.bytes_at(offset, size), memory.bytes_at(source, size)
    memory.bytes_read += size
    lanes.cta.grid.races.load_from(lanes.cta, np.array([source], np.uint64), size, thread)
    lanes.cta.grid.races.copy_to(cta, cta.shared.races.granules(offset, size), thread, lanes.cta, barrier)

    def copy():
        target[:] = data
        barrier.complete(size)

    lanes.cta.grid.completion.copy(copy)


@action("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", "[u32], [u32], u32, [u32]")
def bulk_copy_between_ctas(lanes, destinations, sources, sizes, barriers):
    """Copies from the CTA's shared memory to another CTA's of the cluster, and signals that CTA's mbarrier."""
    for thread, destination, source, size, barrier_address in zip(
        *(x.tolist() for x in (lanes.threads, destinations, sources, sizes, barriers)), strict=True
    ):
        _check_bulk(source, destination, size)
        cta, target, barrier = lanes.cta, cta_of(lanes, destination), mbarrier_at(lanes, barrier_address)
        if cta_of(lanes, barrier_address) is not target:
            raise Fault("wrong-cta", "cp.async.bulk: the mbarrier is not in the CTA of the destination")
        offset, races = destination & OFFSET_MASK, cta.grid.races
        place, data = target.shared.bytes_at(offset, size), cta.shared.bytes_at(source & OFFSET_MASK, size)
        component = cta.cluster.clocks.component(barrier)
        warp = [races.first_warp(cta) + thread // WARP]
        granules = cta.shared.races.granules(source & OFFSET_MASK, size)
        cta.shared.races.read_later(granules, warp, component, barrier.phase + 1)
        races.copy_to(target, target.shared.races.granules(offset, size), thread, cta, barrier)

        def copy(place=place, data=data, barrier=barrier, size=size):
            check_present(barrier.cta, lanes.cta)
            place[:] = data
            barrier.complete(size)

        cta.grid.completion.copy(copy)


@action("cp.async.bulk.prefetch.L2.global", "[u64], u32")
@action("cp.async.bulk.prefetch.L2.global.L2::cache_hint", "[u64], u32, u64")
def bulk_prefetch(lanes, sources, sizes, policies=None):
    for source, size in zip(sources.tolist(), sizes.tolist(), strict=True):
        _check_bulk(source, 0, size)


@action("cp.async.bulk.global.shared::cta.bulk_group", "[u64], [u32], u32")
@action("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint", "[u64], [u32], u32, u64")
def bulk_store(lanes, destinations, sources, sizes, policies=None):
    for thread, destination, source, size in zip(
        lanes.threads.tolist(), *(x.tolist() for x in (destinations, sources, sizes)), strict=True
    ):
        _check_bulk(source, destination, size)
        data = lanes.cta.shared.bytes_at(source & OFFSET_MASK, size)
        target = lanes.cta.grid.memory.bytes_at(destination, size)
        lanes.cta.grid.memory.bytes_written += size
        lanes.cta.grid.races.store_from(lanes.cta, lanes.cta.shared.races.granules(source & OFFSET_MASK, size), thread)
        lanes.cta.grid.races.store_to(lanes.cta, np.array([destination], np.uint64), size, thread)

        def read(data=data, target=target):
            taken = data.copy()

            def write():
                target[:] = taken

            return write

        lanes.cta.grid.completion.issue((lanes.cta, "bulk", thread), read)


def _declare_bulk_add(type_):
    dtype = np.dtype({"u": "u", "s": "i", "f": "f"}[type_[0]] + str(int(type_[1:]) // 8))

    @action(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.{type_}", "[u64], [u32], u32")
    @action(f"cp.reduce.async.bulk.global.shared::cta.bulk_group.L2::cache_hint.add.{type_}", "[u64], [u32], u32, u64")
    def bulk_add(lanes, destinations, sources, sizes, policies=None):
        cta, memory = lanes.cta, lanes.cta.grid.memory
        for thread, destination, source, size in zip(
            lanes.threads.tolist(), *(x.tolist() for x in (destinations, sources, sizes)), strict=True
        ):
            _check_bulk(source, destination, size)
            target = memory.bytes_at(destination, size).view(dtype)
            data = cta.shared.bytes_at(source & OFFSET_MASK, size).view(dtype)
            cta.grid.races.store_from(cta, cta.shared.races.granules(source & OFFSET_MASK, size), thread)
            cta.grid.races.store_to(cta, np.array([destination], np.uint64), size, thread)
            memory.bytes_read += size
            memory.bytes_written += size

            def read(data=data, target=target):
                taken = data.copy()

                def write():
                    # The manual says that this flushes subnormal fp32 numbers. An H200 does not.
                    target[:] = numbers.add(target, taken) if dtype.kind == "f" else target + taken
                    cta.grid.num_events += 1

                return write

            cta.grid.completion.issue((cta, "bulk", thread), read)


for _type in ("u32", "s32", "u64", "f32"):
    _declare_bulk_add(_type)


@action("cp.async.bulk.commit_group", "")
def bulk_commit(lanes):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.commit((lanes.cta, "bulk", thread))
        lanes.cta.grid.races.commit(lanes.cta, ("bulk", thread))


@action("cp.async.bulk.wait_group", "immediate")
def bulk_wait(lanes, allowed):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.wait((lanes.cta, "bulk", thread), allowed)
        lanes.cta.grid.races.wait(lanes, ("bulk", thread), allowed, ("bulk write", thread))


@action("cp.async.bulk.wait_group.read", "immediate")
def bulk_wait_read(lanes, allowed):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.wait((lanes.cta, "bulk", thread), allowed, only_reads=True)
        lanes.cta.grid.races.wait(lanes, ("bulk", thread), allowed)


def _declare_async_store(type_, count):
    vector, operand = ("", type_) if count == 1 else (f".v{count}", f"{{{type_}*{count}}}")
    dtype = np.dtype(f"u{int(type_[1:]) // 8}")

    opcode = f"st.async{{,.weak}}.shared::cluster.mbarrier::complete_tx::bytes{vector}.{type_}"

    @action(opcode, f"[u32], {operand}, [u32]")
    def store(lanes, addresses, values, barriers):
        """Stores values in shared memory, and signals an mbarrier there when they have come."""
        rows = np.stack([value.view(dtype) for value in ([values] if count == 1 else values)], axis=1)
        for thread, address, row, barrier_address in zip(
            lanes.threads.tolist(), addresses.tolist(), rows, barriers.tolist(), strict=True
        ):
            _async_store(lanes, thread, address, row, barrier_address)


def _async_store(lanes, thread, address, values, barrier_address):
    target, size = cta_of(lanes, address), values.nbytes
    # "The number of CTAs within the cluster is strictly greater than one" (PTX, st.async). Otherwise an H200 ends with
    # an illegal instruction.
    if lanes.cta.cluster.size == 1:
        raise Fault("wrong-cta", "st.async in a cluster of one CTA; it needs two or more")
    # The destination and the mbarrier "belong to the same CTA". (PTX, st.async)
    if cta_of(lanes, barrier_address) is not target:
        raise Fault("wrong-cta", "st.async: the mbarrier is not in the CTA of the destination")
    if address % size:
        raise Fault("misaligned", f"misaligned access of {size} bytes of shared memory at {address:#x}")
    barrier, offset = mbarrier_at(lanes, barrier_address), address & OFFSET_MASK
    place = target.shared.bytes_at(offset, size)
    lanes.cta.grid.races.copy_to(target, target.shared.races.granules(offset, size), thread, lanes.cta, barrier)
    # "The complete-tx operation on the mbarrier has .release semantics at .cluster scope." (PTX, st.async)
    lanes.cta.grid.races.carry(lanes, thread, barrier)

    def store():
        check_present(target, lanes.cta)
        place.view(values.dtype)[:] = values
        barrier.complete(size)

    lanes.cta.grid.completion.copy(store)


for _type in ("b32", "u32", "s32", "f32", "b64", "u64", "s64"):
    for _count in (1, 2, 4):
        if int(_type[1:]) * _count <= 128:
            _declare_async_store(_type, _count)


# Copies of boxes of tensors


def _tensor_map(lanes, address):
    """Decodes the tensor map at a generic address, which is in a kernel parameter or in global memory."""
    grid = lanes.cta.grid
    # A tensor map is aligned to 64 bytes. (CUDA driver API, cuTensorMapEncodeTiled)
    if address % 64:
        raise Fault("misaligned", f"a tensor map at {address:#x}, which is not a multiple of 64")
    if address >= PARAMETER_WINDOW:
        offset = address - PARAMETER_WINDOW
        return tensor_map.decode(grid.parameters[offset : offset + tensor_map.BYTES])
    check_acquired(lanes.cta, address)
    return tensor_map.decode(grid.memory.bytes_at(address, tensor_map.BYTES).tobytes())


def _coordinates(columns, thread):
    """The coordinates that one thread gives. columns: an array over threads for each dimension."""
    return tuple(int(column[thread]) for column in columns)


def _declare_tensor_load(rank):
    def load(lanes, destinations, tensors, barriers, policies=None, group=1):
        for i in range(lanes.count):
            destination, barrier = int(destinations[i]), int(barriers[i])
            rank = destination >> RANK_SHIFT
            # The mbarrier is in the CTA of the destination, or with .cta_group::2 in that or its peer CTA.
            if (barrier >> RANK_SHIFT) // group != rank // group:
                raise Fault("wrong-cta", f"a copy to {destination:#x} with an mbarrier of another CTA, at {barrier:#x}")
            _load_box(lanes, i, tensors, barrier, destination, [rank], [barrier >> RANK_SHIFT])

    def multicast(lanes, destinations, tensors, barriers, masks, policies=None, group=1):
        for i in range(lanes.count):
            ranks = [rank for rank in range(16) if int(masks[i]) >> rank & 1]
            # With .cta_group::2 the CTA of each pair is signaled that has the parity of the mbarrier's CTA.
            parity = int(barriers[i]) >> RANK_SHIFT & 1
            signaled = [rank & ~1 | parity for rank in ranks] if group == 2 else ranks
            _load_box(lanes, i, tensors, int(barriers[i]), int(destinations[i]), ranks, signaled)

    opcode = f"cp.async.bulk.tensor.{rank}d.shared::{{cluster,cta}}.global{{,.tile}}.mbarrier::complete_tx::bytes"
    action(opcode, f"[u32], [u64;{rank}], [u32]")(load)
    action(f"{opcode}.L2::cache_hint", f"[u32], [u64;{rank}], [u32], u64")(load)
    opcode = opcode.replace("{cluster,cta}", "cluster")  # ptxas refuses .multicast::cluster to .shared::cta
    action(f"{opcode}.multicast::cluster", f"[u32], [u64;{rank}], [u32], u16")(multicast)
    action(f"{opcode}.multicast::cluster.L2::cache_hint", f"[u32], [u64;{rank}], [u32], u16, u64")(multicast)
    for group in (1, 2):
        hints = f"{{.cta_group::{group}.L2::cache_hint,.L2::cache_hint.cta_group::{group}}}"
        for name, function, mask in ("", load, ""), (".multicast::cluster", multicast, ", u16"):
            of_group = functools.partial(function, group=group)
            signature = f"[u32], [u64;{rank}], [u32]{mask}"
            action(f"{opcode}{name}.cta_group::{group}", signature)(of_group)
            action(f"{opcode}{name}{hints}", f"{signature}, u64")(of_group)


def _load_box(lanes, i, tensors, barrier_address, destination, ranks, signaled):
    """Copies a box to the CTAs with these ranks, each at the same offset, and signals a CTA's mbarrier for each."""
    grid = lanes.cta.grid
    (addresses, columns), offset = tensors, destination & OFFSET_MASK
    tensor, coordinates = _tensor_map(lanes, int(addresses[i])), _coordinates(columns, i)
    places = tensor.shared_offsets(offset)
    ctas = [cta_of(lanes, rank << RANK_SHIFT) for rank in ranks]
    barriers = [mbarrier_at(lanes, rank << RANK_SHIFT | barrier_address & OFFSET_MASK) for rank in signaled]
    for cta in ctas:
        cta.shared.check_bytes(int(places.min()), int(places.max()) + 1)
    window = tensor.window(coordinates)
    grid.races.load_from(lanes.cta, window.addresses.ravel(), window.row_bytes, int(lanes.threads[i]))
    for cta, barrier in zip(ctas, barriers, strict=True):
        granules = cta.shared.races.granules_of_box(places)
        grid.races.copy_to(cta, granules, int(lanes.threads[i]), lanes.cta, barrier)

    def copy():
        box = tensor.load(coordinates, grid.memory)
        for cta, barrier in zip(ctas, barriers, strict=True):
            check_present(cta, lanes.cta)
            cta.shared.bytes[places] = box
            barrier.complete(tensor.box_bytes)

    grid.completion.copy(copy)


def _declare_tensor_prefetch(rank):
    opcode = f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global{{,.tile}}"

    @action(opcode, f"[u64;{rank}]")
    @action(f"{opcode}.L2::cache_hint", f"[u64;{rank}], u64")
    def prefetch(lanes, tensors, policies=None):
        addresses, columns = tensors
        for i in range(lanes.count):
            _tensor_map(lanes, int(addresses[i])).window(_coordinates(columns, i))  # checks both


def _declare_tensor_store(rank):
    def store(lanes, tensors, sources, policies=None):
        _store_boxes(lanes, tensors, sources, add=False)

    def add(lanes, tensors, sources, policies=None):
        _store_boxes(lanes, tensors, sources, add=True)

    opcode = f"cp.async.bulk.tensor.{rank}d.global.shared::cta{{,.tile}}.bulk_group"
    action(opcode, f"[u64;{rank}], [u32]")(store)
    action(f"{opcode}.L2::cache_hint", f"[u64;{rank}], [u32], u64")(store)
    opcode = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.add{{,.tile}}.bulk_group"
    action(opcode, f"[u64;{rank}], [u32]")(add)
    action(f"{opcode}.L2::cache_hint", f"[u64;{rank}], [u32], u64")(add)


def _store_boxes(lanes, tensors, sources, add):
    """Issues a store of a box for each thread. add: the box is added to the tensor."""
    addresses, columns = tensors
    stores = {}
    for thread, address, source, *coordinates in zip(
        lanes.threads.tolist(), *(x.tolist() for x in (addresses, sources, *columns)), strict=True
    ):
        # Each thread that executes the instruction copies. If the threads of a warp store the same box, ptxas has the
        # warp do it once (one UTMASTG), which makes no difference; copies that add become a loop over the threads.
        operands = address, source, tuple(coordinates), thread if add else thread // WARP
        if operands not in stores:
            stores[operands] = _once(
                _store_box(lanes.cta, thread, _tensor_map(lanes, address), tuple(coordinates), source, add)
            )
        lanes.cta.grid.completion.issue((lanes.cta, "bulk", thread), stores[operands])


def _store_box(cta, thread, tensor, coordinates, source, add):
    """The store of one box as work for `Completion.issue`."""
    memory, places = cta.grid.memory, tensor.shared_offsets(source & OFFSET_MASK)
    cta.shared.check_bytes(int(places.min()), int(places.max()) + 1)
    cta.grid.races.store_from(cta, cta.shared.races.granules_of_box(places), thread)
    window = tensor.window(coordinates)
    cta.grid.races.store_to(cta, window.addresses.ravel(), window.row_bytes, thread)

    def read():
        box = cta.shared.bytes[places]

        def write():
            tensor.store(coordinates, box, memory, add)
            cta.grid.num_events += 1

        return write

    return read


def _once(read):
    """Wraps work that several owners share: the first one that completes it does it."""
    todo = [read]
    return lambda: todo.pop()() if todo else _nothing


def _nothing():
    pass


for _rank in range(1, 6):
    _declare_tensor_load(_rank)
    _declare_tensor_prefetch(_rank)
    _declare_tensor_store(_rank)
