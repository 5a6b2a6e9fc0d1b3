"""RMSNorms: which modules compute quackish's formula, by trial, and their patched classes."""

import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import quackish
from quackish.integrations.plain import warn_unless_compiling, why_weights_unsupported
from quackish.integrations.transformers.subclass import runs_own_forward, subclass, unpatched_class
from quackish.integrations.transformers.trial import Random, difference, isolated, plain_attributes, reason, shell


class Formula(NamedTuple):
    """y = x / sqrt(mean(x^2) + eps) * (weight_offset + weight)"""

    eps: str  # the attribute that holds eps, read at every call
    has_weight: bool
    weight_offset: float
    out_dtype: str  # a key of _OUT_DTYPES


# The dtype of y. All of them agree if x and weight have the same dtype.
_OUT_DTYPES = {
    "x": lambda x, weight: x.dtype,  # Gemma
    "promoted": lambda x, weight: torch.promote_types(x.dtype, weight.dtype),  # Llama
    "16-bit weight": lambda x, weight: (
        torch.promote_types(x.dtype, weight.dtype)  # T5
        if weight.dtype.itemsize > 2
        else weight.dtype
    ),
}


@functools.cache
def norm_class(base: type, formula: Formula) -> type:
    """A subclass of a norm whose forward runs `quackish.rms_norm`. Cached."""

    def forward(self, *args, **kwargs) -> Tensor:
        (x,) = *args, *kwargs.values()
        if runs_own_forward(args, kwargs):
            return base.forward(self, x)
        if why := why_weights_unsupported(self):
            warn_unless_compiling(f"{base.__name__}: {why}. Its own forward runs.")
            return base.forward(self, x)
        return run(self, formula, x)

    return subclass(base, forward, (norm_class, base, formula), norm_formula=formula)


def run(norm: nn.Module, formula: Formula, x: Tensor, residual: Tensor | None = None) -> Any:
    """`quackish.rms_norm` with the weight of a norm, which it can read."""
    eps = getattr(norm, formula.eps)
    if not formula.has_weight:
        return quackish.rms_norm(x, None, eps=eps, residual=residual)
    weight, offset = norm.weight, formula.weight_offset
    dtype = _OUT_DTYPES[formula.out_dtype](x, weight)
    return quackish.rms_norm(x, weight, eps=eps, weight_offset=offset, residual=residual, out_dtype=dtype)


def is_norm(module: nn.Module) -> bool:
    """True for what looks like a norm: it has an eps, and at most a weight and a bias, which are vectors.

    Only the trial decides whether it is an RMSNorm. A name with RMSNorm is enough to be looked at, and reported.
    """
    if next(module.children(), None) is not None:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    fits = parameters.keys() <= {"weight", "bias"} and all(p.dim() == 1 for p in parameters.values())
    return "RMSNorm" in type(module).__name__ or (fits and bool(_eps_attributes(module)))


def _eps_attributes(module: nn.Module) -> list[str]:
    """The names of the attributes that may hold eps."""
    found = []
    for name, value in vars(module).items():
        if ("eps" in name or "epsilon" in name) and (value is None or isinstance(value, float)):
            found.append(name)
    return found


_formulas: dict[tuple, Formula | str] = {}


def formula_of(module: nn.Module) -> Formula | str:
    """The formula of an RMSNorm, or why it is none of quackish's. Trials are cached per class and attributes."""
    base = unpatched_class(module)
    if "forward" in vars(module):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    parameters = list(inspect.signature(base.forward).parameters)
    if len(parameters) != 2:
        return f"its forward takes ({', '.join(parameters[1:])}), expected one tensor"
    own = dict(module.named_parameters(recurse=False))
    if not own.keys() <= {"weight"} or any(p.dim() != 1 for p in own.values()):
        shapes = ", ".join(f"{name} {tuple(p.shape)}" for name, p in own.items())
        return f"it has parameters {shapes}, expected a weight (n,) or none"
    if why := why_weights_unsupported(module):
        return why
    if next(module.children(), None) is not None or next(module.buffers(), None) is not None:
        return "it has submodules or buffers"
    size = None
    if own:
        size = getattr(own["weight"], "ds_shape", own["weight"].shape)[0]  # ZeRO-3 leaves an empty weight
    key = base, base.forward, size, repr(sorted(plain_attributes(module).items()))
    if key not in _formulas:
        try:
            with isolated():
                _formulas[key] = _try(module, base, size)
        except Exception as error:  # anything a class's forward may raise
            return reason(error)
    return _formulas[key]


