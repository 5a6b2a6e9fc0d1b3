"""Trials: a class's own forward on a small module with random CPU parameters, beside quackish.

A trial does not use the model's parameters, which may be on meta, sharded or quantized. It uses generators of its own,
and neither reads nor changes the caller's random state, autocast, default device, gradient mode and compiler.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from quackish.errors import UnsupportedError
from quackish.integrations.transformers.subclass import unpatched_class


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """A context for trials: it neither reads nor changes the caller's state."""
    with (
        torch.inference_mode(False),  # turns gradients on too
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        torch.compiler.set_stance("force_eager"),
        torch.random.fork_rng(devices=[]),  # for a forward with dropout
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


_NOT_COPIED = {*vars(nn.Module()), "forward", "_compiled_call_impl"}


def plain_attributes(module: nn.Module) -> dict[str, object]:
    """Attributes that a class or user gave a module, private ones too, but no tensors and modules."""
    return {
        name: value
        for name, value in vars(module).items()
        if name not in _NOT_COPIED and not isinstance(value, (Tensor, nn.Module))
    }


def shell(module: nn.Module, base: type) -> nn.Module:
    """A `base` with module's plain attributes and parameterless submodules, and no parameters or hooks."""
    new = base.__new__(base)
    nn.Module.__init__(new)
    new.__dict__.update(plain_attributes(module))
    for name, child in module.named_children():
        if next(child.parameters(), None) is None and next(child.buffers(), None) is None:
            new.add_module(name, shell(child, type(child)))
    for name in ("_parameters", "_buffers", "_modules"):  # what is None is known to be absent
        getattr(new, name).update({key: None for key, value in getattr(module, name).items() if value is None})
    return new


class Random:
    """Random CPU tensors from a generator of its own."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0, std: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, dtype=torch.float32, device="cpu")
        return values.mul_(std).add_(mean).to(dtype)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator, device="cpu")


def small_copy(module: nn.Module, base: type, sizes: dict[int, int], random: Random) -> nn.Module:
    """Copies a module with random parameters, and with small sizes. sizes: {size: small size}."""
    small = shell(module, base)
    for name, value in vars(small).items():
        if type(value) is int and ("size" in name or "dim" in name):
            setattr(small, name, sizes.get(value, value))
    for name, p in module.named_parameters(recurse=False):
        shape = [sizes.get(n, n) for n in p.shape]
        small.register_parameter(name, nn.Parameter(random.normal(*shape, std=0.5)))
    for name, child in module.named_children():
        small.add_module(name, small_copy(child, type(child), sizes, random))
    return small


def difference(got: Tensor | None, expected: Tensor | None) -> float:
    """The largest difference, relative to the largest element of `expected`; inf for other shapes or NaNs."""
    if got is None or expected is None:
        return 0.0 if got is expected else float("inf")
    if got.shape != expected.shape:
        return float("inf")
    got, expected = got.double(), expected.double()
    worst, scale = (got - expected).abs().amax().item(), expected.abs().amax().item()
    if not (worst == worst and scale < float("inf")):
        return float("inf")
    return worst / scale if scale > 0 else worst


def reason(error: Exception) -> str:
    """One line about a trial that failed. It is not cached."""
    if isinstance(error, UnsupportedError):
        return str(error)
    first_line = str(error).strip().partition("\n")[0]
    return f"its trial raised {type(error).__name__}: {first_line}"[:300]


def takes(module: nn.Module) -> list[str]:
    """The names of the arguments of a module's forward."""
    return list(inspect.signature(unpatched_class(module).forward).parameters)[1:]


def key_of(module: nn.Module) -> str:
    """What a trial depends on beside the class, for the cache of trials."""
    shapes = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    parts = [(name, type(part), sorted(plain_attributes(part).items())) for name, part in module.named_modules()]
    return repr((shapes, parts))


def run_trial(small: nn.Module, arguments: tuple[Tensor, ...], grad: Tensor) -> dict[str, Tensor | None]:
    """Runs forward and backward. Returns outputs and gradients of arguments and parameters, by name."""
    leaves, inputs = {}, []
    for i, argument in enumerate(arguments):
        if argument.is_floating_point():
            argument = leaves[f"argument {i + 1}"] = argument.clone().requires_grad_()
        inputs.append(argument)
    leaves.update(small.named_parameters())
    out = small(*inputs)
    out, *others = out if isinstance(out, tuple) else (out,)
    grads = torch.autograd.grad(out, list(leaves.values()), grad, allow_unused=True)
    outputs = {f"output {i + 1}": t.detach() for i, t in enumerate((out, *others))}
    return {**outputs, **dict(zip(leaves, grads, strict=True))}


def compare_trials(
    got: dict[str, Tensor | None], expected: dict[str, Tensor | None], function: str = "moe_mlp", most: float = 1e-4
) -> str:
    """Says which output or gradient differs from the expected one by more than `most`; "" if none does."""
    for name, truth in expected.items():
        if not difference(got[name], truth) <= most:
            what = name if name.startswith("output") else f"the gradient of {name}"
            return f"{what} differs from {function}'s by {difference(got[name], truth):.1g}"
    return ""
