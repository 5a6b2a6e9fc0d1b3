"""Runs the calls of `doctor --check`, each in a process of its own, and sums up the results per kernel.

A kernel that hangs or faults ends its process only: a fault is permanent in a CUDA context.
"""

import contextlib
import multiprocessing
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from quackish import ops
from quackish.cli.check import SELF_TESTS, TIMED, load
from quackish.cli.check_call import Check, Record, serve
from quackish.gpu import Gpu
from quackish.text import fill

# Seconds between two events of a process. Importing PyTorch, compiling ten kernels of a call on one core, and truth of
# the large calls take up to half a minute each.
TIME_LIMIT = 120.0


def checks(gpu: Gpu) -> list[Check]:
    """Every call that has kernels on this GPU."""
    cases = SELF_TESTS | TIMED
    return [Check(name, load) for name, case in cases.items() if case.spec is not None and gpu.family in case.spec.on]


def run_all(todo: Sequence[Check], device: str, **options: Any) -> list[Record]:
    """The records of all checks; prints a line for each. `options` are those of `run`."""
    records = []
    for i, check in enumerate(todo, 1):
        record = run(check, device, **options)
        message = record["message"] and f": {record['message']}"
        line = f"[{i}/{len(todo)}] {record['result']:9} {check.name}{message}"
        print(fill(line, indent="    "), file=sys.stderr, flush=True)
        records.append(record)
    return records


def run(check: Check, device: str, time_limit: float = TIME_LIMIT, context: Any = None) -> Record:
    """Runs one check. The result is "ok", "wrong", "failed" (it raised), "died", "hung", or "no kernel"."""
    context = context or multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    started, launched = time.perf_counter(), {}
    step = last = ""
    with tempfile.TemporaryDirectory(prefix="quackish-") as folder:
        log = Path(folder, "log")
        log.touch()
        events, other = context.Pipe()
        process = context.Process(target=serve, args=(other, check, device, log), daemon=True)
        process.start()
        other.close()
        record = None
        while record is None:
            event = _next(process, events, time_limit)
            if event[0] == "step":
                step, last = event[1], ""
            elif event[0] == "launch":
                last = event[1]
                step = f"in {' '.join(event[1:])}"
                launched[last] = None
            else:
                record = event[1]
        _end(process, events)
        if record["result"] in ("died", "hung"):
            record["message"] += f" {log.read_text(errors='replace')[-500:]}".rstrip()
    is_over = record["result"] in ("ok", "wrong", "no kernel")
    where = "" if is_over or not step else f"{step}: "
    return {
        "call": check.name,
        "launches": [],
        "results": {},
        **record,
        "message": where + record.get("message", ""),
        "launched": list(launched),
        "culprit": None if is_over else last or None,
        "seconds": round(time.perf_counter() - started, 1),
    }


def _next(process: Any, events: Connection, time_limit: float) -> tuple:
    """The next event; the last one of a process that has ended or takes too long is made here."""
    if not wait([events, process.sentinel], time_limit):
        return "done", {"result": "hung", "message": f"nothing for {time_limit:g} s"}
    event = None
    with contextlib.suppress(EOFError, OSError):
        event = events.recv() if events.poll() else None
    if event is not None:
        return event
    process.join()
    status = process.exitcode
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return "done", {"result": "died", "message": how}


def _end(process: Any, events: Connection) -> None:
    process.kill()
    process.join(30)  # the driver may need some time to end a kernel
    events.close()


# Per kernel -----------------------------------------------------------------------------------------------------------


def per_kernel(records: Iterable[Record], gpu: Gpu) -> list[Record]:
    """For each kernel of this GPU: the result, and the time of its longest launch beside cuBLAS's.

    A kernel is ok if all calls with it that ended are right. `error` and `bound` are of the result that comes closest
    to its bound, in all these calls.
    """
    records, rows = list(records), []
    for kernel, spec in ops.specs().items():
        if gpu.family not in spec.on:
            continue
        culprit = [record for record in records if record["culprit"] == kernel]
        ended = [record for record in records if kernel in record["launched"] and record["results"]]
        wrong = [record for record in ended if record["result"] == "wrong"]
        failing = culprit or wrong
        result = failing[0]["result"] if failing else "ok" if ended else "not run"
        results = [
            one | {"of": f"{name} of {record['call']}"} for record in ended for name, one in record["results"].items()
        ]
        worst: Record = max(results, key=lambda one: one["error"] / one["bound"], default={})
        launches = [one for record in records for one in record["launches"] if one["kernel"] == kernel and one["us"]]
        longest: Record = max(launches, key=lambda one: one["us"], default={})
        rows.append(
            {
                "kernel": kernel,
                "result": result,
                "calls": len(ended),
                "why": failing[0]["call"] + ": " + failing[0]["message"] if failing else "",
                **{name: worst.get(name) for name in ("error", "bound", "of")},
                **{name: longest.get(name) for name in ("problem", "us", "tflop_per_s", "gb_per_s", "cublas_us")},
            }
        )
    return rows


def summary(row: Record) -> str:
    """A row of `per_kernel` in one line."""
    parts = [row["result"]]
    if row["error"] is not None:
        calls = f"{row['calls']} call{'s' * (row['calls'] > 1)}"
        parts.append(f"{calls}, error at most {row['error'] / row['bound']:.2f} of its bound")
    if row["us"] is not None:
        parts.append(f"{row['us']:.1f} us" + (f", cuBLAS {row['cublas_us']:.1f} us" if row["cublas_us"] else ""))
    return "; ".join(filter(None, [*parts, row["why"]]))
