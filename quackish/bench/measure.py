"""What measuring both operations shares: what is known of a provider, its memory, its first calls."""

import dataclasses
import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish import launch
from quackish.bench.cells import is_ours, library
from quackish.testing.timing import Times, synchronize

ERRORS = ("err_y", "err_loss", "err_dx", "err_dweight")
WRONG = 0.1  # a larger error is not rounding: bf16's is 0.02 at its worst here

# What was found out about one provider in one cell, by the columns of a results file; "status" is always there.
Found = dict[str, Any]


def timed(times: Times | None, roof: Times | None = None) -> Found:
    """The columns of times in microseconds; `roof` was measured in the same turns."""
    if times is None:
        return {}
    found = {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
    if roof is not None:
        found |= {"roof_ms": roof.median / 1e3, "pct_of_roof": 100 * roof.median / times.median}
    return found


class Memory:
    """What a provider allocates above what would be allocated without its library, in MB; None without a GPU.

    All providers share a process, so what a library keeps (tickets, workspaces) is allocated while the other providers
    are measured too. It is charged to all providers of that library and to no other.
    """

    def __init__(self, device: torch.device):
        self.standing: Counter[str] = Counter()  # bytes that each library keeps between calls
        self.device, self.counts = device, device.type == "cuda"

    def start(self, provider: str) -> int | None:
        """What is allocated without the provider's library. The peak is counted from here on."""
        if not self.counts:
            return None
        self.reset_peak()
        return self.allocated() - self.standing[library(provider)]

    def peak_above(self, start: int | None) -> float | None:
        return None if start is None else (self.peak() - start) / 1e6

    def settle(self, provider: str, start: int | None) -> float | None:
        """Charges what is still allocated to the provider's library: from now on that is what it keeps."""
        if start is None:
            return None
        found = self.standing[library(provider)] = max(0, self.allocated() - start)
        return found / 1e6

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)


@dataclasses.dataclass
class Run:
    """How cells are measured, and what to call with the results."""

    device: torch.device
    load: Callable[[str], object]  # a provider by its name; an exception is that provider's failure
    tell: Callable[[str, Found], None]  # what is known so far: the last about a name counts
    at: Callable[[str], None] = lambda step: None  # what comes next, before it starts: a provider's name or a step
    rounds: int = 10
    seconds: float = 0.4  # of samples for one provider of linear_cross_entropy that already has five
    memory: Memory | None = None

    def __post_init__(self) -> None:
        self.memory = self.memory or Memory(self.device)

    def fail(self, name: str, error: Exception) -> None:
        """Reports a provider's failure. Raises if the CUDA context is lost, as nothing can be measured then."""
        self.at(name)
        self.tell(name, {"status": reason(error)})
        synchronize(self.device)

    def release(self) -> None:
        """Frees what a call may still hold; the allocator keeps its blocks for the next one."""
        gc.collect()
        gc.freeze()  # else each collection goes over the objects of every library again: 0.2 s and more
        synchronize(self.device)


def first_calls(
    names: Sequence[str],
    run: Run,
    call_of: Callable[[Any], Callable[[], Any]],
    errors_of: Callable[[Any], Mapping[str, float]],
    clear: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Callable], dict[str, Found]]:
    """Each provider's call, and what is known before it is timed; failures are reported to `run` and left out.

    The first call compiles. The second one is warm, as in training: it gives the peak memory and the errors. `clear`
    frees what calls leave behind, as gradients.
    """
    calls: dict[str, Callable] = {}
    results: dict[str, Found] = {}
    for name in names:
        run.at(name)
        start = run.memory.start(name)
        try:
            call = call_of(run.load(name))
            before = launch.counters.launches
            call()
            launches = launch.counters.launches - before
            clear()
            run.memory.start(name)  # only for the peak
            result = call()
            synchronize(run.device)
            peak = run.memory.peak_above(start)
            errors = errors_of(result)
            notes = ["portable path"] * (run.device.type == "cuda" and is_ours(name) and not launches)
            if wrong := [f"{of} {error:.3g}" for of, error in errors.items() if not error <= WRONG]:  # NaN too
                notes.append(f"wrong: {' '.join(wrong)}")
            found = {"status": "ok", "note": ", ".join(notes), "launches": launches or None, "peak_mb": peak}
            calls[name], results[name] = call, found | errors
        except Exception as error:  # a broken peer must not end the run
            run.fail(name, error)
        result = None
        clear()
        run.release()
        standing = run.memory.settle(name, start)
        if name in calls:
            results[name]["standing_mb"] = standing
            run.tell(name, results[name])
    return calls, results


def reason(error: BaseException) -> str:
    """An exception as the cell of a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].strip()


def imported(name: str) -> Any:
    """A provider of the user's: "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def chunks(m: int, width: int, elements: int) -> Iterator[slice]:
    """Rows, at most so many that they have `elements` of `width` each: fp64 of a large cell is never held whole."""
    rows = max(1, elements // width)
    return (slice(start, min(start + rows, m)) for start in range(0, m, rows))


def warm_up_cublas(device: torch.device) -> None:
    """Makes PyTorch allocate its cuBLAS workspaces (32 MiB on Hopper): for this thread and for autograd's.

    A training step has both, whichever library computes its loss. Otherwise the first provider to use cuBLAS would pay
    for them.
    """
    if device.type != "cuda":
        return

    def use(a: Tensor) -> Tensor:
        return torch.addmm(a[0], torch.mm(a, a), a)  # addmm with a vector is cuBLASLt's

    a = torch.zeros(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True) * 1
    a.register_hook(lambda grad: use(grad.contiguous()))
    use(a).sum().backward()
    torch.cuda.synchronize(device)
