"""How a GPU gets its kernels: (problem, GPU) -> callable. Substitutes of `kernel_device.py` have their own."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish.device import choose, launch
from quackish.gpu import Gpu


class CompiledKernel(NamedTuple):
    """A kernel that is ready to launch."""

    launch: Callable[..., None]  # (arguments, stream)
    config: Any


def request_for(problem: Any, gpu: Gpu) -> launch.Request:
    """The request that `kernel_for` compiles or loads. Raises UnsupportedError if no kernel covers it."""
    return launch.Request(problem.spec.kernel_class(gpu), problem, choose.choose(problem, gpu).config, gpu.target)


def kernel_for(problem: Any, gpu: Gpu) -> CompiledKernel:
    """Chooses a config for `problem`, and compiles or loads its kernel. Raises what `request_for` raises."""
    request = request_for(problem, gpu)
    return CompiledKernel(launch.get(*request), request.config)


KernelFor = Callable[[Any, Gpu], CompiledKernel]
