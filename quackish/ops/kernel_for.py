"""(kernel, problem, GPU) -> a callable: how operations get their kernels. Dry runs and tests pass their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish import kernels, launch
from quackish.configs import choose
from quackish.gpu import Gpu


class Kernel(NamedTuple):
    launch: Callable[..., None]
    config: Any


def kernel_for(name: str, problem: Any, gpu: Gpu) -> Kernel:
    """Chooses the config of kernel `name` for `problem`, and compiles or loads the kernel.

    Raises UnsupportedError if the table of kernels has none for the GPU.
    """
    kernel_class = kernels.find(name, gpu)
    config = choose.choose(name, problem, gpu).config
    return Kernel(launch.get(kernel_class, problem, config, gpu.target), config)


KernelFor = Callable[[str, Any, Gpu], Kernel]
