"""Times an operation beside every installed peer, or compares two results.

    python -m quackish bench rms_norm --model llama3-8b qwen3-8b --tokens 4096,8192
    python -m quackish bench linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*" liger
    python -m quackish bench compare before.csv after.csv --fail 3%

Every cell (a shape, a dtype, a direction) is measured with all providers taking turns on a cold L2, beside what it
cannot avoid (its memory traffic, its matrix products). A CSV, a page and figures go to the folder --out. A provider
that raises, runs out of memory or crashes its process is named and left out of that cell.
"""

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quackish.bench.operations import Operation

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quackish.bench.operations import OPERATIONS
    from quackish.cli import bench_compare

    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, op in OPERATIONS.items():
        _measuring(what.add_parser(name, help=op.title, description=f"Times {op.title} beside its peers."), op)
    bench_compare.add_arguments(
        what.add_parser("compare", help="two results: ratios and regressions", description=bench_compare.__doc__)
    )


def _measuring(parser: argparse.ArgumentParser, op: "Operation") -> None:
    from quackish.bench.models import MODELS

    shapes = parser.add_argument_group("shapes")
    models = f'models, or patterns ("qwen3-*"), of {", ".join(MODELS)}; the first where no shapes are given'
    shapes.add_argument("--model", nargs="+", default=[], metavar="NAME", help=models)
    tokens = "for the models; default 4096,8192,16384, with --quick 8192"
    shapes.add_argument("--tokens", type=_sizes, metavar="M[,...]", help=tokens)
    own = "MxN (rms_norm) or MxHxV (linear_cross_entropy), or a .yaml or .csv file of such shapes"
    shapes.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE[,...]|FILE", help=own)
    what = parser.add_argument_group("what is measured")
    directions = "default both; of linear_cross_entropy the loss without grad, and forward and backward together"
    what.add_argument("--direction", choices=("forward", "backward", "both"), default="both", help=directions)
    what.add_argument("--dtype", type=_dtypes, default=("bfloat16",), metavar="DTYPE[,...]", help="bf16, fp16, fp32")
    names = f'names, or patterns ("quackish*"), of {", ".join(op.providers)}; the sensible ones where not given'
    what.add_argument("--providers", type=_names, nargs="+", default=[], metavar="NAME[,...]", help=names)
    also = "a Python file with more: PROVIDERS = {name: (forward, backward)}, or {name: loss}"
    what.add_argument("--also", type=Path, metavar="FILE", help=also)
    what.add_argument("--rounds", type=int, help="turns; default 10, with --quick 3")
    what.add_argument("--quick", action="store_true", help="fewer turns, and one size where none is given")
    result = parser.add_argument_group("result")
    result.add_argument("--out", type=Path, default=Path("out/bench"), help="folder; default %(default)s")
    resume = "keep the CSV, and measure only what it lacks for this commit, GPU and versions"
    result.add_argument("--resume", action="store_true", help=resume)
    result.add_argument("--commit", help="recorded if there is no git to ask")
    timeout = "a provider is given up after so long without a sign of life; default %(default)s"
    result.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    """0; 1 if nothing could be measured or `compare` found regressions; 2 for an invalid request."""
    from quackish.bench.console import check_extra

    try:
        check_extra()
        if args.what == "compare":
            from quackish.cli import bench_compare

            return bench_compare.run(args)
        return _measure(args)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"quackish bench: {error}", file=sys.stderr)
        return 2


def _measure(args: argparse.Namespace) -> int:
    import torch

    from quackish.bench import runner, shapes
    from quackish.bench.cells import Cell, Job, is_ours, shape_name
    from quackish.bench.console import NO_GPU, console
    from quackish.bench.operations import OPERATIONS
    from quackish.bench.results import COMPETING, read_rows

    op, gpu = OPERATIONS[args.what], torch.cuda.is_available()
    if args.tokens and args.shapes and not args.model:
        raise ValueError("--tokens is for --model; --shapes has its own rows")
    if args.rounds is not None and args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; expected 1 or more")
    models = args.model or ([] if args.shapes else ["llama3-8b"])
    tokens = args.tokens or ((8192,) if args.quick else (4096, 8192, 16384))
    wanted = shapes.wanted(op, models, tokens, args.shapes)
    patterns = [name for names in args.providers for name in names]
    words = ("forward", "backward") if args.direction == "both" else (args.direction,)
    if not gpu:
        console().print(NO_GPU)
        cut = shapes.small(op, wanted)
        if cut != wanted:
            console().print(f"Shapes are cut to {', '.join(map(shape_name, cut))}.")
        wanted = cut

    def jobs_of(own: Sequence[str]) -> list[Job]:
        jobs = []
        for dtype, (shape, name), word in itertools.product(args.dtype, wanted.items(), words):
            cell = Cell(op.name, shape, dtype, op.directions[word])
            default = [n for n in op.main[cell.direction] if gpu or is_ours(n) or n == "torch"]
            providers = op.matching(patterns, own) if patterns else (*default, *own)
            jobs.append(Job(cell, providers, {"models": name}))
        return jobs

    options = dict(rounds=args.rounds or (3 if args.quick else 10), repeats=10)
    path = args.out / f"{op.name}.csv"
    kept = dict(also=args.also, resume=args.resume, keep=True, commit=args.commit, timeout=args.timeout)
    runner.run(runner.Settings(op, path, options=options, **kept), jobs_of)
    return 0 if any(row["median_ms"] and row["role"] in COMPETING for row in read_rows(path)) else 1


def _sizes(text: str) -> tuple[int, ...]:
    words = text.split(",")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: expected whole numbers such as 4096,8192")
    return tuple(map(int, words))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _dtypes(text: str) -> tuple[str, ...]:
    words = text.split(",")
    for word in words:
        if word not in DTYPES and word not in DTYPES.values():
            raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(DTYPES)}")
    return tuple(dict.fromkeys(DTYPES.get(word, word) for word in words))
