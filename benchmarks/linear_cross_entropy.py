"""Linear cross entropy, forward + backward, beside every installed peer: time, memory and error against three GEMMs.

python -m benchmarks.linear_cross_entropy                    # every shape that a bar is about
python -m benchmarks.linear_cross_entropy --only 65536x4096x128256 --append   # one of these again
python -m benchmarks.linear_cross_entropy --sweep --out FOLDER   # over M and over V; a run of its own
python -m benchmarks.linear_cross_entropy --host --append    # host time of a call
python -m benchmarks.linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*,quack" --repeats 5
"""

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.bars_linear_cross_entropy import PAGE
from quackish.bench import providers_linear_cross_entropy as lce
from quackish.bench import schema
from quackish.bench.cells import Cell, Job, parse_shape, shape_name
from quackish.bench.measured import OURS, is_ours
from quackish.bench.operations import OPERATIONS
from quackish.bench.providers_linear_cross_entropy import ALL, LEAN, LONG, MAIN

OP = OPERATIONS["linear_cross_entropy"]


def case(
    *shape: int, mode="train", data="normal", ignored=0.0, providers=(*MAIN, f"{OURS}-chunked-4096", *LEAN), **more
):
    return Job(Cell(OP.name, shape, "bfloat16", schema.MODES[mode], data, ignored), providers, **more)


CONFIDENT = (*(name for name in ALL if is_ours(name)), "quack", "quack-2048", "quack-base", "liger", "cce", "torch")
IGNORED = (OURS, f"{OURS}-recompute", *LEAN, "quack", "liger-cute-sm90", "cce", "torch")
BARS = [
    case(8192, 4096, 128256, providers=ALL),
    case(8192, 4096, 128256, providers=lce.LOSS, mode="loss"),
    case(8192, 4096, 128256, providers=IGNORED, ignored=0.8),
    case(8192, 4096, 128256, providers=CONFIDENT, data="confident"),
    case(4096, 2048, 32000),
    case(8192, 2048, 151936),
    case(1024, 4096, 128256),
    case(16384, 4096, 128256),
    case(65536, 4096, 128256, providers=LONG),
]
SWEEP = [case(m, 4096, 128256, errors=False) for m in (1024, 2048, 4096, 8192, 16384, 32768, 65536)]
SWEEP += [case(8192, 4096, v, errors=False) for v in (32000, 64000, 151936, 202048, 256000)]
HOST = [case(128, 512, 1024, mode="host", providers=lce.HOST, errors=False)]
TINY = [case(48, 64, 300, providers=("quackish*", "torch"))]  # without a GPU
TINY += [case(40, 64, 300, providers=(OURS, "torch"), **how) for how in ({"mode": "loss"}, {"ignored": 0.8})]
TINY += [case(40, 64, 300, providers=(OURS, "torch"), data="confident")]


def jobs_of(args: argparse.Namespace, device: torch.device, own: Sequence[str] = ()) -> list[Job]:
    """What to measure; ValueError for providers that nobody knows and for --only that leaves nothing."""
    jobs = HOST if args.host else TINY if device.type == "cpu" else SWEEP if args.sweep else BARS
    if args.shapes:
        how = dict(mode=args.mode, data=args.data, ignored=args.ignored, providers=ALL)
        jobs = [case(*shape, **how) for shape in args.shapes]
    if args.only:
        jobs = [job for job in jobs if job.cell.shape in args.only]
        if not jobs:
            shapes = ",".join(map(shape_name, args.only))
            raise ValueError(f"--only {shapes}: none of the shapes that are measured; --shapes measures any")
    jobs = [dataclasses.replace(job, errors=job.errors and not args.no_errors) for job in jobs]
    return [dataclasses.replace(job, providers=OP.matching(args.providers or job.providers, own)) for job in jobs]


def _shapes(text: str) -> list[tuple[int, ...]]:
    m, h, v = zip(*map(parse_shape, text.split(",")), strict=True)  # ValueError unless all have three sizes
    return list(zip(m, h, v, strict=True))


def parser() -> argparse.ArgumentParser:
    parser = harness.arguments("linear_cross_entropy", __doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", type=_shapes, metavar="MxHxV[,...]", help="own shapes instead of the bars'")
    what.add_argument("--sweep", action="store_true", help="over M and over V instead; no errors")
    what.add_argument("--host", action="store_true", help="host time of a call instead")
    only = "of the bars' or the sweep's shapes these alone, with the providers they have there"
    parser.add_argument("--only", type=_shapes, metavar="MxHxV[,...]", help=only)
    parser.add_argument("--mode", choices=schema.MODES, default="train", help="own shapes: %(default)s")
    parser.add_argument("--data", choices=("normal", "confident"), default="normal", help="own shapes: %(default)s")
    parser.add_argument("--ignored", type=float, default=0.0, help="own shapes: share of rows; %(default)s")
    parser.add_argument("--no-errors", action="store_true", help="without the comparison with fp64")
    names = f"names or patterns, of {', '.join(lce.PROVIDERS)}, or quackish-chunked-ROWS; default: what a case has"
    parser.add_argument("--providers", type=lambda text: text.split(","), metavar="NAME[,...]", help=names)
    backends = ("cute", "auto", "reference")
    parser.add_argument("--backend", choices=backends, default=harness.BACKEND, help="quackish's; default %(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="samples of each at most; default %(default)s")
    seconds = "after 5 samples, no more than fit in this for each; default %(default)s"
    parser.add_argument("--seconds", type=float, default=0.8, help=seconds)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has; newer ones count")
    parser.add_argument("--also", type=Path, metavar="FILE", help="a Python file with more: PROVIDERS = {name: loss}")
    return parser


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    args = parser().parse_args(argv)
    device = harness.device_to_measure()
    if not args.also:
        jobs_of(args, device)  # refuses at once what nobody knows
    options = dict(rounds=args.repeats, seconds=args.seconds, backend=args.backend)
    return harness.run(OP.name, functools.partial(jobs_of, args, device), PAGE, schema.LCE_COLUMNS, args, **options)


if __name__ == "__main__":
    harness.main(main)