def _try(module: nn.Module, base: type, size: int | None) -> Formula | str:
    """The first formula that a small norm computes, or how it differs from the first one tried."""
    norm, random, n = shell(module, base), Random(), size or getattr(module, "normalized_shape", (48,))[-1]
    if size:
        norm.weight = nn.Parameter(random.normal(n, mean=0.5, std=0.5))
    reasons = []
    for eps in _eps_attributes(module):
        for offset in (0.0, 1.0) if size else (0.0,):
            for rule in _OUT_DTYPES if size else ("x",):
                formula = Formula(eps, size is not None, offset, rule)
                why = _why_different(norm, norm_class(base, formula), formula, random, n)
                if not why:
                    return formula
                reasons.append(why)
    return reasons[0] if reasons else "no attribute holds its eps"


_RESULTS = "y", "the gradient of x", "the gradient of weight"
_DTYPES = [(x, weight) for x in (torch.float32, torch.bfloat16) for weight in (torch.float32, torch.bfloat16)]
# As a share of the largest element. Both sides round up to three times: x_hat, its product with the weight, gradients.
_TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2**-6}


def _why_different(norm: nn.Module, patched: type, formula: Formula, random: Random, n: int) -> str:
    """Says how a class's own forward differs from the patched one's; "" if it does not."""
    base, own_eps = type(norm), getattr(norm, formula.eps)
    perturbed = [own_eps] if own_eps is None else [own_eps, 0.01 + 2 * own_eps]  # it is read at every call
    try:
        for eps in perturbed:
            setattr(norm, formula.eps, eps)
            for x_dtype, weight_dtype in _DTYPES:
                if formula.has_weight:
                    norm.weight = nn.Parameter(norm.weight.detach().to(weight_dtype))
                for shape in ((5, n), (2, 3, 2, n)):
                    norm.train(len(shape) == 2)
                    # eps decides about rows with small elements
                    x = random.normal(*shape) * random.normal(*shape[:-1], 1).exp2().pow(6)
                    x[0] *= 3e-4
                    x, grad = x.to(x_dtype), random.normal(*shape)
                    expected = _run(norm, base, x, grad)
                    got = _run(norm, patched, x, grad)
                    if got[0].dtype != expected[0].dtype:
                        return f"y has dtype {expected[0].dtype} for x in {x_dtype} and a weight in {weight_dtype}"
                    tolerance = max(_TOLERANCES[x_dtype], _TOLERANCES[weight_dtype])
                    for what, a, b in zip(_RESULTS, got, expected, strict=False):  # a norm may have no weight
                        if not difference(a, b) <= tolerance:
                            return f"{what} differs from RMSNorm by {difference(a, b):.1g}"
    finally:
        setattr(norm, formula.eps, own_eps)
    return ""


def _run(norm: nn.Module, base: type, x: Tensor, grad: Tensor) -> list[Tensor | None]:
    """Runs `base`'s forward and backward. Returns y and the gradients, in the order of _RESULTS."""
    leaves = [x.clone().requires_grad_(), *norm.parameters()]
    y = base.forward(norm, leaves[0])
    grads = torch.autograd.grad(y, leaves, grad.to(y.dtype), allow_unused=True)
    return [y.detach(), *grads]
