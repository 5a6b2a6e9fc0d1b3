"""Fills the cache folder with the kernels that calls of these shapes launch, forward and backward.

    python -m quackish precompile rms_norm 16384x4096 16384x8192 --residual --gpu h200,b200
    python -m quackish precompile linear_cross_entropy 8192x4096x128256 --gpu h200
    python -m quackish precompile grouped_mlp 131072x2048x768x128 --scales --gpu h200
    python -m quackish precompile --from shapes.txt --gpu h200

Needs no GPU, and takes a second a kernel and process. RMSNorm's kernels depend on N and not on M, those of linear cross
entropy on little but H and dtypes; the loss alone, without gradients, is included. In a file each line is an operation,
a shape and its options, as in `linear_cross_entropy 8192x4096x128256 --schedule recompute`; # starts a comment.

`python -m quackish cache export` takes them to another machine with the same versions.
"""

import argparse
import itertools
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quackish import kernels, launch, toolchain
from quackish.cli import operations
from quackish.cli.dry_run import DryRun
from quackish.cli.parser import Parser, Refused, one_of, positive
from quackish.errors import UnsupportedError
from quackish.gpu import NAMED, Gpu
from quackish.launch import cache, parallel, upkeep
from quackish.launch.parallel import Outcome
from quackish.work import describe

_GPUS = [name for name, gpu in NAMED.items() if gpu.family in kernels.FAMILIES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operations.add_arguments(parser, "*")
    of = f"one or more, with commas: {', '.join(_GPUS)}; or this, the default where there is one"
    parser.add_argument("--gpu", type=_gpus, default=["this"], help=of)
    jobs = "so many processes; default one per core, at most 16"
    parser.add_argument("--jobs", type=positive, metavar="N", help=jobs)
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="a file with a line for each shape")


def run(args: argparse.Namespace, find: Callable = toolchain.find, compile_all: Callable = parallel.compile_all) -> int:
    _check_here(find)
    requests, without = _requests(args)
    for reason in without:
        print(f"nothing to compile: {reason}")
    started, done = time.perf_counter(), []
    jobs = min(args.jobs or max(1, parallel.default_jobs(len(requests))), len(requests))
    try:
        for outcome in compile_all(requests, jobs):
            done.append(outcome)
            print(f"[{len(done)}/{len(requests)}] {outcome.status:8} {_name(outcome)}", flush=True)
            if outcome.status == "failed":
                print(f"{_name(outcome)} failed: {outcome.message}", file=sys.stderr)
    except KeyboardInterrupt:
        print("precompile: interrupted; what is stored so far is kept", file=sys.stderr)
        return 130
    count, folder = Counter(outcome.status for outcome in done), cache.location()
    stored, lost = count["compiled"], count["not stored"]
    where = f"{stored} stored in {folder}" if lost else f"they are in {folder}"
    print(
        f"{len(requests)} kernels: {stored + lost} compiled, {count['loaded']} were there, {count['failed']} failed; "
        f"{time.perf_counter() - started:.1f} s in {jobs} process{'' if jobs == 1 else 'es'}; {where}"
    )
    if lost:
        reasons = "; ".join({outcome.message: None for outcome in done if outcome.status == "not stored"})
        told = f"precompile: compiled {stored + lost}, stored {stored} in {folder}: {reasons}. "
        print(told + "QUACKISH_CACHE_DIR names another folder.", file=sys.stderr)
    return 1 if count["failed"] or lost or without else 0


def _check_here(find: Callable) -> None:
    """Raises Refused where nothing can be compiled or kept."""
    if cache.is_off():
        raise Refused("QUACKISH_CACHE=0 turns the cache off; there is nothing to fill")
    if fault := upkeep.folder_fault():
        raise Refused(f"the cache folder {cache.location()} cannot be used: {fault}")
    try:
        find()
    except UnsupportedError as error:
        raise Refused(f"the compiler cannot be used: {error}") from None


# What is to be compiled ----------------------------------------------------------------------------------------------


def _requests(args: argparse.Namespace) -> tuple[list[launch.Request], list[str]]:
    """The kernels of all calls, each once; and for calls that have none, why."""
    if (args.op is None) == (args.file is None) or (args.op and not args.shapes):
        raise Refused("expected OP and at least one SHAPE, or --from FILE")
    if "this" in args.gpu and not torch.cuda.is_available():
        raise Refused(f"there is no GPU here; say which to compile for: --gpu, of {', '.join(_GPUS)}")
    gpus = [operations.which_gpu(name)[0] for name in args.gpu]
    calls = _lines(args.file) if args.file else [("", {**vars(args), "shape": shape}) for shape in args.shapes]
    requests: dict[launch.Request, None] = {}
    without = []
    for (where, call), gpu in itertools.product(calls, gpus):
        for also in ({}, operations.OPERATIONS[call["op"]].also):
            try:
                found = operations.run_dry(argparse.Namespace(**{**call, **also}), gpu)
            except Refused as refused:
                raise Refused(f"{where}{refused}") from None
            if found.portable is not None:
                without.append(f"{where}{call['op']} {call['shape']} {call['dtype']} on {gpu.name}: {found.portable}")
                break
            requests |= dict.fromkeys(_launched(found, gpu))
    if not requests and not without:
        raise Refused(f"{args.file} has no shape; expected lines such as: rms_norm 16384x4096 --residual")
    return list(requests), without


def _lines(file: Path) -> Iterator[tuple[str, dict]]:
    """Where each line is, and its arguments."""
    parser = Parser(add_help=False)
    operations.add_arguments(parser)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise Refused(f"{file}, line {line}: not UTF-8; expected a text file") from None
    except OSError as error:
        raise Refused(str(error)) from None
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}: "
        try:
            words = shlex.split(line, comments=True)
            if words:
                yield where, vars(parser.parse_args(words))
        except (Refused, ValueError) as error:  # ValueError: a quotation without its end
            raise Refused(f"{where}{error}") from None


def requests_of(op: str, shape: str, gpu: str) -> list[launch.Request]:
    """The kernels of one call, forward and backward, with the options' defaults; in the order of their first launch."""
    parser = Parser()
    operations.add_arguments(parser)
    on = NAMED[gpu]
    return list(dict.fromkeys(_launched(operations.run_dry(parser.parse_args([op, shape]), on), on)))


def _launched(found: DryRun, gpu: Gpu) -> Iterator[launch.Request]:
    for step in found.steps:
        if step.choice is not None:  # else it is a kernel of PyTorch's
            yield launch.Request(kernels.find(step.kernel, gpu), step.problem, step.choice.config, gpu.target)


def _gpus(text: str) -> list[str]:
    known = one_of({name: name for name in (*_GPUS, "this")})
    return [known(name.strip()) for name in text.split(",")]


def _name(outcome: Outcome) -> str:
    request = outcome.request
    return f"{request.kernel_class.__name__} {request.target} {describe(request.problem, {})}"
