"""The operator of rotary: by the kernel or the portable path. Its gradient is the operator itself, transposed."""

from typing import Any

import torch
from torch import Tensor

from quackish.device import choose
from quackish.device.kernel_device import device_of, report_portable
from quackish.device.modes import check_memory
from quackish.ops.operator import Operator, refuse_batched_gradients
from quackish.ops.rotary import reference
from quackish.ops.rotary.plans import layout_of, plan_for, readable, strides_of_result
from quackish.ops.rotary.problems import RotaryArgs

WHO = "rotary"
_args = RotaryArgs._make  # checks the number of fields in a third of the time that calling the class takes


def _run(q, k, cos, sin, q_strides, k_strides, rotary_dim, layout, transpose, backend) -> tuple[Tensor, Tensor | None]:
    """Results have `q_strides` and `k_strides` if given, else those of `strides_of_result`."""
    check_memory(WHO, q=q, k=k, cos=cos, sin=sin)
    tensors = [q] if k is None else [q, k]
    strides = tuple(map(_strides_of_result, tensors, (q_strides, k_strides)))  # without k, one
    found = None
    if backend != "reference" and q.numel():
        found = _run_kernel(tensors, (cos, sin), strides, rotary_dim, layout, transpose)
        if isinstance(found, str):
            report_portable(found, q.device, backend)
    if found is None or isinstance(found, str):
        found = [
            torch.empty_strided(t.shape, s, dtype=t.dtype, device=t.device)
            for t, s in zip(tensors, strides, strict=True)
        ]
        for t, out in zip(tensors, found, strict=True):
            reference.rotary(t, cos, sin, out, rotary_dim, layout, transpose)
    return found[0], None if k is None else found[1]


def _run_kernel(
    tensors: list[Tensor], tables: tuple[Tensor, Tensor], strides: tuple, *options: Any
) -> list[Tensor] | str:
    """The results; a sentence if no kernel covers the call."""
    device = device_of(tensors[0].device)
    if isinstance(device, str):
        return f'{WHO}: {device} backend="auto" runs the portable path.'
    tensors, (cos, sin) = list(map(readable, tensors)), map(readable, tables)
    addresses = [t.data_ptr() for t in (tensors[0], tensors[-1], cos, sin)]  # without k, q's twice
    plan = plan_for(
        device, choose.epoch, tuple(map(layout_of, tensors)), (layout_of(cos), layout_of(sin)), strides,
        not any(address % 16 for address in addresses), *options,
    )  # fmt: skip
    if isinstance(plan, str):
        return plan
    results = [device.empty(*of) for of in plan.results]
    args = _args((*addresses, results[0].data_ptr(), results[-1].data_ptr(), *plan.numbers))
    plan.launch(args, device.stream())
    return results


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
