"""Allocation of tensor memory (sm_100a). (PTX: TensorCore 5th Generation Family)"""

import numpy as np

from quackish.emulator import matrices
from quackish.emulator.errors import Fault
from quackish.emulator.isa import action, control
from quackish.emulator.isa.data_movement import offsets_in_cta
from quackish.emulator.memory import SHARED_WINDOW
from quackish.emulator.tensor_memory import Meeting, peer_of, share_of
from quackish.emulator.threads import WARP, warp_mask


def by_warp(lanes):
    """Yields (lanes, position of their first thread in `lanes`) for each warp, which must be whole."""
    position = 0
    for warp in lanes.warps():
        whole = warp_mask(warp)
        if lanes.mask & whole != whole:
            # "The behavior of the instruction is undefined if all the threads in the warp do not use the same values
            # of nCols, or if any thread in the warp has exited." The same is said of taddr at tcgen05.ld and .st.
            raise Fault(
                "missing-threads", "a tcgen05 instruction of whole warps, of which a thread has exited or is missing"
            )
        yield lanes.cta.lanes(whole), position
        position += WARP


def uniform(values, position, what):
    """The one value of a warp whose threads begin at `position`. Raises Fault if there are several."""
    part = values[position : position + WARP]
    if (part != part[0]).any():
        raise Fault("non-uniform", f"threads of a warp have different values of {what}")
    return part[0].item()


def check_group(lanes, group):
    # "All tcgen05 instructions within a kernel must specify the same value for the .cta_group qualifier."
    grid = lanes.cta.grid
    if grid.cta_group not in (0, group):
        raise Fault(
            "cta-pair", f"a tcgen05 instruction with .cta_group::{group} after one with .cta_group::{grid.cta_group}"
        )
    grid.cta_group = group


def shared_addresses(addresses):
    """Generic addresses as addresses of shared::cluster."""
    # "If the address specified by dst does not fall within the address window of .shared::cta state space then the
    # behavior is undefined."
    shared = addresses - np.uint64(SHARED_WINDOW)
    if (shared >> np.uint64(32)).any():
        raise Fault("out-of-bounds", f"generic address {int(addresses[0]):#x} is not one of shared memory")
    return shared.astype(np.uint32)


# Allocation. "When .cta_group::2 is specified, one warp from each of the peer CTAs must collectively perform the
# allocation and de-allocation."


