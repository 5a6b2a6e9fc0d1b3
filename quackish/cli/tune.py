"""Searches for configs that are faster on this GPU than the analytical choices, and keeps them in a table of yours.

    python -m quackish tune rms_norm_backward 4096x4096,16384x4096
    python -m quackish tune linear_cross_entropy 8192x4096x128256 --dry-run --gpu h200
    python -m quackish tune --list

A config is per problem (N, dtypes, what is asked for), never per number of rows: give the rows that you have, and the
config that is best over all of them is kept, if what it gains is beyond the noise. Legal configs around the analytical
choice are compiled, those that spill registers are left out, and the others take turns on random data; each result is
compared with the analytical choice's.

From then on every process on this GPU, with the same versions of quackish, DSL and CUDA, uses the table:
QUACKISH_CONFIG_DIR/tuned.json, or tuned.json in the user's config folder. Nothing is tuned while a program runs. A
norm's config may change the last bits of its results, in the same way for every call.
"""

import argparse
import contextlib
import dataclasses
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from quackish import toolchain
from quackish.bench.console import progress_class
from quackish.cli import explain
from quackish.cli.explained import Refused
from quackish.configs import choose, table
from quackish.configs.rules import RULES, name_of
from quackish.errors import did_you_mean
from quackish.gpu import Gpu, roofs_of
from quackish.launch import Resources
from quackish.profiling import text_table
from quackish.tune import cases, resources, search
from quackish.tune.candidates import candidates
from quackish.work import describe, floor, work

OPERATIONS = ("rms_norm_forward", "rms_norm_backward", "linear_cross_entropy")
KERNELS = ("rms_norm_fwd", "rms_norm_bwd", "lce_gemm")  # what there are candidates of
MOST = 64


class Problem(NamedTuple):
    kernel: str
    problem: Any
    sizes: list[dict[str, int]]  # of each shape, the least work first

    @property
    def title(self) -> str:
        return f"{name_of(self.kernel, self.problem)}: {describe(self.problem, {})}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", nargs="?", help=", ".join(OPERATIONS))
    parser.add_argument("shapes", metavar="SHAPES", nargs="*", help="MxN,... of a norm; MxHxV,...")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU")
    parser.add_argument("--gpu", help="of a dry run: h100, h200, b200; this one, or else h200")
    parser.add_argument("--candidates", type=int, default=MOST, metavar="N", help=f"at most, a problem ({MOST})")
    parser.add_argument("--list", action="store_true", help="show the rows of the table")
    parser.add_argument("--clear", action="store_true", help="remove the table")
    parser.add_argument("--dtype", default="bf16", help="of input and weight: bf16, fp16, fp32 (bf16)")
    parser.add_argument("--bias", action="store_true", help="with a bias")
    norm = parser.add_argument_group("norms")
    norm.add_argument("--residual", nargs="?", const="same", metavar="DTYPE", help="with a residual, of --dtype")
    norm.add_argument("--weight-dtype", metavar="DTYPE", help="another dtype than --dtype; none: without a weight")
    norm.add_argument("--out-dtype", metavar="DTYPE", help="of y")
    loss = parser.add_argument_group("linear_cross_entropy, whose GEMMs are tuned")
    loss.add_argument("--schedule", help="stored, chunked, recompute; auto is the default")
    loss.add_argument("--class-weight", action="store_true", default=None, help="with class weights")
    loss.add_argument("--label-smoothing", type=float, metavar="S")
    loss.add_argument("--softcap", type=float, metavar="C")


def run(args: argparse.Namespace) -> int:
    try:
        if args.list:
            return show()
        if args.clear:
            return clear()
        gpu, problems = plan(args)
        if args.dry_run:
            return dry_run(problems, gpu, args.candidates)
        return tune(problems, gpu, args.candidates)
    except (Refused, ImportError) as refused:
        print(f"tune: {refused}", file=sys.stderr)
        return 2


# What is tuned -------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> tuple[Gpu, list[Problem]]:
    """Raises Refused where an argument is not what was expected."""
    if args.op not in OPERATIONS:
        given = "missing" if args.op is None else repr(args.op)
        suggestion = did_you_mean(args.op or "", OPERATIONS)
        raise Refused(f"OP is {given}; expected one of {', '.join(OPERATIONS)}{suggestion}")
    if args.candidates < 1:
        raise Refused(f"--candidates is {args.candidates}; expected at least 1")
    if not args.dry_run and not torch.cuda.is_available():
        raise Refused("there is no GPU here to measure on; --dry-run lists the candidates without one")
    if args.gpu is not None and not args.dry_run:
        raise Refused(f"--gpu is {args.gpu!r} without --dry-run; what is measured is the current GPU")
    shapes = [shape for words in args.shapes for shape in words.split(",") if shape]
    if not shapes:
        raise Refused("SHAPES is missing; expected some, as in 4096x4096,16384x4096")
    largest: dict[tuple[str, Any], dict[str, dict[str, int]]] = {}
    for shape in shapes:
        for kernel, problem, sizes in _launches(args, shape):
            of_shape = largest.setdefault((kernel, problem), {})
            if shape not in of_shape or _amount(kernel, problem, sizes) > _amount(kernel, problem, of_shape[shape]):
                of_shape[shape] = sizes
    problems = []
    for (kernel, problem), of_shape in largest.items():
        distinct = {tuple(sizes.items()): sizes for sizes in of_shape.values()}.values()
        problems.append(Problem(kernel, problem, sorted(distinct, key=functools.partial(_amount, kernel, problem))))
    return _gpu(args), problems


