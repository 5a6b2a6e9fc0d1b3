"""Timing: CUDA graphs replayed on a cold L2, in rounds that alternate between works.

A card that throttles at its power limit would slow down the work that runs last, so works take turns: A B C A B C.
Without a GPU the same functions time plain calls with the host's clock, for tests only.
"""

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

CLEAR_BYTES = 256 << 20  # as triton.testing.do_bench: several times the largest L2
# GEMMs on random data run for this long before each sample of long work, like a model before its loss, to bring the
# card to its power limit. Without them, samples of three GEMMs were up to 9 % off their median on both sides; with them
# at most 2 % below, and a few 4 to 20 % above, which do not move a median (H200, 37 ms).
LOAD_MS = 80.0
# Clears of the L2 before the calls of a work in `interleave`, 3 to 6 ms: behind one that waits for the host, graphs of
# 47 us took 140 to 156.
HEAD_START = 40


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds: median, 20th and 80th percentile of all samples."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Times":
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        cuts = statistics.quantiles(samples, n=5, method="inclusive")
        return cls(statistics.median(samples), cuts[0], cuts[3])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass(frozen=True)
class TimedCall:
    """A call that is ready to be timed."""

    run: Callable[[], object]
    is_graph: bool


def prepare(fn: Callable[[], object], device: torch.device, warmup: int = 2) -> TimedCall:
    """Warms up `fn` and captures it as a CUDA graph. Without a GPU, or if capture fails, the work is `fn` itself."""
    if device.type != "cuda":
        return TimedCall(fn, is_graph=False)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            fn()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            fn()
    except Exception:
        torch.cuda.synchronize(device)  # raises if the context is broken, not if only the capture failed
        return TimedCall(fn, is_graph=False)
    graph.replay()
    torch.cuda.synchronize(device)
    return TimedCall(graph.replay, is_graph=True)


def interleave(
    works: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 10, block: int = 10
) -> dict[str, Times]:
    """Times each of `works` `rounds * block` times: `rounds` rounds of `block` calls each, in turns.

    As in `triton.testing.do_bench`, a sample is the time between two events around one call on a cleared L2; every
    sample includes the same overhead of events and graph launch. A first round, to raise the clocks, is discarded.
    """
    samples: dict[str, list[float]] = {name: [] for name in works}
    for i in range(1 + rounds):
        for name, times in _round(works, device, block).items():
            samples[name] += times if i > 0 else []
    return {name: Times.of(times) for name, times in samples.items()}


