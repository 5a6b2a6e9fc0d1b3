"""benchmarks/unsloth_step.py on a tiny model: each provider in a process of its own, from the same weights."""

import json
import subprocess

import pytest
import torch

for package in ("transformers", "matplotlib"):
    pytest.importorskip(package)

from benchmarks import unsloth_step  # noqa: E402


def table(page: str) -> dict[str, list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    return {provider: columns for provider, *columns in lines[2:]}


@pytest.mark.exhaustive
def test_providers_compute_the_same_step(tmp_path):
    """Unsloth needs a GPU: it has a note."""
    rows = table(unsloth_step.main(["--tiny", "--commit", "abc", "--out", str(tmp_path)]).read_text())
    assert list(rows) == list(unsloth_step.PROVIDERS)
    assert "nsloth" in rows.pop("unsloth")[-1]
    found = [[float(x) for x in columns[4:6]] for columns in rows.values()]
    assert all(float(columns[0]) > 0 and not columns[-1] for columns in rows.values())
    for got in found[1:]:
        assert got == pytest.approx(found[0], rel=2e-3)  # rounding differs
    assert found[1] != found[0]  # quackish was applied


@pytest.mark.parametrize("options", [[], ["--tiny"]])
def test_what_a_row_has(options, tmp_path, monkeypatch):
    """Medians of two turns, written after each, and why a process failed. With --tiny all processes use the CPU."""
    monkeypatch.setattr(unsloth_step, "save", lambda *args: None)
    started = []

    def run(command, env, **_):
        assert (tmp_path / "unsloth_step.md").exists() == (len(started) >= len(unsloth_step.PROVIDERS))
        started.append(command[4])
        assert command[7:] == options
        assert env["HF_HUB_OFFLINE"] == "1"
        if command[4] == "unsloth":
            return subprocess.CompletedProcess(command, 1, "", "Traceback\nImportError: no unsloth\n")
        result = dict(loss="1.25000", grad_norm="2.50000", ms=[30.0, 10.0][started.count(command[4]) - 1], gb=4.0)
        return subprocess.CompletedProcess(command, 0, f"hello\n{json.dumps(result)}\nbye\n", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(unsloth_step.harness, "device_to_measure", lambda: torch.device("cuda"))
    about = dict(gpu="a GPU", commit="abc", driver="1", torch="2")
    monkeypatch.setattr(unsloth_step, "environment", lambda device, commit: about)
    rows = table(unsloth_step.main([*options, "--commit", "abc", "--out", str(tmp_path)]).read_text())
    assert started == [*unsloth_step.PROVIDERS] * (1 if options else 2)
    assert rows["plain"] == [*(["30"] * 3 if options else ["20", "10", "30"]), "4", "1.25000", "2.50000", ""]
    assert rows["unsloth"] == [*[""] * 6, "ImportError: no unsloth"]
    (log,) = tmp_path.glob("*.log")
    assert log.read_text().count("# unsloth\nTraceback") == len(started) / 5
