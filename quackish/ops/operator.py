"""How an operation meets torch, once for all of them.

An operation has operators, `torch.ops.quackish.NAME`. `Operator` makes one of a function on plain tensors (`run`),
which launches kernels or runs the portable path, and of its shapes (`fake`):

- In plain eager mode, `direct` and `apply` call `run` without the dispatcher, which takes 100 us less.
- torch.compile, dispatch modes, tensor subclasses and DTensors get the operator: it is functional, and opaque to them.
- `differentiable` gives it a gradient, for both ways.
- Calls that are not supported raise: see `refuse_transforms`, `refuse_second_derivatives` and `check_same_device`.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.device.kernel_device import (
    as_current,
    check_same_device,
    device_of,
    expects_kernels,
    is_current,
    refuse_compile_in_substitutes,
)
from quackish.device.modes import (
    are_plain,
    as_plain,
    autocast_dtype,
    is_compiling,
    is_plain,
    is_transformed,
    without_autocast,
)
from quackish.errors import UnsupportedError

_library = torch.library.Library("quackish", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)

Setup = Callable[[Any, tuple, Any], None]  # (ctx, arguments, results): saves what backward needs
Backward = Callable[..., Sequence[Tensor | None]]  # (ctx, *gradients of results) -> gradients of the first arguments


class Operator:
    """torch.ops.quackish.NAME. Called as an object, it goes through the dispatcher."""

    _apply: Callable[..., Any]  # of its torch.autograd.Function

    def __init__(
        self,
        signature: str,  # "NAME(Tensor x, ...) -> (Tensor y, ...)"; absent results are None
        run: Callable[..., Any],  # the implementation on every device
        fake: Callable[..., Any],  # results without values, for meta tensors and torch.compile
        *,
        who: str,  # the operation in messages
        flops: Callable[..., int] | None = None,  # a formula of shapes, for torch.utils.flop_counter
        sharding: Callable[[], None] | None = None,  # imports sharding rules, if DTensor is imported
    ):
        self.run, self.who, self.sharding = run, who, sharding
        name = signature.partition("(")[0]
        _library.define(signature, tags=_TAGS)
        _library.impl(name, self._run_on_plain, "CompositeExplicitAutograd")
        torch.library.register_fake(f"quackish::{name}", fake, lib=_library)
        self.overload = getattr(torch.ops.quackish, name).default
        if flops is not None:
            _formulas[self.overload.overloadpacket] = flops

    def __call__(self, *args: Any) -> Any:
        device = _device_of(args)
        if is_compiling():
            refuse_compile_in_substitutes(self.who, device)
        else:
            add_flop_formulas()
        if self.sharding is not None and "torch.distributed.tensor" in sys.modules:  # importing it is slow
            self.sharding()
        return self.overload(*args)

    def direct(self, *args: Any, **more: Any) -> Any:
        """The results of a call that needs no gradient: without the dispatcher in plain eager mode.

        more: keywords of `run` that the operator does not have. They have no effect if it runs.
        """
        return self._run_on_device(*args, **more) if self._is_direct(args) else self(*args)

    def apply(self, *args: Any) -> Any:
        """The results that users see, of a `differentiable` operator: without the dispatcher in plain eager mode."""
        return self._apply(*args) if self._is_direct(args) else self(*args)

    def differentiable(self, setup: Setup, backward: Backward, outputs: int, twice: bool = False) -> None:
        """Gives the operator a gradient.

        setup: is called after `run`. backward: gets the gradients of the first `outputs` results, None for those that
        are unused, and at least one. The other results are only saved. twice: backward is differentiable itself.
        """
        who = self.who

        def setup_context(ctx, inputs, output):
            ctx.device = device_of(_device_of(inputs))
            ctx.set_materialize_grads(False)
            setup(ctx, inputs, output)

        def setup_operator(ctx, inputs, output):
            setup_context(ctx, inputs, output)
            if not isinstance(output, Tensor):
                ctx.mark_non_differentiable(*(t for t in output[outputs:] if t is not None))

        def run_backward(ctx, *grads):
            grads = grads[:outputs]
            if not twice:
                refuse_second_derivatives(who, *grads)
            given = next((grad for grad in grads if grad is not None), None)
            found: Sequence[Tensor | None] = ()
            if given is not None:
                check_same_device(who, ctx.device, given.device)
                found = backward(ctx, *grads)
            return *found, *(None,) * (len(ctx.needs_input_grad) - len(found))

        def forward(ctx, *args):
            output = self._run_on_device(*args)
            setup_context(ctx, args, output)
            return output if isinstance(output, Tensor) else output[:outputs]

        methods = dict(forward=staticmethod(forward), backward=staticmethod(run_backward))
        self._apply = fast_apply(type(f"{who}_function", (torch.autograd.Function,), methods))
        torch.library.register_autograd(self.overload, run_backward, setup_context=setup_operator, lib=_library)

    def _run_on_plain(self, *args: Any) -> Any:
        """The operator's implementation, which may get a subclass."""
        return self._run_on_device(*[as_plain(self.who, arg) if isinstance(arg, Tensor) else arg for arg in args])

    def _run_on_device(self, *args: Any, **more: Any) -> Any:
        """`run`, with the tensors' device as the current one and without autocast, which would round fp32 operands."""
        device = _device_of(args)
        if is_current(device) and autocast_dtype(device.type) is None:  # the usual case: two contexts take 2 us
            return self.run(*args, **more)
        with as_current(device), without_autocast(device.type):
            return self.run(*args, **more)

    def _is_direct(self, args: tuple) -> bool:
        """True if only autograd intercepts this call. Meta tensors get the fake results, except in dry runs."""
        return (
            is_plain() and are_plain(args) and ((device := _device_of(args)).type != "meta" or expects_kernels(device))
        )


