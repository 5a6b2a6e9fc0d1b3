"""Argument checks of linear cross entropy, which raise ValueError, TypeError or IndexError."""

from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from quackish.device.arguments import by_name
from quackish.device.modes import autocast_dtype
from quackish.errors import describe, did_you_mean
from quackish.ops.shared.arguments import check_tensor
from quackish.types import Backend, Reduction, Schedule

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FP32 = torch.finfo(torch.float32)


class Inputs(NamedTuple):
    """The user's tensors, unchanged."""

    input: Tensor  # (..., h)
    linear_weight: Tensor  # (v, h)
    target: Tensor  # (...)
    linear_bias: Tensor | None = None  # (v,)
    weight: Tensor | None = None  # (v,)
    logit_scale: Any = None  # float | Tensor | None, for kernels 0-dim
    num_items: Any = None  # int | Tensor | None
    grad_weight_out: Tensor | None = None  # (v, h)

    def parameters(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """The tensors that get gradients, in the order of Grads."""
        return self.input, self.linear_weight, self.linear_bias


class Options(NamedTuple):
    """The user's options, unchanged."""

    reduction: Reduction = "mean"
    ignore_index: int | None = -100
    label_smoothing: float = 0.0
    softcap: float | None = None
    z_loss: float = 0.0
    return_lse: bool = False
    return_stats: bool = False
    schedule: Schedule = "auto"
    chunk_size: int | None = None
    memory_limit: int | None = None
    backend: Backend = "auto"


make_inputs, make_options = by_name(Inputs), by_name(Options)  # made once: torch.compile warns where it traces a cache


def check_tensors(inputs: Inputs) -> None:
    who = "linear_cross_entropy"
    tensors = inputs._asdict()
    del tensors["logit_scale"], tensors["num_items"]  # see check_options
    for name, tensor in tensors.items():
        required = name in ("input", "linear_weight", "target")
        check_tensor(who, name, tensor, optional=not required)
        if tensor is None:
            continue
        if type(tensor).__name__ == "DTensor":
            raise TypeError(
                f"{who}: {name} is a DTensor, expected a plain tensor. Parameters under fully_shard are plain tensors "
                "only in the forward of their own module: compute the loss there, as LinearCrossEntropyLoss does, and "
                "shard that module. For tensor parallelism (a weight with Shard(0)), use "
                "quackish.parallel.linear_cross_entropy. If the tensor is replicated, pass .to_local()"
            )
        if tensor.device != inputs.input.device:
            raise ValueError(f"{who}: {name} is on {tensor.device}, expected input's device {inputs.input.device}")
    refuse_grad(who, weight=inputs.weight)
    x, w, out = inputs.input, inputs.linear_weight, inputs.grad_weight_out
    floats = _DTYPES, "bfloat16, float16, float32 or float64"
    buffer = (torch.float32, w.dtype), f"torch.float32 or linear_weight's {w.dtype}"
    classes = (torch.int32, torch.int64), "class indices, int32 or int64, not probabilities"
    for name, (dtypes, expected) in dict(
        input=floats, linear_weight=floats, linear_bias=floats, target=classes, weight=floats, grad_weight_out=buffer
    ).items():
        tensor = tensors[name]
        if tensor is not None and tensor.dtype not in dtypes:
            raise TypeError(f"{who}: {name} is {tensor.dtype}, expected {expected}")
    if w.dim() != 2 or 0 in w.shape:
        raise ValueError(f"{who}: linear_weight has shape {tuple(w.shape)}, expected (V, H) with V >= 1 and H >= 1")
    v, h = w.shape
    if x.dim() < 1 or x.shape[-1] != h:
        if x.dim() >= 1 and x.shape[-1] == v:
            raise ValueError(
                f"{who}: linear_weight has shape {(v, h)}, expected (V, {v}) for input {tuple(x.shape)}: pass "
                "linear_weight.t() if it is (H, V), and hidden states as input, not logits"
            )
        raise ValueError(
            f"{who}: input has shape {tuple(x.shape)}, expected (..., {h}), as many columns as linear_weight {(v, h)}"
        )
    for name, shape in dict(linear_bias=(v,), target=x.shape[:-1], weight=(v,), grad_weight_out=(v, h)).items():
        tensor = tensors[name]
        if tensor is not None and tensor.shape != shape:
            context = f"for input {tuple(x.shape)} and linear_weight {(v, h)}"
            raise ValueError(f"{who}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} {context}")
    if out is not None and out.requires_grad:
        raise ValueError(f"{who}: grad_weight_out requires grad, expected a plain buffer; detach it")


def _choice(name: str, *choices: str) -> tuple:
    expected = f"one of {', '.join(choices)}"
    return name, str, expected, lambda word: word in choices, expected  # torch 2.11 cannot compile choices.__contains__


_BYTES = "an int, the number of bytes, such as 200_000_000 for 200 MB, or None"
_CHOICES = dict(reduction=get_args(Reduction), schedule=get_args(Schedule), backend=get_args(Backend))
_OPTIONS = (  # name, type, expected type in words, whether a value is legal, expected values in words
    *[_choice(name, *choices) for name, choices in _CHOICES.items()],
    ("ignore_index", int, "an int or None", lambda i: -(2**63) <= i < 2**63, "a 64-bit integer"),
    ("label_smoothing", (int, float), "a float", lambda e: 0.0 <= e <= 1.0, "0 <= label_smoothing <= 1"),
    ("softcap", (int, float), "a float or None", lambda c: c >= FP32.tiny, "None or a positive number"),
    ("z_loss", (int, float), "a float", lambda z: 0.0 <= z <= FP32.max, "a finite number that is not negative"),
    ("return_lse", bool, "True or False", lambda b: True, ""),
    ("return_stats", bool, "True or False", lambda b: True, ""),
    ("chunk_size", int, "an int or None", lambda n: 1 <= n < 2**62, "None or at least 1 row, below 2^62"),
    ("memory_limit", int, _BYTES, lambda n: n >= 0, "None or a number of bytes, at least 0"),
    ("num_items", int, "an int or a 0-dim tensor or None", lambda n: 0 <= n < 2**63, "at least 0, below 2^63"),
    (
        "logit_scale",
        (int, float),
        "a float or a 0-dim tensor or None",
        lambda s: FP32.tiny <= s <= FP32.max,
        "None or a positive finite number",
    ),
)


def check_options(
    options: Options,
    logit_scale: Any = None,
    num_items: Any = None,
    device: torch.device | None = None,
    who: str = "linear_cross_entropy",
) -> None:
    """device: input's device, where tensor options may be. who: the function that the user called."""
    numbers = {"logit_scale": logit_scale, "num_items": num_items}
    tensors = {name: t for name, t in numbers.items() if isinstance(t, Tensor)}
    values = {**options._asdict(), **numbers, **dict.fromkeys(tensors)}
    for name, types, expected_type, is_legal, expected in _OPTIONS:
        value = values[name]
        if value is None and expected_type.endswith("None"):
            continue
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):  # bool is a subclass of int
            raise TypeError(f"{who}: {name} is {describe(value)}; expected {expected_type}")
        if not is_legal(value):
            hint = did_you_mean(value, _CHOICES[name]) if isinstance(value, str) else ""
            raise ValueError(f"{who}: {name} is {value!r}, expected {expected}{hint}")
    if options.return_lse and options.return_stats:
        raise ValueError(f"{who}: return_lse and return_stats are True, expected at most one: stats.lse is the lse")
    if num_items is not None and options.reduction != "mean":
        raise ValueError(f'{who}: num_items is given but reduction is "{options.reduction}", expected "mean"')
    for name, t in tensors.items():
        if t.dim() != 0:
            raise ValueError(f"{who}: {name} has shape {tuple(t.shape)}, expected a 0-dim tensor or a number")
        if t.device.type != "cpu" and t.device != device:
            raise ValueError(f"{who}: {name} is on {t.device}, expected {device} (input's) or cpu")
    refuse_grad(who, **tensors)
    if isinstance(logit_scale, Tensor) and logit_scale.dtype not in _DTYPES:
        raise TypeError(f"{who}: logit_scale is {logit_scale.dtype}, expected bfloat16, float16, float32 or float64")


