"""Searches for configs that are faster on this GPU than the analytical choices, and keeps them in a table of yours.

    python -m quackish tune rms_norm_backward 4096x4096,16384x4096
    python -m quackish tune linear_cross_entropy 8192x4096x128256

A config is per problem (N, dtypes, which results), independent of the number of rows: give the shapes that you have,
and the config that is fastest over all of them is kept, if the gain is beyond the noise. Legal configs around the
analytical choice are compiled in parallel; those that do not spill registers take turns on random data, and each
result is compared with the analytical choice's.

From then on every process on this GPU, with the same versions of quackish, DSL and CUDA, uses the table: tuned.json in
QUACKISH_CONFIG_DIR or in the user's config folder; delete the file to remove its rows. Nothing is tuned while a program
runs. A norm's config may change the last bits of its results, in the same way for every call.
"""

import argparse
import contextlib
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from quackish import toolchain
from quackish.bench.console import progress
from quackish.cli import operations
from quackish.cli.parser import Refused, positive
from quackish.configs import choose, table
from quackish.configs.choose import name_of
from quackish.gpu import Gpu, gpu_of
from quackish.profiling import text_table
from quackish.tune import cases, search
from quackish.tune.candidates import SPACES, candidates
from quackish.work import describe, work


class Problem(NamedTuple):
    kernel: str
    problem: Any
    sizes: list[dict[str, int]]  # of each shape, the least work first

    def __str__(self) -> str:
        return f"{name_of(self.kernel, self.problem)}: {describe(self.problem, {})}"

    def amount(self, sizes: dict[str, int]) -> int:
        done = work(self.kernel, self.problem, sizes)
        return done.bytes + done.flops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    operations.add_arguments(parser, "+")
    parser.add_argument("--candidates", type=positive, default=64, metavar="N", help="at most, a problem (64)")


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise Refused("there is no GPU here to measure on")
    if toolchain.versions() is None:
        raise Refused("nvidia-cutlass-dsl, the compiler, is not installed; pip install nvidia-cutlass-dsl")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device.index)
    return tune(plan(args, gpu), gpu, args.candidates, device)


def plan(args: argparse.Namespace, gpu: Gpu) -> list[Problem]:
    """The problems of all shapes that have candidates. Raises Refused if an argument is not what was expected."""
    problems: dict[tuple[str, Any], Problem] = {}
    for shape in dict.fromkeys(shape for words in args.shapes for shape in words.split(",") if shape):
        found = operations.run_dry(argparse.Namespace(**vars(args), shape=shape), gpu)
        if found.portable is not None:
            raise Refused(f"there is nothing to tune: {found.portable}")
        largest: dict[tuple[str, Any], dict[str, int]] = {}  # of a problem's launches for this shape
        for step in found.steps:
            if step.kernel not in SPACES or getattr(step.problem, "recompute_flagged", False):  # which returns at once
                continue
            one = problems.setdefault((step.kernel, step.problem), Problem(step.kernel, step.problem, []))
            sizes = {name: n for name, n in step.sizes.items() if name[:4] not in ("num_", "max_")}
            largest[one[:2]] = max(largest.get(one[:2], sizes), sizes, key=one.amount)
        for key, sizes in largest.items():
            one = problems[key]
            one.sizes.extend([sizes] * (sizes not in one.sizes))
            one.sizes.sort(key=one.amount)
    if not problems:
        raise Refused(f"there is nothing to tune: {args.op} has no GEMM of quackish's on {gpu.name}")
    return list(problems.values())


def tune(
    problems: Sequence[Problem], gpu: Gpu, most: int, device: torch.device,
    examine: Callable = search.examine, search_for: Callable[..., search.Outcome] = search.search,
) -> int:  # fmt: skip
    failed = 0
    for one in problems:
        configs = candidates(one.kernel, one.problem, gpu, most)
        kept = choose.tabled(one.kernel, one.problem, gpu).config  # it may lie further away
        base, *others = configs + [kept] * (kept not in configs)
        fine = _without_spills(one, others, gpu, examine)
        print(f"{one}\n  {len(others)} candidates, {len(fine)} of them without spilled registers")
        shapes = [functools.partial(cases.prepare, *one[:2], sizes, device, gpu) for sizes in one.sizes]
        try:
            with _progress("timing", search.num_steps(len(shapes))) as advance:
                outcome = search_for([base, *fine], shapes, device, advance=advance)
        except RuntimeError as error:  # out of memory, say; the other problems may do
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}\n", file=sys.stderr)
            continue
        _keep(one, outcome, gpu)
    choose.reload()
    return 1 if failed else 0


def _without_spills(one: Problem, configs: Sequence[Any], gpu: Gpu, examine: Callable) -> list[Any]:
    fine = []
    with _progress(f"compiling {len(configs)} candidates", len(configs)) as advance:
        try:
            for config, fits in zip(configs, examine(one.kernel, one.problem, configs, gpu), strict=True):
                fine += [config] * fits
                advance()
        except FileNotFoundError as error:
            raise Refused(f"spilled registers cannot be seen: {error}") from error
    return fine


@contextlib.contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[..., None]]:
    """Yields advance(), a step further; it may be given other words."""
    done = itertools.count(1)
    with progress(total) as show:
        yield lambda now=words: show(next(done), now)


def _keep(one: Problem, outcome: search.Outcome, gpu: Gpu) -> None:
    kernel, problem, sizes = one
    for config, why in outcome.dropped:
        print(f"  left out: {config}: {why}")
    timed = zip(sizes, outcome.analytical_us, outcome.us, strict=True)
    rows = [[f"  {describe(None, at)}", f"{a:.1f}", f"{b:.1f}", f"{a / b:.3f}"] for at, a, b in timed]
    print(text_table(["  at", "analytical us", "best us", "gain"], rows, "lrrr"))
    gained = f"{100 * (outcome.gain - 1):.1f} % faster than the analytical choice"
    at, noise = ", ".join(describe(None, size) for size in sizes), f"noise {100 * outcome.noise:.1f} %"
    measured = f"{gained} at {at} ({time.strftime('%Y-%m-%d')}, {noise})"
    row = table.make_row(kernel, problem, gpu, outcome.config, measured)
    try:
        if outcome.why:
            gone = table.put(row, keep=False)
            print(f"  The analytical choice stays: {outcome.why}.{' Its row is removed.' * gone}\n")
        else:
            print(f"  {_changes(outcome.config, choose.analytical(kernel, problem, gpu).config)}\n  {gained}, {noise}.")
            table.put(row)
            print(f"  Written to {table.path()}.\n")
    except OSError as error:
        raise Refused(
            f"{table.path()} cannot be written: {error.strerror}; `with quackish.config(...)` forces it"
        ) from error


def _changes(config: Any, base: Any) -> str:
    """The fields that differ from the analytical choice's."""
    return " ".join(f"{name}={value}" for name, value in vars(config).items() if value != getattr(base, name))
