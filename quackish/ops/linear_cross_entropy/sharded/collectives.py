"""Collectives of the vocabulary-parallel head, over dimension 0. On a GPU they do not block the host."""

import torch
import torch.distributed as dist
from torch import Tensor

from quackish.device.modes import num_dispatch_modes

# PyTorch 2.13 renamed these.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`own` of all ranks, concatenated in rank order."""
    if num_dispatch_modes():  # selective checkpointing cannot save a tensor that is written later
        ops = torch.ops._c10d_functional
        return ops.wait_tensor(ops.all_gather_into_tensor(own.contiguous(), group.size(), group.group_name))
    out = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
    _all_gather_single(out, own.contiguous(), group=group)
    return out


def sum_over_ranks(partial: Tensor, group: dist.ProcessGroup, scatter: bool, deterministic: bool) -> Tensor:
    """The sum of `partial` (m, n) over ranks.

    scatter: return only this rank's m / ranks rows; without it, `partial` may be overwritten. deterministic: add ranks
    in order, in fp32 or wider, independent of the communication library's algorithm.
    """
    if deterministic:
        return _sum_in_rank_order(partial, group, scatter)
    if not scatter:
        dist.all_reduce(partial, group=group)
        return partial
    total = partial.new_empty((partial.shape[0] // group.size(), partial.shape[1]))
    _reduce_scatter_single(total, partial, group=group)
    return total


def _sum_in_rank_order(partial: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
    """Each rank adds up one block of rows. Sends as many bytes as a ring all-reduce."""
    size, (m, n) = group.size(), partial.shape
    rows = -(-m // size)
    if rows * size != m:
        partial = torch.cat([partial, partial.new_zeros((rows * size - m, n))])
    blocks = torch.empty_like(partial)
    dist.all_to_all_single(blocks, partial, group=group)
    first, *others = blocks.view(size, rows, n)
    total = first.to(torch.promote_types(partial.dtype, torch.float32), copy=True)
    for block in others:
        total += block
    total = total.to(partial.dtype)
    return total if scatter else all_gather(total, group)[:m]
