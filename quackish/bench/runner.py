"""Runs all jobs of an operation: shows progress, and writes rows to the CSV as cells are measured."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench import report
from quackish.bench.cells import AGAIN, Job
from quackish.bench.console import end_on_sigterm, progress
from quackish.bench.measure import Record
from quackish.bench.processes import Supervisor
from quackish.bench.results import CsvLog, row_of, scale_of

INTERRUPTED = "interrupted"


def run(
    jobs: Sequence[Job],
    path: Path,
    page: report.Page = report.BENCH,
    append: bool = False,
    commit: str | None = None,
    timeout: float = 600.0,
    **options: Any,
) -> Path:
    """Measures jobs of one operation; writes the CSV `path`, and a page and figures next to it. Returns `path`.

    If the run is interrupted, by SIGTERM too, the results so far are kept and reported. `append` keeps the rows of the
    CSV; ValueError if it is not a results file. `options` are fields of Run.
    """
    log = path.with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_sigterm())
        log.write_bytes(b"")
        stack.callback(lambda: log.stat().st_size or log.unlink())
        supervisor = Supervisor(log, commit, timeout, options)
        stack.callback(supervisor.close)
        rows = CsvLog(path, supervisor.start(), append)
        stack.callback(report.report, path, page)
        _measure(jobs, supervisor, rows)
    return path


def _measure(jobs: Sequence[Job], supervisor: Supervisor, log: CsvLog) -> None:
    show = progress(len(jobs))
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
        print(_line(job, records), flush=True)
        for name, record in records.items():
            if record["status"] != "ok":
                print(f"  {name}: {record['status']}")


def _interrupted(record: Record) -> Record:
    if record["status"] != "ok":
        return record
    if "median_ms" not in record:
        return record | {"status": f"{INTERRUPTED} before it was timed"}
    return record | {"note": ", ".join(filter(None, (record.get("note"), INTERRUPTED)))}


def _line(job: Job, records: Mapping[str, Record]) -> str:
    """One line per cell, the fastest first: time, and its ratio to the roof."""
    scale, unit = scale_of(job.cell)
    timed = {name: record for name, record in records.items() if "median_ms" in record and name != AGAIN}

    def shown(name: str) -> str:
        ms, roof = timed[name]["median_ms"], timed[name].get("roof_ms")
        return f"{name} {scale * ms:.4g}" + (f" = {ms / roof:.3f}" if roof else "")

    fastest_first = sorted(timed, key=lambda name: timed[name]["median_ms"])
    return f"{job.cell} | {unit}: {', '.join(map(shown, fastest_first)) or 'nothing measured'}"
