"""Custom operators of scaled_dot_product_attention. Plain eager calls bypass them.

Operators are written in two steps, forward and backward: the functions of `reference/attention.py`, or kernels with the
same names and arguments (`kernel_steps.py`).
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from quackish.device.kernel_device import (
    as_current,
    check_same_device,
    device_of,
    expects_kernels,
    prepare_operator,
    report_portable,
    require_device,
    why_unsupported,
)
from quackish.device.modes import add_flop_formulas, are_plain, as_plain, check_memory, is_plain, without_autocast
from quackish.ops.attention import kernel_steps, reference
from quackish.ops.attention.checks import WHO
from quackish.ops.attention.problems import FORWARD_SPEC
from quackish.ops.attention.reference import Inputs, Options, strides_like

Steps = ModuleType | kernel_steps.AttentionSteps


def _steps_for(inputs: Inputs, backend: str, need_dbias: bool = False) -> Steps:
    """The steps that run: kernels or the portable path, which on a GPU warns once per reason."""
    q, k = inputs.q, inputs.k
    if backend == "reference" or q.numel() == 0 or k.numel() == 0 or inputs.v.numel() == 0:
        return reference
    why = why_unsupported(WHO, FORWARD_SPEC, q.device)
    if not why:
        reason = kernel_steps.why_unsupported(inputs, need_dbias)
        why = reason and f'{WHO}: no kernel for {reason}. backend="auto" runs the portable path.'
    if why:
        report_portable(why, q.device, backend)
        return reference
    return kernel_steps.steps_of(require_device(WHO, q.device))


def _forward(inputs: Inputs, options: Options, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(o, lse, residual of lse, plan of the mask)"""
    check_memory(WHO, query=inputs.q, key=inputs.k, value=inputs.v, attn_bias=inputs.bias, attn_mask=inputs.mask)
    steps = _steps_for(inputs, backend)
    if not isinstance(steps, kernel_steps.AttentionSteps):
        return *steps.forward(inputs, options), kernel_steps.unknown_plan(inputs)
    plan = steps.plan(inputs, options)
    return *steps.forward(inputs, options, plan), plan


def _backward(do, dlse, out, lse, residual, plan, inputs: Inputs, options: Options, need_dbias: bool, backend: str):
    steps = _steps_for(inputs, backend, need_dbias)
    of_mask = (plan,) if isinstance(steps, kernel_steps.AttentionSteps) else ()
    return steps.backward(do, dlse, out, lse, residual, inputs, options, need_dbias, *of_mask)


# Operators ------------------------------------------------------------------------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask"
_OPTIONS = "float scale, float? softcap, SymInt? left, SymInt? right"
_lib.define(
    f"attention_fwd({_INPUTS}, {_OPTIONS}, str backend) -> (Tensor o, Tensor lse, Tensor lse_residual, Tensor plan)",
    tags=_TAGS,
)
_lib.define(
    f"attention_bwd(Tensor d_o, Tensor? dlse, Tensor o, Tensor lse, Tensor lse_residual, Tensor? plan, {_INPUTS}, "
    f"{_OPTIONS}, bool need_dbias, str backend) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    tags=_TAGS,
)
_fwd_op, _bwd_op = torch.ops.quackish.attention_fwd.default, torch.ops.quackish.attention_bwd.default
_NUM_INPUTS, _NUM_OPTIONS = len(Inputs._fields), len(Options._fields)


def _split(args: tuple) -> tuple[Inputs, Options, tuple]:
    end = _NUM_INPUTS + _NUM_OPTIONS
    return Inputs(*args[:_NUM_INPUTS]), Options(*args[_NUM_INPUTS:end]), args[end:]


def _forward_impl(*args):
    inputs, options, (backend,) = _split(args)
    *results, plan = _forward(inputs, options, backend)
    return *results, inputs.q.new_empty(0, dtype=torch.uint8) if plan is None else plan


