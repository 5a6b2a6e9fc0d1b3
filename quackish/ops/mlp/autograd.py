"""Custom operators of grouped_mlp and grouped_mm. Plain eager calls of grouped_mlp bypass its operator.

Operators and gradients are written once, in terms of steps: the functions of `reference/grouped_mlp.py`, or kernels
with the same names and arguments (`kernel_steps.py`). Steps get weights and gradient buffers with any strides, and all
other tensors contiguous. One exception: with w3, the weight gradients of w1 and w3 get half of dz's columns each.
"""

import functools
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device.kernel_device import (
    as_current,
    check_same_device,
    device_of,
    prepare_operator,
    report_portable,
    require_device,
    why_unsupported,
)
from quackish.device.modes import add_flop_formulas, are_plain, as_plain, check_memory, is_plain, without_autocast
from quackish.ops.mlp import kernel_steps, reference
from quackish.ops.mlp.checks import Inputs, check_offs
from quackish.ops.mlp.problems import GEMM_SPEC


class Dtypes(NamedTuple):
    """The dtype of the gradient of each of `Inputs.leaves`; None if the gradient is not computed."""

    x: torch.dtype | None
    w1: torch.dtype | None
    w3: torch.dtype | None
    b1: torch.dtype | None
    w2: torch.dtype | None
    b2: torch.dtype | None
    scales: torch.dtype | None

    def need_preactivation(self) -> bool:
        return any(self._replace(b2=None))  # b2's gradient is the sum of dy


Steps = ModuleType | kernel_steps.KernelSteps  # `reference` or kernels


def steps_for(who: str, x: Tensor, columns: int, offs: Tensor, backend: str) -> Steps:
    """The steps that run: kernels or the portable path, which on a GPU warns once per reason.

    columns: the weights' other dimension besides x's columns. Kernels need multiples of 8 in both.
    """
    if backend == "reference" or x.numel() == 0:
        return reference
    why_portable = why_unsupported(who, GEMM_SPEC, x.device)
    why_portable = why_portable or kernel_steps.why_unsupported(who, x, columns, offs.shape[0])
    if why_portable:
        report_portable(why_portable, x.device, backend)
        return reference
    return kernel_steps.steps_of(require_device(who, x.device))


def _checked_steps(who: str, x: Tensor, columns: int, offs: Tensor, backend: str) -> Steps:
    """`steps_for`. On a CPU's portable path also checks the offsets: reading them there does not synchronize."""
    steps = steps_for(who, x, columns, offs, backend)
    if steps is reference and x.device.type == "cpu":
        check_offs(who, offs, x.shape[0], "the number of rows")
    return steps


def forward(steps: Steps, inputs: Inputs, activation: str, keep_preactivation: bool) -> tuple[Tensor, Tensor | None]:
    """(y, the preactivation)"""
    x, w1, w3, b1, w2, b2, scales, offs, *_ = inputs
    preactivation, act = steps.up(x, w1, w3, b1, scales, offs, activation, keep_preactivation)
    return steps.down(act, w2, b2, offs), preactivation


