"""Linear cross entropy, forward + backward, beside every installed peer: time, memory and error against three GEMMs.

    python -m benchmarks.linear_cross_entropy                    # every shape that a bar is about
    python -m benchmarks.linear_cross_entropy --only 65536x4096x128256 --append   # one of these again
    python -m benchmarks.linear_cross_entropy --sweep --out FOLDER   # over M and over V; a run of its own
    python -m benchmarks.linear_cross_entropy --host --append    # what a call costs the host
    python -m benchmarks.linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*,quack" --repeats 5

Rows go to linear_cross_entropy.csv after each case; report_linear_cross_entropy.py makes the verdicts, the page and the
figures of them.
"""

import argparse
import dataclasses
import fnmatch
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness, report_linear_cross_entropy
from benchmarks.harness import BACKEND, console
from quackish.bench import providers_linear_cross_entropy as lce
from quackish.bench.console import progress
from quackish.bench.environment import ENVIRONMENT, environment
from quackish.bench.files import CsvLog
from quackish.bench.host import host_times, launch_times
from quackish.bench.measure_linear_cross_entropy import measure, try_out
from quackish.bench.measured import A_LAUNCH, OURS, Measured, Run, is_ours
from quackish.bench.providers_linear_cross_entropy import ALL, HOST, LEAN, LONG, MAIN, PROVIDERS, load
from quackish.bench.truth_linear_cross_entropy import Data

FIELDS = (
    *ENVIRONMENT,
    *("mode", "m", "h", "v", "data", "ignored", "provider", "status"),
    *("median_ms", "p20_ms", "p80_ms", "roof_ms", "of_roof", "peak_gb", "standing_mb", "first_s", "launches"),
    *("err_loss", "err_dx", "err_dw"),
)
DIRECTIONS = {"train": "forward+backward", "loss": "forward"}


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    h: int
    v: int
    mode: str = "train"  # forward + backward; "loss": no grad; "host": what the host needs to enqueue both
    data: str = "normal"
    ignored: float = 0.0  # share of rows
    providers: tuple[str, ...] = (*MAIN, f"{OURS}-chunked-4096", *LEAN)
    errors: bool = True

    def __str__(self) -> str:
        extra = [] if self.mode == "train" else [self.mode]
        extra += [] if self.data == "normal" else [self.data]
        extra += [f"{self.ignored:.0%} ignored"] if self.ignored else []
        return " ".join([f"{self.m} x {self.h} x {self.v}", *extra])


OURS_LEAN = (OURS, f"{OURS}-recompute", *LEAN)
CONFIDENT = (*(name for name in ALL if is_ours(name)), "quack", "quack-2048", "quack-base", "liger", "cce", "torch")

HEADLINE = Case(8192, 4096, 128256, providers=ALL)
LOSS = dataclasses.replace(HEADLINE, mode="loss", providers=lce.LOSS)
BARS = [
    HEADLINE,
    LOSS,
    Case(8192, 4096, 128256, ignored=0.8, providers=(*OURS_LEAN, "quack", "liger-cute-sm90", "cce", "torch")),
    Case(8192, 4096, 128256, data="confident", providers=CONFIDENT),
    Case(4096, 2048, 32000),
    Case(8192, 2048, 151936),
    Case(1024, 4096, 128256),
    Case(16384, 4096, 128256),
    Case(65536, 4096, 128256, providers=LONG),
]
SWEEP = [Case(m, 4096, 128256, errors=False) for m in (1024, 2048, 4096, 8192, 16384, 32768, 65536)]
SWEEP += [Case(8192, 4096, v, errors=False) for v in (32000, 64000, 151936, 202048, 256000)]
HOST_CASE = Case(128, 512, 1024, mode="host", providers=HOST, errors=False)
TINY = [  # without a GPU
    Case(48, 64, 300, providers=("quackish*", "torch")),
    Case(48, 64, 300, mode="loss", providers=(OURS, "torch")),
    Case(40, 64, 300, ignored=0.8, providers=(OURS, "torch")),
    Case(40, 64, 300, data="confident", providers=(OURS, "torch")),
]


def measure_case(case: Case, device: torch.device, args: argparse.Namespace, write: Callable[[dict], None]) -> None:
    """Writes the rows of one case: one of each provider and, where there is one, of the roof. Failures come first."""
    where = {name: getattr(case, name) for name in ("mode", "m", "h", "v", "data", "ignored")}
    run = Run(
        device,
        load=functools.partial(load, backend=args.backend),
        tell=lambda name, found: write({**where, "provider": name, **_columns(found)}),
        rounds=args.repeats,
    )
    data = Data.make(case.m, case.h, case.v, case.data, case.ignored, device)
    if case.mode != "host":
        measure(DIRECTIONS[case.mode], data, case.providers, run, errors=case.errors, seconds=args.seconds)
        return
    works, results = try_out(data, True, case.providers, run, errors=False)
    for name, times in host_times(works, device).items():
        run.tell(name, dataclasses.replace(results[name], times=times))
    if OURS in works and device.type == "cuda" and (times := launch_times(works[OURS], device)):
        run.tell(A_LAUNCH, Measured(times=times))


