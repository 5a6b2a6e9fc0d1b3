"""Compiles all kernels of a call in parallel: about ten, which take 5 s one by one."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.device import launch
from quackish.device.kernel_device import KernelDevice, empty_on
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.autograd import grads_needed, prepare_call, prepare_grads, requires_grad
from quackish.ops.linear_cross_entropy.calls import GradOutputs, Grads, GradsNeeded, Plan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.launches import LceKernels, representatives

_empty = empty_on("meta")
_lock = threading.Lock()


def prepare(inputs: Inputs, plan: Plan, device: KernelDevice) -> None:
    """Compiles the kernels of forward and backward, once per key. May miss one or two kernels that depend on M."""
    if device.prepare is None:
        return
    x, w, out = inputs.input, inputs.linear_weight, inputs.grad_weight_out
    m, (v, h), is_aligned = inputs.target.numel(), w.shape, _is_aligned(x, plan.compute_dtype)
    needs = requires_grad(inputs)
    needed = grads_needed(inputs, plan, needs)
    layout = schedules.forward_layout(plan, m, v, h, needed, out is None, True)
    # kernels read numbers that are tensors on the device
    tensors = {name: t for name, t in inputs._asdict().items() if isinstance(t, Tensor) and t.device == x.device}
    key = (
        plan._replace(ignore_index=0, label_smoothing=plan.label_smoothing > 0, softcap=plan.softcap is None, z_loss=0),
        v, h, *needs, m > layout.chunk_rows, layout.columns > 0, layout.dw_block > 0, is_aligned,
        *((name, t.dtype) for name, t in tensors.items() if name != "logit_scale"),
        None if out is None else out.stride(), inputs.logit_scale is None, inputs.num_items is None,
    )  # fmt: skip
    prepared = device.cache.setdefault("linear_cross_entropy.prepared", set())
    with _lock:  # another thread with the same key waits for its kernels
        if key not in prepared:
            _compile_kernels(device, inputs, plan, needed, tensors, is_aligned)
            prepared.add(key)


def _compile_kernels(
    device: KernelDevice, inputs: Inputs, plan: Plan, needed: GradsNeeded, tensors: dict[str, Tensor], is_aligned: bool
) -> None:
    x, m, h = inputs.input, inputs.target.numel(), inputs.linear_weight.shape[1]
    requests: dict[launch.Request, None] = {}  # an ordered set

    def record_request(problem: Any, gpu: Gpu) -> CompiledKernel:
        request = request_for(problem, gpu)
        requests[request] = None
        return CompiledKernel(lambda *args: None, request.config)

    def loop(items: Sequence[Any]) -> Iterator[Any]:
        return (item for item, _ in representatives(items))

    kernels = LceKernels(KernelDevice(device.gpu, record_request, _empty), loop)
    inputs = inputs._replace(**{name: _empty(t.shape, t.stride(), t.dtype) for name, t in tensors.items()})
    inputs = inputs._replace(
        input=_empty((m, h), (h if is_aligned else h + 1, 1), x.dtype),
        target=_empty((m,), (1,), inputs.target.dtype),
        logit_scale=None if inputs.logit_scale is None else _empty((), (), torch.float32),
    )
    with torch.no_grad():
        _dry_run(kernels, inputs, plan, needed)
    device.prepare(list(requests))


def _is_aligned(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether each row of x starts on 16 bytes in `prepare_call`'s result."""
    if x.dtype != dtype or x.stride(-1) != 1:  # copied
        return True
    stride = x.stride(-2) if x.dim() > 1 else 0
    return (x.data_ptr() | stride * x.itemsize) % 16 == 0


def _dry_run(kernels, inputs: Inputs, plan: Plan, needed: GradsNeeded) -> None:
    """Runs forward and backward on meta tensors, with a gradient of the loss only, as in most training."""
    call = prepare_call(inputs, plan, kernels)
    saved = schedules.forward(call, needed)._replace(grads=Grads())
    if needed.any():
        shape, strides = (inputs.target.shape, (1,)) if plan.reduction == "none" else ((), ())
        grad = _empty(shape, strides, torch.float32)
        grad_outputs = prepare_grads(plan, GradOutputs(grad))
        schedules.backward(prepare_call(inputs, plan, kernels, call.state, grad_outputs), saved, needed)
