"""mlp: the MLP of a dense model. It runs grouped_mlp's kernels on one group."""

import torch
from torch import Tensor

from quackish.device.modes import is_compiling
from quackish.ops.mlp.api import run_mlp
from quackish.ops.mlp.checks import Inputs, check_biases, check_buffers, checked_dtype
from quackish.ops.operator import refuse_transforms, reshaped
from quackish.types import Activation, Backend


def mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    w3: Tensor | None = None,
    b1: Tensor | None = None,
    b3: Tensor | None = None,
    b2: Tensor | None = None,
    activation: Activation = "swiglu",
    residual: Tensor | None = None,
    recompute: bool = False,
    grad_w1_out: Tensor | None = None,
    grad_w3_out: Tensor | None = None,
    grad_w2_out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The MLP of a dense model, gated or not: see docs/guides/mlp.md.

        y = residual + f(x @ w1.T + b1, x @ w3.T + b3) @ w2.T + b2       gated: f(gate, up)
        y = residual + f(x @ w1.T + b1) @ w2.T + b2                      without a gate

    Args:
        x: (..., H) bf16, fp16, fp32 or fp64. Weights have x's dtype unless autocast is on.
        w1: (I, H): the gate projection, or the only one of an activation without a gate. With a gate and without w3,
            (2I, H) as [gate; up], and one gradient.
        w2: (H, I): the down projection.
        w3: (I, H): the up projection.
        b1, b3, b2: (I,), (I,) and (H,), or (2I,) as w1's rows. They have any of these dtypes.
        activation: with a gate "swiglu", "clamped_swiglu" (gpt-oss), "geglu" (tanh), "geglu_erf", "reglu"; without one
            "silu", "relu2", "gelu_tanh", "gelu_erf".
        residual: as y. It is added in the down projection's accumulator, before the only rounding.
        recompute: save only x for backward, which then runs the first matmul again. Otherwise the preactivation is
            saved too: 2I elements per row, or I without a gate. In eager mode its gradient takes the same memory,
            unless retain_graph=True keeps it for another backward.
        grad_w1_out, grad_w3_out, grad_w2_out: buffers of the weight's shape and any strides, fp32 or in its dtype. Each
            backward adds the weight's gradient to it, and autograd gets None instead. Not for parameters that FSDP
            shards.
        backend: "auto" runs kernels if they cover the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        y: (..., H) in x's dtype, or autocast's. All floating arguments that require it get gradients, in their dtypes.

    Results are the same on every run, in the first and in a second backward. With kernels, a row of y and of x's
    gradient does not depend on other rows or on their number.

    Raises:
        ValueError, TypeError: the shape, value, device or dtype of an argument; DTensors.
        UnsupportedError: backend="cute" and no kernel covers the call; torch.func and forward-mode AD.
        RuntimeError: backward with create_graph=True.
    """
    inputs = Inputs(x, w1, w3, None, w2, b2, None, None, residual, grad_w1_out, grad_w3_out, grad_w2_out)
    dtype = checked_dtype(inputs, "mlp", activation, recompute, backend)
    if b1 is not None or b3 is not None:
        check_biases(inputs, b1, b3)
    refuse_transforms("mlp")
    if not is_compiling():
        check_buffers("mlp", inputs)
    y = run_mlp(as_rows(inputs, b1, b3), dtype, activation, recompute, backend)
    return y if x.dim() == 2 else y.view(x.shape)


def as_rows(inputs: Inputs, b1: Tensor | None, b3: Tensor | None) -> Inputs:
    """The inputs with x and residual as rows, and with the biases of gate and up in one tensor."""
    x, residual, w3 = inputs.x, inputs.residual, inputs.w3
    if w3 is not None and (b1 is not None or b3 is not None):
        b1, b3 = (w3.new_zeros(w3.shape[0]) if b is None else b for b in (b1, b3))
        b1 = torch.cat([b1, b3])
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
        residual = None if residual is None else reshaped(residual, x.shape)  # its gradient is y's
    return inputs._replace(x=x, b1=b1, residual=residual)
