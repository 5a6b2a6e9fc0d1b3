"""The operators of scaled_dot_product_attention: forward and backward, by kernels or the portable path.

Both are written in steps: the functions of reference.py, or others with the same names and arguments: kernels
(`kernel_steps.py`), and PyTorch's memory-efficient attention (`efficient.py`).
"""

from types import ModuleType

import torch
from torch import Tensor

from quackish.device.kernel_device import report_portable, require_device, why_unsupported
from quackish.device.modes import check_memory
from quackish.ops.attention import efficient, kernel_steps, reference
from quackish.ops.attention.mask_plan import plan_bytes, unknown_plan
from quackish.ops.attention.problems import FORWARD_SPEC, WHO
from quackish.ops.attention.reference import Inputs, Options, strides_like
from quackish.ops.operator import Operator

Steps = ModuleType | kernel_steps.AttentionSteps


def _steps_for(inputs: Inputs, options: Options, backend: str, need_dbias: bool = False) -> Steps:
    """The steps that run: kernels or the portable path, which on a GPU warns once per reason.

    The portable path is PyTorch's memory-efficient attention where that ran forward too: beside a large bias, kernels
    and the reference round a score away that it does not.
    """
    q, k = inputs.q, inputs.k
    if backend == "reference" or q.numel() == 0 or k.numel() == 0 or inputs.v.numel() == 0:
        return reference
    why = of_device = why_unsupported(WHO, FORWARD_SPEC, q.device)
    if not why:
        reason = kernel_steps.why_unsupported(inputs, need_dbias)
        why = reason and f'{WHO}: no kernel for {reason}. backend="auto" runs the portable path.'
    if why:
        report_portable(why, q.device, backend)
        is_forward_too = of_device or kernel_steps.why_unsupported(inputs)
        return efficient if is_forward_too and efficient.covers(inputs, options) else reference
    return kernel_steps.steps_of(require_device(WHO, q.device))


def _forward(inputs: Inputs, options: Options, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(o, lse, residual of lse, plan of the mask)"""
    check_memory(WHO, query=inputs.q, key=inputs.k, value=inputs.v, attn_bias=inputs.bias, attn_mask=inputs.mask)
    steps = _steps_for(inputs, options, backend)
    if not isinstance(steps, kernel_steps.AttentionSteps):
        return *steps.forward(inputs, options), unknown_plan(inputs)
    plan = steps.plan(inputs, options)
    return *steps.forward(inputs, options, plan), plan


def _backward(do, dlse, out, lse, residual, plan, inputs: Inputs, options: Options, need_dbias: bool, backend: str):
    steps = _steps_for(inputs, options, backend, need_dbias)
    of_mask = (plan,) if isinstance(steps, kernel_steps.AttentionSteps) else ()
    return steps.backward(do, dlse, out, lse, residual, inputs, options, need_dbias, *of_mask)


# Operators ------------------------------------------------------------------------------------------------------------

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask"
_OPTIONS = "float scale, float? softcap, SymInt? left, SymInt? right"
_NUM_INPUTS, _NUM_OPTIONS = len(Inputs._fields), len(Options._fields)


def _split(args: tuple) -> tuple[Inputs, Options, tuple]:
    end = _NUM_INPUTS + _NUM_OPTIONS
    return Inputs(*args[:_NUM_INPUTS]), Options(*args[_NUM_INPUTS:end]), args[end:]


def _run_forward(*args):
    inputs, options, (backend,) = _split(args)
    return _forward(inputs, options, backend)


def _run_backward(do, dlse, out, lse, residual, plan, *args):
    inputs, options, (need_dbias, backend) = _split(args)
    *grads, dbias = _backward(do, dlse, out, lse, residual, plan, inputs, options, need_dbias, backend)
    return *grads, None if dbias is None else dbias.contiguous()


def _fake_forward(*args):
    q, k, v, _, mask = args[:_NUM_INPUTS]
    columns = v.shape[3]
    out = q.new_empty_strided((*q.shape[:3], columns), strides_like(q, columns))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    plan = None
    if mask is not None:
        plan = q.new_empty(plan_bytes(mask.shape, q.shape[2], k.shape[2]), dtype=torch.uint8)
    return out, *(q.new_empty(q.shape[:3], dtype=wide) for _ in range(2)), plan


def _fake_backward(do, dlse, out, lse, residual, plan, *args):
    inputs, _, (need_dbias, _) = _split(args)
    grads = [t.new_empty_strided(t.shape, strides_like(t, t.shape[3])) for t in inputs[:3]]
    return *grads, inputs.bias.new_empty(inputs.bias.shape) if need_dbias and inputs.bias is not None else None


def _setup(ctx, args, output):
    tensors, ctx.options, (ctx.backend,) = _split(args)
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx, do, dlse):
    *tensors, out, lse, residual, plan = ctx.saved_tensors
    need_dbias = ctx.needs_input_grad[Inputs._fields.index("bias")]
    do = torch.zeros_like(out) if do is None else do
    return backward.direct(do, dlse, out, lse, residual, plan, *tensors, *ctx.options, need_dbias, ctx.backend)


def _forward_flops(q, k, v, *_, out_shape=None):
    """PyTorch's formula, without a discount for masks and causality."""
    from torch.utils.flop_counter import sdpa_flop_count

    return sdpa_flop_count(q, *_one_per_query_head(q, k, v))


def _backward_flops(d_o, dlse, o, lse, lse_residual, plan, q, k, v, *_, out_shape=None):
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return sdpa_backward_flop_count(o, q, *_one_per_query_head(q, k, v))


def _one_per_query_head(q, *shapes):
    """Older versions of PyTorch's formulas require as many heads of keys as of queries."""
    return [(shape[0], q[1], *shape[2:]) for shape in shapes]


forward = Operator(
    f"attention_fwd({_INPUTS}, {_OPTIONS}, str backend) -> (Tensor o, Tensor lse, Tensor lse_residual, Tensor plan)",
    _run_forward,
    _fake_forward,
    who=WHO,
    flops=_forward_flops,
)
backward = Operator(
    f"attention_bwd(Tensor d_o, Tensor? dlse, Tensor o, Tensor lse, Tensor lse_residual, Tensor? plan, {_INPUTS}, "
    f"{_OPTIONS}, bool need_dbias, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    _run_backward,
    _fake_backward,
    who=WHO,
    flops=_backward_flops,
)
forward.differentiable(_setup, _gradients, outputs=2)


def attention(inputs: Inputs, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    out, lse, *_ = forward.apply(*inputs, *options, backend)
    return out, lse
