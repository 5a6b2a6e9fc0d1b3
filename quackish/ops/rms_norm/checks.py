"""Argument checks of RMSNorm: ValueError for shapes and devices, TypeError for types and dtypes."""

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.device.cuda import name_of
from quackish.errors import check_bool, describe
from quackish.ops.shared.arguments import check_backend, check_number, check_sizes, check_tensor

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_LARGEST = torch.finfo(torch.float32).max


def check_forward(
    x, weight, bias, residual, dweight_out,
    eps, weight_offset, residual_dtype, out_dtype, backend,
) -> None:  # fmt: skip
    _check_tensors("rms_norm", x=x, weight=weight, bias=bias, residual=residual, dweight_out=dweight_out)
    _check_parameters("rms_norm", x, weight, bias)
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"rms_norm: residual is {dims(residual)} but x is {dims(x)}; expected equal shapes")
    if dweight_out is not None:
        if weight is None or dweight_out.shape != weight.shape:
            raise ValueError(
                f"rms_norm: dweight_out is {dims(dweight_out)} but weight is {dims(weight)}; expected equal shapes"
            )
        if dweight_out.dtype not in (torch.float32, weight.dtype):
            given, expected = names([dweight_out.dtype]), names([weight.dtype])
            raise TypeError(f"rms_norm: dweight_out is {given}; expected float32 or weight's {expected}")
    _check_eps("rms_norm", eps)
    _check_options("rms_norm", weight, weight_offset, backend)
    _check_dtypes("rms_norm", residual_dtype=residual_dtype, out_dtype=out_dtype)
    if residual_dtype is not None and residual is None:
        raise ValueError(
            f"rms_norm: residual_dtype is {residual_dtype} but residual is None; expected None without one"
        )


def check_backward(
    dy, x, weight, rstd, dres, dweight_out,
    weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend,
) -> None:  # fmt: skip
    who = "rms_norm_backward"
    _check_tensors(who, x=x, dy=dy, weight=weight, rstd=rstd, dres=dres)
    _check_parameters(who, x, weight)
    for name, t in (("dy", dy), ("dres", dres)):
        if t is not None and t.shape != x.shape:
            raise ValueError(f"{who}: {name} is {dims(t)} but x is {dims(x)}; expected equal shapes")
    if rstd.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{who}: rstd is {names([rstd.dtype])}; expected float32, as rms_norm_forward returns it")
    if rstd.shape != x.shape[:-1] or not rstd.is_contiguous():
        raise ValueError(
            f"{who}: rstd is {dims(rstd)}, strides {tuple(rstd.stride())}, and x is {dims(x)}; expected "
            f"({', '.join(map(str, x.shape[:-1]))}), contiguous, as rms_norm_forward returns it"
        )
    _check_options(who, weight, weight_offset, backend)
    if dresidual_dtype is not None and dx_dtype is None:  # kernels write dresidual only in addition to dx
        raise ValueError(f"{who}: dresidual_dtype is given without dx_dtype; for one gradient, pass dx_dtype")
    _check_dtypes(who, dx_dtype=dx_dtype, dresidual_dtype=dresidual_dtype, dbias_dtype=dbias_dtype)


def check_flags(x: Any, weight: Any, **gradients: Any) -> None:
    """What rms_norm_backward uses before `check_backward`."""
    check_tensor("rms_norm_backward", "x", x)
    check_tensor("rms_norm_backward", "weight", weight, optional=True)
    check_bool("rms_norm_backward", **gradients)


def check_module(
    normalized_shape, elementwise_affine, bias, eps, weight_offset, backend, **dtypes: torch.dtype | None
) -> None:
    who = "RMSNorm"
    sizes = normalized_shape if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    if not isinstance(normalized_shape, (numbers.Integral, tuple, list)) or not sizes:
        given = describe(normalized_shape) if sizes else "empty"
        raise TypeError(
            f"{who}: normalized_shape is {given}; expected the size of x's last dimension, or the sizes of its last "
            "dimensions"
        )
    for size in sizes:
        check_sizes(who, normalized_shape=size)
    check_bool(who, elementwise_affine=elementwise_affine, bias=bias)
    _check_eps(who, eps)
    _check_weight_offset(who, weight_offset)
    if weight_offset and not elementwise_affine:
        raise ValueError(f"{who}: weight_offset is {weight_offset} but elementwise_affine is False; expected 0.0")
    check_backend(who, backend)
    _check_dtypes(who, **dtypes)


