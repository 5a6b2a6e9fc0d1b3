"""A fake H200 on any host, with kernels that do nothing: records the launches with their problems and configs."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.configs import choose
from quackish.gpu import H200
from quackish.ops.device import Device, substitute
from quackish.ops.kernel_for import Kernel


class Launch(NamedTuple):
    kernel: str
    problem: Any
    config: Any


def device() -> tuple[Device, list[Launch]]:
    """The device, and the list of its launches, in order."""
    launches = []

    def kernel_for(name, problem, gpu):
        config = choose.choose(name, problem, gpu).config
        return Kernel(lambda *args: launches.append(Launch(name, problem, config)), config)

    return Device(H200, kernel_for), launches


@contextlib.contextmanager
def on_cpu() -> Iterator[list[Launch]]:
    """Inside the block CPU tensors are on the fake H200. Returns the list of its launches."""
    idle, launches = device()
    with substitute("cpu", idle):
        yield launches
