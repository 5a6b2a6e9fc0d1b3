"""Shared by the measurements of all operations: records of results, memory, first calls."""

import dataclasses
import gc
import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from quackish.bench.cells import A_LAUNCH, OURS, is_ours, library
from quackish.bench.host import host_times, launch_times
from quackish.device import launch
from quackish.testing.timing import Times, synchronize

WRONG = 0.1  # larger errors are not rounding: the worst rounding error of bf16 here is 0.02

T = TypeVar("T")

# Results of one provider in one cell, by column of a results file. Always has "status".
Record = dict[str, Any]


def time_columns(times: Times | None, roof: Times | None = None) -> Record:
    """The columns for `times`; `roof` was measured in the same turns."""
    if times is None:
        return {}
    columns = {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
    if roof is not None:
        columns |= {"roof_ms": roof.median / 1e3, "pct_of_roof": 100 * roof.median / times.median}
    return columns


class Memory:
    """A provider's peak memory above what would be allocated without its library, in MB; None without a GPU.

    All providers share a process, so what a library keeps between calls (tickets, workspaces) remains allocated while
    other providers are measured. It is charged to all providers of that library and to no others.
    """

    def __init__(self, device: torch.device):
        self.standing: Counter[str] = Counter()  # bytes that each library keeps between calls
        self.device = device

    def start(self, provider: str) -> int | None:
        """Resets the peak. Returns the bytes allocated outside the provider's library."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats(self.device)
        return torch.cuda.memory_allocated(self.device) - self.standing[library(provider)]

    def peak_above(self, start: int | None) -> float | None:
        """The peak of allocated memory above `start`, in MB; None without a GPU."""
        return None if start is None else (torch.cuda.max_memory_allocated(self.device) - start) / 1e6

    def settle(self, provider: str, start: int | None) -> float | None:
        """Records what is still allocated as kept by the provider's library."""
        if start is None:
            return None
        standing = self.standing[library(provider)] = max(0, torch.cuda.memory_allocated(self.device) - start)
        return standing / 1e6


@dataclasses.dataclass
class Run:
    """How to measure cells, and callbacks for progress and results."""

    device: torch.device
    # Loads a provider by name; an exception counts as that provider's failure. Its attribute `note` goes to its rows.
    load: Callable[[str], Any]
    report: Callable[[str, Record], None]  # called repeatedly; the last record of a name counts
    begin: Callable[[str], None] = lambda step: None  # called before each step with its name, often a provider's
    rounds: int = 10
    seconds: float = 0.4  # time for samples of a provider beyond the first five
    memory: Memory | None = None

    def __post_init__(self) -> None:
        self.memory = self.memory or Memory(self.device)

    def fail(self, name: str, error: Exception) -> None:
        """Reports a provider's failure. Raises if the CUDA context is lost, because nothing can be measured then."""
        self.begin(name)
        self.report(name, {"status": reason(error)})
        synchronize(self.device)

    def release(self) -> None:
        """Frees what a call may still hold. The allocator keeps its blocks for the next call."""
        gc.collect()
        gc.freeze()  # else each collection scans the objects of every library again: 0.2 s and more
        synchronize(self.device)


def first_calls(
    names: Sequence[str],
    run: Run,
    call_of: Callable[[Any], Callable[[], Any]],
    errors_of: Callable[[Any], Mapping[str, float]],
    clear: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Callable], dict[str, Record]]:
    """Calls each provider twice. Returns the calls and the records so far, without the providers that failed.

    The first call compiles. The second is warm, as in training: it gives the peak memory and the errors. `clear` frees
    what calls leave behind, such as gradients.
    """
    calls: dict[str, Callable] = {}
    records: dict[str, Record] = {}
    for name in names:
        run.begin(name)
        start = run.memory.start(name)
        try:
            provider = run.load(name)
            call = call_of(provider)
            before = launch.counters.launches
            call()
            launches = launch.counters.launches - before
            clear()
            run.memory.start(name)  # resets the peak
            result = call()
            synchronize(run.device)
            peak = run.memory.peak_above(start)
            errors = errors_of(result)
            is_portable = run.device.type == "cuda" and is_ours(name) and not launches
            notes = [getattr(provider, "note", ""), "portable path" if is_portable else ""]
            if wrong := [f"{column} {error:.3g}" for column, error in errors.items() if not error <= WRONG]:  # NaN too
                notes.append(f"wrong: {' '.join(wrong)}")
            note = ", ".join(filter(None, notes))
            record: Record = {"status": "ok", "note": note, "launches": launches or None, "peak_mb": peak}
            calls[name], records[name] = call, {**record, **errors}
        except Exception as error:  # a broken peer must not end the run
            run.fail(name, error)
        result = None
        clear()
        run.release()
        standing = run.memory.settle(name, start)
        if name in calls:
            records[name]["standing_mb"] = standing
            run.report(name, records[name])
    return calls, records


def truth_of(run: Run, compute: Callable[[], T]) -> T | None:
    """The truth in fp64; None, with a failure in the results, if it does not fit into memory."""
    run.begin("truth")
    try:
        return compute()
    except torch.cuda.OutOfMemoryError as error:
        run.fail("truth", error)
        return None
    finally:
        if run.device.type == "cuda":
            torch.cuda.empty_cache()  # frees the fp64 copies, several GB


def measure_host(works: Mapping[str, Callable], records: Mapping[str, Record], run: Run) -> None:
    """Reports the host time of each work, and on a GPU that of the slowest launch of quackish."""
    run.begin("timing")
    for name, times in host_times(works, run.device).items():
        run.report(name, records[name] | time_columns(times))
    if OURS in works and run.device.type == "cuda" and (launch := launch_times(works[OURS], run.device)):
        run.report(A_LAUNCH, {"status": "ok"} | time_columns(launch))


def reason(error: BaseException) -> str:
    """An exception as one line for a table."""
    return f"{type(error).__name__}: {error}".split("\n")[0][:200].strip()


def imported(name: str) -> Any:
    """The user's provider "module:attribute"."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def chunks(m: int, width: int, elements: int) -> Iterator[slice]:
    """Slices of `m` rows with at most about `elements` elements each, to bound the memory of fp64 copies."""
    rows = max(1, elements // width)
    return (slice(start, min(start + rows, m)) for start in range(0, m, rows))


def warm_up_cublas(device: torch.device) -> None:
    """Makes PyTorch allocate its cuBLAS workspaces (32 MiB on Hopper) for this thread and autograd's.

    Every training step has both. Otherwise they would be charged to the first provider that uses cuBLAS.
    """
    if device.type != "cuda":
        return

    def use(a: Tensor) -> Tensor:
        return torch.addmm(a[0], torch.mm(a, a), a)  # addmm with a vector uses cuBLASLt

    a = torch.zeros(64, 64, dtype=torch.bfloat16, device=device, requires_grad=True) * 1
    a.register_hook(lambda grad: use(grad.contiguous()))
    use(a).sum().backward()
    torch.cuda.synchronize(device)
