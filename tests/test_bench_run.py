"""`python -m quackish bench` on tiny shapes: what it writes, resumes, refuses, and that nothing ends it early."""

from pathlib import Path

import pytest
import torch

for package in ("rich", "pandas", "matplotlib", "yaml"):
    pytest.importorskip(package)

from quackish.__main__ import main  # noqa: E402
from quackish.bench import console, runner, schema  # noqa: E402
from quackish.bench.cells import Cell, Job  # noqa: E402
from quackish.bench.measured import AGAIN, OURS, Measured  # noqa: E402
from quackish.bench.operations import OPERATIONS  # noqa: E402
from quackish.bench.schema import CsvLog, read_csv  # noqa: E402
from quackish.testing.timing import Times  # noqa: E402

BROKEN = str(Path(__file__).with_name("broken_providers.py"))
gpu = torch.cuda.is_available()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Many threads on a busy machine make small work slow, by far."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def bench(tmp_path: Path, op: str, *words: str) -> list[dict[str, str]]:
    assert main(["bench", op, "--out", str(tmp_path), "--quick", *words]) == 0
    return read_csv(tmp_path / f"{op}.csv")


# A run ---------------------------------------------------------------------------------------------------------------


def test_a_run_writes_rows_page_and_figures(tmp_path, capsys):
    words = ("--shapes", "8x32,16x32", "--dtype", "bf16,fp32", "--providers", "quackish,torch", "--commit", "abc-dirty")
    rows = bench(tmp_path, "rms_norm", *words)
    assert list(rows[0]) == list(schema.COLUMNS)
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
        if row["role"] in ("ours", "peer"):
            errors = [row[name] for name in ("err_y", "err_dx", "err_dweight") if row[name]]
            assert len(errors) == {"forward": 1, "backward": 2}[row["direction"]]
            assert max(map(float, errors)) < (0.01 if row["dtype"] == "bfloat16" else 1e-6)
            assert float(row["first_s"]) > 0
        assert row["role"] != "ours" or row["deterministic"] == "True"
    page = (tmp_path / "rms_norm.md").read_text()
    assert "commit abc and local changes" in page
    assert "## Backward, float32" in page
    assert "| 8 x 32 |" in page
    figures = {f"rms_norm_{what}.{kind}" for what in ("time", "roof") for kind in ("svg", "png")}
    assert figures <= {path.name for path in tmp_path.iterdir()}
    if not gpu:
        assert "No GPU" in capsys.readouterr().out


def test_linear_cross_entropy_is_measured_with_and_without_gradients(tmp_path):
    rows = bench(tmp_path, "linear_cross_entropy", "--shapes", "24x32x90", "--providers", "quackish,torch")
    names = {d: [row["provider"] for row in rows if row["direction"] == d] for d in ("forward", "forward+backward")}
    assert names["forward"] == ["quackish", "torch", AGAIN, "gemm-logits"]
    assert names["forward+backward"][:4] == ["quackish", "torch", AGAIN, "three-gemms"]
    for row in rows[:2]:
        assert float(row["err_loss"]) < 0.01
        assert not row["err_dx"]
        assert row["role"] != "ours" or row["deterministic"] == "True"
    for row in (row for row in rows if row["role"] in ("ours", "peer") and "back" in row["direction"]):
        assert max(float(row[name]) for name in ("err_loss", "err_dx", "err_dweight")) < 0.02
        assert row["role"] != "ours" or row["deterministic"] == "True"
    assert {float(row["pct_of_roof"]) for row in rows if row["role"] == "roof"} == {100}


@pytest.mark.skipif(gpu, reason="is about a machine without a GPU")
def test_without_a_gpu_models_are_cut_to_what_a_cpu_does(tmp_path, capsys):
    rows = bench(tmp_path, "rms_norm", "--model", "llama3-8b", "qwen3-8b", "--direction", "forward")
    assert {row["shape"] for row in rows} == {"64x1024", "64x128"}
    assert {row["provider"] for row in rows if row["role"] != "roof"} == {OURS, AGAIN, "torch"}
    assert "Shapes are cut to 64x1024, 64x128." in capsys.readouterr().out


# What providers do ---------------------------------------------------------------------------------------------------


def test_a_provider_that_fails_in_any_way_is_named_and_the_run_goes_on(tmp_path, capsys):
    providers = "quackish,raises,memory,aborts,exits,wrong_shape,good"
    words = ("--shapes", "8x32", "--direction", "backward", "--also", BROKEN, "--providers", providers)
    rows = bench(tmp_path, "rms_norm", *words)
    assert {row["provider"]: row["status"] for row in rows if row["status"] != "ok"} == {
        "raises": "RuntimeError: it broke",
        "memory": "OutOfMemoryError: no memory",
        "aborts": "the process was killed by SIGABRT",
        "exits": "the process ended with status 3",
        "wrong_shape": "ValueError: returned (8, 1) where (8, 32) was expected",
    }
    assert [row["provider"] for row in rows if row["median_ms"]] == [OURS, "good", AGAIN, "add"]
    assert {row["role"] for row in rows if row["provider"] == "good"} == {"own"}
    said = capsys.readouterr().out
    assert "aborts: the process was killed by SIGABRT" in said
    assert "goodbye" not in said
    assert "goodbye" in (tmp_path / "rms_norm.log").read_text()
    assert "- aborts: the process was killed by SIGABRT (backward 8x32 bf" in (tmp_path / "rms_norm.md").read_text()


