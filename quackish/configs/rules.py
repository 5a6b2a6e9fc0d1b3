"""Every kernel's rule: its analytical choice, and what makes a config illegal. By the names of kernels.find()."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quackish.configs import gemm, lce_cublas, lce_rows, rms_norm
from quackish.gpu import Gpu


class Rule(NamedTuple):
    config: type
    why_illegal: Callable[[Any, Any, Gpu], str | None]  # (problem, config, gpu) -> why not; None where it is legal
    rule: Callable[[Any, Gpu], Any] | None = None  # (problem, gpu) -> config; None: the config's defaults, always

    def analytical(self, problem: Any, gpu: Gpu) -> Any:
        """Raises UnsupportedError where there is none."""
        return self.config() if self.rule is None else self.rule(problem, gpu)

    @property
    def where(self) -> str:
        """The file that has the analytical choice."""
        return f"{self.config.__module__.replace('.', '/')}.py"


_CUBLAS = Rule(lce_cublas.LceWarpsConfig, lce_rows.threads_why_illegal)
RULES = {
    "rms_norm_fwd": Rule(rms_norm.RmsNormFwdConfig, rms_norm.rms_norm_fwd_why_illegal, rms_norm.rms_norm_fwd_config),
    "rms_norm_bwd": Rule(rms_norm.RmsNormBwdConfig, rms_norm.rms_norm_bwd_why_illegal, rms_norm.rms_norm_bwd_config),
    "lce_gemm": Rule(gemm.GemmConfig, gemm.gemm_why_illegal, gemm.gemm_config),
    "lce_compact": Rule(lce_rows.LceCompactConfig, lce_rows.compact_why_illegal),
    "lce_gather": Rule(lce_rows.LceRowsConfig, lce_rows.rows_why_illegal, lambda p, gpu: lce_rows.lce_gather_config(p)),
    "lce_rows": Rule(lce_rows.LceRowsConfig, lce_rows.rows_why_illegal),
    "lce_sort": Rule(lce_rows.LceSortConfig, lce_rows.sort_why_illegal),
    "lce_targets": Rule(lce_rows.LceTargetsConfig, lce_rows.targets_why_illegal),
    "lce_bias": Rule(lce_rows.LceBiasConfig, lce_rows.bias_why_illegal, lambda p, gpu: lce_rows.lce_bias_config(p)),
    "lce_scatter": Rule(lce_rows.LceRowsConfig, lce_rows.rows_why_illegal),
    "lce_scale": Rule(lce_rows.LceScaleConfig, lce_rows.rows_why_illegal),
    "lce_exp": _CUBLAS,
    "lce_rescale": _CUBLAS,
    "lce_clear": _CUBLAS,
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