def refuse_grad(who: str, **tensors: Tensor | None) -> None:
    """ValueError for a tensor from which autograd would want a gradient; as in PyTorch, none under torch.no_grad."""
    for name, t in tensors.items():
        if t is not None and t.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{who}: {name} requires grad, but gets no gradient; expected {name}.detach()")


def resolve_compute_dtype(inputs: Inputs) -> torch.dtype:
    """The dtype of the GEMM operands: input's, or autocast's unless a tensor is fp64, as in F.linear."""
    who, (input, linear_weight, linear_bias) = "linear_cross_entropy:", inputs.parameters()
    autocast = autocast_dtype(input.device.type)
    if autocast is not None and all(t is None or t.dtype != torch.float64 for t in (input, linear_weight, linear_bias)):
        return autocast
    if linear_weight.dtype != input.dtype:
        raise TypeError(f"{who} linear_weight is {linear_weight.dtype}, expected input's {input.dtype}")
    if linear_bias is not None and linear_bias.dtype not in (input.dtype, torch.float32):
        raise TypeError(f"{who} linear_bias is {linear_bias.dtype}, expected input's {input.dtype} or float32")
    return input.dtype


def check_targets(target: Tensor, v: int, ignore_index: int) -> None:
    """IndexError for an invalid target, as in PyTorch. Only for the CPU: on a GPU it would synchronize."""
    target = target.long()  # before comparing, see reference.rows_of
    bad = ((target < 0) | (target >= v)) & (target != ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"linear_cross_entropy: target {row} of {target.numel()} is {int(target[row])}, "
            f"expected 0 <= target < {v} or ignore_index {ignore_index}"
        )
