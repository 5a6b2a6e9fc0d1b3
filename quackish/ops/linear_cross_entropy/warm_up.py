"""Linear cross entropy's first call of a kind: its kernels, forward and backward, ten or so, are compiled side by side.

One by one, as each is launched, would take 5 s.
"""

from typing import Any

import torch
from torch import Tensor

from quackish import launch
from quackish.gpu import Gpu
from quackish.ops.kernel_for import Kernel, request_for
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.autograd import call_of, grads_needed, incoming, kernels_on
from quackish.ops.linear_cross_entropy.calls import Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels

_prepared: set[tuple] = set()


def prepare(inputs: Inputs, plan: Plan) -> None:
    """Once for everything that kernels depend on; a kernel or two that depend on M may be compiled when used."""
    x, w, bias, target, weight, scale, items, out = inputs
    m, (v, h), aligned = target.numel(), w.shape, _is_aligned(x, plan.compute_dtype)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (x, w, bias))
    needed = grads_needed(inputs, plan, needs)
    lay = schedules.forward_layout(plan, m, v, h, needed, out is None, True)
    key = (
        plan._replace(ignore_index=0, label_smoothing=plan.label_smoothing > 0, softcap=plan.softcap is None, z_loss=0),
        x.device, v, h, needs, m > lay.chunk_rows, lay.columns > 0, lay.dw_block > 0, aligned,
        tuple(None if t is None else t.dtype for t in (x, w, bias, target, weight, out)),
        None if out is None else out.stride(),
        scale is None, None if items is None else isinstance(items, Tensor) and items.is_cuda,
    )  # fmt: skip
    if key in _prepared:
        return
    _prepared.add(key)
    requests: dict[launch.Request, None] = {}  # an ordered set

    def noted(name: str, problem: Any, gpu: Gpu) -> Kernel:
        request = request_for(name, problem, gpu)
        requests[request] = None
        return Kernel(lambda *args: None, request.config)

    k = kernels_on(x.device, kernel_for=noted)
    if isinstance(k, CublasKernels):  # its kernels are small: all of them compile in 2 s
        return
    blank_x = _blank((m, h), (h if aligned else h + 1, 1), x.dtype)
    w, bias, weight, out = (None if t is None else _blank(t.shape, t.stride(), t.dtype) for t in (w, bias, weight, out))
    scale = None if scale is None else _blank((), (), torch.float32)
    with torch.no_grad():  # num_items stays: whether it is on the GPU matters
        target = _blank((m,), (1,), target.dtype)
        _rehearse(k, Inputs(blank_x, w, bias, target, weight, scale, items, out), plan, needed)
    launch.prepare(list(requests))


def _is_aligned(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row starts on 16 bytes: of a copy, which `call_of` makes where it must, it does."""
    if x.dtype != dtype or x.stride(-1) != 1:
        return True
    stride = x.stride(-2) if x.dim() > 1 else 0
    return (x.data_ptr() | stride * x.itemsize) % 16 == 0


def _blank(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _rehearse(k, inputs: Inputs, plan: Plan, needed: GradsNeeded) -> None:
    """Forward and backward on tensors without memory. No gradient arrives at an lse that is returned: few use it so."""
    call = call_of(inputs, plan, k)
    kept = schedules.forward(call, needed)._replace(grads=Grads())
    if needed.any():
        shape, strides = (inputs.target.shape, (1,)) if plan.reduction == "none" else ((), ())
        grad = _blank(shape, strides, torch.float32)
        schedules.backward(call_of(inputs, plan, k, call.state, *incoming(plan, grad, None)), kept, needed)
