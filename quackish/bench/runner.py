"""A whole run: what is already known, progress, and the rows in the CSV as they come."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench import report, schema
from quackish.bench.cells import Cell, Job
from quackish.bench.console import console, end_on_sigterm, progress
from quackish.bench.measured import AGAIN, Measured
from quackish.bench.operations import PACKAGES, Operation, missing_package
from quackish.bench.schema import CsvLog, Row
from quackish.bench.supervisor import Supervisor

INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class Settings:
    op: Operation
    path: Path  # the CSV
    page: report.Page = report.BENCH
    columns: Sequence[str] = tuple(schema.COLUMNS)
    also: Path | None = None  # a file with providers of the user's
    append: bool = False  # keep the rows in the CSV
    resume: bool = False  # and do not measure again what they have
    keep: bool = False  # else keep a former CSV as .previous.csv
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of Run, and quackish's backend


def run(
    settings: Settings,
    jobs_of: Callable[[Sequence[str]], Sequence[Job]],
    supervisor: Supervisor | None = None,
    line: Callable[[Operation, Job, Sequence[tuple[str, Measured]]], str] | None = None,
) -> Path:
    """Measures the jobs for the names of the user's providers; writes the CSV, the page and the figures beside it.

    Whatever ends the run, SIGTERM too, what was measured is kept and reported. Returns the CSV's path; ValueError for a
    CSV that cannot be appended to, or if no provider is installed.
    """
    path, op = settings.path, settings.op
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_sigterm())
        path.parent.mkdir(parents=True, exist_ok=True)
        log_path = path.with_suffix(".log")
        log_path.write_bytes(b"")
        stack.callback(lambda: log_path.stat().st_size or log_path.unlink())
        supervisor = supervisor or Supervisor(
            *(op.name, log_path, settings.also, settings.commit, settings.timeout, settings.options)
        )
        stack.callback(supervisor.close)
        ready = supervisor.start()
        jobs = installed(jobs_of(ready["own"]))
        append = settings.append or settings.resume
        known = schema.read_csv(path) if settings.resume and path.exists() else []
        log = _open(settings, append, ready["ready"], known)
        stack.callback(report.report, path, settings.page)
        todo = [job for job in jobs if not _is_known(job, known, ready["ready"], settings)]
        if len(todo) < len(jobs):
            console().print(f"{path} has {len(jobs) - len(todo)} of {len(jobs)} cells already.", soft_wrap=True)
        if todo:
            _measure(settings, supervisor, todo, log, line or _line)
    return path


def _measure(settings: Settings, supervisor: Supervisor, jobs: Sequence[Job], log: CsvLog, line: Callable) -> None:
    op, said, done = settings.op, set(), 0.0
    with progress(count=False) as bar:
        total = sum(op.seconds(job.cell) * (1 + len(job.providers)) for job in jobs)
        task = bar.add_task(op.title, total=total)
        for i, job in enumerate(jobs, 1):
            rows: list[tuple[str, Measured]] = []
            unfinished: dict[str, Measured] = {}
            seconds, steps = op.seconds(job.cell), [*job.providers, "timing"]

            def at(step: str, i=i, job=job, steps=steps, done=done, seconds=seconds) -> None:
                bar.update(task, description=f"{i}/{len(jobs)} {job.cell}: {step}")
                if step in steps:
                    bar.update(task, completed=done + seconds * steps.index(step))

            def write(name: str, found: Measured, job=job, rows=rows) -> None:
                log.write([schema.row_of(job, name, found, log.columns, settings.options.get("rounds", 0))])
                rows.append((name, found))
                failure = f"{name}: {found.status}"
                if found.status != "ok" and failure not in said:
                    said.add(failure)
                    console().print(failure, style="yellow", markup=False, soft_wrap=True)

            try:
                for name, found in supervisor.measure(job, at, unfinished.__setitem__):
                    unfinished.pop(name, None)
                    write(name, found)
            except BaseException:
                for name, found in unfinished.items():
                    status = "ok" if found.times else f"{INTERRUPTED} before it was timed"
                    note = ", ".join(filter(None, (found.note, INTERRUPTED if found.times else "")))
                    write(name, dataclasses.replace(found, status=status, note=note))
                raise
            console().print(line(op, job, rows), markup=False, soft_wrap=True)
            done += seconds * len(steps)
            bar.update(task, completed=done)


def _line(op: Operation, job: Job, rows: Sequence[tuple[str, Measured]]) -> str:
    """One cell in a line, the fastest first: time, time over the roof's, peak."""
    unit = "us" if job.cell.direction == "host" else op.unit
    timed = sorted(((n, f) for n, f in rows if f.times and n != AGAIN), key=lambda row: row[1].times.median)

    def shown(name: str, found: Measured) -> str:
        ratio = f" = {found.times.median / found.roof.median:.3f}" if found.roof else ""
        peak = f" {found.peak_bytes / 1e9:.2f} GB" if found.peak_bytes and unit == "ms" else ""
        return f"{name} {found.times.median * {'us': 1, 'ms': 1e-3}[unit]:.4g}{ratio}{peak}"

    return f"{job.cell} | {unit}: {', '.join(shown(*row) for row in timed) or 'nothing measured'}"


def _open(settings: Settings, append: bool, origin: Row, known: Sequence[Row]) -> CsvLog:
    path = settings.path
    if path.exists() and settings.keep and not append:
        former = path.replace(path.with_suffix(".previous.csv"))
        console().print(f"The former result is now {former}.", markup=False, soft_wrap=True)
    log = CsvLog(path, settings.columns, origin, append)
    if others := {row["gpu"] for row in known} - {origin["gpu"]}:
        raise ValueError(f"--resume: {path} is of {', '.join(others)}, this is {origin['gpu']}; give another --out")
    return log


def installed(jobs: Sequence[Job], packages: Mapping[str, str] = PACKAGES) -> list[Job]:
    """The jobs without the providers whose package is missing, which are named."""
    missing = {name: missing_package(name, packages) for job in jobs for name in job.providers}
    for package in sorted({package for package in missing.values() if package}):
        these = ", ".join(name for name in missing if missing[name] == package)
        console().print(f"without {these}: {package} is not installed", markup=False, soft_wrap=True)
    if all(missing.values()):
        raise ValueError(f"--providers {' '.join(missing)}: none of them is installed")
    left = [dataclasses.replace(j, providers=tuple(n for n in j.providers if not missing[n])) for j in jobs]
    return [job for job in left if job.providers]


def _is_known(job: Job, known: Sequence[Row], origin: Row, settings: Settings) -> bool:
    """Whether the file has a row of each provider for this cell, measured in the same circumstances."""
    here = {**origin, "rounds": str(settings.options.get("rounds", 0))}

    def counts(row: Row, cell: Cell) -> bool:
        whole = INTERRUPTED not in row["status"] + row.get("note", "")
        return whole and schema.cell_of(row) == cell and all(row[name] == here[name] for name in schema.SAME)

    return bool(known) and {r["provider"] for r in known if counts(r, job.cell)}.issuperset(job.providers)