def _backward_impl(do, dlse, out, lse, residual, plan, *args):
    inputs, options, (need_dbias, backend) = _split(args)
    *grads, dbias = _backward(do, dlse, out, lse, residual, plan, inputs, options, need_dbias, backend)
    return *grads, None if dbias is None else dbias.contiguous()


def _forward_fake(*args):
    q, k, v, _, mask = args[:_NUM_INPUTS]
    columns = v.shape[3]
    out = q.new_empty_strided((*q.shape[:3], columns), strides_like(q, columns))
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    num_bytes = 0 if mask is None else kernel_steps.plan_bytes(mask.shape, q.shape[2], k.shape[2])
    plan = q.new_empty(num_bytes, dtype=torch.uint8)
    return out, *(q.new_empty(q.shape[:3], dtype=wide) for _ in range(2)), plan


def _backward_fake(do, dlse, out, lse, residual, plan, *args):
    inputs, _, (need_dbias, _) = _split(args)
    grads = [t.new_empty_strided(t.shape, strides_like(t, t.shape[3])) for t in inputs[:3]]
    return *grads, inputs.bias.new_empty(inputs.bias.shape) if need_dbias and inputs.bias is not None else None


def _setup_context(ctx, inputs, output):
    tensors, ctx.options, (ctx.backend,) = _split(inputs)
    ctx.device = device_of(tensors.q.device)
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _op_backward(ctx, do, dlse, dresidual=None, dplan=None):
    if torch.is_grad_enabled():
        raise RuntimeError(f"{WHO}: create_graph=True (double backward) is not supported")
    none = (None,) * (_NUM_OPTIONS + 1)
    if do is None and dlse is None:
        return (None,) * _NUM_INPUTS + none
    check_same_device(WHO, ctx.device, (dlse if do is None else do).device)
    *tensors, out, lse, residual, plan = ctx.saved_tensors
    inputs, need_dbias = Inputs(*tensors), ctx.needs_input_grad[Inputs._fields.index("bias")]
    do = torch.zeros_like(out) if do is None else do
    if is_plain() and are_plain((do, dlse, *tensors)) and _has_memory(do):
        with as_current(do.device), without_autocast(do.device.type):
            grads = _backward(do, dlse, out, lse, residual, plan, inputs, ctx.options, need_dbias, ctx.backend)
    else:
        add_flop_formulas()
        grads = _bwd_op(do, dlse, out, lse, residual, plan, *inputs, *ctx.options, need_dbias, ctx.backend)
    return *grads, None, *none


def _on_its_device(impl):
    """Runs `impl` on plain tensors, with their device as the current one and without autocast."""

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain(WHO, a) if isinstance(a, Tensor) else a for a in args]
        with as_current(args[0].device), without_autocast(args[0].device.type):
            return impl(*args)

    return on_device


for _name, _impl, _fake in (
    ("attention_fwd", _forward_impl, _forward_fake),
    ("attention_bwd", _backward_impl, _backward_fake),
):
    _lib.impl(_name, _on_its_device(_impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::{_name}", _fake, lib=_lib)
torch.library.register_autograd("quackish::attention_fwd", _op_backward, setup_context=_setup_context, lib=_lib)


def _has_memory(t: Tensor) -> bool:
    """False for meta tensors, except in dry runs of the kernels' launches."""
    return not t.is_meta or expects_kernels(t.device)


# Plain eager, without the operator ------------------------------------------------------------------------------------


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        inputs, options, (backend,) = _split(args)
        with as_current(inputs.q.device), without_autocast(inputs.q.device.type):
            output = _forward(inputs, options, backend)
        _setup_context(ctx, args, output)
        return output[:2]

    backward = staticmethod(_op_backward)


def attention(inputs: Inputs, options: Options, backend: str) -> tuple[Tensor, Tensor]:
    """(o, lse)"""
    args: tuple[Any, ...] = (*inputs, *options, backend)
    if is_plain() and are_plain(args) and _has_memory(inputs.q):
        return _Attention.apply(*args)
    prepare_operator(WHO, inputs.q.device)
    out, lse, *_ = _fwd_op(*args)
    return out, lse
