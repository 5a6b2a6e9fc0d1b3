"""What `doctor --check` does with one call, in a process of its own: compares it with fp64, and times its launches.

The process sends these events to `check_processes`, which ends it if the next one takes too long:

    ("step", words)            what it does now
    ("launch", kernel, words)  before each launch, which is complete before the next event: so a hang or a fault is its
    ("done", Record)           the last event
"""

import contextlib
import os
import signal
import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish import profile
from quackish.cli.check import Case
from quackish.device import launch
from quackish.device.spec import loaded, spec_of
from quackish.device.work import describe
from quackish.errors import UnsupportedError
from quackish.ops.shared.for_tools import Args, in_fp64
from quackish.profiling import Launch
from quackish.testing.errors import error, same_bits
from quackish.testing.timing import synchronize

REPEATS = 5  # timed calls, after one that is not

Record = dict[str, Any]
Send = Callable[[tuple], None]


class Check(NamedTuple):
    """A call to check. It is sent to the process, so `load` is a function of a module."""

    name: str
    load: Callable[[str], Case]  # (name) -> the call


def serve(events: Connection, check: Check, device: str, log: Path) -> None:
    """Main function of the process. Its output goes to `log`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it even if it waits for the GPU
    with log.open("ab") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    try:
        record = run(check, torch.device(device), events.send)
    except Exception as failure:
        record = {"result": "failed", "message": f"{type(failure).__name__}: {str(failure).partition(chr(10))[0]}"}
    with contextlib.suppress(BrokenPipeError):
        events.send(("done", record))
    os._exit(0)  # a normal exit waits for the GPU, which may hang


def run(check: Check, device: torch.device, send: Send) -> Record:
    """Compares a call with fp64 and its own second run, then times it."""
    case = check.load(check.name)
    send(("step", "inputs and truth"))
    args, truth = case.make(device), None
    if not case.only_timed:
        on = device if case.timed else "cpu"
        truth = {name: t.cpu() for name, t in case.call(in_fp64(args, on), "reference").items()}
    send(("step", "compiling kernels"))
    with _announced(send, device):
        try:
            runs = [case.call(args, "cute") for _ in range(1 if case.only_timed else 2)]
        except UnsupportedError as why:
            return {"result": "no kernel", "message": str(why)}
    record: Record = {"result": "ok"} if truth is None else compared(truth, case.bound_of, *runs)
    del runs
    if record["result"] == "ok":
        send(("step", "timing"))
        record["launches"] = timed(case, args, device)
    return record


@contextlib.contextmanager
def _announced(send: Send, device: torch.device) -> Iterator[None]:
    """Inside the block, each launch is announced by an event before it runs, and waited for."""

    def observer(function, args, kernel_class, problem, config) -> None:
        spec = spec_of(problem)
        name = kernel_class.__name__ if spec is None else spec.name
        send(("launch", name, describe(problem, {})))
        function(*args)
        synchronize(device)
        send(("step", f"after {name}"))

    launch.observe(observer)
    try:
        yield
    finally:
        launch.observe(None)


def compared(
    truth: dict[str, Tensor], bound_of: Callable[[str], float], first: dict[str, Tensor], second: dict[str, Tensor]
) -> Record:
    """The errors of the results beside their bounds."""
    results = {
        name: {"error": error(got.cpu().double(), truth[name]).norm, "bound": bound_of(name)}
        for name, got in first.items()
    }
    wrong = [(name, one) for name, one in results.items() if not one["error"] <= one["bound"]]
    drifting = [name for name, got in first.items() if not same_bits(got, second[name])]
    message = ""
    if wrong:
        errors = (f"{name} has error {one['error']:.1e}, expected at most {one['bound']:.0e}" for name, one in wrong)
        message = ", ".join(errors)
    elif drifting:
        message = f"different bits in two runs: {', '.join(drifting)}"
    return {"result": "wrong" if message else "ok", "message": message, "results": results}


# Times ----------------------------------------------------------------------------------------------------------------


def timed(case: Case, args: Args, device: torch.device) -> list[Record]:
    """The median time of each launch in eager calls, which for short ones includes host time; of GEMMs also cuBLAS's.

    cuBLAS is timed for large calls only.
    """
    case.call(args, "cute")
    with profile() as p:
        for _ in range(REPEATS):
            case.call(args, "cute")
    groups: dict[tuple, list[Launch]] = {}
    for one in p.launches:
        groups.setdefault((one.kernel, one.problem, one.config, *one.sizes.items()), []).append(one)
    return [_times(group, device, case.timed) for group in groups.values()]


def _times(group: list[Launch], device: torch.device, beside_cublas: bool) -> Record:
    """The record of equal launches: median time, rates and, for large GEMMs, cuBLAS's time."""
    first, ms = group[0], [one.ms for one in group if one.ms is not None]
    us = 1e3 * statistics.median(ms) if ms else None
    work = first.work
    known = us is not None and work is not None and not work.depends_on_data
    return {
        "kernel": first.kernel,
        "problem": describe(first.problem, first.sizes),
        "config": describe(first.config, {}),
        "calls": len(group) // REPEATS,
        "us": us,
        "tflop_per_s": 1e-6 * work.flops / us if known else None,
        "gb_per_s": 1e-3 * work.bytes / us if known else None,
        "cublas_us": cublas_us(first, device) if beside_cublas and known else None,
    }


def cublas_us(launched: Launch, device: torch.device) -> float | None:
    """The median time of the GEMMs of a launch by cuBLAS, with the same layouts; None for other kernels."""
    if device.type != "cuda" or not (spec := spec_of(launched.problem)) or not spec.cublas:
        return None
    a, b = loaded(spec.cublas)(launched.problem, launched.sizes, device)
    samples = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        a @ b
        end.record()
        end.synchronize()
        samples.append(1e3 * start.elapsed_time(end))
    return statistics.median(samples[2:])
