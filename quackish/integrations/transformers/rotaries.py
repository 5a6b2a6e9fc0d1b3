"""Rotary embeddings: which attention modules call a function that `quackish.rotary` computes; their patched classes.

Attention modules call a function of their file by its global name. A patched module runs the code of its class's
forward with globals of its own, in which that name is quackish's function; every other name is looked up in the file at
each call. If the file's name is bound to something else later, as by a mock, that is called. A subclass with a forward
of its own, which calls `super().forward`, is not patched.
"""

import contextlib
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

import quackish
from quackish.errors import UnsupportedError
from quackish.integrations.plain import backend_for
from quackish.integrations.transformers.subclass import runs_own_forward, subclass, unpatched_class
from quackish.integrations.transformers.trial import Random, difference, isolated, reason
from quackish.types import RotaryLayout

NAMES = "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave"


class Form(NamedTuple):
    """How a function of q, k, cos and sin (B, L, W) rotates."""

    name: str  # the function's
    layout: RotaryLayout
    tables: Literal["full", "first half", "half"]  # W of full tables is D; the first half of them may suffice
    partial: bool  # the tables may have fewer columns; the other elements are kept


@functools.cache
def attention_class(base: type, forms: tuple[Form, ...]) -> type:
    """A subclass of an attention whose forward calls `quackish.rotary`. Cached."""
    file = _innermost(base.forward).__globals__
    originals = {form.name: file[form.name] for form in forms}
    replaced = {form.name: _function(file, originals[form.name], form) for form in forms}
    with_rotary = _with_globals(base.forward, replaced)

    def forward(self, *args, **kwargs) -> Any:
        run = base.forward if runs_own_forward(args, kwargs) else with_rotary
        return run(self, *args, **kwargs)

    return subclass(base, forward, (attention_class, base, forms), rotary_functions=originals)


def why_bypassed(attention: nn.Module) -> str:
    """Says why a patched attention calls another function than quackish's; "" if it does not."""
    file = _innermost(unpatched_class(attention).forward).__globals__
    for name, function in type(attention).rotary_functions.items():
        if file.get(name) is not function:
            return f"{name} of its file was replaced"
    return ""


def _function(file: dict[str, Any], original: Callable, form: Form) -> Callable:
    """What a patched module calls instead of the file's function `original`."""

    @functools.wraps(original)
    def apply_rotary(*args, **kwargs) -> Any:
        now = file[form.name]
        if now is original and (call := _call_of(form, args, kwargs)) is not None:
            with contextlib.suppress(UnsupportedError):
                return call()
        return now(*args, **kwargs)

    return apply_rotary


