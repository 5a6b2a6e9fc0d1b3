"""benchmarks/schedules.py on tiny inputs: a row per call, and the same gradients by all schedules."""

import pytest
import torch

pytest.importorskip("matplotlib")

from benchmarks import schedules


def test_page_has_every_call(tmp_path, monkeypatch):
    monkeypatch.setattr(schedules.harness, "device_to_measure", lambda: torch.device("cpu"))
    page = schedules.main(["--commit", "abc", "--out", str(tmp_path)]).read_text()
    inputs = schedules.make(torch.device("cpu"), *schedules.TINY)
    for title, (_, make_steps) in schedules.TABLES.items():
        lines = page.split(f"## {title}\n")[1].split("\n## ")[0].splitlines()
        rows = dict(
            line.strip("| ").split(" | ")[:2] for line in lines if line.startswith("| `") or "reduction" in line
        )
        assert list(rows) == list(make_steps(*inputs))
        assert all(float(ms) > 0 for ms in rows.values())


def test_schedules_compute_the_same_gradients():
    inputs = schedules.make(torch.device("cpu"), *schedules.TINY)
    steps = schedules.chunk_steps(*inputs) | schedules.limit_steps(*inputs)
    want, *others = (step() for step in steps.values())
    for got in others:
        for one, of_it in zip(got, want, strict=True):
            assert (one - of_it).norm() <= 2**-7 * of_it.norm()
