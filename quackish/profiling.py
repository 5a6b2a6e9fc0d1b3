"""`with quackish.profile() as p:` records every launch of quackish's kernels in the block; `print(p)` says what it saw.

A launch lies between two CUDA events on its own stream, from whatever thread it comes; nothing is synchronised before
results are read. Where the GPU waits for the host, as with short kernels in eager code, the time between the events has
the host's work for the launch in it: some microseconds. A launch that is captured into a CUDA graph is listed, without
a time; replays are not seen, nor is what PyTorch runs itself (cuBLAS's GEMMs, memsets, the portable path).
"""

import csv
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from quackish import launch
from quackish.gpu import Roofs, gpu_of, roofs_of
from quackish.work import KERNELS, Work, describe, floor, kernel_of, sizes_of, work

COLUMNS = (
    *("kernel", "problem", "config", "device", "calls", "untimed", "total_ms", "mean_us", "bytes", "flops"),
    *("gb_per_s", "tflop_per_s", "floor_us", "pct_of_roof", "bound"),
)


@dataclasses.dataclass(frozen=True)
class Launch:
    kernel: str  # as in the table of kernels; the class's name for one that is not described in quackish/work.py
    problem: Any
    config: Any
    sizes: Mapping[str, int]  # what the kernel was told at run time: rows, classes
    work: Work | None  # None for a kernel that is not described
    device: int | None  # None without CUDA
    stream: int | None
    ms: float | None  # None: captured into a CUDA graph


def profile() -> "Profile":
    """A context manager that records launches: `with quackish.profile() as p: ...; print(p)`.

    All launches of the process between enter and exit, of all threads (autograd's too), streams and devices. Profiles
    may be nested, and entered again: they go on. Results are what they are without it, bit for bit.
    """
    return Profile()


class Profile:
    """What `profile()` gives. Reading results waits for the launches that were recorded.

    `roofs`: what achieved speeds are compared with, for every device. None, the default: measured on each device when
    first asked for, once a process, which takes 0.1 s and 0.8 GB; where these do not fit, or without CUDA, the roofs of
    quackish/gpu.py. Assign a `quackish.gpu.Roofs` to have others.
    """

    def __init__(self) -> None:
        self.roofs: Roofs | None = None
        self._records: list[_Record] = []

    def __enter__(self) -> "Profile":
        _activate(self)
        return self

    def __exit__(self, *error: object) -> None:
        _deactivate(self)

    @property
    def launches(self) -> list[Launch]:
        """In the order in which they came from the host."""
        return [record.read() for record in list(self._records)]

    def rows(self) -> list[dict[str, Any]]:
        """A row for each kernel, problem, config, sizes and device, keys as in COLUMNS, the longest total first.

        bytes and flops are of one call, with all rows live; speeds are of the mean time. bound says which roof is the
        lowest: "memory", "tensor cores", or "launch", which has no pct_of_roof. None where a number is not known.
        """
        groups: dict[tuple, list[Launch]] = {}
        for each in self.launches:
            key = each.kernel, each.problem, each.config, tuple(each.sizes.items()), each.device
            groups.setdefault(key, []).append(each)
        rows = [self._row(group) for group in groups.values()]
        return sorted(rows, key=lambda row: -row["total_ms"])

    def _row(self, group: Sequence[Launch]) -> dict[str, Any]:
        first, times = group[0], [each.ms for each in group if each.ms is not None]
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= {
            "kernel": first.kernel,
            "problem": describe(first.problem, first.sizes),
            "config": first.config,
            "device": first.device,
            "calls": len(group),
            "untimed": len(group) - len(times),
            "total_ms": sum(times),
        }
        if times:
            row["mean_us"] = 1e3 * sum(times) / len(times)
        if first.work is None:
            return row
        row |= {"bytes": first.work.bytes, "flops": first.work.flops}
        if times:
            row["gb_per_s"] = 1e-3 * first.work.bytes / row["mean_us"]
            row["tflop_per_s"] = 1e-6 * first.work.flops / row["mean_us"]
        roofs = self._roofs_of(first.device)
        if roofs is not None:
            least = floor(first.work, roofs)
            row |= {"floor_us": least.us, "bound": least.bound}
            if times and least.bound != "launch":
                row["pct_of_roof"] = 100 * least.us / row["mean_us"]
        return row

    def _roofs_of(self, device: int | None) -> Roofs | None:
        if self.roofs is not None:
            return self.roofs
        return None if device is None else measured_roofs(device)

    def table(self) -> str:
        """`rows()` as text, with what they are compared with and what is not among them below."""
        rows = self.rows()
        if not rows:
            return (
                "quackish.profile: no launch of a quackish kernel was seen. The portable path, which runs where no "
                "kernel does, has none; `python -m quackish explain` says what runs where."
            )
        header = ["kernel", "problem", "calls", "total ms", "mean us", "GB/s", "TFLOP/s", "% roof", "bound"]
        cells = [
            [
                row["kernel"],
                row["problem"],
                str(row["calls"]),
                _number(row["total_ms"] if row["untimed"] < row["calls"] else None, ".3f"),
                _number(row["mean_us"], ".1f"),
                _number(row["gb_per_s"], ".0f"),
                _number(row["tflop_per_s"] if row["bound"] == "tensor cores" else None, ".0f"),
                _number(row["pct_of_roof"], ".0f"),
                row["bound"] or "",
            ]
            for row in rows
        ]
        calls, untimed = sum(row["calls"] for row in rows), sum(row["untimed"] for row in rows)
        total = sum(row["total_ms"] for row in rows)
        lines = [
            f"{calls} launches of quackish's kernels, {total:.3f} ms",
            "",
            text_table(header, cells, "llrrrrrrl"),
            "",
        ]
        for device in sorted({row["device"] for row in rows if row["device"] is not None}):
            lines.append(_roofs_line(device, self._roofs_of(device)))
        if untimed:
            lines.append(f"{untimed} were captured into CUDA graphs and have no times.")
        lines.append(
            "Not seen: replays of CUDA graphs, and what PyTorch runs itself (cuBLAS, memsets, the portable path)."
        )
        return "\n".join(lines)

    __str__ = table

    def to_csv(self, path: str | os.PathLike) -> None:
        """`rows()`, with COLUMNS as the header."""
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows())


