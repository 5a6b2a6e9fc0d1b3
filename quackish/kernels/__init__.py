"""What runs where: (kernel, GPU family) -> class, imported on first use. Device code; no torch below this folder."""

import functools
import importlib
from typing import Any

from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

_HERE = {
    ("rms_norm_fwd", "sm_90"): "rms_norm_fwd:RmsNormFwd",
    ("rms_norm_fwd", "sm_100"): "rms_norm_fwd:RmsNormFwd",
    ("rms_norm_bwd", "sm_90"): "rms_norm_bwd:RmsNormBwd",
    ("rms_norm_bwd", "sm_100"): "rms_norm_bwd:RmsNormBwd",
    ("lce_gemm", "sm_90"): "gemm_sm90:GemmSm90",
    ("lce_compact", "sm_90"): "lce_compact:LceCompact",
    ("lce_compact", "sm_100"): "lce_compact:LceCompact",
    ("lce_gather", "sm_90"): "lce_gather:LceGather",
    ("lce_gather", "sm_100"): "lce_gather:LceGather",
    ("lce_rows", "sm_90"): "lce_rows:LceRows",
    ("lce_rows", "sm_100"): "lce_rows:LceRows",
    ("lce_sort", "sm_90"): "lce_sort:LceSort",
    ("lce_sort", "sm_100"): "lce_sort:LceSort",
    ("lce_targets", "sm_90"): "lce_targets:LceTargets",
    ("lce_targets", "sm_100"): "lce_targets:LceTargets",
    ("lce_bias", "sm_90"): "lce_bias:LceBias",
    ("lce_bias", "sm_100"): "lce_bias:LceBias",
    ("lce_scatter", "sm_90"): "lce_scatter:LceScatter",
    ("lce_scatter", "sm_100"): "lce_scatter:LceScatter",
    ("lce_scale", "sm_90"): "lce_scale:LceScale",
    ("lce_scale", "sm_100"): "lce_scale:LceScale",
    # between cuBLAS's GEMMs, where there is no lce_gemm
    ("lce_exp", "sm_90"): "lce_exp:LceExp",
    ("lce_exp", "sm_100"): "lce_exp:LceExp",
    ("lce_redo", "sm_90"): "lce_redo:LceRedo",
    ("lce_redo", "sm_100"): "lce_redo:LceRedo",
    ("lce_clear", "sm_90"): "lce_clear:LceClear",
    ("lce_clear", "sm_100"): "lce_clear:LceClear",
}


FAMILIES = frozenset(family for _, family in _HERE)  # of the GPUs that there are kernels for


class KernelClass:
    """Stands for a kernel's class, which it imports when it is called: with it comes the compiler, 0.3 s, and a kernel
    that is on disk does without."""

    def __init__(self, module: str, name: str):
        self.__module__, self.__name__, self.__qualname__ = module, name, name

    def __call__(self, problem: Any, config: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)(problem, config)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


_class = functools.cache(KernelClass)


def find(name: str, gpu: Gpu) -> KernelClass:
    """The class of kernel `name` for `gpu`. Raises UnsupportedError where there is none."""
    where = _HERE.get((name, gpu.family))
    if where is None:
        supported = ", ".join(family for kernel, family in _HERE if kernel == name) or "no GPU"
        op = name.removesuffix("_fwd").removesuffix("_bwd")  # what the user called
        raise UnsupportedError(
            f"{op}: no kernel for {gpu.family} ({gpu.name}); supported: {supported}. "
            'backend="auto" runs the portable path.'
        )
    module, _, cls = where.partition(":")
    return _class(f"{__name__}.{module}", cls)
