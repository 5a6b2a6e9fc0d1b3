"""Providers of RMSNorm: quackish and every peer, each at its best public entry point.

Every forward returns y and rstd, every backward the finished dx and dweight; none modifies its inputs. Peers are
imported on first use, and their kernels compile in the first call.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.bench import torch_kernel
from quackish.bench.cells import OURS
from quackish.bench.measure import imported
from quackish.ops.rms_norm.tools import EPS


class Provider(NamedTuple):
    forward: Callable[..., tuple[Tensor, Tensor]] | None  # (x, weight) -> (y, rstd)
    backward: Callable[..., tuple[Tensor, Tensor]]  # (dy, x, weight, rstd) -> (dx, dweight)
    note: str = ""


def _quackish() -> Provider:
    from quackish.ops.rms_norm.api import rms_norm_backward, rms_norm_forward

    def forward(x, weight):
        y, _, rstd = rms_norm_forward(x, weight, eps=EPS)
        return y, rstd

    def backward(dy, x, weight, rstd):
        return rms_norm_backward(dy, x, weight, rstd)[:2]

    return Provider(forward, backward)


def _quack() -> Provider:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    # rmsnorm_bwd runs the kernel, the sum of the partial dweights and the cast, as QuACK's autograd function does.
    def forward(x, weight):
        y, _, rstd = rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)
        return y, rstd

    def backward(dy, x, weight, rstd):
        return rmsnorm_bwd(x, weight, dy, rstd)[:2]

    return Provider(forward, backward)


def _liger_cute() -> Provider:
    # What liger_kernel.functional.rms_norm(..., impl="nvidia-cutedsl") runs. Forward and backward alone are not public.
    from liger_kernel.ops._nvidia_shared import CASTING_MODE_LLAMA
    from liger_kernel.ops.backends._cutedsl.rms_norm import _rms_norm_cutedsl_backward, _rms_norm_cutedsl_forward

    def forward(x, weight):
        y, _, _, rstd = _rms_norm_cutedsl_forward(x, weight, EPS, 0.0, CASTING_MODE_LLAMA)
        return y, rstd

    def backward(dy, x, weight, rstd):
        dx, dweight = _rms_norm_cutedsl_backward(dy, x, weight, rstd, False, CASTING_MODE_LLAMA)
        return dx, dweight.to(weight.dtype)

    return Provider(forward, backward)


def _liger_triton() -> Provider:
    from liger_kernel.ops._nvidia_shared import CASTING_MODE_LLAMA
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward
    from liger_kernel.ops.utils import calculate_settings

    def forward(x, weight):
        y, _, rstd, *_ = rms_norm_forward(x, weight, EPS, 0.0, CASTING_MODE_LLAMA, None)
        return y, rstd

    def backward(dy, x, weight, rstd):
        # in_place=False as in liger_kernel.functional.rms_norm: True would overwrite dy and save a fill of dx.
        settings = calculate_settings(x.shape[-1])
        return rms_norm_backward(dy, x, weight, rstd, 0.0, CASTING_MODE_LLAMA, *settings, False, None)

    return Provider(forward, backward)


def _torch() -> Provider:
    def forward(x, weight):
        return torch.ops.aten._fused_rms_norm(x, [x.shape[-1]], weight, EPS)

    def backward(dy, x, weight, rstd):
        n = x.shape[-1]
        if not x.is_cuda:  # the fused backward is CUDA only
            leaves = [t.detach().requires_grad_() for t in (x, weight)]
            return torch.autograd.grad(torch.nn.functional.rms_norm(leaves[0], (n,), leaves[1], EPS), leaves, dy)
        return torch.ops.aten._fused_rms_norm_backward(dy, x, [n], rstd.view(-1, 1), weight, [True, True])

    return Provider(forward, backward, torch_kernel.note())


# quackish comes first: importing QuACK patches the DSL's tensor classes, which must not reach what quackish compiles.
PROVIDERS: dict[str, Callable[[], Provider]] = {
    OURS: _quackish,
    "quack": _quack,
    "liger-cute": _liger_cute,
    "liger-triton": _liger_triton,
    "torch": _torch,
}


def load(name: str) -> Provider:
    """The provider `name`, or the user's pair "module:attribute"."""
    if ":" in name:
        return Provider(*imported(name))
    return PROVIDERS[name]()
