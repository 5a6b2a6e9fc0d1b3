"""`python -m quackish doctor`: what it says on machines that are not well, and on those that are."""

import json
from pathlib import Path

import pytest
import torch

from quackish import kernels, toolchain
from quackish.__main__ import main
from quackish.cli import doctor, examine, self_test
from quackish.cli.examine import KERNELS, PORTABLE
from quackish.configs.choose import choose
from quackish.errors import UnsupportedError
from quackish.gpu import A100, H200
from quackish.launch import objects
from quackish.ops import rms_norm_plans
from quackish.ops.kernel_for import Kernel
from quackish.ops.linear_cross_entropy import api as linear_cross_entropy

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="pretends that there is no GPU, or another one")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Without a driver, and with a cache folder and a table of configs of its own."""
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("QUACKISH_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    if not torch.cuda.is_available():
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(toolchain, "driver_cuda", lambda: None)
        monkeypatch.setattr(examine, "_DRIVER", tmp_path / "driver")
    return tmp_path


def problems(**given):
    """(what, to_do) of each; the self-test is left out."""
    report = doctor.examine_all(**{"self_testing": False, **given})
    json.dumps(report)
    assert doctor.text(report)
    return [(problem["what"], problem["to_do"]) for problem in report["problems"]]


def the_problem(**given):
    (problem,) = problems(**given)
    return problem


def notes():
    report = doctor.examine_all(self_testing=False)
    assert report["problems"] == []
    return " ".join(report["notes"])


def test_all_is_well(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for part in ("Versions", "torch", "Which path runs", "Cache", "Self-test", "ok; errors y", "No problem found."):
        assert part in out
    assert "WRONG" not in out


def test_as_json(capsys):
    assert main(["doctor", "--json", "--no-self-test"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["torch"].startswith(torch.__version__)
    assert {row["op"] for row in report["paths"]} == {"rms_norm", "linear_cross_entropy"}
    assert report["problems"] == []
    assert "self_test" not in report


@pytest.mark.gpu
def test_on_a_gpu():
    report = doctor.examine_all()
    assert report["problems"] == []
    assert report["gpus"][0]["name"] == torch.cuda.get_device_name(0)
    assert all(row["ok"] and row["same_bits"] for row in report["self_test"])
    if torch.cuda.get_device_capability(0) == (9, 0):
        assert {row["path"] for row in report["paths"] if row["device"] == "cuda:0"} == {KERNELS}
        assert {row["path"] for row in report["self_test"]} == {KERNELS}


# No GPU that torch sees


@needs_no_gpu
def test_a_driver_but_torch_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (13, 0))
    what, to_do = the_problem()
    assert "is built without CUDA, but there is an NVIDIA driver" in what
    assert "pytorch.org" in to_do


@needs_no_gpu
def test_a_driver_too_old_for_torch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (12, 4))
    what, to_do = the_problem()
    assert "the driver has CUDA 12.4, too old for torch, built for 13.0" in what
    assert "a build of torch for CUDA 12" in to_do


@needs_no_gpu
def test_a_newer_minor_version_is_no_problem(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (12, 4))
    what, _ = the_problem()
    assert "too old" not in what


@needs_no_gpu
def test_a_container_without_the_drivers_library(monkeypatch, machine):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    (machine / "driver").mkdir()
    (machine / "driver" / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release")
    what, to_do = the_problem()
    assert "libcuda.so.1 is not found" in what
    assert "docker run --gpus all" in to_do
    assert doctor.examine_all(self_testing=False)["versions"]["driver"] == "580.159.04"


@needs_no_gpu
@pytest.mark.parametrize("there", [True, False])
def test_a_driver_that_torch_cannot_use(monkeypatch, machine, there):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (12, 8))
    monkeypatch.setattr(examine, "_cuda_error", lambda: "CUDA driver initialization failed")
    (machine / "driver").mkdir()
    (machine / "driver" / "version").touch()
    if there:
        (machine / "driver" / "gpus" / "0000:01:00.0").mkdir(parents=True)
        what, to_do = the_problem()
        assert "torch cannot use it: CUDA driver initialization failed" in what
        assert "nvidia-smi" in to_do
    else:  # the node of a cluster that one logs in to
        assert "an NVIDIA driver, but no GPU" in notes()


@needs_no_gpu
@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus(monkeypatch, value):
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (13, 0))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert f"CUDA_VISIBLE_DEVICES={value!r} hides the GPUs" in notes()


# A GPU whose kernels do not run

CUDA = torch.device("cuda:0")


@pytest.fixture
def hopper(monkeypatch):
    """As far as everything goes that launches nothing."""
    set_gpu(monkeypatch, H200)


def set_gpu(monkeypatch, gpu):
    monkeypatch.setattr(examine, "devices", lambda: [CUDA, torch.device("cpu")])
    monkeypatch.setattr(examine, "gpus", lambda problems, notes: [])
    for module in (examine, self_test, rms_norm_plans, linear_cross_entropy):
        monkeypatch.setattr(module, "gpu_of", lambda index: gpu)
    linear_cross_entropy._no_kernel_on.cache_clear()

    def kernel_for(name, problem, on):
        kernels.find(name, on)
        return Kernel(toolchain.find(), choose(name, problem, on).config)

    monkeypatch.setattr(rms_norm_plans, "kernel_for", kernel_for)


@pytest.fixture
def anew():
    """Finds the toolchain again, now and afterwards."""
    kept = toolchain.find.cache_clear, linear_cross_entropy._no_kernel_on.cache_clear
    for forget in kept:
        forget()
    yield
    for forget in kept:
        forget()


@needs_no_gpu
def test_hopper_that_is_well(hopper, anew):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    report = doctor.examine_all(self_testing=False)
    assert report["problems"] == []
    assert {row["path"] for row in report["paths"] if row["device"] == "cuda:0"} == {KERNELS}


@needs_no_gpu
@pytest.mark.parametrize("missing", ["cutlass", "tvm_ffi"])
def test_hopper_without_the_compiler(hopper, anew, monkeypatch, missing):
    find_spec = toolchain.importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == missing else find_spec(name))
    what, to_do = the_problem()
    assert f"the compiler is not installed (No module named '{missing}')" in what
    assert "pip install 'nvidia-cutlass-dsl>=4.8.1" in to_do
    for row in doctor.examine_all(self_testing=False)["paths"][:2]:
        assert row["path"] == PORTABLE
        assert row["why"].startswith(f"{row['op']}: nvidia-cutlass-dsl is not installed")


@needs_no_gpu
def test_hopper_with_a_driver_too_old_for_the_compiler(hopper, anew, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(toolchain, "driver_cuda", lambda: (11, 8))
    what, to_do = the_problem()
    assert "no compiler here that fits" in what
    assert "This driver has CUDA 11.8: install a newer one" in to_do


@needs_no_gpu
def test_hopper_where_an_operation_refuses(hopper, anew, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(linear_cross_entropy, "no_kernel_on", lambda device: "linear_cross_entropy: no reason.")
    what, to_do = the_problem()
    assert what == "linear_cross_entropy takes the portable path on cuda:0, where kernels should run"
    assert to_do == "linear_cross_entropy: no reason."


@needs_no_gpu
@pytest.mark.parametrize("version", ["4.7.0", "4.9.0", "5.0"])
def test_hopper_with_another_compiler(hopper, anew, monkeypatch, version):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    real = examine.version
    monkeypatch.setattr(examine, "version", lambda name: version if name == "nvidia-cutlass-dsl" else real(name))
    what, to_do = the_problem()
    assert what == f"nvidia-cutlass-dsl {version} is not one that quackish works with"
    assert to_do == "`pip install 'nvidia-cutlass-dsl>=4.8.1,<4.9'`."


@needs_no_gpu
def test_hopper_with_half_a_compiler(hopper, anew, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    broken = toolchain.find()._replace(runtime=Path("/no/such/lib.so"))
    monkeypatch.setattr(toolchain, "find", lambda: broken)
    what, to_do = the_problem()
    assert "runtime library is not where it should be, /no/such/lib.so" in what
    assert "pip install --force-reinstall nvidia-cutlass-dsl-libs-cu" in to_do


@needs_no_gpu
def test_ampere_is_no_problem(monkeypatch, anew):
    set_gpu(monkeypatch, A100)
    report = doctor.examine_all(self_testing=False)
    assert report["problems"] == []
    (norm,) = [row for row in report["paths"] if (row["op"], row["device"]) == ("rms_norm", "cuda:0")]
    assert norm["path"] == PORTABLE
    assert norm["why"].startswith("rms_norm: no kernel for sm_80 (A100)")


@needs_no_gpu
def test_without_a_gpu_the_compiler_may_be_missing(monkeypatch, anew):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "the compiler is not installed" in notes()


def test_an_old_torch(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.7.1+cu126")
    what, to_do = the_problem()
    assert what == "torch 2.7.1+cu126 is not one that quackish works with"
    assert to_do == "`pip install 'torch>=2.8'`."


def test_versions_as_in_pyproject():
    required = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    for name, (least, below) in examine.SUPPORTED.items():
        assert f'"{name}>={least}' + f",<{below}" * bool(below) in required


def test_no_linker(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setattr(objects, "_LINKERS", ())
    assert "no linker" in notes()


def test_a_torch_that_tvm_ffi_builds_an_extension_for(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__", raising=False)
    real = examine.version
    monkeypatch.setattr(examine, "version", lambda name: "" if name == "torch-c-dlpack-ext" else real(name))
    assert "pip install torch-c-dlpack-ext" in notes()


# Cache and tables


def put(folder, name="notes.kernel", content="nothing"):
    folder.mkdir(mode=0o700, exist_ok=True)
    (folder / name).write_text(content)


def test_cache_that_others_may_write(machine):
    put(machine / "cache", "notes.txt")
    (machine / "cache").chmod(0o777)
    what, to_do = the_problem()
    assert "cannot be used: others may write to it" in what
    assert "QUACKISH_CACHE_DIR" in to_do


def test_cache_that_is_a_file(machine):
    (machine / "cache").write_text("")
    assert "it is not a folder" in the_problem()[0]


def test_damaged_kernels(machine):
    put(machine / "cache")
    what, to_do = the_problem()
    assert "1 of 1 files in" in what
    assert "damaged" in what
    assert "cache verify --delete" in to_do


def test_cache_that_is_off(monkeypatch):
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    assert "QUACKISH_CACHE=0 turns the cache off" in notes()


def test_kernels_of_other_versions(machine, monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    from test_cli_cache import store

    monkeypatch.setattr("quackish.launch.cache._STARTED", float("inf"))
    store(2, cpu="another")
    store(3)
    report = doctor.examine_all(self_testing=False)
    assert report["cache"]["kernels"] == 2
    assert report["cache"]["of no use here"] == 1
    assert "1 of 2 kernels on disk" in " ".join(report["notes"])


def test_damaged_table_of_configs(machine):
    put(machine / "config", "tuned.json", "{")
    what, to_do = the_problem()
    assert "The table of tuned configs" in what
    assert "tune --clear" in to_do


# Self-test


def call_of(op, change):
    """The operation, its results changed by their names."""
    real = self_test._CALLS[op]

    def call(*args):
        results = real(*args)
        change(results)
        return results

    return call


@pytest.mark.parametrize("op, name", [("rms_norm", "dweight"), ("rms_norm", "y"), ("linear_cross_entropy", "loss")])
def test_wrong_results(monkeypatch, op, name, capsys):
    monkeypatch.setitem(self_test._CALLS, op, call_of(op, lambda results: results[name].mul_(1.02)))
    (problem,) = [what for what, _ in problems(self_testing=True)]
    assert problem.startswith(f"{op} on ")
    assert f"gives wrong results: {name} is off by 2" in problem
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "1 problem:" in out


def test_nan_is_wrong(monkeypatch):
    monkeypatch.setitem(self_test._CALLS, "rms_norm", call_of("rms_norm", lambda r: r["dx"][0].fill_(torch.nan)))
    assert "dx is off by inf" in the_problem(self_testing=True)[0]


@pytest.mark.parametrize("path", [KERNELS, PORTABLE])
def test_other_bits_in_a_second_run(monkeypatch, path):
    drift = iter((0.0, 1e-6))
    change = call_of("linear_cross_entropy", lambda results: results["loss"].add_(next(drift)))
    monkeypatch.setitem(self_test._CALLS, "linear_cross_entropy", change)
    make, truth, _ = self_test._OPERATIONS["linear_cross_entropy"]
    monkeypatch.setitem(self_test._OPERATIONS, "linear_cross_entropy", (make, truth, lambda device: (path, "")))
    found = problems(self_testing=True)
    if path == KERNELS:  # promised there
        assert ["other bits in a second run" in what for what, _ in found] == [True]
    else:
        assert found == []


def test_an_operation_that_raises(monkeypatch):
    def fail(*args):
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setitem(self_test._CALLS, "rms_norm", fail)
    what, _ = the_problem(self_testing=True)
    assert "does not run: RuntimeError: CUDA error: an illegal memory access was encountered" in what


def test_a_compiler_that_does_not_work(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")

    def fail(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(self_test, "compile_kernel", fail)
    what, to_do = the_problem(self_testing=True)
    assert "the compiler does not work: OSError: No space left on device" in what
    assert "TMPDIR" in to_do


@pytest.mark.parametrize("part", ["versions", "gpus", "compiler", "paths", "cache_health", "tuned", "environment"])
def test_a_part_that_raises_hides_no_other(monkeypatch, part):
    def fail(*args):
        raise UnsupportedError("not this time")

    monkeypatch.setattr(examine, part, fail)
    what, _ = the_problem()
    assert "UnsupportedError: not this time" in what
