"""Which of several configs is the fastest, beyond the noise.

Candidates take turns in rounds, over all shapes of the problem; fewer of them have more rounds. The last rounds are for
the verdict alone: the analytical choice runs twice in them, as its own rival, and how far these two come out apart is
the noise.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.testing.errors import error, same_bits
from quackish.testing.timing import Times, interleave
from quackish.tune.cases import Build, Run

# (rounds, calls a round, how many of the fastest go on), then rounds of the verdict.
HEATS = ((1, 5, 16), (3, 10, 3))
ROUNDS, BLOCK = 8, 10
LEAST_GAIN = 1.01  # less is not worth a row
AT_THE_FLOOR = 1.01  # times the floor: nothing is left to gain

Timer = Callable[[Mapping[str, Run], torch.device, int, int], dict[str, Times]]


@dataclasses.dataclass(frozen=True)
class Shape:
    prepare: Callable[[], Build]  # makes the data
    floor_us: float | None = None  # where memory is what bounds it


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
    shapes: Sequence[Shape],
    device: torch.device,
    timer: Timer = interleave,
    advance: Callable[[str], None] = lambda phase: None,
) -> Outcome:
    """`configs` begins with the analytical choice. Raises what that one raises where it does not run."""
    analytical, rivals = configs[0], list(configs[1:])
    us = []
    for shape in shapes:
        us.append(_medians(shape, {"": analytical}, device, timer, 1)[""])
        advance("the analytical choice")
    if all(shape.floor_us and time <= AT_THE_FLOOR * shape.floor_us for shape, time in zip(shapes, us, strict=True)):
        return Outcome(analytical, us, us, why="it is within 1 % of what memory allows")

    dropped: dict[Any, str] = {}
    compared = shapes[0]  # whose results are
    for rounds, block, keep in HEATS:
        slowness = dict.fromkeys(rivals, 0.0)
        for shape in shapes:
            for rival, ratio in _heat(shape, analytical, rivals, device, timer, rounds, block, compared, dropped):
                slowness[rival] += math.log(ratio)
            rivals = [rival for rival in rivals if rival not in dropped]
            advance(f"{len(rivals)} candidates")
        rivals, compared = sorted(rivals, key=slowness.__getitem__)[:keep], None
    if not rivals:
        found = Outcome(analytical, us, us, why="no other config is worth timing")
    else:
        found = _verdict(analytical, rivals, shapes, device, timer, advance)
    return dataclasses.replace(found, dropped=tuple(dropped.items()))


# Data lives as long as one call of these: two shapes' may not fit beside each other.


def _medians(shape: Shape, configs: Mapping[str, Any], device, timer: Timer, rounds: int) -> dict[str, float]:
    build = shape.prepare()
    runs = {name: build(config) for name, config in configs.items()}
    return {name: times.median for name, times in timer(runs, device, rounds, BLOCK).items()}


def _heat(
    shape: Shape, analytical: Any, rivals: Sequence[Any], device: torch.device, timer: Timer, rounds: int, block: int,
    compared: Shape | None, dropped: dict[Any, str],
) -> list[tuple[Any, float]]:  # fmt: skip
    """(rival, its time / the analytical choice's). Those that do not run, or have another result where this shape is
    the one to compare, are put into `dropped`."""
    build = shape.prepare()
    runs = {"analytical": build(analytical)}
    expected = None
    if shape is compared:
        expected = [None if t is None else t.clone() for t in _fresh(runs["analytical"])]
    for i, rival in enumerate(rivals):
        try:
            run = build(rival)
            difference = None if expected is None else differs(_fresh(run), expected)
        except RuntimeError as refused:
            difference = f"does not run: {refused}"
        if difference is None:
            runs[str(i)] = run
        else:
            dropped[rival] = difference
    times = timer(runs, device, rounds, block)
    base = times.pop("analytical").median
    return [(rivals[int(name)], of.median / base) for name, of in times.items()]


def _verdict(
    analytical: Any, rivals: Sequence[Any], shapes: Sequence[Shape], device: torch.device, timer: Timer,
    advance: Callable[[str], None],
) -> Outcome:  # fmt: skip
    """Round by round, so that what changes slowly, as clocks do, is in both sides of a ratio."""
    configs = {"analytical": analytical, "again": analytical} | {str(i): rival for i, rival in enumerate(rivals)}
    us: dict[str, list[list[float]]] = {name: [] for name in configs}  # shape -> round -> median
    for shape in shapes:
        for name, rounds in _rounds(shape, configs, device, timer, lambda: advance(f"the last {len(rivals)}")).items():
            us[name].append(rounds)
    medians = {name: [statistics.median(rounds) for rounds in of_shapes] for name, of_shapes in us.items()}
    noise = _quantile([abs(math.log(ratio)) for ratio in _ratios(us["analytical"], us["again"])], 0.8)
    noise = math.expm1(noise)
    stays = Outcome(analytical, medians["analytical"], medians["analytical"], noise=noise, why="no other is faster")

    good, gain_of_best = stays, 1.0
    for i, rival in enumerate(rivals):
        gains = _ratios(us["analytical"], us[str(i)])
        gain = statistics.median(gains)
        if gain <= gain_of_best:
            continue
        doubt = _doubt(gains, noise, medians[str(i)], medians["analytical"])
        if not doubt:
            good, gain_of_best = Outcome(rival, medians[str(i)], medians["analytical"], gain, noise), gain
        elif good.config is analytical:
            good = dataclasses.replace(stays, why=f"the best other is {_percent(gain - 1)} faster, {doubt}")
    return good


def _rounds(
    shape: Shape, configs: Mapping[str, Any], device, timer: Timer, advance: Callable[[], None]
) -> dict[str, list[float]]:
    """The medians of each round."""
    build = shape.prepare()
    runs = {name: build(config) for name, config in configs.items()}
    rounds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, times in timer(runs, device, 1, BLOCK).items():
            rounds[name].append(times.median)
        advance()
    return rounds


def _doubt(gains: Sequence[float], noise: float, us: Sequence[float], analytical_us: Sequence[float]) -> str:
    """Why a rival with these gains, a round, is not kept; "" where it is."""
    slower = max(mine / its for mine, its in zip(us, analytical_us, strict=True)) - 1
    if _quantile(gains, 0.2) - 1 <= noise:
        return f"within the noise of {_percent(noise)}"
    if statistics.median(gains) < LEAST_GAIN:
        return "which is not worth a row"
    if slower > LEAST_GAIN - 1:
        return f"but {_percent(slower)} slower at one of the shapes"
    return ""


def _ratios(first: list[list[float]], second: list[list[float]]) -> list[float]:
    """A round: first / second, the geometric mean of the shapes."""

    def ratio(r: int) -> float:
        return statistics.geometric_mean(f[r] / s[r] for f, s in zip(first, second, strict=True))

    return [ratio(r) for r in range(len(first[0]))]


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


# Results -------------------------------------------------------------------------------------------------------------


def _fresh(run: Run) -> tuple[Tensor | None, ...]:
    """The results of one launch, whatever was added up before it."""
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
