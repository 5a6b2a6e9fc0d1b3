"""linear_divergence: what users call."""

from typing import Literal, overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from quackish.device.modes import is_compiling
from quackish.ops.linear_divergence import schedule
from quackish.ops.linear_divergence.checks import WHO, Inputs, Options, check
from quackish.ops.linear_divergence.operators import Plan, Tensors, forward_operator, sizes_of
from quackish.ops.operator import refuse_transforms
from quackish.ops.shared.buffers import check_buffer
from quackish.ops.shared.matmul import accumulate_dtype
from quackish.types import Backend, DivergenceOptions, Reduction


@overload
def linear_divergence(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, *,
    return_entropy: Literal[False] = False, **options: Unpack[DivergenceOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_divergence(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, *,
    return_entropy: Literal[True], **options: Unpack[DivergenceOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_divergence(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor, teacher_weight: Tensor, *, return_entropy: bool,
    **options: Unpack[DivergenceOptions],
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip
def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor,
    teacher_weight: Tensor,
    *,
    mask: Tensor | None = None,
    beta: float = 0.0,
    temperature: float = 1.0,
    reduction: Reduction = "mean",
    linear_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    logit_scale: float | None = None,
    teacher_logit_scale: float | None = None,
    num_items: int | Tensor | None = None,
    return_entropy: bool = False,
    grad_weight_out: Tensor | None = None,
    memory_limit: int | None = None,
    backend: Backend = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """How far a student's distribution is from a teacher's, over all classes. See docs/guides/distillation.md.

        s, t = softmax(softcap(logit_scale * (x @ w.T + bias)) / temperature) of the student and the teacher

        beta 0: KL(t || s)        beta 1: KL(s || t)
        between: beta * KL(t || m) + (1 - beta) * KL(s || m),   m = (1 - beta) * s + beta * t

    (the generalized Jensen-Shannon divergence of Agarwal et al., 2023, as in TRL). Neither model's logits are ever in
    memory as a whole.

    Args:
        input: (..., H) the student's hidden states: bf16, fp16, fp32 or fp64. The matrices have its dtype, unless
            autocast is on.
        linear_weight: (V, H) the student's head.
        teacher_input, teacher_weight: (..., Ht) and (V, Ht). They get no gradient, and may not require one.
        mask: (...) bool: rows that count. The others have loss 0 and gradient 0, and their NaNs reach nothing.
        beta: from 0 to 1.
        temperature: positive. The result is not multiplied by its square.
        reduction: "mean" divides the sum by num_items, or by the number of rows that count; "sum"; "none": (...).
        linear_bias, teacher_bias: (V,), any of these dtypes.
        softcap, teacher_softcap: c: logits become c * tanh(logits / c).
        logit_scale, teacher_logit_scale: positive factors of the logits.
        num_items: int or 0-dim tensor, for "mean". Less than 1 counts as 1.
        return_entropy: also return the student's entropy (...) at this temperature, in nats, without gradient.
        grad_weight_out: (V, H) buffer, fp32 or in linear_weight's dtype. Backward adds linear_weight's gradient to it
            and returns None to autograd.
        memory_limit: bytes in addition to inputs, their copies and gradients. The largest blocks of rows within it run.
        backend: "auto" runs kernels if they cover the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs kernels or raises. "reference" runs the portable path.

    Returns:
        The loss, in fp32 (fp64 for fp64), or (loss, entropy). input, linear_weight and linear_bias get gradients in
        their dtypes.

    Results are the same on every run. With kernels, a row's loss, entropy and gradient do not depend on other rows or
    on their number; the gradient of "none" in fp16 also depends on the largest factor. No input except
    `grad_weight_out` is written, and nothing synchronizes with the host.

    Raises:
        ValueError, TypeError: the shape, value, device or dtype of an argument; DTensors; teacher tensors that require
            grad; a memory_limit that is too small.
        UnsupportedError: backend="cute" and no kernel covers the call; torch.func and forward-mode AD.
        RuntimeError: backward with create_graph=True.
    """
    inputs = Inputs(
        input, linear_weight, teacher_input, teacher_weight, mask, linear_bias, teacher_bias, num_items, grad_weight_out
    )
    options = Options(
        beta, temperature, reduction, softcap, teacher_softcap, logit_scale, teacher_logit_scale, return_entropy,
        memory_limit, backend,
    )  # fmt: skip
    dtype = check(inputs, options)
    refuse_transforms(WHO)
    if grad_weight_out is not None and not is_compiling():
        check_buffer(WHO, grad_weight_out=grad_weight_out, linear_weight=linear_weight, input=input)
    tensors, plan = prepared(inputs, options, dtype)
    loss, entropy, *_ = forward_operator.apply(*tensors, *plan)
    shape = input.shape[:-1]
    if reduction == "none":
        loss = loss.view(shape)
    return (loss, entropy.detach().view(shape)) if return_entropy else loss


def prepared(inputs: Inputs, options: Options, dtype: torch.dtype) -> tuple[Tensors, Plan]:
    """The arguments of the operator."""
    x, w, items = inputs.input, inputs.linear_weight, inputs.num_items
    h, teacher_h = w.shape[1], inputs.teacher_weight.shape[1]
    if items is not None and not isinstance(items, Tensor):  # a tensor, so that compiled code is not specialized on it
        items = torch.full((), items, dtype=accumulate_dtype(dtype), device=x.device)
    tensors = Tensors(
        x.reshape(-1, h), w, inputs.linear_bias, inputs.teacher_input.reshape(-1, teacher_h), inputs.teacher_weight,
        inputs.teacher_bias, None if inputs.mask is None else inputs.mask.reshape(-1), items, inputs.grad_weight_out,
    )  # fmt: skip
    grad = torch.is_grad_enabled()
    needs = [grad and t is not None and t.requires_grad for t in (x, w, inputs.linear_bias)]
    layout = schedule.default_layout(h)
    plan = Plan(
        dtype, float(options.beta), float(options.temperature), options.reduction, options.softcap,
        options.teacher_softcap, float(options.logit_scale or 1.0), float(options.teacher_logit_scale or 1.0),
        options.return_entropy, *layout, needs, options.backend,
    )  # fmt: skip
    if options.memory_limit is not None:
        layout = schedule.layout_within(options.memory_limit, sizes_of(tensors, plan))
        plan = plan._replace(chunk=layout.chunk, block=layout.block)
    return tensors, plan
