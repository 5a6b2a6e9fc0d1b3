"""`quackish bench` on tiny shapes: results, invalid requests, and failing providers."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("matplotlib")

from quackish.__main__ import main
from quackish.bench.cells import AGAIN, OURS
from quackish.bench.results import COLUMNS, ERRORS, read_rows
from quackish.cli.console import NO_GPU
from tests import forked

ROOT = Path(__file__).parents[2]
gpu = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Many threads on a busy machine make small work very slow."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def fast_children(monkeypatch):
    monkeypatch.setattr(
        "quackish.bench.processes.multiprocessing", SimpleNamespace(get_context=lambda way: forked.context())
    )


def bench(tmp_path: Path, op: str, *words: str) -> list[dict[str, str]]:
    assert main(["bench", op, "--out", str(tmp_path), "--quick", *words]) == 0
    return read_rows(tmp_path / f"{op}.csv")


# A run ---------------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_run_writes_rows_page_and_figures_and_appends(tmp_path, capsys):
    words = ("--shapes", "8x32,16x32", "--dtype", "bf16,fp32", "--providers", "quackish,torch", "--commit", "abc-dirty")
    rows = bench(tmp_path, "rms_norm", *words)
    assert tuple(rows[0]) == COLUMNS
    assert [(r["dtype"], r["shape"], r["direction"], r["provider"]) for r in rows] == [
        (dtype, shape, direction, name)
        for dtype in ("bfloat16", "float32")
        for shape in ("8x32", "16x32")
        for direction, roof in (("forward", "mul"), ("backward", "add"))
        for name in ("quackish", "torch", roof, AGAIN)
    ]
    for row in rows:
        assert (row["commit"], row["status"]) == ("abc-dirty", "ok")
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert float(row["pct_of_roof"]) == pytest.approx(100 * float(row["roof_ms"]) / float(row["median_ms"]), 1e-4)
        errors = [float(row[name]) for name in ERRORS if row[name]]
        if row["provider"] in ("quackish", "torch"):
            assert len(errors) == {"forward": 1, "backward": 2}[row["direction"]]
            assert max(errors) < (0.01 if row["dtype"] == "bfloat16" else 1e-6)
    page = (tmp_path / "rms_norm.md").read_text()
    for text in ("commit abc-dirty", "## Backward, float32", "| 8 x 32 |", "% of roof"):
        assert text in page
    assert {"rms_norm_roof.svg", "rms_norm_roof.png"} <= {path.name for path in tmp_path.iterdir()}
    assert gpu or "No GPU" in capsys.readouterr().out
    more = bench(tmp_path, "rms_norm", "--shapes", "9x32", "--direction", "forward", "--append")
    assert more[: len(rows)] == rows
    assert {row["shape"] for row in more[len(rows) :]} == {"9x32"}


def test_the_names_of_providers(capsys):
    assert main("bench rms_norm --providers list".split()) == 0
    assert capsys.readouterr().out == "providers of rms_norm: quackish, quack, liger-cute, liger-triton, torch\n"


@pytest.mark.exhaustive
@pytest.mark.skipif(gpu, reason="is about a machine without a GPU")
def test_without_a_gpu_shapes_are_small(tmp_path, capsys):
    rows = bench(tmp_path, "linear_cross_entropy", "--model", "llama3-8b", "qwen3-8b")
    stands_for = {row["shape"]: row["models"] for row in rows}
    assert stands_for == {
        "48x64x512": "llama3-8b, in place of 8192x4096x128256",
        "96x64x512": "qwen3-8b, in place of 8192x4096x151936",
    }
    assert "Shapes are 48x64x512, 96x64x512." in capsys.readouterr().out
    page = (tmp_path / "linear_cross_entropy.md").read_text().splitlines()
    assert page[2] == f"**{NO_GPU}**"
    assert sum(line.startswith("## Forward, ") for line in page) == 2
    names = {d: {row["provider"] for row in rows if row["direction"] == d} for d in ("forward", "forward+backward")}
    assert names["forward"] == {"quackish", "quackish-stats", "torch", AGAIN, "gemm-logits"}
    assert {"quackish", "torch", AGAIN, "three-gemms"} < names["forward+backward"]


# Failing providers ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_failing_providers_do_not_end_the_run(tmp_path, capsys):
    """`late` aborts while all take turns. On a GPU turns replay graphs, so `aborts` replaces it."""
    killed = "aborts" if gpu else "late"
    ways = ["raises", killed, "exits", "hangs", "wrong_shape", "good"]
    providers = ["quackish", *(f"tests.bench.broken_providers:{way}" for way in ways)]
    words = ("--shapes", "8x32", "--direction", "backward", "--providers", *providers)
    timeout = "20" if gpu else "10"  # the first call may compile, or the machine may be busy
    rows = bench(tmp_path, "rms_norm", *words, "--timeout", timeout)
    failed = {
        row["provider"].removeprefix("tests.bench.broken_providers:"): row["status"]
        for row in rows
        if row["status"] != "ok"
    }
    assert failed == {
        "raises": "RuntimeError: it broke",
        killed: "the process was killed by SIGABRT",
        "exits": "the process ended with status 3",
        "hangs": f"no event for {timeout} s; killed",
        "wrong_shape": "ValueError: returned (8, 1), expected (8, 32)",
    }
    assert {row["provider"] for row in rows if row["median_ms"]} == {
        OURS,
        AGAIN,
        "tests.bench.broken_providers:good",
        "add",
    }
    output = capsys.readouterr().out
    assert f"{killed}: the process was killed by SIGABRT" in output
    assert "goodbye" not in output
    assert "goodbye" in (tmp_path / "rms_norm.log").read_text()
    assert f"{killed}: the process was killed by SIGABRT (backward 8x32 bf" in (tmp_path / "rms_norm.md").read_text()


def test_if_nothing_is_measured_the_page_has_the_reasons(tmp_path):
    words = ["bench", "rms_norm", "--quick", "--out", str(tmp_path), "--shapes", "8x32", "--direction", "backward"]
    assert (
        main(
            [
                *words,
                "--providers",
                "tests.bench.broken_providers:raises,tests.bench.broken_providers:absent,no_such_module:norm",
            ]
        )
        == 1
    )
    page = (tmp_path / "rms_norm.md").read_text()
    assert "raises: RuntimeError: it broke (backward 8x32 bfloat16)" in page
    assert "AttributeError: module 'tests.bench.broken_providers' has no attribute 'absent'" in page
    assert "ModuleNotFoundError: No module named 'no_such_module'" in page


@pytest.mark.exhaustive
def test_sigterm_keeps_the_results_so_far(tmp_path):
    """`timeout` sends the signal only to the main process."""
    words = ["--shapes", "24x32x90", "--providers", "torch,tests.bench.broken_providers:slow_loss"]
    words += ["--direction", "backward", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "quackish", "bench", "linear_cross_entropy", *words]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "QUACKISH_TEST_FLAG": str(tmp_path / "flag")}
    program = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "flag").exists() and program.poll() is None:
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    assert program.wait(120) != 0
    rows = {row["provider"]: row for row in read_rows(tmp_path / "linear_cross_entropy.csv")}
    slow = rows["tests.bench.broken_providers:slow_loss"]
    assert rows["torch"]["note"] == slow["note"] == "interrupted"
    assert float(slow["median_ms"]) > 0
    assert float(rows["torch"]["err_dx"]) < 0.02
    assert "slow_loss: interrupted" in (tmp_path / "linear_cross_entropy.md").read_text()


# An earlier result ---------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_an_earlier_result_is_replaced_only_by_a_run_that_measured(tmp_path, capsys, monkeypatch, wide):
    words = ("--shapes", "8x32", "--direction", "backward")
    bench(tmp_path, "rms_norm", *words, "--providers", "quackish,torch")
    path = tmp_path / "rms_norm.csv"
    earlier = path.read_bytes()

    def again(*more):
        capsys.readouterr()
        return main(["bench", "rms_norm", "--out", str(tmp_path), "--quick", *words, *more])

    assert again() == 2
    assert f"{path} exists; pass --append to add to it, --overwrite to replace it, or" in capsys.readouterr().err
    for mode in ("--append", "--overwrite"):
        assert again(mode, "--providers", "tests.bench.broken_providers:raises") == 1
        (partial,) = tmp_path.glob("rms_norm.partial*.csv")
        assert f"{path} is unchanged; the rows of this run are in {partial}\n" in capsys.readouterr().out
        assert path.read_bytes() == earlier
        assert "it broke" in partial.read_text()
        assert "torch" not in {row["provider"] for row in read_rows(partial)}  # earlier rows
        partial.unlink()

    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert (
            again("--overwrite", "--shapes", "16x32", "--providers", "torch,tests.bench.broken_providers:interrupts")
            == 130
        )
    finally:
        signal.signal(signal.SIGINT, former)
    assert capsys.readouterr().err == "bench: interrupted\n"
    assert path.read_bytes() == earlier
    for partial in tmp_path.glob("rms_norm.partial*.csv"):  # none if Ctrl-C came before the first record
        assert {row["shape"] for row in read_rows(partial)} == {"16x32"}

    assert again("--overwrite", "--providers", "torch") == 0
    assert {row["provider"] for row in read_rows(path)} == {"torch", "add"}


@pytest.mark.exhaustive
def test_ctrl_c_while_the_child_starts_is_one_line(tmp_path):
    """The child sends Ctrl-C to the whole group, as a terminal does, before it imports anything."""
    site = "import os, signal, sys\nif 'spawn_main' in ' '.join(sys.orig_argv): os.killpg(0, signal.SIGINT)\n"
    (tmp_path / "sitecustomize.py").write_text(site)
    command = [sys.executable, "-m", "quackish", "bench", "rms_norm", "--quick", "--out", str(tmp_path / "out")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "bench: interrupted\n")
    assert not list((tmp_path / "out").iterdir())


# Invalid requests -------------------------------------------------------------------------------------------------


def test_invalid_requests(tmp_path, capsys):
    for words, message in {
        "--providers quakish": "--providers quakish is unknown; expected one of quackish, quack",
        "--shapes 8x32 --tokens 4": "--tokens needs --model",
        "--out /proc/x": "argument --out: /proc/x: /proc cannot be written: No such file or directory; name a folder",
        "--tokens many": "'many'; expected a positive number",
    }.items():
        assert main(["bench", "rms_norm", "--out", str(tmp_path), *words.split()]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "rms_norm.csv").exists()


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_lost_cuda_context_affects_only_its_provider(tmp_path):
    illegal, good = "tests.bench.broken_providers:illegal", "tests.bench.broken_providers:good"
    words = ("--shapes", "64x1024", "--direction", "backward", "--providers", OURS, illegal, good)
    rows = bench(tmp_path, "rms_norm", *words)
    status = {row["provider"]: row["status"] for row in rows}
    assert "CUDA error" in status.pop(illegal)
    (ours,) = (row for row in rows if row["provider"] == OURS)
    assert float(ours["peak_mb"]) >= 64 * 1024 * 2 / 1e6
    assert max(float(ours[name] or 0) for name in ERRORS) < 0.01
    assert status == dict.fromkeys((OURS, AGAIN, good, "add"), "ok")
