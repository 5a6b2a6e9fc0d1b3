"""Times an operation beside every installed peer, or compares two results.

    python -m quackish bench rms_norm --model llama3-8b qwen3-8b --tokens 4096,8192
    python -m quackish bench linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*" liger
    python -m quackish bench grouped_mlp --model qwen3-30b-a3b olmoe-1b-7b --tokens 16384
    python -m quackish bench compare before.csv after.csv --fail 3%

Every cell (a shape, a dtype, a direction) is measured with all providers taking turns on a cold L2, beside what it
cannot avoid (its memory traffic, its matrix products). A CSV, a page and figures go to the folder --out. A provider
that raises, runs out of memory or crashes its process is named and left out of that cell.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quackish.cli.parser import one_of, positive

if TYPE_CHECKING:
    from quackish.bench.operations import Operation

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
COMPARE = """Compares two CSVs of `bench`, row by row: a table of ratios, and what became slower.

A regression is slower by more than --fail and by more than the noise: its p20 is above the former p80. A row that had a
time and now fails is one too. Exit status 1 if there is any.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from quackish.bench.operations import OPERATIONS

    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for name, op in OPERATIONS.items():
        _measuring(what.add_parser(name, help=op.title, description=f"Times {op.title} beside its peers."), op)
    files = what.add_parser("compare", help="two results: ratios and regressions", description=COMPARE)
    files.add_argument("before", type=Path, help="the CSV to compare with")
    files.add_argument("after", type=Path, help="the CSV that is judged")
    fail = "how much slower is a regression; default %(default)s"
    files.add_argument("--fail", type=_share, default="3%", metavar="PERCENT", help=fail)


def _measuring(parser: argparse.ArgumentParser, op: "Operation") -> None:
    from quackish.bench.models import MODELS

    known = [name for name, model in MODELS.items() if model.shapes(1, len(op.dims))]
    models = f'models, or patterns ("qwen3-*"), of {", ".join(known)}; the first where no shapes are given'
    parser.add_argument("--model", nargs="+", default=[], metavar="NAME", help=models)
    tokens = "for the models; default 4096,8192,16384, with --quick 8192"
    parser.add_argument("--tokens", type=_list_of(positive), metavar="M[,...]", help=tokens)
    own = f"{op.form} such as {op.example}"
    parser.add_argument("--shapes", type=_list_of(str), nargs="+", default=[], metavar="SHAPE[,...]", help=own)
    directions = "default both; but for rms_norm, forward is without grad, and backward is both together"
    parser.add_argument("--direction", choices=("forward", "backward", "both"), default="both", help=directions)
    dtypes = ", ".join(DTYPES)
    parser.add_argument(
        "--dtype", type=_list_of(one_of(DTYPES)), default=["bfloat16"], metavar="DTYPE[,...]", help=dtypes
    )
    names = f'names, or patterns ("quackish*"), of {", ".join(op.providers)}, or module:attribute for your own'
    parser.add_argument("--providers", type=_list_of(str), nargs="+", default=[], metavar="NAME[,...]", help=names)
    parser.add_argument("--quick", action="store_true", help="fewer turns, and one size where none is given")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="folder; default %(default)s")
    parser.add_argument("--append", action="store_true", help="keep the rows that the CSV has; newer ones count")
    parser.add_argument("--commit", help="recorded if there is no git to ask")
    timeout = "a provider is given up after so long without a sign of life; default %(default)s"
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help=timeout)


def run(args: argparse.Namespace) -> int:
    """0; 1 if nothing could be measured or `compare` found regressions; 2 for an invalid request."""
    from quackish.bench.console import check_extra

    try:
        if args.what == "compare":
            return _compare(args)
        check_extra()
        return _measure(args)
    except (ValueError, ImportError, OSError, RuntimeError) as error:
        print(f"quackish bench: {error}", file=sys.stderr)
        return 2


def _compare(args: argparse.Namespace) -> int:
    from quackish.bench import compare

    text, pairs = compare.compare(args.before, args.after, args.fail)
    print(text)
    return 1 if compare.regressions(pairs) else 0


def _measure(args: argparse.Namespace) -> int:
    import torch

    from quackish.bench import models, runner
    from quackish.bench.cells import NOT_PROVIDERS, Cell, Job, is_ours, shape_name
    from quackish.bench.console import NO_GPU
    from quackish.bench.operations import OPERATIONS
    from quackish.bench.results import read_rows

    op, gpu = OPERATIONS[args.what], torch.cuda.is_available()
    if args.tokens and args.shapes and not args.model:
        raise ValueError("--tokens is for --model; --shapes has its own rows")
    first = next(name for name, model in models.MODELS.items() if model.shapes(1, len(op.dims)))
    names = args.model or ([] if args.shapes else [first])
    tokens = args.tokens or ([8192] if args.quick else [4096, 8192, 16384])
    wanted = models.wanted(op, names, tokens, list(itertools.chain(*args.shapes)))
    patterns = list(itertools.chain(*args.providers))
    if not gpu:
        wanted = {tuple(map(min, shape, op.small)): "" for shape in wanted}
        print(f"{NO_GPU} Shapes are at most {shape_name(op.small)}.", flush=True)
    jobs = []
    words = ("forward", "backward") if args.direction == "both" else (args.direction,)
    for dtype, (shape, of_models), word in itertools.product(args.dtype, wanted.items(), words):
        cell = Cell(op.name, shape, dtype, op.directions[word])
        default = tuple(n for n in op.main[cell.direction] if gpu or is_ours(n) or n == "torch")
        jobs.append(Job(cell, op.matching(patterns) if patterns else default, of_models))
    path, how = args.out / f"{op.name}.csv", dict(append=args.append, commit=args.commit, timeout=args.timeout)
    runner.run(jobs, path, **how, rounds=3 if args.quick else 10)
    return 0 if any(row["median_ms"] and row["provider"] not in NOT_PROVIDERS for row in read_rows(path)) else 1


def _list_of(parse):
    """An argument's type: words separated by commas, each by `parse`."""

    def words(text: str) -> list:
        return [parse(word) for word in text.split(",") if word]

    return words


def _share(text: str) -> float:
    """0.03 of "3%" or "3"."""
    try:
        share = float(text.rstrip("% ")) / 100
    except ValueError:
        share = -1.0
    if not share >= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a percentage such as 3%")
    return share
