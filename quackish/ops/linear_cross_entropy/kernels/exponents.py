"""Exponents of the logits of linear cross entropy: their bounds, and their scale in log2 units."""

import cutlass.cute as cute
from cutlass import Float32

from quackish.kernels.math import LOG2_E
from quackish.kernels.memory import load_at

# A finite stand-in for infinity, also after multiplication by LOG2_E: inf - inf would be NaN.
HUGE = 2e38
# Lower bound of log2(e) in e * log2(e): 0 * -inf would be NaN for a masked class. exp2(LEAST_LOG2) is 0 in fp32.
LEAST_LOG2 = -256.0
# A row with a logit this far above its shift is flagged. Neither exp(60) in bf16 nor a sum of 2^20 of them in fp32
# overflows.
HEADROOM = 60.0


def log2_scale(logit_scale):
    """The factor from logits to log2 units: logit_scale * log2(e).

    Kernels keep logits, row_shift and target_logit unscaled. Only exponents include logit_scale.
    """
    return LOG2_E if logit_scale is None else load_at(logit_scale, 0) * LOG2_E


def shift_in_log2(row_shift, scale_log2):
    """row_shift * scale_log2, with scale_log2 from `log2_scale`."""
    if isinstance(scale_log2, float):
        return row_shift * scale_log2
    return cute.arch.fmax(row_shift * scale_log2, Float32(-HUGE))  # -inf would give inf - inf