def _launches(args: argparse.Namespace, shape: str) -> Iterator[tuple[str, Any, dict[str, int]]]:
    """(kernel, problem, sizes) of each launch of the operation that has candidates, as `explain` has them."""
    parser = argparse.ArgumentParser()
    explain.add_arguments(parser)
    asked = parser.parse_args([args.op, shape])
    for name in set(vars(asked)) & set(vars(args)) - {"op", "shape"}:
        setattr(asked, name, getattr(args, name))
    explained = explain.explain(asked)
    if explained.portable is not None:
        raise Refused(f"there is nothing to tune: {explained.portable}")
    found = False
    for step in explained.trace.steps:
        if step.kernel in KERNELS and not getattr(step.problem, "redo", False):  # a redo leaves at once, nearly always
            found = True
            sizes = {name: n for name, n in step.sizes.items() if name not in ("num_ctas", "max_clusters")}
            yield step.kernel, step.problem, sizes
    if not found:
        raise Refused(f"there is nothing to tune: {args.op} has no GEMM of quackish's on {_gpu(args).name}")


def _gpu(args: argparse.Namespace) -> Gpu:
    return explain._gpu(args.gpu)[0]


def _amount(kernel: str, problem: Any, sizes: dict[str, int]) -> int:
    done = work(kernel, problem, sizes)
    return done.bytes + done.flops


# Candidates ----------------------------------------------------------------------------------------------------------


class Examined(NamedTuple):
    config: Any
    used: Resources | str | None  # of an SM; or why it does not compile; None where that cannot be had

    @property
    def is_worth_timing(self) -> bool:
        return self.used is None or not (isinstance(self.used, str) or resources.spills(self.used))


def dry_run(problems: Sequence[Problem], gpu: Gpu, most: int) -> int:
    everything = [candidates(kernel, problem, gpu, most) for kernel, problem, _ in problems]
    for one, examined in zip(problems, _examine(problems, everything, gpu, compiling=False), strict=True):
        print(f"{one.title}, on {gpu.name}")
        print(f"at {'; '.join(describe(None, size) for size in one.sizes)}")
        base = examined[0].config
        rows = [[str(i), _changes(config, base), *_cells(used)] for i, (config, used) in enumerate(examined)]
        print(text_table(["", "config", "registers", "shared B", ""], rows, "rlrrl") + "\n")
    return 0


def _examine(
    problems: Sequence[Problem], everything: Sequence[Sequence[Any]], gpu: Gpu, compiling: bool
) -> list[list[Examined]]:
    """The candidates of each problem, with what they take."""
    if toolchain.versions() is None:
        raise Refused("nvidia-cutlass-dsl, the compiler, is not installed; pip install nvidia-cutlass-dsl")
    wanted = [(*one[:2], config) for one, configs in zip(problems, everything, strict=True) for config in configs]
    used: dict[int, Resources | str] = {}
    try:
        with _progress(f"compiling {len(wanted)} candidates", len(wanted)) as advance:
            for i, found in resources.examine(wanted, gpu, compiling):
                used[i] = found
                advance()
    except FileNotFoundError as error:
        print(f"tune: registers are not looked at: {error}", file=sys.stderr)
    rest = iter(range(len(wanted)))
    return [[Examined(config, used.get(next(rest))) for config in configs] for configs in everything]


def _cells(used: Resources | str | None) -> list[str]:
    if used is None:
        return ["", "", ""]
    if isinstance(used, str):
        return ["", "", f"does not compile: {used.splitlines()[0]}"]
    verdict = f"left out: {used.stack_bytes} bytes of registers spill" if resources.spills(used) else ""
    return [str(used.registers), str(used.smem_bytes), verdict]


def _changes(config: Any, base: Any) -> str:
    """The fields that differ from the analytical choice's; all of that one's."""
    fields = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if config != base:
        fields = {name: value for name, value in fields.items() if value != getattr(base, name)}
    return " ".join(f"{name}={value}" for name, value in fields.items())


