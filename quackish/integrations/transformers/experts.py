"""Mixtures of experts: which modules compute what `quackish.moe_mlp` does, by trial, and their patched classes.

gpt-oss interleaves gate and up in memory. `patch` sorts its weights into [gate; up] in place, and `restore_weights` puts
them back. State dicts of a patched model have the original order.
"""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import quackish
from quackish.errors import UnsupportedError
from quackish.integrations.transformers.subclass import subclass, unpatched_class
from quackish.integrations.transformers.trial import Random, difference, isolated, reason, shell


class Form(NamedTuple):
    """How a class of experts computes, and how its weights lie in memory."""

    activation: str  # as in quackish.moe_mlp
    first: str  # the parameter that w1 is
    is_transposed: bool  # w1 is (E, H, 2I) and w2 (E, I, H)
    is_interleaved: bool = False  # w1 has [gate 0, up 0, gate 1, up 1, ...]


@functools.cache
def experts_class(base: type, form: Form) -> type:
    names = list(inspect.signature(base.forward).parameters)[1:]  # hidden states, index and weights
    permuted = (form.first, f"{form.first}_bias") if form.is_interleaved else ()

    def forward(self, *args, **kwargs) -> Tensor:
        if permuted and hasattr(self, "parametrizations"):
            raise UnsupportedError(
                f"the weights of a {base.__name__} are parametrized, as by PEFT's target_parameters; expected plain ones, "
                "because quackish sorts them in memory. Call revert(model) before PEFT wraps it"
            )
        x, index, weights = *args, *[kwargs[name] for name in names[len(args) :]]
        w1, w2 = getattr(self, form.first), self.down_proj
        if form.is_transposed:
            w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
        b1, b2 = getattr(self, f"{form.first}_bias", None), getattr(self, "down_proj_bias", None)
        out = quackish.moe_mlp(x, index, weights, w1, w2, activation=form.activation, b1=b1, b2=b2)
        return out.to(x.dtype)  # under autocast, out has autocast's dtype

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


def _sorted(t: Tensor) -> Tensor:
    """(..., [gate 0, up 0, gate 1, ...]) as (..., [gate 0, gate 1, ..., up 0, ...]), by views that DTensors have."""
    return t.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def _interleaved(t: Tensor) -> Tensor:
    return t.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def patch(experts: nn.Module, form: Form) -> None:
    experts.__class__ = experts_class(type(experts), form)
    _replace_permuted(experts, _sorted)


def restore_weights(module: nn.Module) -> None:
    """Undoes what `patch` did to the weights; does nothing to other modules."""
    _replace_permuted(module, _interleaved)


@torch.no_grad()
def _replace_permuted(module: nn.Module, order: Callable[[Tensor], Tensor]) -> None:
    for name in getattr(type(module), "permuted", ()):
        weight = getattr(module, name)
        weight.copy_(order(weight))


# Trials ---------------------------------------------------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """True for a module whose own parameters are the matrices of all experts."""
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3 and _first(module) is not None


def _first(module: nn.Module) -> str | None:
    own = module._parameters
    return next((name for name in ("gate_up_proj", "up_proj") if own.get(name) is not None and own[name].dim() == 3), None)


_forms: dict[tuple, Form | str] = {}


def form_of(experts: nn.Module) -> Form | str:
    """What a module of experts computes, or why `quackish.moe_mlp` cannot."""
    base = unpatched_class(experts)
    if "forward" in vars(experts):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    parameters = list(inspect.signature(base.forward).parameters)
    if len(parameters) != 4:
        return f"its forward takes ({', '.join(parameters[1:])}), expected hidden states, indices and weights"
    shapes = [(name, tuple(p.shape)) for name, p in experts.named_parameters(recurse=False)]
    attributes = {name: value for name, value in vars(experts).items() if not name.startswith("_")}
    children = [repr(child) for child in experts.children()]
    key = base, base.forward, repr((shapes, children, sorted(attributes.items(), key=lambda item: item[0])))
    if key not in _forms:
        with isolated():
            _forms[key] = _try(experts, base)
    return _forms[key]


