"""Residual sums of decoder layers: added inside the RMSNorm or the MLP beside them.

A patched layer runs its class's own forward, on a stand-in of itself whose children return `_Deferred` values. A sum of
two is deferred too. If an RMSNorm that quackish patched gets the sum, `rms_norm(residual=)` computes both; if the
output of such an MLP is added to something, `mlp(residual=)` does. Anything else that the forward does with a deferred
value computes it first, so that its results are those of the class.
"""

import dis
import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quackish.integrations.plain import why_output_differs, why_weights_unsupported
from quackish.integrations.transformers import mlps, norms
from quackish.integrations.transformers.subclass import runs_own_forward, subclass, unpatched_class
from quackish.integrations.transformers.trial import (
    Random,
    compare_trials,
    isolated,
    plain_attributes,
    reason,
    shell,
    takes,
)


@functools.cache
def layer_class(base: type) -> type:
    """A subclass of a decoder layer whose forward adds residuals inside norms and MLPs. Cached."""

    def forward(self, *args, **kwargs) -> Any:
        if runs_own_forward(args, kwargs):
            return base.forward(self, *args, **kwargs)
        output = base.forward(_stand_in(self), *args, **kwargs)
        if isinstance(output, (Tensor, _Deferred)):
            return _computed(output)
        return tree_map_only(_Deferred, _computed, output)

    return subclass(base, forward, (layer_class, base), adds_residuals=True)


def _stand_in(layer: nn.Module) -> nn.Module:
    """A layer with the same attributes, whose children return deferred values."""
    copy = object.__new__(type(layer))
    children = {name: None if child is None else _Child(child) for name, child in layer._modules.items()}
    copy.__dict__ = {**layer.__dict__, "_modules": children}
    return copy


class _Child:
    """A child of a layer in its stand-in."""

    def __init__(self, child: nn.Module):
        self._child = child

    def __getattr__(self, name: str) -> Any:
        return getattr(self._child, name)

    @property
    def __class__(self) -> type:  # for isinstance
        return type(self._child)

    def __call__(self, *args, **kwargs) -> Any:
        child = self._child
        (first, *others) = args or (None,)
        if type(first) is _Sum and not others and not kwargs and hasattr(type(child), "norm_formula"):
            return first.normed(child)
        args, kwargs = _computed(args), {name: _computed(value) for name, value in kwargs.items()}
        if len(args) == 1 and not kwargs and type(args[0]) is Tensor and _is_mlp(child):
            return _MlpOutput(child, *args)
        output = child(*args, **kwargs)
        if type(output) is tuple:
            return tuple(map(_deferred, output))
        return _deferred(output)


def _is_mlp(child: nn.Module) -> bool:
    """True for a patched MLP without hooks."""
    return hasattr(type(child), "mlp_form") and not why_output_differs(child, ignored=())


# Deferred values ------------------------------------------------------------------------------------------------------


class _Deferred:
    """A tensor that is computed when it is needed, once."""

    _tensor: Tensor | None = None

    def __init__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()

    def compute(self) -> Tensor:
        """Called at most once."""
        raise NotImplementedError

    def tensor(self) -> Tensor:
        if self._tensor is None:
            with torch.set_grad_enabled(self._grad_enabled):
                self._tensor = self.compute()
        return self._tensor

    def can_fuse(self) -> bool:
        """True if it is not computed yet, and gradients are enabled, or not, as they were for this value."""
        return self._tensor is None and self._grad_enabled == torch.is_grad_enabled()

    def __add__(self, other: Any) -> Any:
        return _add(self, other)

    def __radd__(self, other: Any) -> Any:
        return _add(other, self)

    def __mul__(self, other: Any) -> Any:
        return _deferred(self.tensor() * _computed(other))

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.add, Tensor.add, Tensor.__add__) and len(args) == 2 and not kwargs:
            return _add(*args)
        return func(*_computed(args), **{name: _computed(value) for name, value in (kwargs or {}).items()})


def _of_tensor(name: str) -> Callable:
    """A special method of tensors, for deferred values. Python does not look these up with `__getattr__`."""

    def method(self: _Deferred, *args: Any) -> Any:
        return getattr(self.tensor(), name)(*_computed(args))

    return method


