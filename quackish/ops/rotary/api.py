"""Rotary position embeddings: what users call."""

import math
from typing import Any, overload

import torch
from torch import Tensor

from quackish.errors import UnsupportedError
from quackish.ops.operator import refuse_transforms
from quackish.ops.rotary.operators import WHO, operator
from quackish.ops.rotary.problems import LAYOUTS
from quackish.ops.shared.arguments import check_backend, check_sizes, check_tensor, choices, shown
from quackish.types import Backend, RotaryLayout

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@overload
def rotary(
    q: Tensor, k: None, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None, layout: RotaryLayout = "halves",
    backend: Backend = "auto",
) -> tuple[Tensor, None]: ...  # fmt: skip
@overload
def rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, rotary_dim: int | None = None, layout: RotaryLayout = "halves",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    *,
    rotary_dim: int | None = None,
    layout: RotaryLayout = "halves",
    backend: Backend = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Rotary position embeddings of queries and keys, in one kernel launch. See docs/guides/rotary.md.

        y0 = x0 * c0 - x1 * s0,   y1 = x1 * c1 + x0 * s1        for each pair (x0, x1) of the first R elements of a row

    Args:
        q: (..., Hq, L, D) bf16, fp16, fp32 or fp64, any strides; read in place if D has stride 1.
        k: (..., Hk, L, D), q's dtype; or None.
        cos, sin: (L, W), (1, L, W) or (B, L, W), where B is the product of q's first dimensions. bf16, fp16, fp32 or
            fp64, both the same. W is R, one column per element of the result, or R / 2, one per pair.
        rotary_dim: R, an even number up to D. None: D. Elements from R on are copied.
        layout: which elements are a pair. "halves": i and R/2 + i, as in Llama. "interleaved": 2i and 2i + 1, as in
            GPT-J, GLM and Llama 4. "interleaved_to_halves": reads pairs 2i and 2i + 1, and writes them to i and
            R/2 + i, as in DeepSeek V3.
        backend: "auto" runs the kernel if it covers the call, else the portable PyTorch path: silently on CPU, with one
            warning per reason on a GPU. "cute" runs the kernel or raises. "reference" runs the portable path.

    Returns:
        (q, k), new tensors of the arguments' shapes and dtypes; (q, None) without k. Computed in fp32 (fp64 if q or cos
        is) and rounded once; autocast has no effect. Strides are the argument's if it is dense with stride 1 in D, else
        contiguous; gradients have them too. Gradients are those of the formula with any cos and sin: for scaled tables
        too. Second derivatives are supported. A row's bits depend on this row alone. NaN stays within its pair.

    Raises:
        ValueError, TypeError: the shape, device or dtype of an argument, a table that requires grad, an unknown option.
        UnsupportedError: backend="cute" and no kernel covers the call; DTensors; torch.func and forward-mode AD.
    """
    check_backend(WHO, backend)
    if layout not in LAYOUTS:
        raise ValueError(f"{WHO}: layout is {shown(layout)}; expected {choices(layout, LAYOUTS)}")
    _check_tensors(q=q, k=k, cos=cos, sin=sin)
    _check_shapes(q, k)
    size = _check_rotary_dim(q, rotary_dim)
    _check_tables(q, cos, sin, size)
    refuse_transforms(WHO)
    cos, sin = cos.resolve_neg(), sin.resolve_neg()  # kernels read them in place
    return operator.apply(q, k, cos, sin, None, None, size, layout, False, backend)


def _check_tensors(**tensors: Any) -> None:
    q = tensors["q"]
    for name, t in tensors.items():
        if t is None and name == "k":
            continue
        check_tensor(WHO, name, t, optional=name == "k")
        if type(t).__name__ == "DTensor":
            raise UnsupportedError(
                f"{WHO}: {name} is a DTensor; expected a plain tensor. With heads, batch or length sharded, pass each "
                "rank's part, as .to_local() gives it, and the rows of cos and sin that belong to it"
            )
        if t.is_nested:
            raise TypeError(f"{WHO}: {name} is a nested tensor; expected a plain one")
        if t.device != q.device:
            raise ValueError(f"{WHO}: {name} is on {t.device} but q is on {q.device}; expected one device")
        if t.dtype not in _DTYPES:
            raise TypeError(f"{WHO}: {name} is {t.dtype}; expected bfloat16, float16, float32 or float64")


def _check_shapes(q: Tensor, k: Tensor | None) -> None:
    if q.dim() < 3:
        raise ValueError(f"{WHO}: q is {tuple(q.shape)}; expected (..., heads, length, D)")
    if k is None:
        return
    if k.dtype != q.dtype:
        raise TypeError(f"{WHO}: k is {k.dtype}; expected {q.dtype}, as q is")
    if k.dim() != q.dim() or k.shape[-2:] != q.shape[-2:] or k.shape[:-3] != q.shape[:-3]:
        raise ValueError(
            f"{WHO}: k is {tuple(k.shape)} but q is {tuple(q.shape)}; expected the same sizes except heads, which are "
            "the third dimension from the end"
        )


def _check_rotary_dim(q: Tensor, rotary_dim: Any) -> int:
    if rotary_dim is not None:
        check_sizes(WHO, rotary_dim=rotary_dim)
    size = q.shape[-1] if rotary_dim is None else rotary_dim
    if size < 2 or size % 2 or size > q.shape[-1]:
        given = f"rotary_dim is {rotary_dim} and q is {tuple(q.shape)}"
        raise ValueError(f"{WHO}: {given}; expected an even number up to D, which None stands for")
    return size


def _check_tables(q: Tensor, cos: Tensor, sin: Tensor, rotary_dim: int) -> None:
    length, batch = q.shape[-2], math.prod(q.shape[:-3])
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{WHO}: {name} requires grad, but gets no gradient; expected {name}.detach()")
        if table.shape[-2:-1] != (length,) or tuple(table.shape[:-2]) not in ((), (1,), (batch,)):
            raise ValueError(
                f"{WHO}: {name} is {tuple(table.shape)} but q is {tuple(q.shape)}; expected ({length}, W) or "
                f"({batch}, {length}, W)"
            )
        if table.shape[-1] not in (rotary_dim, rotary_dim // 2):
            raise ValueError(
                f"{WHO}: {name} has {table.shape[-1]} columns and rotary_dim is {rotary_dim}; expected {rotary_dim} "
                f"columns, or {rotary_dim // 2}, one per pair"
            )
    if sin.shape != cos.shape:
        raise ValueError(f"{WHO}: sin is {tuple(sin.shape)} but cos is {tuple(cos.shape)}; expected equal shapes")
    if sin.dtype != cos.dtype:
        raise TypeError(f"{WHO}: sin is {sin.dtype}; expected {cos.dtype}, as cos is")
