"""`python -m quackish bench` on tiny shapes: what it writes, resumes, refuses, and that nothing ends it early."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

for package in ("rich", "matplotlib", "yaml"):
    pytest.importorskip(package)

from quackish.__main__ import main  # noqa: E402
from quackish.bench import console, report, runner  # noqa: E402
from quackish.bench.cells import AGAIN, OURS, Cell, Job  # noqa: E402
from quackish.bench.measured import Measured  # noqa: E402
from quackish.bench.operations import RMS_NORM  # noqa: E402
from quackish.bench.results import COLUMNS, ERRORS, SAME, read_rows  # noqa: E402
from quackish.testing.timing import Times  # noqa: E402

ROOT = Path(__file__).parents[1]
BROKEN = str(Path(__file__).with_name("broken_providers.py"))
gpu = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Many threads on a busy machine make small work slow, by far."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def bench(tmp_path: Path, op: str, *words: str) -> list[dict[str, str]]:
    assert main(["bench", op, "--out", str(tmp_path), "--quick", *words]) == 0
    return read_rows(tmp_path / f"{op}.csv")


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_page_and_figures(tmp_path, capsys):
    words = ("--shapes", "8x32,16x32", "--dtype", "bf16,fp32", "--providers", "quackish,torch", "--commit", "abc-dirty")
    rows = bench(tmp_path, "rms_norm", *words)
    assert tuple(rows[0]) == COLUMNS
    assert [(r["dtype"], r["shape"], r["direction"], r["provider"], r["role"]) for r in rows] == [
        (dtype, shape, direction, name, role)
        for dtype in ("bfloat16", "float32")
        for shape in ("8x32", "16x32")
        for direction, roof in (("forward", "mul"), ("backward", "add"))
        for name, role in (("quackish", "ours"), ("torch", "peer"), (AGAIN, "again"), (roof, "roof"))
    ]
    for row in rows:
        assert (row["schema"], row["commit"], row["dirty"], row["status"]) == ("2", "abc", "True", "ok")
        assert float(row["p20_ms"]) <= float(row["median_ms"]) <= float(row["p80_ms"])
        assert float(row["pct_of_roof"]) == pytest.approx(100 * float(row["roof_ms"]) / float(row["median_ms"]), 1e-4)
        errors = [float(row[name]) for name in ERRORS if row[name]]
        if row["role"] in ("ours", "peer"):
            assert len(errors) == {"forward": 1, "backward": 2}[row["direction"]]
            assert max(errors) < (0.01 if row["dtype"] == "bfloat16" else 1e-6)
            assert float(row["first_s"]) > 0
        assert row["role"] != "ours" or row["deterministic"] == "True"
    page = (tmp_path / "rms_norm.md").read_text()
    for text in ("commit abc and local changes", "## Backward, float32", "| 8 x 32 |", "% of roof"):
        assert text in page
    figures = {f"rms_norm_{what}.{kind}" for what in ("time", "roof") for kind in ("svg", "png")}
    assert figures <= {path.name for path in tmp_path.iterdir()}
    assert gpu or "No GPU" in capsys.readouterr().out


@pytest.mark.skipif(gpu, reason="is about a machine without a GPU")
def test_without_a_gpu_shapes_are_cut_and_models_measured_with_and_without_gradients(tmp_path, capsys):
    rows = bench(tmp_path, "linear_cross_entropy", "--model", "llama3-8b", "qwen3-8b")
    assert {row["shape"] for row in rows} == {"48x64x512"}
    assert "Shapes are cut to 48x64x512." in capsys.readouterr().out
    names = {d: [row["provider"] for row in rows if row["direction"] == d] for d in ("forward", "forward+backward")}
    assert names["forward"] == ["quackish", "torch", AGAIN, "gemm-logits"]
    assert {"quackish", "torch", AGAIN, "three-gemms"} < set(names["forward+backward"])
    assert not [row["provider"] for row in rows if row["role"] == "ours" and row["deterministic"] != "True"]


# What providers do ---------------------------------------------------------------------------------------------------


def test_a_provider_that_fails_in_any_way_is_named_and_the_run_goes_on(tmp_path, capsys):
    """`late` dies when all take turns: on a GPU these are graphs, and no provider's code runs then."""
    providers = "quackish,raises,memory,aborts,exits,hangs,wrong_shape,good" + ",late" * (not gpu)
    words = ("--shapes", "8x32", "--direction", "backward", "--also", BROKEN, "--providers", providers)
    patience = "20" if gpu else "10"  # the first call may compile, or the machine be busy
    rows = bench(tmp_path, "rms_norm", *words, "--timeout", patience)
    assert {row["provider"]: row["status"] for row in rows if row["status"] != "ok"} == {
        "raises": "RuntimeError: it broke",
        "memory": "OutOfMemoryError: no memory",
        "aborts": "the process was killed by SIGABRT",
        "exits": "the process ended with status 3",
        "hangs": f"no sign of life for {patience} s; killed",
        "wrong_shape": "ValueError: returned (8, 1) where (8, 32) was expected",
    } | ({} if gpu else {"late": "the process was killed by SIGABRT"})
    assert {row["provider"] for row in rows if row["median_ms"]} >= {OURS, "good", "add"}
    assert {row["role"] for row in rows if row["provider"] == "good"} == {"own"}
    said = capsys.readouterr().out
    assert "aborts: the process was killed by SIGABRT" in said
    assert "goodbye" not in said
    assert "goodbye" in (tmp_path / "rms_norm.log").read_text()
    assert "- aborts: the process was killed by SIGABRT (backward 8x32 bf" in (tmp_path / "rms_norm.md").read_text()


