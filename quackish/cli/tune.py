"""Searches for configs that are faster on this GPU than the analytical choices, and stores them in your table.

    quackish tune rms_norm_backward 4096x4096,16384x4096
    quackish tune linear_cross_entropy 8192x4096x128256
    quackish tune scaled_dot_product_attention 4x16x2048x64 --attn-bias 1,H

A problem (N, dtypes, outputs) has one config, whatever the number of rows. Pass all your shapes: the config that is
fastest over all of them is stored if its gain exceeds the noise. Legal configs near the analytical choice are compiled
in parallel. Those that do not spill registers are timed in turns on random data, and their results are compared with
those of the analytical choice.

Every process on this GPU with the same versions of quackish, DSL and CUDA then uses the table: tuned.json in
QUACKISH_CONFIG_DIR or in the user's config folder. Delete the file to remove all rows. Nothing is tuned at run time.
A tuned norm may give different last bits, the same ones in every call.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from quackish.cli import call_arguments
from quackish.cli.console import progress
from quackish.cli.parser import CommandError, positive
from quackish.device import choose, toolchain, tuned
from quackish.device.files import why_no_output
from quackish.device.work import describe
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu, gpu_of
from quackish.text import fill, text_table
from quackish.tune.candidates import candidates

if TYPE_CHECKING:
    import torch

    from quackish.tune import search


class Problem(NamedTuple):
    """A problem to tune, and the sizes for which its configs are timed."""

    problem: Any
    sizes: list[dict[str, int]]  # one per shape, the least work first

    def __str__(self) -> str:
        return f"{self.problem.spec.name_of(self.problem)}: {describe(self.problem, {})}"

    def cost(self, sizes: dict[str, int]) -> int:
        """Bytes plus FLOPs, to sort sizes by their work."""
        launch_work = self.problem.spec.work(self.problem, sizes)
        return launch_work.bytes + launch_work.flops


def add_arguments(parser: argparse.ArgumentParser) -> None:
    call_arguments.add_arguments(parser, "+")
    candidates_help = "maximum number of candidates per problem (64)"
    parser.add_argument("--candidates", type=positive, default=64, metavar="N", help=candidates_help)


def begin(args: argparse.Namespace) -> None:
    for shape in shapes_of(args):
        call_arguments.shape_of(
            argparse.Namespace(**vars(args), shape=shape), call_arguments.CALLS[args.op][0], call_arguments.DRY
        )
    if not call_arguments.has_gpu():
        raise CommandError("there is no GPU here to measure on")


def shapes_of(args: argparse.Namespace) -> list[str]:
    return list(dict.fromkeys(shape for words in args.shapes for shape in words.split(",") if shape))


def run(args: argparse.Namespace) -> int:
    import torch

    try:
        toolchain.find()
    except UnsupportedError as error:
        raise CommandError(str(error)) from None
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = gpu_of(device.index)
    return tune(plan(args, gpu), gpu, args.candidates, device)


def plan(args: argparse.Namespace, gpu: Gpu) -> list[Problem]:
    """The tunable problems of all shapes. Raises CommandError for an invalid argument."""
    problems: dict[Any, Problem] = {}
    for shape in shapes_of(args):
        dry = call_arguments.dry_run_call(argparse.Namespace(**vars(args), shape=shape), gpu)
        if dry.portable is not None:
            raise CommandError(f"there is nothing to tune: {dry.portable}")
        largest: dict[Any, dict[str, int]] = {}  # the largest sizes of each problem for this shape
        for step in dry.steps:
            if step.choice is None or not step.problem.spec.is_tunable or step.work.depends_on_data:
                continue
            problem = problems.setdefault(step.problem, Problem(step.problem, []))
            largest[step.problem] = max(largest.get(step.problem, step.sizes), step.sizes, key=problem.cost)
        for key, sizes in largest.items():
            problem = problems[key]
            if sizes not in problem.sizes:
                problem.sizes.append(sizes)
                problem.sizes.sort(key=problem.cost)
    if not problems:
        raise CommandError(f"there is nothing to tune: {args.op} runs no quackish GEMM on {gpu.name}")
    return list(problems.values())


def tune(
    problems: Sequence[Problem], gpu: Gpu, max_candidates: int, device: "torch.device",
    examine: Callable | None = None, search_for: Callable[..., "search.Outcome"] | None = None,
) -> int:  # fmt: skip
    """Tunes problems one by one and stores the results. Returns the exit status."""
    from quackish.tune import cases, search

    examine, search_for = examine or search.examine, search_for or search.search
    if why := why_no_output(tuned.path().parent):
        raise CommandError(f"{tuned.path()} cannot be written: {why}; QUACKISH_CONFIG_DIR names another folder")
    failed = 0
    for problem in problems:
        configs = candidates(problem.problem, gpu, max_candidates)
        unforced = choose.unforced(problem.problem, gpu).config  # may be further from the analytical choice
        base, *others = configs + [unforced] * (unforced not in configs)
        unspilled = _without_spills(problem, others, gpu, examine)
        print(fill(str(problem), indent="    "))
        print(f"  {len(others)} candidates, {len(unspilled)} without spilled registers", flush=True)
        shapes = [functools.partial(cases.prepare, problem.problem, gpu, sizes, device) for sizes in problem.sizes]
        try:
            show = progress(search.num_steps(len(shapes)), "steps")
            outcome = search_for([base, *unspilled], shapes, device, show=show)
        except RuntimeError as error:  # such as out of memory; other problems may still work
            failed += 1
            print(f"  failed: {type(error).__name__}: {error}\n", file=sys.stderr)
            continue
        _store(problem, outcome, gpu)
    choose.reload()
    return 1 if failed else 0


def _without_spills(problem: Problem, configs: Sequence[Any], gpu: Gpu, examine: Callable) -> list[Any]:
    """The configs whose kernels do not spill registers. `examine` compiles them."""
    unspilled, show = [], progress(len(configs), "candidates")
    try:
        for i, (config, fits) in enumerate(zip(configs, examine(problem.problem, configs, gpu), strict=True), 1):
            unspilled += [config] * fits
            show(i, "compiling candidates")
    except FileNotFoundError as error:
        raise CommandError(f"spilled registers cannot be detected: {error}") from error
    return unspilled


def _store(problem: Problem, outcome: "search.Outcome", gpu: Gpu) -> None:
    """Prints the outcome and writes the best config into the table."""
    for config, why in outcome.dropped:
        print(fill(f"dropped: {config}: {why}", "  ", "    "))
    rows: list[str | list[str]] = []
    for sizes, analytical, best in zip(problem.sizes, outcome.analytical_us, outcome.us, strict=True):
        rows += [fill(describe(None, sizes), "  "), [f"{analytical:.1f}", f"{best:.1f}", f"{analytical / best:.3f}"]]
    print(text_table(["  analytical us", "best us", "gain"], rows, "rrr"))
    gain = f"{100 * (outcome.gain - 1):.1f} % faster than the analytical choice"
    shapes, noise = ", ".join(describe(None, sizes) for sizes in problem.sizes), f"noise {100 * outcome.noise:.1f} %"
    measured = f"{gain} at {shapes} ({time.strftime('%Y-%m-%d')}, {noise})"
    row = tuned.make_row(problem.problem, gpu, outcome.config, measured)
    try:
        if outcome.why:
            removed = tuned.put(row, keep=False)
            print(fill(f"The analytical choice stays: {outcome.why}.{' Its row is removed.' * removed}", "  ") + "\n")
        else:
            print(fill(_changes(outcome.config, choose.analytical(problem.problem, gpu).config), "  ", "    "))
            print(fill(f"{gain}, {noise}.", "  "))
            tuned.put(row)
            print(fill(f"Written to {tuned.path()}.", "  ") + "\n")
    except OSError as error:
        raise CommandError(
            f"{tuned.path()} cannot be written: {error.strerror}; `with quackish.config(...)` forces it"
        ) from error


def _changes(config: Any, base: Any) -> str:
    """The fields that differ from the analytical choice."""
    return " ".join(f"{name}={value}" for name, value in vars(config).items() if value != getattr(base, name))
