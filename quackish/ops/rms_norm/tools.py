"""RMSNorm for the tools."""

from typing import Any

from quackish.ops.rms_norm.problems import FORWARD_SPEC
from quackish.ops.shared.argument_types import one_of
from quackish.ops.shared.for_tools import (
    DTYPES,
    Args,
    Imported,
    Maker,
    Operation,
    Option,
    Options,
    SelfTest,
    flag,
    value,
)
from quackish.ops.shared.models import Model

EPS = 1e-6


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """One weight per head: x is (m / heads, heads, n)."""
    import torch

    (m, n), weight_dtype = shape, options.get("weight_dtype")
    heads = 1 if weight_dtype == "none" else options.get("heads", 1)
    if heads < 1 or m % heads:
        raise ValueError(f"--heads is {heads}, expected a divisor of {m} rows")
    if "residual_dtype" in options and "residual" not in options:
        raise ValueError("--residual-dtype is given without --residual; expected both")
    if "dweight_out" in options and weight_dtype == "none":
        raise ValueError("--dweight-out is given, but --weight-dtype is none: there is no weight")

    def dtype(name: str | None) -> str | None:
        return None if name in ("none", "same") else name

    sizes, parameter = ((m, n), (n,)) if heads == 1 else ((m // heads, heads, n), (heads, n))
    args: dict[str, Any] = {"x": new.rows(*sizes, seed=0), "weight": None, "eps": EPS}
    if weight_dtype != "none":
        args["weight"] = new.weights(heads * n, dtype=dtype(weight_dtype)).view(parameter)
    if "bias" in options:
        args["bias"] = new.rows(*parameter, seed=4, dtype=dtype(weight_dtype))
    if "residual" in options:
        args["residual"] = new.rows(*sizes, seed=3, dtype=dtype(options["residual"]))
    if "dweight_out" in options:
        args["dweight_out"] = new.zeros(*parameter)
    return args | {name: getattr(torch, options[name]) for name in ("residual_dtype", "out_dtype") if name in options}


def _dtype(help: str, other: dict[str, str] | None = None, **arguments: Any) -> Option:
    return value(None, help, type=one_of(DTYPES | (other or {})), metavar="DTYPE", **arguments)


RMS_NORM = Operation(
    name="rms_norm",
    title="RMSNorm",
    function=Imported("quackish.ops.rms_norm.api", "rms_norm"),
    results=("y", "res"),
    leaves=("x", "weight", "bias", "residual"),
    spec=FORWARD_SPEC,
    dims=("M", "N"),
    example="8192x4096",
    small=(64, 1024),
    model_shapes=Model.norm_shapes,
    make=_make,
    options={
        "bias": flag(None, "with a bias"),
        "residual": _dtype(
            "with a residual; its dtype is --dtype unless given",
            {"same": "same"},
            nargs="?",
            const="same",
            example="float32",
        ),
        "residual_dtype": _dtype(
            "dtype of the returned sum of input and residual", example="float16", needs={"residual": "same"}
        ),
        "weight_dtype": _dtype(
            "dtype of the weight, if not --dtype; none: no weight", {"none": "none"}, example="float32"
        ),
        "out_dtype": _dtype("dtype of y", example="float32"),
        "heads": value(None, "one weight per head: row r uses weight r %% H", type=int, metavar="H", example=4),
        "dweight_out": flag(None, "add the weight gradient to a buffer"),
    },
    passes=("forward", "backward"),
    self_tests={
        "": SelfTest((257, 1024)),
        "many rows": SelfTest((5000, 256)),
        "odd": SelfTest((37, 257), dict(residual="same", bias=True), "float32"),
        "residual and bias": SelfTest((300, 4096), dict(residual="same", bias=True)),
        "fp16, wide": SelfTest((20, 16_384), dtype="float16"),
        "split over a cluster": SelfTest((5, 65_536)),
        "a weight per head": SelfTest((3000, 128), dict(heads=12, residual="same", residual_dtype="float32")),
    },
    large_tests=[SelfTest((16_384, 4096))],
)
FUNCTIONS = (RMS_NORM,)
