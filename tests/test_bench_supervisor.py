"""Who is blamed when a worker dies: every provider gets one verdict, whatever the others do."""

import itertools
from pathlib import Path

import pytest

from quackish.bench import supervisor
from quackish.bench.cells import Cell
from quackish.bench.measured import Measured
from quackish.bench.supervisor import Supervisor, WorkerDied
from quackish.testing.timing import Times

CELL = Cell("rms_norm", (8, 32), "bfloat16", "backward")
OK = Measured(times=Times(1.0, 1.0, 1.0)).as_dict()
FAILED = Measured(status="it broke").as_dict()


class FakeWorker:
    """What a worker says, by the words that providers' names begin with; `started` counts the processes."""

    started = 0
    dies_at = None  # a step that is no provider's

    def __init__(self, command, log, timeout):
        type(self).started += 1
        self.ready = {"ready": {}, "own": []}

    def measure(self, job):
        works = []
        for step in ("inputs", *job["providers"], "errors", "roof", "timing"):
            yield {"at": step}
            if step == self.dies_at:
                raise WorkerDied("died")
            word = step.partition("-")[0]
            if word in ("raises", "sticky"):
                yield {"provider": step, "measured": FAILED}
            elif step in job["providers"] and word != "dies":
                works.append(step)
            if word in ("dies", "sticky"):
                raise WorkerDied("died")
            for name in list(works):
                if name.startswith(f"{step}_raises"):  # as take_turns tells it: at once
                    works.remove(name)
                    yield {"provider": name, "measured": FAILED}
                elif name.startswith(f"{step}_sticky"):
                    yield {"provider": name, "measured": FAILED}
                    raise WorkerDied("died")
                elif name.startswith(f"{step}_dies"):
                    raise WorkerDied("died")
        for name in (*works, "add"):
            yield {"provider": name, "measured": OK}

    def close(self):
        pass


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(supervisor, "Worker", FakeWorker)
    monkeypatch.setattr(FakeWorker, "started", 0)
    return FakeWorker


def measure(supervisor: Supervisor, names: list[str]) -> dict[str, list[str]]:
    """{provider: what is said of it}"""
    said: dict[str, list[str]] = {}
    for name, found in supervisor.measure(CELL, names, 10, at=lambda step: None):
        said.setdefault(name, []).append(found.status)
    return said


WAYS = {
    "good": "ok",
    "raises": "it broke",
    "dies": "died",
    "sticky": "it broke",
    "errors_dies": "died",
    "timing_raises": "it broke",
    "timing_sticky": "it broke",
    "timing_dies": "died",
}


def test_everyone_gets_the_verdict_that_is_theirs(tmp_path, worker):
    for ways in itertools.product(WAYS, repeat=3):
        names = [f"{way}-{i}" for i, way in enumerate(ways)]
        said = measure(Supervisor("rms_norm", tmp_path / "log"), names)
        said.pop("add", None)
        assert said == {name: [WAYS[way]] for name, way in zip(names, ways, strict=True)}


def test_who_ended_two_processes_is_given_up(tmp_path, worker):
    one = Supervisor("rms_norm", tmp_path / "log")
    names = ["dies-0", "sticky-1", "timing_dies-2", "raises-3", "good-4"]
    for _ in range(2):
        assert measure(one, names)["dies-0"] == ["died"]
    before = worker.started
    said = measure(one, names)
    for name in ("dies-0", "sticky-1", "timing_dies-2"):
        assert said[name] == ["given up: 2 processes died of it"]
    assert (said["raises-3"], said["good-4"]) == (["it broke"], ["ok"])
    assert worker.started <= before + 1
    assert measure(one, ["dies-0"]) == {"dies-0": ["given up: 2 processes died of it"]}


@pytest.mark.parametrize("step", ["inputs", "roof"])
def test_what_no_provider_did_is_said_of_all(tmp_path, worker, monkeypatch, step):
    monkeypatch.setattr(worker, "dies_at", step)
    said = measure(Supervisor("rms_norm", tmp_path / "log"), ["good-0", "raises-1", "good-2"])
    assert said["good-0"] == said["good-2"] == [f"{step}: died"]
    assert said["raises-1"] == (["it broke"] if step == "roof" else ["inputs: died"])


def test_a_worker_that_never_starts_is_an_error(tmp_path, monkeypatch):
    def refuse(*args):
        raise WorkerDied("no torch")

    monkeypatch.setattr(supervisor, "Worker", refuse)
    with pytest.raises(RuntimeError, match=r"does not start: no torch; see .*log"):
        measure(Supervisor("rms_norm", Path(tmp_path / "log")), ["good"])