def gradients(
    steps: Steps,
    dy: Tensor,  # (R, H)
    inputs: Inputs,
    preactivation: Tensor | None,  # if None, it is computed again
    activation: str,
    dtypes: Dtypes,
) -> list[Tensor | None]:
    """The gradients, in the order of `Dtypes`. A weight's gradient is added to its inputs.grad_*_out if given."""
    x, w1, w3, b1, w2, _, scales, offs, out_1, out_3, out_2 = inputs
    need_dz = any((dtypes.x, dtypes.w1, dtypes.w3, dtypes.b1))
    dx = dw1 = dw3 = db1 = dw2 = db2 = dscales = dz = None
    if dtypes.need_preactivation():
        if preactivation is None:
            preactivation = steps.up(x, w1, w3, b1, scales, offs, activation, keep_preactivation=True)[0]
        needs = reference.Needs(need_dz, dtypes.w2 is not None, dtypes.scales is not None)
        dz, act, dscales = steps.down_backward(dy, w2, preactivation, scales, offs, activation, needs)
        preactivation = None  # frees it if it was computed again
    if dtypes.w2:
        dw2 = steps.weight_gradient(dy, act, offs, dtypes.w2, out_2)
        act = None  # frees it
    if dtypes.b2:
        db2 = steps.bias_gradient(dy, offs, dtypes.b2)
    if dtypes.x:
        dx = steps.rows_gradient(dz, w1, w3, offs)
    if dtypes.b1:
        db1 = steps.bias_gradient(dz, offs, dtypes.b1)
    dgate, dup = (dz, None) if w3 is None or dz is None else dz.chunk(2, 1)
    if dtypes.w1:
        dw1 = steps.weight_gradient(dgate, x, offs, dtypes.w1, out_1)
    if dtypes.w3:
        dw3 = steps.weight_gradient(dup, x, offs, dtypes.w3, out_3)
    return [dx, dw1, dw3, db1, dw2, db2, dscales]


# Operators of grouped_mlp: functional; results that are not needed are None ------------------------------------------

_lib = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
_INPUTS = "Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor w2, Tensor? b2, Tensor? scales, Tensor offs"
_OUTS = "Tensor? grad_w1_out, Tensor? grad_w3_out, Tensor? grad_w2_out"
_DTYPES = ", ".join(f"ScalarType? {name}_dtype" for name in Dtypes._fields)
_lib.define(
    f"grouped_mlp_fwd({_INPUTS}, {_OUTS}, str activation, bool keep_preactivation, str backend) "
    "-> (Tensor y, Tensor preactivation)",
    tags=_TAGS,
)
_lib.define(
    f"grouped_mlp_bwd(Tensor dy, Tensor? preactivation, {_INPUTS}, str activation, {_DTYPES}, str backend) "
    f"-> ({', '.join(f'Tensor d{name}' for name in Dtypes._fields)})",
    tags=_TAGS,
)
mlp_op = torch.ops.quackish.grouped_mlp_fwd.default
_bwd_op = torch.ops.quackish.grouped_mlp_bwd.default
_NUM_INPUTS = len(Inputs._fields)
_NUM_TENSORS = Inputs._fields.index("grad_w1_out")  # without buffers


def _for_steps(inputs: Inputs) -> Inputs:
    """Checks that x and the weights have memory; makes all but the weights and their buffers contiguous."""
    x, w1, w3, b1, w2, b2, scales, offs, out_1, out_3, out_2 = inputs
    check_memory("grouped_mlp", x=x, w1=w1, w3=w3, w2=w2)
    x, b1, b2, scales, offs = (None if t is None else t.contiguous() for t in (x, b1, b2, scales, offs))
    return Inputs(x, w1, w3, b1, w2, b2, scales, offs, out_1, out_3, out_2)


def _mlp_forward(*args):
    inputs, (activation, keep_preactivation, backend) = _for_steps(Inputs(*args[:_NUM_INPUTS])), args[_NUM_INPUTS:]
    steps = _checked_steps("grouped_mlp", inputs.x, inputs.w2.shape[2], inputs.offs, backend)
    return forward(steps, inputs, activation, keep_preactivation)


def _mlp_backward(dy, preactivation, inputs: Inputs, activation, dtypes: Dtypes, backend) -> list[Tensor | None]:
    inputs, dy = _for_steps(inputs), dy.contiguous()
    check_memory("grouped_mlp", **{name: getattr(inputs, name) for name in inputs._fields[_NUM_TENSORS:]})
    if preactivation is not None:  # a hook on saved tensors may return other strides
        preactivation = preactivation.contiguous()
    steps = steps_for("grouped_mlp", inputs.x, inputs.w2.shape[2], inputs.offs, backend)
    return gradients(steps, dy, inputs, preactivation, activation, dtypes)


