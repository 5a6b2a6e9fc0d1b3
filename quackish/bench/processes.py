"""Measures cells in child processes, so that a provider that crashes its process costs only its own numbers.

The child reports a provider that raises or runs out of memory, and goes on. One that loses the CUDA context (an illegal
address is permanent), aborts, exits or hangs ends the child: the supervisor knows what was in progress, records that
provider as failed, and a new child measures the cell without it. Events of a child, the first word naming the kind:

    ("ready", columns of the environment)
    ("at", step), ("tell", provider, Found), ...        of each cell; the last about a provider counts
    ("done",) or ("broken", why)        at the cell's end; after "broken" the child ends: the CUDA context may be lost
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
from quackish.bench.measure import Found, Memory, Run, reason
from quackish.bench.operations import OPERATIONS

START_S = 300.0  # for a child to import torch and find the GPU
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


def measure(cell: Cell, providers: Sequence[str], say: Callable[[tuple], None], **options: Any) -> None:
    """One cell, as events. `options` are Run's."""
    op = OPERATIONS[cell.op]

    def tell(name: str, found: Found) -> None:
        say(("tell", name, found))

    run = Run(load=op.load, tell=tell, at=lambda step: say(("at", step)), **options)
    op.measure(cell, providers, run)
    say(("done",))


# The parent -----------------------------------------------------------------------------------------------------------


class Died(Exception):
    """The child ended before the cell did; the message says how."""


@dataclasses.dataclass
class Supervisor:
    """Measures jobs in one child at a time, which is started when it is needed."""

    log: Path
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of Run
    deaths: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by provider
    _process: Any = None
    _events: Connection | None = None
    _environment: dict[str, str] | None = None

    def start(self) -> dict[str, str]:
        """The child's environment. RuntimeError if it does not start."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._events, other = context.Pipe()
            self._process = context.Process(target=serve, args=(other, self.commit, self.log))
            self._process.start()
            other.close()
            try:
                _, self._environment = self._next(START_S)
            except Died as death:
                raise RuntimeError(f"the process that measures does not start: {death}; see {self.log}") from None
        return self._environment

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._events.close()
            self._process = None

    def measure(self, job: Job, at: Callable[[str], None]) -> Iterator[tuple[str, Found]]:
        """What is known so far of each provider, of the roof and of its parts; the last about each counts.

        `at` is told each step.
        """
        given_up = [name for name in job.providers if self.deaths[name] >= DEATHS]
        yield from ((name, {"status": f"given up: {DEATHS} processes died of it"}) for name in given_up)
        groups = [[name for name in job.providers if name not in given_up]]
        while groups:
            if not (names := groups.pop(0)):
                continue
            step, failed = "start", set()
            try:
                for kind, name, *found in self.events_of(job.cell, names):
                    if kind == "at":
                        step = name
                        at(step)
                        continue
                    (known,) = found
                    if known["status"] != "ok":
                        failed.add(name)
                    yield name, known
            except Died as death:
                self.close()
                left = [name for name in names if name not in failed]
                suspects = left if step == SHARED else [step]
                if len(suspects) != 1:
                    groups += [[name] for name in left]
                elif (culprit := suspects[0]) in names:
                    self.deaths[culprit] += 1
                    if culprit in left:
                        yield culprit, {"status": str(death)}
                    groups.append([name for name in left if name != culprit])
                else:  # no provider's fault: inputs that do not fit, a roof that fails
                    yield from ((name, {"status": f"{step}: {death}"}) for name in left)

    def events_of(self, cell: Cell, names: Sequence[str]) -> Iterator[tuple]:
        """The events of one cell before "done"; raises Died."""
        self.start()
        with contextlib.suppress(OSError):  # of a child that has ended, which the next event tells
            self._events.send((cell, tuple(names), dict(self.options)))
        while (event := self._next(self.timeout))[0] != "done":
            yield event

    def _next(self, timeout: float) -> tuple:
        """The next event. The process's end tells a death too: other processes may have inherited the pipe."""
        if not wait([self._events, self._process.sentinel], timeout):
            raise Died(f"no sign of life for {timeout:.0f} s; killed")
        try:
            event = self._events.recv() if self._events.poll() else None
        except (EOFError, OSError):
            event = None
        if event is None:
            self._process.join()
            status = self._process.exitcode
            killed = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            raise Died(f"the process {killed}")
        if event[0] == "broken":
            raise Died(event[1])
        return event
