"""Host time: how long a call keeps the Python thread busy until all its GPU work is enqueued."""

import gc
import random
import time
from collections.abc import Callable, Mapping

import torch

from quackish.device import launch
from quackish.testing.timing import Times, synchronize

WARM_UP = 5


def host_times(
    works: Mapping[str, Callable], device: torch.device, repeats: int = 25, calls: int = 8
) -> dict[str, Times]:
    """Microseconds per call until all work is enqueued, not waiting for the GPU. A sample is `calls` calls in a row.

    Works take turns in random order: in a fixed order two equal ones differed by 12 % (H200). A single call on an idle
    host takes longer: 471 us instead of 381 for a training step of the loss (H200).
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    shuffled = random.Random().sample
    gc.collect()
    gc.disable()  # a garbage collection would dominate a sample
    try:
        for i in range(WARM_UP + repeats):
            for name, work in shuffled(list(works.items()), k=len(works)):
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
    """Host microseconds of the slowest launch in a call of `work`, by the median; None without launches.

    A sample is `calls` calls in a row.
    """
    durations: list[float] = []

    def observer(function, args, kernel_class, problem, config) -> None:
        start = clock()
        function(*args)
        durations.append(1e6 * (clock() - start))

    samples: dict[int, list[float]] = {}
    launch.observe(observer)
    try:
        for i in range(WARM_UP + repeats):
            durations.clear()
            for _ in range(calls):
                work()
            synchronize(device)
            if i >= WARM_UP:
                per_call = len(durations) // calls
                for number, us in enumerate(durations):
                    samples.setdefault(number % per_call, []).append(us)
    finally:
        launch.observe(None)
    return max(map(Times.of, samples.values()), key=lambda times: times.median, default=None)
