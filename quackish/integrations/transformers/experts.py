"""Mixtures of experts: which modules compute what `quackish.moe_mlp` does, by trial, and their patched classes.

gpt-oss interleaves gate and up in memory. `patch` sorts its weights and their gradients into [gate; up] in place, and
`restore_weights` puts them back. State dicts of a patched model have the original order.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import quackish
from quackish.errors import UnsupportedError, a
from quackish.integrations.plain import warn_unless_compiling, why_weights_unsupported
from quackish.integrations.transformers.subclass import lacks_kernels, subclass, unpatched_class
from quackish.integrations.transformers.trial import (
    Random,
    compare_trials,
    isolated,
    key_of,
    reason,
    run_trial,
    small_copy,
    takes,
)


class Form(NamedTuple):
    """How a class of experts computes, and how its weights lie in memory."""

    activation: str  # as in quackish.moe_mlp
    first: str  # the name of the parameter that is w1
    is_transposed: bool  # w1 is (E, H, 2I) and w2 (E, I, H)
    is_interleaved: bool = False  # w1 has [gate 0, up 0, gate 1, up 1, ...]


@functools.cache
def experts_class(base: type, form: Form) -> type:
    """A subclass of a class of experts whose forward runs `quackish.moe_mlp`. Cached."""
    names = list(inspect.signature(base.forward).parameters)[1:]  # hidden states, index and weights
    permuted = (form.first, f"{form.first}_bias") if form.is_interleaved else ()

    def forward(self, *args, **kwargs) -> Tensor:
        if permuted and hasattr(self, "parametrizations"):
            raise UnsupportedError(
                f"the weights of {a(base)} are parametrized, as by PEFT's target_parameters; expected plain "
                "ones, because quackish sorts them in memory. Call revert(model) before PEFT wraps it"
            )
        if why := why_weights_unsupported(self):
            if permuted:
                raise UnsupportedError(
                    f"{a(base)}: {why}, because quackish sorts it in memory. Call revert(model) before quantizing it"
                )
            warn_unless_compiling(f"{base.__name__}: {why}. Its own forward runs.")
            return base.forward(self, *args, **kwargs)
        if not (permuted or torch.compiler.is_compiling()) and lacks_kernels(args, kwargs):
            return base.forward(self, *args, **kwargs)
        x, index, weights = *args, *[kwargs[name] for name in names[len(args) :]]
        return run(self, form, x, index, weights)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        base._save_to_state_dict(self, destination, prefix, keep_vars)
        for name in permuted:
            if prefix + name in destination:
                destination[prefix + name] = _interleaved(destination[prefix + name])

    def _load_from_state_dict(self, state_dict, prefix, *args):
        for name in permuted:
            if prefix + name in state_dict:  # a dict of this module
                state_dict[prefix + name] = _sorted(state_dict[prefix + name])
        base._load_from_state_dict(self, state_dict, prefix, *args)

    methods = {}
    if permuted:
        methods = dict(_save_to_state_dict=_save_to_state_dict, _load_from_state_dict=_load_from_state_dict)
    return subclass(base, forward, (experts_class, base, form), permuted=permuted, **methods)


def run(experts: nn.Module, form: Form, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """`quackish.moe_mlp` with the weights of a module. x: (tokens, H); index and weights: (tokens, k)."""
    w1, w2 = getattr(experts, form.first), experts.down_proj
    if form.is_transposed:
        w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    b1, b2 = getattr(experts, f"{form.first}_bias", None), getattr(experts, "down_proj_bias", None)
    out = quackish.moe_mlp(x, index, weights, w1, w2, activation=form.activation, b1=b1, b2=b2)
    return out.to(x.dtype)  # under autocast, out has autocast's dtype


def _sorted(t: Tensor) -> Tensor:
    """Sorts [gate 0, up 0, gate 1, ...] into [gate 0, gate 1, ..., up 0, ...] by views that DTensors have."""
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _interleaved(t: Tensor) -> Tensor:
    """The inverse of `_sorted`."""
    return t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def patch(experts: nn.Module, form: Form) -> None:
    """Changes the class of a module of experts, and sorts weights that are interleaved."""
    experts.__class__ = experts_class(type(experts), form)
    _replace_permuted(experts, _sorted)


def restore_weights(module: nn.Module) -> None:
    """Undoes what `patch` did to the weights; does nothing to other modules."""
    _replace_permuted(module, _interleaved)


@torch.no_grad()
def _replace_permuted(module: nn.Module, order: Callable[[Tensor], Tensor]) -> None:
    """Reorders the interleaved parameters of a patched module, and their gradients, in place."""
    for name in getattr(type(module), "permuted", ()):
        weight = getattr(module, name, None)
        for t in (weight, None if weight is None else weight.grad):  # there may be no bias
            if t is not None:
                t.copy_(order(t))


# Trials ---------------------------------------------------------------------------------------------------------------


def first_matrix(module: nn.Module) -> str | None:
    """The name of the parameter that is w1; None if the module's own parameters are no experts."""
    matrices = [name for name, p in module._parameters.items() if p is not None and p.dim() == 3]
    if "down_proj" not in matrices:
        return None
    return next((name for name in ("gate_up_proj", "up_proj") if name in matrices), None)


