"""Finds modules that do not compute what their class does, or whose weights quackish cannot read."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from quackish.errors import a, warn_once
from quackish.types import Backend

# Subclasses of PyTorch that dispatch quackish's operators. Others with a __torch_dispatch__, such as quantized tensors,
# rarely do.
_SUBCLASSES = "DTensor", "FakeTensor", "FunctionalTensor", "AsyncCollectiveTensor"
# Hooks of these modules gather and shard weights, or track names. A loss suits them as well as logits.
_SHARDING = "torch.distributed.", "torch.utils.module_tracker", "deepspeed."


def why_weights_unsupported(module: nn.Module) -> str:
    """Says why quackish cannot read a module's own weights; "" if it can.

    This does not compute parametrizations.
    """
    for name, p in module._parameters.items():
        if type(p) is not nn.Parameter and p is not None and not _is_supported(p):
            return f"its {name} is {a(type(getattr(p, '_local_tensor', p)))}, expected a plain tensor"
    return ""


def _is_supported(t: Tensor) -> bool:
    """True for plain tensors, and for subclasses that are known or have no __torch_dispatch__."""
    kind = type(getattr(t, "_local_tensor", t))  # of a DTensor
    is_known = kind in (Tensor, nn.Parameter) or kind.__name__ in _SUBCLASSES
    return is_known or kind.__torch_dispatch__ is Tensor.__torch_dispatch__


def why_output_differs(module: nn.Module, ignored: tuple[str, ...] = _SHARDING) -> str:
    """Says why a call of a module may run more than its class's forward; "" if it does not.

    ignored: prefixes of the modules whose hooks do not count.
    """
    own = module.__dict__
    if "forward" in own:
        return "its forward was replaced on the instance, as hooks of accelerate do"
    of_all = torch_module
    for hooks in (
        own["_forward_hooks"], own["_forward_pre_hooks"], own["_backward_hooks"], own["_backward_pre_hooks"],
        of_all._global_forward_hooks, of_all._global_forward_pre_hooks, of_all._global_backward_hooks,
        of_all._global_backward_pre_hooks,
    ):  # fmt: skip
        for hook in hooks.values() if hooks else ():
            if not _origin(hook).startswith(ignored):
                return f"it has the hook {_name(hook)}, which may read or change inputs or outputs"
    return ""


def _origin(hook: Callable) -> str:
    """The module that defines a hook; "" if that is unknown."""
    hook = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(hook, "__module__", None) or ""


def _name(hook: Callable) -> str:
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def backend_for(t: Tensor) -> Backend:
    """On a GPU, kernels or UnsupportedError: a model's own code is at least as fast as the portable path there."""
    return "auto" if t.device.type == "cpu" else "cute"


def warn_unless_compiling(message: str) -> None:
    """Warns once per message. torch.compile traces calls of this without a warning."""
    if not torch.compiler.is_compiling():
        warn_once(message)
