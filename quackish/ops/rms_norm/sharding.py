"""DTensor sharding rules of RMSNorm: rows may be sharded, the normalized dimension may not.

Importing this module registers the rules. rms_norm imports it only if torch.distributed.tensor is already loaded.
"""

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from quackish.errors import UnsupportedError


def _rules(x, weight) -> Iterator[tuple[Placement, Placement, Placement]]:
    """Yields placements of (tensors like x, weight and bias, their gradients) for one mesh dimension.

    One tuple per way to shard x's rows. x and weight are DTensorSpecs.
    """
    yield Replicate(), Replicate(), Replicate()
    for rows in dict.fromkeys(x.placements):
        if not rows.is_shard():  # Partial is reduced first, as for PyTorch's norms
            continue
        if rows.dim == x.ndim - 1:
            raise UnsupportedError(
                f"rms_norm: x is a DTensor of shape {tuple(x.shape)} whose last dimension is sharded; expected that "
                "dimension unsharded, because it is normalized. Redistribute x first, for example to Shard(1) "
                "(sequence parallel)"
            )
        if weight is not None and weight.ndim == 2 and rows.dim == x.ndim - 2:  # heads and their weights
            yield rows, Shard(0), Shard(0)
        else:
            yield rows, Replicate(), Partial()


def _placement_if(given: object, placement: Placement) -> Placement | None:
    return None if given is None else placement


@register_sharding(torch.ops.quackish.rms_norm_fwd.default)
def _forward(x, weight, bias, residual, dweight_out, *options):
    if dweight_out is not None:
        raise UnsupportedError(
            "rms_norm: dweight_out is given but x is a DTensor; expected None: use .grad, which may be Partial"
        )
    strategies = []
    for rows, parameter, _ in _rules(x, weight):
        inputs = [rows, _placement_if(weight, parameter), _placement_if(bias, parameter), _placement_if(residual, rows)]
        strategies.append(([rows, _placement_if(residual, rows), rows], inputs))
    return strategies


@register_sharding(torch.ops.quackish.rms_norm_bwd.default)
def _backward(dy, x, weight, rstd, dres, weight_offset, dx_dtype, dresidual_dtype, dweight_dtype, dbias_dtype, backend):
    strategies = []
    for rows, parameter, total in _rules(x, weight):
        results = (dx_dtype, rows), (dresidual_dtype, rows), (dweight_dtype, total), (dbias_dtype, total)
        inputs = [rows, rows, _placement_if(weight, parameter), rows, _placement_if(dres, rows)]
        strategies.append(([_placement_if(*result) for result in results], inputs))
    return strategies