_forms: dict[tuple, Form | str] = {}


def form_of(experts: nn.Module) -> Form | str:
    """What a module of experts computes, or why `quackish.moe_mlp` cannot. Cached per class and attributes."""
    base = unpatched_class(experts)
    if "forward" in vars(experts):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if why := why_weights_unsupported(experts):
        return why
    if len(takes(experts)) != 3:
        return f"its forward takes ({', '.join(takes(experts))}), expected hidden states, indices and weights"
    key = base, base.forward, key_of(experts)
    if key not in _forms:
        try:
            with isolated():
                _forms[key] = find_form(experts, experts, _why_different)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _forms[key]


GATED = ("swiglu", "clamped_swiglu", "geglu", "geglu_erf", "reglu")
PLAIN = ("silu", "relu2", "gelu_tanh", "gelu_erf")


def find_form(module: nn.Module, experts: nn.Module, why_different: Callable[[nn.Module, Form], str]) -> Form | str:
    """The first form in which a small copy of `module`, which has or is `experts`, computes the same with quackish."""
    why = "its weights have other shapes than [gate; up] and down"
    for form in _candidates(experts):
        small = small_copy(module, unpatched_class(module), _small_sizes(experts, form), Random())
        for part in small.modules():
            if hasattr(part, "config"):
                part.config = copy.copy(part.config)
                part.config._experts_implementation = "eager"
        why = why_different(small, form)
        if not why:
            return form
    return why


def _candidates(experts: nn.Module) -> list[Form]:
    """The forms that fit the shapes of the weights."""
    first = first_matrix(experts)
    w1, w2 = experts._parameters[first].shape, experts._parameters["down_proj"].shape
    factor, activations = (2, GATED) if first == "gate_up_proj" else (1, PLAIN)
    forms = []
    for is_transposed in (False, True):
        (rows, h1), (h2, inner) = ((w1[2], w1[1]), (w2[2], w2[1])) if is_transposed else (w1[1:], w2[1:])
        if w1[0] == w2[0] and h1 == h2 and rows == factor * inner:
            for activation in activations:
                forms.append(Form(activation, first, is_transposed))
                if is_transposed and factor == 2:
                    forms.append(Form(activation, first, is_transposed, True))
    return forms


def _small_sizes(experts: nn.Module, form: Form) -> dict[int, int]:
    """Maps hidden and intermediate sizes to small ones. Equal sizes stay equal."""
    hidden, inner = experts._parameters["down_proj"].shape[1:][:: -1 if form.is_transposed else 1]
    return {hidden: 24, inner: 8, 2 * inner: 16}


def _why_different(small: nn.Module, form: Form) -> str:
    """Says how a class's own forward differs from the patched one's; "" if it does not."""
    random, tokens, base = Random(1), 6, type(small)
    num_experts, hidden = small.down_proj.shape[0], small.down_proj.shape[1 + form.is_transposed]
    grad, largest = random.normal(tokens, hidden), min(2, num_experts)
    for scale, training in ((1.0, True), (300.0, False)):  # large activations reach limits
        small.train(training)
        weights, index = random.normal(tokens, num_experts).softmax(1).topk(largest)
        arguments = random.normal(tokens, hidden, std=scale), index, weights
        expected = run_trial(small, arguments, grad)
        patch(small, form)
        got = run_trial(small, arguments, grad)
        for name in type(small).permuted:
            got[name] = _interleaved(got[name])
        restore_weights(small)
        small.__class__ = base
        if why := compare_trials(got, expected):
            return why
    return ""
