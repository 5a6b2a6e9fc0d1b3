"""The experts of a mixture after its router for the tools."""

import torch

from quackish.operations.grouped_mlp import GROUPED_MLP, weights
from quackish.operations.models import Model
from quackish.operations.table import Args, Maker, Operation, Options
from quackish.ops.grouped_mlp import moe_mlp


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Some choices are dropped."""
    tokens, h, i, experts, k = shape
    index = (torch.arange(tokens * k, device=new.device) * 7 % (experts + 1)).view(tokens, k)
    args = {"x": new.rows(tokens, h, seed=0), "top_k_index": index}
    args["top_k_weights"] = new.rows(tokens, k, seed=3).abs()
    return args | weights(new, h, i, experts, options)


MOE_MLP = Operation(
    name="moe_mlp",
    title="Mixture of experts",
    function=moe_mlp,
    results=("out",),
    leaves=("x", "top_k_weights", "w1", "w2", "w3", "b1", "b2"),
    kernel="grouped_gemm",
    dims=("T", "H", "I", "E", "K"),
    example="16384x2048x768x128x8",
    small=(32, 64, 32, 4, 2),
    model_shapes=Model.moe_shapes,
    make=_make,
    options={name: option for name, option in GROUPED_MLP.options.items() if name != "scales"},
    has_dry_run=False,  # PyTorch sorts the choices, which the dry run of launches does not see
)
