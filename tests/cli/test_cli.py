"""Shared by all commands: how they start, help, suggestions for mistyped names, width, progress."""

import itertools
import os
import signal
import subprocess
import sys

import pytest
import torch

from quackish.__main__ import main
from quackish.cli import console
from quackish.cli.commands import COMMANDS
from quackish.errors import did_you_mean
from quackish.text import fill, fill_page, significant


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


@pytest.mark.parametrize("words", ["explain rms_norm 4x4", "precompile rms_norm 4x4 --gpu h200", "bench rms_norm"])
def test_ctrl_c_in_an_import_is_one_line(words, tmp_path):
    ctrl_c = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "torch.py").write_text(ctrl_c)
    done = subprocess.run(
        [sys.executable, "-m", "quackish", *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs of a shell ignore it
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr.splitlines()[-1]) == (130, "", "quackish: interrupted")


# How commands start --------------------------------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path):
    """The console script, as pip writes it."""
    (tmp_path / "bin").mkdir()
    path = tmp_path / "bin" / "quackish"
    path.write_text("import sys\nfrom quackish.__main__ import console_script\nsys.exit(console_script())\n")
    return path


def started(command, words, **environ):
    """A finished process, and the modules that it imported."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "COLUMNS": "80"} | environ
    argv = [sys.executable, "-X", "importtime", *command, *words.split()]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=300)
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    done.stderr = "\n".join(line for line in lines if not line.startswith("import time:"))
    return done, imported


def test_the_console_script_is_installed():
    tomllib = pytest.importorskip("tomllib", reason="new in Python 3.11")
    with open(os.path.join(os.path.dirname(__file__), "../..", "pyproject.toml"), "rb") as f:
        (entry,) = tomllib.load(f)["project"]["scripts"].items()
    assert entry == ("quackish", "quackish.__main__:console_script")


HELP = [f"{name} --help" for name in (*COMMANDS, "bench linear_cross_entropy")]
MISTAKES = ["expain rms_norm", "explain rms_nrom 4x4", "tune rms_norm_forward 4x4x4", "bench rms_nrom"]
NO_GPU = ["tune rms_norm_forward 4x4", "precompile rms_norm 4x4", "explain rms_norm 4x4 --gpu this", "doctor --check"]
REFUSED = [] if torch.cuda.is_available() else NO_GPU


@pytest.mark.parametrize("words", ["", "--help", "--version", "cache ls", "cache", *HELP, *MISTAKES, *REFUSED])
def test_commands_that_start_without_torch(words, script, tmp_path):
    """torch takes seconds to import."""
    done, imported = started([script], words, QUACKISH_CACHE_DIR=str(tmp_path / "kernels"))
    assert "quackish.__main__" in imported
    assert "torch" not in imported
    assert done.returncode == (0 if words.endswith(("--help", "--version", "cache ls")) else 2), done.stderr


@pytest.mark.parametrize("by_module", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_a_command_shows_the_name_by_which_it_runs(by_module, script):
    name, command = ("python -m quackish", ["-m", "quackish"]) if by_module else ("quackish", [script])
    done, _ = started(command, "cache --help")
    assert done.stdout.startswith(f"usage: {name} cache [-h] WHAT ...\n")
    assert f"\n    {name} cache verify --delete\n" in done.stdout
    done, _ = started(command, "nothing")
    assert done.stderr.startswith(f"{name}: argument COMMAND: 'nothing' is unknown; expected one of bench, ")
    if not torch.cuda.is_available():
        done, _ = started(command, "doctor --check")
        assert done.stderr == f"doctor: there is no GPU here to check; `{name} emulate` runs kernels on a CPU"


# Help ----------------------------------------------------------------------------------------------------------------

BARE = ["", "cache", "bench", "emulate", "explain", "precompile", "tune"]


@pytest.mark.parametrize("words", BARE)
def test_a_command_without_arguments_prints_its_help(words, capsys):
    with pytest.raises(SystemExit) as bare:
        main(words.split())
    printed = capsys.readouterr()
    with pytest.raises(SystemExit) as asked:
        main([*words.split(), "--help"])
    assert (printed.out, printed.err) == (capsys.readouterr().out, "")
    assert printed.out.startswith("usage: ")
    assert (bare.value.code, asked.value.code) == (2, 0)


@pytest.mark.parametrize(
    "words, message",
    [
        (
            "explain rms_norm 4x4 --dytpe fp16",
            "explain: unrecognized arguments: --dytpe fp16; did you mean --dtype or --bias-dtype?",
        ),
        ("cache clear --slate", "cache: unrecognized arguments: --slate; did you mean --stale?"),
        ("cache clear --stal", "cache: unrecognized arguments: --stal; did you mean --stale?"),
        ("--verison", "quackish: unrecognized arguments: --verison; did you mean --version?"),
        ("tune rms_norm", "tune: the following arguments are required: SHAPE; `quackish tune --help` describes them"),
        ("precompile --from none --gpu h200", "precompile: none: No such file or directory"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"{message}\n"


# Width ---------------------------------------------------------------------------------------------------------------


def too_long(text):
    """The lines of more than 80 columns that could be broken."""
    return [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]


@pytest.mark.parametrize(
    "words",
    [
        "doctor",
        "explain linear_cross_entropy 8192x4096x128256 --no-compile --gpu h200",
        "explain linear_cross_entropy 8192x4096x128256 --no-compile --gpu b300 --label-smoothing 0.1",
        "explain grouped_mlp 131072x2048x768x128 --scales --no-compile --gpu h200",
        "explain scaled_dot_product_attention 4x16x2048x64 --attn-bias 1,H --no-compile --gpu gh200",
        "explain rms_norm 4x12 --dtype fp64 --gpu h200",
        *(f"{words} --help" for words in ("", *COMMANDS, "bench linear_cross_entropy")),
    ],
)
def test_output_fits_in_80_columns(words, monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(("TORCH", "CUDA", "LD_", "XDG", "PYTORCH")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")
    try:
        main(words.split())
    except SystemExit:
        pass
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) > 3
    assert not too_long(printed)


def test_the_resources_of_a_kernel_fit_in_80_columns(monkeypatch):
    """Those of the longest name, whose compilation takes seconds."""
    from quackish.cli import explain
    from quackish.device.launch import Resources
    from quackish.gpu import H200
    from quackish.ops.attention.score_problems import AttentionQueriesProblem

    monkeypatch.setenv("COLUMNS", "80")
    problem = AttentionQueriesProblem("bfloat16", 64)
    choice = type("Choice", (), {"config": None})
    usage = [Resources(168, 1024, 333, 222, 230_408, 1024)] * 2
    printed = explain._resource_table([(problem, choice)] * 2, usage, H200)
    assert "[2] attention_bwd_queries" in printed
    assert not too_long(printed)


def test_examples_of_help_can_be_copied():
    page = "One\nparagraph.\n\n    quackish explain grouped_mlp 131072x2048x768x128 --scales --gpu b200\n"
    words = "quackish explain grouped_mlp 131072x2048x768x128 --scales --gpu b200".split()
    paragraph, example = fill_page(page, 40).split("\n\n")
    assert paragraph == "One paragraph."
    assert max(map(len, example.splitlines())) <= 40
    assert example.replace("\\\n", " ").split() == words
    assert example.count("\\\n") == len(example.splitlines()) - 1


def test_text_wraps_at_spaces(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    path = "/a/path-with-hyphens/and/more"
    assert fill(f"kept in {path} here", "- ") == f"- kept in\n  {path}\n  here"


def test_large_numbers_have_no_exponent():
    numbers = [(15_956.4, 4), (9_999.96, 4), (1_234_567.0, 4), (43.756, 3), (0.00151, 2), (3.0, 4)]
    assert [significant(*number) for number in numbers] == ["15960", "10000", "1235000", "43.8", "0.0015", "3"]


# Progress ------------------------------------------------------------------------------------------------------------


def test_progress(capsys):
    now = itertools.count(step=15.0)
    show = console.progress(4, "kernels", clock=lambda: next(now))
    for done in range(5):
        show(done, f"step {done}")
    first, second = capsys.readouterr().err.splitlines()
    assert first == "1 of 4 kernels, 30 s, 1 min 30 s left: step 1"
    assert second == "3 of 4 kernels, 1 min 0 s, 20 s left: step 3"
