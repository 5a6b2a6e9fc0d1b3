"""Linear cross entropy, forward + backward, beside every installed peer: time, memory and error against three GEMMs.

    python -m benchmarks.linear_cross_entropy                    # every shape that a bar is about
    python -m benchmarks.linear_cross_entropy --sweep --out FOLDER   # over M and over V; a run of its own
    python -m benchmarks.linear_cross_entropy --host --append    # what a call costs the host
    python -m benchmarks.linear_cross_entropy --shapes 8192x4096x128256 --providers "quackish*,quack" --repeats 5

Rows go to linear_cross_entropy.csv after each case; report_linear_cross_entropy.py makes the verdicts, the page and the
figures of them.
"""

import argparse
import dataclasses
import fnmatch
import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from benchmarks import harness, report_linear_cross_entropy
from benchmarks.harness import console
from benchmarks.providers_linear_cross_entropy import ALL, BACKEND, HOST, MAIN, OURS, PROVIDERS, load
from benchmarks.report_linear_cross_entropy import AGAIN, NONE_IGNORED, THREE_GEMMS
from benchmarks.truth_linear_cross_entropy import Data, Truth, dlogits_of
from quackish import launch
from quackish.testing.timing import Times, take_turns

FIELDS = (
    *harness.ENVIRONMENT,
    *("mode", "m", "h", "v", "data", "ignored", "provider", "status"),
    *("median_ms", "p20_ms", "p80_ms", "roof_ms", "of_roof", "peak_gb", "first_s", "launches"),
    *("err_loss", "err_dx", "err_dw"),
)
ROOFS = {"train": THREE_GEMMS, "loss": "gemm-logits"}


@dataclasses.dataclass(frozen=True)
class Case:
    m: int
    h: int
    v: int
    mode: str = "train"  # forward + backward; "loss": no grad; "host": what the host needs to enqueue both
    data: str = "normal"
    ignored: float = 0.0  # share of rows
    providers: tuple[str, ...] = MAIN
    errors: bool = True

    def __str__(self) -> str:
        extra = [] if self.mode == "train" else [self.mode]
        extra += [] if self.data == "normal" else [self.data]
        extra += [f"{self.ignored:.0%} ignored"] if self.ignored else []
        return " ".join([f"{self.m} x {self.h} x {self.v}", *extra])

    @property
    def roof(self) -> str | None:
        return NONE_IGNORED if self.ignored else ROOFS.get(self.mode)


