"""Checks of the arguments of grouped_mlp, mlp, moe_mlp and grouped_mm: ValueError for shapes, TypeError for dtypes."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.device.modes import autocast_dtype
from quackish.errors import check_bool
from quackish.ops.mlp.reference import ACTIVATIONS, GATED
from quackish.ops.shared import buffers
from quackish.ops.shared.arguments import check_backend, check_tensor, choices, shown
from quackish.ops.shared.signatures import PerSignature

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Inputs(NamedTuple):
    """The tensors of a call of grouped_mlp, or of mlp, whose weights and biases have no dimension E."""

    x: Tensor  # (R, H)
    w1: Tensor  # (E, 2I, H) or (E, I, H)
    w3: Tensor | None  # (E, I, H)
    b1: Tensor | None  # (E, 2I) or (E, I)
    w2: Tensor  # (E, H, I)
    b2: Tensor | None  # (E, H)
    scales: Tensor | None  # (R,)
    offs: Tensor | None = None  # (E,); None for mlp
    residual: Tensor | None = None  # of mlp, as y
    grad_w1_out: Tensor | None = None
    grad_w3_out: Tensor | None = None
    grad_w2_out: Tensor | None = None

    def leaves(self) -> tuple[Tensor | None, ...]:
        """The arguments whose gradients are computed. The gradient of residual is dy."""
        return self[:_NUM_LEAVES]


_NUM_LEAVES = Inputs._fields.index("offs")


def check_mlp(inputs: Inputs, who: str, activation: Any, recompute: Any, backend: Any) -> torch.dtype:
    """Checks the arguments of grouped_mlp and those that mlp and moe_mlp share. Returns the dtype to round to.

    who: the function that the user called. For "mlp" and "moe_mlp", x is (..., H), and offs and scales are None.
    """
    x, w1, w3, _, w2, *_ = inputs
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"{who}: activation is {shown(activation)}; expected {choices(activation, ACTIVATIONS)}")
    check_bool(who, recompute=recompute)
    check_backend(who, backend)
    tensors, is_grouped, is_dense = inputs._asdict(), who == "grouped_mlp", who == "mlp"
    _check_are_tensors(who, tensors, ("x", "w1", "w2", "offs")[: 4 if is_grouped else 3])
    if w3 is not None and activation not in GATED:
        raise ValueError(f'{who}: w3 is given but activation is "{activation}", which has no gate; expected None')
    if is_grouped and (x.dim() != 2 or x.shape[1] == 0):
        raise ValueError(f"{who}: x is {dims(x)}; expected (R, H) with H >= 1: flatten tokens to rows")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{who}: x is {dims(x)}; expected (..., H) with H >= 1")
    rows, h = x.shape[0], x.shape[-1]
    if w2.dim() != 3 - is_dense or 0 in w2.shape or w2.shape[-2] != h:
        hint = _transposed("w2", w2) if w2.dim() == 3 - is_dense and w2.shape[-1] == h else ""
        expected = f"({h}, I) with I >= 1" if is_dense else f"(E, {h}, I) with E, I >= 1"
        raise ValueError(f"{who}: w2 is {dims(w2)} but x is {dims(x)}; expected {expected}{hint}")
    *groups, _, i = w2.shape
    hidden = 2 * i if activation in GATED and w3 is None else i
    out_1, out_2, out_3 = (*groups, hidden, h), (*groups, h, i), (*groups, i, h)
    shapes = dict(
        w1=out_1, w3=out_3, b1=(*groups, 2 * i if activation in GATED else i), b2=(*groups, h), scales=(rows,),
        offs=tuple(groups), residual=tuple(x.shape), grad_w1_out=out_1, grad_w3_out=out_3, grad_w2_out=out_2,
    )  # fmt: skip
    for name, shape in shapes.items():
        t = tensors[name]
        if t is not None and t.shape != shape:
            gate = f', activation "{activation}"' if name in ("w1", "b1") else ""
            beside = f"but x is {dims(x)}, w2 is {dims(w2)}{gate}"
            raise ValueError(f"{who}: {name} is {dims(t)} {beside}; expected {shape}{_hint(name, shape, inputs)}")
    if is_grouped:
        _check_offs_dtype(who, inputs.offs)
    _check_floats(who, tensors, ("x", "w1", "w3", "b1", "w2", "b2", "scales"))
    for name, weight in (("w1", w1), ("w3", w3), ("w2", w2)):
        out = getattr(inputs, f"grad_{name}_out")
        if out is None:
            continue
        if weight is None:
            raise ValueError(f"{who}: grad_{name}_out is given but {name} is None; expected None")
        if out.dtype not in (torch.float32, weight.dtype):
            raise TypeError(f"{who}: grad_{name}_out is {out.dtype}; expected torch.float32 or {name}'s {weight.dtype}")
    dtype = _compute_dtype_of(who, x=x, w1=w1, w3=w3, w2=w2)
    if inputs.residual is not None and inputs.residual.dtype != dtype:
        raise TypeError(f"{who}: residual is {inputs.residual.dtype}; expected {dtype}, as the result is")
    return dtype


checked_dtype = PerSignature(check_mlp)


def check_biases(inputs: Inputs, b1: Tensor | None, b3: Tensor | None) -> None:
    """Checks the biases of mlp's first products, after `check_mlp`: one per weight."""
    who, i = "mlp", inputs.w2.shape[-1]
    if b3 is not None and inputs.w3 is None:
        raise ValueError(f"{who}: b3 is given but w3 is None; expected None: b1 has the biases of all rows of w1")
    tensors = dict(x=inputs.x, b1=b1, b3=b3)
    _check_are_tensors(who, tensors, ("x",))
    for name, shape in (("b1", (inputs.w1.shape[0],)), ("b3", (i,))):
        t = tensors[name]
        if t is not None and t.shape != shape:
            w = name.replace("b", "w")
            raise ValueError(f"{who}: {name} is {dims(t)} but {w} is {dims(getattr(inputs, w))}; expected {shape}")
    _check_floats(who, tensors, ("b1", "b3"))


