"""`with quackish.profile() as p:` records every launch of quackish's kernels in the block; `print(p)` shows them.

Each launch is timed between two CUDA events on its stream, and nothing synchronizes until results are read. If the GPU
waits for the host, as with short kernels in eager code, the time includes some microseconds of host time. Launches
captured into a CUDA graph are listed without times. Not recorded: graph replays, and PyTorch's own kernels (cuBLAS
GEMMs, memsets, the portable path).
"""

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import cuda

from quackish.device import launch
from quackish.device.spec import spec_of
from quackish.device.work import Work, describe, estimate
from quackish.gpu import Roofs, gpu_of, roofs_of, speeds
from quackish.text import table_of

COLUMNS = tuple(
    "kernel problem config device calls untimed total_ms mean_us bytes flops "
    "gb_per_s tflop_per_s estimated_us pct_of_roof bound".split()
)


@dataclasses.dataclass
class Launch:
    """One launch. Holds no tensors, so a profile does not extend their lifetime."""

    kernel: str  # KernelSpec.name, or the class's name if there is no description
    problem: Any
    config: Any
    sizes: Mapping[str, int]  # run-time sizes such as rows and classes
    device: int | None = None  # None without CUDA
    stream: int | None = None
    ms: float | None = None  # None if captured into a CUDA graph
    _events: tuple[cuda.Event, cuda.Event] | None = dataclasses.field(default=None, repr=False)

    @property
    def work(self) -> Work | None:
        """None for a kernel without a description."""
        spec = spec_of(self.problem)
        return None if spec is None else spec.work(self.problem, self.sizes)

    def _read(self) -> "Launch":
        events, self._events = self._events, None
        if events is not None:
            start, end = events
            end.synchronize()
            self.ms = start.elapsed_time(end)
        return self


