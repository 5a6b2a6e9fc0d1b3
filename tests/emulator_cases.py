"""On which emulated GPUs tests run the kernels, and how.

A name such as "h200/late/0" has the GPU, the completion and the seed. The GPUs have 4 SMs, which makes launches small.
"""

import contextlib
import dataclasses

import quackish
from quackish.gpu import NAMED, Gpu


def small(gpu: Gpu, sm_count: int = 4) -> Gpu:
    return dataclasses.replace(gpu, sm_count=sm_count)


# Compiling a kernel for the emulator takes seconds, so cases take turns with these names, and few run with all of them.
QUICK = "h200/late/0"  # for every run of the tests; all other names are for exhaustive tests
HOPPER = [QUICK, "h200/at_once/1"]
BLACKWELL = ["b200/late/0", "b300/at_once/1"]
ONE_EACH = [QUICK, "h200/at_once/1", "b200/late/1", "b300/at_once/0"]


def is_emulator(name: str) -> bool:
    return "/" in name


def emulated(name: str, sm_count: int = 4) -> contextlib.AbstractContextManager:
    gpu, completion, seed = name.split("/")
    return quackish.emulate(small(NAMED[gpu], sm_count), completion, int(seed))
