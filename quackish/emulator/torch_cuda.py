"""Answers what libraries ask torch.cuda, without a GPU."""

import contextlib
import time
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from quackish.emulator.cuda_bindings import no_graphs
from quackish.emulator.gpu import capability


class _Stream:
    """The only stream. Work on it is complete when a call returns."""

    def __init__(self, *args: Any, **kwargs: Any):
        self.cuda_stream = 0

    device = torch.device("cuda", 0)

    def __cuda_stream__(self) -> tuple[int, int]:  # version, address: the protocol of cuda.core, which TVM-FFI reads
        return 0, 0

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        event = event or _Event()
        event.record()
        return event


class _Event:
    """The time of the host at which an event was recorded."""

    def __init__(self, *args: Any, **kwargs: Any):
        self._time = 0.0
        self.cuda_event = 1  # the address of an event that exists

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: Any) -> float:
        return 1e3 * (end._time - self._time)

    def query(self) -> bool:
        return True

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Generator(torch.Generator):
    """A generator for "cuda" that generates on the CPU."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return super().__new__(cls, "cpu")  # type: ignore[call-arg]


class _CpuAsCuda(TorchFunctionMode):
    """Makes operations on "cuda" operations on the CPU, whose tensors say that they are on CUDA.

    A tensor that moves between the two is copied, so that a write to the copy does not change the original.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = {name: _on_cpu(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func == torch.Tensor.device.__get__:
            return torch.device("cuda", 0)
        if func in (torch.Tensor.cuda, torch.Tensor.cpu):
            return args[0].clone()
        if func is torch.Tensor.pin_memory:
            return args[0]
        moves = func is torch.Tensor.to and any(isinstance(x, (str, torch.device)) for x in (*args, *kwargs.values()))
        if moves:
            kwargs["copy"] = True
        return func(*map(_on_cpu, args), **kwargs)


def _on_cpu(value: Any) -> Any:
    """The CPU for a CUDA device; any other value as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == "cuda" else value
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == "cuda" else value


@contextlib.contextmanager
def cpu_as_cuda() -> Iterator[None]:
    """Inside the block, this thread's tensors and generators for "cuda" are the CPU's; streams and events exist.

    CUDA graphs raise NotImplementedError.
    """
    replaced = {
        "Stream": _Stream,
        "Event": _Event,
        "CUDAGraph": no_graphs,
        "graph": no_graphs,
        "stream": contextlib.nullcontext,
        "set_device": _constant(None),
        "init": _constant(None),
        "empty_cache": _constant(None),
    }
    with contextlib.ExitStack() as stack:
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, replacement))
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(_CpuAsCuda())
        yield


@contextlib.contextmanager
def answers(gpu: Any) -> Iterator[None]:
    """Inside the block, torch.cuda describes `gpu`, and CPU tensors say that they are on CUDA."""
    from cuda.bindings import driver

    answered = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": gpu.name,
        "get_device_capability": capability(gpu),
        "get_device_properties": _properties(gpu),
        "current_stream": _Stream(),
        "default_stream": _Stream(),
        "synchronize": None,
        "device": contextlib.nullcontext(),
    }
    with contextlib.ExitStack() as stack:
        for name, answer in answered.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, _constant(answer)))
        # Asked before a library calls the driver: there is a context.
        stack.enter_context(mock.patch.object(driver, "cuCtxGetCurrent", _constant((driver.CUresult.CUDA_SUCCESS, 1))))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", _constant(0), create=True))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_cuda", property(lambda self: True)))
        register = torch.library.CustomOpDef.register_kernel
        stack.enter_context(mock.patch.object(torch.library.CustomOpDef, "register_kernel", _also_for_cpu(register)))
        yield


def _also_for_cpu(register_kernel: Any) -> Any:
    """Wraps register_kernel: operators that are registered for CUDA are registered for the CPU, too."""

    def register(operator: Any, device_types: Any, *function: Any) -> Any:
        names = (device_types,) if isinstance(device_types, str) else device_types
        if names is not None and "cuda" in names and "cpu" not in names:
            names = (*names, "cpu")
        return register_kernel(operator, names, *function)

    return register


def _constant(value: Any) -> Any:
    return lambda *args, **kwargs: value


def _properties(gpu: Any) -> Any:
    """Stands in for torch.cuda.get_device_properties."""
    major, minor = capability(gpu)
    return types.SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        multi_processor_count=gpu.sm_count,
        shared_memory_per_block_optin=gpu.smem_bytes,
        shared_memory_per_multiprocessor=gpu.smem_bytes_per_sm,
        max_threads_per_multi_processor=gpu.threads_per_sm,
        regs_per_multiprocessor=gpu.registers_per_sm,
        warp_size=32,
        total_memory=80 << 30,
        L2_cache_size=50 << 20,
    )
