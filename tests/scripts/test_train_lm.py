"""scripts/train_lm.py on a tiny model: all variants learn the same, and the results are written."""

import csv
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = dict(steps=12, batch=4, seq=32, dim=64, layers=2, token_bytes=1, lr=0.002)


def train_lm(*arguments: object, before: str = "", device: str = "cpu", **size: object) -> subprocess.CompletedProcess:
    """Runs train_lm.main() with a tiny model in a new process, after the statements `before`."""
    code = f"import sys, train_lm\ntrain_lm.SIZES[{device!r}] = train_lm.Size(**{TINY | size})\n{before}\n"
    code += f"sys.exit(train_lm.main(['--device', {device!r}, *sys.argv[1:]]))"
    path = os.pathsep.join([str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")])
    # One thread, because tests run in parallel.
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", env=env)


NAMES = ("quackish", "PyTorch", "PyTorch, fp32 logits")
ON_CPU = NAMES[:2]  # where all models are fp32


def losses(out: Path, seed: int = 0, names: tuple[str, ...] = ON_CPU) -> list[list[float]]:
    """The losses of each variant."""
    with (out / "curves.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["seed"] == str(seed)]
    return [[float(row[f"{name} loss"]) for row in rows] for name in names]


def summaries(out: Path) -> list[dict]:
    return json.loads((out / "summary.json").read_text())["seeds"]


@pytest.mark.exhaustive
def test_both_models_learn_the_same_and_the_same_again(tmp_path):
    done = train_lm("--out", tmp_path, token_bytes=2)
    assert done.returncode == 0, done.stderr
    ours, theirs = losses(tmp_path)
    assert len(ours) == len(theirs) == 12
    # Both are fp32 and differ only in the order of sums.
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours[-1] < ours[0] - 0.5, "the loss does not fall"

    runs = summaries(tmp_path)[0]["runs"]
    assert tuple(runs) == ON_CPU
    assert "difference" in done.stdout
    assert "** of smoothed training losses, from PyTorch\n" in done.stdout
    assert runs["quackish"]["validation_loss"] == pytest.approx(runs["PyTorch"]["validation_loss"], rel=1e-4)
    for name in ("loss.png", "loss.svg"):
        assert (tmp_path / name).stat().st_size > 1000
    assert "validation loss" in done.stdout
    assert "On a CPU quackish runs its portable path" in done.stdout
    assert not done.stderr

    # the same seed gives the same numbers
    train_lm("--out", tmp_path / "again", token_bytes=2)
    assert losses(tmp_path / "again") == [ours, theirs]


@pytest.mark.exhaustive
def test_each_seed_is_trained_and_compared_with_fp32_logits(tmp_path):
    """Logits rounded to bf16 simulate a GPU's autocast."""
    before = """
import dataclasses, lm_model, torch
def rounded(x, w, target):
    logits = torch.nn.functional.linear(x, w).bfloat16().float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())
ours, theirs, exact = train_lm.VARIANTS["cuda"]
train_lm.VARIANTS["cpu"] = (ours, dataclasses.replace(theirs, head_loss=rounded), exact)
"""
    steps = ("--steps", 40)  # curves are smoothed over 2
    done = train_lm(*steps, "--seeds", "3,1", "--out", tmp_path, before=before)
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path, 3) != losses(tmp_path, 1)
    assert [summary["seed"] for summary in summaries(tmp_path)] == [3, 1]
    for summary in summaries(tmp_path):
        for found in summary["from_fp32_logits"].values():
            assert f"{found['largest']:+.4f}" in done.stdout
        distance = summary["from_fp32_logits"]
        assert abs(distance["PyTorch"]["largest"]) > 3 * abs(distance["quackish"]["largest"])
    assert "seed 3: loss at step 1" in done.stdout


@pytest.mark.exhaustive
def test_an_interrupted_run_still_reports(tmp_path):
    before = """
import os, signal
step = train_lm.Run.step
def interrupted(run, i, *batch):
    if i == 5 and run.name == "PyTorch":
        os.kill(os.getpid(), signal.SIGTERM)
    step(run, i, *batch)
train_lm.Run.step = interrupted
"""
    (tmp_path / "poem.txt").write_text("The rain in Spain stays mainly in the plain. " * 500)
    done = train_lm("--data", tmp_path / "poem.txt", "--out", tmp_path, before=before)
    assert done.returncode == 130, done.stderr
    assert "Stopped after 5 of 12 steps" in done.stdout
    assert {len(curve) for curve in losses(tmp_path)} == {5}
    assert (tmp_path / "loss.svg").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["data"].endswith("poem.txt")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--data", str(SCRIPTS / "check.sh")], "check.sh: "),
        (
            ["--out", "/proc/x"],
            "argument --out: /proc/x: /proc cannot be written: No such file or directory; name",
        ),
        (["--steps", "0"], "argument --steps: '0'; expected a positive number"),
        (["--seeds", "0,x"], "0,x: expected distinct comma-separated integers, such as 0,1"),
        (["--seeds", "1,1"], "1,1: expected distinct"),
    ],
)
def test_mistakes_are_explained(monkeypatch, capsys, arguments, message):
    monkeypatch.syspath_prepend(SCRIPTS)
    with pytest.raises(SystemExit, match="2"):
        importlib.import_module("train_lm").parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("script", ["train_lm.py", "finetune.py"])
def test_ctrl_c_in_an_import_is_one_line(script, tmp_path):
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    done = subprocess.run(
        [sys.executable, SCRIPTS / script], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", f"{script}: interrupted\n")


def test_smoothed_curves_and_their_distance(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    train_lm = importlib.import_module("train_lm")
    assert train_lm.smooth([4.0, 2.0, 1.0], 2) == [4.0, 3.0, 1.5]
    one = train_lm.Trained(0, dict(zip(NAMES, ([4.0, 2.0], [4.0, 3.5], [4.0, 3.0]), strict=True)), {}, {})
    assert one.distances()["quackish"] == {"largest": -1.0, "at_step": 2, "mean": -0.5}
    assert one.distances()["PyTorch"] == {"largest": 0.5, "at_step": 2, "mean": 0.25}


@pytest.mark.gpu
def test_on_the_gpu(tmp_path):
    done = train_lm("--out", tmp_path, device="cuda", dim=256, token_bytes=2)
    assert done.returncode == 0, done.stderr
    ours, theirs, exact = losses(tmp_path, names=NAMES)
    assert theirs != exact  # bf16 logits
    assert exact == pytest.approx(theirs, rel=1e-2)
    # bf16 between the operations, rounded in different places
    assert ours == pytest.approx(theirs, rel=1e-2)
    assert ours[-1] < ours[0] - 0.5, "the loss does not fall"
