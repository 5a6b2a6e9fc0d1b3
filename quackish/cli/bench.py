"""Times an operation and every installed peer.

    quackish bench rms_norm --model llama3-8b qwen3-8b --tokens 4096,8192
    quackish bench linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*" liger
    quackish bench grouped_mlp --model qwen3-30b-a3b olmoe-1b-7b --tokens 16384
    quackish bench scaled_dot_product_attention --shapes 4x16x2048x64 --attn-bias 1,H --attn-mask half

In each cell (shape, dtype and direction) all providers take turns on a cold L2, together with the roof: PyTorch's
kernels for the same memory traffic or matmuls. A CSV, a page and figures go to the folder --out. A provider that
raises, runs out of memory or crashes its process is reported and skipped in that cell.

If the CSV exists, --append or --overwrite is needed. It is replaced only at the end of a run that measured something:
until then the rows are in *.partial*.csv beside it.
"""

import argparse
import itertools

from quackish.cli.call_arguments import flag_of
from quackish.cli.parser import CommandError, Parser, check_bench_extra, output_folder, positive
from quackish.ops.shared.argument_types import one_of
from quackish.ops.shared.for_tools import DTYPES, Operation, operations
from quackish.ops.shared.models import Shapes

_DTYPES = {short: name for short, name in DTYPES.items() if short != "fp64"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=Parser)
    for name, op in operations().items():
        _add_measuring_arguments(what.add_parser(name, help=op.title, description=f"Times {name} and its peers."), op)


def begin(args: argparse.Namespace) -> None:
    check_bench_extra()
    import torch  # noqa: F401


def _add_measuring_arguments(parser: argparse.ArgumentParser, op: Operation) -> None:
    """Without the names of providers, because torch takes seconds to import."""

    def add(option: str, help: str, **arguments) -> None:
        parser.add_argument(option, help=help, **arguments)

    model_help = f'models or patterns ("qwen3-*"), of {", ".join(op.models)}; default: the first, without --shapes'
    tokens_help = "tokens for the models; default 4096,8192,16384, with --quick 8192"
    shapes_help = f"{op.form} such as {op.example}"
    if not op.models:
        model_help = tokens_help = argparse.SUPPRESS
        shapes_help += ", the default"
    add("--model", model_help, nargs="+", default=[], metavar="NAME")
    add("--tokens", tokens_help, type=_list_of(positive), metavar="M[,...]")
    add("--shapes", shapes_help, type=_list_of(str), nargs="+", default=[], metavar="SHAPE[,...]")
    for name in op.bench_options:
        add(flag_of(name), **op.options[name].arguments)
    direction_help = "default both: backward, alone or with forward as the operation has it, and forward without grad"
    add("--direction", direction_help, choices=("forward", "backward", "both"), default="both")
    dtypes = _list_of(one_of(_DTYPES))
    add("--dtype", ", ".join(_DTYPES), type=dtypes, default=["bfloat16"], metavar="DTYPE[,...]")
    providers_help = 'names or patterns ("quackish*"); "list" prints the names; module:attribute adds your own'
    add("--providers", providers_help, type=_list_of(str), nargs="+", default=[], metavar="NAME[,...]")
    add("--quick", "fewer samples, and one size by default", action="store_true")
    add("--out", "output folder; default %(default)s", type=output_folder, default="out/bench")
    existing = parser.add_mutually_exclusive_group()
    append_help = "keep the rows of an existing CSV; the last row of a cell and provider counts"
    existing.add_argument("--append", action="store_true", help=append_help)
    existing.add_argument("--overwrite", action="store_true", help="replace an existing CSV at the end of the run")
    add("--commit", "commit to record if git is not available")
    timeout_help = "kill a provider that reports nothing for this long; default %(default)s"
    add("--timeout", timeout_help, type=float, default=600, metavar="SECONDS")


def run(args: argparse.Namespace) -> int:
    """Returns 0, or 1 if nothing was measured."""
    try:
        return _measure(args)
    except (ValueError, OSError, RuntimeError) as error:
        raise CommandError(str(error)) from error


def _measure(args: argparse.Namespace) -> int:
    import torch

    from quackish.bench import runner
    from quackish.bench.cells import Cell, Job, data_of, is_ours, shape_name
    from quackish.bench.results import read_rows
    from quackish.bench.table import BENCHES
    from quackish.cli.console import NO_GPU
    from quackish.text import fill

    if args.what not in BENCHES:
        raise ValueError(f"{args.what} has no measure.py; expected one of {', '.join(BENCHES)}")
    bench, gpu = BENCHES[args.what], torch.cuda.is_available()
    if args.tokens and args.shapes and not args.model:
        raise ValueError("--tokens needs --model; --shapes has its own rows")
    patterns = list(itertools.chain(*args.providers))
    if patterns == ["list"]:
        print(fill(f"providers of {args.what}: {', '.join(bench.providers)}", indent="  "))
        return 0
    names = args.model or ([] if args.shapes else bench.op.models[:1])
    own = list(itertools.chain(*args.shapes)) or ([] if bench.op.models else [bench.op.example])
    tokens = args.tokens or ([8192] if args.quick else [4096, 8192, 16384])
    shapes = bench.shapes(names, tokens, own)
    if not gpu:
        shapes = _small(shapes, bench.op.small)
        print(fill(f"{NO_GPU} Shapes are {', '.join(map(shape_name, shapes))}."), flush=True)
    options = {name: given for name in bench.op.bench_options if (given := getattr(args, name)) is not None}
    bench.op.arguments(bench.op.small, torch.bfloat16, torch.device("meta"), options)  # ValueError for conflicts
    jobs = []
    directions = ("forward", "backward") if args.direction == "both" else (args.direction,)
    for dtype, (shape, model_names), direction in itertools.product(args.dtype, shapes.items(), directions):
        cell = Cell(args.what, shape, dtype, bench.directions[direction], data_of(options))
        main = bench.main.get(cell.direction, bench.providers)
        default = tuple(name for name in main if gpu or is_ours(name) or name in bench.on_cpu)
        jobs.append(Job(cell, bench.matching(patterns) if patterns else default, model_names))
    path, rounds = args.out / f"{args.what}.csv", 3 if args.quick else 10
    if path.exists() and not (args.append or args.overwrite) and any(row["median_ms"] for row in read_rows(path)):
        raise ValueError(f"{path} exists; pass --append to add to it, --overwrite to replace it, or another --out")
    measured = runner.run(jobs, path, append=args.append, commit=args.commit, timeout=args.timeout, rounds=rounds)
    return 0 if measured else 1


def _small(shapes: Shapes, most: tuple[int, ...]) -> Shapes:
    """Another small shape for each, with more rows where two would be equal; the names say what it stands for."""
    found: Shapes = {}
    for shape, names in shapes.items():
        small = tuple(map(min, shape, most))
        while small in found:
            small = small[0] + most[0], *small[1:]
        stands_for = [f"in place of {'x'.join(map(str, shape))}"] * (small != shape)
        found[small] = ", ".join(filter(None, [names, *stands_for]))
    return found


def _list_of(parse):
    """An argparse type: comma-separated values, each parsed by `parse`."""
    return lambda text: [parse(word) for word in text.split(",") if word]
