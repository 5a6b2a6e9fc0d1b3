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
from quackish.cli.parser import Refused, positive
from quackish.configs import choose, table
from quackish.configs.rules import RULES, name_of
from quackish.gpu import Gpu
from quackish.launch import Resources
from quackish.profiling import table_of, text_table
from quackish.tune import cases, search
from quackish.tune.candidates import SPACES, candidates
from quackish.work import describe, work

OPERATIONS = ("rms_norm_forward", "rms_norm_backward", "linear_cross_entropy")


class Problem(NamedTuple):
    kernel: str
    problem: Any
    sizes: list[dict[str, int]]  # of each shape, the least work first

    def __str__(self) -> str:
        return f"{name_of(self.kernel, self.problem)}: {describe(self.problem, {})}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("op", metavar="OP", nargs="?", choices=OPERATIONS, help=", ".join(OPERATIONS))
    parser.add_argument("shapes", metavar="SHAPES", nargs="*", help="MxN,... of a norm; MxHxV,...")
    parser.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU, and takes --gpu")
    explain.add_gpu(parser)
    parser.add_argument("--candidates", type=positive, default=64, metavar="N", help="at most, a problem (64)")
    parser.add_argument("--list", action="store_true", help="show the rows of the table")
    parser.add_argument("--clear", action="store_true", help="remove the table")
    explain.add_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.list:
        return show()
    if args.clear:
        return clear()
    if not args.dry_run and not torch.cuda.is_available():
        raise Refused("there is no GPU here to measure on; --dry-run lists the candidates without one")
    if not args.dry_run and args.gpu is not None:
        raise Refused(f"--gpu is {args.gpu!r} without --dry-run; what is measured is the current GPU")
    gpu, problems = plan(args)
    if args.dry_run:
        return dry_run(problems, gpu, args.candidates)
    return tune(problems, gpu, args.candidates, torch.device("cuda", torch.cuda.current_device()))


# What is tuned -------------------------------------------------------------------------------------------------------


def plan(args: argparse.Namespace) -> tuple[Gpu, list[Problem]]:
    """Raises Refused where an argument is not what was expected."""
    if args.op is None:
        raise Refused(f"OP is missing; expected one of {', '.join(OPERATIONS)}")
    shapes = [shape for words in args.shapes for shape in words.split(",") if shape]
    if not shapes:
        raise Refused("SHAPES is missing; expected some, as in 4096x4096,16384x4096")
    problems: dict[tuple[str, Any], Problem] = {}
    for shape in dict.fromkeys(shapes):
        largest: dict[tuple[str, Any], dict[str, int]] = {}  # of a problem's launches for this shape
        for kernel, problem, sizes in _launches(args, shape):
            amount = functools.partial(_amount, kernel, problem)
            largest[kernel, problem] = max(largest.get((kernel, problem), sizes), sizes, key=amount)
        for key, sizes in largest.items():
            found = problems.setdefault(key, Problem(*key, []))
            found.sizes.extend([sizes] * (sizes not in found.sizes))
            found.sizes.sort(key=functools.partial(_amount, *key))
    return explain.which_gpu(args.gpu)[0], list(problems.values())


def _launches(args: argparse.Namespace, shape: str) -> list[tuple[str, Any, dict[str, int]]]:
    """(kernel, problem, sizes) of each launch of the operation that has candidates, as `explain` has them."""
    explained = explain.explain(argparse.Namespace(**vars(args), shape=shape))
    if explained.portable is not None:
        raise Refused(f"there is nothing to tune: {explained.portable}")
    found = [
        (step.kernel, step.problem, {name: n for name, n in step.sizes.items() if name[:4] not in ("num_", "max_")})
        for step in explained.trace.steps
        if step.kernel in SPACES and not getattr(step.problem, "recompute_flagged", False)  # returns at once
    ]
    if not found:
        raise Refused(f"there is nothing to tune: {args.op} has no GEMM of quackish's on {explained.gpu.name}")
    return found


def _amount(kernel: str, problem: Any, sizes: dict[str, int]) -> int:
    done = work(kernel, problem, sizes)
    return done.bytes + done.flops


# Candidates ----------------------------------------------------------------------------------------------------------

Examined = tuple[Any, Resources | str | None]  # a config; what it takes, why it does not compile, or None: not known


