"""Linear cross entropy for the tools."""

from typing import get_args

from quackish.literals import Reduction, Schedule
from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
from quackish.ops.shared.argument_types import size
from quackish.ops.shared.for_tools import Args, Imported, Maker, Operation, Options, SelfTest, flag, no_grad, value
from quackish.ops.shared.models import Model

IGNORED = -100


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Logits have standard deviation 1. Every ninth row is ignored."""
    import torch

    m, h, v = shape
    target = torch.arange(m, device=new.device) * 7 % v
    target[::9] = IGNORED
    return {"input": new.rows(m, h, seed=0), "linear_weight": new.rows(v, h, seed=1).mul_(h**-0.5), "target": target}


LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="Linear cross entropy",
    function=Imported("quackish.ops.linear_cross_entropy.api", "linear_cross_entropy"),
    results=("loss", "lse"),
    leaves=("input", "linear_weight", "linear_bias"),
    spec=GEMM_SPEC,
    dims=("M", "H", "V"),
    example="8192x4096x128256",
    small=(48, 64, 512),
    model_shapes=Model.head_shapes,
    make=_make,
    options={
        "bias": flag("linear_bias", "with a bias", lambda new, m, h, v: new.rows(v, seed=3)),
        "schedule": value("schedule", ", ".join(get_args(Schedule)), example="recompute"),
        "chunk_size": value("chunk_size", type=int, metavar="ROWS", example=8),
        "memory_limit": value(
            "memory_limit",
            "limit on memory besides inputs and gradients, such as 500MB or 1.5GB",
            type=size,
            metavar="BYTES",
            example=1 << 30,
        ),
        "reduction": value("reduction", ", ".join(get_args(Reduction)), example="none"),
        "class_weight": flag("weight", "with class weights", lambda new, m, h, v: new.weights(v, dtype="float32")),
        "label_smoothing": value("label_smoothing", type=float, metavar="S", example=0.1),
        "softcap": value("softcap", type=float, metavar="C", example=30.0),
        "logit_scale": value("logit_scale", type=float, metavar="S", example=0.5),
        "z_loss": value("z_loss", type=float, metavar="C", example=1e-3),
        "return_lse": flag("return_lse", "also return lse, and backpropagate through it"),
        "return_stats": flag("return_stats", "also return the statistics, and backpropagate through them"),
        "grad_weight_out": flag(
            "grad_weight_out", "add the weight gradients to buffers", lambda new, m, h, v: new.zeros(v, h)
        ),
        "no_grad": no_grad(),
    },
    dry_run=Imported("quackish.ops.linear_cross_entropy.explain", "dry_run"),
    explain=Imported("quackish.ops.linear_cross_entropy.explain", "explain"),
    bounds={"loss": 1e-4, "lse": 1e-4},
    self_tests={
        "": SelfTest((200, 256, 1000)),
        "chunks": SelfTest(
            (300, 256, 1003), dict(bias=True, schedule="chunked", chunk_size=128, softcap=30.0, z_loss=1e-3)
        ),
        "class weights": SelfTest((300, 256, 1003), dict(class_weight=True, reduction="sum")),
        "stored": SelfTest((300, 256, 1003), dict(bias=True, schedule="stored", reduction="none", return_lse=True)),
        "recompute": SelfTest((2000, 256, 9001), dict(schedule="recompute")),
        "recompute in chunks": SelfTest((2000, 256, 9001), dict(schedule="recompute", chunk_size=512)),
        "loss per row": SelfTest((2000, 256, 9001), dict(schedule="recompute", reduction="none")),
        "a buffer": SelfTest((300, 256, 1003), dict(grad_weight_out=True)),
        "smoothing": SelfTest((300, 256, 1003), dict(class_weight=True, label_smoothing=0.1)),
        "fp16": SelfTest((300, 256, 1003), dict(bias=True), "float16"),
        "many rows of few classes": SelfTest((20_000, 64, 100)),
    },
    large_tests=[  # with the GEMMs of "chunked", and with "recompute" all epilogues
        SelfTest((4096, 2048, 32_000)),
        SelfTest((4096, 2048, 32_000), dict(schedule="recompute")),
        SelfTest((8192, 4096, 128_256), only_timed=True),
    ],
)
FUNCTIONS = (LINEAR_CROSS_ENTROPY,)
