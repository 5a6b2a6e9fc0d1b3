"""Patched classes: a patched module has a subclass of its class, with another forward.

So copies, pickles and replicas of it are patched, and use their own parameters. The functions that make these classes
are cached, so that compiled code sees few classes.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quackish.device.kernel_device import is_gpu_without_kernels
from quackish.errors import PortablePathWarning
from quackish.once import once


def subclass(base: type, forward: Callable, made_by: tuple, **attributes) -> type:
    """A subclass with another forward, but equal name (saved in config.json) and signature (read by Trainer).

    made_by: the function that makes this class, and its arguments. They are pickled instead of the class, which pickle
    cannot find by its name.
    """
    return once(_classes, made_by, _new_subclass, base, forward, made_by, attributes)


_classes: dict[tuple, type] = {}


def runs_own_forward(args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a patched module leaves a call to its class. Compiled code fuses that with its neighbors."""
    return torch.compiler.is_compiling() or lacks_kernels(args, kwargs)


def lacks_kernels(args: tuple, kwargs: dict[str, Any]) -> bool:
    """True if a call's first tensor is on a GPU without kernels, where a module's class is faster than quackish."""
    first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    is_real = first is not None and type(first).__name__ != "FakeTensor"  # which may be on a GPU that does not exist
    return is_real and first.is_cuda and is_gpu_without_kernels(first.device)


def _new_subclass(base: type, forward: Callable, made_by: tuple, attributes: dict[str, Any]) -> type:
    @functools.wraps(base.__init__)
    def __init__(self, *args, **kwargs):  # type(model)(config) runs it; copies and pickles do not
        if type(self) is patched:
            self.__class__ = base
            warnings.warn(
                f"{base.__name__}: this class belongs to a patched module. The new {base.__name__} is not patched; "
                "call quackish.integrations.transformers.apply on the new model",
                PortablePathWarning,
                stacklevel=2,
            )
        base.__init__(self, *args, **kwargs)

    def __reduce_ex__(self, protocol):
        reduced = base.__reduce_ex__(self, max(protocol, 2))
        return (_new, made_by, *reduced[2:]) if type(self) is patched else reduced  # not FSDP's subclass

    def _get_name(self):  # in print(model)
        return f"{base._get_name(self)}[quackish]"

    names = dict(__module__=base.__module__, __qualname__=base.__qualname__, __doc__=base.__doc__)
    methods = dict(__init__=__init__, __reduce_ex__=__reduce_ex__, forward=functools.wraps(base.forward)(forward))
    methods["_get_name"] = _get_name
    patched = type(base.__name__, (base,), {**names, **methods, **attributes, "_quackish_unpatched": base})
    return patched


def _new(make_class: Callable[..., type], *args) -> nn.Module:
    """Makes an empty patched module, for pickle to fill."""
    patched = make_class(*args)
    return patched.__new__(patched)


def is_patched(module: nn.Module) -> bool:
    return hasattr(type(module), "_quackish_unpatched")


def unpatched_class(module: nn.Module) -> type:
    """The class that a module has without quackish."""
    return getattr(type(module), "_quackish_unpatched", type(module))
