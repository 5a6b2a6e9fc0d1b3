"""Compiles the kernels that calls of these shapes launch in forward and backward, and stores them in the cache folder.

    quackish precompile rms_norm 16384x4096 16384x8192 --residual --gpu h200,b200
    quackish precompile linear_cross_entropy 8192x4096x128256 --gpu h200
    quackish precompile grouped_mlp 131072x2048x768x128 --scales --gpu h200
    quackish precompile --from shapes.txt --gpu h200

Needs no GPU, and takes a second per kernel in each process. RMSNorm's kernels depend on N but not on M, those of linear
cross entropy mainly on H and dtypes. Kernels of calls without grad are included. Each line of a file is an operation, a
shape and its options, as in `linear_cross_entropy 8192x4096x128256 --schedule recompute`; # starts a comment.

A machine with the same versions uses a copy of the cache folder. QUACKISH_CACHE_DIR names the folder on both.
"""

import argparse
import itertools
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from quackish.cli import call_arguments
from quackish.cli.parser import CommandError, Parser, positive
from quackish.device import cache, compile_jobs, launch, toolchain, upkeep
from quackish.device.compile_jobs import Outcome
from quackish.device.work import describe
from quackish.errors import UnsupportedError
from quackish.gpu import FAMILIES, NAMED, Gpu
from quackish.ops.shared.argument_types import one_of
from quackish.text import fill

if TYPE_CHECKING:
    from quackish.ops.shared.dry_run import DryRun

_GPUS = [name for name, gpu in NAMED.items() if gpu.family in FAMILIES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    call_arguments.add_arguments(parser, "*")
    gpu_help = f"comma-separated: {', '.join(_GPUS)}; or this, the default"
    parser.add_argument("--gpu", type=_gpus, default=["this"], help=gpu_help)
    jobs_help = "number of processes; default: one per core, at most 16"
    parser.add_argument("--jobs", type=positive, metavar="N", help=jobs_help)
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="a file with one call per line")


def begin(args: argparse.Namespace) -> None:
    if (args.op is None) == (args.file is None) or (args.op and not args.shapes):
        raise CommandError("expected OP and at least one SHAPE, or --from FILE")
    if "this" in args.gpu and not call_arguments.has_gpu():
        raise CommandError(f"there is no GPU here; name one to compile for: --gpu {', '.join(_GPUS)}")
    import torch  # noqa: F401


def run(
    args: argparse.Namespace, find: Callable = toolchain.find, compile_all: Callable = compile_jobs.compile_all
) -> int:
    """Returns 0; 1 if a kernel failed, was not stored or does not exist; 130 after Ctrl-C."""
    _check_compiler_and_cache(find)
    requests, portable = _requests(args)
    for reason in portable:
        print(fill(f"nothing to compile: {reason}", indent="  "))
    started, outcomes = time.perf_counter(), []
    jobs = min(args.jobs or max(1, compile_jobs.default_jobs(len(requests))), len(requests))
    try:
        for outcome in compile_all(requests, jobs):
            outcomes.append(outcome)
            line = f"[{len(outcomes)}/{len(requests)}] {outcome.status:8} {_name(outcome)}"
            print(fill(line, indent="    "), flush=True)
            if outcome.status == "failed":
                print(f"{_name(outcome)} failed: {outcome.message}", file=sys.stderr)
    except KeyboardInterrupt:
        print("precompile: interrupted; the kernels stored so far are kept", file=sys.stderr)
        return 130
    count, folder = Counter(outcome.status for outcome in outcomes), cache.location()
    stored, lost = count["compiled"], count["not stored"]
    counts = f"{stored + lost} compiled, {count['loaded']} on disk, {count['failed']} failed"
    took = f"{time.perf_counter() - started:.1f} s in {jobs} process{'' if jobs == 1 else 'es'}"
    print(fill(f"{len(requests)} kernels: {counts}; {took}; folder {folder}", indent="  "))
    if lost:
        reasons = "; ".join({outcome.message: None for outcome in outcomes if outcome.status == "not stored"})
        message = f"precompile: compiled {stored + lost}, stored {stored} in {folder}: {reasons}. "
        print(message + "QUACKISH_CACHE_DIR names another folder.", file=sys.stderr)
    return 1 if count["failed"] or lost or portable else 0


def _check_compiler_and_cache(find: Callable) -> None:
    """Raises CommandError if nothing can be compiled or stored."""
    if cache.is_off():
        raise CommandError("QUACKISH_CACHE=0 turns the cache off; unset it")
    if fault := upkeep.folder_fault():
        raise CommandError(f"the cache folder {cache.location()} cannot be used: {fault}")
    try:
        find()
    except UnsupportedError as error:
        raise CommandError(f"the compiler cannot be used: {error}") from None


def _requests(args: argparse.Namespace) -> tuple[list[launch.Request], list[str]]:
    """The distinct kernels of all calls, and for each call on the portable path the reason."""
    gpus = [call_arguments.select_gpu(name)[0] for name in args.gpu]
    calls = _lines(args.file) if args.file else [("", {**vars(args), "shape": shape}) for shape in args.shapes]
    requests: dict[launch.Request, None] = {}
    portable = []
    for (where, call), gpu in itertools.product(calls, gpus):
        without_grad = [{"no_grad": True}] if "no_grad" in call_arguments.CALLS[call["op"]][0].options else []
        for extra in ({}, *without_grad):
            try:
                dry = call_arguments.dry_run_call(argparse.Namespace(**{**call, **extra}), gpu)
            except CommandError as error:
                raise CommandError(f"{where}{error}") from None
            if dry.portable is not None:
                portable.append(f"{where}{call['op']} {call['shape']} {call['dtype']} on {gpu.name}: {dry.portable}")
                break
            requests |= dict.fromkeys(_requests_of(dry, gpu))
    if not requests and not portable:
        raise CommandError(f"{args.file} has no shape; expected lines such as: rms_norm 16384x4096 --residual")
    return list(requests), portable


def _lines(file: Path) -> Iterator[tuple[str, dict]]:
    """Yields (file and line number, arguments) for each line."""
    parser = Parser(add_help=False)
    call_arguments.add_arguments(parser)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise CommandError(f"{file}, line {line}: not UTF-8; expected a text file") from None
    except OSError as error:
        raise CommandError(f"{file}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}: "
        try:
            words = shlex.split(line, comments=True)
            if words:
                yield where, vars(parser.parse_args(words))
        except (CommandError, ValueError) as error:  # ValueError: a missing closing quote
            raise CommandError(f"{where}{error}") from None


def requests_of(op: str, shape: str, gpu: str) -> list[launch.Request]:
    """The kernels of one call with default options, forward and backward, in order of their first launch."""
    parser = Parser()
    call_arguments.add_arguments(parser)
    dry = call_arguments.dry_run_call(parser.parse_args([op, shape]), NAMED[gpu])
    return list(dict.fromkeys(_requests_of(dry, NAMED[gpu])))


def _requests_of(dry: "DryRun", gpu: Gpu) -> Iterator[launch.Request]:
    for step in dry.steps:
        if step.choice is not None:  # else PyTorch launches it
            yield launch.Request(step.problem.spec.kernel_class(gpu), step.problem, step.choice.config, gpu.target)


def _gpus(text: str) -> list[str]:
    """An argparse type: comma-separated names of GPUs."""
    known = one_of({name: name for name in (*_GPUS, "this")})
    return [known(name.strip()) for name in text.split(",")]


def _name(outcome: Outcome) -> str:
    request = outcome.request
    return f"{request.kernel_class.__name__} {request.target} {describe(request.problem, {})}"
