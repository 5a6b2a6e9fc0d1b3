"""Every kernel's rule: its analytical choice, and what makes a config illegal. By the names of kernels.find()."""

import dataclasses
from collections.abc import Callable
from typing import Any

from quackish.configs import gemm, lce_cublas, lce_rows, rms_norm
from quackish.gpu import Gpu


@dataclasses.dataclass(frozen=True)
class Rule:
    config: type
    analytical: Callable[[Any, Gpu], Any]  # (problem, gpu) -> config; UnsupportedError where there is none
    why_illegal: Callable[[Any, Any, Gpu], str | None]  # (problem, config, gpu) -> why not; None where it is legal
    where: str  # the analytical choice is written down


def _lce_rows(config: type, why_illegal: Callable, analytical: Callable | None = None) -> Rule:
    """By default the analytical choice is the config's own defaults."""
    return Rule(config, analytical or (lambda p, gpu: config()), why_illegal, "quackish/configs/lce_rows.py")


_WARPS = lce_cublas.LceWarpsConfig
_CUBLAS = Rule(_WARPS, lambda p, gpu: _WARPS(), lce_rows.threads_why_illegal, "quackish/configs/lce_cublas.py")

RULES = {
    "rms_norm_fwd": Rule(
        rms_norm.RmsNormFwdConfig,
        rms_norm.rms_norm_fwd_config,
        rms_norm.rms_norm_fwd_why_illegal,
        "rms_norm_fwd_config, quackish/configs/rms_norm.py",
    ),
    "rms_norm_bwd": Rule(
        rms_norm.RmsNormBwdConfig,
        rms_norm.rms_norm_bwd_config,
        rms_norm.rms_norm_bwd_why_illegal,
        "rms_norm_bwd_config, quackish/configs/rms_norm.py",
    ),
    "lce_gemm": Rule(gemm.GemmConfig, gemm.gemm_config, gemm.gemm_why_illegal, "gemm_config, quackish/configs/gemm.py"),
    "lce_compact": _lce_rows(lce_rows.LceCompactConfig, lce_rows.compact_why_illegal),
    "lce_gather": _lce_rows(
        lce_rows.LceRowsConfig, lce_rows.rows_why_illegal, lambda p, gpu: lce_rows.lce_gather_config(p)
    ),
    "lce_rows": _lce_rows(lce_rows.LceRowsConfig, lce_rows.rows_why_illegal),
    "lce_sort": _lce_rows(lce_rows.LceSortConfig, lce_rows.sort_why_illegal),
    "lce_targets": _lce_rows(lce_rows.LceTargetsConfig, lce_rows.targets_why_illegal),
    "lce_bias": _lce_rows(
        lce_rows.LceBiasConfig, lce_rows.bias_why_illegal, lambda p, gpu: lce_rows.lce_bias_config(p)
    ),
    "lce_scatter": _lce_rows(lce_rows.LceRowsConfig, lce_rows.rows_why_illegal),
    "lce_scale": _lce_rows(lce_rows.LceScaleConfig, lce_rows.rows_why_illegal),
    **dict.fromkeys(("lce_exp", "lce_rescale", "lce_clear"), _CUBLAS),
}

_GEMMS = {"softmax": "lce_logits", "dlogits": "lce_dlogits", "rows": "lce_dx", "store": "lce_dx"}


def name_of(kernel: str, problem: Any) -> str:
    """What users call the kernel of a problem, in `quackish.config` and `tune`."""
    if kernel == "lce_gemm":  # one kernel, four products
        return "lce_dw" if problem.live == "k" else _GEMMS[problem.epilogue]
    return kernel.replace("_fwd", "_forward").replace("_bwd", "_backward")


# User's name -> kernel.
NAMES = {name_of(kernel, None): kernel for kernel in RULES if kernel != "lce_gemm"}
NAMES |= dict.fromkeys(("lce_logits", "lce_dlogits", "lce_dx", "lce_dw"), "lce_gemm")
