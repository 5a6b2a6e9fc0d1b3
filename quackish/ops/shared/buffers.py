"""Checks of a buffer that backward adds the weight gradient to, such as Megatron's `main_grad`."""

import sys

from torch import Tensor

from quackish.device.modes import are_plain, check_memory
from quackish.errors import UnsupportedError


def check_buffer(op: str, **tensors: Tensor | None) -> None:
    """tensors: the buffer, the weight and the input, in this order, by the user's names. Shapes are already checked."""
    (name, buffer), (weight_name, weight), *_ = tensors.items()
    if buffer.requires_grad:
        raise ValueError(f"{op}: {name} requires grad, expected a plain buffer; detach it")
    if not buffer.is_contiguous() and _overlaps_itself(buffer):
        raise ValueError(
            f"{op}: {name} has shape {tuple(buffer.shape)} and strides {tuple(buffer.stride())}, so its elements share "
            f"memory; expected memory of its own for each element, such as torch.zeros_like({weight_name})"
        )
    if are_plain((buffer,)):
        check_memory(op, **{name: buffer})
    for other, tensor in list(tensors.items())[1:]:
        if _share_memory(buffer, tensor):
            raise ValueError(
                f"{op}: {name} shares memory with {other}, expected a buffer of its own, such as "
                f"torch.zeros_like({weight_name})"
            )
    if weight.requires_grad and _is_fsdp_parameter(weight):
        raise UnsupportedError(
            f"{op}: {name} is given but {weight_name} is a parameter that FSDP shards: the buffer would get only this "
            f"rank's gradient, without reduction. Leave {name} out: FSDP accumulates .grad, in fp32 with "
            "MixedPrecisionPolicy(reduce_dtype=torch.float32)"
        )


def _overlaps_itself(t: Tensor) -> bool:
    """True if elements of t may share memory. Slices and transposes of a contiguous tensor give False."""
    extent = 0  # the largest offset that the dimensions with smaller strides reach
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1):
        if stride <= extent:
            return t.numel() > 0
        extent += (size - 1) * stride
    return False


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """True if the address ranges of two tensors overlap."""
    if not are_plain((a, b)) or not a.numel() or not b.numel() or a.is_meta:
        return False
    (a0, a1), (b0, b1) = map(_extent, (a, b))
    return a0 < b1 and b0 < a1


def _extent(t: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.itemsize


def _is_fsdp_parameter(weight: Tensor) -> bool:
    """True if weight belongs to a module under `fully_shard` or FullyShardedDataParallel.

    FSDP has no public API for this, so this uses internals, and returns False if they change.
    """
    base = weight if weight._base is None else weight._base  # in forward, FSDP1's parameters are views of a flat one
    if getattr(base, "_fsdp_flattened", False):
        return True
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for state in [ref() for ref in list(states.values())]:
        groups = getattr(state, "_fsdp_param_groups", None)  # one group before PyTorch 2.12
        groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
        for group in groups:
            if any(getattr(p, "_unsharded_param", None) is base for p in getattr(group, "fsdp_params", ())):
                return True
    return False
