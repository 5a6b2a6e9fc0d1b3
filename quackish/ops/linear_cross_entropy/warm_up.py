"""Linear cross entropy's first call of a kind: its kernels, forward and backward, ten or so, are compiled side by side.

One by one, as each is launched, would take 5 s.
"""

from typing import Any

import torch
from torch import Tensor

from quackish import launch
from quackish.configs.linear_cross_entropy import even_chunks
from quackish.gpu import Gpu
from quackish.ops.kernel_for import Kernel, request_for
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.autograd import call_of, grads_needed, incoming, kernels_on
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.schedules import KernelPlan

_MAX_PREPARED = 1024  # then some is rehearsed again
_prepared: set[tuple] = set()


def prepare(inputs: Inputs, plan: KernelPlan) -> None:
    """Once for everything that kernels depend on; a kernel or two that depend on M may be compiled when used."""
    m, (v, h), out, items = inputs.target.numel(), inputs.linear_weight.shape, inputs.grad_weight_out, inputs.num_items
    aligned = _is_aligned(inputs.input, plan.compute_dtype)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in inputs[:3])
    needed = grads_needed(inputs, plan, needs)
    lay = schedules.forward_layout(plan, m, v, h, needed, out is None, True)
    key = (
        plan._replace(ignore_index=0, label_smoothing=plan.label_smoothing > 0, softcap=plan.softcap is None, z_loss=0),
        inputs.input.device, v, h, needs, m > lay.chunk_rows, lay.columns > 0, lay.dw_block > 0, aligned,
        tuple(None if t is None else t.dtype for t in (*inputs[:5], out)),
        None if out is None else out.stride(),
        None if items is None else isinstance(items, Tensor) and items.is_cuda,
    )  # fmt: skip
    if key in _prepared:
        return
    if len(_prepared) >= _MAX_PREPARED:
        _prepared.clear()
    _prepared.add(key)
    requests: dict[launch.Request, None] = {}  # an ordered set

    def noted(name: str, problem: Any, gpu: Gpu) -> Kernel:
        request = request_for(name, problem, gpu)
        requests[request] = None
        return Kernel(lambda *args: None, request.config)

    k = kernels_on(inputs.input.device, kernel_for=noted)
    if isinstance(k, CublasKernels):  # its kernels are small: all of them compile in 2 s
        return
    m, plan = _two_chunks(m, plan)
    with torch.no_grad():
        _rehearse(k, _blank_inputs(inputs, m, aligned), plan, needs)
    launch.prepare(list(requests))


def _is_aligned(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row starts on 16 bytes: of a copy, which `call_of` makes where it must, it does."""
    if x.dtype != dtype or x.stride(-1) != 1:
        return True
    stride = x.stride(-2) if x.dim() > 1 else 0
    return (x.data_ptr() | stride * x.itemsize) % 16 == 0


def _two_chunks(m: int, plan: KernelPlan) -> tuple[int, KernelPlan]:
    """Two chunks stand for several: the second and all later ones add to what is there.

    They have all rows, unless backward runs in chunks too: its kernels depend on the rows of a chunk.
    """
    if m <= plan.chunk_rows:
        return m, plan
    if plan.dw_in_chunks:
        return min(m, 2 * even_chunks(m, plan.chunk_rows)), plan
    return m, plan._replace(chunk_rows=max(plan.chunk_rows, even_chunks(m, -(-m // 2))))


def _rehearse(k, inputs: Inputs, plan: KernelPlan, needs: tuple[bool, ...]) -> None:
    """Forward and backward on tensors without memory. No gradient arrives at an lse that is returned: few use it so."""
    call, needed = call_of(inputs, plan, k), grads_needed(inputs, plan, needs)
    kept = schedules.forward(call, needed)._replace(grads=schedules.Grads())
    if needed.any():
        grad = torch.empty(inputs.target.shape if plan.reduction == "none" else (), dtype=torch.float32, device="meta")
        call = call_of(inputs, plan, k, call.state, *incoming(plan, grad, None))
        schedules.backward(call, kept, needed)


def _blank_inputs(inputs: Inputs, m: int, aligned: bool) -> Inputs:
    x, w, bias, target, weight, num_items, dw_out = inputs  # num_items stays: whether it is on the GPU matters
    h = w.shape[1]
    blank_x = torch.empty_strided((m, h), (h if aligned else h + 1, 1), dtype=x.dtype, device="meta")
    blank_target = torch.empty_strided((m,), (1,), dtype=target.dtype, device="meta")
    return Inputs(blank_x, _blank(w), _blank(bias), blank_target, _blank(weight), num_items, _blank(dw_out))


def _blank(t: Tensor | None) -> Tensor | None:
    """Without memory."""
    return None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
