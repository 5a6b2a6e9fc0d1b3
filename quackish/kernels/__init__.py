"""What runs where: (kernel, GPU family) -> class, imported on first use. Device code; no torch below this folder."""

import importlib

from quackish.errors import UnsupportedError
from quackish.gpu import Gpu

_HERE = {
    ("rms_norm_fwd", "sm_90"): "rms_norm_fwd:RmsNormFwd",
    ("rms_norm_fwd", "sm_100"): "rms_norm_fwd:RmsNormFwd",
    ("rms_norm_bwd", "sm_90"): "rms_norm_bwd:RmsNormBwd",
    ("rms_norm_bwd", "sm_100"): "rms_norm_bwd:RmsNormBwd",
}


def find(name: str, gpu: Gpu) -> type:
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
    return getattr(importlib.import_module(f"{__name__}.{module}"), cls)
