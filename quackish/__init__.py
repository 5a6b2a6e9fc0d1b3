"""CuTe DSL kernels for Hopper and Blackwell, called from PyTorch. Importing starts neither CUDA nor the compiler."""

import importlib
import sys
from typing import TYPE_CHECKING

from quackish import (
    interrupt,  # noqa: F401  # before torch is imported
    program,
)
from quackish._version import __version__

# A command such as `quackish --help` needs neither torch nor these, so they are imported on first use, by a reload.
_defers = program.IS_COMMAND and "_defers" not in globals()
if TYPE_CHECKING or not _defers:
    from quackish.configs.choose import config
    from quackish.emulation import emulate
    from quackish.errors import PortablePathWarning, UnsupportedError
    from quackish.ops.attention import scaled_dot_product_attention
    from quackish.ops.device import use_kernels
    from quackish.ops.grouped_mlp import grouped_mlp, grouped_mm, moe_mlp
    from quackish.ops.linear_cross_entropy import LinearCrossEntropyLoss, LinearCrossEntropyStats, linear_cross_entropy
    from quackish.ops.rms_norm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
    from quackish.profiling import profile

__all__ = [
    "LinearCrossEntropyLoss",
    "LinearCrossEntropyStats",
    "PortablePathWarning",
    "RMSNorm",
    "UnsupportedError",
    "__version__",
    "config",
    "emulate",
    "grouped_mlp",
    "grouped_mm",
    "linear_cross_entropy",
    "moe_mlp",
    "profile",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "scaled_dot_product_attention",
    "use_kernels",
]
_MODULES = "emulator", "integrations", "parallel", "testing", "types"  # public too, and loaded when they are used

if TYPE_CHECKING:
    from quackish import emulator as emulator
    from quackish import integrations as integrations
    from quackish import parallel as parallel
    from quackish import testing as testing
    from quackish import types as types
else:

    def __getattr__(name: str):
        if name in _MODULES:
            return importlib.import_module(f"quackish.{name}")
        if name in __all__ and _defers:
            return getattr(importlib.reload(sys.modules[__name__]), name)
        raise AttributeError(f"module 'quackish' has no attribute {name!r}")


def __dir__() -> list[str]:  # completion and "did you mean" show what is public
    return [*__all__, *_MODULES]