def test_a_provider_that_hangs_is_ended(tmp_path):
    words = ("--shapes", "8x32", "--direction", "backward", "--also", BROKEN, "--providers", "hangs,good")
    rows = bench(tmp_path, "rms_norm", *words, "--timeout", "5")
    status = [(row["provider"], row["status"]) for row in rows if row["role"] == "own"]
    assert status == [("hangs", "no sign of life for 5 s; killed"), ("good", "ok")]


@pytest.mark.skipif(gpu, reason="on a GPU what takes turns are graphs: no provider's code runs then")
def test_who_dies_while_all_take_turns_is_found_alone(tmp_path):
    words = ("--shapes", "8x32", "--direction", "backward", "--also", BROKEN, "--providers", "late,good")
    rows = bench(tmp_path, "rms_norm", *words)
    status = {row["provider"]: row["status"] for row in rows}
    assert status == {"good": "ok", "late": "the process was killed by SIGABRT", "add": "ok"}


def test_where_nothing_can_be_measured_that_is_told(tmp_path):
    words = ["--shapes", "8x32", "--direction", "backward", "--also", BROKEN, "--providers", "raises"]
    assert main(["bench", "rms_norm", "--quick", "--out", str(tmp_path), *words]) == 1
    assert "raises: RuntimeError: it broke (backward 8x32 bfloat16)" in (tmp_path / "rms_norm.md").read_text()


def test_a_worker_that_does_not_start_ends_the_run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("import no_such_module\n")
    words = ["bench", "rms_norm", "--out", str(tmp_path), "--also", str(tmp_path / "mine.py")]
    assert main(words) == 2
    assert "does not start: ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err
    (tmp_path / "mine.py").write_text("providers = 1\n")
    assert main(words) == 2
    assert "has no dict PROVIDERS" in capsys.readouterr().err


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    def stop(op, job, rows):
        if job.cell.shape[0] == 9:
            raise KeyboardInterrupt
        return "a line"

    jobs = [Job(Cell("rms_norm", (m, 32), "bfloat16", "forward"), ("quackish",)) for m in (8, 9, 10)]
    settings = runner.Settings(OPERATIONS["rms_norm"], tmp_path / "rms_norm.csv", options={"rounds": 1})
    with pytest.raises(KeyboardInterrupt):
        runner.run(settings, lambda own: jobs, line=stop)
    assert {row["shape"] for row in read_csv(tmp_path / "rms_norm.csv")} == {"8x32", "9x32"}
    assert (tmp_path / "rms_norm.md").exists()


# Resuming ------------------------------------------------------------------------------------------------------------


class FakeSupervisor:
    """Stands in for measuring: a result for each provider of each cell."""

    def __init__(self, origin: dict[str, str]):
        self.origin, self.measured = origin, []

    def start(self) -> dict:
        return {"ready": self.origin, "own": ["good"]}

    def measure(self, job, at, partial):
        self.measured.append(job.cell.shape)
        for name in job.providers:
            partial(name, Measured())
            if name == "stops":
                raise KeyboardInterrupt
            yield name, Measured(times=Times(1.0, 1.0, 1.0))

    def close(self) -> None:
        pass


def test_resuming_measures_only_what_is_missing(tmp_path, capsys):
    origin = {"gpu": "cpu", "source": "0123456789ab"} | dict.fromkeys((*schema.SAME, "date"), "x")
    path = tmp_path / "rms_norm.csv"

    def todo(
        rows: list[int], names: str = "quackish,torch", resume: bool = True, rounds: int = 3, **changed
    ) -> list[int]:
        supervisor = FakeSupervisor(origin | changed)
        jobs = [Job(Cell("rms_norm", (m, 32), "bfloat16", "forward"), tuple(names.split(","))) for m in rows]
        settings = runner.Settings(OPERATIONS["rms_norm"], path, resume=resume, keep=True, options={"rounds": rounds})
        runner.run(settings, lambda own: jobs, supervisor)
        return [m for m, _ in supervisor.measured]

    assert todo([8, 9], resume=False) == [8, 9]
    assert todo([8, 9, 10]) == [10]
    assert "rms_norm.csv has 2 of 3 cells already." in capsys.readouterr().out.replace("\n", "")
    assert todo([8], "torch") == []
    # what the numbers depend on
    assert todo([8], "torch,good") == [8]
    assert todo([8], rounds=4) == [8]
    assert todo([8], commit="abd") == [8]
    assert todo([8], source="ba9876543210") == [8]
    assert todo([8], source="ba9876543210") == []
    # a row that was interrupted does not count
    with pytest.raises(KeyboardInterrupt):
        todo([11], "torch,stops")
    assert read_csv(path)[-1]["status"] == "interrupted before it was timed"
    assert todo([11], "torch,good") == [11]
    # without resume it begins again, and keeps the former file
    before = path.read_text()
    assert todo([8], resume=False) == [8]
    assert (tmp_path / "rms_norm.previous.csv").read_text() == before


