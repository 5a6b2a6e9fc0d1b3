"""The table of kernels and the GPU families that each supports. Classes are imported on first use."""

import importlib
from typing import Any

from quackish.errors import UnsupportedError
from quackish.gpu import FAMILIES, Gpu
from quackish.once import once


def _on_all(path: str) -> dict[str, str]:
    return dict.fromkeys(FAMILIES, path)


def _on_blackwell(path: str) -> dict[str, str]:
    return dict.fromkeys(("sm_100", "sm_103"), path)


TABLE = {  # kernel -> GPU family -> module:class
    "rms_norm_fwd": _on_all("rms_norm_fwd:RmsNormFwd"),
    "rms_norm_bwd": _on_all("rms_norm_bwd:RmsNormBwd"),
    "lce_gemm": {"sm_90": "gemm_sm90:GemmSm90", **_on_blackwell("gemm_sm100:GemmSm100")},
    "grouped_gemm": {
        "sm_90": "grouped_gemm_sm90:GroupedGemmSm90",
        **_on_blackwell("grouped_gemm_sm100:GroupedGemmSm100"),
    },
    "attention_mask": {"sm_90": "attention.mask:AttentionMask"},
    "attention_order": {"sm_90": "attention.order:AttentionOrder"},
    "attention_fwd": {"sm_90": "attention.forward_sm90:AttentionForwardSm90"},
    "attention_bwd_keys": {"sm_90": "attention.keys_sm90:AttentionKeysSm90"},
    "attention_bwd_queries": {"sm_90": "attention.queries_sm90:AttentionQueriesSm90"},
    "attention_bwd_product": {"sm_90": "attention.product_sm90:AttentionProductSm90"},
    "attention_bwd_bias": {"sm_90": "attention.bias_sm90:AttentionBiasSm90"},
    "attention_bwd_rows": {"sm_90": "attention.rows:AttentionRows"},
    "token_rows": _on_all("token_rows:TokenRows"),
    "lce_compact": _on_all("linear_cross_entropy.compact:LceCompact"),
    "lce_gather": _on_all("linear_cross_entropy.gather:LceGather"),
    "lce_rows": _on_all("linear_cross_entropy.rows:LceRows"),
    "lce_sort": _on_all("linear_cross_entropy.sort:LceSort"),
    "lce_targets": _on_all("linear_cross_entropy.targets:LceTargets"),
    "lce_bias": _on_all("linear_cross_entropy.bias:LceBias"),
    "lce_scatter": _on_all("linear_cross_entropy.scatter:LceScatter"),
    "lce_scale": _on_all("linear_cross_entropy.scale:LceScale"),
}


# GPU families whose kernels have run only in the emulator. A commit that takes one out adds the quackish-check.json of
# such a GPU, which `quackish doctor --check` writes: see docs/blackwell.md.
EMULATED_ONLY = ("sm_100", "sm_103")


class KernelClass:
    """A kernel class that is imported when called: importing the DSL takes 0.3 s, and cached kernels do not need it."""

    def __init__(self, module: str, name: str):
        self.__module__, self.__name__, self.__qualname__ = module, name, name

    def __call__(self, problem: Any, config: Any) -> Any:
        return getattr(importlib.import_module(self.__module__), self.__name__)(problem, config)

    def __repr__(self) -> str:
        return f"<{self.__module__}.{self.__name__}>"


_classes: dict[tuple[str, str], KernelClass] = {}


def find(name: str, gpu: Gpu) -> KernelClass:
    """The class of kernel `name`. Raises UnsupportedError if it does not support `gpu`."""
    paths = TABLE.get(name, {})
    op = name.removesuffix("_fwd").removesuffix("_bwd")  # the user's name for it
    if gpu.family not in paths:
        supported = ", ".join(paths) or "no GPU"
        raise UnsupportedError(
            f"{op}: no kernel for {gpu.family} ({gpu.name}); supported: {supported}. "
            'backend="auto" runs the portable path.'
        )
    module, _, cls = paths[gpu.family].partition(":")
    return once(_classes, (module, cls), KernelClass, f"{__name__}.{module}", cls)
