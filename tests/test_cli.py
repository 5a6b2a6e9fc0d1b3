"""Shared by all commands of `python -m quackish`: suggestions for mistyped names, progress."""

import io
import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch

from quackish.__main__ import main
from quackish.bench import console
from quackish.errors import did_you_mean


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


def test_no_suggestion_without_a_close_name():
    assert did_you_mean("xyz", ["bench", "cache"]) == ""
    assert did_you_mean("", ["bench"]) == ""


@pytest.mark.parametrize("words", ["--help", "bench rms_norm"])
def test_ctrl_c_in_an_import_is_one_line(words, tmp_path):
    ctrl_c = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(ctrl_c)
    done = subprocess.run(
        [sys.executable, "-m", "quackish", *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "quackish: interrupted\n")


def test_progress():
    stream, now = io.StringIO(), itertools.count(step=2.0)
    show = console.progress(4, stream, clock=lambda: next(now))
    for done in range(5):
        show(done, f"step {done}")
    assert stream.getvalue() == "step 2: 2 of 4 done, 6 s\n"
