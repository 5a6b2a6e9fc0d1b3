"""Compiles kernels in parallel, in separate processes: the compiler uses one core and is not thread-safe.

A thread per process requests one kernel at a time. A ProcessPoolExecutor would import `__main__` again, which fails for
scripts without an `if __name__` guard, and import torch: the ten kernels of linear cross entropy took 6.6 s that way,
4.9 s this way and 8.5 s in one process (2 cores).
"""

import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from quackish.device import cache, notice, variables
from quackish.device.compile import Request, counters, is_available

_PACKAGE = Path(__file__).parents[1]
_WORKER = Path(__file__).with_name("worker.py")
_MAX_JOBS = 16  # each takes 0.3 GB while it compiles
_TIMEOUT = 120.0  # seconds per kernel, where one takes about a second


class Outcome(NamedTuple):
    """What became of a request."""

    request: Request
    status: str  # "failed", or as in `compile.Obtained`: "loaded", "compiled" or "not stored"
    message: str  # why it failed, or was not stored


def prepare(requests: Sequence[Request]) -> None:
    """Compiles missing kernels to disk if several processes can share the work; `get` then loads them.

    Raises nothing: a kernel that fails here is compiled again by `get`, which raises.
    """
    requests = [request for request in requests if not is_available(request)]
    jobs = default_jobs(len(requests))
    # In a program that embeds Python, sys.executable is that program.
    has_interpreter = "python" in Path(sys.executable or "").name
    if jobs > 1 and has_interpreter and all(cache.folder_for(request.kernel_class) for request in requests):
        with notice.if_slow([request.kernel_class for request in requests], requests[0].target):
            for outcome in compile_all(requests, jobs):
                counters.compiles += outcome.status in ("compiled", "not stored")


def default_jobs(num_requests: int, cores: int | None = None) -> int:
    """Number of processes, at most QUACKISH_COMPILE_JOBS; 0 and 1 mean no additional process."""
    limit = variables.get(variables.COMPILE_JOBS)
    if not limit:
        # The LOCAL_WORLD_SIZE processes of a torchrun job compile the same kernels at the same time.
        processes = os.environ.get("LOCAL_WORLD_SIZE", "")
        cores = len(os.sched_getaffinity(0)) if cores is None else cores
        limit = cores // (max(1, int(processes)) if processes.isdecimal() else 1)
    return min(num_requests, int(limit), _MAX_JOBS)


def compile_all(
    requests: Sequence[Request], jobs: int, worker: Path = _WORKER, timeout: float = _TIMEOUT
) -> Iterator[Outcome]:
    """Compiles in at most `jobs` processes, which write to the cache folder; yields outcomes as they finish.

    Every request has one outcome. A process that dies or hangs fails only the request it is working on.
    """
    idle: deque[_Worker] = deque()

    def outcome_of(request: Request) -> Outcome:
        process = None
        try:
            with contextlib.suppress(IndexError):  # no process is idle
                process = idle.pop()
            process = process or _Worker(worker)
            outcome = Outcome(request, *process.ask(request, timeout))
        except Exception as error:  # the process did not start, died or hangs, or the request cannot be pickled
            stderr = process.end() if process else ""
            return Outcome(request, "failed", f"no answer from a compiling process ({error!r}): {stderr}")
        idle.append(process)
        return outcome

    threads = ThreadPoolExecutor(max(jobs, 1))
    try:
        for future in as_completed([threads.submit(outcome_of, request) for request in dict.fromkeys(requests)]):
            yield future.result()
    finally:
        threads.shutdown(cancel_futures=True)
        for process in idle:
            process.end()


@contextlib.contextmanager
def defer_interrupts() -> Iterator[None]:
    """In this block Ctrl-C waits for the end of the block.

    Processes started in it never get Ctrl-C, because they inherit the signal mask: only the parent reports it.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # if multiprocessing starts it in the block, it unblocks signals
    former = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class _Worker:
    """A compiling process."""

    def __init__(self, program: Path):
        self._errors = tempfile.TemporaryFile()
        # -I: it uses this process's sys.path, not worker.py's folder or the environment.
        command = [sys.executable, "-I", str(program), json.dumps([[*map(str, sys.path)], str(_PACKAGE)])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors)

    def ask(self, request: Request, timeout: float) -> tuple[str, str]:
        """Sends a request. Returns (status, message) of its Outcome; raises TimeoutError without an answer."""
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        if not wait([self._process.stdout.fileno()], timeout):
            raise TimeoutError(f"none within {timeout:.0f} s")
        return pickle.load(self._process.stdout)

    def end(self) -> str:
        """Ends the process and returns the last of its stderr."""
        self._process.kill()
        self._process.communicate()  # closes its pipes
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")[-2000:]
