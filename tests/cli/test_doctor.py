"""`quackish doctor` on healthy and broken installations."""

import importlib
import itertools
import json
import os
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from quackish.__main__ import main
from quackish.bench.torch_kernel import Status
from quackish.cli import doctor as command
from quackish.cli import doctor_report as doctor
from quackish.cli.doctor_report import KERNELS, PORTABLE, Report
from quackish.cli.parser import CommandError
from quackish.device import toolchain, variables
from quackish.errors import UnsupportedError


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A new cache folder and table of configs."""
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    return tmp_path


def run_section(section, *args, **given):
    """(problems, notes) of a section."""
    report = Report()
    report["section"] = section(report, *args, **given)
    json.dumps(report)
    assert doctor.text(report)
    return [f"{problem['what']}. {problem['to_do']}" for problem in report["problems"]], report["notes"]


def only_problem(section, *args, **given):
    (problem,), _ = run_section(section, *args, **given)
    return problem


def test_a_healthy_installation(capsys):
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("doctor: checking versions, GPUs,")
    for part in ("Versions", "Operations", "ok; errors y", "same bits in two runs", "Cache", "No problem found."):
        assert part in out
    for name in ("rms_norm", "linear_cross_entropy", "grouped_mlp", "moe_mlp", "scaled_dot_product_attention"):
        assert f"\n  {name} on " in out
    assert "WRONG" not in out


def test_a_file_that_cannot_be_written(tmp_path):
    with pytest.raises(CommandError, match="the report above cannot be written: "):
        command.write(Report(), tmp_path / "missing" / "check.json")


def test_a_section_that_raises():
    def fail(report):
        raise UnsupportedError("not this time")

    report = doctor.examine({"gpus": fail, "environment": doctor.environment})
    assert [problem["what"] for problem in report["problems"]] == ["gpus: UnsupportedError: not this time"]
    assert report["gpus"] is None
    assert report["environment"]
    assert doctor.text(report).endswith("See the error message.")


# GPUs and versions


def test_a_driver_that_torch_cannot_use_and_one_without_a_gpu(monkeypatch):
    def why(driver, message="The NVIDIA driver on your system is too old\nand more"):
        def init():
            raise RuntimeError(message)

        return run_section(doctor.why_no_gpu, driver, init)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    problems, (note,) = why(None)
    assert problems == []
    assert note.startswith("there is no NVIDIA driver")
    assert note.endswith("the portable path runs on the CPU.")
    nothing = "there is an NVIDIA driver but no GPU"
    assert why((13, 0), "No CUDA GPUs are available") == ([], [f"{nothing}: the portable path runs on the CPU."])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    problems, (note,) = why((13, 0), "No CUDA GPUs are available")
    assert problems == []
    assert note.startswith(f"{nothing} among CUDA_VISIBLE_DEVICES='-1': ")
    (problem,), notes = why((13, 0))
    assert problem.startswith("there is an NVIDIA driver, but torch cannot use it: The NVIDIA driver on your system is")
    assert "too old. Check that `nvidia-smi` lists" in problem  # of the message only the first line
    assert notes == []
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    (problem,), _ = why((12, 8))
    assert "The driver supports CUDA 12, torch is built for 13.2." in problem
    assert "'torch<2.15' --index-url https://download.pytorch.org/whl/cu126`." in problem


def test_unsupported_versions():
    fine = {"torch": "2.11.0a0+git", "nvidia-cutlass-dsl": "4.8.1", "apache-tvm-ffi": "0.1.15.post2"}
    assert run_section(doctor.check_versions, fine, True) == ([], [])
    old = only_problem(doctor.check_versions, fine | {"torch": "2.7.1+cu126"}, False)
    assert old == "torch 2.7.1+cu126 is not supported. `pip install 'torch>=2.9'`."
    assert run_section(doctor.check_versions, fine | {"nvidia-cutlass-dsl": "4.8.0"}, True) == ([], [])
    for dsl in ("4.7.1", "4.9.0", "5.0"):
        other = fine | {"nvidia-cutlass-dsl": dsl}
        assert "`pip install 'nvidia-cutlass-dsl>=4.8.0,<4.8.1'`." in only_problem(doctor.check_versions, other, True)
        assert run_section(doctor.check_versions, other, False) == ([], [])  # no kernels would run
    required = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name, (least, below) in toolchain.REQUIRED.items():
        assert f'"{name}>={least}' + f",<{below}" * bool(below) + ('"' if not below else "") in required


def test_pip_installs_a_compiler_that_torch_accepts():
    """Fails when PyTorch accepts another compiler that quackish runs with: then pyproject.toml has to follow."""
    if Version(torch.__version__) < Version("2.15"):
        pytest.skip("PyTorch 2.15 is the first with CuTe kernels for a compiler that quackish runs with")
    native = importlib.import_module("torch._native.cutedsl_utils")
    of_torch = {Version(str(number)) for number in native._CUTEDSL_REQUIRED_VERSIONS}

    def within(versions: dict) -> set[Version]:
        least, below = map(Version, versions[doctor.DSL])
        return {number for number in of_torch if least <= number < below}

    accepted = within(toolchain.REQUIRED)
    assert accepted == within(toolchain.SUPPORTED)
    newest = max(accepted)
    assert Version(toolchain.REQUIRED[doctor.DSL][1]) <= Version(f"{newest.major}.{newest.minor}.{newest.micro + 1}")


def test_parts_of_the_compiler_in_different_versions(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: "4.8.1")
    parts = dict.fromkeys((doctor.DSL, *doctor.DSL_PARTS), "4.8.0")
    assert run_section(doctor.check_parts, parts | {"nvidia-cutlass-dsl-libs-cu12": ""}) == ([], [])
    message = only_problem(doctor.check_parts, parts | {"nvidia-cutlass-dsl-libs-cu13": "4.8.1"})
    assert message.startswith("nvidia-cutlass-dsl-libs-cu13 4.8.1 does not belong to nvidia-cutlass-dsl 4.8.0. ")
    assert message.endswith("`pip install 'nvidia-cutlass-dsl[cu13]==4.8.0'`.")


def test_cute_kernels_of_torch(monkeypatch):
    def state(status, cu13=""):
        monkeypatch.setattr(doctor, "version", lambda name: cu13)
        report = Report()
        return doctor.cute_kernels_of_torch(report, status), report["notes"], report["problems"]

    assert state(Status(False, False, "none")) == ("", [], [])
    assert state(Status(True, True)) == ("on", [], [])
    off = Status(True, False, "they need another", ("4.6.2", "4.8.0"))
    row, (note,), problems = state(off)
    assert row == "off: they need another"
    assert problems == []
    assert "`pip install 'nvidia-cutlass-dsl==4.8.0'` turns them on" in note
    assert "'nvidia-cutlass-dsl[cu13]==4.8.0'" in state(off, cu13="4.8.1")[1][0]
    assert state(off._replace(versions=("4.6.2",)))[1] == []  # quackish would not run with it


# The compiler


def test_a_missing_or_unsupported_compiler():
    def missing():
        return toolchain._folder("apache-tvm-ffi", "not_installed")

    message = only_problem(doctor.compiler, missing, expected=True)
    assert "is not installed (no module named 'not_installed'). `pip install 'apache-tvm-ffi>=0.1.15,<0.2'`" in message
    problems, (note,) = run_section(doctor.compiler, missing, expected=False)
    assert problems == []
    assert note.startswith("apache-tvm-ffi, which the kernels need, is not installed")
    assert "No GPU here runs kernels" in note

    message = only_problem(doctor.compiler, lambda: toolchain.choose_flavour([12, 13], (11, 8)), expected=True)
    assert "no compiler for this driver" in message
    assert "This driver has CUDA 11.8; the oldest supported is CUDA 12" in message


# Cache and tables


def test_a_cache_that_cannot_be_used(machine, monkeypatch):
    (machine / "cache").write_text("")
    assert "it is not a folder" in only_problem(doctor.cache_health)
    (machine / "cache").unlink()
    (machine / "cache").mkdir()
    (machine / "cache").chmod(0o777)
    message = only_problem(doctor.cache_health)
    assert "cannot be used: others may write to it" in message
    assert "QUACKISH_CACHE_DIR" in message
    monkeypatch.setenv("QUACKISH_CACHE_DIR", "/proc/cache")  # where root cannot create files either
    message = only_problem(doctor.cache_health)
    assert message.startswith("the cache folder /proc/cache cannot be used: it does not exist, and /proc cannot be ")
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(machine / "cache"))
    (machine / "cache").chmod(0o700)
    (machine / "cache" / "notes.kernel").write_text("nothing")
    message = only_problem(doctor.cache_health)
    assert "1 of 1 files in" in message
    assert "damaged" in message
    assert "cache verify --delete" in message
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    assert "QUACKISH_CACHE=0 turns the cache off" in run_section(doctor.cache_health)[1][0]


def test_environment_variables_without_effect(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("QUACKISH_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert run_section(doctor.environment) == ([], [])
    monkeypatch.setenv("QUACKISH_CACHEDIR", "/tmp")
    message = only_problem(doctor.environment)
    assert message.startswith("the environment variable QUACKISH_CACHEDIR is unknown and ignored; expected one of ")
    assert "did you mean QUACKISH_CACHE_DIR or " in message
    monkeypatch.delenv("QUACKISH_CACHEDIR")
    for name, wrong, legal in (("QUACKISH_CACHE", "off", "0"), ("QUACKISH_COMPILE_JOBS", "all", "8")):
        monkeypatch.setenv(name, wrong)
        assert only_problem(doctor.environment).startswith(f"{name}='{wrong}' is ignored; expected ")
        assert variables.get(name) == ""
        monkeypatch.setenv(name, legal)
        assert run_section(doctor.environment) == ([], [])
        assert variables.get(name) == legal
    # a folder for the table of tuned configs in which nothing can be created, also for root
    monkeypatch.setenv("XDG_CONFIG_HOME", "/proc/x")
    _, (note,) = run_section(doctor.environment)
    assert note.startswith("`tune` cannot store configs: /proc cannot be written: ")
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", "/proc/x")
    assert only_problem(doctor.environment).startswith("`tune` cannot store configs: /proc cannot be written: ")
    tools = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()
    assert all(f"\n| `{name}" in tools for name in variables.VARIABLES)


def test_kernels_of_other_versions():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from tests.cli.test_cache import store

    store(2, cpu="another")
    store(3)
    problems, (note,) = run_section(doctor.cache_health)
    assert problems == []
    assert "1 of 2 kernels on disk" in note


# The operations


def operation(op, change, path=PORTABLE):
    """Arguments of `operations`: one case on the CPU, whose results `change` modifies, on this path."""
    case = doctor.OPERATIONS[op]

    def changed(given, backend):
        if backend == "cute" and path == PORTABLE:
            raise UnsupportedError(f"{op}: no reason.")
        results = case.call(given, "reference")
        if backend != "reference":  # the truth
            change(results)
        return results

    return {op: case._replace(call=changed)}, [torch.device("cpu")]


def test_an_unexpected_portable_path_is_a_problem():
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    unchanged = operation("rms_norm", lambda results: None)
    assert run_section(doctor.operations, *unchanged, expects=lambda device, kernel: False) == ([], [])
    message = only_problem(doctor.operations, *unchanged, expects=lambda device, kernel: device.type == "cpu")
    assert message == "rms_norm runs the portable path on cpu, expected kernels. rms_norm: no reason."
    ((name, case),), on = unchanged[0].items(), unchanged[1]
    no_kernels = {name: case._replace(spec=None)}  # an operation without any
    assert run_section(doctor.operations, no_kernels, on, expects=lambda device, kernel: True) == ([], [])


@pytest.mark.parametrize(
    "op, name, factor, error",
    [("rms_norm", "dweight", 1.02, 2), ("rms_norm", "dx", torch.nan, "inf"), ("linear_cross_entropy", "loss", 1.02, 2)],
)
def test_wrong_results(op, name, factor, error):
    message = only_problem(doctor.operations, *operation(op, lambda results: results[name].mul_(factor)))
    assert message.startswith(f"{op} on ")
    assert f"gives wrong results: {name} has error {error}" in message


@pytest.mark.parametrize("path", [KERNELS, PORTABLE])
def test_different_bits_are_a_problem_of_kernels_only(path):
    drift = itertools.count()
    change = operation("linear_cross_entropy", lambda results: results["loss"].add_(1e-6 * next(drift)), path)
    problems, _ = run_section(doctor.operations, *change)
    assert ["different bits in two runs" in problem for problem in problems] == [True] * (path == KERNELS)


def test_an_operation_that_raises():
    def fail(results):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    message = only_problem(doctor.operations, *operation("rms_norm", fail))
    assert "does not run: RuntimeError: CUDA error: an illegal memory access was encountered. Please" in message
