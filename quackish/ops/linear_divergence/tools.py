"""linear_divergence for the tools."""

from typing import get_args

from quackish.literals import Reduction
from quackish.ops.shared.argument_types import size
from quackish.ops.shared.for_tools import Args, Imported, Maker, Operation, Options, SelfTest, flag, no_grad, value
from quackish.ops.shared.problems import GEMM_SPEC


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Logits have standard deviation 1."""
    rows, h, teacher_h, v = shape
    args = {"input": new.rows(rows, h, seed=0), "linear_weight": new.rows(v, h, seed=1).mul_(h**-0.5)}
    args["teacher_input"] = new.rows(rows, teacher_h, seed=2)
    args["teacher_weight"] = new.rows(v, teacher_h, seed=3).mul_(teacher_h**-0.5)
    if "bias" in options:
        args["linear_bias"], args["teacher_bias"] = new.rows(v, seed=4), new.rows(v, seed=5)
    if "grad_weight_out" in options:
        args["grad_weight_out"] = new.zeros(v, h)
    return args


LINEAR_DIVERGENCE = Operation(
    name="linear_divergence",
    title="Distillation head",
    function=Imported("quackish.ops.linear_divergence.api", "linear_divergence"),
    results=("loss",),
    leaves=("input", "linear_weight", "linear_bias"),
    spec=GEMM_SPEC,
    dims=("M", "H", "K", "V"),
    example="8192x2048x4096x128256",
    small=(70, 64, 72, 300),
    make=_make,
    options={
        "beta": value("beta", "0: KL(t || s), 1: KL(s || t), between: JSD", type=float, metavar="BETA", example=0.5),
        "divergence_temperature": value("temperature", "of both softmaxes", type=float, metavar="T", example=2.0),
        "reduction": value("reduction", ", ".join(get_args(Reduction)), example="none"),
        "bias": flag(None, "with biases"),
        "mask": flag("mask", "a third of the rows does not count", lambda new, m, *_: new.rows(m, seed=6) > -0.4),
        "softcap": value("softcap", "of the student's logits", type=float, metavar="C", example=30.0),
        "grad_weight_out": flag(None, "add the weight gradient to a buffer"),
        "memory_limit": value(
            "memory_limit",
            "limit on memory besides inputs and gradients, such as 500MB or 1.5GB",
            type=size,
            metavar="BYTES",
            example=100_000_000,
        ),
        "no_grad": no_grad(),
    },
    bench_options=("beta",),
    dry_run=Imported("quackish.ops.linear_divergence.dry_run", "dry_run"),
    self_tests={
        "": SelfTest((300, 128, 192, 1003)),
        "masked": SelfTest((300, 64, 64, 520), dict(mask=True, bias=True, beta=0.3, softcap=20.0)),
        "per row": SelfTest((300, 64, 64, 520), dict(reduction="none", beta=1.0), "float16"),
    },
    large_tests=[SelfTest((8192, 2048, 4096, 128_256), only_timed=True)],
)
FUNCTIONS = (LINEAR_DIVERGENCE,)
