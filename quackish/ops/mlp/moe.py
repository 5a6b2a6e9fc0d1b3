"""moe_mlp: sorts tokens by the experts that a router chose, calls `grouped_mlp`, and sums the rows of each token."""

import torch
from torch import Tensor

from quackish.device.kernel_device import (
    KernelDevice,
    as_current,
    check_same_device,
    forward_device,
    require_device,
    why_unsupported,
)
from quackish.device.modes import are_plain, check_memory, is_compiling, is_plain
from quackish.ops.mlp import kernel_steps
from quackish.ops.mlp.api import run_mlp
from quackish.ops.mlp.checks import Inputs, check_buffers, check_choice, checked_dtype
from quackish.ops.mlp.problems import TOKEN_ROWS_SPEC
from quackish.ops.operator import Operator, refuse_second_derivatives, refuse_transforms
from quackish.types import Activation, Backend


def moe_mlp(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    w1: Tensor,
    w2: Tensor,
    *,
    w3: Tensor | None = None,
    activation: Activation = "swiglu",
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    recompute: bool = False,
    grad_w1_out: Tensor | None = None,
    grad_w2_out: Tensor | None = None,
    grad_w3_out: Tensor | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The experts of a mixture of experts, after its router: see docs/guides/grouped_mlp.md.

        out[t] = sum over k of top_k_weights[t, k] * mlp(x[t], expert top_k_index[t, k])

    Args:
        x: (..., H), the tokens, bf16, fp16, fp32 or fp64.
        top_k_index: (..., K) int32 or int64: the experts of each token. A choice outside [0, E) is dropped: it adds
            nothing, whatever its weight.
        top_k_weights: (..., K): their weights, in any of these dtypes.
        w1, w2 and all options: as in `grouped_mlp`. top_k_weights multiplies b2 too.

    Returns:
        out: (..., H) in x's dtype, or autocast's. All floating arguments that require it get gradients.

    Nothing is read back from a GPU. Results and gradients are the same on every run: the K rows of a token are summed
    in fp32 (fp64 for fp64) and in a fixed order, forward and backward. Errors are those of `grouped_mlp`.
    """
    check_choice(x, top_k_index, top_k_weights, w2)
    inputs = Inputs(x, w1, w3, b1, w2, b2, None, None, None, grad_w1_out, grad_w3_out, grad_w2_out)
    dtype = checked_dtype(inputs, "moe_mlp", activation, recompute, backend)
    refuse_transforms("moe_mlp")
    if not is_compiling():
        check_buffers("moe_mlp", inputs)
    x = x.to(dtype)  # before it is copied
    num_experts, k = w2.shape[0], top_k_index.shape[-1]

    # an operator outside plain eager: its kernels are not fused, and modes do not see it write in place
    order, row, offs = order_of.direct(top_k_index, num_experts)
    rows_of_token = row.view(-1, k)
    rows = _Copy.apply(x.flatten(0, -2), order, rows_of_token, backend)
    weights = _Copy.apply(top_k_weights.flatten(), order, row[:, None], backend)
    inputs = inputs._replace(x=rows, scales=weights if b2 is None else None, offs=offs)
    y = run_mlp(inputs, dtype, activation, recompute, backend)
    if b2 is not None:
        is_dropped = torch.arange(order.shape[0], device=order.device) >= offs[-1]
        weights = weights.masked_fill(is_dropped, 0.0)
        y = y * weights[:, None].to(y.dtype)
    return _Sum.apply(y, order, rows_of_token, backend).view(x.shape)


# The order of rows ----------------------------------------------------------------------------------------------------


def _order(top_k_index: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts choices by expert: (the choice of each row, the row of each choice, the end of each expert's rows).

    Dropped choices map to expert E and sort last.
    """
    choices = top_k_index.flatten().clamp(-1, num_experts).remainder(num_experts + 1)
    if num_experts < 2**15:
        choices = choices.to(torch.int16)  # sorts in half the time
    expert, order = choices.sort(stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    experts = torch.arange(num_experts, dtype=expert.dtype, device=expert.device)
    return order, row, torch.searchsorted(expert, experts, right=True, out_int32=True)


def _order_fake(top_k_index, num_experts):
    size = (top_k_index.numel(),)
    order, row = (top_k_index.new_empty(size, dtype=torch.int64) for _ in range(2))
    return order, row, top_k_index.new_empty((num_experts,), dtype=torch.int32)


order_of = Operator(
    "moe_order(Tensor top_k_index, SymInt num_experts) -> (Tensor order, Tensor row, Tensor offs)",
    _order,
    _order_fake,
    who="moe_mlp",
)


# Copies and sums of rows ----------------------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    """Copies x[t] to rows[t, j] for all j. `order` is the inverse of `rows`, flattened."""

    @staticmethod
    def forward(ctx, x, order, rows, backend):
        ctx.save_for_backward(rows)
        ctx.backend, ctx.device = backend, forward_device(x.device)
        return _copy(x, order, rows, backend)

    @staticmethod
    def backward(ctx, grad):
        _check_backward(ctx.device, grad)
        return _sum(grad, *ctx.saved_tensors, ctx.backend), None, None, None


class _Sum(torch.autograd.Function):
    """Sums y[rows[t, j]] over j. Its backward is `_Copy`'s forward, and the reverse."""

    @staticmethod
    def forward(ctx, y, order, rows, backend):
        ctx.save_for_backward(order, rows)
        ctx.backend, ctx.device = backend, forward_device(y.device)
        return _sum(y, rows, backend)

    @staticmethod
    def backward(ctx, grad):
        _check_backward(ctx.device, grad)
        return _copy(grad, *ctx.saved_tensors, ctx.backend), None, None, None


def _check_backward(forward: KernelDevice | str | None, grad: Tensor) -> None:
    """Not every gradient passes through `grouped_mlp`, which checks the same: with b2, the weights' does not."""
    if not is_compiling():  # Dynamo cannot trace this check; AOTAutograd refuses second derivatives itself
        refuse_second_derivatives("moe_mlp", grad)
    check_same_device("moe_mlp", forward, grad.device)


def _copy(x: Tensor, order: Tensor, rows: Tensor, backend: str) -> Tensor:
    steps = _steps_for(x, rows, backend)
    if steps is None:
        return x[order // rows.shape[1]]
    check_memory("moe_mlp", x=x)
    with as_current(x.device):
        return steps.copy_rows(x, rows)


def _sum(y: Tensor, rows: Tensor, backend: str) -> Tensor:
    steps = _steps_for(y, rows, backend)
    if steps is None:
        return y[rows].sum(1, dtype=y.dtype)  # autocast's sum would return fp32
    with as_current(y.device):
        return steps.sum_rows(y, rows)


def _steps_for(x: Tensor, rows: Tensor, backend: str) -> kernel_steps.KernelSteps | None:
    """The kernels that copy and sum rows, in eager mode; None if PyTorch does. Compiled code fuses its operations."""
    if not is_plain() or backend == "reference":  # is_plain first: torch.compile may not know whether x is empty
        return None
    if x.dim() != 2 or x.numel() == 0 or not are_plain((x, rows)):
        return None
    if why_unsupported("moe_mlp", TOKEN_ROWS_SPEC, x.device) or kernel_steps.why_unsupported("moe_mlp", x):
        return None
    return kernel_steps.steps_of(require_device("moe_mlp", x.device))