def test_where_nothing_can_be_measured_that_is_told(tmp_path, capsys):
    words = ["bench", "rms_norm", "--quick", "--out", str(tmp_path), "--shapes", "8x32", "--direction", "backward"]
    assert main([*words, "--also", BROKEN, "--providers", "raises"]) == 1
    assert "raises: RuntimeError: it broke (backward 8x32 bfloat16)" in (tmp_path / "rms_norm.md").read_text()
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    assert main([*words, "--also", str(tmp_path / "mine.py")]) == 2
    assert "does not start: ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err


def test_sigterm_in_a_cell_keeps_what_it_has(tmp_path):
    """As `timeout` sends it, to the program alone."""
    (tmp_path / "slow.py").write_text(f"""
import pathlib, time, torch

calls = []

def slow(x, w, target):
    calls.append(1)
    if len(calls) == 13:  # timing has begun: one call was the first, and ten were compared
        pathlib.Path({str(tmp_path / "told")!r}).touch()
        time.sleep(600)
    return torch.nn.functional.cross_entropy(x @ w.T, target)

PROVIDERS = dict(slow=slow)
""")
    words = ["--shapes", "24x32x90", "--also", str(tmp_path / "slow.py"), "--providers", "torch,slow"]
    words += ["--direction", "backward", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "quackish", "bench", "linear_cross_entropy", *words]
    program = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not (tmp_path / "told").exists() and program.poll() is None:
        time.sleep(0.05)
    program.send_signal(signal.SIGTERM)
    assert program.wait(120) != 0
    rows = {row["provider"]: row for row in read_rows(tmp_path / "linear_cross_entropy.csv")}
    assert rows["torch"]["note"] == rows["slow"]["note"] == "interrupted"
    assert float(rows["slow"]["median_ms"]) > 0
    assert float(rows["torch"]["err_dx"]) < 0.02
    assert "- slow: interrupted" in (tmp_path / "linear_cross_entropy.md").read_text()


# Resuming ------------------------------------------------------------------------------------------------------------


class FakeSupervisor:
    """Stands in for measuring: a result for each provider of each cell."""

    def __init__(self, origin: dict[str, str]):
        self.origin, self.measured = origin, []

    def start(self):
        return self.origin, ["good"]

    def measure(self, job, at, partial):
        self.measured.append(job.cell.shape[0])
        for name in job.providers:
            partial(name, Measured())
            if name == "stops":
                raise KeyboardInterrupt
            yield name, Measured(times=Times(1.0, 1.0, 1.0))

    def close(self) -> None:
        pass


