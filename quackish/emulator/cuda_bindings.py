"""Stands in for functions of cuda.bindings, which programs call beside PyTorch: memory, events and streams.

There is one stream, whose work is complete when a call returns.
"""

import contextlib
import ctypes
import re
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np

from quackish.emulator.memory import host_regions

_ALIGNMENT = 256


class _State:
    """Memory and events of a block of `stand_ins`."""

    def __init__(self):
        self.memory: dict[int, np.ndarray] = {}  # address -> what keeps it alive
        self.recorded: dict[int, float] = {}  # event -> the host's time

    def allocate(self, size: int) -> int:
        buffer = np.empty(size + _ALIGNMENT, np.uint8)
        address = buffer.ctypes.data + -buffer.ctypes.data % _ALIGNMENT
        self.memory[address] = buffer
        host_regions.registered[address] = size
        return address

    def free(self, address: Any) -> None:
        if int(address):
            del self.memory[int(address)], host_regions.registered[int(address)]

    def free_all(self) -> None:
        for address in list(self.memory):
            self.free(address)

    def create_event(self) -> int:
        event = len(self.recorded) + 1
        self.recorded[event] = 0.0
        return event

    def record(self, event: Any) -> None:
        self.recorded[int(event)] = time.perf_counter()

    def elapsed(self, start: Any, end: Any) -> float:
        return 1e3 * (self.recorded[int(end)] - self.recorded[int(start)])


def _fill(address: Any, word: int, count: int, dtype: Any) -> None:
    """Sets `count` words of memory."""
    ctypes.memmove(int(address), np.full(count, word, dtype).tobytes(), count * np.dtype(dtype).itemsize)


def _move(to: Any, source: Any, size: int) -> None:
    ctypes.memmove(_address(to), _address(source), size)


def _address(place: Any) -> int:
    """The address of memory that a caller gives as a number, an object of cuda.bindings or a buffer."""
    return place.ctypes.data if isinstance(place, np.ndarray) else int(place)


_WITHOUT_EFFECT_IN_DRIVER = (
    "cuInit", "cuCtxSetCurrent", "cuCtxSynchronize", "cuStreamSynchronize", "cuStreamWaitEvent", "cuStreamDestroy",
    "cuEventSynchronize", "cuEventDestroy",
)  # fmt: skip
_WITHOUT_EFFECT_IN_RUNTIME = (
    "cudaSetDevice", "cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaStreamDestroy", "cudaEventSynchronize",
    "cudaEventDestroy",
)  # fmt: skip


def _functions(state: _State, driver: Any, runtime: Any) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(module, name, function) of what programs may call. A function returns its result behind the status."""

    def nothing(*args: Any) -> None:
        pass

    for name in _WITHOUT_EFFECT_IN_DRIVER:
        yield driver, name, nothing
    for name in _WITHOUT_EFFECT_IN_RUNTIME:
        yield runtime, name, nothing
    for name in ("cuDeviceGetCount", "cuCtxGetCurrent"):
        yield driver, name, lambda: 1
    yield runtime, "cudaGetDeviceCount", lambda: 1
    yield driver, "cuDeviceGet", lambda index: index
    yield runtime, "cudaGetDevice", lambda: 0
    yield driver, "cuStreamCreate", lambda *flags: driver.CUstream(0)
    yield runtime, "cudaStreamCreate", lambda: runtime.cudaStream_t(0)
    yield driver, "cuEventCreate", lambda *flags: driver.CUevent(state.create_event())
    yield runtime, "cudaEventCreate", lambda: runtime.cudaEvent_t(state.create_event())
    yield runtime, "cudaEventCreateWithFlags", lambda flags: runtime.cudaEvent_t(state.create_event())
    yield driver, "cuMemAlloc", lambda size: driver.CUdeviceptr(state.allocate(size))
    yield runtime, "cudaMalloc", state.allocate
    yield driver, "cuMemFree", state.free
    yield runtime, "cudaFree", state.free
    for suffix in ("", "Async"):
        yield driver, f"cuMemsetD8{suffix}", lambda at, value, count, *stream: _fill(at, value, count, np.uint8)
        yield driver, f"cuMemsetD32{suffix}", lambda at, value, count, *stream: _fill(at, value, count, np.uint32)
        yield runtime, f"cudaMemset{suffix}", lambda at, value, count, *stream: _fill(at, value, count, np.uint8)
        yield runtime, f"cudaMemcpy{suffix}", lambda to, source, size, *how: _move(to, source, size)
        for kind in ("HtoD", "DtoH", "DtoD"):
            yield driver, f"cuMemcpy{kind}{suffix}", lambda to, source, size, *stream: _move(to, source, size)
    for module, prefix in ((driver, "cu"), (runtime, "cuda")):
        yield module, f"{prefix}EventRecord", lambda event, *stream: state.record(event)
        yield module, f"{prefix}EventElapsedTime", state.elapsed
        yield module, f"{prefix}StreamBeginCapture", no_graphs


def no_graphs(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("the emulator has no CUDA graphs; run the program without them")


def _answering(function: Callable[..., Any], success: Any) -> Callable[..., tuple]:
    """A function that returns as those of cuda.bindings do: the status, and the result if there is one."""

    def answer(*args: Any) -> tuple:
        result = function(*args)
        return (success,) if result is None else (success, result)

    return answer


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Inside the block, functions of cuda.bindings work on memory of the host."""
    from cuda.bindings import driver, runtime

    state = _State()
    statuses = {driver: driver.CUresult.CUDA_SUCCESS, runtime: runtime.cudaError_t.cudaSuccess}
    answers = {
        (module, name): _answering(function, statuses[module])
        for module, name, function in _functions(state, driver, runtime)
    }
    for module in statuses:
        for name, value in list(vars(module).items()):
            is_function = _OF_CUDA.match(name) and callable(value) and not isinstance(value, type)
            if is_function and (module, name) not in answers:
                answers[module, name] = _refusing(name)
    with contextlib.ExitStack() as stack:
        stack.callback(state.free_all)
        for (module, name), answer in answers.items():
            stack.enter_context(mock.patch.object(module, name, answer))
        yield


# Names of functions and types, without functions that name errors.
_OF_CUDA = re.compile(r"(cu|cuda)[A-Z](?!etError)\w*$")


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"the emulator has no {name} of cuda.bindings; run the program without it")

    return refuse
