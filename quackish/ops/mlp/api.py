"""The MLP of a mixture of experts, and grouped matrix products: what users call."""

import torch
from torch import Tensor

from quackish.device.kernel_device import refuse_portable
from quackish.device.modes import is_compiling
from quackish.ops.mlp.checks import Inputs, check_buffers, check_mm, checked_dtype
from quackish.ops.mlp.operators import Dtypes, dense_forward, group_sums, grouped_forward, rows
from quackish.ops.operator import refuse_transforms
from quackish.types import Activation, Backend


def grouped_mlp(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    offs: Tensor,
    *,
    w3: Tensor | None = None,
    activation: Activation = "swiglu",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    scales: Tensor | None = None,
    recompute: bool = False,
    grad_w1_out: Tensor | None = None,
    grad_w2_out: Tensor | None = None,
    grad_w3_out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """MLPs of a mixture of experts, over rows sorted by expert: see docs/guides/grouped_mlp.md.

        y = (scales * f(x @ w1[g].T + b1[g])) @ w2[g].T + b2[g]   for a row of group (expert) g

    Args:
        x: (R, H) bf16, fp16, fp32 or fp64, sorted by group.
        w1: (E, 2I, H) as [gate; up], or (E, I, H) with w3 or an activation without a gate. w1, w2 and w3 have x's
            dtype unless autocast is on.
        w2: (E, H, I).
        offs: (E,) int32 on x's device: the end of each group, as in F.grouped_mm. Never read back from a GPU.
        w3: (E, I, H): the up projection; w1 is then the gate alone.
        activation: "swiglu", "clamped_swiglu" (gpt-oss), "geglu" (tanh), "geglu_erf", "reglu", or, without a gate,
            "silu", "relu2", "gelu_tanh", "gelu_erf".
        b1: (E, 2I), [gate; up] with w3 too; (E, I) without a gate. b1, b2 and scales have any of these dtypes.
        b2: (E, H), not multiplied by scales.
        scales: (R,): factors of the activation, such as the router's probabilities.
        recompute: save only x for backward, which then runs the first matmul again to compute the preactivation.
        grad_w1_out, grad_w2_out, grad_w3_out: buffers of the weight's shape, fp32 or in its dtype. Each backward adds
            the weight's gradient to it, and autograd gets None instead. Not for parameters that FSDP shards.
        backend: "auto" runs kernels if they cover the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        y: (R, H) in x's dtype. All floating arguments that require it get gradients, in their own dtypes.

    Rows from offs[-1] on are 0 in y and in the gradients of x and scales; their contents are never used. Results are
    the same on every run. With kernels, a row of y and of x's gradient does not depend on other rows or their number.

    Raises:
        ValueError, TypeError: the shape, value, device or dtype of an argument; on CPU, offsets that decrease or
            exceed R. On a GPU such offsets make y and all gradients NaN.
        UnsupportedError: backend="cute" and no kernel covers the call; torch.func and forward-mode AD.
        RuntimeError: backward with create_graph=True.
    """
    inputs = Inputs(x, w1, w3, b1, w2, b2, scales, offs, None, grad_w1_out, grad_w3_out, grad_w2_out)
    dtype = checked_dtype(inputs, "grouped_mlp", activation, recompute, backend)
    refuse_transforms("grouped_mlp")
    if not is_compiling():
        check_buffers("grouped_mlp", inputs)
    return run_mlp(inputs, dtype, activation, recompute, backend)


def run_mlp(inputs: Inputs, dtype: torch.dtype, activation: Activation, recompute: bool, backend: Backend) -> Tensor:
    """grouped_mlp of checked arguments, or mlp if offs is None. dtype: that of `checked_dtype`."""
    enabled = torch.is_grad_enabled()
    needed = Dtypes(*[t.dtype if enabled and t is not None and t.requires_grad else None for t in inputs.leaves()])
    x, w1, w3, w2 = inputs.x, inputs.w1, inputs.w3, inputs.w2
    if any(t is not None and t.dtype is not dtype for t in (x, w1, w3, w2)):
        inputs = inputs._replace(x=_to(x, dtype), w1=_to(w1, dtype), w3=_to(w3, dtype), w2=_to(w2, dtype))
    forward = dense_forward if inputs.offs is None else grouped_forward
    return forward.apply(*inputs, activation, needed.need_preactivation() and not recompute, backend)[0]


def grouped_mm(a: Tensor, b: Tensor, offs: Tensor | None = None, *, backend: Backend = "auto") -> Tensor:
    """Matrix products of groups of rows or columns: the shapes and meaning of F.grouped_mm, and zeros elsewhere.

        a (R, K),    b (E, K, N)   ->  (R, N):     a[rows of g] @ b[g]
        a (E, M, K), b (K, C)      ->  (M, C):     a[g] @ b[:, columns of g]
        a (M, R),    b (R, N)      ->  (E, M, N):  a[:, columns of g] @ b[rows of g]
        a (E, M, K), b (E, K, N)   ->  (E, M, N):  torch.bmm, without offs

    Args:
        a, b: bf16, fp16, fp32 or fp64, of one dtype unless autocast is on, any strides.
        offs: (E,) int32 on a's device: the end of each group of rows or columns. Never read back from a GPU.
        backend: as in `grouped_mlp`.

    From offs[-1] on, rows (columns) of the result and of the operands' gradients are 0, and the operands are not read.
    The product of a group without rows is 0. It has derivatives of any order. Promises and errors are `grouped_mlp`'s.
    """
    dtype = check_mm(a, b, offs, backend)
    refuse_transforms("grouped_mm")
    a, b = _to(a, dtype), _to(b, dtype)
    if a.dim() == 3 and b.dim() == 3:
        if backend == "auto":
            refuse_portable("grouped_mm: without offs no kernel runs, but torch.bmm.", a.device, backend)
        return torch.bmm(a, b)
    if a.dim() == 2 and b.dim() == 2:
        return group_sums(a.t(), b, offs, backend)
    if a.dim() == 2:
        return rows(a, b.transpose(1, 2), offs, backend)
    return rows(b.t(), a, offs, backend).t().contiguous()


def _to(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return t if t is None or t.dtype is dtype else t.to(dtype)
