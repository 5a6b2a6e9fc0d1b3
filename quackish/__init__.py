"""CuTe DSL kernels for Hopper and Blackwell, called from PyTorch. Importing starts neither CUDA nor the compiler."""

import importlib
from typing import TYPE_CHECKING

from quackish._version import __version__

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
_MODULES = "emulator", "integrations", "parallel", "testing", "types"  # public too
_HOMES = {
    "configs.choose": ["config"],
    "emulation": ["emulate"],
    "errors": ["PortablePathWarning", "UnsupportedError"],
    "ops.attention": ["scaled_dot_product_attention"],
    "ops.device": ["use_kernels"],
    "ops.grouped_mlp": ["grouped_mlp", "grouped_mm", "moe_mlp"],
    "ops.linear_cross_entropy": ["LinearCrossEntropyLoss", "LinearCrossEntropyStats", "linear_cross_entropy"],
    "ops.rms_norm": ["RMSNorm", "rms_norm", "rms_norm_backward", "rms_norm_forward"],
    "profiling": ["profile"],
}

# Names are imported when they are used: commands such as `quackish --help` do without torch, which takes seconds.
if TYPE_CHECKING:
    from quackish import emulator as emulator
    from quackish import integrations as integrations
    from quackish import parallel as parallel
    from quackish import testing as testing
    from quackish import types as types
    from quackish.configs.choose import config
    from quackish.emulation import emulate
    from quackish.errors import PortablePathWarning, UnsupportedError
    from quackish.ops.attention import scaled_dot_product_attention
    from quackish.ops.device import use_kernels
    from quackish.ops.grouped_mlp import grouped_mlp, grouped_mm, moe_mlp
    from quackish.ops.linear_cross_entropy import LinearCrossEntropyLoss, LinearCrossEntropyStats, linear_cross_entropy
    from quackish.ops.rms_norm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
    from quackish.profiling import profile
else:

    def __getattr__(name: str):
        if name in _MODULES:
            return importlib.import_module(f"quackish.{name}")
        for home, names in _HOMES.items():
            if name in names:
                value = globals()[name] = getattr(importlib.import_module(f"quackish.{home}"), name)
                return value
        raise AttributeError(f"module 'quackish' has no attribute {name!r}")


def __dir__() -> list[str]:  # interactive shells and "did you mean" show what is public
    return [*__all__, *_MODULES]