def _columns(found: Measured) -> dict[str, object]:
    columns: dict[str, object] = {"status": found.status, **found.errors}
    if found.first_s is not None:
        columns |= {"launches": found.launches or "", "first_s": found.first_s}
    if found.peak_bytes is not None:
        columns["peak_gb"] = found.peak_bytes / 1e9
    if found.standing_bytes is not None:
        columns["standing_mb"] = found.standing_bytes / 1e6
    if times := found.times:
        columns |= {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
        if found.roof:
            columns |= {"roof_ms": found.roof.median / 1e3, "of_roof": times.median / found.roof.median}
    return columns


def _line(case: Case, rows: Sequence[Mapping]) -> str:
    """One case in a line, for the log."""

    def cell(row: Mapping) -> str:
        if "median_ms" not in row:
            return f"{row['provider']} failed"
        ratio = f" = {row['of_roof']:.3f}" if "of_roof" in row else ""
        peak = f" {row['peak_gb']:.2f} GB" if "peak_gb" in row else ""
        return f"{row['provider']} {row['median_ms']:.4g}{ratio}{peak}"

    return f"{case!s:>22} | {', '.join(map(cell, sorted(rows, key=lambda row: row.get('median_ms', math.inf))))}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear_cross_entropy", description=__doc__.split("\n")[0]
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shapes", type=_shapes, metavar="MxHxV[,...]", help="own shapes instead of the bars'")
    what.add_argument("--sweep", action="store_true", help="over M and over V instead; no errors")
    what.add_argument("--host", action="store_true", help="host time of a call instead")
    only = "of the bars' or the sweep's shapes these alone, with the providers they have there"
    parser.add_argument("--only", type=_shapes, metavar="MxHxV[,...]", help=only)
    parser.add_argument("--mode", choices=("train", "loss", "host"), default="train", help="own shapes: %(default)s")
    parser.add_argument("--data", choices=("normal", "confident"), default="normal", help="own shapes: %(default)s")
    parser.add_argument("--ignored", type=float, default=0.0, help="own shapes: share of rows; %(default)s")
    parser.add_argument("--no-errors", action="store_true", help="without the comparison with fp64")
    names = f"names or patterns, of {', '.join(PROVIDERS)}; what a case measures by itself where not given"
    parser.add_argument("--providers", type=_providers, metavar="NAME[,...]", help=names)
    sizes = "also measure quackish-chunked by chunks of so many rows"
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[], metavar="ROWS", help=sizes)
    backends = ("cute", "auto", "reference")
    parser.add_argument("--backend", choices=backends, default=BACKEND, help="quackish's; default %(default)s")
    parser.add_argument("--repeats", type=int, default=10, help="samples of each at most; default %(default)s")
    seconds = "after 5 samples, no more than fit in this for each; default %(default)s"
    parser.add_argument("--seconds", type=float, default=0.8, help=seconds)
    parser.add_argument("--append", action="store_true", help="keep the rows that the file has; newer ones count")
    parser.add_argument("--out", type=Path, help="folder of the results; default benchmarks/results/<GPU>")
    parser.add_argument("--commit", help="recorded where there is no git to ask")
    return parser


def _shapes(text: str) -> list[tuple[int, int, int]]:
    shapes = [tuple(map(int, shape.split("x"))) for shape in text.split(",")]
    if any(len(shape) != 3 for shape in shapes):
        raise ValueError(text)
    return shapes


def _providers(text: str) -> tuple[str, ...]:
    patterns = text.split(",")
    if wrong := [p for p in patterns if not fnmatch.filter(PROVIDERS, p)]:
        raise argparse.ArgumentTypeError(f"no provider is named {', '.join(wrong)}")
    return _matching(patterns)


def _matching(patterns: Sequence[str]) -> tuple[str, ...]:
    """In PROVIDERS' order, ours first."""
    return tuple(name for name in PROVIDERS if any(fnmatch.fnmatchcase(name, p) for p in patterns))


def cases_of(args: argparse.Namespace, device: torch.device) -> list[Case]:
    if args.shapes:
        cases = [Case(*shape, args.mode, args.data, args.ignored, ALL) for shape in args.shapes]
    elif args.host:
        cases = [HOST_CASE]
    elif device.type == "cpu":
        cases = TINY
    else:
        cases = SWEEP if args.sweep else BARS
    if args.only:
        cases = [case for case in cases if (case.m, case.h, case.v) in args.only]
    chunked = tuple(f"{OURS}-chunked-{rows}" for rows in args.chunk_sizes)
    return [
        dataclasses.replace(
            case,
            providers=(*chunked, *(args.providers or _matching(case.providers))),
            errors=case.errors and case.mode != "host" and not args.no_errors,
        )
        for case in cases
    ]


def main(argv: Sequence[str] | None = None) -> Path:
    """Returns the CSV file."""
    parser = arguments()
    args = parser.parse_args(argv)
    device = harness.device_to_measure()
    cases = cases_of(args, device)
    if not cases:
        shapes = ",".join("x".join(map(str, shape)) for shape in args.only)
        parser.error(f"--only {shapes}: none of the shapes that are measured; --shapes measures any")
    path = (args.out or harness.results_dir(device)) / "linear_cross_entropy.csv"
    log = CsvLog(path, FIELDS, environment(device, args.commit), args.append)
    said = set()

    def write(row: dict) -> None:
        log.write([row])
        rows.append(row)
        failure = f"{row['provider']}: {row['status']}"
        if row["status"] != "ok" and failure not in said:
            said.add(failure)
            console.print(failure, markup=False, soft_wrap=True)

    try:
        with progress() as bar:
            task = bar.add_task("LCE", total=len(cases))
            for case in cases:
                bar.update(task, description=f"LCE {case}")
                rows, start = [], time.monotonic()
                measure_case(case, device, args, write)
                took = time.monotonic() - start
                console.print(f"{_line(case, rows)} | {took:.0f} s", markup=False, soft_wrap=True)
                bar.advance(task)
    finally:  # what was measured is reported, whatever ended the run
        report_linear_cross_entropy.report(path)
    console.print(f"{path} and, beside it, .md, .svg, .png", markup=False, soft_wrap=True)
    return path


if __name__ == "__main__":
    main()
