"""How a GPU gets its kernels: (kernel, problem, GPU) -> callable. Substitutes of `device.py` have their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish import kernels, launch
from quackish.configs import choose
from quackish.gpu import Gpu


class Kernel(NamedTuple):
    launch: Callable[..., None]
    config: Any


def request_for(name: str, problem: Any, gpu: Gpu) -> launch.Request:
    """The request that `kernel_for` compiles or loads. UnsupportedError if the table has no kernel for the GPU."""
    return launch.Request(kernels.find(name, gpu), problem, choose.choose(name, problem, gpu).config, gpu.target)


def kernel_for(name: str, problem: Any, gpu: Gpu) -> Kernel:
    """Chooses a config for `problem`, and compiles or loads kernel `name`. Raises as `request_for`."""
    request = request_for(name, problem, gpu)
    return Kernel(launch.get(*request), request.config)


KernelFor = Callable[[str, Any, Gpu], Kernel]
