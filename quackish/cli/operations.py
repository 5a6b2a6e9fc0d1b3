"""The operations that `explain`, `precompile` and `tune` know, and their calls: OP SHAPE and options.

An operation is an entry of OPERATIONS: its shape, its options and its dry run.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from quackish import kernels
from quackish.bench.cells import parse_shape
from quackish.cli import dry_run
from quackish.cli.dry_run import DryRun
from quackish.cli.parser import Refused, one_of, size
from quackish.configs.linear_cross_entropy import SCHEDULES
from quackish.errors import UnsupportedError
from quackish.gpu import H200, NAMED, Gpu, gpu_of
from quackish.reference.grouped_mlp import ACTIVATIONS

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_SET = dict(action="store_true", default=None)

_SHARED = {
    "--grad-weight-out": dict(**_SET, help="gradients of weights are added to buffers"),
    "--no-grad": dict(**_SET, help="the loss alone; of grouped_mlp y"),
}


class Operation(NamedTuple):
    dry_run: Callable[[argparse.Namespace, tuple[int, ...], Gpu], DryRun]  # (options, shape, GPU)
    kernel: str  # where the table of kernels lacks it, the portable path runs
    shape: str
    also: dict[str, Any]  # options of a second call, whose kernels `precompile` adds
    options: dict[str, dict[str, Any]]  # that other operations do not have, as argparse takes them


_NORM = Operation(
    dry_run=dry_run.rms_norm,
    kernel="rms_norm_fwd",
    shape="MxN",
    also={},
    options={
        "--residual": dict(
            nargs="?", const="same", type=one_of({**_DTYPES, "same": "same"}), metavar="DTYPE",
            help="with a residual, of --dtype",
        ),
        "--residual-dtype": dict(type=one_of(_DTYPES), metavar="DTYPE", help="of the sum of input and residual"),
        "--weight-dtype": dict(
            type=one_of({**_DTYPES, "none": "none"}), metavar="DTYPE",
            help="another dtype than --dtype; none: without a weight",
        ),
        "--out-dtype": dict(type=one_of(_DTYPES), metavar="DTYPE", help="of y"),
        "--heads": dict(type=int, metavar="H", help="a weight for each head: row r has weight r modulo H"),
        "--dweight-out": dict(**_SET, help="the weight's gradient is added to a buffer"),
    },
)  # fmt: skip
_LINEAR_CROSS_ENTROPY = Operation(
    dry_run=dry_run.linear_cross_entropy,
    kernel="lce_rows",
    shape="MxHxV",
    also={"no_grad": True},  # the loss alone
    options={
        "--schedule": dict(help=f"auto, {', '.join(SCHEDULES)}"),
        "--chunk-size": dict(type=int, metavar="ROWS"),
        "--memory-limit": dict(type=size, metavar="BYTES", help="beside inputs and gradients, such as 500MB or 1.5GB"),
        "--reduction": dict(help="mean, sum, none"),
        "--class-weight": dict(**_SET, help="with class weights"),
        "--label-smoothing": dict(type=float, metavar="S"),
        "--softcap": dict(type=float, metavar="C"),
        "--logit-scale": dict(type=float, metavar="S"),
        "--z-loss": dict(type=float, metavar="C"),
        "--return-lse": dict(**_SET, help="and a gradient arrives at it"),
        "--return-stats": dict(**_SET, help="and gradients arrive at all of them"),
        **_SHARED,
    },
)
_GROUPED_MLP = Operation(
    dry_run=dry_run.grouped_mlp,
    kernel="grouped_gemm",
    shape="RxHxIxE",
    also={"no_grad": True},  # which stores no preactivation
    options={
        "--activation": dict(help=", ".join(ACTIVATIONS)),
        "--w3": dict(**_SET, help="gate and up projection are two tensors"),
        "--scales": dict(**_SET, help="with scales of rows, fp32"),
        "--recompute": dict(**_SET, help="backward computes the preactivation again"),
        **_SHARED,
    },
)
OPERATIONS = {
    "rms_norm": _NORM,
    "rms_norm_forward": _NORM,
    "rms_norm_backward": _NORM,
    "linear_cross_entropy": _LINEAR_CROSS_ENTROPY,
    "grouped_mlp": _GROUPED_MLP,
}


def add_arguments(parser: argparse.ArgumentParser, shapes: str = "") -> None:
    """OP, SHAPE (with `shapes`, "+" or "*", several), and the options of calls; with "*" both may be left out."""
    names, of = ", ".join(OPERATIONS), "rows x columns, MxN; of linear_cross_entropy MxHxV, of grouped_mlp RxHxIxE"
    parser.add_argument("op", metavar="OP", choices=OPERATIONS, help=names, nargs="?" if shapes == "*" else None)
    parser.add_argument("shapes" if shapes else "shape", metavar="SHAPE", help=of, nargs=shapes or None)
    dtypes = f"of input and weight: {', '.join(_DTYPES)} (bf16)"
    parser.add_argument("--dtype", type=one_of(_DTYPES), default="bfloat16", help=dtypes)
    parser.add_argument("--bias", action="store_true", help="with a bias")
    operations = {"rms_norm": _NORM, "linear_cross_entropy": _LINEAR_CROSS_ENTROPY, "grouped_mlp": _GROUPED_MLP}
    groups: dict[str, Any] = {}
    for option, how in {name: how for op in operations.values() for name, how in op.options.items()}.items():
        title = ", ".join(name for name, op in operations.items() if option in op.options)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title].add_argument(option, **how)


def run_dry(args: argparse.Namespace, gpu: Gpu | None) -> DryRun:
    """What the call `args` launches on `gpu`, None being a CPU. Raises Refused where an argument is not as expected."""
    op = OPERATIONS[args.op]
    for other, what in OPERATIONS.items():
        for name in set(what.options) - set(op.options):
            if getattr(args, name[2:].replace("-", "_")) is not None:
                raise Refused(f"{name} is an option of {other}, not of {args.op}")
    try:
        shape = parse_shape(args.shape, op.shape)
    except ValueError as error:
        raise Refused(f"SHAPE is {error}") from None
    if gpu is None:
        return DryRun(portable=f'{args.op}: no kernel for cpu. backend="auto" runs the portable path.')
    try:
        kernels.find(op.kernel, gpu)
        return op.dry_run(args, shape, gpu)
    except UnsupportedError as error:
        return DryRun(portable=str(error).replace(op.kernel, args.op))


def frontier(args: argparse.Namespace, gpu: Gpu) -> list[dry_run.Point]:
    """Of a call of linear cross entropy that `run_dry` took."""
    return dry_run.frontier(args, parse_shape(args.shape, OPERATIONS[args.op].shape), gpu)


# GPUs ----------------------------------------------------------------------------------------------------------------


def which_gpu(given: str | None) -> tuple[Gpu | None, str]:
    """The GPU, None for a CPU; and why this one, if none was named."""
    if given not in (None, "this"):
        return NAMED.get(given), ""
    if torch.cuda.is_available():
        return gpu_of(torch.cuda.current_device()), "the current one here"
    if given == "this":
        raise Refused(f"--gpu is this, but there is no GPU here; expected one of {', '.join(NAMED)}, cpu")
    return H200, "there is none here, so as on an H200; --gpu names another"
