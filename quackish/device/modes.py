"""When a call may launch kernels directly: not with torch.compile, modes, torch.func or subclasses."""

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from quackish.errors import a

is_compiling = torch.compiler.is_dynamo_compiling
num_dispatch_modes = torch._C._len_torch_dispatch_stack
has_function_modes = torch._C._is_torch_function_mode_enabled
functorch_level = torch._C._functorch.peek_interpreter_stack
jit_trace = torch._C._get_tracing_state
forward_ad = torch.autograd.forward_ad


def traced_as_constant(function: Any) -> Any:
    """Lets torch.compile call `function` while it traces, with numbers, strings and devices only as arguments.

    torch.compiler.assume_constant_result does the same, but imports the compiler, including Triton.
    """
    function._dynamo_marked_constant = True
    return function


def is_plain() -> bool:
    """True if only autograd intercepts this call, so that kernels can bypass the dispatcher."""
    return not (
        is_compiling()  # first: torch.compile cannot trace the others
        or num_dispatch_modes()
        or has_function_modes()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
        or jit_trace() is not None
    )


def is_transformed() -> bool:
    """True if torch.func or forward-mode AD is active, which the custom operators do not support."""
    return not is_compiling() and (functorch_level() is not None or forward_ad._current_level >= 0)


def are_plain(tensors: Iterable[Any]) -> bool:
    """True if none of these is a tensor subclass. Subclasses get the custom operators, which they may override."""
    for t in tensors:  # `all` of a generator takes twice as long
        kind = type(t)
        if kind is not Tensor and kind is not nn.Parameter and t is not None and isinstance(t, Tensor):
            return False
    return True


def as_plain(op: str, t: Tensor | None) -> Tensor | None:
    """Returns `t` as a plain tensor. Raises TypeError for a subclass without memory.

    Operators' implementations call it. Subclasses that handle the operator in __torch_dispatch__ do not get here.
    """
    if t is None or type(t) is Tensor:
        return t
    if t.numel() and not t.is_meta and not t.data_ptr():
        raise TypeError(
            f"{op}: an argument is {a(type(t))} without memory; expected a torch.Tensor, or a subclass whose "
            "__torch_dispatch__ handles the operator"
        )
    return t.as_subclass(Tensor)


def check_memory(op: str, **tensors: Tensor | None) -> None:
    """Raises ValueError for a tensor whose storage was freed: a kernel would get a null pointer."""
    for name, t in tensors.items():
        if t is not None and not t.data_ptr() and t.numel() and not t.is_meta:
            raise ValueError(
                f"{op}: {name} has shape {tuple(t.shape)} but no memory: its storage was freed or never allocated "
                "(a sharded parameter outside its module's forward?); expected a tensor with allocated storage"
            )


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Autocast's dtype; None if autocast is off, and for meta tensors, which have none."""
    if device_type != "meta" and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Disables autocast, if it is on: entering torch.autocast costs 4 us of CPU time."""
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
