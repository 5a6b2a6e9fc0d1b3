"""The plan of a mask: where its parts are in memory. `AttentionSteps.plan` fills it."""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.attention.arguments import BLOCK, MIXED, ORDERED
from quackish.ops.attention.reference import Inputs


class PlanLayout(NamedTuple):
    """Where the parts of a plan are, in bytes: the order of queries' tiles, that of keys' tiles, and classes.

    Orders are int32 (batches, heads, tiles), with the batches and heads of the mask. Classes are uint8 (batches, heads,
    blocks of queries, blocks of keys): one block in a dimension in which the mask has size 1.
    """

    bytes: int
    of_keys: int
    classes: int
    tiles: tuple[int, int]  # of queries and of keys
    tensors: tuple[int, int]  # batches and heads
    of_classes: tuple[int, ...]  # strides


@functools.lru_cache(maxsize=4096)
def layout_of_plan(mask: tuple[int, ...], num_q: int, num_k: int) -> PlanLayout:
    """mask: its shape."""
    batches, heads, rows, columns = mask
    tiles_q, tiles_k = (_ceil_div(n, ORDERED) for n in (num_q, num_k))
    of_keys = 4 * batches * heads * tiles_q
    classes = of_keys + 4 * batches * heads * tiles_k
    strides = contiguous_strides((batches, heads, _ceil_div(rows, BLOCK), _ceil_div(columns, BLOCK)))
    strides = tuple(0 if size == 1 else stride for size, stride in zip(mask, strides, strict=True))
    return PlanLayout(plan_bytes(mask, num_q, num_k), of_keys, classes, (tiles_q, tiles_k), (batches, heads), strides)


def plan_bytes(mask: Sequence[int], num_q: int, num_k: int) -> int:
    """mask: its shape. Sizes may be symbolic."""
    batches, heads, rows, columns = mask
    tiles = _ceil_div(num_q, ORDERED) + _ceil_div(num_k, ORDERED)
    return batches * heads * (4 * tiles + _ceil_div(rows, BLOCK) * _ceil_div(columns, BLOCK))


def _ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b


def unknown_plan(inputs: Inputs) -> Tensor | None:
    """What the portable path keeps, which reads no plan: MIXED is right for every block, and any order of all tiles."""
    mask = inputs.mask
    if mask is None:
        return None
    layout = layout_of_plan(mask.shape, inputs.q.shape[2], inputs.k.shape[2])
    plan = mask.new_full((layout.bytes,), MIXED, dtype=torch.uint8)
    for start, end, tiles in zip((0, layout.of_keys), (layout.of_keys, layout.classes), layout.tiles, strict=True):
        orders = plan[start:end].view(torch.int32).view(-1, max(1, tiles))
        orders.copy_(torch.arange(orders.shape[1], dtype=torch.int32, device=mask.device))
    return plan


@functools.lru_cache(maxsize=4096)
def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
