"""The operations that `explain`, `precompile` and `tune` know, and the arguments of a call: OP SHAPE and options.

To add an operation, add an entry to OPERATIONS: its shape, its options and its dry run.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quackish import kernels
from quackish.bench.cells import parse_shape
from quackish.cli import dry_run
from quackish.cli.dry_run import DryRun
from quackish.cli.parser import CommandError, one_of, size
from quackish.configs.linear_cross_entropy import SCHEDULES
from quackish.errors import UnsupportedError
from quackish.gpu import H200, NAMED, Gpu, gpu_of
from quackish.reference.grouped_mlp import ACTIVATIONS

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_FLAG = dict(action="store_true", default=None)
_GRAD_WEIGHT_OUT = dict(**_FLAG, help="add the weight gradients to buffers")
_NO_GRAD = dict(**_FLAG, help="forward only, without grad")


class Operation(NamedTuple):
    name: str
    dry_run: Callable[[argparse.Namespace, tuple[int, ...], Gpu], DryRun]  # (options, shape, GPU)
    kernel: str  # a GPU without this kernel runs the portable path
    shape: str
    options: dict[str, dict[str, Any]]  # of this operation; the values are arguments of `add_argument`


_RMS_NORM = Operation(
    name="rms_norm",
    dry_run=dry_run.rms_norm,
    kernel="rms_norm_fwd",
    shape="MxN",
    options={
        "--residual": dict(
            nargs="?", const="same", type=one_of({**_DTYPES, "same": "same"}), metavar="DTYPE",
            help="with a residual; its dtype is --dtype unless given",
        ),
        "--residual-dtype": dict(
            type=one_of(_DTYPES), metavar="DTYPE", help="dtype of the returned sum of input and residual"
        ),
        "--weight-dtype": dict(
            type=one_of({**_DTYPES, "none": "none"}), metavar="DTYPE",
            help="dtype of the weight, if not --dtype; none: no weight",
        ),
        "--out-dtype": dict(type=one_of(_DTYPES), metavar="DTYPE", help="dtype of y"),
        "--heads": dict(type=int, metavar="H", help="one weight per head: row r uses weight r %% H"),
        "--dweight-out": dict(**_FLAG, help="add the weight gradient to a buffer"),
    },
)  # fmt: skip
_LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    dry_run=dry_run.linear_cross_entropy,
    kernel="lce_rows",
    shape="MxHxV",
    options={
        "--schedule": dict(help=f"auto, {', '.join(SCHEDULES)}"),
        "--chunk-size": dict(type=int, metavar="ROWS"),
        "--memory-limit": dict(
            type=size, metavar="BYTES", help="limit on memory besides inputs and gradients, such as 500MB or 1.5GB"
        ),
        "--reduction": dict(help="mean, sum, none"),
        "--class-weight": dict(**_FLAG, help="with class weights"),
        "--label-smoothing": dict(type=float, metavar="S"),
        "--softcap": dict(type=float, metavar="C"),
        "--logit-scale": dict(type=float, metavar="S"),
        "--z-loss": dict(type=float, metavar="C"),
        "--return-lse": dict(**_FLAG, help="also return lse, and backpropagate through it"),
        "--return-stats": dict(**_FLAG, help="also return the statistics, and backpropagate through them"),
        "--grad-weight-out": _GRAD_WEIGHT_OUT,
        "--no-grad": _NO_GRAD,
    },
)
_GROUPED_MLP = Operation(
    name="grouped_mlp",
    dry_run=dry_run.grouped_mlp,
    kernel="grouped_gemm",
    shape="RxHxIxE",
    options={
        "--activation": dict(help=", ".join(ACTIVATIONS)),
        "--w3": dict(**_FLAG, help="gate and up projection are separate tensors"),
        "--scales": dict(**_FLAG, help="with fp32 row scales"),
        "--recompute": dict(**_FLAG, help="recompute the preactivation in backward"),
        "--grad-weight-out": _GRAD_WEIGHT_OUT,
        "--no-grad": _NO_GRAD,
    },
)
_ENTRIES = (_RMS_NORM, _LINEAR_CROSS_ENTROPY, _GROUPED_MLP)
OPERATIONS = {
    "rms_norm": _RMS_NORM,
    "rms_norm_forward": _RMS_NORM,
    "rms_norm_backward": _RMS_NORM,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "grouped_mlp": _GROUPED_MLP,
}


def add_arguments(parser: argparse.ArgumentParser, shapes: str = "") -> None:
    """Adds OP, SHAPE and the options of calls. `shapes` is the nargs of several SHAPEs; with "*" OP is optional too."""
    parser.add_argument(
        "op", metavar="OP", choices=OPERATIONS, help=", ".join(OPERATIONS), nargs="?" if shapes == "*" else None
    )
    shape_help = ", ".join(f"{op.shape} for {op.name}" for op in _ENTRIES)
    parser.add_argument("shapes" if shapes else "shape", metavar="SHAPE", help=shape_help, nargs=shapes or None)
    dtype_help = f"dtype of input and weight: {', '.join(_DTYPES)} (bf16)"
    parser.add_argument("--dtype", type=one_of(_DTYPES), default="bfloat16", help=dtype_help)
    parser.add_argument("--bias", action="store_true", help="with a bias")
    groups: dict[str, Any] = {}
    for option, arguments in {option: arguments for op in _ENTRIES for option, arguments in op.options.items()}.items():
        title = ", ".join(op.name for op in _ENTRIES if option in op.options)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(option, **arguments)


def dry_run_call(args: argparse.Namespace, gpu: Gpu | None) -> DryRun:
    """What the call `args` launches on `gpu` (None: a CPU). Raises CommandError for invalid arguments."""
    op = OPERATIONS[args.op]
    for other in _ENTRIES:
        for option in other.options.keys() - op.options.keys():
            if getattr(args, option[2:].replace("-", "_")) is not None:
                raise CommandError(f"{option} is an option of {other.name}, not of {args.op}")
    try:
        shape = parse_shape(args.shape, op.shape)
    except ValueError as error:
        raise CommandError(f"SHAPE is {error}") from None
    if gpu is None:
        return DryRun(portable=f'{args.op}: no kernel for cpu. backend="auto" runs the portable path.')
    try:
        kernels.find(op.kernel, gpu)
        return op.dry_run(args, shape, gpu)
    except UnsupportedError as error:
        return DryRun(portable=str(error).replace(op.kernel, args.op))


def select_gpu(name: str | None) -> tuple[Gpu | None, str]:
    """The GPU (None: a CPU) for --gpu, and how it was selected if none was named."""
    if name not in (None, "this"):
        return NAMED.get(name), ""
    if torch.cuda.is_available():
        return gpu_of(torch.cuda.current_device()), "the current one here"
    if name == "this":
        raise CommandError(f"--gpu is this, but there is no GPU here; expected one of {', '.join(NAMED)}, cpu")
    return H200, "there is none here, so an H200 is assumed; --gpu names another"
