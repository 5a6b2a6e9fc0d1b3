"""Finds the fastest of several configs, if its gain exceeds the noise.

Candidates are timed in turns over all shapes of the problem. Each heat keeps the fastest, and the next one times them
for more rounds. The last rounds decide: in them the analytical choice runs twice, and the difference between its two
times is the noise.
"""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.device import compile_jobs, launch
from quackish.device.compile import Request, lock, obtain
from quackish.gpu import Gpu
from quackish.testing.errors import error, same_bits
from quackish.testing.timing import interleave
from quackish.tune.cases import Build
from quackish.tune.data import Run

# (rounds, calls per round, number of configs kept) of each heat; then the last rounds
HEATS = ((1, 5, 16), (3, 10, 3))
ROUNDS, BLOCK = 8, 10
MIN_GAIN = 1.01  # smaller gains are not stored

Prepare = Callable[[], Build]  # makes the data of a shape


@dataclasses.dataclass(frozen=True)
class Outcome:
    config: Any  # the best, which may be the analytical choice
    us: list[float]  # median of each shape
    analytical_us: list[float]
    gain: float = 1.0  # speedup over the analytical choice, geometric mean over shapes
    noise: float = 0.0  # how far two measurements of the analytical choice are apart
    why: str = ""  # why the analytical choice stays
    dropped: tuple[tuple[Any, str], ...] = ()  # configs that did not launch or gave other results, with reasons


def num_steps(num_shapes: int) -> int:
    """How often `search` calls `show`."""
    return num_shapes * (1 + len(HEATS) + ROUNDS)


def search(
    configs: Sequence[Any],
    shapes: Sequence[Prepare],
    device: torch.device,
    show: Callable[[int, str], None] = lambda done, phase: None,
) -> Outcome:
    """`configs` starts with the analytical choice. An error of that config is raised."""

    def times(
        prepare: Prepare, tried: Sequence[Any], phase: str, rounds: int, block: int, turns: int
    ) -> list[list[float]]:
        """Microseconds [config][turn]. The data is freed on return: two shapes may not fit together."""
        build = prepare()
        runs = {str(i): build(config) for i, config in enumerate(tried)}
        us: list[list[float]] = [[] for _ in tried]
        for _ in range(turns):
            for name, run_times in interleave(runs, device, rounds, block).items():
                us[int(name)].append(run_times.median)
            show(next(done), phase)
        return us

    analytical, rivals, done = configs[0], list(configs[1:]), itertools.count(1)
    dropped: dict[Any, str] = {}
    for shape in shapes:
        rivals = _with_equal_results(shape, analytical, rivals, dropped)
        show(next(done), "comparing results")
    for rounds, block, keep in HEATS:
        log_slowdown = dict.fromkeys(rivals, 0.0)
        for shape in shapes:
            us = times(shape, [analytical, *rivals], f"{len(rivals)} candidates", rounds, block, 1)
            for rival, turns in zip(rivals, us[1:], strict=True):
                log_slowdown[rival] += math.log(turns[0] / us[0][0])
        rivals = sorted(rivals, key=log_slowdown.__getitem__)[:keep]
    finalists = [analytical, analytical, *rivals]  # compared turn by turn, so at the same clocks
    us = [times(shape, finalists, f"the last {len(rivals)}", 1, BLOCK, ROUNDS) for shape in shapes]
    return dataclasses.replace(verdict(finalists, list(zip(*us, strict=True))), dropped=tuple(dropped.items()))


def _with_equal_results(prepare: Prepare, analytical: Any, rivals: Sequence[Any], dropped: dict[Any, str]) -> list[Any]:
    """The rivals that run and give the analytical choice's results. The others go into `dropped` with a reason."""
    build = prepare()
    expected = [None if t is None else t.clone() for t in results_of(build(analytical))]
    for rival in rivals:
        try:
            difference = differs(results_of(build(rival)), expected)
        except RuntimeError as error:
            difference = f"does not run: {error}"
        if difference:
            dropped[rival] = difference
    return [rival for rival in rivals if rival not in dropped]


