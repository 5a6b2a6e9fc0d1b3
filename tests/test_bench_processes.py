"""Who is blamed when a process dies: every provider gets one verdict, whatever the others do."""

import itertools
from pathlib import Path

import pytest

from quackish.bench.cells import Cell, Job
from quackish.bench.processes import ChildDied, Supervisor

CELL = Cell("rms_norm", (8, 32), "bfloat16", "backward")
OK, FAILED = {"status": "ok"}, {"status": "it broke"}


class Scripted(Supervisor):
    """Children do what the first words of providers' names say; `dies_at` is a step that is no provider's."""

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
                if name.startswith((f"{step}_raises", f"{step}_sticky")):  # as Run.fail tells it
                    works.remove(name)
                    yield "step", name
                    yield "result", name, FAILED
                if name.startswith((f"{step}_sticky", f"{step}_dies")):
                    raise ChildDied("died")
        for name in (*works, "add"):
            yield "result", name, OK


def measure(supervisor: Supervisor, names: list[str]) -> dict[str, str]:
    """{provider: what is said of it in the end}; who has failed is not told anything else."""
    said: dict[str, str] = {}
    for name, found in supervisor.measure(Job(CELL, tuple(names)), begin=lambda step: None):
        assert said.get(name, "ok") == "ok"
        said[name] = found["status"]
    return said


WAYS = {
    "good": "ok",
    "raises": "it broke",
    "dies": "died",
    "sticky": "it broke",
    "timing_raises": "it broke",
    "timing_sticky": "it broke",
    "timing_dies": "died",
}


def test_everyone_gets_the_verdict_that_is_theirs():
    for ways in itertools.product(WAYS, repeat=3):
        names = [f"{way}-{i}" for i, way in enumerate(ways)]
        said = measure(Scripted(), names)
        said.pop("add", None)
        assert said == {name: WAYS[way] for name, way in zip(names, ways, strict=True)}


def test_who_ended_two_processes_is_given_up():
    one = Scripted()
    names = ["dies-0", "sticky-1", "timing_dies-2", "raises-3", "good-4"]
    for _ in range(2):
        assert measure(one, names)["dies-0"] == "died"
    before, said = one.started, measure(one, names)
    assert {said[name] for name in names[:3]} == {"skipped: it ended 2 processes"}
    assert (said["raises-3"], said["good-4"]) == ("it broke", "ok")
    assert one.started <= before + 1


@pytest.mark.parametrize("step", ["inputs", "roof"])
def test_what_no_provider_did_is_said_of_all(step):
    said = measure(Scripted(dies_at=step), ["good-0", "raises-1", "good-2"])
    assert said["good-0"] == said["good-2"] == f"{step}: died"
    assert said["raises-1"] == ("it broke" if step == "roof" else "inputs: died")


def test_a_process_that_never_starts_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"does not start: the process ended with status 1; see .*log"):
        Supervisor(tmp_path / "no such folder" / "log").start()
