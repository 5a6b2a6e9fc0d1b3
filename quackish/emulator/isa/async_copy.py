"""Asynchronous copies: bulk copies, copies of tensors by tensor maps, and st.async."""

import numpy as np

from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.synchronization import cta_of, mbarrier_at
from quackish.emulator.memory import OFFSET_MASK

# "[...] the addresses [...] must be aligned to 16 bytes"; "size must be a multiple of 16" (PTX, cp.async.bulk)


def _check_bulk(source, destination, size):
    if (source | destination | size) % 16:
        raise Fault(
            f"cp.async.bulk of {size} bytes from {source:#x} to {destination:#x}; all must be multiples of 16"
        )


@action("cp.async.bulk.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes", "[u32], [u64], u32, [u32]")
@action(
    "cp.async.bulk.shared::{cluster,cta}.global.mbarrier::complete_tx::bytes.L2::cache_hint",
    "[u32], [u64], u32, [u32], u64",
)
def bulk_load(lanes, destinations, sources, sizes, barriers, policies=None):
    for operands in zip(*(x.tolist() for x in (destinations, sources, sizes, barriers)), strict=True):
        _bulk_load(lanes, *operands)


def _bulk_load(lanes, destination, source, size, barrier_address):
    _check_bulk(source, destination, size)
    memory, shared = lanes.cta.grid.memory, cta_of(lanes, destination).shared
    barrier = mbarrier_at(lanes, barrier_address)
    target, data = shared.bytes_at(destination & OFFSET_MASK, size), memory.bytes_at(source, size)
    memory.bytes_read += size

    def copy():
        target[:] = data
        barrier.complete(size)

    lanes.cta.grid.completion.copy(f"bulk copy of {size} bytes to {destination:#x}, then {barrier}", copy)


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

        def read(data=data, target=target):
            taken = data.copy()

            def write():
                target[:] = taken

            return write

        lanes.cta.grid.completion.issue((lanes.cta, "bulk", thread), read)


@action("cp.async.bulk.commit_group", "")
def bulk_commit(lanes):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.commit((lanes.cta, "bulk", thread))


@action("cp.async.bulk.wait_group", "immediate")
def bulk_wait(lanes, allowed):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.wait((lanes.cta, "bulk", thread), allowed)


@action("cp.async.bulk.wait_group.read", "immediate")
def bulk_wait_read(lanes, allowed):
    for thread in lanes.threads.tolist():
        lanes.cta.grid.completion.wait((lanes.cta, "bulk", thread), allowed, only_reads=True)


def _declare_async_store(type_):
    dtype = np.dtype(f"u{int(type_[1:]) // 8}")

    @action(
        f"st.async{{,.weak}}.shared::cluster.mbarrier::complete_tx::bytes.{type_}", f"[u32], {type_}, [u32]"
    )
    def store(lanes, addresses, values, barriers):
        """"The completion [...] is signaled by an mbarrier in the same CTA as the destination." """
        for address, value, barrier_address in zip(
            addresses.tolist(), values.view(dtype), barriers.tolist(), strict=True
        ):
            _async_store(lanes, address, value, barrier_address)


def _async_store(lanes, address, value, barrier_address):
    target = cta_of(lanes, address)
    if cta_of(lanes, barrier_address) is not target:
        raise Fault("st.async: the mbarrier is not in the CTA of the destination")
    if address % value.itemsize:
        raise Fault(f"misaligned access of {value.itemsize} bytes of shared memory at {address:#x}")
    barrier, place = mbarrier_at(lanes, barrier_address), target.shared.bytes_at(address & OFFSET_MASK, value.itemsize)

    def store():
        place.view(value.dtype)[0] = value
        barrier.complete(value.itemsize)

    lanes.cta.grid.completion.copy(f"st.async to {address:#x}, then {barrier}", store)


for _type in ("b32", "u32", "s32", "f32", "b64", "u64", "s64"):
    _declare_async_store(_type)
