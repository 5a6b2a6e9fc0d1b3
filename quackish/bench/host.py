"""Host time: how long work keeps the Python thread busy until all of it is enqueued."""

import gc
import time
from collections.abc import Callable, Mapping

import torch

from quackish import launch
from quackish.testing.timing import Times, synchronize

WARM_UP = 5


def host_times(
    works: Mapping[str, Callable], device: torch.device, repeats: int = 25, calls: int = 8
) -> dict[str, Times]:
    """Microseconds per call until all is enqueued, without waiting for the GPU: `calls` in a row, in turns.

    A single call from an idle start takes longer, a step 471 us instead of 381 (H200).
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()  # a collection in the middle would be the slowest part
    try:
        for i in range(WARM_UP + repeats):
            for name, work in works.items():
                start = time.perf_counter()
                for _ in range(calls):
                    work()
                us = 1e6 * (time.perf_counter() - start) / calls
                synchronize(device)
                samples[name] += [us] if i >= WARM_UP else []
    finally:
        gc.enable()
    return {name: Times.of(us) for name, us in samples.items()}


def launch_times(
    work: Callable,
    device: torch.device,
    repeats: int = 25,
    calls: int = 8,
    clock: Callable[[], float] = time.perf_counter,
) -> Times | None:
    """Microseconds that the slowest of work's launches, by the median, keeps the thread busy; None without launches.

    `calls` works run in a row, as above.
    """
    taken: list[float] = []

    def observer(function, args, kernel_class, problem, config) -> None:
        start = clock()
        function(*args)
        taken.append(1e6 * (clock() - start))

    samples: dict[int, list[float]] = {}
    launch.observe(observer)
    try:
        for i in range(WARM_UP + repeats):
            taken.clear()
            for _ in range(calls):
                work()
            synchronize(device)
            for at, us in enumerate(taken if i >= WARM_UP else ()):
                samples.setdefault(at % (len(taken) // calls), []).append(us)
    finally:
        launch.observe(None)
    return max(map(Times.of, samples.values()), key=lambda times: times.median, default=None)