@contextlib.contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar; what it yields takes a step, and may be given other words."""
    try:
        from rich.console import Console
        from rich.progress import TimeElapsedColumn
    except ImportError as error:
        raise ImportError(f"the progress bar needs rich ({error}); pip install 'quackish[bench]' brings it") from error

    bar_class = progress_class()
    columns = (*bar_class.get_default_columns(), TimeElapsedColumn())
    with bar_class(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=total)

        def advance(now: str = words) -> None:
            bar.update(task, advance=1, description=now)

        yield advance


# Tuning --------------------------------------------------------------------------------------------------------------


def tune(problems: Sequence[Problem], gpu: Gpu, most: int) -> int:
    failed, device = 0, torch.device("cuda", torch.cuda.current_device())
    everything = [_candidates(one, gpu, most) for one in problems]
    for one, examined in zip(problems, _examine(problems, everything, gpu, compiling=True), strict=True):
        worth = [config for i, (config, _) in enumerate(examined) if i == 0 or examined[i].is_worth_timing]
        print(f"{one.title}\n  {len(examined) - 1} candidates, {len(worth) - 1} of them without spilled registers")
        shapes = [_shape(one.kernel, one.problem, size, gpu, device) for size in one.sizes]
        try:
            with _progress("timing", search.num_steps(len(shapes))) as advance:
                outcome = search.search(worth, shapes, device, advance=advance)
        except RuntimeError as error:  # out of memory, say; the other problems may do
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}\n", file=sys.stderr)
            continue
        _tell(one, outcome)
        _keep(one, outcome, gpu, table.user_path())
    choose.reload()
    return 1 if failed else 0


def _candidates(one: Problem, gpu: Gpu, most: int) -> list[Any]:
    configs = candidates(one.kernel, one.problem, gpu, most)
    kept = choose.tabled(one.kernel, one.problem, gpu).config  # it may lie further away
    return configs + [kept] * (kept not in configs)


def _shape(kernel: str, problem: Any, sizes: dict[str, int], gpu: Gpu, device: torch.device) -> search.Shape:
    roofs = roofs_of(gpu)
    least = None if roofs is None else floor(work(kernel, problem, sizes), roofs)
    bound = least.us if least is not None and least.bound == "memory" else None
    return search.Shape(functools.partial(cases.prepare, kernel, problem, sizes, device), bound)


def _tell(one: Problem, outcome: search.Outcome) -> None:
    for config, why in outcome.dropped:
        print(f"  left out: {config}: {why}")
    rows = [
        [describe(None, sizes), f"{before:.1f}", f"{after:.1f}", f"{before / after:.3f}"]
        for sizes, before, after in zip(one.sizes, outcome.analytical_us, outcome.us, strict=True)
    ]
    print(text_table(["  at", "analytical us", "best us", "gain"], [["  " + row[0], *row[1:]] for row in rows], "lrrr"))


def _keep(one: Problem, outcome: search.Outcome, gpu: Gpu, path: Path) -> None:
    kernel, problem, sizes = one
    gain, noise = 100 * (outcome.gain - 1), 100 * outcome.noise
    at = ", ".join(describe(None, size) for size in sizes)
    measured = (
        f"{gain:.1f} % faster than the analytical choice at {at} ({time.strftime('%Y-%m-%d')}, noise {noise:.1f} %)"
    )
    row = table.make_row(kernel, problem, gpu, outcome.config, measured)
    try:
        if outcome.why:
            gone = table.remove(path, row)
            print(f"  The analytical choice stays: {outcome.why}.{' Its row is removed.' * gone}\n")
        else:
            print(f"  {_changes(outcome.config, choose.analytical(kernel, problem, gpu).config)}")
            print(f"  {gain:.1f} % faster than the analytical choice, noise {noise:.1f} %.")
            table.add(path, row)
            print(f"  Written to {path}.\n")
    except OSError as error:
        raise Refused(f"{path} cannot be written: {error.strerror}; `with quackish.config(...)` forces it") from error


# The table -----------------------------------------------------------------------------------------------------------


def show() -> int:
    for what, rows in (("yours", table.user()), ("shipped", table.shipped())):
        print(f"{rows.path} ({what}): {len(rows.rows)} rows")
        for row in rows.rows:
            name = name_of(row.kernel, types.SimpleNamespace(**row.problem)) if row.kernel in RULES else row.kernel
            unused = "" if rows.counts(row) else f" Not used here: made with {_words(row.toolchain)}."
            print(f"  {name} on {row.gpu} ({row.target}): {_words(row.problem)}")
            print(f"    {_words(row.config)}")
            print(f"    {row.measured}.{unused}")
    return 0


def _words(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


def clear() -> int:
    path = table.user_path()
    try:
        path.unlink()
    except FileNotFoundError:
        print(f"There is no table at {path}.")
        return 0
    print(f"{path} is removed; the analytical choices are used from now on.")
    return 0