HEADLINE = Case(8192, 4096, 128256, providers=ALL)
LOSS = dataclasses.replace(HEADLINE, mode="loss", providers=(OURS, "quack", "quack-base", "cce", "torch"))
BARS = [
    HEADLINE,
    LOSS,
    Case(8192, 4096, 128256, ignored=0.8, providers=(OURS, "quack", "liger-cute-sm90", "cce", "torch")),
    Case(8192, 4096, 128256, data="confident", providers=(f"{OURS}*", "quack", "quack-base", "cce", "torch")),
    Case(4096, 2048, 32000),
    Case(8192, 2048, 151936),
    Case(1024, 4096, 128256),
    Case(16384, 4096, 128256),
    Case(65536, 4096, 128256),
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


def measure(case: Case, device: torch.device, args: argparse.Namespace) -> Iterator[dict]:
    """The rows of one case: one of each provider and, where there is one, of the roof. Failures come first."""
    where = {name: getattr(case, name) for name in ("mode", "m", "h", "v", "data", "ignored")}
    data = Data.make(case.m, case.h, case.v, case.data, case.ignored, device)
    torch.mm(data.x.detach()[:8], data.w.detach()[:8].T)  # cuBLAS takes its workspace now, on nobody's account
    rows: dict[str, dict] = {}
    works: dict[str, Callable[[], object]] = {}
    failed: list[dict] = []

    def on_error(name: str, error: Exception) -> None:
        status = harness.failure(error)
        failed.append({**where, "provider": name, "status": status})
        rows.pop(name, None)
        works.pop(name, None)

    try:
        truth = Truth(data) if case.errors else None
    except torch.cuda.OutOfMemoryError as error:
        truth = None
        on_error("truth", error)
    for name in case.providers:
        try:
            works[name] = _step(load(name, args.backend), data, case.mode)
            rows[name] = _try_out(works[name], data, truth, device)
        except Exception as error:  # a peer that is broken here must not stop the others
            on_error(name, error)
        _release(data, device)
        yield from failed
        failed.clear()

    works |= _more_works(case, data, works, on_error, args.backend)
    if case.mode == "host":
        times = _host_times(works, device)
    else:
        times = take_turns(works, device, args.repeats, args.seconds, on_error=on_error)
    yield from failed
    roof = times.get(case.roof)
    for name in works:
        yield {**where, "provider": name, "status": "ok", **rows.get(name, {}), **_speed(times[name], roof)}
    works.clear()
    _release(data, device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the next case asks for other sizes


def _step(loss: Callable, data: Data, mode: str, target: torch.Tensor | None = None) -> Callable[[], torch.Tensor]:
    """The work that is measured; the gradients end in `data`."""
    target = data.target if target is None else target

    def train():
        data.clear_grads()
        value = loss(data.x, data.w, target)
        value.backward()
        return value.detach()

    def loss_only():
        with torch.no_grad():
            return loss(data.x.detach(), data.w.detach(), target)

    return loss_only if mode == "loss" else train


def _try_out(work: Callable, data: Data, truth: Truth | None, device: torch.device) -> dict[str, object]:
    """A first call, which compiles; of a second one errors and peak memory, what the first left behind included."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    seconds = []
    for _ in range(2):
        data.clear_grads()
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        launches, start = launch.counters.launches, time.perf_counter()
        value = work()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    row: dict[str, object] = {"launches": (launch.counters.launches - launches) or "", "first_s": seconds[0]}
    if cuda:
        row["peak_gb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e9
    return row if truth is None else row | truth.errors(value, data.x.grad, data.w.grad)


def _release(data: Data, device: torch.device) -> None:
    """What a failed call may still hold is let go; the allocator keeps its blocks for the next one."""
    data.clear_grads()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises where the CUDA context is lost: the run ends here


def _more_works(
    case: Case, data: Data, works: Mapping[str, Callable], on_error: Callable[[str, Exception], None], backend: str
) -> dict[str, Callable[[], object]]:
    """What is measured beside the providers: ours once more, for the noise, and the roof."""
    more: dict[str, Callable[[], object]] = {}
    if case.mode == "host":
        return more
    if OURS in works:
        more[AGAIN] = works[OURS]
        if case.ignored:
            more[NONE_IGNORED] = _step(load(OURS, backend), data, case.mode, data.all_targets)
    if not case.ignored:
        try:
            more |= _gemms(data, case.mode)
        except torch.cuda.OutOfMemoryError as error:
            on_error(case.roof, error)
    return more


def _gemms(data: Data, mode: str) -> dict[str, Callable[[], object]]:
    """The bare GEMMs on the same data, by torch.mm; each alone, and the three in a row."""
    x, w = data.x.detach(), data.w.detach()
    if mode == "loss":
        logits = x.new_empty(x.shape[0], w.shape[0])
        return {"gemm-logits": lambda: torch.mm(x, w.T, out=logits)}
    dlogits = dlogits_of(data)
    logits, dx, dw = (torch.empty_like(t) for t in (dlogits, x, w))
    gemms = {
        "gemm-logits": lambda: torch.mm(x, w.T, out=logits),
        "gemm-dx": lambda: torch.mm(dlogits, w, out=dx),
        "gemm-dw": lambda: torch.mm(dlogits.T, x, out=dw),
    }
    calls = tuple(gemms.values())
    return {THREE_GEMMS: lambda: [gemm() for gemm in calls], **gemms}


def _host_times(works: Mapping[str, Callable], device: torch.device, repeats: int = 100) -> dict[str, Times]:
    """Microseconds until all is enqueued, the GPU never being waited for; in turns."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    gc.collect()
    gc.disable()  # a collection in the middle would be the slowest part
    try:
        for i in range(repeats + 5):
            for name, work in works.items():
                start = time.perf_counter()
                work()
                if i >= 5:
                    samples[name].append(1e6 * (time.perf_counter() - start))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
    finally:
        gc.enable()
    return {name: Times.of(times) for name, times in samples.items()}


def _speed(times: Times, roof: Times | None) -> dict[str, float]:
    columns = {"median_ms": times.median / 1e3, "p20_ms": times.p20 / 1e3, "p80_ms": times.p80 / 1e3}
    if roof:
        columns |= {"roof_ms": roof.median / 1e3, "of_roof": times.median / roof.median}
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
    seconds = "after 3 samples, no more than fit in this for each; default %(default)s"
    parser.add_argument("--seconds", type=float, default=0.4, help=seconds)
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
    args = arguments().parse_args(argv)
    device = harness.device_to_measure()
    cases = cases_of(args, device)
    path = (args.out or harness.results_dir(device)) / "linear_cross_entropy.csv"
    log = harness.CsvLog(path, FIELDS, harness.environment(device, args.commit), args.append)
    said = set()
    try:
        with harness.progress() as bar:
            task = bar.add_task("LCE", total=len(cases))
            for case in cases:
                bar.update(task, description=f"LCE {case}")
                rows, start = [], time.monotonic()
                for row in measure(case, device, args):
                    log.write([row])
                    rows.append(row)
                    failure = f"{row['provider']}: {row['status']}"
                    if row["status"] != "ok" and failure not in said:
                        said.add(failure)
                        console.print(failure, markup=False, soft_wrap=True)
                took = time.monotonic() - start
                console.print(f"{_line(case, rows)} | {took:.0f} s", markup=False, soft_wrap=True)
                bar.advance(task)
    finally:  # what was measured is reported, whatever ended the run
        report_linear_cross_entropy.report(path)
    console.print(f"{path} and, beside it, .md, .svg, .png", markup=False, soft_wrap=True)
    return path


if __name__ == "__main__":
    main()