def _meet(lanes, following, what, operands):
    """The Meeting with the peer CTA's waiting warp. If none waits, parks this warp and returns None."""
    cta = lanes.cta
    meetings, key = cta.cluster.meetings, (what, cta.rank // 2)
    peer_of(cta)
    # "When .cta_group::2 is specified, the issuing warp must make sure that peer CTA is launched"
    if lanes.mask & ~cta.cluster.barrier.passed.get(cta.rank, 0):
        why = f"tcgen05.{what} before a barrier of the cluster: the peer of {cta} may not have started"
        cta.grid.found(Fault("cta-pair-start", why))
    other = meetings.get(key)
    if other is None:
        parked = cta.park(lanes.mask, following, lambda: f"waits for its peer CTA to execute tcgen05.{what}")
        meetings[key] = Meeting(cta, parked, operands)
        return None
    if other.cta is cta:
        raise Fault(
            "cta-pair", f"a second warp of {cta} executes tcgen05.{what} while the first one waits for the peer CTA"
        )
    return other


def _finish_meeting(cta, what, other):
    """Releases the peer CTA's warp."""
    del cta.cluster.meetings[what, cta.rank // 2]
    other.parked.release()


def _wait_for_columns(lanes, count, share):
    """Parks a warp, which executes its instruction again once columns are free."""
    why = f"waits for {count} columns of tensor memory of SM {lanes.cta.sm}"
    share.memory.waiting.append(lanes.cta.park(lanes.mask, lanes.cta.block, lambda: why))


def _store_address(warp, offset, column):
    """Stores the address of an allocation in shared memory, as an access of the warp."""
    grid = warp.cta.grid
    executing, grid.executing = grid.executing, warp
    warp.cta.shared.store(np.array([offset], np.uint32), [np.array([column], np.uint32)])
    # "The Tensor Memory allocation related instructions that access shared memory maintain same-address ordering with
    # respect to non-tcgen05 instructions." (PTX, Asynchronous Operations)
    grid.races.order_warp(warp)
    grid.executing = executing


def _allocate(lanes, following, offset, count):
    """Allocates columns for a CTA, or parks the warp if none are free."""
    share = share_of(lanes.cta)
    share.check_allocation(count)
    column = share.memory.first_free(count)
    if column is None:
        _wait_for_columns(lanes, count, share)
        return
    share.allocate(column, count)
    _store_address(lanes, offset, column)
    lanes.cta.add(following, lanes.mask)


def _allocate_pair(lanes, following, offset, count):
    """Allocates the same columns for both CTAs of a pair, once a warp of each asks for them."""
    cta, share = lanes.cta, share_of(lanes.cta)
    share.check_allocation(count)
    other = _meet(lanes, following, "alloc", (offset, count))
    if other is None:
        return
    other_offset, other_count = other.operands
    if other_count != count:
        raise Fault("tensor-allocation", f"the CTAs of a pair allocate {other_count} and {count} columns")
    peer = share_of(other.cta)
    column = share.memory.first_free(count, peer.memory)
    if column is None:
        full = share if share.memory.first_free(count) is None else peer
        _wait_for_columns(lanes, count, full)
        return
    for each, warp, place in (
        (share, lanes, offset),
        (peer, other.cta.lanes(other.parked.mask), other_offset),
    ):
        each.allocate(column, count)
        _store_address(warp, place, column)
    _finish_meeting(cta, "alloc", other)
    cta.add(following, lanes.mask)


def _declare_allocation(group):
    allocate = {1: _allocate, 2: _allocate_pair}[group]
    prefix = f"cta_group::{group}.sync.aligned"

    @control(f"tcgen05.alloc.{prefix}.shared::cta.b32", "[u32], u32", converged="warp", repeats=True)
    def alloc(lanes, following, writers, addresses, counts):
        check_group(lanes, group)
        offsets = offsets_in_cta(lanes, addresses)
        for warp, position in by_warp(lanes):
            offset, count = uniform(offsets, position, "dst"), uniform(counts, position, "nCols")
            allocate(warp, following, offset, count)

    @control(f"tcgen05.alloc.{prefix}.b32", "[u64], u32", converged="warp", repeats=True)
    def alloc_generic(lanes, following, writers, addresses, counts):
        return alloc(lanes, following, writers, shared_addresses(addresses), counts)

    @control(f"tcgen05.dealloc.{prefix}.b32", "u32, u32", converged="warp")
    def dealloc(lanes, following, writers, addresses, counts):
        check_group(lanes, group)
        for warp, position in by_warp(lanes):
            address = matrices.tensor_address(uniform(addresses, position, "taddr"))
            operands = address.column, uniform(counts, position, "nCols")
            if group == 2:
                other = _meet(warp, following, "dealloc", operands)
                if other is None:
                    continue
                peer = other.cta.lanes(other.parked.mask)
                lanes.cta.grid.races.meet(warp, peer)
                _free(peer, *other.operands)
                _finish_meeting(lanes.cta, "dealloc", other)
            _free(warp, *operands)
            lanes.cta.add(following, warp.mask)

    @action(f"tcgen05.relinquish_alloc_permit.{prefix}", "", converged="warp")
    def relinquish(lanes):
        check_group(lanes, group)
        share_of(lanes.cta).has_permit = False


def _free(warp, column, count):
    """Frees columns. Raises Fault if asynchronous work may still access them."""
    share = share_of(warp.cta)
    share.free(column, count)
    warp.cta.tensor_races.free(column, count, int(warp.cta.grid.races.warps(warp)[0]))


for _group in (1, 2):
    _declare_allocation(_group)
