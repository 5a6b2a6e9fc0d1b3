"""Zeroed int32 counters ("tickets") for kernels whose CTAs take turns. A kernel finds them zero and leaves them zero.

Two launches that run at once must not share tickets. Launches on one stream follow each other, so each stream has its
own: no lock, no event and no memset a launch. A launch inside a CUDA graph capture gets tickets that nobody else ever
gets, because a graph may be replayed on any stream, beside anything. A launch that fails has counted nothing, and a
kernel that dies takes the CUDA context with it, so nothing can be left counted.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_LINE = 32  # int32 in 128 bytes: tickets of two launches are never in one line of the L2
_RESERVE = 32768 * _LINE  # 4 MiB: 32768 captured launches of up to 32 tickets each

_of_stream: dict[tuple[int, int, int], int] = {}  # (device index, stream, count) -> address
_reserves: dict[int, "_Reserve"] = {}  # device index -> where the next tickets come from
_kept: list[Tensor] = []  # all reserves, used up or not: their addresses are in graphs
_lock = threading.Lock()

# By device index: the current stream's handle; whether that stream is being captured.
_stream_of: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def _is_capturing(device_index: int) -> bool:
    if torch._C._cuda_getDevice() == device_index:
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(device_index):
        return torch._C._cuda_isCurrentStreamCapturing()


def take(device_index: int, count: int) -> tuple[int, Tensor | None]:
    """The address of `count` zeroed int32 for a launch on the device's current stream; what to keep until then."""
    if _is_capturing(device_index):
        return _take_for_graph(device_index, count)
    address = _of_stream.get((device_index, _stream_of(device_index), count))
    if address is None:
        address = _take_for_stream(device_index, count)
    return address, None


def _take_for_stream(device_index: int, count: int) -> int:
    key = (device_index, _stream_of(device_index), count)
    with _lock:
        address = _of_stream.get(key)
        if address is None:
            reserve = _reserves.get(device_index)
            address = reserve.take(count) if reserve else None
            if address is None:
                reserve = _reserves[device_index] = _new_reserve(device_index, max(_RESERVE, count))
                address = reserve.take(count)
            _of_stream[key] = address
    return address


def _take_for_graph(device_index: int, count: int) -> tuple[int, Tensor | None]:
    with _lock:
        reserve = _reserves.get(device_index)
        address = reserve.take(count) if reserve else None
    if address is not None:
        return address, None
    # No reserve can be made while a capture is on. Zeros from the graph's own pool cost a memset a replay.
    tickets = torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device_index))
    return tickets.data_ptr(), tickets


class _Reserve:
    """Zeros that are handed out from front to back, each once."""

    def __init__(self, zeros: Tensor):
        self.address, self.left = zeros.data_ptr(), zeros.numel()

    def take(self, count: int) -> int | None:
        """The address of `count` zeros, or None where fewer are left."""
        if count > self.left:
            return None
        address, used = self.address, -(-count // _LINE) * _LINE
        self.address, self.left = address + 4 * used, self.left - used
        return address


def _new_reserve(device_index: int, count: int) -> _Reserve:
    def make() -> Tensor:
        with torch.cuda.device(device_index), torch.cuda.stream(torch.cuda.Stream(device_index)):
            zeros = torch.zeros(count, dtype=torch.int32, device=torch.device("cuda", device_index))
            # Any stream may use them next, so they must be zero before that: a wait for one memset, once a process.
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        return zeros

    # On a thread and a stream of its own: this thread's allocations may just now be going to a pool that is reused
    # later (torch.cuda.use_mem_pool, the warm-up of torch.compile's CUDA graphs), and these zeros stay for good.
    with ThreadPoolExecutor(1, "quackish-tickets") as thread:
        zeros = thread.submit(make).result()
    _kept.append(zeros)
    return _Reserve(zeros)
