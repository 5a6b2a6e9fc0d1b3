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


_ROWS, _CUBLAS = "quackish/configs/lce_rows.py", "quackish/configs/lce_cublas.py"
_WARPS = Rule(
    lce_cublas.LceWarpsConfig, lambda p, gpu: lce_cublas.LceWarpsConfig(), lce_rows.threads_why_illegal, _CUBLAS
)

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
    "lce_compact": Rule(
        lce_rows.LceCompactConfig, lambda p, gpu: lce_rows.LceCompactConfig(), lce_rows.compact_why_illegal, _ROWS
    ),
    "lce_gather": Rule(
        lce_rows.LceRowsConfig, lambda p, gpu: lce_rows.lce_gather_config(p), lce_rows.rows_why_illegal, _ROWS
    ),
    "lce_rows": Rule(lce_rows.LceRowsConfig, lambda p, gpu: lce_rows.LceRowsConfig(), lce_rows.rows_why_illegal, _ROWS),
    "lce_sort": Rule(lce_rows.LceSortConfig, lambda p, gpu: lce_rows.LceSortConfig(), lce_rows.sort_why_illegal, _ROWS),
    "lce_targets": Rule(
        lce_rows.LceTargetsConfig, lambda p, gpu: lce_rows.LceTargetsConfig(), lce_rows.targets_why_illegal, _ROWS
    ),
    "lce_bias": Rule(
        lce_rows.LceBiasConfig, lambda p, gpu: lce_rows.lce_bias_config(p), lce_rows.bias_why_illegal, _ROWS
    ),
    "lce_scatter": Rule(
        lce_rows.LceRowsConfig, lambda p, gpu: lce_rows.LceRowsConfig(), lce_rows.rows_why_illegal, _ROWS
    ),
    "lce_scale": Rule(
        lce_rows.LceScaleConfig, lambda p, gpu: lce_rows.LceScaleConfig(), lce_rows.rows_why_illegal, _ROWS
    ),
    "lce_exp": _WARPS,
    "lce_rescale": _WARPS,
    "lce_clear": _WARPS,
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
