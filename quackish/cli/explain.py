"""Which kernels and configs a shape gets and why, what they move and multiply, and what they take at least.

    python -m quackish explain rms_norm_backward 16384x4096 --gpu b200
    python -m quackish explain linear_cross_entropy 8192x4096x128256 --schedule recompute

Needs no GPU. Registers and shared memory are read from kernels that are compiled for the GPU in question (a second
each, --no-compile goes without); that takes cuobjdump, of Triton's wheel or the CUDA toolkit.
"""

import argparse
import dataclasses
import json
import sys

from quackish.bench.cells import too_large
from quackish.cli import explain_linear_cross_entropy as lce
from quackish.cli import explain_rms_norm as rms_norm
from quackish.cli.explained import Explained, Refused, report, text
from quackish.configs.linear_cross_entropy import SCHEDULES
from quackish.errors import did_you_mean
from quackish.gpu import H200, NAMED, Gpu, gpu_of

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
OPERATIONS = {
    "rms_norm": ("MxN", rms_norm.explain),
    "rms_norm_forward": ("MxN", rms_norm.explain),
    "rms_norm_backward": ("MxN", rms_norm.explain),
    "linear_cross_entropy": ("MxHxV", lce.explain),
}
_NORM, _LCE = ("rms_norm", "rms_norm_forward", "rms_norm_backward"), ("linear_cross_entropy",)
# Options that not every operation has, by argparse's names.
_ONLY = {
    **dict.fromkeys(("residual", "weight_dtype", "out_dtype"), _NORM),
    **dict.fromkeys(
        ("schedule", "chunk_size", "reduction", "class_weight", "label_smoothing", "softcap", "z_loss"), _LCE
    ),
    **dict.fromkeys(("return_lse", "grad_weight_out", "no_grad", "compiled"), _LCE),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", help=", ".join(OPERATIONS))
    parser.add_argument("shape", metavar="SHAPE", help="rows x columns, MxN; of linear_cross_entropy MxHxV")
    parser.add_argument("--gpu", help=f"{', '.join(NAMED)}, cpu, or this, the default where there is one; else h200")
    parser.add_argument("--no-compile", action="store_true", help="leave out what takes compiling: registers and so on")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of the operations' calls."""
    parser.add_argument("--dtype", default="bf16", help=f"of input and weight: {', '.join(DTYPES)} (bf16)")
    parser.add_argument("--bias", action="store_true", help="with a bias")
    norm = parser.add_argument_group("rms_norm")
    norm.add_argument("--residual", nargs="?", const="same", metavar="DTYPE", help="with a residual, of --dtype")
    norm.add_argument("--weight-dtype", metavar="DTYPE", help="another dtype than --dtype; none: without a weight")
    norm.add_argument("--out-dtype", metavar="DTYPE", help="of y")
    loss = parser.add_argument_group("linear_cross_entropy")
    loss.add_argument("--schedule", help=f"auto, {', '.join(SCHEDULES)}")
    loss.add_argument("--chunk-size", type=int, metavar="ROWS")
    loss.add_argument("--reduction", help="mean, sum, none")
    loss.add_argument("--class-weight", action="store_true", default=None, help="with class weights")
    loss.add_argument("--label-smoothing", type=float, metavar="S")
    loss.add_argument("--softcap", type=float, metavar="C")
    loss.add_argument("--z-loss", type=float, metavar="C")
    loss.add_argument("--return-lse", action="store_true", default=None, help="and a gradient arrives at it")
    loss.add_argument("--grad-weight-out", action="store_true", default=None, help="the weight's gradient in a buffer")
    loss.add_argument("--no-grad", action="store_true", default=None, help="the loss alone")
    loss.add_argument("--compiled", action="store_true", default=None, help="as code that torch.compile made runs it")


def run(args: argparse.Namespace) -> int:
    try:
        explained = explain(args)
    except Refused as refused:
        print(f"explain: {refused}", file=sys.stderr)
        return 2
    content = report(explained, compiling=not args.no_compile)
    print(json.dumps(content, indent=1) if args.json else text(content))
    return 0


def explain(args: argparse.Namespace) -> Explained:
    """Raises Refused where an argument is not what was expected."""
    if args.op not in OPERATIONS:
        suggestion = did_you_mean(args.op, OPERATIONS)
        raise Refused(f"OP is {args.op!r}; expected one of {', '.join(OPERATIONS)}{suggestion}")
    form, of_op = OPERATIONS[args.op]
    for name, ops in _ONLY.items():
        if getattr(args, name) is not None and args.op not in ops:
            raise Refused(f"--{name.replace('_', '-')} is an option of {ops[0]}, not of {args.op}")
    for name in ("dtype", "residual", "weight_dtype", "out_dtype"):
        setattr(args, name, _dtype(name, getattr(args, name)))
    shape, (gpu, why) = _shape(args.shape, form), _gpu(args.gpu)
    explained = of_op(args, shape, gpu)
    return dataclasses.replace(explained, plan={"GPU": why, **explained.plan} if why else explained.plan)


def _shape(given: str, form: str) -> list[int]:
    words = given.lower().replace("×", "x").split("x")
    try:
        shape = [int(word) if word.isdecimal() else 0 for word in words]
    except ValueError:  # more digits than Python converts
        shape = [0]
    if len(shape) != len(form.split("x")) or min(shape) < 1:
        example = "16384x4096" if form == "MxN" else "8192x4096x128256"
        raise Refused(f"SHAPE is {given!r}; expected {form}, positive numbers, as in {example}")
    if expected := too_large(shape):
        raise Refused(f"SHAPE is {given!r}; expected {expected}")
    return shape


def _dtype(name: str, given: str | None) -> str | None:
    """As configs spell it."""
    special = {"residual": ["same"], "weight_dtype": ["none"]}.get(name, [])
    if given is None or given in special or given in DTYPES.values():
        return given
    if given not in DTYPES:
        expected = ", ".join([*DTYPES, *(word for word in special if word == "none")])
        suggestion = did_you_mean(given, DTYPES)
        raise Refused(f"--{name.replace('_', '-')} is {given!r}; expected one of {expected}{suggestion}")
    return DTYPES[given]


def _gpu(given: str | None) -> tuple[Gpu | None, str]:
    """The GPU, None for a CPU; and why this one, where nobody named it."""
    import torch

    if given in (None, "this"):
        if torch.cuda.is_available():
            return gpu_of(torch.cuda.current_device()), "the current one here"
        if given == "this":
            raise Refused("--gpu is this, but there is no GPU here; expected " + ", ".join([*NAMED, "cpu"]))
        return H200, "there is none here, so as on an H200; --gpu names another"
    name = given.lower()
    if name != "cpu" and name not in NAMED:
        known = [*NAMED, "cpu", "this"]
        raise Refused(f"--gpu is {given!r}; expected one of {', '.join(known)}{did_you_mean(name, known)}")
    return NAMED.get(name), ""