def verdict(configs: Sequence[Any], us: Sequence[Sequence[Sequence[float]]]) -> Outcome:
    """The best of `configs`, the first two of which are the analytical choice. `us`: [config][shape][turn]."""
    medians = [[statistics.median(turns) for turns in shapes] for shapes in us]

    def gains(i: int) -> list[float]:
        """Speedup over the analytical choice in each turn, geometric mean over shapes."""
        ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(us[0], us[i], strict=True)]
        return [statistics.geometric_mean(turn) for turn in zip(*ratios, strict=True)]

    noise = math.expm1(_quantile([abs(math.log(gain)) for gain in gains(1)], 0.8))
    best = unchanged = Outcome(configs[0], medians[0], medians[0], noise=noise, why="no candidate is faster")
    for i in range(2, len(configs)):
        gain = statistics.median(gains(i))
        if gain <= best.gain:
            continue
        slower = max(us / analytical_us for us, analytical_us in zip(medians[i], medians[0], strict=True)) - 1
        if _quantile(gains(i), 0.2) - 1 <= noise:
            doubt = f"within the noise of {_percent(noise)}"
        elif gain < MIN_GAIN:
            doubt = "too little to store"
        elif slower > MIN_GAIN - 1:
            doubt = f"but {_percent(slower)} slower at one of the shapes"
        else:
            best = Outcome(configs[i], medians[i], medians[0], gain, noise)
            continue
        if best.why:
            best = dataclasses.replace(unchanged, why=f"the best candidate is {_percent(gain - 1)} faster, {doubt}")
    return best


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def results_of(run: Run) -> tuple[Tensor | None, ...]:
    """The results of one launch with zeroed outputs."""
    for t in run():
        if t is not None:
            t.zero_()
    return run()


def differs(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> str | None:
    """How results differ from the expected ones by more than rounding; None if they do not."""
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        if same_bits(a, b):  # or both None, which depends only on the problem
            continue
        infinite = b.isinf()  # lse of rows without keys
        if torch.equal(a[infinite], b[infinite]):
            a, b = a.masked_fill(infinite, 0), b.masked_fill(infinite, 0)
        eps = torch.finfo(b.dtype).eps
        # fp32 sums over thousands of elements in another order; rounded to 16 bits, they differ by one step at most
        norm, worst = (64 * eps, 1024 * eps) if b.dtype == torch.float32 else (eps, 4 * eps)
        rows = max(1, (1 << 26) // b.shape[-1])
        for part, expected_part in zip(a.split(rows), b.split(rows), strict=True):
            off = error(part, expected_part.double())
            if not off.within(norm, worst):
                return f"result {i} is wrong: {off}, expected at most {norm:.2g} and {worst:.2g}"
    return None


def examine(problem: Any, configs: Sequence[Any], gpu: Gpu) -> Iterator[bool]:
    """True for each config that compiles without spilling registers. Takes about a second per config, on all cores.

    Kernels of those configs are also stored in the cache. Raises FileNotFoundError without cuobjdump.
    """
    processes = max(1, compile_jobs.default_jobs(len(configs)))
    context = multiprocessing.get_context("spawn")  # CUDA and the compiler do not survive a fork
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        with compile_jobs.defer_interrupts():  # starts the processes
            fitting = pool.map(functools.partial(fits, problem, gpu=gpu), configs)
        yield from fitting


def fits(problem: Any, config: Any, gpu: Gpu) -> bool:
    request = Request(problem.spec.kernel_class(gpu), problem, config, gpu.target)
    try:
        used = launch.resources(*request)
        if used.stack_bytes or used.local_loads or used.local_stores:
            return False
        with lock:
            obtain(request)
    except RuntimeError:  # it does not compile
        return False
    return True
