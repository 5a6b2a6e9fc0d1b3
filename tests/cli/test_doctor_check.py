"""`quackish doctor --check`: which calls it runs, and what it reports of kernels that fail."""

import collections
import json
import multiprocessing

import pytest
import torch

from quackish import ops
from quackish.__main__ import main
from quackish.cli import call_arguments, check, check_call, check_processes
from quackish.cli import doctor_report as doctor
from quackish.cli.check_call import Check
from quackish.cli.check_processes import checks, per_kernel, run, run_all
from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.device.spec import loaded
from quackish.gpu import B200, H200
from quackish.kernels.gemm.problem import Store
from quackish.ops.linear_cross_entropy.gemm_problems import LceGemmProblem, Softmax
from quackish.ops.mlp import gemm_problems as mlp
from quackish.ops.rms_norm.tools import RMS_NORM
from tests import forked
from tests.device import broken_kernels
from tests.variants import fields_of

CPU = torch.device("cpu")
IN = "in token_rows op=copy n=8 dtype=bf16: "


def checked(name, time_limit=60.0):
    return run(Check(name, broken_kernels.load), "cpu", time_limit, forked.context())


# Which calls ----------------------------------------------------------------------------------------------------------


def launched_by(gpu, prefix=""):
    """(kernel, problem) of each launch of the self-tests."""
    launched = []

    def kernel_for(problem, gpu):
        config = request_for(problem, gpu).config
        return CompiledKernel(lambda *args: launched.append((problem.spec.name, problem)), config)

    with substitute("cpu", KernelDevice(gpu, kernel_for)):
        for one in checks(gpu):
            if one.name in check.SELF_TESTS and one.name.startswith(prefix):
                case = one.load(one.name)
                case.call(case.make(CPU), "cute")
    return launched


@pytest.mark.parametrize("gpu", [H200, B200], ids=lambda gpu: gpu.name)
def test_every_kernel_runs(gpu):
    expected = {name for name, spec in ops.specs().items() if gpu.family in spec.on}
    assert {name for name, _ in launched_by(gpu)} == expected


def test_an_operation_without_kernels_is_not_checked(monkeypatch):
    name, case = "rms_norm", check.SELF_TESTS["rms_norm"]
    assert name in [one.name for one in checks(H200)]
    monkeypatch.setitem(check.SELF_TESTS, name, case._replace(spec=None))
    assert name not in [one.name for one in checks(H200)]


def test_every_variant_of_grouped_mlp_runs():
    launched = [problem for name, problem in launched_by(H200, "grouped_mlp") if name == "grouped_gemm"]
    of = collections.defaultdict(set)
    for problem in launched:
        for name, value in fields_of(problem):
            of[name].add(value)
    assert of["epilogue"] == {mlp.Up, mlp.Down, mlp.DownBackward, mlp.Store}
    assert of["b_major"] == {"k", "n"}
    assert all(len(of[flag]) == 2 for flag in ("b_in_two", "biased", "scaled", "keeps", "accumulate"))
    assert {f in mlp.GATED for f in of["activation"]} == {False, True}
    assert of["cluster_tile"] == set(mlp.CONFIGS)


# What becomes of a call -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, result, message, culprit",
    [
        ("right", "ok", "", None),
        ("wrong", "wrong", "y has error 1.2e-02, expected at most 4e-03", None),
        ("drifts", "wrong", "different bits in two runs: y", None),
        ("raises", "failed", IN + "RuntimeError: CUDA error: an illegal memory access was encountered",
         "token_rows"),
        ("faults", "died", IN + "killed by SIGSEGV about to fault", "token_rows"),
        ("exits", "died", IN + "ended with status 3", "token_rows"),
        ("fails_later", "failed", "after token_rows: ValueError: not the kernel's fault", None),
        ("unsupported", "no kernel", "no kernel for this.", None),
    ],
)  # fmt: skip
def test_results(name, result, message, culprit):
    record = checked(name)
    assert (record["result"], record["message"], record["culprit"]) == (result, message, culprit)
    assert record["launched"] == ["rms_norm_fwd", "token_rows"]
    json.dumps(record)
    if name == "right":
        assert record["results"] == {"y": {"error": 0.0, "bound": RMS_NORM.bound_of("y")}}
        assert [one["kernel"] for one in record["launches"]] == ["rms_norm_fwd", "token_rows"]


def test_a_kernel_that_hangs():
    record = checked("hangs", time_limit=2.0)
    assert (record["result"], record["culprit"]) == ("hung", "token_rows")
    assert record["message"] == IN + "nothing for 2 s"
    assert record["seconds"] < 30
    assert multiprocessing.active_children() == []


def test_compiled_kernels_in_the_emulator():
    record = checked("emulated")
    assert (record["result"], record["message"]) == ("ok", "")
    assert set(record["results"]) == {"y", "dx"}
    assert all(0 < one["error"] <= one["bound"] for one in record["results"].values())


# The report -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def records(capsys, wide):
    """A call of each kind: a broken one does not stop the next ones."""
    todo = [Check(name, broken_kernels.load) for name in ("faults", "right")]
    made = run_all(todo, "cpu", context=forked.context())
    lines = capsys.readouterr().err.splitlines()
    assert [line[:16] for line in lines] == ["[1/2] died      ", "[2/2] ok        "]
    return made


