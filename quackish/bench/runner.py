"""A whole run: which cells, by whom, what is already known, progress, and the rows in the CSV as they come."""

import contextlib
import dataclasses
import fnmatch
from collections.abc import Sequence
from pathlib import Path

import torch

from quackish.bench import report, schema
from quackish.bench.cells import Cell, shape_name
from quackish.bench.console import NO_GPU, console, progress
from quackish.bench.files import CsvLog, read_csv
from quackish.bench.measured import AGAIN, Measured, is_ours
from quackish.bench.operations import Operation, missing_package
from quackish.bench.shapes import Shapes, small
from quackish.bench.supervisor import Supervisor
from quackish.errors import did_you_mean

Plan = dict[Cell, list[str]]  # who is measured in each cell


@dataclasses.dataclass(frozen=True)
class Settings:
    op: Operation
    shapes: Shapes
    dtypes: tuple[str, ...] = ("bfloat16",)
    directions: tuple[str, ...] = ()  # of op.directions' values
    providers: tuple[str, ...] = ()  # patterns; the main ones where there are none
    also: Path | None = None  # a file with providers of the user's
    rounds: int = 10
    out: Path = Path("out/bench")  # a folder
    resume: bool = False
    commit: str | None = None
    timeout: float = 600.0


def run(settings: Settings) -> Path:
    """Measures, writes the CSV, the page and the figures, and returns the CSV's path.

    ValueError for patterns that match no provider, and for a CSV of other columns to be resumed.
    """
    op, gpu = settings.op, torch.cuda.is_available()
    shapes = settings.shapes
    if not gpu:
        console().print(NO_GPU)
        shapes = small(op, shapes)
        if shapes != settings.shapes:
            console().print(f"Shapes are cut to {', '.join(map(shape_name, shapes))}.")
    cells = [Cell(op.name, s, dtype, d) for dtype in settings.dtypes for s in shapes for d in settings.directions]
    with contextlib.ExitStack() as stack:
        path = settings.out / f"{op.name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".log").write_bytes(b"")
        supervisor = Supervisor(op.name, path.with_suffix(".log"), settings.also, settings.commit, settings.timeout)
        stack.callback(supervisor.close)
        ready = supervisor.start()
        names = _providers(settings, ready["own"], gpu)
        known = read_csv(path) if settings.resume and path.exists() else []
        log = _open(path, ready["ready"], settings, known)
        stack.callback(report.report, op, path)  # what was measured is reported, whatever ended the run
        plan = {cell: names[cell.direction] for cell in cells}
        todo = {cell: of for cell, of in plan.items() if not _is_known(cell, of, known, ready["ready"], settings)}
        if len(todo) < len(plan):
            console().print(f"{path} has {len(plan) - len(todo)} of {len(plan)} cells already.", soft_wrap=True)
        if todo:
            _measure(settings, supervisor, todo, shapes, log)
    return path


def _measure(settings: Settings, supervisor: Supervisor, plan: Plan, shapes: Shapes, log: CsvLog) -> None:
    op, said, done = settings.op, set(), 0.0
    with progress(count=False) as bar:
        total = sum(op.seconds(cell) * (1 + len(names)) for cell, names in plan.items())
        task = bar.add_task(op.title, total=total)
        for i, (cell, names) in enumerate(plan.items(), 1):
            rows, steps = [], [*names, "timing"]

            def at(step: str, i=i, cell=cell, steps=steps, done=done) -> None:
                bar.update(task, description=f"{i}/{len(plan)} {cell}: {step}")
                if step in steps:
                    bar.update(task, completed=done + op.seconds(cell) * steps.index(step))

            for name, found in supervisor.measure(cell, names, settings.rounds, at):
                row = schema.row_of(op, cell, name, found, models=shapes[cell.shape], rounds=settings.rounds)
                log.write([row])
                rows.append((name, found))
                failure = f"{name}: {found.status}"
                if found.status != "ok" and failure not in said:
                    said.add(failure)
                    console().print(failure, style="yellow", markup=False, soft_wrap=True)
            console().print(_line(op, cell, rows), markup=False, soft_wrap=True)
            done += op.seconds(cell) * len(steps)
            bar.update(task, completed=done)


def _line(op: Operation, cell: Cell, rows: Sequence[tuple[str, Measured]]) -> str:
    """One cell in a line, the fastest first."""
    scale = {"us": 1, "ms": 1e-3}[op.unit]
    times = {name: found.times.median * scale for name, found in rows if found.times and name != AGAIN}
    shown = (f"{name} {times[name]:.4g}" for name in sorted(times, key=times.__getitem__))
    return f"{cell} | {op.unit}: {', '.join(shown) or 'nothing measured'}"


def _open(path: Path, origin: dict[str, str], settings: Settings, known: Sequence[dict[str, str]]) -> CsvLog:
    """A former result that is not resumed is kept, as .previous.csv."""
    if path.exists() and not settings.resume:
        former = path.replace(path.with_suffix(".previous.csv"))
        console().print(f"The former result is now {former}.", markup=False, soft_wrap=True)
    log = CsvLog(path, tuple(schema.COLUMNS), origin, append=settings.resume)
    if others := {row["gpu"] for row in known} - {origin["gpu"]}:
        raise ValueError(f"--resume: {path} is of {', '.join(others)}, this is {origin['gpu']}; give another --out")
    return log


def _providers(settings: Settings, own: Sequence[str], gpu: bool) -> dict[str, list[str]]:
    """By direction those that are asked for and installed, ours first; what is missing is told."""
    op = settings.op
    everyone = [*op.providers, *own]
    for pattern in settings.providers:
        if not fnmatch.filter(everyone, pattern):
            suggestion = did_you_mean(pattern, everyone)
            raise ValueError(f"--providers {pattern}: no such provider; there are {', '.join(everyone)}{suggestion}")

    def asked(name: str, direction: str) -> bool:
        if settings.providers:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in settings.providers)
        return name in own or (name in op.main[direction] and (gpu or is_ours(name) or name == "torch"))

    names = {d: [name for name in everyone if asked(name, d)] for d in settings.directions}
    missing = {name: missing_package(name) for of in names.values() for name in of}
    for package in sorted({package for package in missing.values() if package}):
        these = ", ".join(name for name in missing if missing[name] == package)
        console().print(f"without {these}: {package} is not installed", markup=False, soft_wrap=True)
    if all(missing.values()):
        raise ValueError(f"--providers {' '.join(settings.providers)}: none of them is installed")
    return {d: [name for name in of if not missing[name]] for d, of in names.items()}


def _is_known(
    cell: Cell, names: Sequence[str], known: Sequence[dict[str, str]], origin: dict[str, str], settings: Settings
) -> bool:
    """Whether the file has a row of each provider for this cell, measured in the same circumstances."""
    here = {**origin, "rounds": str(settings.rounds)}
    found = {
        row["provider"]
        for row in known
        if schema.cell_of(row) == cell and all(row[name] == here[name] for name in schema.SAME)
    }
    return found.issuperset(names)
