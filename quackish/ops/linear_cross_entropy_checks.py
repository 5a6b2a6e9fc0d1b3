"""Whether the arguments of linear cross entropy fit together; ValueError or TypeError if not."""

import torch
from torch import Tensor

from quackish.configs.linear_cross_entropy import SCHEDULES

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def check_shapes(input, linear_weight, target, linear_bias, weight, grad_weight_out) -> None:
    who = "linear_cross_entropy:"
    if linear_weight.dim() != 2 or 0 in linear_weight.shape:
        raise ValueError(f"{who} linear_weight has shape {_shape(linear_weight)}, expected (V, H), neither of them 0")
    v, h = linear_weight.shape
    if input.dim() < 1 or input.shape[-1] != h:
        raise ValueError(f"{who} input has shape {_shape(input)}, expected (..., {h}) as linear_weight has {h} columns")
    if target.is_floating_point():
        raise TypeError(f"{who} target is {target.dtype}, expected class indices, int32 or int64, not probabilities")
    if target.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{who} target is {target.dtype}, expected int32 or int64")
    if target.shape != input.shape[:-1]:
        expected = tuple(input.shape[:-1])
        raise ValueError(f"{who} target has shape {_shape(target)}, expected {expected}: input's without its last")
    for name, tensor, shape in (
        ("linear_bias", linear_bias, (v,)),
        ("weight", weight, (v,)),
        ("grad_weight_out", grad_weight_out, (v, h)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{who} {name} has shape {_shape(tensor)}, expected {shape}")
    for name, tensor in (
        ("linear_weight", linear_weight),
        ("target", target),
        ("linear_bias", linear_bias),
        ("weight", weight),
        ("grad_weight_out", grad_weight_out),
    ):
        if tensor is not None and tensor.device != input.device:
            raise ValueError(f"{who} {name} is on {tensor.device}, expected {input.device}, where input is")
    if weight is not None and not weight.is_floating_point():
        raise TypeError(f"{who} weight is {weight.dtype}, expected a floating dtype")
    if grad_weight_out is not None:
        if grad_weight_out.dtype not in (torch.float32, linear_weight.dtype):
            expected = f"torch.float32 or linear_weight's {linear_weight.dtype}"
            raise TypeError(f"{who} grad_weight_out is {grad_weight_out.dtype}, expected {expected}")
        if grad_weight_out.requires_grad:
            raise ValueError(f"{who} grad_weight_out requires grad, expected a plain buffer; detach it")


def check_options(reduction, label_smoothing, softcap, z_loss, num_items, schedule, chunk_size, backend, device):
    who = "linear_cross_entropy:"
    for name, value, allowed in (
        ("reduction", reduction, ("none", "mean", "sum")),
        ("schedule", schedule, ("auto", *SCHEDULES)),
        ("backend", backend, ("auto", "cute", "reference")),
    ):
        if value not in allowed:
            raise ValueError(f"{who} {name} is {value!r}, expected one of {', '.join(allowed)}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"{who} label_smoothing is {label_smoothing}, expected 0 <= label_smoothing <= 1")
    if softcap is not None and not softcap > 0.0:
        raise ValueError(f"{who} softcap is {softcap}, expected None or a positive number")
    if not z_loss >= 0.0:
        raise ValueError(f"{who} z_loss is {z_loss}, expected a number that is not negative")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
        raise ValueError(f"{who} chunk_size is {chunk_size!r}, expected None or at least 1 row")
    if num_items is None:
        return
    if reduction != "mean":
        raise ValueError(f'{who} num_items replaces the divisor of reduction "mean", but reduction is "{reduction}"')
    if isinstance(num_items, Tensor):
        if num_items.dim() != 0:
            raise ValueError(f"{who} num_items has shape {_shape(num_items)}, expected a 0-dim tensor or an int")
        if num_items.device.type != "cpu" and num_items.device != device:
            raise ValueError(f"{who} num_items is on {num_items.device}, expected {device} (input's) or cpu")
    elif not isinstance(num_items, int):
        raise TypeError(f"{who} num_items is a {type(num_items).__name__}, expected an int or a 0-dim tensor")
    elif num_items < 0:
        raise ValueError(f"{who} num_items is {num_items}, expected at least 0")


def compute_dtype_of(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> torch.dtype:
    """The dtype operands are rounded to: input's, or autocast's, which leaves fp64 alone as F.linear does."""
    who = "linear_cross_entropy:"
    named = (("input", input), ("linear_weight", linear_weight), ("linear_bias", linear_bias))
    for name, tensor in named:
        if tensor is not None and tensor.dtype not in _DTYPES:
            raise TypeError(f"{who} {name} is {tensor.dtype}, expected bfloat16, float16, float32 or float64")
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and all(t is None or t.dtype != torch.float64 for _, t in named):
        return torch.get_autocast_dtype(kind)
    if linear_weight.dtype != input.dtype:
        raise TypeError(f"{who} linear_weight is {linear_weight.dtype}, expected {input.dtype}, as input is")
    if linear_bias is not None and linear_bias.dtype not in (input.dtype, torch.float32):
        raise TypeError(f"{who} linear_bias is {linear_bias.dtype}, expected {input.dtype}, as input is, or float32")
    return input.dtype


def check_targets(target: Tensor, v: int, ignore_index: int) -> None:
    """IndexError for a target that is no class, as PyTorch has it; on CPU only, where looking costs no sync."""
    bad = ((target < 0) | (target >= v)) & (target != ignore_index)
    if bad.any():
        row = int(bad.nonzero()[0])
        raise IndexError(
            f"linear_cross_entropy: target {row} of {target.numel()} is {int(target[row])}, "
            f"expected 0 <= target < {v} or ignore_index {ignore_index}"
        )
