"""Linear cross entropy for the tools."""

from typing import get_args

import torch

from quackish.argument_types import size
from quackish.operations.models import Model
from quackish.operations.table import Args, Maker, Operation, Options, flag, no_grad, value
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.types import Reduction, Schedule

IGNORED = -100


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Logits have standard deviation 1. Every ninth row is ignored."""
    m, h, v = shape
    target = torch.arange(m, device=new.device) * 7 % v
    target[::9] = IGNORED
    return {"input": new.rows(m, h, seed=0), "linear_weight": new.rows(v, h, seed=1).mul_(h**-0.5), "target": target}


LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="Linear cross entropy",
    function=linear_cross_entropy,
    results=("loss", "lse"),
    leaves=("input", "linear_weight", "linear_bias"),
    kernel="lce_gemm",
    dims=("M", "H", "V"),
    example="8192x4096x128256",
    small=(48, 64, 512),
    model_shapes=Model.head_shapes,
    make=_make,
    options={
        "bias": flag("linear_bias", "with a bias", lambda new, m, h, v: new.rows(v, seed=3)),
        "schedule": value("schedule", ", ".join(get_args(Schedule))),
        "chunk_size": value("chunk_size", type=int, metavar="ROWS"),
        "memory_limit": value(
            "memory_limit",
            "limit on memory besides inputs and gradients, such as 500MB or 1.5GB",
            type=size,
            metavar="BYTES",
        ),
        "reduction": value("reduction", ", ".join(get_args(Reduction))),
        "class_weight": flag("weight", "with class weights", lambda new, m, h, v: new.weights(v, dtype=torch.float32)),
        "label_smoothing": value("label_smoothing", type=float, metavar="S"),
        "softcap": value("softcap", type=float, metavar="C"),
        "logit_scale": value("logit_scale", type=float, metavar="S"),
        "z_loss": value("z_loss", type=float, metavar="C"),
        "return_lse": flag("return_lse", "also return lse, and backpropagate through it"),
        "return_stats": flag("return_stats", "also return the statistics, and backpropagate through them"),
        "grad_weight_out": flag(
            "grad_weight_out", "add the weight gradients to buffers", lambda new, m, h, v: new.zeros(v, h)
        ),
        "no_grad": no_grad(),
    },
)