def check_buffers(who: str, inputs: Inputs) -> None:
    """Checks memory and strides of the gradient buffers. `check_mlp` checks their shapes and dtypes."""
    for name in ("w1", "w3", "w2"):
        out = getattr(inputs, f"grad_{name}_out")
        if out is not None:
            named = {f"grad_{name}_out": out, name: getattr(inputs, name), "x": inputs.x}
            buffers.check_buffer(who, **named)


def check_mm(a: Any, b: Any, offs: Any, backend: Any) -> torch.dtype:
    """Checks the arguments of grouped_mm. Returns the dtype that a and b are rounded to."""
    who = "grouped_mm"
    check_backend(who, backend)
    _check_are_tensors(who, dict(a=a, b=b, offs=offs), ("a", "b"))
    for name, t in (("a", a), ("b", b)):
        if t.dim() not in (2, 3):
            raise ValueError(f"{who}: {name} is {dims(t)}; expected 2 or 3 dimensions")

    def both() -> str:  # called only for errors, because Dynamo cannot trace `str` of symbolic sizes
        return f"a is {dims(a)} and b is {dims(b)}"

    if a.shape[-1] != b.shape[-2]:
        hint = _transposed("b", b) if b.dim() == 3 and a.shape[-1] == b.shape[-1] else ""
        raise ValueError(f"{who}: {both()}; expected as many columns of a as rows of b{hint}")
    if a.dim() == b.dim() == 3:
        if offs is not None:
            raise ValueError(f"{who}: {both()} and offs is given; expected None: all groups have the same size")
        if a.shape[0] != b.shape[0]:
            raise ValueError(f"{who}: {both()}; expected as many groups in a as in b")
    elif offs is None:
        raise ValueError(f"{who}: {both()} and offs is None; expected the end of each group, (E,) int32")
    else:
        num_groups = next((t.shape[0] for t in (a, b) if t.dim() == 3), None)
        if offs.dim() != 1 or offs.shape[0] == 0 or num_groups not in (None, offs.shape[0]):
            expected = "E" if num_groups is None else num_groups
            raise ValueError(f"{who}: offs is {dims(offs)}, {both()}; expected ({expected},)")
        _check_offs_dtype(who, offs)
    if any(n == 0 for n in _fixed_sizes(a, b)):
        raise ValueError(f"{who}: {both()}; expected no dimension of 0 but that which offs divides")
    _check_floats(who, dict(a=a, b=b), ("a", "b"))
    return _compute_dtype_of(who, a=a, b=b)


