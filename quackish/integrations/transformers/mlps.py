"""Dense MLPs: which modules compute what `quackish.mlp` does, by trial, and their patched classes."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

import quackish
from quackish.errors import UnsupportedError, a
from quackish.integrations.plain import backend_for, why_output_differs, why_weights_unsupported
from quackish.integrations.transformers.experts import GATED, PLAIN
from quackish.integrations.transformers.subclass import runs_own_forward, subclass, unpatched_class
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
    """How a class computes, and the names of its linears."""

    activation: str  # as in quackish.mlp
    w1: str
    w3: str | None  # the up projection, if w1 is the gate alone
    w2: str
    others: tuple[str, ...] = ()  # the names of the classes of its other modules

    def linears(self) -> list[str]:
        """The names of the linears."""
        return [name for name in (self.w1, self.w3, self.w2) if name is not None]


@functools.cache
def mlp_class(base: type, form: Form) -> type:
    """A subclass of an MLP whose forward runs `quackish.mlp`. Cached."""

    def forward(self, *args, **kwargs) -> Tensor:
        values = *args, *kwargs.values()
        if runs_own_forward(args, kwargs) or len(values) != 1 or (y := run(self, values[0])) is None:
            return base.forward(self, *args, **kwargs)
        return y

    return subclass(base, forward, (mlp_class, base, form), mlp_form=form)


def run(mlp: nn.Module, x: Tensor, residual: Tensor | None = None) -> Tensor | None:
    """`quackish.mlp` of a patched MLP; None if its own forward has to run."""
    form = type(mlp).mlp_form
    if why_bypassed(mlp, form):
        return None
    first, down = getattr(mlp, form.w1), getattr(mlp, form.w2)
    up = None if form.w3 is None else getattr(mlp, form.w3)
    w3, b3 = (None, None) if up is None else (up.weight, up.bias)
    options = dict(w3=w3, b1=first.bias, b3=b3, b2=down.bias, activation=form.activation, backend=backend_for(x))
    try:
        return quackish.mlp(x, first.weight, down.weight, residual=residual, **options)
    except (UnsupportedError, TypeError):  # TypeError: dtypes that the class's own forward may convert
        return None


def why_bypassed(mlp: nn.Module, form: Form) -> str:
    """Says why calls of a patched MLP run its own forward; "" if they do not.

    Linears may be wrapped, hooked or sharded after `apply`, as by PEFT, FSDP, DeepSpeed and tensor parallelism; an
    activation may be hooked or replaced.
    """
    for name, part in mlp._modules.items():
        if name not in form.linears() and part is not None:
            if type(part).__qualname__ not in form.others:
                return f"its {name} is {a(type(part))}, which it was not in apply"
            if why := why_output_differs(part, ignored=()):
                return f"{name}: {why}"
    for name in form.linears():
        linear = mlp._modules.get(name)
        if type(linear) is not nn.Linear:
            return f"its {name} is {a(type(linear))}, expected a torch.nn.Linear"
        why = why_output_differs(linear, ignored=()) or why_weights_unsupported(linear)
        if not why and type(linear.weight).__name__ == "DTensor":
            why = "its weight is a DTensor, expected a plain tensor"
        if why:
            return f"{name}: {why}"
    return ""


# Trials ---------------------------------------------------------------------------------------------------------------


def is_mlp(module: nn.Module) -> bool:
    """True for a patched MLP, and for a module whose parameters all belong to two or three linears of its shapes."""
    if hasattr(type(module), "mlp_form"):
        return True
    if module._parameters or len(takes(module)) != 1:
        return False
    return next(_candidates(module), None) is not None


_forms: dict[tuple, Form | str] = {}


def form_of(mlp: nn.Module) -> Form | str:
    """What an MLP computes, or why `quackish.mlp` does not. Trials are cached per class and attributes."""
    base = unpatched_class(mlp)
    if "forward" in vars(mlp):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    form = next(_candidates(mlp), None)
    if form is None:
        return "its linears are no longer plain ones"
    if why := why_bypassed(mlp, form):
        return why
    key = base, base.forward, key_of(mlp)
    if key not in _forms:
        try:
            with isolated():
                _forms[key] = _find(mlp, base)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _forms[key]


def _find(mlp: nn.Module, base: type) -> Form | str:
    """The first form in which a small copy of the MLP computes the same as quackish, or how the first one differs."""
    reasons, failures = [], []
    for form in _candidates(mlp):
        down = getattr(mlp, form.w2)
        hidden, inner = down.out_features, down.in_features
        small = small_copy(mlp, base, {hidden: 24, inner: 16, 2 * inner: 32}, Random()).double()
        try:
            why = _why_different(small, form)
        except Exception as error:  # linears in another order have other sizes
            failures.append(reason(error))
            continue
        if not why:
            return form
        reasons.append(why)
    return [*reasons, *failures][0]


def _candidates(mlp: nn.Module) -> Iterator[Form]:
    """The forms that fit the shapes of the linears."""
    linears: dict[str, nn.Linear] = {}
    others = tuple(type(child).__qualname__ for child in mlp.children() if not isinstance(child, nn.Linear))
    for name, child in mlp.named_children():
        if isinstance(child, nn.Linear):
            linears[name] = child
        elif next(child.parameters(), None) is not None or next(child.buffers(), None) is not None:
            return
    for w1, *w3, w2 in itertools.permutations(linears, len(linears)) if len(linears) in (2, 3) else ():
        first, down, up = linears[w1], linears[w2], [linears[name] for name in w3]
        hidden, inner = down.out_features, down.in_features
        if first.in_features != hidden or any((u.in_features, u.out_features) != (hidden, inner) for u in up):
            continue
        if first.out_features == inner:
            for activation in GATED if w3 else PLAIN:
                yield Form(activation, w1, w3[0] if w3 else None, w2, others)
        elif first.out_features == 2 * inner and not w3:
            for activation in GATED:
                yield Form(activation, w1, None, w2, others)


def _why_different(small: nn.Module, form: Form) -> str:
    """Says how a class's own forward differs from the patched one's; "" if it does not."""
    random, base, tokens = Random(1), type(small), 6
    hidden = getattr(small, form.w2).weight.shape[0]
    for training, scale in ((True, 1.0), (False, 30.0)):  # dropout; large activations reach limits
        small.train(training)
        x = random.normal(2, tokens, hidden, dtype=torch.float64, std=scale)
        grad = random.normal(2, tokens, hidden, dtype=torch.float64)
        expected = run_trial(small, (x,), grad)
        small.__class__ = mlp_class(base, form)
        got = run_trial(small, (x,), grad)
        small.__class__ = base
        if why := compare_trials(got, expected, "mlp", 1e-6):
            return why
    return ""
