"""Scratch memory and tickets of a launch, for the sums that CTAs form together.

Launches on one stream follow each other, so they share one workspace: an allocation in each backward took 1.2 us of its
host time. In a CUDA graph capture the scratch comes from the graph's own memory, like all else that a graph touches.
"""

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops import tickets

_NUM_TICKETS = 32  # what any config needs: two for each CTA of a cluster of 16


class _Workspace(NamedTuple):
    tickets: int  # address
    scratch: int  # address
    floats: int  # of scratch


_of_stream: dict[tuple[int, int], _Workspace] = {}  # (device index, stream)
_kept: list[Tensor] = []  # all scratch ever made: a launch may still be using what was outgrown


def take(device_index: int, num_tickets: int, scratch_floats: int) -> tuple[int, int, tuple | None]:
    """For a launch on the device's current stream: the addresses of zeroed tickets and of scratch_floats fp32 that hold
    anything, and what must be kept until the launch."""
    assert num_tickets <= _NUM_TICKETS, num_tickets
    if tickets._is_capturing(device_index):
        address, kept = tickets.take(device_index, num_tickets)
        scratch = torch.empty(scratch_floats, device=torch.device("cuda", device_index))
        return address, scratch.data_ptr(), (kept, scratch)
    key = (device_index, tickets._stream_of(device_index))
    space = _of_stream.get(key)
    if space is None or space.floats < scratch_floats:
        space = _of_stream[key] = _make(device_index, scratch_floats)
    return space.tickets, space.scratch, None


def _make(device_index: int, floats: int) -> _Workspace:
    floats = 1 << (floats - 1).bit_length()  # sizes double, so all that is ever kept is less than twice the largest
    device = torch.device("cuda", device_index) if device_index is not None else None
    # On a thread of its own, as in tickets: this one's allocations may just now go to a pool that is reused later.
    with ThreadPoolExecutor(1, "quackish-workspace") as thread:
        scratch = thread.submit(torch.empty, floats, dtype=torch.float32, device=device).result()
    _kept.append(scratch)
    return _Workspace(tickets.take(device_index, _NUM_TICKETS)[0], scratch.data_ptr(), floats)
