"""What is known about one provider in one cell, and what a cell is measured with."""

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from quackish import launch
from quackish.bench.cells import is_ours, library
from quackish.testing.timing import Times


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was found out about one provider in one cell; None means unknown."""

    status: str = "ok"  # or why there is no time
    note: str = ""  # "plain launches": it could not be captured as a CUDA graph; "portable path"
    times: Times | None = None
    roof: Times | None = None  # in the same turns
    peak_bytes: int | None = None  # in a warm call, above what was allocated before the library's first call
    standing_bytes: int | None = None  # the part of it that the library keeps between calls
    first_s: float | None = None  # seconds of the first call, which compiles or loads from a cache
    compiles: int = 0  # by quackish, in that call
    launches: int = 0  # by quackish's launcher, in one call
    deterministic: bool | None = None
    errors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "err_dx": relative to fp64


class Memory:
    """CUDA's allocator, and how many bytes each library keeps allocated between calls.

    All providers share a process, so what a library keeps (tickets, workspaces) is allocated while the other providers
    are measured too. It is charged to all providers of that library and to no other.
    """

    def __init__(self, device: torch.device):
        self.standing: Counter[str] = Counter()
        self.device, self.counts = device, device.type == "cuda"

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


class Account:
    """What one provider allocates, from its creation on. Without a GPU all numbers are None."""

    def __init__(self, provider: str, memory: Memory):
        self._library, self._memory = library(provider), memory
        if memory.counts:
            self._without = memory.allocated() - memory.standing[self._library]  # without the library
        self.start()

    def start(self) -> None:
        """Before the warm call whose peak is wanted."""
        if self._memory.counts:
            self._memory.reset_peak()

    def peak(self) -> int | None:
        """The peak since `start`, standing memory included."""
        return self._memory.peak() - self._without if self._memory.counts else None

    def close(self) -> int | None:
        """The library's standing memory: what it still holds, from all its calls so far."""
        if not self._memory.counts:
            return None
        found = max(0, self._memory.allocated() - self._without)
        self._memory.standing[self._library] = found
        return found


@dataclasses.dataclass
class Run:
    """How cells are measured, and what to call with the results."""

    device: torch.device
    load: Callable[[str], object]  # a provider by its name; an exception is that provider's failure
    tell: Callable[[str, Measured], None]  # each provider's result, as soon as it is known
    partial: Callable[[str, Measured], None] = lambda name, found: None  # what is known if the run is interrupted
    at: Callable[[str], None] = lambda step: None  # what comes next, before it starts: a provider's name or a step
    rounds: int = 10
    repeats: int = 0  # runs whose bytes are compared; with 0 none are
    seconds: float = 0.4  # of samples for one provider of linear_cross_entropy that already has five
    memory: Memory | None = None

    def __post_init__(self) -> None:
        self.memory = self.memory or Memory(self.device)

    def fail(self, name: str, error: Exception) -> None:
        """Tells that a provider failed. Raises if the CUDA context is lost: nothing can be measured then."""
        self.at(name)
        self.tell(name, Measured(status=reason(error)))
        self.synchronize()

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def first_call(name: str, call: Callable[[], object], run: Run) -> tuple[object, Measured]:
    """What the call returned, and what it showed: seconds, compiled kernels and launches."""
    counters = launch.counters
    compiles, launches, start = counters.compiles, counters.launches, time.perf_counter()
    result = call()
    run.synchronize()
    first_s, launches = time.perf_counter() - start, counters.launches - launches
    note = "portable path" if run.device.type == "cuda" and is_ours(name) and not launches else ""
    return result, Measured(note=note, first_s=first_s, compiles=counters.compiles - compiles, launches=launches)


def reason(error: BaseException) -> str:
    """An exception as the cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].strip()


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
