"""Compiles kernels in parallel, in separate processes: the compiler uses one core and is not thread-safe."""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
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
    if jobs < 2 or not _has_interpreter() or not all(cache.is_usable(request.kernel_class) for request in requests):
        return
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


def _has_interpreter() -> bool:
    """False in a program that embeds Python, where sys.executable is that program."""
    return "python" in Path(sys.executable or "").name


def compile_all(requests: Sequence[Request], jobs: int) -> Iterator[Outcome]:
    """Compiles in at most `jobs` processes, which write to the cache folder; yields outcomes as they finish."""
    waiting = dict.fromkeys(requests)
    todo: queue.SimpleQueue[Request] = queue.SimpleQueue()
    done: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for request in waiting:
        todo.put(request)
    workers: list[_Worker] = []
    threads: list[threading.Thread] = []
    try:
        while waiting and len(threads) < jobs:
            thread = threading.Thread(target=_serve, args=(todo, done, workers), daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system's limit, or the interpreter is shutting down
                if not threads:
                    yield from (Outcome(request, "failed", f"cannot start a thread: {error}") for request in waiting)
                    return
                break
            threads.append(thread)
        while waiting:
            outcome = done.get(timeout=_TIMEOUT)
            del waiting[outcome.request]
            yield outcome
    except queue.Empty:
        for request in waiting:
            yield Outcome(request, "failed", f"no outcome from a compiling process within {_TIMEOUT:.0f} s")
    finally:
        with contextlib.suppress(queue.Empty):  # also if the caller stops early
            while True:
                todo.get_nowait()
        for worker in list(workers):
            worker.kill()  # which ends its thread
        for thread in threads:
            thread.join()


def _serve(todo: queue.SimpleQueue, done: queue.SimpleQueue, workers: list["_Worker"]) -> None:
    """Body of a thread: sends requests to a process until none is left; replaces the process if it dies."""
    worker = None
    while not todo.empty():
        with contextlib.suppress(queue.Empty):
            request = todo.get_nowait()
            try:
                if worker is None:
                    worker = _Worker()
                    workers.append(worker)
                done.put(Outcome(request, *worker.compile(request)))
            except Exception as error:  # it could not be started, or died
                said = "" if worker is None else worker.end()
                done.put(Outcome(request, "failed", f"the compiling process ended ({error!r}): {said}"))
                worker = None
    if worker is not None:
        worker.end()


class _Worker:
    def __init__(self):
        from quackish import __version__

        self._errors = tempfile.TemporaryFile()
        # -I: it imports by this process's sys.path, not from worker.py's folder or by the environment.
        command = [sys.executable, "-I", str(_WORKER)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors)
        self._send((sys.path, str(_PACKAGE), __version__))

    def compile(self, request: Request) -> tuple[str, str]:
        kernel_class, *rest = request
        self._send((kernel_class.__module__, kernel_class.__qualname__, *rest))
        return pickle.load(self._process.stdout)

    def _send(self, message: tuple) -> None:
        pickle.dump(message, self._process.stdin)
        self._process.stdin.flush()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> str:
        """Ends the process and returns the last of its stderr."""
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(OSError):  # a flush on close may fail
            self._process.stdin.close()
        with self._process.stdout, self._errors:
            self._errors.seek(0)
            return self._errors.read().decode(errors="replace")[-2000:]
