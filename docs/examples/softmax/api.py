"""Softmax: what users call."""

import torch
from torch import Tensor

from quackish.ops.operator import refuse_transforms
from quackish.ops.shared.arguments import check_backend, check_tensor
from quackish.ops.softmax.operators import WHO, forward
from quackish.types import Backend

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def softmax(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Softmax over the last dimension: y = exp(x - max(x)) / sum(exp(x - max(x))).

    Args:
        x: (..., n) bf16, fp16, fp32 or fp64, any strides.
        backend: "auto" runs kernels if they cover the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        y (..., n) in x's dtype. A row and its gradient have the same bits on every run, whatever the other rows are.

    Raises:
        ValueError, TypeError: the shape or dtype of x, or an unknown backend.
        UnsupportedError: backend="cute" and no kernel covers the call; torch.func and forward-mode AD.
        RuntimeError: backward with create_graph=True.
    """
    check_backend(WHO, backend)
    check_tensor(WHO, "x", x)
    if x.dtype not in _DTYPES:
        raise TypeError(f"{WHO}: x is {x.dtype}; expected bfloat16, float16, float32 or float64")
    if x.dim() == 0:
        raise ValueError(f"{WHO}: x has no dimension; expected (..., n)")
    refuse_transforms(WHO)
    return forward.apply(x, backend)