def _call_of(form: Form, args: tuple, kwargs: dict[str, Any]) -> Callable[[], tuple[Tensor, Tensor]] | None:
    """The call of `quackish.rotary` for the arguments of a file's function; None if it does not compute the same."""
    q, k, cos, sin, *others = *args, *[None] * (4 - len(args))
    if others or kwargs or any(type(t) not in (Tensor, nn.Parameter) for t in (q, k, cos, sin)):
        return None
    (*_, length, d), w = q.shape, cos.shape[-1]
    fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and cos.shape == sin.shape and cos.shape[0] in (1, q.shape[0])
    if not fits or cos.shape[1] != length or k.shape[2:] != q.shape[2:] or k.shape[0] != q.shape[0] or q.numel() == 0:
        return None
    rotated = 2 * w if form.tables == "half" else w
    if (
        (rotated != d and not (form.partial and rotated < d))
        or rotated % 2
        or not q.dtype == k.dtype == cos.dtype == sin.dtype
    ):
        return None
    if cos.requires_grad or sin.requires_grad:
        return None
    if form.tables == "first half":
        cos, sin = cos[..., : w // 2], sin[..., : w // 2]
    options = dict(rotary_dim=rotated, layout=form.layout, backend=backend_for(q))
    return functools.partial(quackish.rotary, q, k, cos, sin, **options)


# Globals --------------------------------------------------------------------------------------------------------------


class _Globals(dict):
    """Names that stand for others of a file, whose names are looked up when they are used."""

    def __init__(self, file: dict[str, Any], replaced: dict[str, Any]):
        super().__init__(replaced, __builtins__=file["__builtins__"], __name__=file["__name__"])
        self.file = file

    def __missing__(self, name: str) -> Any:
        return self.file[name]


def _innermost(function: Any) -> types.FunctionType:
    """The function inside decorators such as `deprecate_kwarg`."""
    return inspect.unwrap(function)


def _with_globals(function: Any, replaced: dict[str, Any]) -> types.FunctionType:
    """A copy of a function, and of the decorators around it, with other values of some global names."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        names, cells = _Globals(function.__globals__, replaced), function.__closure__
    else:
        names, copied = function.__globals__, _with_globals(inner, replaced)
        cells = tuple(types.CellType(copied) if cell.cell_contents is inner else cell for cell in function.__closure__)
    copy = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


# Trials ---------------------------------------------------------------------------------------------------------------


def called_by(module: nn.Module) -> list[str]:
    """The names of the rotary functions that the module's class calls; DeepSeek V3's config chooses one of two."""
    function = _innermost(unpatched_class(module).forward)
    names = getattr(getattr(function, "__code__", None), "co_names", ())
    return [name for name in NAMES if name in names and callable(function.__globals__.get(name))]


_forms: dict[tuple[Callable, str], Form | str] = {}  # by the file's function and its name


def forms_of(attention: nn.Module) -> tuple[Form, ...] | str:
    """How the functions rotate that `quackish.rotary` computes, or why it computes none."""
    base = unpatched_class(attention)
    if "forward" in vars(attention):
        return "its forward was replaced on the instance, as hooks of accelerate do"
    if why := _why_not_copied(base.forward):
        return why
    file = _innermost(base.forward).__globals__
    found = [_form_of(file[name], name) for name in called_by(attention)]
    forms = tuple(form for form in found if isinstance(form, Form))
    return forms or next(why for why in found if isinstance(why, str))


def _form_of(function: Callable, name: str) -> Form | str:
    """How a function rotates, or why `quackish.rotary` does not compute it. Cached."""
    key = function, name
    if key not in _forms:
        try:
            with isolated():
                _forms[key] = _find(function, name)
        except Exception as error:  # anything the function may raise
            return reason(error)
    return _forms[key]


def _why_not_copied(function: Any) -> str:
    """Says why `_with_globals` cannot copy a function; "" if it can."""
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if not any(cell.cell_contents is inner for cell in getattr(function, "__closure__", None) or ()):
            return f"its forward is decorated by {getattr(function, '__module__', 'another library')}"
        function = inner
    return ""


def _find(function: Callable, name: str) -> Form | str:
    """The first form in which the function computes the same as quackish, or how it differs from the first one."""
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return f"its {name} takes {inspect.signature(function)}, expected q, k, cos and sin"
    d, reasons, failures = 16, [], []
    for layout, tables in itertools.product(get_args(RotaryLayout), ("full", "first half", "half")):
        form, w = Form(name, layout, tables, partial=False), d // 2 if tables == "half" else d
        try:
            why = _why_different(function, form, d, w)
        except Exception as error:  # tables of another size
            failures.append(reason(error))
            continue
        if why:
            reasons.append(why)
            continue
        partial = form._replace(partial=True)
        try:
            return form if _why_different(function, partial, d, w // 2) else partial
        except Exception:  # most functions multiply whole rows
            return form
    return [*reasons, *failures][0]


def _why_different(function: Callable, form: Form, d: int, w: int) -> str:
    """Says how a function differs from quackish's; "" if it does not. The two halves of full tables differ."""
    random = Random(1)
    q, k, grad_q, grad_k = (random.normal(2, heads, 5, d, dtype=torch.float64) for heads in (4, 2, 4, 2))
    cos, sin = (random.normal(2, 5, w, dtype=torch.float64) for _ in range(2))
    q, k = q.requires_grad_(), k.requires_grad_()
    call, found = _call_of(form, (q, k, cos, sin), {}), []
    assert call is not None
    for results in (function(q, k, cos, sin), call()):
        found.append([*results, *torch.autograd.grad(results, (q, k), (grad_q, grad_k))])
    for what, got, expected in zip(("q", "k", "the gradient of q", "the gradient of k"), *found[::-1], strict=True):
        if not difference(got, expected) <= 1e-6:
            return f"{what} differs from rotary's by {difference(got, expected):.1g}"
    return ""
