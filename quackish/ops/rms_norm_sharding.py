"""How DTensor shards RMSNorm's operators. Rows may be sharded; no communication. The normalized dimension may not.

Importing this registers the rules. rms_norm does so when torch.distributed.tensor is loaded, and does not load it.
"""

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from quackish.errors import UnsupportedError


def _rules(x, weight) -> Iterator[tuple[Placement, Placement, Placement]]:
    """For one mesh dimension, placements of (tensors like x, the weight and bias, their gradients).

    There is one tuple per way to shard x's rows.
    x and weight are DTensor's specs: placements, shape, ndim.
    """
    yield Replicate(), Replicate(), Replicate()
    for rows in dict.fromkeys(x.placements):
        if not rows.is_shard():  # Partial: summed first, as PyTorch's own norms do
            continue
        if rows.dim == x.ndim - 1:
            raise UnsupportedError(
                f"rms_norm: x is a DTensor of shape {tuple(x.shape)} and its last dimension, which is normalized, is "
                "sharded; expected it whole. Redistribute x first: to Shard(1), say, which is sequence parallel"
            )
        if weight is not None and weight.ndim == 2 and rows.dim == x.ndim - 2:  # whole heads, each with its weight
            yield rows, Shard(0), Shard(0)
        else:
            yield rows, Replicate(), Partial()


def placement_if(given: object, placement: Placement) -> Placement | None:
    return None if given is None else placement


@register_sharding(torch.ops.quackish.rms_norm_fwd.default)
def _forward(x, weight, bias, residual, dweight_out, *options):
    if dweight_out is not None:
        raise UnsupportedError(
            "rms_norm: dweight_out is given but x is a DTensor; expected None: use .grad, which can be Partial"
        )
    found = []
    for rows, parameter, _ in _rules(x, weight):
        inputs = [rows, placement_if(weight, parameter), placement_if(bias, parameter), placement_if(residual, rows)]
        found.append(([rows, placement_if(residual, rows), rows], inputs))
    return found


@register_sharding(torch.ops.quackish.rms_norm_bwd.default)
def _backward(dy, x, weight, rstd, dres, weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend):
    found = []
    for rows, parameter, total in _rules(x, weight):
        results = (dx_dtype, rows), (dresidual_dtype, rows), (dweight_dtype, total), (dbias_dtype, total)
        inputs = [rows, rows, placement_if(weight, parameter), rows, placement_if(dres, rows)]
        found.append(([placement_if(*result) for result in results], inputs))
    return found
