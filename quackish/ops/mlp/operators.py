"""The operators of grouped_mlp, mlp and grouped_mm.

They and their gradients are written once, in terms of steps: the functions of reference.py, or kernels with the same
names and arguments (`kernel_steps.py`). Steps get weights and gradient buffers with any strides, and all other tensors
contiguous. One exception: with w3, the weight gradients of w1 and w3 get half of dz's columns each. For mlp they get no
offs, and weights and biases without the dimension E.
"""

import functools
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.device import cuda
from quackish.device.kernel_device import report_portable, require_device, why_unsupported
from quackish.device.modes import check_memory
from quackish.ops.mlp import kernel_steps, reference
from quackish.ops.mlp.checks import Inputs, check_offs
from quackish.ops.mlp.problems import GEMM_SPEC
from quackish.ops.operator import Operator, is_graph_kept


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
        return any((self.x, self.w1, self.w3, self.b1, self.w2, self.scales))  # b2's gradient is the sum of dy


Steps = ModuleType | kernel_steps.KernelSteps  # `reference` or kernels


def steps_for(who: str, x: Tensor, columns: int, groups: int, backend: str) -> Steps:
    """The steps that run: kernels or the portable path, which on a GPU warns once per reason.

    columns: the weights' other dimension besides x's columns. Kernels need multiples of 8 in both.
    """
    if backend == "reference" or x.numel() == 0:
        return reference
    why_portable = why_unsupported(who, GEMM_SPEC, x.device)
    why_portable = why_portable or kernel_steps.why_unsupported(who, x, columns, groups)
    if why_portable:
        report_portable(why_portable, x.device, backend)
        return reference
    return kernel_steps.steps_of(require_device(who, x.device))


def _checked_steps(who: str, x: Tensor, columns: int, offs: Tensor, backend: str) -> Steps:
    """`steps_for`. On a CPU's portable path also checks the offsets: reading them there does not synchronize."""
    steps = steps_for(who, x, columns, offs.shape[0], backend)
    if steps is reference and x.device.type == "cpu":
        check_offs(who, offs, x.shape[0], "the number of rows")
    return steps


def forward(steps: Steps, inputs: Inputs, activation: str, keep_preactivation: bool) -> tuple[Tensor, Tensor | None]:
    """(y, the preactivation)"""
    x, w1, w3, b1, w2, b2, scales, offs, residual, *_ = inputs
    preactivation, act = steps.up(x, w1, w3, b1, scales, offs, activation, keep_preactivation)
    return steps.down(act, w2, b2, offs, residual), preactivation


def gradients(
    steps: Steps,
    dy: Tensor,  # (R, H)
    inputs: Inputs,
    preactivation: Tensor | None,  # if None, it is computed again
    activation: str,
    dtypes: Dtypes,
    overwrite: bool = False,  # its gradient may take the preactivation's memory
) -> list[Tensor | None]:
    """The gradients, in the order of `Dtypes`. A weight's gradient is added to its inputs.grad_*_out if given."""
    x, w1, w3, b1, w2, _, scales, offs, _, out_1, out_3, out_2 = inputs
    need_dz = any((dtypes.x, dtypes.w1, dtypes.w3, dtypes.b1))
    dx = dw1 = dw3 = db1 = dw2 = db2 = dscales = dz = None
    if dtypes.need_preactivation():
        if preactivation is None:
            preactivation = steps.up(x, w1, w3, b1, scales, offs, activation, keep_preactivation=True)[0]
            overwrite = True
        needs = reference.Needs(need_dz, dtypes.w2 is not None, dtypes.scales is not None)
        dz, act, dscales = steps.down_backward(dy, w2, preactivation, scales, offs, activation, needs, overwrite)
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


# grouped_mlp and mlp: functional; results that are not needed are None ------------------------------------------------

_INPUTS = "Tensor x, Tensor w1, Tensor? w3, Tensor? b1, Tensor w2, Tensor? b2, Tensor? scales, Tensor? offs"
_OUTS = "Tensor? grad_w1_out, Tensor? grad_w3_out, Tensor? grad_w2_out"
_DTYPES = ", ".join(f"ScalarType? {name}_dtype" for name in Dtypes._fields)
_NUM_INPUTS = len(Inputs._fields)
_NUM_SAVED = Inputs._fields.index("residual")  # the inputs that backward reads
_WEIGHTS = [Dtypes._fields.index(name) for name in ("w1", "w3", "w2")]  # in the order of their buffers


