"""Runs all jobs of an operation: prints progress, and writes rows to the CSV as cells are measured."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench import report
from quackish.bench.cells import AGAIN, Job
from quackish.bench.measure import Record
from quackish.bench.processes import Supervisor
from quackish.bench.results import CsvLog, read_rows, row_of, scale_of
from quackish.bench.table import NOT_PROVIDERS
from quackish.cli.console import progress
from quackish.cli.interrupt import end_on_sigterm
from quackish.text import fill, significant

INTERRUPTED = "interrupted"


def run(
    jobs: Sequence[Job],
    path: Path,
    page: report.Page = report.BENCH,
    append: bool = False,
    commit: str | None = None,
    timeout: float = 600.0,
    **options: Any,
) -> bool:
    """Measures jobs of one operation; writes the CSV `path`, and a page and figures next to it.

    Returns True if a provider was measured. An existing CSV is replaced only at the end of a run that measured one:
    until then, and if the run fails or is interrupted, by SIGTERM too, the rows are in a file next to it. Without an
    existing CSV, the rows so far are kept in `path` and reported.

    `append` keeps the rows of the CSV; ValueError if it is not a results file. `options` are fields of Run.
    """
    log, measured, keeps = path.with_suffix(".log"), False, path.exists()
    earlier = read_rows(path) if keeps and append else []
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _new_file(path) if keeps else path
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_sigterm())
        log.write_bytes(b"")
        stack.callback(lambda: log.stat().st_size or log.unlink())
        supervisor = Supervisor(log, commit, timeout, options)
        stack.callback(supervisor.close)
        rows = None
        try:
            rows = CsvLog(file, supervisor.start())
            measured = _measure(jobs, supervisor, rows)
        finally:
            if rows is not None:
                rows.close()
            if rows is not None and (measured or not keeps):
                if earlier:
                    CsvLog(file, {}, [*earlier, *read_rows(file)]).close()
                os.replace(file, path)
                report.report(path, page)
            elif rows is not None and rows.count:
                print(fill(f"{path} is unchanged; the rows of this run are in {file}", indent="  "), flush=True)
            elif keeps:
                file.unlink()
    return measured


def _new_file(path: Path) -> Path:
    """A new empty file next to `path`, which no other run uses, with the same permissions."""
    handle, name = tempfile.mkstemp(path.suffix, f"{path.stem}.partial", path.parent)
    os.close(handle)
    shutil.copymode(path, name)
    return Path(name)


def _measure(jobs: Sequence[Job], supervisor: Supervisor, log: CsvLog) -> bool:
    """Returns True if a provider was measured."""
    measured, show = False, progress(len(jobs), "cells")
    for i, job in enumerate(jobs):

        def begin(step: str, i=i, cell=job.cell) -> None:
            show(i, f"{cell}: {step}")

        records: dict[str, Record] = {}
        try:
            for name, record in supervisor.measure(job, begin):
                records[name] = record
        except BaseException:
            records = {name: _interrupted(record) for name, record in records.items()}
            raise
        finally:
            log.write(row_of(job, name, record) for name, record in records.items())
        measured |= any("median_ms" in record and name not in NOT_PROVIDERS for name, record in records.items())
        print(_lines(job, records), flush=True)
    return measured


def _interrupted(record: Record) -> Record:
    """Marks a record of a cell in which the run was interrupted."""
    if record["status"] != "ok":
        return record
    if "median_ms" not in record:
        return record | {"status": f"{INTERRUPTED} before it was timed"}
    return record | {"note": ", ".join(filter(None, (record.get("note"), INTERRUPTED)))}


def _lines(job: Job, records: Mapping[str, Record]) -> str:
    """The cell, its times, the fastest first, with their ratios to the roof, and the providers that failed."""
    scale, unit = scale_of(job.cell)
    timed = {name: record for name, record in records.items() if "median_ms" in record and name != AGAIN}

    def shown(name: str) -> str:
        ms, roof = timed[name]["median_ms"], timed[name].get("roof_ms")
        return f"{name} {significant(scale * ms)}" + (f" = {ms / roof:.3f}" if roof else "")

    fastest_first = sorted(timed, key=lambda name: timed[name]["median_ms"])
    times = f"{unit}: {', '.join(map(shown, fastest_first)) or 'nothing measured'}"
    failed = [fill(f"{name}: {r['status']}", "  ", "    ") for name, r in records.items() if r["status"] != "ok"]
    return "\n".join([fill(f"{job.cell} | {times}", indent="    "), *failed])
