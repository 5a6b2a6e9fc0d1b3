"""Measures cells in child processes, so that a provider that crashes its process costs only its own numbers.

The child reports a provider that raises or runs out of memory, and goes on. One that loses the CUDA context (an illegal
address is permanent), aborts, exits or hangs ends the child: the supervisor knows what was in progress, records that
provider as failed, and a new child measures the cell without it.
"""

import collections
import dataclasses
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from quackish.bench.cells import Job
from quackish.bench.measured import Measured

START_S = 300.0  # for a worker to import torch and find the GPU
DEATHS = 2  # after this many a provider is not tried again: each costs a new process, or a timeout
# Steps that run every provider: if one of these dies, each provider is measured alone to find the culprit.
SHARED = ("errors", "timing")
Row = tuple[str, Measured]


class WorkerDied(Exception):
    """The child ended before the cell did; the message says how."""


class Worker:
    """One child process. `log` takes what it and the providers print."""

    def __init__(self, command: Sequence[str], log: IO[bytes], timeout: float):
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
        # In a session of its own: Ctrl-C reaches the parent alone, which ends the child.
        self._process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        self._timeout = timeout
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.ready = self._next(START_S)
        except BaseException:  # interrupted while it starts
            self.close()
            raise

    def measure(self, job: dict) -> Iterator[dict]:
        """The events of one cell before "done"; raises WorkerDied."""
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise WorkerDied(self._end()) from error
        while "done" not in (event := self._next(self._timeout)):
            yield event

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            self._lines.put(line)

    def _next(self, timeout: float) -> dict:
        """The next event. The process's end tells a death, not the pipe's: other processes may have inherited it."""
        deadline = time.monotonic() + timeout
        while True:
            dead = self._process.poll() is not None
            try:
                event = json.loads(self._lines.get(timeout=1.0 if dead else 0.2))
            except queue.Empty:
                if dead:
                    raise WorkerDied(self._end()) from None
                if time.monotonic() > deadline:
                    self.close()
                    raise WorkerDied(f"no sign of life for {timeout:.0f} s; killed") from None
                continue
            if "broken" in event:
                self._process.wait()
                raise WorkerDied(event["broken"])
            return event

    def _end(self) -> str:
        status = self._process.wait()
        if status < 0:
            return f"the process was killed by {signal.Signals(-status).name}"
        return f"the process ended with status {status}"


@dataclasses.dataclass
class Supervisor:
    """One worker at a time, started when it is needed."""

    op: str
    log: Path
    also: Path | None = None
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of Run, and "backend"
    make: Callable[..., Worker] = Worker
    deaths: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by provider
    _worker: Worker | None = None

    def start(self) -> dict:
        """What the worker says of itself: {"ready": environment, "own": names}. RuntimeError if it does not start."""
        if self._worker is None:
            command = [sys.executable, "-m", "quackish.bench.worker", self.op]
            command += ["--also", str(self.also)] if self.also else []
            command += ["--commit", self.commit] if self.commit else []
            with self.log.open("ab") as log:
                try:
                    self._worker = self.make(command, log, self.timeout)
                except WorkerDied as death:
                    raise RuntimeError(f"the process that measures does not start: {death}; see {self.log}") from None
        return self._worker.ready

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None

    def measure(
        self, job: Job, at: Callable[[str], None], partial: Callable[[str, Measured], None] = lambda name, found: None
    ) -> Iterator[Row]:
        """The results of each provider, of the roof and of whatever else has a row.

        `at` is told each step, `partial` what is known so far of a provider.
        """
        given_up = [name for name in job.providers if self.deaths[name] >= DEATHS]
        yield from ((name, Measured(status=f"given up: {DEATHS} processes died of it")) for name in given_up)
        jobs = collections.deque([[name for name in job.providers if name not in given_up]])
        while jobs:
            if not (names := jobs.popleft()):
                continue
            step, told, failed = "start", set(), None
            try:
                self.start()
                message = dataclasses.asdict(dataclasses.replace(job, providers=tuple(names)))
                for event in self._worker.measure({"job": message, "options": dict(self.options)}):
                    failed = None
                    if "at" in event:
                        step = event["at"]
                        at(step)
                        continue
                    name, found = event["provider"], Measured.from_dict(event["measured"])
                    if event.get("partial"):
                        partial(name, found)
                        continue
                    told.add(name)
                    failed = name if found.status != "ok" else None
                    yield name, found
            except WorkerDied as death:
                self.close()
                left = [name for name in names if name not in told]
                culprit = failed if failed in names else step if step in left else None
                if step in SHARED and len(left) == 1:
                    culprit = culprit or left[0]
                if culprit:
                    self.deaths[culprit] += 1
                    if culprit in left:
                        yield culprit, Measured(status=str(death))
                        left.remove(culprit)
                    jobs.append(left)
                elif step in SHARED:
                    jobs.extend([name] for name in left)
                else:  # no provider's fault: inputs that do not fit, a roof that fails
                    yield from ((name, Measured(status=f"{step}: {death}")) for name in left)
