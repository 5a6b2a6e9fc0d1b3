"""Runs kernels by other configs than the heuristics pick: what tests and benchmarks compare."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from quackish.ops import rms_norm_plans as plans


@contextlib.contextmanager
def rms_norm_config(direction: str, **fields: Any) -> Iterator[None]:
    """Calls of rms_norm inside the block run by the heuristics' config with `fields` replaced; "fwd" or "bwd".

    Not for several threads at once. A graph recorded outside keeps the config that it was recorded with.
    """
    name = f"rms_norm_{direction}_config"
    heuristics = getattr(plans, name)
    kept = plans._forward_plans, plans._backward_plans
    plans._forward_plans, plans._backward_plans = {}, {}
    setattr(plans, name, lambda problem, gpu: dataclasses.replace(heuristics(problem, gpu), **fields))
    try:
        yield
    finally:
        plans._forward_plans, plans._backward_plans = kept
        setattr(plans, name, heuristics)
