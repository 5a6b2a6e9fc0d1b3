"""Which kernels and configs a shape gets and why, what they move and multiply, and what they take at least.

    python -m quackish explain rms_norm_backward 16384x4096 --gpu b200
    python -m quackish explain linear_cross_entropy 8192x4096x128256 --schedule recompute

Needs no GPU. Registers and shared memory are read from kernels that are compiled for the GPU in question (a second
each, --no-compile goes without); that takes cuobjdump, of Triton's wheel or the CUDA toolkit.
"""

import argparse
import dataclasses
import json

import torch

from quackish.bench.cells import too_large
from quackish.cli import explain_linear_cross_entropy as lce
from quackish.cli import explain_rms_norm as rms_norm
from quackish.cli.explained import Explained, report, text
from quackish.cli.parser import Refused, one_of
from quackish.configs.linear_cross_entropy import SCHEDULES
from quackish.gpu import H200, NAMED, Gpu, gpu_of

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
_NORMS = ("rms_norm", "rms_norm_forward", "rms_norm_backward")
OPERATIONS = (*_NORMS, "linear_cross_entropy")
_SET = dict(action="store_true", default=None)
# Options that only some operations have.
_NORM_OPTIONS = {
    "--residual": dict(
        nargs="?", const="same", type=one_of({**_DTYPES, "same": "same"}), help="with a residual, of --dtype"
    ),
    "--weight-dtype": dict(
        type=one_of({**_DTYPES, "none": "none"}), help="another dtype than --dtype; none: without a weight"
    ),
    "--out-dtype": dict(type=one_of(_DTYPES), help="of y"),
}
_LCE_OPTIONS = {
    "--schedule": dict(help=f"auto, {', '.join(SCHEDULES)}"),
    "--chunk-size": dict(type=int, metavar="ROWS"),
    "--reduction": dict(help="mean, sum, none"),
    "--class-weight": dict(**_SET, help="with class weights"),
    "--label-smoothing": dict(type=float, metavar="S"),
    "--softcap": dict(type=float, metavar="C"),
    "--z-loss": dict(type=float, metavar="C"),
    "--return-lse": dict(**_SET, help="and a gradient arrives at it"),
    "--grad-weight-out": dict(**_SET, help="the weight's gradient is added to a buffer"),
    "--no-grad": dict(**_SET, help="the loss alone"),
    "--compiled": dict(**_SET, help="as code that torch.compile made runs it"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", choices=OPERATIONS, help=", ".join(OPERATIONS))
    parser.add_argument("shape", metavar="SHAPE", help="rows x columns, MxN; of linear_cross_entropy MxHxV")
    add_gpu(parser)
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes compiling: registers and so on")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    add_options(parser)


def add_gpu(parser: argparse.ArgumentParser) -> None:
    names = {name: name for name in (*NAMED, "cpu", "this")}
    of = f"{', '.join(NAMED)}, cpu, or this, the default where there is one; else h200"
    parser.add_argument("--gpu", type=one_of(names), help=of)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the operations' calls."""
    of = f"of input and weight: {', '.join(_DTYPES)} (bf16)"
    parser.add_argument("--dtype", type=one_of(_DTYPES), default="bfloat16", help=of)
    parser.add_argument("--bias", action="store_true", help="with a bias")
    for title, options in (("rms_norm", _NORM_OPTIONS), ("linear_cross_entropy", _LCE_OPTIONS)):
        group = parser.add_argument_group(title)
        for name, how in options.items():
            metavar = {} if "action" in how else {"metavar": "DTYPE" if options is _NORM_OPTIONS else None}
            group.add_argument(name, **{**metavar, **how})


def run(args: argparse.Namespace) -> int:
    content = report(explain(args), compiling=not args.no_compile)
    print(json.dumps(content, indent=1) if args.json else text(content))
    return 0


def explain(args: argparse.Namespace) -> Explained:
    """Raises Refused where an argument is not what was expected."""
    is_norm = args.op in _NORMS
    for name in _LCE_OPTIONS if is_norm else _NORM_OPTIONS:
        if getattr(args, name[2:].replace("-", "_")) is not None:
            raise Refused(f"{name} is an option of {OPERATIONS[-1] if is_norm else 'rms_norm'}, not of {args.op}")
    gpu, why = which_gpu(args.gpu)
    explained = (rms_norm if is_norm else lce).explain(args, _shape(args), gpu)
    return dataclasses.replace(explained, plan={"GPU": why, **explained.plan} if why else explained.plan)


def _shape(args: argparse.Namespace) -> list[int]:
    form, example = ("MxN", "16384x4096") if args.op in _NORMS else ("MxHxV", "8192x4096x128256")
    words = args.shape.lower().replace("×", "x").split("x")
    if len(words) != len(form.split("x")) or not all(w.isdecimal() and len(w) < 99 and int(w) > 0 for w in words):
        raise Refused(f"SHAPE is {args.shape!r}; expected {form}, positive numbers, as in {example}")
    shape = list(map(int, words))
    if expected := too_large(shape):
        raise Refused(f"SHAPE is {args.shape!r}; expected {expected}")
    return shape


def which_gpu(given: str | None) -> tuple[Gpu | None, str]:
    """The GPU, None for a CPU; and why this one, where nobody named it."""
    if given not in (None, "this"):
        return NAMED.get(given), ""
    if torch.cuda.is_available():
        return gpu_of(torch.cuda.current_device()), "the current one here"
    if given == "this":
        raise Refused("--gpu is this, but there is no GPU here; expected " + ", ".join([*NAMED, "cpu"]))
    return H200, "there is none here, so as on an H200; --gpu names another"