def _round(works: Mapping[str, Callable[[], object]], device: torch.device, block: int) -> dict[str, list[float]]:
    """The samples of one round in microseconds, by work."""
    if device.type != "cuda":
        return {name: [_cpu_us(run) for _ in range(block)] for name, run in works.items()}
    cold = torch.empty(CLEAR_BYTES // 4, dtype=torch.int32, device=device)
    events = {name: [[torch.cuda.Event(enable_timing=True) for _ in "se"] for _ in range(block)] for name in works}
    for name, run in works.items():
        for _ in range(HEAD_START):
            cold.zero_()
        for start, end in events[name]:
            cold.zero_()
            start.record()
            run()
            end.record()
    torch.cuda.synchronize(device)
    return {name: [1e3 * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def _raise(name: str, error: Exception) -> None:
    raise error


def take_turns(
    works: Mapping[str, Callable[[], object]],
    device: torch.device,
    repeats: int = 10,
    seconds: float = 0.5,
    least: int = 5,
    on_error: Callable[[str, Exception], None] = _raise,
    after: Callable[[str, Mapping[str, Times]], None] = lambda name, times: None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Times long works, which may allocate and fail, as plain calls: one sample of each per turn, in random order.

    The order differs from run to run. On a GPU, GEMMs run for LOAD_MS before each sample. `after` is called after each
    sample with all times so far.

    A work is finished after `repeats` samples, or after `seconds` in total if `least` samples are good, so slow works
    get fewer. A sample is good if the caching allocator did not call the driver; bad samples count only if none is
    good. A work that raises is dropped, and `on_error` is called with its name and exception.
    """
    samples: dict[str, list[tuple[bool, float]]] = {name: [] for name in works}
    shuffle = random.Random().shuffle
    load = _load(device) if device.type == "cuda" else None

    def wants_more(name: str) -> bool:
        good, spent = sum(clean for clean, _ in samples[name]), sum(us for _, us in samples[name]) / 1e6
        return len(samples[name]) < repeats and (good < least or spent < seconds)

    while turn := [name for name in samples if wants_more(name)]:
        shuffle(turn)  # the previous work affects the card's clocks
        for name in turn:
            try:
                work = works[name]
                samples[name].append(_cuda_sample(work, device, load) if load else (True, _cpu_us(work, clock)))
                after(name, _times_of(samples))
            except Exception as error:
                del samples[name]
                on_error(name, error)
    return _times_of(samples)


def bursts(
    works: Mapping[str, Callable[[], object]],
    device: torch.device,
    count: int = 8,
    seconds: float = 0.3,
    on_error: Callable[[str, Exception], None] = _raise,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Times]:
    """Times works as a training loop runs them: `count` bursts of back-to-back calls of each, in random order.

    A sample is a burst of about `seconds`, divided by its number of calls. Bursts follow each other without
    synchronization, so the card is never idle and runs at its sustained clocks. Three rounds are discarded: two of two
    calls per work, to determine the calls per burst, and one of bursts. Good samples and works that raise are handled
    as in `take_turns`.
    """
    marks: dict[str, list[tuple]] = {name: [] for name in works}  # (start, end) of each burst
    calls, order = dict.fromkeys(works, 2), random.Random()

    def mark() -> tuple:
        if device.type != "cuda":
            return clock(), None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event, _driver_allocations(device)

    def us_between(start: tuple, end: tuple) -> float:
        if device.type != "cuda":
            return 1e6 * (end[0] - start[0])
        end[0].synchronize()
        return 1e3 * start[0].elapsed_time(end[0])

    for i in range(3 + count):
        if i == 2:
            calls = {name: max(1, round(2e6 * seconds / us_between(*pairs[1]))) for name, pairs in marks.items()}
        for name in order.sample(list(marks), len(marks)):
            try:
                start = mark()
                for _ in range(calls[name]):
                    works[name]()
                marks[name].append((start, mark()))
            except Exception as error:
                del marks[name]
                on_error(name, error)
    samples = {
        name: [(start[1] == end[1], us_between(start, end) / calls[name]) for start, end in pairs[3:]]
        for name, pairs in marks.items()
    }
    return _times_of(samples)


def _times_of(samples: Mapping[str, Sequence[tuple[bool, float]]]) -> dict[str, Times]:
    """Uses the good samples of each work, or all if none is good."""
    times = {}
    for name, work_samples in samples.items():
        if us := [us for good, us in work_samples if good] or [us for _, us in work_samples]:
            times[name] = Times.of(us)
    return times


def _load(device: torch.device) -> Callable[[], None]:
    """A function that runs GEMMs for LOAD_MS."""
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(4096, 4096, dtype=torch.bfloat16, device=device, generator=generator) for _ in range(2))
    out = torch.empty_like(a)

    def multiply(times: int) -> None:
        for _ in range(times):
            torch.mm(a, b, out=out)

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    multiply(10)
    start.record()
    multiply(10)
    end.record()
    torch.cuda.synchronize(device)
    times = math.ceil(LOAD_MS / (start.elapsed_time(end) / 10))
    return lambda: multiply(times)


def _cuda_sample(run: Callable[[], object], device: torch.device, load: Callable[[], None]) -> tuple[bool, float]:
    """Times one call. Returns (True if the allocator did not call the driver, microseconds)."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cold = torch.empty(CLEAR_BYTES // 4, dtype=torch.int32, device=device)
    load()  # puts the host ahead of the GPU, as in a training step, so that host time is hidden
    for _ in range(2):  # clears the L2
        cold.zero_()
    allocations = _driver_allocations(device)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return _driver_allocations(device) == allocations, 1e3 * start.elapsed_time(end)


def _driver_allocations(device: torch.device) -> tuple[int, int]:
    """How often the allocator has called the driver: (allocations, frees)."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)
    return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)


def _cpu_us(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """The host's microseconds of one call."""
    start = clock()
    run()
    return 1e6 * (clock() - start)