class profile:
    """A context manager that records launches: `with quackish.profile() as p: ...; print(p)`.

    It records all launches of the process between enter and exit, from all threads (autograd's too), on all streams and
    devices. Profiles can be nested, and entered again to continue. Outputs are bitwise unchanged. Reading results waits
    for the recorded launches.

    `roofs`: the speeds that % of roof refers to. None, the default, looks them up by the GPU's name in quackish/gpu.py,
    which has measured ones for some GPUs. Assign a `quackish.gpu.Roofs` to use others.
    """

    def __init__(self) -> None:
        self.roofs: Roofs | None = None
        self._launches: list[Launch] = []

    def __enter__(self) -> "profile":
        with _lock:
            _active.append(self)
            launch.observe(_observed)
        return self

    def __exit__(self, *error: object) -> None:
        with _lock:
            _active.remove(self)
            launch.observe(_observed if _active else None)

    @property
    def launches(self) -> list[Launch]:
        """All launches so far, the first one first."""
        return [launch._read() for launch in list(self._launches)]

    def rows(self) -> list[dict[str, Any]]:
        """One row (keys: COLUMNS) per kernel, problem, config, sizes and device; the longest total first.

        bytes and flops are per call, with all rows live; speeds use the mean time. estimated_us is the time of these
        bytes or FLOPs at the speeds `roofs`, pct_of_roof is its share of the mean time, and bound is what takes it:
        "memory", "tensor cores" or "launch", which has no pct_of_roof. Unknown numbers, and those that depend on the
        data, are None.
        """
        groups: dict[tuple, list[Launch]] = {}
        for record in self.launches:
            key = record.kernel, record.problem, record.config, tuple(record.sizes.items()), record.device
            groups.setdefault(key, []).append(record)
        return sorted((self._row(group) for group in groups.values()), key=lambda row: -row["total_ms"])

    def _row(self, group: Sequence[Launch]) -> dict[str, Any]:
        first, times = group[0], [record.ms for record in group if record.ms is not None]
        row: dict[str, Any] = dict.fromkeys(COLUMNS)
        row |= dict(kernel=first.kernel, problem=describe(first.problem, first.sizes), config=first.config)
        row |= dict(device=first.device, calls=len(group), untimed=len(group) - len(times), total_ms=sum(times))
        us = row["mean_us"] = 1e3 * sum(times) / len(times) if times else None
        launch_work, roofs = first.work, self._roofs_of(first.device)
        if launch_work is None or launch_work.depends_on_data:
            return row
        row |= dict(bytes=launch_work.bytes, flops=launch_work.flops)
        if times:
            row |= dict(gb_per_s=1e-3 * launch_work.bytes / us, tflop_per_s=1e-6 * launch_work.flops / us)
        if roofs is not None:
            expected = estimate(launch_work, roofs)
            row |= dict(estimated_us=expected.us, bound=expected.bound)
            if times and expected.bound != "launch":
                row["pct_of_roof"] = 100 * expected.us / us
        return row

    def _roofs_of(self, device: int | None) -> Roofs | None:
        if self.roofs is not None:
            return self.roofs
        known = None if device is None else roofs_of(gpu_of(device))
        return known if known is not None and known.source == "measured" else None

    def __str__(self) -> str:
        """`rows()` as a table, followed by the roofs and what is not recorded."""
        rows = self.rows()
        if not rows:
            return (
                "quackish.profile: no launch of a quackish kernel was recorded. The portable path has none; "
                "`quackish explain` shows which path a call takes."
            )
        calls, untimed = sum(row["calls"] for row in rows), sum(row["untimed"] for row in rows)
        lines = [f"{calls} launches of quackish's kernels, {sum(row['total_ms'] for row in rows):.3f} ms", ""]
        for row in rows:
            row["total ms"] = row["total_ms"] if row["untimed"] < row["calls"] else None
            row["TFLOP/s"] = row["tflop_per_s"] if row["bound"] == "tensor cores" else None
            row |= {"mean us": row["mean_us"], "GB/s": row["gb_per_s"], "% roof": row["pct_of_roof"]}
        formats = {"kernel": "", "problem": "", "calls": "d", "total ms": ".3f", "mean us": ".1f"}
        formats |= {"GB/s": ".0f", "TFLOP/s": ".0f", "% roof": ".0f", "bound": ""}
        lines += [table_of(rows, formats), ""]
        for device in sorted({row["device"] for row in rows if row["device"] is not None}):
            name, roofs = gpu_of(device).name, self._roofs_of(device)
            source = roofs and " ".join(filter(None, (roofs.source, roofs.note)))
            lines.append(f"Roofs of {name}, {source}: {speeds(roofs)}." if roofs else f"Roofs of {name}: not known.")
        if untimed:
            lines.append(f"{untimed} were captured into CUDA graphs and have no times.")
        lines.append("Not recorded: graph replays, and PyTorch's own kernels (cuBLAS, memsets, the portable path).")
        return "\n".join(lines)


# Recording -----------------------------------------------------------------------------------------------------------

_active: list[profile] = []
_lock = threading.Lock()


def _observed(function: Callable[..., None], args: tuple, kernel_class: type, problem: Any, config: Any) -> None:
    spec = spec_of(problem)
    name, sizes = (kernel_class.__name__, {}) if spec is None else (spec.name, spec.sizes_of(args[0]))
    record = Launch(name, problem, config, sizes)
    if cuda.is_initialized():  # else a stand-in for a kernel, in tests
        record.device = cuda.current_device()
        stream = cuda.current_stream()
        if spec is not None and args[-1] != stream.cuda_stream:
            stream = cuda.ExternalStream(args[-1]) if args[-1] else cuda.default_stream()
        record.stream = stream.cuda_stream
        if not cuda.is_current_stream_capturing():
            record._events = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    if record._events is None:
        function(*args)
    else:
        start, end = record._events
        start.record(stream)
        function(*args)
        end.record(stream)
    for active in list(_active):
        active._launches.append(record)
