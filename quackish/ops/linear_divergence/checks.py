"""The arguments of linear_divergence: their types, shapes, dtypes and values."""

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from quackish.device.modes import autocast_dtype
from quackish.errors import describe
from quackish.ops.shared.arguments import check_backend, check_tensor, choices, shown
from quackish.types import Reduction

WHO = "linear_divergence"
_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Inputs(NamedTuple):
    """The user's tensors, unchanged."""

    input: Tensor  # (..., H)
    linear_weight: Tensor  # (V, H)
    teacher_input: Tensor  # (..., Ht)
    teacher_weight: Tensor  # (V, Ht)
    mask: Tensor | None = None  # (...) bool
    linear_bias: Tensor | None = None  # (V,)
    teacher_bias: Tensor | None = None  # (V,)
    num_items: Any = None  # int | Tensor | None
    grad_weight_out: Tensor | None = None  # (V, H)


class Options(NamedTuple):
    beta: float
    temperature: float
    reduction: Reduction
    softcap: float | None
    teacher_softcap: float | None
    logit_scale: float | None
    teacher_logit_scale: float | None
    return_entropy: bool
    memory_limit: int | None
    backend: str


def check(inputs: Inputs, options: Options) -> torch.dtype:
    """Checks all arguments. Returns the dtype of the GEMM operands."""
    check_options(options, inputs.num_items)
    check_tensors(inputs)
    return _compute_dtype(inputs)


def check_tensors(inputs: Inputs) -> None:
    tensors = inputs._asdict()
    items = tensors.pop("num_items")
    required = Inputs._fields[:4]
    for name, t in tensors.items():
        check_tensor(WHO, name, t, optional=name not in required)
        if type(t).__name__ == "DTensor":
            raise TypeError(
                f"{WHO}: {name} is a DTensor, expected a plain tensor; pass .to_local() if it is replicated"
            )
        if t is not None and t.device != inputs.input.device:
            raise ValueError(f"{WHO}: {name} is on {t.device}, expected input's device {inputs.input.device}")
    x, w, teacher, teacher_w, *_, out = inputs
    for name, dtypes in dict(
        dict.fromkeys((*required, "linear_bias", "teacher_bias"), _DTYPES),
        mask=(torch.bool,), grad_weight_out=(torch.float32, w.dtype),
    ).items():  # fmt: skip
        t = tensors[name]
        if t is not None and t.dtype not in dtypes:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(dtypes))
            raise TypeError(f"{WHO}: {name} is {t.dtype}, expected {expected}")
    for name, weight in (("linear_weight", w), ("teacher_weight", teacher_w)):
        if weight.dim() != 2 or 0 in weight.shape:
            raise ValueError(f"{WHO}: {name} has shape {tuple(weight.shape)}, expected (V, H) with V >= 1 and H >= 1")
    (v, h), (teacher_v, teacher_h) = w.shape, teacher_w.shape
    if teacher_v != v:
        raise ValueError(
            f"{WHO}: linear_weight has {v} rows and teacher_weight {teacher_v}, expected one vocabulary: as many "
            "classes in both. Slice off classes that only one of them has, such as padding"
        )
    for name, t, weight_name, columns in (
        ("input", x, "linear_weight", h), ("teacher_input", teacher, "teacher_weight", teacher_h)
    ):  # fmt: skip
        if t.dim() < 1 or t.shape[-1] != columns:
            raise ValueError(
                f"{WHO}: {name} has shape {tuple(t.shape)}, expected (..., {columns}), as many columns as {weight_name}"
            )
    rows = tuple(x.shape[:-1])
    shapes = dict(
        teacher_input=(*rows, teacher_h), mask=rows, linear_bias=(v,), teacher_bias=(v,), grad_weight_out=(v, h)
    )
    for name, shape in shapes.items():
        t = tensors[name]
        if t is not None and tuple(t.shape) != shape:
            raise ValueError(
                f"{WHO}: {name} has shape {tuple(t.shape)}, expected {shape} for input {tuple(x.shape)} and "
                f"linear_weight {(v, h)}"
            )
    if torch.is_grad_enabled():
        for name in ("teacher_input", "teacher_weight", "teacher_bias"):
            if tensors[name] is not None and tensors[name].requires_grad:
                raise ValueError(
                    f"{WHO}: {name} requires grad, but only the student gets gradients; expected {name}.detach(), or a "
                    "teacher that runs under torch.no_grad()"
                )
    if out is not None and out.requires_grad:
        raise ValueError(f"{WHO}: grad_weight_out requires grad, expected a plain buffer; detach it")
    if isinstance(items, Tensor):
        if items.dim() != 0:
            raise ValueError(f"{WHO}: num_items has shape {tuple(items.shape)}, expected a 0-dim tensor or a number")
        if items.device.type != "cpu" and items.device != x.device:
            raise ValueError(f"{WHO}: num_items is on {items.device}, expected {x.device} (input's) or cpu")
        if items.requires_grad:
            raise ValueError(f"{WHO}: num_items requires grad, but gets no gradient; expected num_items.detach()")


