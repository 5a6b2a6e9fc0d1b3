"""Candidates: the legal configs near the analytical choice that are worth compiling. Plain Python, no GPU."""

import dataclasses
import math
from typing import Any

from quackish.device.choose import analytical
from quackish.device.spec import Tuning, loaded
from quackish.gpu import Gpu


def tuning_of(problem: Any, gpu: Gpu) -> Tuning:
    return loaded(problem.spec.variant(gpu).tuning)


def candidates(problem: Any, gpu: Gpu, max_others: int) -> list[Any]:
    """The analytical choice, then at most `max_others` other configs, the most similar ones first."""
    base, tuning = analytical(problem, gpu).config, tuning_of(problem, gpu)
    min_merit, why_illegal = tuning.min_merit * tuning.merit(problem, base), problem.spec.variant(gpu).why_illegal
    legal = {
        config
        for config in tuning.configs(problem, base, gpu)
        if why_illegal(problem, config, gpu) is None and tuning.merit(problem, config) >= min_merit
    }
    others = sorted(legal - {base}, key=lambda config: (_distance(config, base), repr(config)))
    return [base, *others[:max_others]]


def _distance(config: Any, base: Any) -> float:
    """The sum over fields of |log2 of the ratio|; 1 for fields that are not positive ints."""
    total = 0.0
    for field in dataclasses.fields(base):
        a, b = getattr(config, field.name), getattr(base, field.name)
        if a != b:
            are_positive_ints = isinstance(a, int) and a > 0 and b > 0
            total += abs(math.log2(a / b)) if are_positive_ints else 1.0
    return total
