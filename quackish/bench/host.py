"""Host time: how long work keeps the Python thread busy until all of it is enqueued."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from quackish import launch
from quackish.testing.timing import Times


def in_turns(
    works: Mapping[str, Callable[[], Sequence[float]]], repeats: int, warm_up: int = 5
) -> dict[str, list[Times]]:
    """The Times of each number that a work returns, over `repeats` turns, without garbage collection."""
    samples: dict[str, list[Sequence[float]]] = {name: [] for name in works}
    gc.collect()
    gc.disable()  # a collection in the middle would be the slowest part
    try:
        for i in range(repeats + warm_up):
            for name, work in works.items():
                found = work()
                if i >= warm_up:
                    samples[name].append(found)
    finally:
        gc.enable()
    return {name: list(map(Times.of, zip(*found, strict=True))) for name, found in samples.items()}


def host_times(
    works: Mapping[str, Callable], device: torch.device, repeats: int = 25, calls: int = 8
) -> dict[str, Times]:
    """Microseconds per call until all is enqueued, without waiting for the GPU: 8 calls in a row, in turns.

    Single calls from an idle start take longer: a step 471 us instead of 381, torch's 286 instead of 195 (one H200).
    About half is autograd's second thread: with torch.autograd.set_multithreading_enabled(False) a step took 197 us for
    346, torch's 152 for 335, an empty autograd.Function 60 for 131 (in one run beside another).
    """

    def sample(work: Callable) -> list[float]:
        start = time.perf_counter()
        for _ in range(calls):
            work()
        us = 1e6 * (time.perf_counter() - start) / calls
        _synchronize(device)
        return [us]

    samplers = {name: lambda work=work: sample(work) for name, work in works.items()}
    return {name: times for name, (times,) in in_turns(samplers, repeats).items()}


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
        for i in range(repeats + 5):
            taken.clear()
            for _ in range(calls):
                work()
            _synchronize(device)
            for at, us in enumerate(taken if i >= 5 else ()):
                samples.setdefault(at % (len(taken) // calls), []).append(us)
    finally:
        launch.observe(None)
    return max(map(Times.of, samples.values()), key=lambda times: times.median, default=None)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
