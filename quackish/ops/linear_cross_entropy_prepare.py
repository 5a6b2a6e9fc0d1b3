"""Linear cross entropy's first call of a kind: its kernels, forward and backward, ten or so, are compiled side by side.

One by one, as each is launched, would take 5 s.
"""

import torch
from torch import Tensor

from quackish import kernels, launch
from quackish.errors import UnsupportedError
from quackish.ops.linear_cross_entropy_autograd import Inputs, Plan
from quackish.ops.linear_cross_entropy_kernels import LceKernels

_prepared: set[tuple] = set()


def prepare(inputs: Inputs, plan: Plan, grad_weight_out: Tensor | None) -> None:
    """Once for everything that kernels depend on but M: a few more may be compiled where they are used."""
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs[:3])
    tensors = (*inputs, grad_weight_out)
    of_tensors = ((t.dtype, t.shape[1:]) if isinstance(t, Tensor) else None for t in tensors)
    key = (plan, inputs.input.device, inputs.linear_weight.shape, needs, *of_tensors)
    if key in _prepared:
        return
    _prepared.add(key)
    k = LceKernels(inputs.input.device)  # one that is forgotten afterwards
    try:
        kernels.find("lce_gemm", k.gpu)
    except UnsupportedError:  # around cuBLAS's GEMMs kernels are small: all of them take 2 s
        return
    with launch.record() as recording, torch.device("meta"), torch.no_grad():
        _rehearse(k, Inputs(*map(_blank, inputs)), plan, needs, _blank(grad_weight_out))
    launch.prepare(list(recording.requests))


def _rehearse(k: LceKernels, inputs: Inputs, plan: Plan, needs: tuple[bool, ...], dw_out: Tensor | None) -> None:
    """Forward and backward on tensors without memory. No gradient arrives at an lse that is returned: few use it so."""
    wanted = plan.wanted(inputs, needs, dw_out)
    call = plan.call(inputs)
    out = plan.forward(k, call, wanted)
    if wanted.any():
        arrives = torch.empty(inputs.target.shape if plan.reduction == "none" else (), dtype=torch.float32)
        kept = out._replace(grads=type(out.grads)())
        plan.backward(k, call, kept, plan.incoming(arrives, None), wanted, dw_out)


def _blank(t: Tensor | float | None) -> Tensor | float | None:
    """Without memory, if it had any; a 0-dim one stays: whether it is on the GPU matters, and it is not read."""
    if not isinstance(t, Tensor) or t.dim() == 0:
        return t
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
