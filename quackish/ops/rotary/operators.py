"""The operator of rotary: by the kernel or the portable path. Its gradient is the operator itself, transposed."""

from typing import Any

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.kernel_device import device_of, report_portable
from quackish.device.modes import check_memory
from quackish.ops.operator import Operator, refuse_batched_gradients
from quackish.ops.rotary import reference
from quackish.ops.rotary.plans import kind_of, plan_for, readable, strides_of_result
from quackish.ops.rotary.problems import RotaryArgs

WHO = "rotary"
_args = RotaryArgs._make  # checks the number of fields in a third of the time that calling the class takes


def _run(q, k, cos, sin, q_strides, k_strides, rotary_dim, layout, transpose, backend) -> tuple[Tensor, Tensor | None]:
    """Results have `q_strides` and `k_strides` if given, else those of `strides_of_result`."""
    if backend != "reference" and q.numel():
        device = device_of(q.device)
        if isinstance(device, str):
            found: Any = f'{WHO}: {device} backend="auto" runs the portable path.'
        else:
            found = _run_kernel(device, q, k, cos, sin, q_strides, k_strides, rotary_dim, layout, transpose)
        if not isinstance(found, str):
            return found
        report_portable(found, q.device, backend)
    check_memory(WHO, q=q, k=k, cos=cos, sin=sin)
    results: list[Tensor | None] = []
    for t, strides in ((q, q_strides), (k, k_strides)):
        out = None
        if t is not None:
            out = torch.empty_strided(t.shape, _strides_of_result(t, strides), dtype=t.dtype, device=t.device)
            reference.rotary(t, cos, sin, out, rotary_dim, layout, transpose)
        results.append(out)
    return results[0], results[1]


def _run_kernel(device, q, k, cos, sin, q_strides, k_strides, *options) -> tuple[Tensor, Tensor | None] | str:
    """The results; a sentence if no kernel covers the call."""
    q_ptr, cos_ptr, sin_ptr = q.data_ptr(), cos.data_ptr(), sin.data_ptr()
    k_ptr = q_ptr if k is None else k.data_ptr()
    if not (q_ptr and k_ptr and cos_ptr and sin_ptr):
        check_memory(WHO, q=q, k=k, cos=cos, sin=sin)
    plan = plan_for(
        device, choose.epoch, kind_of(q), None if k is None else kind_of(k), kind_of(cos), kind_of(sin),
        q_strides and tuple(q_strides), k_strides and tuple(k_strides),
        (q_ptr | k_ptr | cos_ptr | sin_ptr) & 15 == 0, *options,
    )  # fmt: skip
    if plan is None:
        copies = readable(q), None if k is None else readable(k), readable(cos), readable(sin)
        given = [s or _strides_of_result(t, s) for t, s in ((q, q_strides), (q if k is None else k, k_strides))]
        return _run_kernel(device, *copies, *given, *options)
    if isinstance(plan, str):
        return plan
    q_out = device.empty(*plan.results[0])
    k_out = None if k is None else device.empty(*plan.results[1])
    written = q_out.data_ptr(), (q_out if k_out is None else k_out).data_ptr()
    plan.launch(_args((q_ptr, k_ptr, cos_ptr, sin_ptr, *written, *plan.numbers)), device.stream())
    return q_out, k_out


def _strides_of_result(t: Tensor, given: Any) -> tuple[int, ...]:
    return tuple(given) if given is not None else strides_of_result(t.shape, t.stride())


def _fake(q, k, cos, sin, q_strides, k_strides, *options) -> tuple[Tensor, Tensor | None]:
    q_out, k_out = (
        None if t is None else t.new_empty_strided(t.shape, _strides_of_result(t, given))
        for t, given in ((q, q_strides), (k, k_strides))
    )
    return q_out, k_out


def _setup(ctx, args, output):
    _, _, cos, sin, _, _, *ctx.options = args
    ctx.strides = [None if t is None else t.stride() for t in output]
    ctx.save_for_backward(cos, sin)


def _gradients(ctx, dq, dk):
    """dq and dk have the strides of the results, whatever those of the incoming gradients are."""
    refuse_batched_gradients(WHO, dq, dk)
    tables, (*options, transpose, backend) = ctx.saved_tensors, ctx.options
    grads = [grad if needs else None for grad, needs in zip((dq, dk), ctx.needs_input_grad[:2], strict=True)]
    present = [i for i in (0, 1) if grads[i] is not None]
    if present:
        call = operator.apply if torch.is_grad_enabled() else operator.direct  # with create_graph=True
        order = (*present, 1 - present[0])[:2]  # the operator needs its first argument
        found = call(
            *(grads[i] for i in order), *tables, *(ctx.strides[i] for i in order), *options, not transpose, backend
        )
        for i, grad in zip(order, found, strict=True):
            grads[i] = grad
    return grads


operator = Operator(
    "rotary(Tensor q, Tensor? k, Tensor cos, Tensor sin, SymInt[]? q_strides, SymInt[]? k_strides, SymInt rotary_dim, "
    "str layout, bool transpose, str backend) -> (Tensor q, Tensor k)",
    _run,
    _fake,
    who=WHO,
)
operator.differentiable(_setup, _gradients, outputs=2, twice=True)