for _name in (
    "getitem setitem len iter contains bool float int index neg pos abs invert eq ne lt le gt ge and or xor rand ror "
    "rxor sub rsub truediv rtruediv floordiv rfloordiv mod rmod pow rpow matmul rmatmul"
).split():
    setattr(_Deferred, f"__{_name}__", _of_tensor(f"__{_name}__"))


class _Output(_Deferred):
    """The output of a child."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor


class _MlpOutput(_Deferred):
    """The output of a patched MLP."""

    def __init__(self, mlp: nn.Module, x: Tensor):
        super().__init__()
        self.mlp, self.x = mlp, x

    def compute(self) -> Tensor:
        return self.mlp(self.x)

    def plus(self, residual: Tensor) -> Tensor | None:
        """The output plus a residual; None if `quackish.mlp` does not compute it."""
        if not self.can_fuse() or not _alike(self.x, residual):
            return None
        return mlps.run(self.mlp, self.x, residual)


class _Sum(_Deferred):
    """x + residual"""

    def __init__(self, x: Tensor, residual: Tensor):
        super().__init__()
        self.x, self.residual = x, residual

    def compute(self) -> Tensor:
        return self.residual + self.x

    def normed(self, norm: nn.Module) -> _Deferred:
        """The norm of the sum."""
        bypassed = why_output_differs(norm, ignored=()) or why_weights_unsupported(norm)
        if bypassed or not self.can_fuse() or not _alike(self.x, self.residual):
            return _deferred(norm(self.tensor()))
        y, self._tensor = norms.run(norm, type(norm).norm_formula, self.x, self.residual)
        return _Output(y)


def _alike(x: Tensor, residual: Tensor) -> bool:
    """True for plain tensors of one shape and dtype, whose sum has it too."""
    plain = type(x) in (Tensor, nn.Parameter) and type(residual) in (Tensor, nn.Parameter)
    return plain and x.shape == residual.shape and x.dtype == residual.dtype and x.device == residual.device


def _add(a: Any, b: Any) -> Any:
    """a + b, of which at least one is deferred."""
    for output, other in ((b, a), (a, b)):
        if type(output) is _MlpOutput and isinstance(residual := _computed(other), Tensor):
            if (result := output.plus(residual)) is not None:
                return _Output(result)
    a, b = _computed(a), _computed(b)
    return _Sum(b, a) if isinstance(a, Tensor) and isinstance(b, Tensor) else a + b


def _deferred(value: Any) -> Any:
    return _Output(value) if type(value) is Tensor else value


def _computed(value: Any) -> Any:
    """A deferred value's tensor, also in tuples and lists; any other value as it is."""
    if isinstance(value, _Deferred):
        return value.tensor()
    if type(value) in (tuple, list):
        return type(value)(map(_computed, value))
    return value


# Trials ---------------------------------------------------------------------------------------------------------------


class _Counted(nn.Module):
    """Counts its calls. A sum that is added inside of it needs none."""

    num_calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.num_calls += 1
        return super().__call__(*args, **kwargs)


class _Norm(_Counted, nn.RMSNorm):
    """Stands for a norm that quackish computes."""


