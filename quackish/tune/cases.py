"""Builds launches of one kernel with any config, on data that they share."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quackish.device.choose import config
from quackish.gpu import Gpu
from quackish.tune.candidates import tuning_of
from quackish.tune.data import Run

Build = Callable[[Any], Run]  # (config) -> Run; compiles or loads the kernel, and launches once


def prepare(problem: Any, gpu: Gpu, sizes: Mapping[str, int], device: torch.device) -> Build:
    """Makes data for `problem` at `sizes` (`KernelSpec.sizes`). All runs that are built share it."""
    make_run, name = tuning_of(problem, gpu).data(problem, sizes, device), problem.spec.name_of(problem)

    def build(chosen: Any) -> Run:
        with config(**{name: chosen}):
            run = make_run()  # keeps the kernel of this config
            run()
        return run

    return build