def _for_steps(who: str, inputs: Inputs, backend: str) -> tuple[Steps, Inputs]:
    """The steps, and the inputs for them: all but the weights and their buffers contiguous."""
    check_memory(who, x=inputs.x, w1=inputs.w1, w3=inputs.w3, w2=inputs.w2)
    if inputs.offs is None:
        steps = steps_for(who, inputs.x, inputs.w2.shape[-1], 1, backend)
    else:
        steps = _checked_steps(who, inputs.x, inputs.w2.shape[-1], inputs.offs, backend)
    x, w1, w3, b1, w2, b2, scales, offs, residual, *outs = inputs
    x, b1, b2, scales, offs, residual = (
        None if t is None else t.contiguous() for t in (x, b1, b2, scales, offs, residual)
    )
    return steps, Inputs(x, w1, w3, b1, w2, b2, scales, offs, residual, *outs)


def _run_forward(who, *args):
    inputs, (activation, keep_preactivation, backend) = Inputs(*args[:_NUM_INPUTS]), args[_NUM_INPUTS:]
    steps, inputs = _for_steps(who, inputs, backend)
    return forward(steps, inputs, activation, keep_preactivation)


def _run_backward(who, dy, preactivation, *args, outs: Sequence[Tensor | None] = (None,) * 3, overwrite: bool = False):
    """outs: the buffers, to which steps add the weights' gradients. overwrite: as in `gradients`.

    The operator has neither, because it is functional.
    """
    inputs, (activation, *dtypes, backend) = Inputs._make((*args[:_NUM_SAVED], None, *outs)), args[_NUM_SAVED:]
    check_memory(who, **{name: getattr(inputs, name) for name in inputs._fields[_NUM_SAVED:]})
    steps, for_steps = _for_steps(who, inputs, backend)
    if preactivation is not None:  # a hook on saved tensors may return other strides
        preactivation = preactivation.contiguous()
    return tuple(gradients(steps, dy.contiguous(), for_steps, preactivation, activation, Dtypes(*dtypes), overwrite))


def _fake_forward(*args):
    inputs, (activation, keep_preactivation, _) = Inputs(*args[:_NUM_INPUTS]), args[_NUM_INPUTS:]
    x, i = inputs.x, inputs.w2.shape[-1]
    width = 2 * i if activation in reference.GATED else i
    return x.new_empty(x.shape), x.new_empty((x.shape[0], width)) if keep_preactivation else None


def _fake_backward(dy, preactivation, *args):
    leaves, (_, *dtypes, _) = Inputs(*args[:_NUM_SAVED]).leaves(), args[_NUM_SAVED:]
    pairs = zip(leaves, dtypes, strict=True)
    return tuple(None if dtype is None else dy.new_empty(t.shape, dtype=dtype) for t, dtype in pairs)


def _setup(ctx, args, output):
    *inputs, ctx.activation, _, ctx.backend = args
    ctx.outs = inputs[_NUM_SAVED + 1 :]  # not saved: backward writes
    ctx.is_overwritten = False
    ctx.save_for_backward(*inputs[:_NUM_SAVED], output[1])


def _gradients(backward, ctx, dy):
    *tensors, preactivation = ctx.saved_tensors
    if ctx.is_overwritten:  # by a backward that raised: autograd may run it again
        preactivation = None
    # a CUDA graph of backward alone may be replayed twice
    is_captured = dy.is_cuda and cuda.is_capturing()
    ctx.is_overwritten = overwrite = not (is_captured or is_graph_kept())
    needs, leaves = ctx.needs_input_grad, tensors[: len(Dtypes._fields)]
    dtypes = [t.dtype if need and t is not None else None for t, need in zip(leaves, needs, strict=False)]
    outs = [out if needs[i] else None for i, out in zip(_WEIGHTS, ctx.outs, strict=True)]
    added = [(i, out) for i, out in zip(_WEIGHTS, outs, strict=True) if out is not None]
    for i, out in added:
        dtypes[i] = out.dtype
    options = ctx.activation, *dtypes, ctx.backend
    grads = [*backward.direct(dy, preactivation, *tensors, *options, outs=outs, overwrite=overwrite)]
    for i, out in added:
        if grads[i] is not None:  # the operator ran
            out.add_(grads[i])
            grads[i] = None
    return *grads, None, dy if needs[_NUM_SAVED] else None  # offs, residual


