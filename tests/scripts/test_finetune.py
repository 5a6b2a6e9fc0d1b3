"""scripts/finetune.py on a tiny model: the Trainer learns the same with and without quackish."""

import importlib
from pathlib import Path

import pytest

for package in ("transformers", "accelerate", "matplotlib"):
    pytest.importorskip(package, reason="needs the extra integrations")

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.integrations


@pytest.fixture
def finetune(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("finetune")


def test_both_curves_agree_and_fall(tmp_path, finetune, capsys):
    (tmp_path / "poem.txt").write_text("The rain in Spain stays mainly in the plain. " * 2000)
    curves = finetune.main(f"--device cpu --steps 20 --data {tmp_path}/poem.txt --out {tmp_path}/out".split())
    exact, theirs, ours = (curves[name].losses for name in (finetune.EXACT, "torch", "quackish"))
    assert len(ours) == 20
    assert theirs == pytest.approx(exact, rel=1e-2)
    assert theirs != exact  # one of them is in bf16
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert ours != theirs  # quackish was applied to one of them
    assert ours[-1] < ours[0] - 1, "the loss does not fall"
    assert (tmp_path / "out" / "finetune.png").stat().st_size > 1000
    printed = capsys.readouterr().out.splitlines()
    printed = [line for line in printed if not line.startswith("[")]  # DeepSpeed logs here, where it is installed
    assert [line.split()[0].strip(",:") for line in printed] == [
        "torch", "torch", "quackish", "torch", "quackish", "wrote"
    ]  # fmt: skip
    held_out = [float(line.partition("held out ")[2].partition(",")[0]) for line in printed[:3]]
    assert held_out == pytest.approx([held_out[0]] * 3, rel=1e-2)


@pytest.mark.gpu
def test_on_the_gpu(tmp_path, finetune):
    curves = finetune.main(["--device", "cuda", "--steps", "12", "--out", str(tmp_path)])
    theirs, ours = (curves[name].losses for name in ("torch", "quackish"))
    assert ours == pytest.approx(theirs, rel=1e-2)  # bf16 between the operations, rounded in different places
    assert ours != theirs
    assert ours[-1] < ours[0] - 0.5, "the loss does not fall"
