"""A whole run: progress, and the rows in the CSV as cells are measured."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quackish.bench import report
from quackish.bench.cells import AGAIN, Job
from quackish.bench.console import end_on_sigterm, progress
from quackish.bench.measure import Found
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
    supervised_by: Callable[..., Supervisor] = Supervisor,
    **options: Any,
) -> Path:
    """Measures jobs of one operation; writes the CSV `path`, and the page and the figures beside it. Returns `path`.

    Whatever ends the run, SIGTERM too, what was measured is kept and reported. `append` keeps the rows in the CSV;
    ValueError for one that cannot be appended to. `options` are Run's.
    """
    log = path.with_suffix(".log")
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        stack.enter_context(end_on_sigterm())
        log.write_bytes(b"")
        stack.callback(lambda: log.stat().st_size or log.unlink())
        supervisor = supervised_by(log, commit, timeout, options)
        stack.callback(supervisor.close)
        rows = CsvLog(path, supervisor.start(), append)
        stack.callback(report.report, path, page)
        _measure(jobs, supervisor, rows)
    return path


def _measure(jobs: Sequence[Job], supervisor: Supervisor, log: CsvLog) -> None:
    with progress(len(jobs)) as show:
        for i, job in enumerate(jobs):

            def at(step: str, i=i, cell=job.cell) -> None:
                show(i, f"{cell}: {step}")

            found: dict[str, Found] = {}
            try:
                for name, known in supervisor.measure(job, at):
                    found[name] = known
            except BaseException:
                found = {name: _interrupted(known) for name, known in found.items()}
                raise
            finally:
                log.write(row_of(job, name, known) for name, known in found.items())
            print(_line(job, found), flush=True)
            for name, known in found.items():
                if known["status"] != "ok":
                    print(f"  {name}: {known['status']}")


def _interrupted(known: Found) -> Found:
    if known["status"] != "ok":
        return known
    if "median_ms" not in known:
        return known | {"status": f"{INTERRUPTED} before it was timed"}
    return known | {"note": ", ".join(filter(None, (known.get("note"), INTERRUPTED)))}


def _line(job: Job, found: Mapping[str, Found]) -> str:
    """One cell in a line, the fastest first: time, and time over the roof's."""
    scale, unit = scale_of(job.cell)
    timed = {name: known for name, known in found.items() if "median_ms" in known and name != AGAIN}

    def shown(name: str) -> str:
        ms, roof = timed[name]["median_ms"], timed[name].get("roof_ms")
        return f"{name} {scale * ms:.4g}" + (f" = {ms / roof:.3f}" if roof else "")

    fastest_first = sorted(timed, key=lambda name: timed[name]["median_ms"])
    return f"{job.cell} | {unit}: {', '.join(map(shown, fastest_first)) or 'nothing measured'}"
