"""The MLPs of a mixture of experts for the tools."""

import itertools
from typing import get_args

import torch

from quackish.operations.models import Model
from quackish.operations.table import Args, Maker, Operation, Options, flag, no_grad, value
from quackish.ops.grouped_mlp import grouped_mlp
from quackish.reference.grouped_mlp import GATED
from quackish.types import Activation

_SHARES = (8, 0, 4, 2, 1)  # shares of the rows; one of five groups is empty


def weights(new: Maker, h: int, i: int, experts: int, options: Options) -> Args:
    """The weights, and the biases and buffers that are asked for. Products have standard deviation 1."""
    gated = options.get("activation", "swiglu") in GATED
    width = i * (1 + gated)
    args = {"w1": new.rows(experts, i if "w3" in options else width, h, seed=1).mul_(h**-0.5)}
    args["w2"] = new.rows(experts, h, i, seed=2).mul_(i**-0.5)
    if "w3" in options:
        args["w3"] = new.rows(experts, i, h, seed=5).mul_(h**-0.5)
    if "grad_weight_out" in options:
        args |= {f"grad_{name}_out": new.zeros(*w.shape) for name, w in args.items()}
    if "bias" in options:
        args["b1"], args["b2"] = (new.rows(experts, n, seed=3) for n in (width, h))
    return args


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """The last rows are in no group."""
    rows, h, i, experts = shape
    shares = [_SHARES[expert % len(_SHARES)] for expert in range(experts)]
    ends = [rows * end // (sum(shares) + 1) for end in itertools.accumulate(shares)]
    offs = torch.tensor(ends, dtype=torch.int32, device=new.device)
    return {"x": new.rows(rows, h, seed=0), "offs": offs, **weights(new, h, i, experts, options)}


GROUPED_MLP = Operation(
    name="grouped_mlp",
    title="Grouped MLP",
    function=grouped_mlp,
    results=("y",),
    leaves=("x", "w1", "w2", "w3", "b1", "b2", "scales"),
    kernel="grouped_gemm",
    dims=("R", "H", "I", "E"),
    example="131072x2048x768x128",
    small=(64, 64, 32, 4),
    model_shapes=Model.expert_shapes,
    make=_make,
    options={
        "bias": flag(None, "with a bias"),
        "activation": value("activation", ", ".join(get_args(Activation))),
        "w3": flag(None, "gate and up projection are separate tensors"),
        "scales": flag(
            "scales", "with fp32 row scales", lambda new, r, *_: new.rows(r, seed=4, dtype=torch.float32).sigmoid()
        ),
        "recompute": flag("recompute", "recompute the preactivation in backward"),
        "grad_weight_out": flag(None, "add the weight gradients to buffers"),
        "no_grad": no_grad(),
    },
)
