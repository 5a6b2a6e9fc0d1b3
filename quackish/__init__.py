"""CuTe DSL kernels for Hopper, and emulated ones for Blackwell. Importing starts neither CUDA nor the compiler."""

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
    "linear_divergence",
    "mlp",
    "moe_mlp",
    "profile",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rotary",
    "scaled_dot_product_attention",
    "use_kernels",
]
_MODULES = "configs", "emulator", "integrations", "parallel", "testing", "types"  # public too
_HOMES = {
    "device.choose": ["config"],
    "emulation": ["emulate"],
    "errors": ["PortablePathWarning", "UnsupportedError"],
    "ops.attention.api": ["scaled_dot_product_attention"],
    "device.kernel_device": ["use_kernels"],
    "ops.mlp.api": ["grouped_mlp", "grouped_mm"],
    "ops.mlp.dense": ["mlp"],
    "ops.mlp.moe": ["moe_mlp"],
    "ops.linear_cross_entropy.api": ["LinearCrossEntropyLoss", "linear_cross_entropy"],
    "ops.linear_cross_entropy.reference": ["LinearCrossEntropyStats"],
    "ops.linear_divergence.api": ["linear_divergence"],
    "ops.rms_norm.api": ["RMSNorm", "rms_norm", "rms_norm_backward", "rms_norm_forward"],
    "ops.rotary.api": ["rotary"],
    "profiling": ["profile"],
}

# Names are imported when they are used: commands such as `quackish --help` do without torch, which takes seconds.
if TYPE_CHECKING:
    from quackish import configs as configs
    from quackish import emulator as emulator
    from quackish import integrations as integrations
    from quackish import parallel as parallel
    from quackish import testing as testing
    from quackish import types as types
    from quackish.device.choose import config
    from quackish.device.kernel_device import use_kernels
    from quackish.emulation import emulate
    from quackish.errors import PortablePathWarning, UnsupportedError
    from quackish.ops.attention.api import scaled_dot_product_attention
    from quackish.ops.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy
    from quackish.ops.linear_cross_entropy.reference import LinearCrossEntropyStats
    from quackish.ops.linear_divergence.api import linear_divergence
    from quackish.ops.mlp.api import grouped_mlp, grouped_mm
    from quackish.ops.mlp.dense import mlp
    from quackish.ops.mlp.moe import moe_mlp
    from quackish.ops.rms_norm.api import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
    from quackish.ops.rotary.api import rotary
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
