"""Answers what libraries ask torch.cuda, without a GPU."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from quackish.emulator.gpu import capability


class _Stream:
    """The only stream."""

    cuda_stream = 0
    device = torch.device("cuda", 0)

    def __cuda_stream__(self) -> tuple[int, int]:  # version, address: the protocol of cuda.core, which TVM-FFI reads
        return 0, 0

    def synchronize(self) -> None:
        pass


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
