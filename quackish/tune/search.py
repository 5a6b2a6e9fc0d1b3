"""Which of several configs is the fastest, beyond the noise.

Candidates take turns in rounds, over all shapes of the problem; fewer of them have more rounds. The last rounds are for
the verdict alone: the analytical choice runs twice in them, and the difference between its two times is the noise.
"""

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish import kernels, launch
from quackish.gpu import Gpu
from quackish.launch.compile import Request, lock, obtain
from quackish.testing.errors import error, same_bits
from quackish.testing.timing import Times, interleave
from quackish.tune.cases import Build, Run

# (rounds, calls a round, how many of the fastest go on), then rounds of the verdict.
HEATS = ((1, 5, 16), (3, 10, 3))
ROUNDS, BLOCK = 8, 10
LEAST_GAIN = 1.01  # less is not worth a row

Prepare = Callable[[], Build]  # makes the data of a shape
Timer = Callable[[Mapping[str, Run], torch.device, int, int], dict[str, Times]]


@dataclasses.dataclass(frozen=True)
class Outcome:
    config: Any  # the best; the analytical choice where none is better
    us: list[float]  # a shape: its median
    analytical_us: list[float]
    gain: float = 1.0  # times as fast as the analytical choice, the geometric mean of the shapes
    noise: float = 0.0  # of the gain: by how much the analytical choice differed from itself
    why: str = ""  # the analytical choice stays
    dropped: tuple[tuple[Any, str], ...] = ()  # configs that did not launch, or had another result


def num_steps(num_shapes: int) -> int:
    """How often `search` calls `advance`."""
    return num_shapes * (1 + len(HEATS) + ROUNDS)


def search(
    configs: Sequence[Any],
    shapes: Sequence[Prepare],
    device: torch.device,
    timer: Timer = interleave,
    advance: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """`configs` begins with the analytical choice. Raises what that one raises where it does not run."""

    def times(
        prepare: Prepare, tried: Sequence[Any], phase: str, rounds: int, block: int, turns: int
    ) -> list[list[float]]:
        """A config, then a turn: microseconds. Data lives no longer than this: two shapes' may not fit together."""
        build = prepare()
        runs = {str(i): build(config) for i, config in enumerate(tried)}
        found: list[list[float]] = [[] for _ in tried]
        for _ in range(turns):
            medians = timer(runs, device, rounds, block)
            for name, us in medians.items():
                found[int(name)].append(us.median)
            advance(phase)
        return found

    analytical, rivals = configs[0], list(configs[1:])
    dropped: dict[Any, str] = {}
    for shape in shapes:
        rivals = _sound(shape, analytical, rivals, dropped)
        advance("comparing results")
    for rounds, block, keep in HEATS:
        slowness = dict.fromkeys(rivals, 0.0)
        for shape in shapes:
            found = times(shape, [analytical, *rivals], f"{len(rivals)} candidates", rounds, block, 1)
            for rival, turns in zip(rivals, found[1:], strict=True):
                slowness[rival] += math.log(turns[0] / found[0][0])
        rivals = sorted(rivals, key=slowness.__getitem__)[:keep]
    last = [analytical, analytical, *rivals]  # timed turn by turn: a ratio's sides are at the same clocks
    found = [times(shape, last, f"the last {len(rivals)}", 1, BLOCK, ROUNDS) for shape in shapes]
    return dataclasses.replace(verdict(last, list(zip(*found, strict=True))), dropped=tuple(dropped.items()))


def _sound(prepare: Prepare, analytical: Any, rivals: Sequence[Any], dropped: dict[Any, str]) -> list[Any]:
    """The rivals that run and have the analytical choice's results; why not is put into `dropped`."""
    build = prepare()
    expected = [None if t is None else t.clone() for t in fresh(build(analytical))]
    for rival in rivals:
        try:
            difference = differs(fresh(build(rival)), expected)
        except RuntimeError as refused:
            difference = f"does not run: {refused}"
        if difference:
            dropped[rival] = difference
    return [rival for rival in rivals if rival not in dropped]


def verdict(configs: Sequence[Any], us: Sequence[Sequence[Sequence[float]]]) -> Outcome:
    """The best of `configs`, the first two being the analytical choice. `us`: a config, a shape, a turn."""
    medians = [[statistics.median(turns) for turns in shapes] for shapes in us]

    def gains(i: int) -> list[float]:
        """A turn: times as fast as the analytical choice, the geometric mean of the shapes."""
        ratios = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(us[0], us[i], strict=True)]
        return [statistics.geometric_mean(turn) for turn in zip(*ratios, strict=True)]

    noise = math.expm1(_quantile([abs(math.log(gain)) for gain in gains(1)], 0.8))
    best = stays = Outcome(configs[0], medians[0], medians[0], noise=noise, why="no other is faster")
    for i in range(2, len(configs)):
        gain = statistics.median(gains(i))
        if gain <= best.gain:
            continue
        slower = max(mine / its for mine, its in zip(medians[i], medians[0], strict=True)) - 1
        if _quantile(gains(i), 0.2) - 1 <= noise:
            doubt = f"within the noise of {_percent(noise)}"
        elif gain < LEAST_GAIN:
            doubt = "which is not worth a row"
        elif slower > LEAST_GAIN - 1:
            doubt = f"but {_percent(slower)} slower at one of the shapes"
        else:
            best = Outcome(configs[i], medians[i], medians[0], gain, noise)
            continue
        if best.why:
            best = dataclasses.replace(stays, why=f"the best other is {_percent(gain - 1)} faster, {doubt}")
    return best


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Results -------------------------------------------------------------------------------------------------------------


def fresh(run: Run) -> tuple[Tensor | None, ...]:
    """The results of one launch, from outputs that are zero."""
    for t in run():
        if t is not None:
            t.zero_()
    return run()


def differs(got: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> str | None:
    """How a candidate's results differ from the analytical choice's by more than rounding; None where they do not."""
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if (one is None) != (other is None):
            return f"result {i} is there in one case only"
        if one is None or same_bits(one, other):
            continue
        eps = torch.finfo(other.dtype).eps
        # sums of thousands in another order, in fp32; what is rounded to 16 bits then is a neighbour, at most
        norm, worst = (64 * eps, 1024 * eps) if other.dtype == torch.float32 else (eps, 4 * eps)
        rows = max(1, (1 << 26) // other.shape[-1])
        for some, others in zip(one.split(rows), other.split(rows), strict=True):
            found = error(some, others.double())
            if not found.within(norm, worst):
                return f"result {i} is another one: {found}, expected at most {norm:.2g} and {worst:.2g}"
    return None


# Spills --------------------------------------------------------------------------------------------------------------

_MOST_PROCESSES = 16


def examine(kernel: str, problem: Any, configs: Sequence[Any], gpu: Gpu) -> Iterator[bool]:
    """For each config whether it compiles without spilling registers: a second each, on all cores.

    Those are also compiled for launching. Raises FileNotFoundError without a cuobjdump.
    """
    processes = max(1, min(len(configs), len(os.sched_getaffinity(0)), _MOST_PROCESSES))
    context = multiprocessing.get_context("spawn")  # a fork would share what CUDA and the compiler have started
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        yield from pool.map(functools.partial(fits, kernel, problem, gpu=gpu), configs)


def fits(kernel: str, problem: Any, config: Any, gpu: Gpu) -> bool:
    request = Request(kernels.find(kernel, gpu), problem, config, gpu.target)
    try:
        used = launch.resources(*request)
        if used.stack_bytes or used.local_loads or used.local_stores:
            return False
        with lock:
            obtain(request)
    except RuntimeError:  # it does not compile
        return False
    return True
