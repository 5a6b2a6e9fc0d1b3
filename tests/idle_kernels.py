"""A fake H200 on any host, with kernels that do nothing: records the launches with their problems and configs."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from quackish.device import choose
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel
from quackish.gpu import H200


class Launch(NamedTuple):
    kernel: str
    problem: Any
    config: Any


def device() -> tuple[KernelDevice, list[Launch]]:
    """The device, and the list of its launches, in order."""
    launches = []

    def kernel_for(problem, gpu):
        config = choose.choose(problem, gpu).config
        return CompiledKernel(lambda *args: launches.append(Launch(problem.spec.name, problem, config)), config)

    return KernelDevice(H200, kernel_for), launches


@contextlib.contextmanager
def on_cpu() -> Iterator[list[Launch]]:
    """Inside the block CPU tensors are on the fake H200. Returns the list of its launches."""
    idle, launches = device()
    with substitute("cpu", idle):
        yield launches