def test_results_per_kernel(records):
    rows = {row["kernel"]: row for row in per_kernel(records, B200)}
    assert set(rows) == {name for name, spec in ops.specs().items() if "sm_100" in spec.on}
    norm, token, gemm = (rows[name] for name in ("rms_norm_fwd", "token_rows", "lce_gemm"))
    assert (norm["result"], norm["calls"], norm["error"], norm["of"]) == ("ok", 1, 0.0, "y of right")
    assert (token["result"], token["why"].partition(": ")[0]) == ("died", "faults")
    assert (gemm["result"], gemm["error"]) == ("not run", None)
    assert check_processes.summary(norm) == "ok; 1 call, error at most 0.00 of its bound"
    launch = dict(kernel="lce_gemm", problem="m=8", us=9.5, tflop_per_s=1.0, gb_per_s=2.0, cublas_us=8.25)
    more = records[1] | dict(launches=[launch, launch | dict(us=4.0)], launched=["lce_gemm"])
    (gemm,) = [row for row in per_kernel([*records, more], B200) if row["kernel"] == "lce_gemm"]
    assert (gemm["us"], gemm["cublas_us"], gemm["problem"]) == (9.5, 8.25, "m=8")
    assert check_processes.summary(gemm).startswith("ok; 1 call, ")
    assert check_processes.summary(gemm).endswith("9.5 us, cuBLAS 8.2 us")
    wrong = records[1] | dict(result="wrong", message="y is off", results={"y": {"error": 1.0, "bound": 0.1}})
    rows = {row["kernel"]: row for row in per_kernel([*records, wrong], B200)}
    assert (rows["rms_norm_fwd"]["result"], rows["rms_norm_fwd"]["error"]) == ("wrong", 1.0)
    assert rows["token_rows"]["result"] == "died"


def test_the_report_and_its_file(tmp_path, capsys, monkeypatch, wide):
    monkeypatch.setattr(call_arguments, "has_gpu", lambda: True)
    todo = [Check(name, broken_kernels.load) for name in ("right", "wrong")]

    def section(report):
        return doctor.check_kernels(report, todo, CPU, B200, context=forked.context())

    monkeypatch.setattr(doctor, "SECTIONS", {})
    monkeypatch.setattr(doctor, "CHECKS", {"kernels": section})
    assert main(["doctor", "--check", str(tmp_path / "check.json")]) == 1
    out, err = capsys.readouterr()
    assert "written to" in err
    assert "rms_norm_fwd wrong; 2 calls" in " ".join(out.split())  # the padding depends on the longest name
    assert "1 problem:\n  1. wrong: wrong: y has error 1.2e-02, expected at most 4e-03\n     Please report it" in out
    found = json.loads((tmp_path / "check.json").read_text())["check"]
    assert {"gpu", "driver", "commit", "torch", "dsl", "quackish"} <= set(found["environment"])
    assert [record["result"] for record in found["calls"]] == ["ok", "wrong"]
    (norm,) = [row for row in found["kernels"] if row["kernel"] == "rms_norm_fwd"]
    assert {"result", "error", "bound", "us", "cublas_us"} <= set(norm)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_nothing_to_check_without_a_gpu(capsys):
    assert main(["doctor", "--check"]) == 2
    assert "there is no GPU here to check; `quackish emulate`" in capsys.readouterr().err


def test_products_of_cublas_have_the_sizes_of_a_launch():
    make = loaded(LceGemmProblem.spec.cublas)
    sizes = dict(m=16, n=24, k=32)
    a, b = make(LceGemmProblem(Store(), "bfloat16", "bfloat16", a_major="m", b_major="n"), sizes, CPU)
    assert (a.shape, b.shape, a.stride(0), b.stride(1)) == ((16, 32), (32, 24), 1, 1)
    a, b = make(LceGemmProblem(Softmax(), "bfloat16", None), sizes, CPU)
    assert (a.shape, b.shape, a.stride(1), b.stride(0)) == ((16, 32), (32, 24), 1, 1)
    make = loaded(mlp.MlpGemmProblem.spec.cublas)
    up = mlp.MlpGemmProblem(mlp.Up("swiglu"), "bfloat16", 4, "bfloat16")
    a, b = make(up, dict(rows=40, n=24, k=32, groups=4), CPU)
    assert (a.shape, b.shape) == ((4, 10, 32), (4, 32, 48))
    a, b = make(mlp.MlpGemmProblem(mlp.Store(), "bfloat16", 4, "bfloat16"), dict(rows=40, m=16, n=24, groups=4), CPU)
    assert (a.shape, b.shape) == ((4, 16, 10), (4, 10, 24))
    assert check_call.cublas_us(None, CPU) is None


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.exhaustive
def test_check_on_a_gpu():
    report = doctor.examine(doctor.CHECKS)
    assert report["problems"] == []
    found = report["check"]
    assert found["environment"]["gpu"] in torch.cuda.get_device_name(0)
    assert all(record["result"] == "ok" for record in found["calls"])
    for row in found["kernels"]:
        assert row["result"] == "ok", row
        assert row["us"]
    gemms = [row for row in found["kernels"] if ops.specs()[row["kernel"]].cublas]
    assert all(0.5 * row["cublas_us"] < row["us"] < 3 * row["cublas_us"] for row in gemms)
