"""Memory that launches of RMSNorm's backward need to sum over CTAs: fp32 scratch, and int32 counters ("tickets").

A kernel finds its tickets zero and leaves them zero; scratch holds anything. Two launches that run at the same time
must share neither. Launches on one stream run in order, so each stream has one block of both, allocated on that stream:
no lock, event, memset or allocation per launch. A launch inside a CUDA graph capture gets tickets that no other launch
ever gets, because the graph may be replayed on any stream at any time; its scratch is the graph's own memory. A launch
that fails has counted nothing, and a kernel that dies takes the CUDA context with it, so no ticket stays nonzero.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops import cuda

NUM_TICKETS = 32  # of each launch: 128 bytes, so that two launches are never in one line of the L2
_RESERVE = 1024  # captured launches that tickets are allocated for in advance: 128 KiB
_MAX_STREAMS = 128  # streams with a workspace; one more drops the oldest, whose stream may no longer exist


class _Workspace(NamedTuple):
    memory: Tensor  # tickets, then scratch
    floats: int  # of scratch


_of_stream: dict[tuple[int, int], _Workspace] = {}  # (device index, stream)
_reserves: dict[int, Iterator[int]] = {}  # device index -> addresses of tickets that no graph has yet
_kept_tickets: list[Tensor] = []  # all reserves, used up or not: their addresses are in graphs
_lock = threading.Lock()


def take(device_index: int, stream: int, scratch_floats: int) -> tuple[int, int, object]:
    """For a launch on `stream`, the current one of the current device: the addresses of NUM_TICKETS tickets and of
    scratch_floats fp32, and what must be kept until the launch."""
    if cuda.is_capturing():
        return _take_for_graph(device_index, scratch_floats)
    space = _of_stream.get((device_index, stream))
    if space is None or space.floats < scratch_floats:
        space = _take_for_stream((device_index, stream), scratch_floats)
    tickets = space.memory.data_ptr()
    return tickets, tickets + 4 * NUM_TICKETS, space.memory


def all_tickets() -> list[Tensor]:
    """All tickets, for tests: they are 0 unless a launch is running."""
    return [space.memory[:NUM_TICKETS] for space in _of_stream.values()] + _kept_tickets


def _take_for_stream(key: tuple[int, int], floats: int) -> _Workspace:
    device_index = key[0]
    with _lock:
        if device_index not in _reserves:  # now, as none can be made while a capture is on
            _reserves[device_index] = _new_reserve(device_index)
        space = _of_stream.get(key)
        if space is None or space.floats < floats:
            if len(_of_stream) >= _MAX_STREAMS:
                del _of_stream[next(iter(_of_stream))]
            floats = 1 << (floats - 1).bit_length()  # powers of two: a stream keeps < 4 times its largest request
            # The allocator reuses a dropped workspace on its own stream only, so after the launches that use it now.
            space = _of_stream[key] = _Workspace(_new_memory(device_index, NUM_TICKETS + floats), floats)
    return space


def _take_for_graph(device_index: int, floats: int) -> tuple[int, int, tuple]:
    device = torch.device("cuda", device_index)
    scratch, zeros = torch.empty(floats, dtype=torch.float32, device=device), None
    with _lock:
        tickets = next(_reserves.get(device_index, iter(())), None)
    if tickets is None:
        # Zeros from the graph's own pool cost a memset a replay.
        zeros = torch.zeros(NUM_TICKETS, dtype=torch.int32, device=device)
        tickets = zeros.data_ptr()
    return tickets, scratch.data_ptr(), (zeros, scratch)


def _new_reserve(device_index: int) -> Iterator[int]:
    def make() -> Tensor:
        with torch.cuda.device(device_index), torch.cuda.stream(torch.cuda.Stream(device_index)):
            zeros = torch.zeros(_RESERVE * NUM_TICKETS, dtype=torch.int32, device=torch.device("cuda", device_index))
            # Any stream may use them next, so they must be zero before that: a wait for one memset, once a process.
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        return zeros

    zeros = _on_a_thread(make)
    _kept_tickets.append(zeros)
    return iter(range(zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes, 4 * NUM_TICKETS))


def _new_memory(device_index: int, words: int) -> Tensor:
    """Zeros of the current stream's."""
    device, stream = torch.device("cuda", device_index), torch.cuda.current_stream(device_index)

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(words, dtype=torch.int32, device=device)

    return _on_a_thread(make)


def _on_a_thread(make: Callable[[], Tensor]) -> Tensor:
    # What is kept is allocated on a thread of its own: this one's allocations may just now be going to a pool that is
    # reused later (torch.cuda.use_mem_pool, the warm-up of torch.compile's CUDA graphs).
    with ThreadPoolExecutor(1, "quackish-workspace") as thread:
        return thread.submit(make).result()