def _examine(one: Problem, configs: Sequence[Any], gpu: Gpu, compiling: bool, examine: Callable) -> list[Examined]:
    """The candidates, with what they take."""
    if toolchain.versions() is None:
        raise Refused("nvidia-cutlass-dsl, the compiler, is not installed; pip install nvidia-cutlass-dsl")
    used: list[Resources | str | None] = []
    try:
        with _progress(f"compiling {len(configs)} candidates", len(configs)) as advance:
            for found in examine([(one.kernel, one.problem, config) for config in configs], gpu, compiling):
                used.append(found)
                advance()
    except FileNotFoundError as error:
        print(f"tune: registers are not looked at: {error}", file=sys.stderr)
        used = [None] * len(configs)
    return list(zip(configs, used, strict=True))


def dry_run(problems: Sequence[Problem], gpu: Gpu, most: int, examine: Callable = search.examine) -> int:
    for one in problems:
        examined = _examine(one, candidates(one.kernel, one.problem, gpu, most), gpu, False, examine)
        print(f"{one}, on {gpu.name}\nat {'; '.join(describe(None, size) for size in one.sizes)}")
        base = examined[0][0]
        rows = [
            {"i": i, "config": _changes(config, base), "verdict": _verdict(used)}
            | (vars(used) if isinstance(used, Resources) else {})
            for i, (config, used) in enumerate(examined)
        ]
        columns = [("", "i", "d"), ("config", "config", ""), ("registers", "registers", "d")]
        print(table_of(rows, [*columns, ("shared B", "smem_bytes", "d"), ("", "verdict", "")]) + "\n")
    return 0


def _verdict(used: Resources | str | None) -> str:
    """Why a config is not worth timing, or ""."""
    if isinstance(used, str):
        return f"does not compile: {used.splitlines()[0]}"
    return f"left out: {used.stack_bytes} bytes of registers spill" if used and search.spills(used) else ""


def _changes(config: Any, base: Any) -> str:
    """The fields that differ from the analytical choice's; all of that one's."""
    return _words({name: v for name, v in vars(config).items() if config == base or v != getattr(base, name)})


def _words(fields: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in fields.items() if value is not None)


@contextlib.contextmanager
def _progress(words: str, total: int) -> Iterator[Callable[..., None]]:
    """A bar; what it yields takes a step, and may be given other words."""
    try:
        from rich.console import Console
        from rich.progress import TimeElapsedColumn
    except ImportError as error:
        raise Refused(f"the progress bar needs rich ({error}); pip install 'quackish[bench]' brings it") from error

    bar_class = progress_class()
    columns = (*bar_class.get_default_columns(), TimeElapsedColumn())
    with bar_class(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(words, total=total)
        yield lambda now=words: bar.update(task, advance=1, description=now)


# Tuning --------------------------------------------------------------------------------------------------------------


def tune(
    problems: Sequence[Problem], gpu: Gpu, most: int, device: torch.device,
    examine: Callable = search.examine, search_for: Callable[..., search.Outcome] = search.search,
) -> int:  # fmt: skip
    failed = 0
    for one in problems:
        configs = candidates(one.kernel, one.problem, gpu, most)
        kept = choose.tabled(one.kernel, one.problem, gpu).config  # it may lie further away
        base, *others = _examine(one, configs + [kept] * (kept not in configs), gpu, True, examine)
        fine = [config for config, used in others if not _verdict(used)]
        print(f"{one}\n  {len(others)} candidates, {len(fine)} of them without spilled registers")
        shapes = [functools.partial(cases.prepare, one.kernel, one.problem, sizes, device) for sizes in one.sizes]
        try:
            with _progress("timing", search.num_steps(len(shapes))) as advance:
                outcome = search_for([base[0], *fine], shapes, device, advance=advance)
        except RuntimeError as error:  # out of memory, say; the other problems may do
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}\n", file=sys.stderr)
            continue
        _keep(one, outcome, gpu, table.user_path())
    choose.reload()
    return 1 if failed else 0


def _keep(one: Problem, outcome: search.Outcome, gpu: Gpu, path: Path) -> None:
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
            gone = table.remove(path, row)
            print(f"  The analytical choice stays: {outcome.why}.{' Its row is removed.' * gone}\n")
        else:
            print(f"  {_changes(outcome.config, choose.analytical(kernel, problem, gpu).config)}\n  {gained}, {noise}.")
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
            print(f"    {_words(row.config)}\n    {row.measured}.{unused}")
    return 0


def clear() -> int:
    path = table.user_path()
    there = path.exists()
    path.unlink(missing_ok=True)
    gone = f"{path} is removed; the analytical choices are used from now on."
    print(gone if there else f"There is no table at {path}.")
    return 0
