"""On which emulated GPUs tests run the kernels, and how.

A name such as "h200/late/0" has the GPU, the completion and the seed. The GPUs have 4 SMs, which makes launches small.
"""

import contextlib
import dataclasses

import pytest

import quackish
from quackish.gpu import NAMED, Gpu


def small(gpu: Gpu) -> Gpu:
    return dataclasses.replace(gpu, sm_count=4)


# The first one is for every run of the tests. Together they have both completions and two seeds for each target.
QUICK = "h200/late/0"
HOPPER = [QUICK, "h200/at_once/1", "h200/late/1", "h200/at_once/0"]
BLACKWELL = ["b200/late/0", "b200/at_once/1", "b300/late/1", "b300/at_once/0"]
ONE_EACH = [QUICK, "h200/at_once/1", "b200/late/1", "b300/at_once/0"]


def params(names: list[str], prefix: str = "", quick: tuple[str, ...] = (QUICK,)) -> list:
    """Parameters of a fixture. Those that are not `quick` are exhaustive."""
    return [pytest.param(prefix + name, marks=() if name in quick else pytest.mark.exhaustive) for name in names]


def is_emulator(name: str) -> bool:
    return "/" in name


def emulated(name: str) -> contextlib.AbstractContextManager:
    gpu, completion, seed = name.split("/")
    return quackish.emulate(small(NAMED[gpu]), completion, int(seed))
