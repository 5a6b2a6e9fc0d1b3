"""Compiles all kernels of a call in parallel: about ten, which take 5 s one by one."""

import threading
from typing import Any

import torch
from torch import Tensor

from quackish.device import launch
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy import schedules
from quackish.ops.linear_cross_entropy.calls import Call
from quackish.ops.linear_cross_entropy.dry_run import DryRun, empty, isolated

_lock = threading.Lock()


def prepare(call: Call) -> None:
    """Compiles the kernels of forward and backward, once per key. May miss one or two kernels that depend on M."""
    inputs, plan, needed, device = call.inputs, call.plan, call.needed, call.kernels.device
    if device.prepare is None:
        return
    m, (v, h), out = inputs.target.numel(), inputs.linear_weight.shape, inputs.grad_weight_out
    layout = schedules.forward_layout(plan, m, v, h, needed, out is None, True)
    key = (
        plan._replace(ignore_index=0, label_smoothing=plan.label_smoothing > 0, softcap=plan.softcap is None, z_loss=0),
        v, h, *needed.as_bools(), m > layout.chunk_rows, layout.columns > 0, layout.dw_block > 0, is_aligned(call),
        *((name, t.dtype) for name, t in device_tensors(call).items() if name != "logit_scale"),
        None if out is None else out.stride(), inputs.logit_scale is None, inputs.num_items is None,
    )  # fmt: skip
    prepared = device.cache.setdefault("linear_cross_entropy.prepared", set())
    with _lock:  # another thread with the same key waits for its kernels
        if key not in prepared:
            device.prepare(isolated(requests_of, call))
            prepared.add(key)


def requests_of(call: Call) -> list[launch.Request]:
    """The kernels of forward and backward, with a gradient of the loss only, as in most training."""
    inputs, m, h = call.inputs, call.inputs.target.numel(), call.inputs.linear_weight.shape[1]
    metas = {name: empty(t.shape, t.stride(), t.dtype) for name, t in device_tensors(call).items()}
    metas |= dict(
        input=empty((m, h), (h if is_aligned(call) else h + 1, 1), inputs.input.dtype),
        target=empty((m,), (1,), inputs.target.dtype),
        logit_scale=None if inputs.logit_scale is None else empty((), (), torch.float32),
    )
    dry = _RequestDryRun(call._replace(inputs=inputs._replace(**metas)))
    dry.run()
    return list(dry.requests)


def device_tensors(call: Call) -> dict[str, Tensor]:
    """By name, also of numbers: kernels read those that are on the device."""
    return {name: t for name, t in call.inputs._asdict().items() if isinstance(t, Tensor) and t.device == call.device}


class _RequestDryRun(DryRun):
    def __init__(self, call: Call):
        self.requests: dict[launch.Request, None] = {}  # an ordered set
        x, w, bias = call.inputs.parameters()
        for t, need in zip((x, w, bias), call.needed.as_bools(), strict=True):
            if need:
                t.requires_grad_()
        super().__init__(call, call.kernels.gpu, num_grads=1)

    def kernel_for(self, problem: Any, gpu: Gpu) -> CompiledKernel:
        request = request_for(problem, gpu)
        self.requests[request] = None
        return CompiledKernel(lambda *args: None, request.config)


def is_aligned(call: Call) -> bool:
    """Whether each row of x starts on 16 bytes after `calls.prepare`."""
    x = call.inputs.input
    if x.dtype != call.plan.compute_dtype or x.stride(-1) != 1:  # copied
        return True
    stride = x.stride(-2) if x.dim() > 1 else 0
    return (x.data_ptr() | stride * x.itemsize) % 16 == 0