def _mlp_backward_impl(dy, preactivation, *args):
    inputs, (activation, *dtypes, backend) = Inputs(*args[:_NUM_TENSORS]), args[_NUM_TENSORS:]
    return tuple(_mlp_backward(dy, preactivation, inputs, activation, Dtypes(*dtypes), backend))


def _mlp_forward_fake(*args):
    inputs, (activation, keep_preactivation, _) = Inputs(*args[:_NUM_INPUTS]), args[_NUM_INPUTS:]
    x, i = inputs.x, inputs.w2.shape[2]
    width = 2 * i if activation in reference.GATED else i
    return x.new_empty(x.shape), x.new_empty((x.shape[0], width)) if keep_preactivation else None


def _mlp_backward_fake(dy, preactivation, *args):
    leaves, (_, *dtypes, _) = Inputs(*args[:_NUM_TENSORS]).leaves(), args[_NUM_TENSORS:]
    pairs = zip(leaves, dtypes, strict=True)
    return tuple(None if dtype is None else dy.new_empty(t.shape, dtype=dtype) for t, dtype in pairs)


def _setup_context(ctx, inputs, output):
    *tensors, out_1, out_3, out_2 = inputs[:_NUM_INPUTS]
    ctx.outs = dict(w1=out_1, w3=out_3, w2=out_2)  # not saved: backward writes to the buffers
    ctx.activation, _, ctx.backend = inputs[_NUM_INPUTS:]
    ctx.device = device_of(tensors[0].device)
    preactivation = output[1]
    if preactivation is not None:
        ctx.mark_non_differentiable(preactivation)
    ctx.save_for_backward(*tensors, preactivation)
    ctx.set_materialize_grads(False)


def _op_backward(ctx, dy, _):
    refuse_second_derivatives("grouped_mlp", dy)
    if dy is None:
        return (None,) * len(ctx.needs_input_grad)
    check_same_device("grouped_mlp", ctx.device, dy.device)  # before a checkpoint computes saved tensors again
    *tensors, preactivation = ctx.saved_tensors
    needs = zip(Dtypes._fields, tensors, ctx.needs_input_grad, strict=False)
    dtypes = {name: t.dtype if need and t is not None else None for name, t, need in needs}
    outs = {name: out for name, out in ctx.outs.items() if out is not None and dtypes[name] is not None}
    dtypes = Dtypes(**dtypes | {name: out.dtype for name, out in outs.items()})
    if is_plain() and are_plain((dy, *tensors)) and not dy.is_meta:  # weight gradients go straight to the buffers
        inputs = Inputs(*tensors, outs.get("w1"), outs.get("w3"), outs.get("w2"))
        with as_current(dy.device), without_autocast(dy.device.type):
            grads = _mlp_backward(dy, preactivation, inputs, ctx.activation, dtypes, ctx.backend)
    else:
        add_flop_formulas()
        grads = Dtypes(*_bwd_op(dy, preactivation, *tensors, ctx.activation, *dtypes, ctx.backend))
        for name, out in outs.items():
            out.add_(getattr(grads, name))
        grads = grads._replace(**dict.fromkeys(outs))
    return *grads, *(None,) * (len(ctx.needs_input_grad) - len(grads))


def refuse_second_derivatives(who: str, dy: Tensor | None) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(f"{who}: create_graph=True (double backward) is not supported")
    functorch = torch._C._functorch
    if dy is not None and (functorch.is_batchedtensor(dy) or functorch.is_legacy_batchedtensor(dy)):
        raise RuntimeError(f"{who}: vmap over gradients (is_grads_batched=True) is not supported")


# Operators of grouped_mm: their gradients use each other --------------------------------------------------------------

_lib.define("grouped_rows(Tensor a, Tensor w, Tensor offs, str backend) -> Tensor", tags=_TAGS)  # a @ w[g].T
_lib.define("grouped_sum(Tensor a, Tensor b, Tensor offs, str backend) -> Tensor", tags=_TAGS)  # a[g].T @ b[g]
rows_op = torch.ops.quackish.grouped_rows.default
sum_op = torch.ops.quackish.grouped_sum.default


