"""Checks of the arguments of scaled_dot_product_attention: ValueError for shapes and values, TypeError for dtypes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.modes import are_plain, autocast_dtype
from quackish.errors import UnsupportedError, check_bool, describe
from quackish.ops.attention.problems import WHO
from quackish.ops.attention.reference import Inputs, Options
from quackish.ops.shared.arguments import check_backend, check_number, check_tensor
from quackish.ops.shared.signatures import PerSignature

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Call(NamedTuple):
    """A checked call."""

    inputs: Inputs  # batch dimensions flattened to one
    options: Options
    shape: tuple[int, ...]  # of the output


class Checked(NamedTuple):
    """What the checks find out. It depends on no address and no value of a tensor."""

    dtype: torch.dtype  # to round query, key and value to
    shapes: tuple[tuple[int, ...], ...]  # of query, key and value, with common batch dimensions
    scores: tuple[int, ...]  # the shape of the scores, which a mask and a bias broadcast to
    options: Options
    shape: tuple[int, ...]  # of the output


def check(
    tensors: tuple, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any, window: Any, softcap: Any,
    return_lse: Any, backend: Any,
) -> Call:  # fmt: skip
    """tensors: query, key, value, attn_mask, attn_bias."""
    checked = _checked(
        tensors, dropout_p, is_causal, scale, enable_gqa, *_check_window(window), softcap, return_lse, backend
    )
    query, key, value, mask, bias = tensors
    pairs = zip((query, key, value), checked.shapes, strict=True)
    q, k, v = [_in_batches(t, shape, checked.dtype) for t, shape in pairs]
    if mask is not None and mask.dtype != torch.bool:
        mask, bias = None, mask
    if mask is not None:
        mask = _not_expanded(_as_four(mask, checked.scores))
    if bias is not None:
        bias = _as_four(bias, checked.scores).resolve_neg()  # kernels read it in place
    return Call(Inputs(q, k, v, bias, mask), checked.options, checked.shape)


def _check(
    tensors: tuple, dropout_p: Any, is_causal: Any, scale: Any, enable_gqa: Any, left: int | None, right: int | None,
    softcap: Any, return_lse: Any, backend: Any,
) -> Checked:  # fmt: skip
    query, key, value, attn_mask, attn_bias = tensors
    check_backend(WHO, backend)
    _check_tensors(query=query, key=key, value=value, attn_mask=attn_mask, attn_bias=attn_bias)
    check_bool(WHO, is_causal=is_causal, enable_gqa=enable_gqa, return_lse=return_lse)
    check_number(WHO, "dropout_p", dropout_p)
    check_number(WHO, "scale", scale, optional=True)
    check_number(WHO, "softcap", softcap, optional=True)
    if dropout_p != 0:
        raise UnsupportedError(f"{WHO}: dropout_p is {dropout_p}; expected 0.0: dropout is not supported")
    if is_causal:
        right = 0 if right is None else min(right, 0)
    if softcap is not None and not 0 < softcap <= torch.finfo(torch.float32).max:
        raise ValueError(f"{WHO}: softcap is {softcap}; expected a finite number above 0, or None")
    if scale is not None and not abs(scale) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{WHO}: scale is {scale}; expected a finite number, or None")
    if attn_mask is not None and attn_mask.dtype != torch.bool and attn_bias is not None:
        raise ValueError(
            f"{WHO}: attn_mask is {attn_mask.dtype} and attn_bias is given; expected a bool attn_mask beside "
            "attn_bias, or their sum as attn_bias"
        )
    query, key, value, lead = _check_shapes(query, key, value, enable_gqa)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    scores = (*lead, query.shape[-2], key.shape[-2])
    for name, t in (("attn_mask", attn_mask), ("attn_bias", attn_bias)):
        if t is None:
            continue
        is_mask = name == "attn_mask"
        if t.dtype not in _DTYPES and not (is_mask and t.dtype == torch.bool):
            hint = "; pass a bool mask as attn_mask" if t.dtype == torch.bool else ""
            expected = f"{'bool, ' * is_mask}bfloat16, float16, float32 or float64{hint}"
            raise TypeError(f"{WHO}: {name} is {t.dtype}; expected {expected}")
        _check_broadcast(name, t, scores)
    shapes = tuple(tuple(t.shape) for t in (query, key, value))
    options = Options(float(scale), None if softcap is None else float(softcap), left, right)
    return Checked(
        _compute_dtype(query, key, value), shapes, scores, options, (*lead, query.shape[-2], value.shape[-1])
    )


_checked = PerSignature(_check)


def is_causal_bias(mask: Any) -> bool:
    """True for torch.nn.attention.bias.CausalBias: a variant without elements, which only PyTorch's function reads."""
    if are_plain((mask,)):
        return False
    from torch.nn.attention.bias import CausalBias  # takes 2 s, because it imports the compiler

    return isinstance(mask, CausalBias)


def _check_tensors(**tensors: Any) -> None:
    query = tensors["query"]
    for name, t in tensors.items():
        needed = name in ("query", "key", "value")
        if t is None and not needed:
            continue
        if not isinstance(t, Tensor):
            hint = "; pass is_causal by name" if name == "attn_mask" and isinstance(t, bool) else ""
            check_tensor(WHO, name, t, not needed, hint)
        if t.is_nested:
            raise TypeError(f"{WHO}: {name} is a nested tensor; expected a plain one, such as a padded one with a mask")
        if t.device != query.device:
            raise ValueError(f"{WHO}: {name} is on {t.device} but query is on {query.device}; expected one device")
        if needed and t.dtype not in _DTYPES:
            raise TypeError(f"{WHO}: {name} is {t.dtype}; expected bfloat16, float16, float32 or float64")
        if needed and t.dim() < 2:
            raise ValueError(f"{WHO}: {name} is {_dims(t)}; expected (..., heads, length, head dimension)")


