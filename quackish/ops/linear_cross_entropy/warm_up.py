"""Compiles all kernels of a call in parallel: about ten, which take 5 s one by one."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish import launch
from quackish.gpu import Gpu
from quackish.ops.device import Device
from quackish.ops.kernel_for import Kernel, request_for
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.autograd import (
    flatten_grad_outputs,
    grads_needed,
    make_kernels,
    prepare_call,
    requires_grad,
)
from quackish.ops.linear_cross_entropy.calls import Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.cublas import CublasKernels
from quackish.ops.linear_cross_entropy.launches import representatives


def prepare(inputs: Inputs, plan: Plan, device: Device) -> None:
    """Compiles the kernels of forward and backward, once per key. May miss one or two kernels that depend on M."""
    if device.prepare is None:
        return
    x, w, bias, target, weight, scale, items, out = inputs
    m, (v, h), is_aligned = target.numel(), w.shape, _is_aligned(x, plan.compute_dtype)
    needs = requires_grad(inputs)
    needed = grads_needed(inputs, plan, needs)
    layout = schedules.forward_layout(plan, m, v, h, needed, out is None, True)
    key = (
        plan._replace(ignore_index=0, label_smoothing=plan.label_smoothing > 0, softcap=plan.softcap is None, z_loss=0),
        v, h, *needs, m > layout.chunk_rows, layout.columns > 0, layout.dw_block > 0, is_aligned,
        tuple(None if t is None else t.dtype for t in (x, w, bias, target, weight, out)),
        None if out is None else out.stride(),
        scale is None, None if items is None else isinstance(items, Tensor) and items.is_cuda,
    )  # fmt: skip
    prepared = device.cache.setdefault("linear_cross_entropy.prepared", set())
    if key in prepared:
        return
    prepared.add(key)
    requests: dict[launch.Request, None] = {}  # an ordered set

    def record_request(name: str, problem: Any, gpu: Gpu) -> Kernel:
        request = request_for(name, problem, gpu)
        requests[request] = None
        return Kernel(lambda *args: None, request.config)

    def loop(items: Sequence[Any]) -> Iterator[Any]:
        return (item for item, _ in representatives(items))

    kernels = make_kernels(Device(device.gpu, record_request), loop)
    if isinstance(kernels, CublasKernels):  # small kernels: all compile in 2 s
        return
    meta_x = _meta_tensor((m, h), (h if is_aligned else h + 1, 1), x.dtype)
    w, bias, weight, out = (
        None if t is None else _meta_tensor(t.shape, t.stride(), t.dtype) for t in (w, bias, weight, out)
    )
    scale = None if scale is None else _meta_tensor((), (), torch.float32)
    with torch.no_grad():  # num_items stays, because kernels depend on whether it is on the GPU
        target = _meta_tensor((m,), (1,), target.dtype)
        _dry_run(kernels, Inputs(meta_x, w, bias, target, weight, scale, items, out), plan, needed)
    device.prepare(list(requests))


def _is_aligned(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row of x starts on 16 bytes in `prepare_call`'s result."""
    if x.dtype != dtype or x.stride(-1) != 1:  # copied
        return True
    stride = x.stride(-2) if x.dim() > 1 else 0
    return (x.data_ptr() | stride * x.itemsize) % 16 == 0


def _meta_tensor(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def _dry_run(kernels, inputs: Inputs, plan: Plan, needed: GradsNeeded) -> None:
    """Runs forward and backward on meta tensors, with a gradient of the loss only, as in most training."""
    call = prepare_call(inputs, plan, kernels)
    saved = schedules.forward(call, needed)._replace(grads=Grads())
    if needed.any():
        shape, strides = (inputs.target.shape, (1,)) if plan.reduction == "none" else ((), ())
        grad = _meta_tensor(shape, strides, torch.float32)
        grad_outputs = flatten_grad_outputs(plan, grad, None)
        schedules.backward(prepare_call(inputs, plan, kernels, call.state, *grad_outputs), saved, needed)