# Recording -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _Record:
    """A launch, and its events until they are read. No tensor: what is recorded keeps no memory."""

    kernel: str
    problem: Any
    config: Any
    sizes: Mapping[str, int]
    device: int | None = None
    stream: int | None = None
    events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
    ms: float | None = None

    def read(self) -> Launch:
        if self.ms is None and self.events is not None:
            start, end = self.events
            end.synchronize()
            self.ms = start.elapsed_time(end)
            self.events = None
        done = work(self.kernel, self.problem, self.sizes) if self.kernel in KERNELS else None
        return Launch(self.kernel, self.problem, self.config, self.sizes, done, self.device, self.stream, self.ms)


_active: tuple[Profile, ...] = ()
_lock = threading.Lock()


def _activate(profile: Profile) -> None:
    global _active
    with _lock:
        _active = (*_active, profile)
        launch.observe(_observed)


def _deactivate(profile: Profile) -> None:
    global _active
    with _lock:
        last = len(_active) - 1 - _active[::-1].index(profile)
        _active = _active[:last] + _active[last + 1 :]
        if not _active:
            launch.observe(None)


def _observed(
    function: Callable[..., None], args: tuple[Any, ...], kernel_class: type, problem: Any, config: Any
) -> None:
    kernel = kernel_of(kernel_class.__name__)
    if kernel is None:
        record = _Record(kernel_class.__name__, problem, config, {})
    else:
        record = _Record(kernel, problem, config, sizes_of(kernel, args))
    if torch.cuda.is_initialized():  # else it is no launch on a GPU: a stand-in in a test
        record.device = torch.cuda.current_device()
        stream = torch.cuda.current_stream()
        if kernel is not None and args[-1] != stream.cuda_stream:
            stream = torch.cuda.ExternalStream(args[-1]) if args[-1] else torch.cuda.default_stream()
        record.stream = stream.cuda_stream
        if not torch.cuda.is_current_stream_capturing():
            record.events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if record.events is None:
        function(*args)
    else:
        start, end = record.events
        start.record(stream)
        function(*args)
        end.record(stream)
    for profile in _active:
        profile._records.append(record)


# Roofs ---------------------------------------------------------------------------------------------------------------


@functools.cache
def measured_roofs(device: int) -> Roofs | None:
    """Measured on the device, each the fastest of several: a copy of 256 MB, `torch.add` on such, a bf16 GEMM of 8192.

    Where 0.8 GB are not free: the roofs of quackish/gpu.py, or None.
    """
    n = 8192
    with torch.cuda.device(device), torch.no_grad():
        try:
            a, b, c = (torch.randn(2 * n, n, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            copy = _fastest(lambda: torch.neg(a, out=c))  # a kernel; copy_ would be the copy engine's
            add = _fastest(lambda: torch.add(a, b, out=c))
            gemm = _fastest(lambda: torch.mm(a[:n], b[:n], out=c[:n]))
        except torch.OutOfMemoryError:
            return roofs_of(gpu_of(device))
    return Roofs(2 * a.nbytes / copy, 3 * a.nbytes / add, 2 * n**3 / gemm, "measured", "by this process")


def _fastest(run: Callable[[], object], times: int = 10) -> float:
    """Seconds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(times + 1)]
    for _ in range(3):
        run()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    return 1e-3 * min(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def _roofs_line(device: int, roofs: Roofs | None) -> str:
    name = gpu_of(device).name
    if roofs is None:
        return f"Roofs of {name}: not known."
    speeds = f"copy {roofs.copy / 1e12:.2f} TB/s, add {roofs.add / 1e12:.2f} TB/s, GEMM {roofs.gemm / 1e12:.0f} TFLOP/s"
    return f"Roofs of {name}, {' '.join(filter(None, (roofs.source, roofs.note)))}: {speeds}."


# Text ----------------------------------------------------------------------------------------------------------------


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns two spaces apart; `align` has "l" or "r" for each."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(line, widths, align, strict=True)
        ).rstrip()
        for line in lines
    )


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
