"""The operators of softmax, forward and backward: by kernels or the portable path."""

from typing import Any

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.cuda import name_of
from quackish.device.kernel_device import KernelDevice, device_of, report_portable
from quackish.errors import UnsupportedError
from quackish.ops.operator import Operator
from quackish.ops.softmax import reference
from quackish.ops.softmax.problems import BackwardArgs, ForwardArgs, SoftmaxBwdProblem, SoftmaxFwdProblem

WHO = "softmax"


def _run_forward(x: Tensor, backend: str) -> Tensor:
    found = _kernel_for(SoftmaxFwdProblem, x, backend)
    if found is None:
        return reference.softmax_fwd(x)
    device, launch = found
    x = _aligned(x)
    y = device.empty(tuple(x.shape), x.stride(), x.dtype)
    args = by_name(ForwardArgs)(x=x.data_ptr(), y=y.data_ptr(), m=x.numel() // x.shape[-1])
    launch(args, device.stream())
    return y


def _run_backward(dy: Tensor, y: Tensor, backend: str) -> Tensor:
    found = _kernel_for(SoftmaxBwdProblem, y, backend)
    if found is None:
        return reference.softmax_bwd(dy, y)
    device, launch = found
    dy, y = _aligned(dy), _aligned(y)
    dx = device.empty(tuple(y.shape), y.stride(), y.dtype)
    args = by_name(BackwardArgs)(dy=dy.data_ptr(), y=y.data_ptr(), dx=dx.data_ptr(), m=y.numel() // y.shape[-1])
    launch(args, device.stream())
    return dx


def _kernel_for(problem_class: type, x: Tensor, backend: str) -> tuple[KernelDevice, Any] | None:
    """(device, launch of the kernel); None for the portable path, with one warning per reason on a GPU."""
    if backend == "reference" or x.numel() == 0:
        return None
    device = device_of(x.device)
    try:
        if isinstance(device, str):
            raise UnsupportedError(f'{WHO}: {device} backend="auto" runs the portable path.')
        problem = problem_class(x.shape[-1], name_of(x.dtype))
        return device, device.kernel_for(problem, device.gpu).launch
    except UnsupportedError as error:
        report_portable(str(error), x.device, backend)
        return None


def _aligned(t: Tensor) -> Tensor:
    """t, or a contiguous copy that starts on 16 bytes."""
    t = t.contiguous()
    return t if t.data_ptr() % 16 == 0 else t.clone()


# Operators ------------------------------------------------------------------------------------------------------------


def _fake(*args: Any) -> Tensor:
    return torch.empty_like(args[0], memory_format=torch.contiguous_format)


def _setup(ctx, args, y):
    ctx.backend = args[1]
    ctx.save_for_backward(y)


def _gradients(ctx, dy):
    (y,) = ctx.saved_tensors
    return (backward.direct(dy, y, ctx.backend),)


forward = Operator("softmax_fwd(Tensor x, str backend) -> Tensor", _run_forward, _fake, who=WHO)
backward = Operator("softmax_bwd(Tensor dy, Tensor y, str backend) -> Tensor", _run_backward, _fake, who=WHO)
forward.differentiable(_setup, _gradients, outputs=1)