def why_unsupported(experts: nn.Module) -> str:
    form = form_of(experts)
    return form if isinstance(form, str) else ""


_SIZE = 8
_GATED, _PLAIN = ("swiglu", "clamped_swiglu", "geglu"), ("silu", "relu2")


def _try(experts: nn.Module, base: type) -> Form | str:
    why = "its weights have other shapes than [gate; up] and down"
    for form in _candidates(experts):
        small = _small_experts(experts, base, form)
        try:
            why = _why_different(small, base, form)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
        if not why:
            return form
    return why


def _candidates(experts: nn.Module) -> list[Form]:
    """Forms whose shapes fit."""
    first = _first(experts)
    w1, w2 = experts._parameters[first].shape, experts._parameters["down_proj"].shape
    factor, activations = (2, _GATED) if first == "gate_up_proj" else (1, _PLAIN)
    forms = []
    for is_transposed in (False, True):
        (rows, h1), (h2, inner) = (w1[:0:-1], w2[:0:-1]) if is_transposed else (w1[1:], w2[1:])
        if w1[0] == w2[0] and h1 == h2 and rows == factor * inner:
            for activation in activations:
                forms.append(Form(activation, first, is_transposed))
                if is_transposed and factor == 2:
                    forms.append(Form(activation, first, is_transposed, True))
    return forms


def _small_experts(experts: nn.Module, base: type, form: Form) -> nn.Module:
    """The same experts with hidden and intermediate sizes of `_SIZE`."""
    random, small = Random(), shell(experts, base)
    w2 = experts._parameters["down_proj"].shape
    sizes = {2 * w2[1]: 2 * _SIZE, 2 * w2[2]: 2 * _SIZE}
    sizes.update({w2[1]: _SIZE, w2[2]: _SIZE})
    for name, value in vars(experts).items():
        if type(value) is int and ("size" in name or "dim" in name):
            setattr(small, name, sizes.get(value, value))
    if hasattr(small, "config"):
        small.config = copy.copy(small.config)
        small.config._experts_implementation = "eager"
    for name, p in experts.named_parameters(recurse=False):
        first = 2 * _SIZE if form.activation in _GATED else _SIZE
        bias = {f"{form.first}_bias": (first,), "down_proj_bias": (_SIZE,)}
        matrix = {form.first: (_SIZE, first) if form.is_transposed else (first, _SIZE), "down_proj": (_SIZE, _SIZE)}
        shape = w2[0], *(matrix | bias).get(name, p.shape[1:])
        small.register_parameter(name, nn.Parameter(random.normal(*shape, std=0.5)))
    return small


def _why_different(small: nn.Module, base: type, form: Form) -> str:
    """How a class's own forward differs from the patched one's, "" if it does not."""
    random, tokens, num_experts = Random(1), 6, small.down_proj.shape[0]
    grad, largest = random.normal(tokens, _SIZE), min(2, num_experts)
    for scale in (1.0, 300.0):  # large activations reach limits
        weights, index = random.normal(tokens, num_experts).softmax(1).topk(largest)
        arguments = random.normal(tokens, _SIZE, std=scale), index, weights
        expected = _run(small, arguments, grad)
        patch(small, form)
        got = _run(small, arguments, grad)
        for name in type(small).permuted:
            got[name] = _interleaved(got[name])
        restore_weights(small)
        small.__class__ = base
        for name, truth in expected.items():
            if not difference(got[name], truth) <= 1e-4:
                what = "its output" if name == "out" else f"the gradient of {name}"
                return f"{what} differs from moe_mlp's by {difference(got[name], truth):.1g}"
    return ""


def _run(small: nn.Module, arguments: tuple[Tensor, Tensor, Tensor], grad: Tensor) -> dict[str, Tensor | None]:
    """The output, and the gradients of hidden states, weights of the choices, and parameters."""
    x, index, weights = arguments
    leaves = {"x": x.clone().requires_grad_(), "weights": weights.clone().requires_grad_(), **dict(small.named_parameters())}
    out = small(leaves["x"], index, leaves["weights"])
    grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}
