"""Fills the cache folder with the kernels that calls of these shapes launch, forward and backward.

    python -m quackish precompile rms_norm 16384x4096 16384x8192 --residual --gpu h200,b200
    python -m quackish precompile linear_cross_entropy 8192x4096x128256 --gpu h200
    python -m quackish precompile --from shapes.txt --gpu h200

Needs no GPU, and takes a second a kernel and process. RMSNorm's kernels depend on N and not on M, those of linear cross
entropy on little but H and dtypes; the loss alone, without gradients, is included. In a file each line is an operation,
a shape and its options, as in `linear_cross_entropy 8192x4096x128256 --schedule recompute`; # starts a comment.

`python -m quackish cache export` takes them to another machine with the same versions.
"""

import argparse
import copy
import shlex
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from quackish import kernels, launch, toolchain
from quackish.bench.console import PlainLines
from quackish.cli import explain
from quackish.cli.cache import short
from quackish.cli.explained import Explained, Refused
from quackish.errors import UnsupportedError, did_you_mean
from quackish.gpu import NAMED, gpu_of
from quackish.launch import cache, parallel, upkeep
from quackish.launch.parallel import Outcome

GPUS = [name for name, gpu in NAMED.items() if gpu.family in kernels.FAMILIES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", nargs="?", help=", ".join(explain.OPERATIONS))
    parser.add_argument("shapes", metavar="SHAPE", nargs="*", help="MxN; of linear_cross_entropy MxHxV")
    parser.add_argument(
        "--gpu", help=f"one or more, with commas: {', '.join(GPUS)}; or this, the default where there is one"
    )
    parser.add_argument("--jobs", type=_jobs, metavar="N", help="compile in so many processes; one a core, 16 at most")
    parser.add_argument("--from", dest="file", type=Path, metavar="FILE", help="a file with a line for each shape")
    explain.add_options(parser)


def run(args: argparse.Namespace) -> int:
    try:
        _check_here()
        calls = list(_calls(args))
        if not calls:
            raise Refused(f"{args.file} has no shape; expected lines such as: rms_norm 16384x4096 --residual")
        requests, without = _requests(calls)
    except (Refused, OSError) as error:
        print(f"precompile: {error}", file=sys.stderr)
        return 2
    for reason in without:
        print(f"nothing to compile: {reason}")
    started, count = time.perf_counter(), dict.fromkeys(("compiled", "loaded", "failed", "not stored"), 0)
    reasons: dict[str, None] = {}  # why kernels were not stored
    jobs = min(args.jobs or max(1, parallel.default_jobs(len(requests))), len(requests))
    try:
        for outcome in _with_progress(parallel.compile_all(requests, jobs), len(requests)):
            count[outcome.status] += 1
            if outcome.status == "failed":
                print(f"{_name(outcome)} failed: {outcome.message}", file=sys.stderr)
            elif outcome.status == "not stored":
                reasons[outcome.message] = None
    except KeyboardInterrupt:
        print("precompile: interrupted; what is stored so far is kept", file=sys.stderr)
        return 130
    stored, lost = count["compiled"], count["not stored"]
    print(
        f"{len(requests)} kernels: {stored + lost} compiled, {count['loaded']} were there, {count['failed']} failed; "
        f"{time.perf_counter() - started:.1f} s in {jobs} processes"
        + (f"; {stored} stored in {cache.location()}" if lost else f"; they are in {cache.location()}")
    )
    if lost:
        why = "; ".join(reasons)
        print(
            f"precompile: compiled {stored + lost}, stored {stored} in {cache.location()}: {why}. "
            "QUACKISH_CACHE_DIR names another folder.",
            file=sys.stderr,
        )
    return 1 if count["failed"] or lost or without else 0


def _check_here() -> None:
    """Raises Refused where nothing can be compiled or kept."""
    if cache.is_off():
        raise Refused("QUACKISH_CACHE=0 turns the cache off; there is nothing to fill")
    fault = upkeep.folder_fault()
    if fault:
        raise Refused(f"the cache folder {cache.location()} cannot be used: {fault}")
    try:
        toolchain.find()
    except ModuleNotFoundError as error:
        raise Refused(f"the compiler is not installed ({error}); `pip install nvidia-cutlass-dsl`") from None
    except UnsupportedError as error:
        raise Refused(str(error)) from None


# What is to be compiled ----------------------------------------------------------------------------------------------


def _calls(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    """Arguments of `explain`, one shape and one GPU each."""
    gpus = _gpus(args.gpu)
    if (args.op is None) == (args.file is None) or (args.op and not args.shapes):
        raise Refused("expected OP and at least one SHAPE, or --from FILE")
    for call in _lines(args.file) if args.file else _from_command_line(args):
        for gpu in gpus:
            one = copy.copy(call)
            one.gpu = gpu
            yield one


def _gpus(given: str | None) -> list[str]:
    import torch

    known = ", ".join(GPUS)
    names = ["this"] if given is None else [name.strip().lower() for name in given.split(",")]
    for name in names:
        if name == "this" and not torch.cuda.is_available():
            raise Refused(f"there is no GPU here; say which to compile for: --gpu, of {known}")
        gpu = gpu_of(torch.cuda.current_device()) if name == "this" else NAMED.get(name)
        if name != "this" and gpu is None and name != "cpu":
            suggestion = did_you_mean(name, GPUS)
            raise Refused(f"--gpu is {name!r}; expected one of {known}, this{suggestion}")
        if gpu is None or gpu.family not in kernels.FAMILIES:
            where = "a CPU" if gpu is None else f"{gpu.name} ({gpu.family})"
            raise Refused(f"there is nothing to compile for {where}, where the portable path runs; --gpu takes {known}")
    return names


def _from_command_line(args: argparse.Namespace) -> Iterator[argparse.Namespace]:
    for shape in args.shapes:
        one = copy.copy(args)
        one.shape, one.where = shape, ""
        yield one


class _LineParser(argparse.ArgumentParser):
    def error(self, message):
        raise Refused(message)


def _lines(file: Path) -> Iterator[argparse.Namespace]:
    parser = _LineParser(add_help=False)
    parser.add_argument("op")
    parser.add_argument("shape")
    explain.add_options(parser)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise Refused(f"{file}, line {line}: not UTF-8; expected a text file") from None
    for number, line in enumerate(lines, 1):
        where = f"{file}, line {number}: "
        try:
            words = shlex.split(line, comments=True)
            call = parser.parse_args(words) if words else None
        except (Refused, ValueError) as error:  # ValueError: a quotation without its end
            raise Refused(f"{where}{error}") from None
        if call is not None:
            call.where = where
            yield call


def _requests(calls: Iterable[argparse.Namespace]) -> tuple[list[launch.Request], list[str]]:
    """The kernels of all calls, each once; and for calls that have none, why."""
    requests: dict[launch.Request, None] = {}
    without = []
    for call in calls:
        try:
            explained = explain.explain(copy.copy(call))
        except Refused as refused:
            raise Refused(f"{call.where}{refused}") from None
        if explained.portable is not None:
            what = f"{explained.op} {explained.shape} {explained.dtype} on {explained.gpu.name}"
            without.append(f"{call.where}{what}: {explained.portable}")
            continue
        requests |= dict.fromkeys(_of_trace(explained))
        if call.op == "linear_cross_entropy" and not call.no_grad:
            call.no_grad = True
            requests |= dict.fromkeys(_of_trace(explain.explain(call)))
    return list(requests), without


def requests_of(op: str, shape: str, gpu: str) -> list[launch.Request]:
    """The kernels of one call, forward and backward, with the options' defaults; in the order of their first launch."""
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    explained = explain.explain(parser.parse_args([op, shape, "--gpu", gpu]))
    return list(dict.fromkeys(_of_trace(explained)))


def _of_trace(explained: Explained) -> Iterator[launch.Request]:
    gpu = explained.gpu
    for step in explained.trace.steps:
        if step.choice is not None:  # else it is a kernel of PyTorch's
            yield launch.Request(kernels.find(step.kernel, gpu), step.problem, step.choice.config, gpu.target)


def _jobs(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a positive number")
    return int(text)


# Progress ------------------------------------------------------------------------------------------------------------


def _with_progress(outcomes: Iterator[Outcome], total: int) -> Iterator[Outcome]:
    """A bar where there is a terminal and rich; else a line each, and some while none is done."""
    try:
        from rich.progress import track
    except ModuleNotFoundError:
        track = None
    if track is not None and sys.stderr.isatty():
        from rich.console import Console

        yield from track(outcomes, "compiling", total, console=Console(stderr=True), transient=True)
        return
    number, started = 0, time.monotonic()
    with PlainLines(lambda: f"[{number}/{total}] compiling, {time.monotonic() - started:.0f} s") as lines:
        for number, outcome in enumerate(outcomes, 1):
            lines.say(f"[{number}/{total}] {outcome.status:8} {_name(outcome)}")
            yield outcome


def _name(outcome: Outcome) -> str:
    request = outcome.request
    return f"{request.kernel_class.__name__} {request.target} {short(repr(request.problem))}"