def _forward_flops(x, w1, w3, b1, w2, *_, out_shape=None):
    return _matmul(x, w1) + _matmul(x, w3) + _matmul(x, w2)


def _backward_flops(dy, preactivation, x, w1, w3, b1, w2, b2, scales, offs, activation, *options, out_shape=None):
    needed = Dtypes(*options[: len(Dtypes._fields)])
    up, flops = _matmul(x, w1) + _matmul(x, w3), 0
    if preactivation is None and needed.need_preactivation():
        flops += up
    if any((needed.x, needed.w1, needed.w3, needed.b1, needed.scales)):  # the activation's gradient
        flops += _matmul(x, w2)
    if needed.x:
        flops += up
    pairs = (w1, needed.w1), (w3, needed.w3), (w2, needed.w2)
    return flops + sum(_matmul(x, weight) for weight, need in pairs if need)


def _matmul(rows, weights):
    """Each row with the matrix of its group."""
    return 0 if weights is None else 2 * rows[0] * weights[-2] * weights[-1]


def _operators(who: str) -> Operator:
    """WHO_fwd, whose gradient is WHO_bwd."""
    forward = Operator(
        f"{who}_fwd({_INPUTS}, Tensor? residual, {_OUTS}, str activation, bool keep_preactivation, str backend) "
        "-> (Tensor y, Tensor preactivation)",
        functools.partial(_run_forward, who),
        _fake_forward,
        who=who,
        flops=_forward_flops,
    )
    backward = Operator(
        f"{who}_bwd(Tensor dy, Tensor? preactivation, {_INPUTS}, str activation, {_DTYPES}, str backend) "
        f"-> ({', '.join(f'Tensor d{name}' for name in Dtypes._fields)})",
        functools.partial(_run_backward, who),
        _fake_backward,
        who=who,
        flops=_backward_flops,
    )
    forward.differentiable(_setup, functools.partial(_gradients, backward), outputs=1)
    return forward


grouped_forward, dense_forward = _operators("grouped_mlp"), _operators("mlp")


# grouped_mm: its operators' gradients use each other ------------------------------------------------------------------


def _run_rows(a, w, offs, backend):
    check_memory("grouped_mm", a=a, b=w)
    steps = _checked_steps("grouped_mm", a, w.shape[1], offs, backend)
    return steps.down(a.contiguous(), w, None, offs.contiguous())


def _run_sum(a, b, offs, backend):
    check_memory("grouped_mm", a=a, b=b)
    steps = _checked_steps("grouped_mm", a, b.shape[1], offs, backend)
    return steps.weight_gradient(a.contiguous(), b.contiguous(), offs.contiguous(), a.dtype)


def _setup_mm(ctx, args, output):
    *tensors, ctx.backend = args
    ctx.save_for_backward(*tensors)


def _rows_gradients(ctx, dy):
    a, w, offs = ctx.saved_tensors
    da = rows(dy, w.transpose(1, 2), offs, ctx.backend) if ctx.needs_input_grad[0] else None
    dw = group_sums(dy, a, offs, ctx.backend) if ctx.needs_input_grad[1] else None
    return da, dw


def _sum_gradients(ctx, dy):
    a, b, offs = ctx.saved_tensors
    da = rows(b, dy, offs, ctx.backend) if ctx.needs_input_grad[0] else None
    db = rows(a, dy.transpose(1, 2), offs, ctx.backend) if ctx.needs_input_grad[1] else None
    return da, db


rows = Operator(
    "grouped_rows(Tensor a, Tensor w, Tensor offs, str backend) -> Tensor",  # a @ w[g].T
    _run_rows,
    lambda a, w, offs, backend: a.new_empty((a.shape[0], w.shape[1])),
    who="grouped_mm",
    flops=lambda a, w, *_, out_shape=None: _matmul(a, w),
)
group_sums = Operator(
    "grouped_sum(Tensor a, Tensor b, Tensor offs, str backend) -> Tensor",  # a[g].T @ b[g]
    _run_sum,
    lambda a, b, offs, backend: a.new_empty((offs.shape[0], a.shape[1], b.shape[1])),
    who="grouped_mm",
    flops=lambda a, b, *_, out_shape=None: 2 * a[0] * a[1] * b[1],
)
rows.differentiable(_setup_mm, _rows_gradients, outputs=1, twice=True)
group_sums.differentiable(_setup_mm, _sum_gradients, outputs=1, twice=True)