def check_module_inputs(x: Any, residual: Any, dweight_out: Any, normalized_shape: tuple[int, ...]) -> None:
    """What RMSNorm.forward uses before `check_forward`."""
    check_tensor("RMSNorm", "x", x)
    check_tensor("RMSNorm", "residual", residual, optional=True)
    check_tensor("RMSNorm", "dweight_out", dweight_out, optional=True)
    expected = ", ".join(map(str, normalized_shape))
    if x.shape[-len(normalized_shape) :] != normalized_shape:
        raise ValueError(f"RMSNorm: x is {dims(x)}; expected (..., {expected})")
    if len(normalized_shape) == 1:
        return  # check_forward sees the same shapes
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"RMSNorm: residual is {dims(residual)} but x is {dims(x)}; expected equal shapes")
    if dweight_out is not None and (dweight_out.shape != normalized_shape or not dweight_out.is_contiguous()):
        given = f"{dims(dweight_out)} with strides {dweight_out.stride()}"
        raise ValueError(f"RMSNorm: dweight_out is {given}; expected contiguous ({expected})")


def _check_dtypes(who: str, **dtypes: torch.dtype | None) -> None:
    for name, dtype in dtypes.items():
        if dtype is not None and dtype not in _DTYPES:
            given = dtype if isinstance(dtype, torch.dtype) else describe(dtype)
            raise TypeError(f"{who}: {name} is {given}; expected None or one of {', '.join(map(str, _DTYPES))}")


def _check_tensors(who: str, x: Tensor, **others: Tensor | None) -> None:
    for name, t in {"x": x, **others}.items():
        check_tensor(who, name, t, name not in ("x", "dy", "rstd"), _hint(name, t))
        if t is None:
            continue
        if t.dtype not in _DTYPES:
            raise TypeError(f"{who}: {name} is {names([t.dtype])}; expected one of {names(_DTYPES)}")
        if t.device != x.device:
            raise ValueError(f"{who}: {name} is on {t.device} but x is on {x.device}; expected one device")


def _hint(name: str, value: Any) -> str:
    """What to do about arguments in the order of F.rms_norm."""
    if name == "weight" and isinstance(value, (int, tuple, list)):
        return ". F.rms_norm takes (input, normalized_shape, weight, eps); here it is rms_norm(x, weight, eps=1e-6)"
    return "; pass eps by name: eps=1e-6" if name == "bias" and isinstance(value, float) else ""


def _check_parameters(who: str, x: Tensor, weight: Tensor | None, bias: Tensor | None = None) -> None:
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{who}: x is {dims(x)}; expected (..., n) with n >= 1")
    for name, t in (("weight", weight), ("bias", bias)):
        if t is None:
            continue
        if t.dim() == 1 and t.shape[0] != x.shape[-1]:
            raise ValueError(
                f"{who}: {name} has {t.shape[0]} elements but x has {x.shape[-1]} columns; expected equal numbers"
            )
        if t.dim() != 1 and (t.dim() != 2 or t.shape != x.shape[-2:]):
            raise ValueError(
                f"{who}: {name} is {dims(t)} but x is {dims(x)}; expected ({x.shape[-1]},), or x's last two dimensions "
                "(heads, n)"
            )
    if bias is not None and bias.dim() != (1 if weight is None else weight.dim()):
        raise ValueError(
            f"{who}: bias is {dims(bias)} but weight is {dims(weight)}; expected weight's shape, or ({x.shape[-1]},) "
            "without weight"
        )


def _check_eps(who: str, eps: float | None) -> None:
    check_number(who, "eps", eps, optional=True)
    if eps is not None and not 0 <= eps <= _LARGEST:  # also false for nan
        raise ValueError(f"{who}: eps is {eps}; expected a finite number, at least 0, also in fp32, such as 1e-6")


def _check_weight_offset(who: str, weight_offset: float) -> None:
    check_number(who, "weight_offset", weight_offset)
    if not -_LARGEST <= weight_offset <= _LARGEST:
        raise ValueError(
            f"{who}: weight_offset is {weight_offset}; expected a finite number, also in fp32, such as 1.0"
        )


def _check_options(who: str, weight: Tensor | None, weight_offset: float, backend: str) -> None:
    _check_weight_offset(who, weight_offset)
    if weight is None and weight_offset != 0.0:
        raise ValueError(f"{who}: weight_offset is {weight_offset} but weight is None; expected 0 without a weight")
    check_backend(who, backend)


def dims(t: Tensor | None) -> str:
    return "None" if t is None else str(tuple(t.shape))


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(name_of, dtypes))
