"""The table of kernels and the GPU families that each supports. Classes are imported on first use."""

import functools
import importlib
from typing import Any

from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

_ALL = ("sm_90", "sm_100", "sm_103")
TABLE = {  # kernel -> (module:class, supported GPU families)
    "rms_norm_fwd": ("rms_norm_fwd:RmsNormFwd", _ALL),
    "rms_norm_bwd": ("rms_norm_bwd:RmsNormBwd", _ALL),
    "lce_gemm": ("gemm_sm90:GemmSm90", ("sm_90",)),
    "grouped_gemm": ("grouped_gemm_sm90:GroupedGemmSm90", ("sm_90",)),
    "token_rows": ("token_rows:TokenRows", _ALL),
    "lce_compact": ("linear_cross_entropy.compact:LceCompact", _ALL),
    "lce_gather": ("linear_cross_entropy.gather:LceGather", _ALL),
    "lce_rows": ("linear_cross_entropy.rows:LceRows", _ALL),
    "lce_sort": ("linear_cross_entropy.sort:LceSort", _ALL),
    "lce_targets": ("linear_cross_entropy.targets:LceTargets", _ALL),
    "lce_bias": ("linear_cross_entropy.bias:LceBias", _ALL),
    "lce_scatter": ("linear_cross_entropy.scatter:LceScatter", _ALL),
    "lce_scale": ("linear_cross_entropy.scale:LceScale", _ALL),
    # around cuBLAS GEMMs, on GPUs without lce_gemm
    "lce_exp": ("linear_cross_entropy.exp:LceExp", _ALL),
    "lce_rescale": ("linear_cross_entropy.rescale:LceRescale", _ALL),
    "lce_clear": ("linear_cross_entropy.clear:LceClear", _ALL),
}
FAMILIES = frozenset(_ALL)  # GPU families with kernels


class KernelClass:
    """A kernel class that is imported when called: importing the DSL takes 0.3 s, and cached kernels do not need it."""

    def __init__(self, module: str, name: str):
        self.__module__, self.__name__, self.__qualname__ = module, name, name

    def __call__(self, problem: Any, config: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)(problem, config)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


_class = functools.cache(KernelClass)


def find(name: str, gpu: Gpu) -> KernelClass:
    """The class of kernel `name`. Raises UnsupportedError if it does not support `gpu`."""
    path, families = TABLE.get(name, ("", ()))
    if gpu.family not in families:
        supported = ", ".join(families) or "no GPU"
        op = name.removesuffix("_fwd").removesuffix("_bwd")  # the user's name for it
        raise UnsupportedError(
            f"{op}: no kernel for {gpu.family} ({gpu.name}); supported: {supported}. "
            'backend="auto" runs the portable path.'
        )
    module, _, cls = path.partition(":")
    return _class(f"{__name__}.{module}", cls)
