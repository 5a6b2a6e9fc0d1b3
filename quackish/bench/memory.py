"""Peak memory as a user sees it: the peak of a warm call above what was allocated before the library's first call.

All providers share a process, so what a library keeps between calls (tickets, workspaces) is allocated while the other
providers are measured too. Each library's standing memory is charged to all of its own providers and to no other.
"""

from collections import Counter

import torch
from torch import Tensor


class Memory:
    """CUDA's allocator, and how many bytes each library keeps allocated."""

    def __init__(self) -> None:
        self.standing: Counter[str] = Counter()

    def counts(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def allocated(self, device: torch.device) -> int:
        return torch.cuda.memory_allocated(device)

    def reset_peak(self, device: torch.device) -> None:
        torch.cuda.reset_peak_memory_stats(device)

    def peak(self, device: torch.device) -> int:
        return torch.cuda.max_memory_allocated(device)


MEMORY = Memory()  # of this process


class Account:
    """What one provider allocates, from its creation on. Without a GPU all numbers are None."""

    def __init__(self, library: str, device: torch.device, memory: Memory = MEMORY):
        self._library, self._device, self._memory = library, device, memory
        self._counts = memory.counts(device)
        if self._counts:
            self._without = memory.allocated(device) - memory.standing[library]  # without the library
            memory.reset_peak(device)

    def start(self) -> None:
        """Before the warm call whose peak is wanted."""
        if self._counts:
            self._memory.reset_peak(self._device)

    def peak(self) -> int | None:
        """The peak since `start`, standing memory included."""
        return self._memory.peak(self._device) - self._without if self._counts else None

    def close(self) -> int | None:
        """The library's standing memory: what it still holds, from all its calls so far."""
        if not self._counts:
            return None
        found = max(0, self._memory.allocated(self._device) - self._without)
        self._memory.standing[self._library] = found
        return found


def warm_up_cublas(device: torch.device) -> None:
    """Makes PyTorch allocate its cuBLAS workspaces (32 MiB on Hopper): for this thread and for autograd's.

    A training step has both, whoever computes its loss. Otherwise the first provider to use cuBLAS would pay for them.
    """
    if device.type == "cuda":
        _UseCublas.apply(torch.zeros(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True)).sum().backward()
        torch.cuda.synchronize(device)


class _UseCublas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a: Tensor) -> Tensor:
        return _use_cublas(a)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _use_cublas(grad)


def _use_cublas(a: Tensor) -> Tensor:
    a = a.contiguous()
    return torch.addmm(a[0], torch.mm(a, a), a)  # addmm with a vector is cuBLASLt's
