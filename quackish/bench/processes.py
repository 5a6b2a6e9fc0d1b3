"""Measures cells in child processes, so that a provider that crashes its process costs only its own numbers.

The child reports a provider that raises or runs out of memory, and goes on. One that loses the CUDA context (an illegal
address is permanent), aborts, exits or hangs ends the child: the supervisor knows what was in progress, records that
provider as failed, and a new child measures the cell without it. Events of a child, the first word naming the kind:

    ("ready", columns of the environment)
    ("at", step), ("tell", provider, Measured), ...     of each cell; the last about a provider counts
    ("done",) or ("broken", why)        at the cell's end; after "broken" the child ends: the CUDA context may be lost
"""

import collections
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
from quackish.bench.measure import Measured, Memory, Run, reason
from quackish.bench.operations import OPERATIONS

START_S = 300.0  # for a worker to import torch and find the GPU
DEATHS = 2  # after this many a provider is not tried again: each costs a new process, or a timeout
SHARED = "timing"  # the step that runs every provider: after a death each is measured alone to find the culprit


# The child ------------------------------------------------------------------------------------------------------------


def serve(events: Connection, commit: str | None, log: Path) -> None:
    """Measures the cells that come in until the other end is closed. What providers print goes to `log`."""
    if hasattr(os, "setsid"):  # a session of its own: Ctrl-C reaches the parent alone, which ends the child
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
    except (EOFError, BrokenPipeError):  # the parent is gone
        return
    except Exception as error:
        events.send(("broken", reason(error)))
        sys.excepthook(*sys.exc_info())  # to the log, whole
        sys.stderr.flush()
        os._exit(1)  # an ordinary exit waits for a GPU that may never answer


def measure(
    cell: Cell, providers: Sequence[str], say: Callable[[tuple], None], backend: str = "auto", **options: Any
) -> None:
    """One cell, as events. `options` are Run's."""
    op = OPERATIONS[cell.op]

    def tell(name: str, found: Measured) -> None:
        say(("tell", name, found))

    run = Run(load=lambda name: op.load(name, backend), tell=tell, at=lambda step: say(("at", step)), **options)
    op.measure(cell, providers, run)
    say(("done",))


# The parent -----------------------------------------------------------------------------------------------------------


class WorkerDied(Exception):
    """The child ended before the cell did; the message says how."""


class Worker:
    """One child process, which gets `arguments` of `serve`."""

    def __init__(self, *arguments: object, timeout: float):
        context = multiprocessing.get_context("spawn")
        self._events, other = context.Pipe()
        self._process, self._timeout = context.Process(target=serve, args=(other, *arguments)), timeout
        self._process.start()
        other.close()
        try:
            _, self.environment = self._next(START_S)
        except BaseException:  # interrupted while it starts
            self.close()
            raise

    def measure(self, cell: Cell, providers: Sequence[str], options: Mapping[str, Any]) -> Iterator[tuple]:
        """The events of one cell before "done"; raises WorkerDied."""
        try:
            self._events.send((cell, providers, dict(options)))
        except OSError as error:
            raise WorkerDied(self._end()) from error
        while (event := self._next(self._timeout))[0] != "done":
            yield event

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._events.close()

    def _next(self, timeout: float) -> tuple:
        """The next event. The process's end tells a death too: other processes may have inherited the pipe."""
        if not wait([self._events, self._process.sentinel], timeout):
            raise WorkerDied(f"no sign of life for {timeout:.0f} s; killed")
        try:
            event = self._events.recv() if self._events.poll() else None
        except (EOFError, OSError):
            event = None
        if event is None:
            raise WorkerDied(self._end())
        if event[0] == "broken":
            raise WorkerDied(event[1])
        return event

    def _end(self) -> str:
        self._process.join()
        status = self._process.exitcode
        if status < 0:
            return f"the process was killed by {signal.Signals(-status).name}"
        return f"the process ended with status {status}"


@dataclasses.dataclass
class Supervisor:
    """One worker at a time, started when it is needed."""

    log: Path
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of Run, and "backend"
    make: Callable[..., Worker] = Worker
    deaths: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by provider
    _worker: Worker | None = None

    def start(self) -> dict[str, str]:
        """The worker's environment. RuntimeError if it does not start."""
        if self._worker is None:
            try:
                self._worker = self.make(self.commit, self.log, timeout=self.timeout)
            except WorkerDied as death:
                raise RuntimeError(f"the process that measures does not start: {death}; see {self.log}") from None
        return self._worker.environment

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def measure(self, job: Job, at: Callable[[str], None]) -> Iterator[tuple[str, Measured]]:
        """What is known so far of each provider, of the roof and of its parts; the last about each counts.

        `at` is told each step.
        """
        given_up = [name for name in job.providers if self.deaths[name] >= DEATHS]
        yield from ((name, Measured(status=f"given up: {DEATHS} processes died of it")) for name in given_up)
        todo = [[name for name in job.providers if name not in given_up]]
        while todo:
            if not (names := todo.pop(0)):
                continue
            step, failed = "start", set()
            try:
                self.start()
                for kind, name, *found in self._worker.measure(job.cell, tuple(names), self.options):
                    if kind == "at":
                        step = name
                        at(step)
                        continue
                    (known,) = found
                    if known.status != "ok":
                        failed.add(name)
                    yield name, known
            except WorkerDied as death:
                self.close()
                left = [name for name in names if name not in failed]
                if step == SHARED and len(left) != 1:
                    todo += [[name] for name in left]
                elif step == SHARED or step in names:
                    culprit = left[0] if step == SHARED else step
                    self.deaths[culprit] += 1
                    if culprit in left:
                        yield culprit, Measured(status=str(death))
                        left.remove(culprit)
                    todo.append(left)
                else:  # no provider's fault: inputs that do not fit, a roof that fails
                    yield from ((name, Measured(status=f"{step}: {death}")) for name in left)