def _check_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    if not isinstance(window, tuple | list) or len(window) != 2:
        given = describe(window) if isinstance(window, Tensor) else repr(window)
        raise ValueError(f"{WHO}: window is {given}; expected (left, right), the keys before and after, or None")
    for side in window:
        if side is not None and (not isinstance(side, int) or isinstance(side, bool) or side < 0):
            raise ValueError(f"{WHO}: window is {window!r}; expected integers from 0, or None for no limit")
    left, right = (None if side is None or side >= _NO_LIMIT else side for side in window)
    return left, right


_NO_LIMIT = 1 << 31  # above every length


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, enable_gqa: Any) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """(query, key, value, their leading dimensions, the last being query's heads), expanded to common batches."""

    def all_three() -> str:  # called only for errors, because Dynamo cannot trace `str` of symbolic sizes
        return f"query is {_dims(q)}, key is {_dims(k)} and value is {_dims(v)}"

    if q.shape[-1] != k.shape[-1] or q.shape[-1] == 0:
        raise ValueError(f"{WHO}: {all_three()}; expected query and key with one head dimension of at least 1")
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{WHO}: {all_three()}; expected key and value of one length")
    if q.shape[:-2] == k.shape[:-2] == v.shape[:-2]:
        return q, k, v, tuple(q.shape[:-2])
    if enable_gqa:
        if min(q.dim(), k.dim(), v.dim()) < 3 or k.shape[-3] != v.shape[-3] or not k.shape[-3]:
            raise ValueError(f"{WHO}: {all_three()}; expected key and value with as many heads")
        if q.shape[-3] % k.shape[-3]:
            raise ValueError(f"{WHO}: {all_three()}; expected a multiple of key's heads in query (enable_gqa)")
        lead = _broadcast_shapes(all_three, *(t.shape[:-3] for t in (q, k, v)))
        q, k, v = (t.expand(*lead, *t.shape[-3:]) for t in (q, k, v))
        return q, k, v, (*lead, q.shape[-3])
    if q.dim() > 2 and k.dim() > 2 and q.shape[-3] != k.shape[-3] and 1 not in (q.shape[-3], k.shape[-3]):
        raise ValueError(f"{WHO}: {all_three()}; expected as many heads, or enable_gqa=True")
    lead = _broadcast_shapes(all_three, *(t.shape[:-2] for t in (q, k, v)))
    q, k, v = (t.expand(*lead, *t.shape[-2:]) for t in (q, k, v))
    return q, k, v, lead


def _broadcast_shapes(all_three: Any, *shapes: Any) -> tuple[int, ...]:
    try:
        return tuple(torch.broadcast_shapes(*shapes))
    except RuntimeError:
        raise ValueError(f"{WHO}: {all_three()}; expected equal batch dimensions, or 1 in some") from None


def _four(t: Tensor) -> Tensor:
    """(batch, heads, length, columns); a view if the strides allow it."""
    if t.dim() == 4:
        return t
    if t.dim() < 4:
        return t[(None,) * (4 - t.dim())]
    return t.reshape(-1, *t.shape[-3:])


def _check_broadcast(name: str, t: Tensor, scores: tuple[int, ...]) -> None:
    extra = t.dim() - len(scores)
    sizes = (1,) * -extra + tuple(t.shape)
    if extra > 0 or any(size not in (1, full) for size, full in zip(sizes, scores, strict=False)):
        raise ValueError(f"{WHO}: {name} is {_dims(t)}; expected {tuple(scores)}, or 1 in some dimensions")


def _in_batches(t: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """query, key or value as (batch, heads, length, columns). shape: with common batch dimensions."""
    t = t if t.dtype is dtype else t.to(dtype)
    t = t if t.shape == shape else t.expand(shape)
    return t if t.dim() == 4 else _four(t)


def _as_four(t: Tensor, scores: tuple[int, ...]) -> Tensor:
    """A mask or bias as (B or 1, H or 1, Lq or 1, Lk or 1)."""
    missing = len(scores) - t.dim()
    t = t[(None,) * missing] if missing else t
    if t.dim() > 4 and any(size != full for size, full in zip(t.shape[:-3], scores[:-3], strict=True)):
        if any(size != 1 for size in t.shape[:-3]):
            t = t.expand(*scores[:-3], *t.shape[-3:])
    return _four(t)


def _not_expanded(mask: Tensor) -> Tensor:
    """With size 1 where all elements of a dimension are the same memory, so that each element is read once."""
    for dim in range(4):
        if mask.stride(dim) == 0 and mask.shape[dim] > 1:
            mask = mask.narrow(dim, 0, 1)
    return mask


def _compute_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype:
    """The common dtype, or autocast's. Autocast does not round fp64."""
    autocast = autocast_dtype(q.device.type)
    if autocast is not None and torch.float64 not in (q.dtype, k.dtype, v.dtype):
        return autocast
    for name, t in (("key", k), ("value", v)):
        if t.dtype != q.dtype:
            raise TypeError(f"{WHO}: {name} is {t.dtype}; expected {q.dtype}, as query is")
    return q.dtype


def _dims(t: Tensor) -> str:
    return str(tuple(t.shape))
