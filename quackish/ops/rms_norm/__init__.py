"""RMSNorm.

api.py        the public functions and the module
checks.py     checks of the arguments
reference.py  the same math in PyTorch: the specification
portable.py   what runs without a kernel: PyTorch's fused kernels on a GPU, else the reference
problems.py   what the kernels compute, how they are configured, and their descriptions
kernels/      device code
plans.py      what depends on shapes and options only, computed once per kind of call; the launches
operators.py  the gradient in eager mode, and the operators for every other mode
sharding.py   how the operators shard DTensors
tools.py      what bench, explain, precompile, tune and doctor know of it; measure.py, providers.py: for bench
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Pickles of older versions have RMSNorm here."""
    if name != "RMSNorm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quackish.ops.rms_norm.api import RMSNorm

    return RMSNorm