def check_choice(x: Any, top_k_index: Any, top_k_weights: Any, w2: Any) -> None:
    """Checks what moe_mlp has and grouped_mlp has not. `check_mlp` checks all other arguments."""
    who = "moe_mlp"
    tensors = dict(x=x, top_k_index=top_k_index, top_k_weights=top_k_weights, w2=w2)
    _check_are_tensors(who, tensors, tuple(tensors))
    if x.dim() < 2 or x.shape[-1] == 0:
        raise ValueError(f"{who}: x is {dims(x)}; expected (..., H) with at least 2 dimensions and H >= 1")
    if top_k_index.shape[:-1] != x.shape[:-1] or top_k_index.dim() != x.dim() or top_k_index.shape[-1] == 0:
        expected = ", ".join([*map(str, x.shape[:-1]), "K"])
        raise ValueError(f"{who}: top_k_index is {dims(top_k_index)} but x is {dims(x)}; expected ({expected}), K >= 1")
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{who}: top_k_index is {top_k_index.dtype}; expected torch.int32 or torch.int64")
    if top_k_weights.shape != top_k_index.shape:
        raise ValueError(f"{who}: top_k_weights is {dims(top_k_weights)}; expected top_k_index's {dims(top_k_index)}")
    _check_floats(who, tensors, ("x", "top_k_weights"))


def check_offs(who: str, offs: Tensor, size: int, of: str) -> None:
    """ValueError for offsets that decrease or exceed `size`. Only for CPU tensors, because it reads them."""
    ends = offs.tolist()
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end < start:
            raise ValueError(f"{who}: offs[{i}] is {end}, after {start}; expected offsets that do not decrease")
        if end > size:
            raise ValueError(f"{who}: offs[{i}] is {end}; expected at most {size}, {of}")


def dims(t: Tensor) -> str:
    return str(tuple(t.shape))


def _check_are_tensors(who: str, tensors: dict[str, Any], needed: tuple[str, ...]) -> None:
    first, x = next(iter(tensors.items()))
    for name, t in tensors.items():
        if t is None and name not in needed:
            continue
        if not isinstance(t, Tensor):
            check_tensor(who, name, t, optional=name not in needed)
        if type(t).__name__ == "DTensor":
            raise TypeError(
                f"{who}: {name} is a DTensor; expected a plain tensor. Parameters under fully_shard are plain tensors "
                f"only in the forward of their own module: call it there.{_EXPERTS * (who != 'mlp')}"
            )
        if t.device != x.device:
            raise ValueError(f"{who}: {name} is on {t.device} but {first} is on {x.device}; expected one device")


def _check_floats(who: str, tensors: dict[str, Tensor | None], names: tuple[str, ...]) -> None:
    for name in names:
        t = tensors[name]
        if t is not None and t.dtype not in _DTYPES:
            raise TypeError(f"{who}: {name} is {t.dtype}; expected bfloat16, float16, float32 or float64")


def _compute_dtype_of(who: str, **tensors: Tensor | None) -> torch.dtype:
    """The common dtype of the tensors, or autocast's. Autocast does not round fp64, as in F.linear."""
    (first, x), *others = [(name, t) for name, t in tensors.items() if t is not None]
    autocast = autocast_dtype(x.device.type)
    if autocast is not None and all(t.dtype != torch.float64 for t in (x, *(t for _, t in others))):
        return autocast
    for name, t in others:
        if t.dtype != x.dtype:
            raise TypeError(f"{who}: {name} is {t.dtype}; expected {x.dtype}, as {first} is")
    return x.dtype


def _check_offs_dtype(who: str, offs: Tensor) -> None:
    if offs.dtype != torch.int32:
        raise TypeError(f"{who}: offs is {offs.dtype}; expected torch.int32, as sizes.cumsum(0, dtype=torch.int32) is")


def _fixed_sizes(a: Tensor, b: Tensor) -> list[int]:
    """The sizes that offs does not divide."""
    sizes = {(2, 3): (*a.shape[1:], *b.shape), (3, 2): (*a.shape, *b.shape[:1]), (2, 2): (a.shape[0], b.shape[1])}
    return list(sizes.get((a.dim(), b.dim()), (*a.shape, *b.shape)))


_EXPERTS = " If ranks own different experts: .to_local()"


def _transposed(name: str, t: Tensor) -> str:
    return f"; {name}.{'transpose(1, 2)' if t.dim() == 3 else 't()'} has this shape"


def _hint(name: str, shape: tuple[int, ...], inputs: Inputs) -> str:
    t = getattr(inputs, name)
    if t.dim() >= 2 and name != "residual" and t.mT.shape == shape:
        return _transposed(name, t)
    if name == "w1" and inputs.w3 is None and t.dim() == len(shape) and t.shape[-2] == inputs.w2.shape[-1]:
        return " as [gate; up], or w3 beside it"
    return ""
