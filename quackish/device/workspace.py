"""Memory that launches need for a while, as for sums over CTAs: fp32 scratch, and int32 counters ("tickets").

Tickets are zero before and after a kernel; scratch is uninitialized. Concurrent launches share neither. Launches on
one stream run in order, so each stream has one workspace, allocated on that stream: no lock, event, memset or
allocation per launch. A launch captured in a CUDA graph gets tickets that no other launch ever gets, because the graph
may be replayed on any stream at any time; its scratch is in the graph's memory pool. A failed launch changes no ticket,
and a crashed kernel destroys the CUDA context, so no ticket stays nonzero.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device import cuda

NUM_TICKETS = 32  # of most launches: 128 bytes, so that two launches never share an L2 line
MAX_TICKETS = 1024
_RESERVE = 1024  # captured launches whose tickets are allocated in advance: 128 KiB
_MAX_STREAMS = 128  # streams with a workspace; one more drops the oldest, whose stream may no longer exist


class _Workspace(NamedTuple):
    memory: Tensor  # tickets, then scratch
    floats: int  # size of scratch, in fp32 elements


_workspaces: dict[tuple[int, int], _Workspace] = {}  # (device index, stream) -> workspace
_reserves: dict[int, Iterator[int]] = {}  # device index -> addresses of unused tickets
_reserve_memory: list[Tensor] = []  # the reserves, never freed: graphs hold their addresses
_lock = threading.Lock()


def take(
    device_index: int, stream: int, scratch_floats: int, num_tickets: int = NUM_TICKETS
) -> tuple[int, int, object]:
    """Returns (address of tickets, address of scratch_floats fp32, an object to keep until the launch).

    `stream` is the current stream of the current device. num_tickets: at most MAX_TICKETS.
    """
    if cuda.is_capturing():
        return _take_for_graph(device_index, scratch_floats, num_tickets)
    space = _workspaces.get((device_index, stream))
    if space is None or space.floats < scratch_floats:
        space = _take_for_stream((device_index, stream), scratch_floats)
    tickets = space.memory.data_ptr()
    return tickets, tickets + 4 * MAX_TICKETS, space.memory


def _take_for_stream(key: tuple[int, int], floats: int) -> _Workspace:
    """The workspace of a stream, allocated if there is none or it is too small."""
    device_index = key[0]
    with _lock:
        if device_index not in _reserves:  # now, because a capture cannot allocate it
            _reserves[device_index] = _new_reserve(device_index)
        space = _workspaces.get(key)
        if space is None or space.floats < floats:
            if len(_workspaces) >= _MAX_STREAMS:
                del _workspaces[next(iter(_workspaces))]
            floats = 1 << (floats - 1).bit_length()  # powers of two: a stream holds < 4 times its largest request
            # The allocator reuses a dropped workspace only on its own stream, after the launches that still use it.
            space = _workspaces[key] = _Workspace(_new_memory(device_index, MAX_TICKETS + floats), floats)
    return space


def _take_for_graph(device_index: int, floats: int, num_tickets: int) -> tuple[int, int, tuple]:
    """`take` for a launch that is captured: its tickets are used by no other launch."""
    device = torch.device("cuda", device_index)
    scratch, zeros, tickets = torch.empty(floats, dtype=torch.float32, device=device), None, None
    if num_tickets <= NUM_TICKETS:
        with _lock:
            tickets = next(_reserves.get(device_index, iter(())), None)
    if tickets is None:
        # Zeros from the graph's own pool cost one memset per replay.
        zeros = torch.zeros(max(num_tickets, NUM_TICKETS), dtype=torch.int32, device=device)
        tickets = zeros.data_ptr()
    return tickets, scratch.data_ptr(), (zeros, scratch)


def _new_reserve(device_index: int) -> Iterator[int]:
    """Allocates tickets for captured launches. Returns an iterator over their addresses."""

    def make() -> Tensor:
        with torch.cuda.device(device_index), torch.cuda.stream(torch.cuda.Stream(device_index)):
            zeros = torch.zeros(_RESERVE * NUM_TICKETS, dtype=torch.int32, device=torch.device("cuda", device_index))
            # Any stream may use them next: wait for the memset, once per process and device.
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        return zeros

    zeros = _on_new_thread(make)
    _reserve_memory.append(zeros)
    return iter(range(zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes, 4 * NUM_TICKETS))


def _new_memory(device_index: int, words: int) -> Tensor:
    """Zeros, allocated on the current stream."""
    device, stream = torch.device("cuda", device_index), torch.cuda.current_stream(device_index)

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(words, dtype=torch.int32, device=device)

    return _on_new_thread(make)


def _on_new_thread(make: Callable[[], Tensor]) -> Tensor:
    # This thread may be allocating from a temporary pool (torch.cuda.use_mem_pool, the warm-up of torch.compile's CUDA
    # graphs), which must not hold persistent memory.
    with ThreadPoolExecutor(1, "quackish-workspace") as thread:
        return thread.submit(make).result()