class _Mlp(_Counted):
    """Stands for an MLP that quackish computes."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(_N, _N, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class _Sublayer(nn.Module):
    """Stands for any other child. It returns its output and `others` times None."""

    def __init__(self, random: Random, attributes: dict[str, object], others: int):
        super().__init__()
        self.__dict__.update(attributes)
        self.weight, self.others = nn.Parameter(random.normal(_N, dtype=torch.float64)), others

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        (x, *_) = *args, *kwargs.values()
        output = torch.tanh(x * self.weight)
        return (output, *[None] * self.others) if self.others else output


_N = 24
_trials: dict[tuple, str] = {}


def is_layer(module: nn.Module) -> bool:
    """True for what looks like a decoder layer: two of its children have children, and one is a norm or an MLP."""
    (first, *others) = takes(module) or ("",)
    if not others or not ("hidden" in first or first == "x"):  # a mixture of experts takes hidden states alone
        return False
    children = [child for child in module.children() if not isinstance(child, nn.ModuleList)]
    num_sublayers = sum(next(child.children(), None) is not None for child in children)
    return num_sublayers >= 2 and any(norms.is_norm(child) or mlps.is_mlp(child) for child in children)


def why_unsupported(layer: nn.Module) -> str:
    """Says why no sum of a layer can be added elsewhere; "" if one can. Cached per class and attributes."""
    base = unpatched_class(layer)
    if "forward" in vars(layer):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if any(step.opname == "STORE_ATTR" for step in dis.get_instructions(inspect.unwrap(base.forward))):
        return "its forward sets an attribute"  # of a stand-in
    roles = {name: _role(child) for name, child in layer.named_children()}
    attributes = {name: value for name, value in plain_attributes(layer).items() if name != "layer_idx"}
    key = base, base.forward, repr((roles, sorted(attributes.items())))
    if key not in _trials:
        try:
            with isolated():
                _trials[key] = _try(layer, base, roles)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _trials[key]


def _role(child: nn.Module) -> str:
    """What stands for a child in a trial: a norm, an MLP, another function of one tensor, or a sublayer."""
    if norms.is_norm(child) and isinstance(norms.formula_of(child), norms.Formula):
        return "norm"
    if mlps.is_mlp(child) and isinstance(mlps.form_of(child), mlps.Form):
        return "mlp"
    return "function" if next(child.children(), None) is None else "sublayer"


def _try(layer: nn.Module, base: type, roles: dict[str, str]) -> str:
    """Says how a layer with stand-ins for its children differs, or that no sum moves; "" otherwise."""
    failure: Exception | None = None
    sublayers = [name for name, role in roles.items() if role == "sublayer"]
    for others in itertools.product((1, 0, 2), repeat=len(sublayers)):
        small = _small_layer(layer, base, roles, dict(zip(sublayers, others, strict=True)))
        try:
            _run(small)
        except Exception as error:  # its sublayers return something else
            failure = failure or error
            continue
        for training in (False, True):
            small.__class__ = base
            expected = _run(small.train(training))
            small.__class__ = layer_class(base)
            got = _run(small)
            if why := compare_trials(got.values, expected.values, "its own", 1e-6):
                return why
        if got.num_calls == expected.num_calls:
            return "no sum of it is the input of an RMSNorm, or has the output of an MLP, that quackish computes"
        return ""
    return reason(failure) if failure else "it has no sublayers"


def _small_layer(layer: nn.Module, base: type, roles: dict[str, str], others: dict[str, int]) -> nn.Module:
    small, random = shell(layer, base), Random()
    for registered in ("_parameters", "_buffers"):
        for name, t in getattr(layer, registered).items():
            if t is not None:
                shape = [_N if n > 1 else n for n in t.shape]
                getattr(small, registered)[name] = nn.Parameter(random.normal(*shape, dtype=torch.float64))
    for name, child in layer.named_children():
        if roles[name] == "norm":
            norm = _Norm(_N, eps=1e-6, dtype=torch.float64)
            norm.__class__ = norms.norm_class(_Norm, norms.formula_of(norm))
            small.add_module(name, norm)
        elif roles[name] == "mlp":
            mlp = _Mlp()
            mlp.__class__ = mlps.mlp_class(_Mlp, mlps.Form("swiglu", "gate", "up", "down"))
            small.add_module(name, mlp)
        else:
            small.add_module(name, _Sublayer(random, plain_attributes(child), others.get(name, 0)))
    return small


class _Trial(NamedTuple):
    values: dict[str, Tensor | None]
    num_calls: int  # of norms and MLPs


def _run(small: nn.Module) -> _Trial:
    """Runs a layer's forward and backward on random hidden states, with None for other arguments without a default."""
    torch.manual_seed(0)  # for dropout
    random = Random(1)
    x, grad = (random.normal(5, 3, _N, dtype=torch.float64) for _ in range(2))  # nobody unpacks five
    x.requires_grad_()
    parameters = list(inspect.signature(unpatched_class(small).forward).parameters.values())[2:]
    missing = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    counted = [child for child in small.children() if isinstance(child, _Counted)]
    for child in counted:
        child.num_calls = 0
    output = small(x, **dict.fromkeys(missing))
    output = output[0] if isinstance(output, tuple) else output
    leaves = {"hidden_states": x, **dict(small.named_parameters())}
    grads = torch.autograd.grad(output, list(leaves.values()), grad, allow_unused=True)
    values = {"output": output.detach(), **dict(zip(leaves, grads, strict=True))}
    return _Trial(values, sum(child.num_calls for child in counted))
