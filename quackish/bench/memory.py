"""Peak memory as a user sees it: the most in a whole warm call, above what was allocated before the library's first.

All providers share a process, so what a library keeps between calls (tickets, workspaces) is allocated while all others
are measured too. Each library's standing memory is charged to every one of its providers, and to no other.
"""

from collections import Counter

import torch
from torch import Tensor

from quackish.bench.measured import is_ours

_standing: Counter[str] = Counter()  # library -> bytes that it keeps allocated, of all its calls in this process


class Account:
    """What one provider allocates; opened before it is loaded, closed when its results are released.

    Without a GPU nothing is counted: all numbers are None.
    """

    def __init__(self, name: str, device: torch.device):
        self._library = "quackish" if is_ours(name) else name.partition("-")[0]
        self._device = device
        self._without = _allocated(device) - _standing[self._library]  # what would be allocated without the library

    def start(self) -> None:
        """Before the warm call whose peak is wanted."""
        _reset_peak(self._device)

    def peak(self) -> int | None:
        """The most since `start`, standing memory included."""
        return _peak(self._device) - self._without if _counts(self._device) else None

    def close(self) -> int | None:
        """The library's standing memory: what it still holds, from this provider's calls and from earlier ones."""
        if not _counts(self._device):
            return None
        _standing[self._library] = max(0, _allocated(self._device) - self._without)
        return _standing[self._library]


def warm_up_cublas(device: torch.device) -> None:
    """Lets PyTorch allocate its cuBLAS workspaces (32 MiB on Hopper): one for this thread, one for autograd's.

    A training step has both, whoever computes its loss. Here the first provider to use cuBLAS on a thread would pay.
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


# The allocator, in functions that tests replace


def _counts(device: torch.device) -> bool:
    return device.type == "cuda"


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if _counts(device) else 0


def _reset_peak(device: torch.device) -> None:
    if _counts(device):
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)
