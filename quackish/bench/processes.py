"""Measures cells in child processes, so that a provider that crashes its process loses only its own results.

If a provider raises or runs out of memory, the child reports it and continues. If a provider loses the CUDA context (an
illegal address is permanent), aborts, exits or hangs, the child ends: the supervisor knows which step was running,
records that provider as failed, and a new child measures the cell without it. The child sends these events:

    ("ready", columns of the environment)
    ("step", step), ("result", provider, Record), ...   for each cell; the last result of a provider counts
    ("done",) or ("broken", why)    at the end of a cell. After "broken" the child ends: the CUDA context may be lost
"""

import collections
import contextlib
import dataclasses
import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from quackish.bench.cells import Cell, Job
from quackish.bench.environment import device_to_measure, environment
from quackish.bench.measure import Memory, Record, Run, reason
from quackish.bench.table import BENCHES
from quackish.device.compile_jobs import defer_interrupts

START_S = 300.0  # timeout for a child to import torch and initialize the GPU
DEATHS = 2  # a provider that ended this many processes is skipped: each costs a new process or a timeout
SHARED = "timing"  # the step that runs all providers: after a death each is measured alone to find the culprit


# The child ------------------------------------------------------------------------------------------------------------


def serve(events: Connection, commit: str | None, log: Path) -> None:
    """Measures received cells until the other end is closed. Output of providers goes to `log`."""
    if hasattr(os, "setsid"):  # its own session, so that Ctrl-C does not reach processes that providers start
        os.setsid()
    with log.open("ab") as file:
        for output in (1, 2):
            os.dup2(file.fileno(), output)
    faulthandler.enable()
    try:
        device = device_to_measure()
        memory = Memory(device)
        events.send(("ready", environment(device, commit)))
        while True:
            cell, providers, options = events.recv()
            measure(cell, providers, events.send, memory=memory, device=device, **options)
    except (EOFError, BrokenPipeError):  # the parent has ended
        return
    except Exception as error:
        events.send(("broken", reason(error)))
        sys.excepthook(*sys.exc_info())  # the full traceback, to the log
        sys.stderr.flush()
        os._exit(1)  # a normal exit waits for the GPU, which may hang


def measure(cell: Cell, providers: Sequence[str], send: Callable[[tuple], None], **options: Any) -> None:
    """Measures one cell and sends events. `options` are fields of Run."""
    bench = BENCHES[cell.op]

    def report(name: str, record: Record) -> None:
        send(("result", name, record))

    run = Run(load=bench.load, report=report, begin=lambda step: send(("step", step)), **options)
    bench.measure(cell, providers, run)
    send(("done",))


# The parent -----------------------------------------------------------------------------------------------------------


class ChildDied(Exception):
    """The child ended in the middle of a cell. The message says how."""


@dataclasses.dataclass
class Supervisor:
    """Measures jobs in one child process at a time, started on demand."""

    log: Path
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fields of Run
    deaths: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # {provider: dead children}
    _process: Any = None
    _events: Connection | None = None
    _environment: dict[str, str] | None = None

    def start(self) -> dict[str, str]:
        """Starts the child if needed. Returns its environment columns. RuntimeError if it does not start."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._events, other = context.Pipe()
            with defer_interrupts():
                process = context.Process(target=serve, args=(other, self.commit, self.log))
                process.start()
                self._process = process
            other.close()
            try:
                _, self._environment = self._next(START_S)
            except ChildDied as death:
                raise RuntimeError(f"the measuring process does not start: {death}; see {self.log}") from None
        return self._environment

    def close(self) -> None:
        """Ends the child, if there is one. `start` starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._events.close()
            self._process = None

    def measure(self, job: Job, begin: Callable[[str], None]) -> Iterator[tuple[str, Record]]:
        """Yields records of the providers, the roof and its parts; the last record of each name counts.

        `begin` is called with each step.
        """
        skipped = [name for name in job.providers if self.deaths[name] >= DEATHS]
        yield from ((name, {"status": f"skipped: it ended {DEATHS} processes"}) for name in skipped)
        groups = [[name for name in job.providers if name not in skipped]]
        while groups:
            if not (names := groups.pop(0)):
                continue
            step, failed = "start", set()
            try:
                for event in self.events_of(job.cell, names):
                    if event[0] == "step":
                        step = event[1]
                        begin(step)
                        continue
                    _, name, record = event
                    if record["status"] != "ok":
                        failed.add(name)
                    yield name, record
            except ChildDied as death:
                self.close()
                remaining = [name for name in names if name not in failed]
                suspects = remaining if step == SHARED else [step]
                if len(suspects) != 1:
                    groups += [[name] for name in remaining]
                elif (culprit := suspects[0]) in names:
                    self.deaths[culprit] += 1
                    if culprit in remaining:
                        yield culprit, {"status": str(death)}
                    groups.append([name for name in remaining if name != culprit])
                else:  # no provider's fault: inputs that do not fit, or a roof that fails
                    yield from ((name, {"status": f"{step}: {death}"}) for name in remaining)

    def events_of(self, cell: Cell, names: Sequence[str]) -> Iterator[tuple]:
        """The events of one cell before "done". Raises ChildDied."""
        self.start()
        with contextlib.suppress(OSError):  # if the child has ended, _next raises
            self._events.send((cell, tuple(names), dict(self.options)))
        while (event := self._next(self.timeout))[0] != "done":
            yield event

    def _next(self, timeout: float) -> tuple:
        """The next event. Also waits for the process to end: another process may have inherited its end of the pipe."""
        if not wait([self._events, self._process.sentinel], timeout):
            raise ChildDied(f"no event for {timeout:.0f} s; killed")
        try:
            event = self._events.recv() if self._events.poll() else None
        except (EOFError, OSError):
            event = None
        if event is None:
            self._process.join()
            status = self._process.exitcode
            killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise ChildDied(f"the process {killed}")
        if event[0] == "broken":
            raise ChildDied(event[1])
        return event
