"""A whole run: what is already known, progress, and the rows in the CSV as they come."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench import report
from quackish.bench.cells import AGAIN, Job
from quackish.bench.console import console, end_on_sigterm, progress
from quackish.bench.measured import Measured
from quackish.bench.operations import Operation
from quackish.bench.processes import Supervisor
from quackish.bench.results import COLUMNS, SAME, CsvLog, Row, cell_of, read_rows, row_of

INTERRUPTED = "interrupted"


@dataclasses.dataclass(frozen=True)
class Settings:
    op: Operation
    path: Path  # the CSV
    page: report.Page = report.BENCH
    columns: Sequence[str] = COLUMNS
    append: bool = False  # keep the rows in the CSV
    resume: bool = False  # and do not measure again what they have
    keep: bool = False  # else keep a former CSV as .previous.csv
    also: Path | None = None  # a file with providers of the user's
    commit: str | None = None
    timeout: float = 600.0
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of Run, and quackish's backend


def run(
    settings: Settings, jobs_of: Callable[[Sequence[str]], Sequence[Job]], supervisor: Supervisor | None = None
) -> Path:
    """Measures the jobs for the names of the user's providers; writes the CSV, the page and the figures beside it.

    Whatever ends the run, SIGTERM too, what was measured is kept and reported. Returns the CSV's path; ValueError for a
    CSV that cannot be appended to.
    """
    path = settings.path
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_sigterm())
        known = read_rows(path) if settings.resume and path.exists() else []
        if settings.also is None:
            jobs_of(())  # refuses at once what nobody knows
        path.parent.mkdir(parents=True, exist_ok=True)
        log = path.with_suffix(".log")
        log.write_bytes(b"")
        stack.callback(lambda: log.stat().st_size or log.unlink())
        how = (settings.also, settings.commit, settings.timeout, settings.options)
        supervisor = supervisor or Supervisor(settings.op.name, log, *how)
        stack.callback(supervisor.close)
        origin, own = supervisor.start()
        jobs = jobs_of(own)
        if others := {row["gpu"] for row in known} - {origin["gpu"]}:
            raise ValueError(f"--resume: {path} is of {', '.join(others)}, this is {origin['gpu']}; give another --out")
        if path.exists() and settings.keep and not (settings.append or settings.resume):
            former = path.replace(path.with_suffix(".previous.csv"))
            console().print(f"The former result is now {former}.", markup=False, soft_wrap=True)
        rows = CsvLog(path, settings.columns, origin, settings.append or settings.resume)
        stack.callback(report.report, path, settings.page)
        here = origin | {"rounds": str(settings.options.get("rounds", 0))}
        todo = [job for job in jobs if not _is_known(job, known, here)]
        if len(todo) < len(jobs):
            console().print(f"{path} has {len(jobs) - len(todo)} of {len(jobs)} cells already.", soft_wrap=True)
        _measure(settings, supervisor, todo, rows)
    return path


def _is_known(job: Job, known: Sequence[Row], here: Row) -> bool:
    """Whether the file has a row of each provider for this cell, measured in the same circumstances."""

    def counts(row: Row) -> bool:
        whole = INTERRUPTED not in row["status"] + row["note"]
        return whole and cell_of(row) == job.cell and all(row[name] == here[name] for name in SAME)

    return bool(known) and {row["provider"] for row in known if counts(row)}.issuperset(job.providers)


def _measure(settings: Settings, supervisor: Supervisor, jobs: Sequence[Job], log: CsvLog) -> None:
    said: set[str] = set()
    with progress() as bar:
        task = bar.add_task(settings.op.title, total=len(jobs))
        for i, job in enumerate(jobs):
            rows: dict[str, Measured] = {}
            unfinished: dict[str, Measured] = {}

            def at(step: str, i=i, cell=job.cell) -> None:
                bar.update(task, completed=i, description=f"[{i + 1}/{len(jobs)}] {cell}: {step}")

            def write(name: str, found: Measured, job=job, rows=rows) -> None:
                log.write([row_of(job, name, found, settings.options.get("rounds", 0))])
                rows[name] = found
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
            console().print(_line(settings.op, job, rows), markup=False, soft_wrap=True)
        bar.update(task, completed=len(jobs))


def _line(op: Operation, job: Job, rows: Mapping[str, Measured]) -> str:
    """One cell in a line, the fastest first: time, time over the roof's, peak."""
    unit = "us" if job.cell.direction == "host" else op.unit
    timed = sorted(((n, f) for n, f in rows.items() if f.times and n != AGAIN), key=lambda row: row[1].times.median)

    def shown(name: str, found: Measured) -> str:
        ratio = f" = {found.times.median / found.roof.median:.3f}" if found.roof else ""
        peak = f" {found.peak_bytes / 1e9:.2f} GB" if found.peak_bytes and unit == "ms" else ""
        return f"{name} {found.times.median * {'us': 1, 'ms': 1e-3}[unit]:.4g}{ratio}{peak}"

    return f"{job.cell} | {unit}: {', '.join(shown(*row) for row in timed) or 'nothing measured'}"