def test_a_file_of_other_columns_or_another_gpu_is_not_resumed(tmp_path, capsys):
    words = ["bench", "rms_norm", "--quick", "--shapes", "8x32", "--resume", "--out", str(tmp_path)]
    CsvLog(tmp_path / "rms_norm.csv", tuple(schema.COLUMNS), {"gpu": "another"}).write([{"shape": "8x32"}])
    assert main(words) == 2
    assert "is of another, this is" in capsys.readouterr().err
    (tmp_path / "rms_norm.csv").write_text("m,n\n1,2\n")
    assert main(words) == 2
    assert "its columns are m, n" in capsys.readouterr().err


# What makes no sense -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, says",
    [
        (["--shapes", "8x32x64"], "is no shape of rms_norm"),
        (["--model", "gpt5"], "no such model; there are llama3-8b"),
        (["--providers", "quakish"], "--providers quakish: no such provider; there are quackish, quack"),
        (["--shapes", "8x32", "--tokens", "4"], "--tokens is for --model"),
        (["--dtype", "int8"], "'int8' is none of bf16, fp16, fp32"),
        (["--tokens", "many"], "'many': expected whole numbers such as 4096,8192"),
        (["--rounds", "0"], "--rounds is 0; expected 1 or more"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path, capsys, words, says):
    with pytest.raises(SystemExit) as ended:  # by argparse, or as the command line ends
        raise SystemExit(main(["bench", "rms_norm", "--out", str(tmp_path), *words]))
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "rms_norm.csv").exists()


def test_peers_that_are_not_installed_are_named(capsys):
    jobs = [
        Job(Cell("rms_norm", (8, 32), "bfloat16", "forward"), names) for names in (("quackish", "quack"), ("quack",))
    ]
    packages = {"quack": "no_such_package"}
    assert [job.providers for job in runner.installed(jobs, packages)] == [("quackish",)]
    assert "without quack: no_such_package is not installed" in capsys.readouterr().out
    with pytest.raises(ValueError, match="none of them is installed"):
        runner.installed(jobs[1:], packages)


def test_the_extra_is_asked_for_by_name():
    with pytest.raises(ImportError, match=r"bench needs no-such-package; pip install 'quackish\[bench\]' brings it"):
        console.check_extra({"no_such_package": "no-such-package"})


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_norm_on_the_gpu_has_times_memory_and_errors(tmp_path):
    rows = bench(tmp_path, "rms_norm", "--shapes", "512x1024", "--providers", "quackish,torch")
    assert all(row["status"] == "ok" and float(row["median_ms"]) > 0 for row in rows)
    assert {row["gpu"] for row in rows} == {torch.cuda.get_device_name().removeprefix("NVIDIA ")}
    for row in (row for row in rows if row["role"] in ("ours", "peer")):
        assert float(row["peak_mb"]) >= 512 * 1024 * 2 / 1e6
        assert row["role"] != "ours" or row["deterministic"] == "True"
        assert max(float(row[name] or 0) for name in schema.ERRORS) < 0.01
    assert (tmp_path / "rms_norm_memory.svg").exists()


@pytest.mark.gpu
def test_linear_cross_entropy_on_the_gpu_has_times_memory_and_errors(tmp_path):
    words = ("--shapes", "512x512x4096", "--providers", "quackish*", "torch", "--direction", "backward")
    rows = bench(tmp_path, "linear_cross_entropy", *words)
    assert all(row["status"] == "ok" and float(row["median_ms"]) > 0 for row in rows)
    for row in (row for row in rows if row["role"] in ("ours", "peer")):
        assert float(row["peak_mb"]) >= 2 * (512 + 4096) * 512 / 1e6
        assert max(float(row[name]) for name in ("err_loss", "err_dx", "err_dweight")) < 0.02
        assert row["role"] != "ours" or row["deterministic"] == "True"


@pytest.mark.gpu
def test_a_provider_that_loses_the_cuda_context_costs_only_its_own_numbers(tmp_path):
    words = ("--shapes", "64x1024", "--direction", "backward", "--also", BROKEN)
    rows = bench(tmp_path, "rms_norm", *words, "--providers", "quackish,illegal,good")
    status = {row["provider"]: row["status"] for row in rows}
    assert "CUDA error" in status.pop("illegal")
    assert status == dict.fromkeys((OURS, AGAIN, "good", "add"), "ok")