def _is_positive(number: float) -> bool:
    """True if fp32 holds the number."""
    return _FP32.tiny <= number <= _FP32.max


_FP32 = torch.finfo(torch.float32)
_POSITIVE = f"a number from {_FP32.tiny:.2g} to {_FP32.max:.2g}"
_NUMBERS = {  # name: (whether a value is legal, what is expected, whether None is legal)
    "beta": (lambda b: 0.0 <= b <= 1.0, "a number from 0 to 1", False),
    "temperature": (_is_positive, _POSITIVE, False),
    "softcap": (_is_positive, f"{_POSITIVE}, or None", True),
    "teacher_softcap": (_is_positive, f"{_POSITIVE}, or None", True),
    "logit_scale": (_is_positive, f"{_POSITIVE}, or None", True),
    "teacher_logit_scale": (_is_positive, f"{_POSITIVE}, or None", True),
}


def check_options(options: Options, num_items: Any) -> None:
    check_backend(WHO, options.backend)
    for name, (is_legal, expected, is_optional) in _NUMBERS.items():
        value = getattr(options, name)
        if value is None and is_optional:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise TypeError(f"{WHO}: {name} is {describe(value)}; expected {expected}")
        if not is_legal(value):
            raise ValueError(f"{WHO}: {name} is {value!r}, expected {expected}")
    if options.reduction not in get_args(Reduction):
        given, expected = options.reduction, choices(options.reduction, get_args(Reduction))
        raise ValueError(f"{WHO}: reduction is {shown(given)}; expected {expected}")
    if not isinstance(options.return_entropy, bool):
        raise TypeError(f"{WHO}: return_entropy is {describe(options.return_entropy)}; expected True or False")
    for name, value in (("memory_limit", options.memory_limit), ("num_items", num_items)):
        if value is None or (name == "num_items" and isinstance(value, Tensor)):
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{WHO}: {name} is {describe(value)}; expected an int or None")
        if value < 0:
            raise ValueError(f"{WHO}: {name} is {value}, expected at least 0")
    if num_items is not None and options.reduction != "mean":
        raise ValueError(f'{WHO}: num_items is given but reduction is "{options.reduction}", expected "mean"')


def _compute_dtype(inputs: Inputs) -> torch.dtype:
    """input's dtype, or autocast's unless a tensor is fp64, as in F.linear."""
    names = "input", "linear_weight", "teacher_input", "teacher_weight"
    tensors = {name: getattr(inputs, name) for name in names}
    autocast = autocast_dtype(inputs.input.device.type)
    if autocast is not None and all(t.dtype != torch.float64 for t in tensors.values()):
        return autocast
    dtype = inputs.input.dtype
    for name, t in tensors.items():
        if t.dtype != dtype:
            raise TypeError(f"{WHO}: {name} is {t.dtype}, expected input's {dtype}")
    return dtype
