"""What candidates take of an SM, read from compiled kernels: a second each, so in as many processes as there are cores.

Those worth timing are left in the cache folder, from where this process loads them.
"""

import concurrent.futures
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from typing import Any

from quackish import kernels, launch
from quackish.gpu import Gpu
from quackish.launch import Resources
from quackish.launch.compile import Request, lock, object_of

_MOST_PROCESSES = 16


Candidate = tuple[str, Any, Any]  # kernel, problem, config


def examine(wanted: Sequence[Candidate], gpu: Gpu, compiling: bool) -> Iterator[tuple[int, Resources | str]]:
    """(which one, its resources or why it does not compile), as they come.

    `compiling`: those that do not spill are also compiled for launching. Raises FileNotFoundError without a cuobjdump.
    """
    processes = min(len(wanted), len(os.sched_getaffinity(0)), _MOST_PROCESSES)
    if processes < 2:
        for i, one in enumerate(wanted):
            yield i, _examine(one, gpu, compiling)
        return
    context = multiprocessing.get_context("spawn")  # a fork would share what CUDA and the compiler have started
    pool = concurrent.futures.ProcessPoolExecutor(processes, mp_context=context)
    try:
        waiting = {pool.submit(_examine, one, gpu, compiling): i for i, one in enumerate(wanted)}
        for done in concurrent.futures.as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _examine(one: Candidate, gpu: Gpu, compiling: bool) -> Resources | str:
    kernel, problem, config = one
    kernel_class = kernels.find(kernel, gpu)
    try:
        used = launch.resources(kernel_class, problem, config, gpu.target)
        if compiling and not spills(used):
            with lock:
                object_of(Request(kernel_class, problem, config, gpu.target))
    except RuntimeError as error:
        return str(error)
    return used


def spills(used: Resources) -> bool:
    return used.stack_bytes > 0 or used.local_loads > 0 or used.local_stores > 0
