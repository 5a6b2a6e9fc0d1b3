"""Shared by all commands of `python -m quackish`: suggestions for mistyped names, progress."""

import io
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quackish.__main__ import COMMANDS, main
from quackish.bench import console
from quackish.errors import did_you_mean

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "words, meant",
    [
        ("precompil", "precompile"),
        ("explan rms_norm 4x4", "explain"),
        ("cache verfy", "verify"),
        ("bench rms_nrom", "rms_norm"),
        ("explain linear_crossentropy 4x8x9", "linear_cross_entropy"),
        ("precompile rms_nrom 4x4 --gpu h200", "rms_norm"),
        ("tune linear_cross_entrpy 4x8x9", "linear_cross_entropy"),
        ("explain rms_norm 4x4 --gpu a1000", "a100"),
        ("precompile rms_norm 4x4 --gpu B20", "b200"),
        ("explain rms_norm 4x4 --gpu l40", "l40s"),
        ("explain rms_norm 4x4 --dtype fb16", "fp16"),
        ("bench rms_norm --model Lama3-8B", "llama3-8b"),
    ],
)
def test_a_mistyped_name_gets_a_suggestion(words, meant, capsys):
    if "--model" in words:
        pytest.importorskip("matplotlib")
    assert main(words.split()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "expected one of " in last
    assert last.partition("; did you mean ")[2].rstrip("?").split(" or ")[0] == meant


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "words", ["tune rms_norm_forward 8x8", "precompile rms_norm 8x8", "explain rms_norm 8x8 --gpu this"]
)
def test_commands_that_need_a_gpu(words, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(words.split()[0])
    assert "there is no GPU here" in line


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_is_one_line(command, capsys, monkeypatch):
    def run(args):
        raise KeyboardInterrupt

    arguments = {"explain": "rms_norm 4x4", "bench": "rms_norm", "precompile": "rms_norm 4x4", "tune": "rms_norm 4x4"}
    monkeypatch.setattr(f"quackish.cli.{command}.run", run)
    monkeypatch.setattr(f"quackish.cli.{command}.add_arguments", lambda parser: parser.add_argument("words", nargs="*"))
    assert main([command, *arguments.get(command, "").split()]) == 130
    assert capsys.readouterr().err == f"{command}: interrupted\n"


@pytest.mark.parametrize("program", ["-m quackish explain rms_norm 4x4", "scripts/train_lm.py"])
def test_ctrl_c_while_torch_is_imported(program, tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    command = [sys.executable, *program.split()]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert (process.returncode, error) in ((130, "quackish: interrupted\n"), (-signal.SIGINT, ""))


def test_no_suggestion_without_a_close_name():
    assert did_you_mean("xyz", ["bench", "cache"]) == ""
    assert did_you_mean("", ["bench"]) == ""


def test_progress():
    stream, now = io.StringIO(), itertools.count(step=2.0)
    show = console.progress(4, stream, clock=lambda: next(now))
    for done in range(5):
        show(done, f"step {done}")
    assert stream.getvalue() == "step 2: 2 of 4 done, 6 s\n"
