"""Which provider is blamed when a child dies: each gets supervisor verdict, independent of the others."""

import itertools
from pathlib import Path

import pytest

from quackish.bench.cells import Cell, Job
from quackish.bench.processes import ChildDied, Supervisor

CELL = Cell("rms_norm", (8, 32), "bfloat16", "backward")
OK, FAILED = {"status": "ok"}, {"status": "it broke"}


class Scripted(Supervisor):
    """Children behave as the first word of a provider's name says. `dies_at` is a step that is not a provider's."""

    def __init__(self, dies_at: str | None = None):
        super().__init__(Path("log"))
        self.dies_at, self.started, self.running = dies_at, 0, False

    def close(self):
        self.running = False

    def events_of(self, cell, names):
        self.started += not self.running
        self.running, works = True, []
        for step in ("inputs", *names, "roof", "timing"):
            yield "step", step
            if step == self.dies_at:
                raise ChildDied("died")
            word = step.partition("-")[0]
            if word in ("raises", "sticky"):
                yield "result", step, FAILED
            elif step in names and word != "dies":
                works.append(step)
                yield "result", step, OK
            if word in ("dies", "sticky"):
                raise ChildDied("died")
            for name in list(works):
                if name.startswith((f"{step}_raises", f"{step}_sticky")):  # like Run.fail
                    works.remove(name)
                    yield "step", name
                    yield "result", name, FAILED
                if name.startswith((f"{step}_sticky", f"{step}_dies")):
                    raise ChildDied("died")
        for name in (*works, "add"):
            yield "result", name, OK


def measure(supervisor: Supervisor, names: list[str]) -> dict[str, str]:
    """{provider: its last status}. Nothing is reported about a provider after it failed."""
    statuses: dict[str, str] = {}
    for name, record in supervisor.measure(Job(CELL, tuple(names)), begin=lambda step: None):
        assert statuses.get(name, "ok") == "ok"
        statuses[name] = record["status"]
    return statuses


WAYS = {
    "good": "ok",
    "raises": "it broke",
    "dies": "died",
    "sticky": "it broke",
    "timing_raises": "it broke",
    "timing_sticky": "it broke",
    "timing_dies": "died",
}


def test_each_provider_gets_its_own_verdict():
    for ways in itertools.product(WAYS, repeat=3):
        names = [f"{way}-{i}" for i, way in enumerate(ways)]
        statuses = measure(Scripted(), names)
        statuses.pop("add", None)
        assert statuses == {name: WAYS[way] for name, way in zip(names, ways, strict=True)}


def test_a_provider_that_ended_two_processes_is_skipped():
    supervisor = Scripted()
    names = ["dies-0", "sticky-1", "timing_dies-2", "raises-3", "good-4"]
    for _ in range(2):
        assert measure(supervisor, names)["dies-0"] == "died"
    before, statuses = supervisor.started, measure(supervisor, names)
    assert {statuses[name] for name in names[:3]} == {"skipped: it ended 2 processes"}
    assert (statuses["raises-3"], statuses["good-4"]) == ("it broke", "ok")
    assert supervisor.started <= before + 1


@pytest.mark.parametrize("step", ["inputs", "roof"])
def test_a_death_that_no_provider_caused_fails_all(step):
    statuses = measure(Scripted(dies_at=step), ["good-0", "raises-1", "good-2"])
    assert statuses["good-0"] == statuses["good-2"] == f"{step}: died"
    assert statuses["raises-1"] == ("it broke" if step == "roof" else "inputs: died")


def test_a_process_that_never_starts_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"does not start: the process ended with status 1; see .*log"):
        Supervisor(tmp_path / "no such folder" / "log").start()