def _rows_impl(a, w, offs, backend):
    check_memory("grouped_mm", a=a, b=w)
    steps = _checked_steps("grouped_mm", a, w.shape[1], offs, backend)
    return steps.down(a.contiguous(), w, None, offs.contiguous())


def _sum_impl(a, b, offs, backend):
    check_memory("grouped_mm", a=a, b=b)
    steps = _checked_steps("grouped_mm", a, b.shape[1], offs, backend)
    return steps.weight_gradient(a.contiguous(), b.contiguous(), offs.contiguous(), a.dtype)


def _rows_fake(a, w, offs, backend):
    return a.new_empty((a.shape[0], w.shape[1]))


def _sum_fake(a, b, offs, backend):
    return a.new_empty((offs.shape[0], a.shape[1], b.shape[1]))


def _mm_context(ctx, inputs, output):
    *tensors, ctx.backend = inputs
    ctx.device = device_of(tensors[0].device)
    ctx.save_for_backward(*tensors)


def _rows_backward(ctx, dy):
    check_same_device("grouped_mm", ctx.device, dy.device)
    a, w, offs = ctx.saved_tensors
    add_flop_formulas()
    da = rows_op(dy, w.transpose(1, 2), offs, ctx.backend) if ctx.needs_input_grad[0] else None
    dw = sum_op(dy, a, offs, ctx.backend) if ctx.needs_input_grad[1] else None
    return da, dw, None, None


def _sum_backward(ctx, dy):
    check_same_device("grouped_mm", ctx.device, dy.device)
    a, b, offs = ctx.saved_tensors
    add_flop_formulas()
    da = rows_op(b, dy, offs, ctx.backend) if ctx.needs_input_grad[0] else None
    db = rows_op(a, dy.transpose(1, 2), offs, ctx.backend) if ctx.needs_input_grad[1] else None
    return da, db, None, None


# Registration ---------------------------------------------------------------------------------------------------------


def _on_its_device(who: str, impl):
    """Runs `impl` on plain tensors, with their device as the current one.

    Autocast is off, because the caller's would round fp32 operands.
    """

    @functools.wraps(impl)
    def on_device(*args):
        args = [as_plain(who, a) if isinstance(a, Tensor) else a for a in args]
        with as_current(args[0].device), without_autocast(args[0].device.type):
            return impl(*args)

    return on_device


for _name, _impl, _fake in (
    ("grouped_mlp_fwd", _mlp_forward, _mlp_forward_fake),
    ("grouped_mlp_bwd", _mlp_backward_impl, _mlp_backward_fake),
    ("grouped_rows", _rows_impl, _rows_fake),
    ("grouped_sum", _sum_impl, _sum_fake),
):
    _who = "grouped_mlp" if "mlp" in _name else "grouped_mm"
    _lib.impl(_name, _on_its_device(_who, _impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quackish::{_name}", _fake, lib=_lib)
for _name, _backward, _context in (
    ("grouped_mlp_fwd", _op_backward, _setup_context),
    ("grouped_rows", _rows_backward, _mm_context),
    ("grouped_sum", _sum_backward, _mm_context),
):
    torch.library.register_autograd(f"quackish::{_name}", _backward, setup_context=_context, lib=_lib)


# Plain eager, without the operator -----------------------------------------------------------------------------------


class _GroupedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        with as_current(args[0].device), without_autocast(args[0].device.type):
            output = _mlp_forward(*args)
        _setup_context(ctx, args, output)
        return output

    backward = staticmethod(_op_backward)


def mlp(*args) -> tuple[Tensor, Tensor | None]:
    """(y, preactivation). The operator's own autograd takes 100 us more (on a CPU, with kernels that do nothing)."""
    if is_plain() and are_plain(args) and not args[0].is_meta:
        return _GroupedMlp.apply(*args)
    prepare_operator("grouped_mlp", args[0].device)
    return mlp_op(*args)
