"""Compiles kernels in parallel, in separate processes: the compiler uses one core and is not thread-safe.

Not by concurrent.futures: a spawned process imports `__main__` again, which fails for scripts without an `if __name__`
guard, and imports torch. The cold first step of linear cross entropy took 7.4 s that way, and 5.3 s this way (2 cores).
"""

import contextlib
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from quackish.launch import cache
from quackish.launch.compile import Request, counters, is_at_hand

_PACKAGE = Path(__file__).parents[1]
_WORKER = Path(__file__).with_name("worker.py")
_MAX_JOBS = 16  # each takes 0.3 GB while it compiles
_TIMEOUT = 120.0  # seconds without any outcome, where a kernel takes about one


class Outcome(NamedTuple):
    request: Request
    status: str  # "failed", or as in `compile.Obtained`: "loaded", "compiled" or "not stored"
    message: str  # why it failed, or was not stored


def prepare(requests: Sequence[Request]) -> None:
    """Compiles what is not on disk, if several processes can share the work; `get` then loads it.

    Raises nothing: a kernel that fails here is compiled again, and fails, where it is used.
    """
    requests = [request for request in requests if not is_at_hand(request)]
    jobs = default_jobs(len(requests))
    # A program that embeds Python is its own sys.executable.
    has_interpreter = "python" in Path(sys.executable or "").name
    if jobs > 1 and has_interpreter and all(cache.folder_for(request.kernel_class) for request in requests):
        for outcome in compile_all(requests, jobs):
            counters.compiles += outcome.status in ("compiled", "not stored")


def default_jobs(num_requests: int) -> int:
    """Number of processes, at most QUACKISH_COMPILE_JOBS; 0 and 1 mean no additional process."""
    most = os.environ.get("QUACKISH_COMPILE_JOBS", "")
    if not most.isdecimal():
        # The LOCAL_WORLD_SIZE processes of a torchrun job compile the same kernels at the same time.
        processes = os.environ.get("LOCAL_WORLD_SIZE", "")
        most = len(os.sched_getaffinity(0)) // (max(1, int(processes)) if processes.isdecimal() else 1)
    return min(num_requests, int(most), _MAX_JOBS)


def compile_all(
    requests: Sequence[Request], jobs: int, worker: Path = _WORKER, timeout: float = _TIMEOUT
) -> Iterator[Outcome]:
    """Compiles in at most `jobs` processes, which write to the cache folder; yields outcomes as they finish.

    Every request has one outcome. A process that dies fails its own request alone.
    """
    todo = list(dict.fromkeys(requests))[::-1]
    idle: list[_Worker] = []
    with contextlib.ExitStack() as workers, selectors.DefaultSelector() as answers:
        busy = answers.get_map()
        while todo or busy:
            if todo and len(busy) < jobs:
                request, one = todo.pop(), None
                try:
                    one = idle.pop() if idle else workers.enter_context(_Worker(worker))
                    one.send((request.kernel_class.__module__, request.kernel_class.__qualname__, *request[1:]))
                    answers.register(one.stdout, selectors.EVENT_READ, (one, request))
                except Exception as error:  # it could not be started, or the request cannot be pickled
                    yield Outcome(request, "failed", f"no compiling process ({error!r}): {one.end() if one else ''}")
                continue
            ready = answers.select(timeout)
            for key, _ in ready:
                answers.unregister(key.fileobj)
                one, request = key.data
                try:
                    outcome = Outcome(request, *pickle.load(one.stdout))
                    idle.append(one)
                except Exception as error:  # it died
                    outcome = Outcome(request, "failed", f"the compiling process ended ({error!r}): {one.end()}")
                yield outcome
            if not ready:
                for request in [key.data[1] for key in busy.values()] + todo:
                    yield Outcome(request, "failed", f"no outcome from a compiling process within {timeout:.0f} s")
                return


class _Worker:
    """A compiling process, which ends with the context."""

    def __init__(self, program: Path):
        from quackish import __version__

        self._errors = tempfile.TemporaryFile()
        # -I: it imports by this process's sys.path, not from worker.py's folder or by the environment.
        command = [sys.executable, "-I", str(program)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        self.stdout = self._process.stdout
        self.send((sys.path, str(_PACKAGE), __version__))

    def send(self, message: tuple) -> None:
        with contextlib.suppress(BrokenPipeError):  # that it died is seen where its answer is read
            pickle.dump(message, self._process.stdin)
            self._process.stdin.flush()

    def end(self) -> str:
        """Ends the process and returns the last of its stderr."""
        self._process.kill()
        self._process.wait()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_) -> None:
        self.end()
        with contextlib.suppress(OSError):  # a flush on close may fail
            self._process.stdin.close()
        self.stdout.close()
        self._errors.close()
