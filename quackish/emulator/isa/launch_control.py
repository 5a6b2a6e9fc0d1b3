"""clusterlaunchcontrol: a cluster takes the work of one that has not begun (sm_100).

A response is opaque in PTX. Here its words are x, y and z of the canceled cluster's first CTA, and 1, or zeros.
"""

import numpy as np

from quackish.emulator.errors import Fault
from quackish.emulator.isa import action
from quackish.emulator.isa.data_movement import offsets_in_cta
from quackish.emulator.isa.synchronization import mbarrier_at
from quackish.emulator.memory import OFFSET_MASK, RANK_SHIFT

BYTES = 16


def _try_cancel(lanes, addresses, barriers, everywhere):
    """Requests a cluster that has not begun. everywhere: all CTAs of the cluster get the response."""
    cta, grid = lanes.cta, lanes.cta.grid
    offsets_in_cta(lanes, addresses)
    offsets_in_cta(lanes, barriers)
    # "If the executing CTA has already observed the completion of a clusterlaunchcontrol.try_cancel instruction as
    # failed, then the behavior of issuing a subsequent clusterlaunchcontrol.try_cancel instruction is undefined."
    if cta.saw_no_cluster:
        raise Fault("launch-control", "clusterlaunchcontrol.try_cancel after a response that no cluster was canceled")
    members = cta.cluster.ctas if everywhere else [cta]
    for thread, address, barrier_address in zip(
        lanes.threads.tolist(), addresses.tolist(), barriers.tolist(), strict=True
    ):
        # "Operand addr specifies the naturally aligned address of the 16-byte wide shared memory location"
        if address % BYTES:
            raise Fault(
                "misaligned",
                f"clusterlaunchcontrol.try_cancel with a response at {address:#x}, not a multiple of {BYTES}",
            )
        # "undefined if any CTA in the cluster is exited."
        if not all(member.live for member in members):
            raise Fault(
                "launch-control",
                "clusterlaunchcontrol.try_cancel.multicast::cluster::all after a CTA of the cluster has exited",
            )
        places = [member.shared.bytes_at(address & OFFSET_MASK, BYTES) for member in members]
        signaled = [mbarrier_at(lanes, member.rank << RANK_SHIFT | barrier_address & OFFSET_MASK) for member in members]
        for member, barrier in zip(members, signaled, strict=True):
            granules = member.shared.races.granules(address & OFFSET_MASK, BYTES)
            grid.races.copy_to(member, granules, thread, cta, barrier)

        def respond(places=places, signaled=signaled):
            response = (*grid.waiting.pop(), 1) if grid.waiting else (0, 0, 0, 0)
            for place, barrier in zip(places, signaled, strict=True):
                place.view(np.uint32)[:] = response
                barrier.complete(BYTES)

        grid.completion.copy(respond)


_OPCODE = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes"


@action(f"{_OPCODE}.b128", "[u32], [u32]")
def try_cancel(lanes, addresses, barriers):
    _try_cancel(lanes, addresses, barriers, everywhere=False)


@action(f"{_OPCODE}.multicast::cluster::all.b128", "[u32], [u32]")
def try_cancel_for_all(lanes, addresses, barriers):
    _try_cancel(lanes, addresses, barriers, everywhere=True)


def _is_canceled(responses):
    return responses["high"] >> np.uint64(32) != 0


@action("clusterlaunchcontrol.query_cancel.is_canceled.pred.b128", "pred = b128")
def is_canceled(lanes, responses):
    canceled = _is_canceled(responses)
    lanes.cta.saw_no_cluster |= not canceled.all()
    return canceled


def _coordinate(responses, axis):
    # "If the request fails the behavior of clusterlaunchcontrol.query_cancel.get_first_ctaid is undefined."
    words = responses["high" if axis == 2 else "low"] >> np.uint64(32 if axis == 1 else 0)
    return np.where(_is_canceled(responses), words.astype(np.uint32), np.uint32(0xFFFFFFFF))


def _declare_coordinate(axis, name):
    @action(f"clusterlaunchcontrol.query_cancel.get_first_ctaid::{name}.b32.b128", "b32 = b128")
    def first_cta(lanes, responses):
        return _coordinate(responses, axis)


for _axis, _name in enumerate("xyz"):
    _declare_coordinate(_axis, _name)


@action("clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128", "{b32*4} = b128")
def first_cta(lanes, responses):
    # "The contents of the 4th element are unspecified."
    return *(_coordinate(responses, axis) for axis in range(3)), np.full(lanes.count, 0xFFFFFFFF, np.uint32)