def _device_of(args: tuple) -> torch.device:
    """The device of the first tensor. Numbers, as 0-dim tensors, may be on a CPU."""
    for arg in args:  # `next` of a generator takes three times as long
        if isinstance(arg, Tensor) and arg.dim():
            return arg.device
    raise AssertionError("an operator without a tensor")


def reshaped(t: Tensor, shape: Sequence[int]) -> Tensor:
    """t.reshape(shape). The gradient of a leaf has memory of its own, except in compiled code.

    Otherwise autograd may keep a view of another tensor's gradient as the leaf's, to which the next backward adds.
    """
    out = t.reshape(shape)
    if t.is_leaf and out.requires_grad and out is not t and not is_compiling():
        out.register_hook(lambda grad: None if grad is None else grad.clone())
    return out


def fast_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without two Python frames of torch, for callers that have checked `is_plain`.

    Function.apply checks for functorch, which `is_plain` has done, and the node's apply checks for a `vjp`. That saves
    1.3 and 0.4 us of the 14 us that forward and backward of a norm take (on a CPU, with kernels that do nothing).
    """
    function._backward_cls.apply = function.backward
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


# True with retain_graph=True, and outside of backward. Otherwise autograd runs a backward again only if it raised.
is_graph_kept = torch._C._autograd._get_current_graph_task_keep_graph

# Refusals -------------------------------------------------------------------------------------------------------------


def refuse_transforms(who: str) -> None:
    if is_transformed():
        raise UnsupportedError(f"{who}: torch.func transforms and forward-mode AD are not supported")


def refuse_second_derivatives(who: str, *grads: Tensor | None) -> None:
    """RuntimeError in a backward pass with create_graph=True or with batched gradients."""
    if torch.is_grad_enabled():
        raise RuntimeError(f"{who}: create_graph=True (double backward) is not supported")
    refuse_batched_gradients(who, *grads)


def refuse_batched_gradients(who: str, *grads: Tensor | None) -> None:
    """RuntimeError in a backward pass with batched gradients."""
    for grad in grads:
        if grad is not None and (_is_batched(grad) or _is_legacy_batched(grad)):
            raise RuntimeError(f"{who}: vmap over gradients (is_grads_batched=True) is not supported")


_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor


# FLOPs ----------------------------------------------------------------------------------------------------------------

_formulas: dict[Any, Callable[..., int]] = {}  # by operator: 2 * m * n * k per matrix product, and nothing else


def add_flop_formulas() -> None:
    """Gives torch.utils.flop_counter the operators' formulas, if a program has loaded it: it imports Triton (80 ms).

    Formulas see only shapes: rows that are ignored, dropped or in no group count too. A counter copies the registry
    when it is created, which may have been before now.
    """
    counters = sys.modules.get("torch.utils.flop_counter")
    if counters is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    for operator, formula in _formulas.items():
        if operator not in counters.flop_registry:
            counters.register_flop_formula(operator)(formula)
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, counters.FlopCounterMode):
            for operator in _formulas:
                counter.flop_registry.setdefault(operator, counters.flop_registry[operator])
