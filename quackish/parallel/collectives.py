"""Collectives of the vocabulary-parallel head, on matrices of rows. On a GPU the host waits for none of them."""

import torch
import torch.distributed as dist
from torch import Tensor

# PyTorch 2.13 renamed these.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`own` of each rank, one after another along dimension 0."""
    everyone = own.new_empty((group.size() * own.shape[0], *own.shape[1:]))
    _all_gather(everyone, own.contiguous(), group=group)
    return everyone


def summed(partial: Tensor, group: dist.ProcessGroup, scatter: bool, deterministic: bool) -> Tensor:
    """The sum of `partial` (m, n) over ranks.

    scatter: only this rank's m / ranks rows are returned. Otherwise `partial` may be overwritten. deterministic: ranks
    are added in order, in fp32 at least, whichever algorithm the communication library takes.
    """
    if deterministic:
        return _summed_in_order(partial, group, scatter)
    if not scatter:
        dist.all_reduce(partial, group=group)
        return partial
    total = partial.new_empty((partial.shape[0] // group.size(), partial.shape[1]))
    _reduce_scatter(total, partial, group=group)
    return total


def _summed_in_order(partial: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
    """Each rank adds up one block of rows. As many bytes are sent as in an all-reduce by rings."""
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
    return total if scatter else gathered(total, group)[:m]