def test_resuming_measures_only_what_is_missing(tmp_path, capsys):
    origin = dict.fromkeys((*SAME, "date"), "x") | {"gpu": "cpu", "schema": "2"}
    path, page = tmp_path / "rms_norm.csv", report.BENCH._replace(figures=lambda results, path: [])

    def todo(rows: list[int], names: str = "quackish,torch", resume=True, rounds=3, **changed) -> list[int]:
        supervisor = FakeSupervisor(origin | changed)
        jobs = [Job(Cell("rms_norm", (m, 32), "bfloat16", "forward"), tuple(names.split(","))) for m in rows]
        settings = runner.Settings(RMS_NORM, path, page, resume=resume, keep=True, options={"rounds": rounds})
        runner.run(settings, lambda own: jobs, supervisor)
        return supervisor.measured

    assert todo([8, 9], resume=False) == [8, 9]
    assert todo([8, 9, 10]) == [10]
    assert "rms_norm.csv has 2 of 3 cells already." in capsys.readouterr().out.replace("\n", "")
    assert todo([8], "torch") == []
    # what the numbers depend on
    assert todo([8], "torch,good") == [8]
    assert todo([8], rounds=4) == [8]
    assert todo([8], source="ba9876543210") == [8]
    assert todo([8], source="ba9876543210") == []
    # a row that was interrupted does not count
    with pytest.raises(KeyboardInterrupt):
        todo([11], "torch,stops")
    assert read_rows(path)[-1]["status"] == "interrupted before it was timed"
    assert todo([11], "torch,good") == [11]
    # another GPU's file is left alone; without resume it begins again, and keeps the former file
    with pytest.raises(ValueError, match="is of cpu, this is H200; give another --out"):
        todo([8], gpu="H200")
    before = path.read_text()
    assert todo([8], resume=False) == [8]
    assert (tmp_path / "rms_norm.previous.csv").read_text() == before


# What makes no sense -------------------------------------------------------------------------------------------------


def test_what_makes_no_sense_is_refused(tmp_path, capsys):
    for words, says in {
        "--shapes 8x32x64": "is no shape of rms_norm",
        "--model gpt5": "no such model; there are llama3-8b",
        "--providers quakish": "--providers quakish: no such provider; there are quackish, quack",
        "--shapes 8x32 --tokens 4": "--tokens is for --model",
        "--dtype int8": "'int8' is none of bf16, fp16, fp32",
        "--tokens many": "'many': expected whole numbers such as 4096,8192",
        "--rounds 0": "--rounds is 0; expected 1 or more",
    }.items():
        with pytest.raises(SystemExit) as ended:  # by argparse, or as the command line ends
            raise SystemExit(main(["bench", "rms_norm", "--out", str(tmp_path), *words.split()]))
        assert ended.value.code == 2
        assert says in capsys.readouterr().err
    assert not (tmp_path / "rms_norm.csv").exists()


def test_the_extra_is_asked_for_by_name():
    with pytest.raises(ImportError, match=r"bench needs no-such-package; pip install 'quackish\[bench\]' brings it"):
        console.check_extra({"no_such_package": "no-such-package"})


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_linear_cross_entropy_on_the_gpu_has_times_memory_and_errors(tmp_path):
    names = "quackish,quackish-recompute-1024,torch"
    words = ("--shapes", "512x512x4096", "--providers", names, "--direction", "backward")
    rows = bench(tmp_path, "linear_cross_entropy", *words)
    assert all(row["status"] == "ok" and float(row["median_ms"]) > 0 for row in rows)
    assert {row["gpu"] for row in rows} == {torch.cuda.get_device_name().removeprefix("NVIDIA ")}
    for row in (row for row in rows if row["role"] in ("ours", "peer")):
        assert float(row["peak_mb"]) >= 2 * (512 + 4096) * 512 / 1e6
        assert max(float(row[name]) for name in ("err_loss", "err_dx", "err_dweight")) < 0.02
        assert row["role"] != "ours" or row["deterministic"] == "True"


@pytest.mark.gpu
def test_a_norm_is_measured_beside_a_provider_that_loses_the_cuda_context(tmp_path):
    words = ("--shapes", "64x1024", "--direction", "backward", "--also", BROKEN)
    rows = bench(tmp_path, "rms_norm", *words, "--providers", "quackish,illegal,good")
    status = {row["provider"]: row["status"] for row in rows}
    assert "CUDA error" in status.pop("illegal")
    (ours,) = (row for row in rows if row["role"] == "ours")
    assert float(ours["peak_mb"]) >= 64 * 1024 * 2 / 1e6
    assert ours["deterministic"] == "True"
    assert max(float(ours[name] or 0) for name in ERRORS) < 0.01
    assert (tmp_path / "rms_norm_memory.svg").exists()
    assert status == dict.fromkeys((OURS, AGAIN, "good", "add"), "ok")
