"""Attention masks for attn_implementation="quackish", which only quackish's attention can read.

A model gets the masks of the implementation that its config names, even if its attention code is its own and never
calls that implementation. Such code adds the mask to its scores, so a bool mask, or None for causality, would silently
give wrong results. The masks here refuse to be added. They allow functions that do the same to bool and additive masks,
such as slices, and functions that need a bool mask, such as `~` and PyTorch's attention.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from quackish.errors import UnsupportedError

REMEDY = (
    'load the model with attn_implementation="eager"; for a part of a model, name the implementation of each part: '
    'attn_implementation={"text_config": "quackish", "vision_config": "eager"}'
)


class GuardedMask(Tensor):
    """A bool mask (B, 1, Lq, Lk), True where a key takes part."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Runs what treats bool and additive masks alike. Raises UnsupportedError for anything else."""
        name, kwargs = func.__name__, kwargs or {}
        is_read = name in _READ or _is_internal(name, func)
        if not (is_read or name in _KEPT or name in _MOVED) or not _is_unambiguous(name, args, kwargs):
            raise UnsupportedError(_refusal(name))
        if issubclass(cls, CausalMask) and (name not in _KEPT or _transposes(name, func)):
            args, kwargs, cls = _full(args), dict(zip(kwargs, _full(kwargs.values()), strict=True)), GuardedMask
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **kwargs)
        if is_read:
            return out
        if isinstance(out, (tuple, list)):
            return tuple(_guarded(cls, name, t) for t in out)
        return _guarded(cls, name, out)


class CausalMask(GuardedMask):
    """Causality alone, in one element of memory that is not read. Functions that read elements get a full mask."""


def quackish_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *args: Any,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **options: Any,
) -> Tensor | None:
    """The mask of "sdpa", guarded; None where any attention code computes the same without a mask."""
    skips = dict(allow_is_causal_skip=allow_is_causal_skip, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    mask = sdpa_mask(batch_size, q_length, kv_length, *args, device=device, **skips, **options)
    if mask is not None:
        return mask.as_subclass(GuardedMask)
    if not allow_is_causal_skip or q_length == 1:  # every query sees all keys
        return None
    element = torch.empty((), dtype=torch.bool, device=device)
    return element.expand(batch_size, 1, q_length, kv_length).as_subclass(CausalMask)


def is_causality(mask: Tensor, queries: int, keys: int) -> bool:
    """True for a mask of causality alone over so many queries and keys."""
    with torch._C.DisableTorchFunctionSubclass():
        return isinstance(mask, CausalMask) and mask.shape[-2:] == (queries, keys)


def plain(mask: Tensor) -> Tensor:
    """The bool tensor of a guarded mask, without a copy; any other tensor as it is."""
    if isinstance(mask, CausalMask):
        (mask,) = _full([mask])
    if isinstance(mask, GuardedMask):
        with torch._C.DisableTorchFunctionSubclass():
            mask = mask.detach()
    return mask


def _is_internal(name: str, func: Any) -> bool:
    """True for what torch.compile calls: it follows `_base` to its end, and its graphs run what tracing allowed."""
    if name == "__get__":
        return func.__self__ is Tensor._base
    return isinstance(func, torch._ops.OpOverload) and func.namespace in ("aten", "prims", "quackish")


def _transposes(name: str, func: Any) -> bool:
    """True for attributes that exchange queries and keys."""
    return name == "__get__" and func.__self__ in (Tensor.T, Tensor.mT, Tensor.H, Tensor.mH)


def _is_unambiguous(name: str, args: tuple, kwargs: dict) -> bool:
    """False for a mask as a value of `where`, and for casts: 0 of an additive mask keeps a key, False drops it."""
    if name == "where":
        return isinstance(args[0], GuardedMask)
    return name != "to" or not any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))


def _guarded(cls: type, name: str, out: Any) -> Any:
    """Makes a mask of an output. Raises UnsupportedError for a tensor that is not bool."""
    if not isinstance(out, Tensor):
        return out
    if out.dtype != torch.bool:
        raise UnsupportedError(_refusal(name))
    return out.as_subclass(cls)


def _full(args: Any) -> tuple:
    """Arguments with full masks instead of causality. The first key is aligned with the first query, as in SDPA."""
    full = []
    for value in args:
        if isinstance(value, CausalMask):
            with torch._C.DisableTorchFunctionSubclass():
                queries, keys = value.shape[-2:]
                value = torch.ones(queries, keys, dtype=torch.bool, device=value.device).tril().expand(value.shape)
        full.append(_full(value) if type(value) in (list, tuple) else value)
    return tuple(full)


def _refusal(name: str) -> str:
    """The message about a function that a guarded mask does not support."""
    return f"{_caller()} uses {name}() on an attention mask that only quackish's attention can read; {REMEDY}"


def _caller() -> str:
    """The class of the module that uses a mask."""
    frame = None if torch.compiler.is_compiling() else sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            return type(module).__name__
        frame = frame.f_back
    return "The model"


# Functions by name, which torch.compile can trace: methods, operators and functions of the same name do the same.
_KEPT = frozenset(  # they read no element
    "__get__ __set__ __len__ __repr__ __format__ dim size stride numel nelement element_size storage_offset "
    "untyped_storage is_contiguous is_floating_point is_complex is_conj is_neg is_inference is_shared has_names "
    "get_device _is_view detach to cuda cpu".split()
)
_READ = frozenset(  # the caller expects a bool mask; the last one runs a body that is traced by itself
    "__invert__ invert bitwise_not where scaled_dot_product_attention tag_activation_checkpoint".split()
)
_MOVED = frozenset(  # they give a mask of the same kind
    "__getitem__ getitem expand expand_as broadcast_to view view_as reshape flatten unflatten unsqueeze squeeze "
    "transpose swapaxes permute movedim contiguous clone narrow select index_select gather take_along_dim chunk split "
    "tensor_split unbind cat concat stack repeat repeat_interleave tile roll "
    "__and__ __rand__ and_ bitwise_and __or__ __ror__ or_ bitwise_or".split()
)
