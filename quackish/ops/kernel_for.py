"""(kernel, problem, GPU) -> a callable: how operations get their kernels. Dry runs and tests pass their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish import kernels, launch
from quackish.configs import choose
from quackish.gpu import Gpu


class Kernel(NamedTuple):
    launch: Callable[..., None]
    config: Any


def request_for(name: str, problem: Any, gpu: Gpu) -> launch.Request:
    """What `kernel_for` compiles or loads. Raises UnsupportedError if the table of kernels has none for the GPU."""
    return launch.Request(kernels.find(name, gpu), problem, choose.choose(name, problem, gpu).config, gpu.target)


def kernel_for(name: str, problem: Any, gpu: Gpu) -> Kernel:
    """Chooses the config of kernel `name` for `problem`, and compiles or loads the kernel. Raises as `request_for`."""
    request = request_for(name, problem, gpu)
    return Kernel(launch.get(*request), request.config)


KernelFor = Callable[[str, Any, Gpu], Kernel]
