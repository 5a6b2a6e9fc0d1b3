"""`python -m quackish precompile`: the kernels that it puts on disk are those that the operations then ask for."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quackish import launch, rms_norm, toolchain
from quackish.__main__ import main
from quackish.cli import precompile
from quackish.gpu import A100, B200, H200
from quackish.launch import cache, parallel
from quackish.launch import compile as compiling
from quackish.launch.parallel import Outcome
from quackish.ops import cuda, rms_norm_plans, workspace
from quackish.ops.linear_cross_entropy import api as lce
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import cublas, linear_cross_entropy

META, CPU = torch.device("meta"), torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """What would have been compiled: nothing is, and no compiler is needed."""
    asked = []
    monkeypatch.setattr(toolchain, "find", lambda: toolchain.Toolchain("0", "0", "cu13", "x86_64", tmp_path))

    def compile_all(requests, jobs):
        asked.extend(requests)
        return (Outcome(request, "loaded" if i == 0 else "compiled", "") for i, request in enumerate(requests))

    monkeypatch.setattr(parallel, "compile_all", compile_all)
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    return asked


@pytest.fixture(params=[H200, B200], ids=lambda gpu: gpu.name)
def on(request, monkeypatch):
    """RMSNorm takes tensors without memory, and linear cross entropy a CPU's, for tensors of this GPU."""
    gpu = request.param
    monkeypatch.setattr(on_kernels, "gpu_of", lambda index: gpu)
    monkeypatch.setattr(lce, "no_kernel_on", lambda device: "")
    monkeypatch.setattr(lce, "_plans", {})
    monkeypatch.setattr(rms_norm_plans, "_forward_plans", {})
    monkeypatch.setattr(rms_norm_plans, "_backward_plans", {})
    monkeypatch.setattr(rms_norm_plans, "gpu_for", lambda device: gpu)
    monkeypatch.setattr(cuda, "current_device", lambda: None)
    monkeypatch.setattr(cuda, "stream_of", lambda index: 0)
    monkeypatch.setattr(workspace, "take", lambda *args: (0, 0, None))
    monkeypatch.setattr(
        cuda, "empty", lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=META)
    )
    for name in ("mm", "addmm"):
        monkeypatch.setattr(cublas, name, lambda a, b, out: None)
    k = on_kernels.kernels_on(CPU)
    monkeypatch.setattr(on_kernels, "kernels_of", lambda device: k)
    return gpu


def tensor(*shape, dtype=torch.bfloat16, grad=True, device=META):
    return torch.empty(shape, dtype=dtype, device=device, requires_grad=grad)


RMS_NORM = {
    "": lambda m, n: rms_norm(tensor(m, n), tensor(n)),
    "--residual": lambda m, n: sum(rms_norm(tensor(m, n), tensor(n), residual=tensor(m, n))),
    "--bias --dtype fp32": lambda m, n: rms_norm(*(tensor(*s, dtype=torch.float32) for s in ((m, n), (n,), (n,)))),
    "--residual fp32 --out-dtype fp16": lambda m, n: sum(
        rms_norm(tensor(m, n), tensor(n), residual=tensor(m, n, dtype=torch.float32), out_dtype=torch.float16)
    ),
    "--weight-dtype none": lambda m, n: rms_norm(tensor(m, n), None),
}


@pytest.mark.parametrize("options", RMS_NORM)
def test_rms_norm(options, compiled, on, capsys):
    assert main(["precompile", "rms_norm", "512x256", *options.split(), "--gpu", on.name.lower()]) == 0
    with launch.record() as recording:
        RMS_NORM[options](512, 256).sum().backward()
    assert set(compiled) == set(recording.requests)
    assert len(compiled) == 2
    assert {request.target for request in compiled} == {on.target}


LCE = {
    "": {},
    "--schedule recompute": dict(schedule="recompute"),
    "--schedule stored --bias": dict(schedule="stored"),
    "--dtype fp16 --reduction none": dict(reduction="none"),
    "--label-smoothing 0.1 --class-weight": dict(label_smoothing=0.1),
    "--softcap 30 --z-loss 1e-4 --chunk-size 128": dict(softcap=30.0, z_loss=1e-4, chunk_size=128),
}


@pytest.mark.parametrize("options", LCE)
def test_linear_cross_entropy(options, compiled, on, capsys):
    m, h, v = 300, 64, 1000
    shape = f"{m}x{h}x{v}"
    assert main(["precompile", "linear_cross_entropy", shape, *options.split(), "--gpu", on.name.lower()]) == 0
    of = dict(dtype=torch.float16 if "fp16" in options else torch.bfloat16, device=CPU)
    given = dict(LCE[options])
    if "--bias" in options:
        given["linear_bias"] = tensor(v, **of)
    if "--class-weight" in options:
        given["weight"] = torch.ones(v)
    x, w, target = tensor(m, h, **of), tensor(v, h, **of), torch.zeros(m, dtype=torch.int64)
    with launch.record() as recording:
        loss = linear_cross_entropy(x, w, target, **given)
        loss.backward(torch.rand(loss.shape))
        with torch.no_grad():
            linear_cross_entropy(x, w, target, **given)
    assert set(compiled) == set(recording.requests)
    assert len(compiled) == len(set(compiled)) >= 8


@pytest.mark.parametrize("schedule", ["auto", "stored", "recompute", "recompute --chunk-size 128"])
def test_linear_cross_entropy_in_compiled_code(schedule, compiled, on, capsys, monkeypatch, narrow):
    m, h, v = 1000, 512, 8000
    words = f"precompile linear_cross_entropy {m}x{h}x{v} --schedule {schedule} --compiled --gpu {on.name}"
    assert main(words.lower().split()) == 0
    monkeypatch.setattr(lce, "is_plain", lambda: False)  # as while it is traced: operators run
    of = dict(dtype=torch.bfloat16, device=CPU)
    x, w, target = tensor(m, h, **of), tensor(v, h, **of), torch.zeros(m, dtype=torch.int64)
    name, _, chunk_size = schedule.partition(" --chunk-size ")
    given = dict(schedule=name, chunk_size=int(chunk_size) if chunk_size else None)
    with launch.record() as recording:
        linear_cross_entropy(x, w, target, **given).backward()
        with torch.no_grad():
            linear_cross_entropy(x, w, target, **given)
    assert set(compiled) == set(recording.requests)


def test_several_shapes_and_gpus(compiled, capsys):
    assert main(["precompile", "rms_norm", "64x256", "1000x256", "64x512", "--gpu", "h100,h200, b200"]) == 0
    targets = [request.target for request in compiled]
    assert (targets.count("sm_90a"), targets.count("sm_100a")) == (4, 4)  # not for each M, nor for H100 and H200
    out = capsys.readouterr().out
    assert "[8/8] compiled RmsNorm" in out
    assert "8 kernels: 7 compiled, 1 were there, 0 failed" in out


def test_a_file(compiled, capsys, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("# ours\n\nrms_norm 64x256 --residual # with\nlinear_cross_entropy 64x64x500 --schedule stored\n")
    assert main(["precompile", "--from", str(file), "--gpu", "h200"]) == 0
    names = {request.kernel_class.__name__ for request in compiled}
    assert names > {"RmsNormFwd", "RmsNormBwd", "GemmSm90", "LceRows"}
    assert all(request.problem.residual_dtype for request in compiled if "RmsNormFwd" in str(request.kernel_class))


def test_where_no_kernel_runs(compiled, capsys):
    shapes = ["rms_norm", "64x256"]
    assert main(["precompile", *shapes, "--dtype", "fp64", "--gpu", "h200"]) == 1
    out = capsys.readouterr().out
    assert "nothing to compile: rms_norm 64x256 float64 on H200: rms_norm: no kernel for x in float64" in out
    assert compiled == []


@pytest.mark.parametrize("name", ["a100", "A10", "l40s", "cpu", "this"])
def test_gpus_without_kernels_are_refused(name, compiled, capsys, monkeypatch):
    if name == "this":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(precompile, "gpu_of", lambda index: A100)
    given = [] if name == "this" else ["--gpu", f"h200,{name}"]
    assert main(["precompile", "rms_norm", "64x256", *given]) == 2
    err = capsys.readouterr().err
    assert "nothing to compile for " in err
    assert "the portable path runs; --gpu takes h100, h200, b200\n" in err
    assert compiled == []


def test_only_gpus_with_kernels_are_offered(capsys):
    with pytest.raises(SystemExit):
        main(["precompile", "--help"])
    out = " ".join(capsys.readouterr().out.split())
    assert "h100, h200, b200; or this" in out
    assert not any(name in out for name in ("a100", "a10", "l40s"))


@pytest.mark.parametrize(
    "words, said",
    [
        (["rms_norm"], "expected OP and at least one SHAPE"),
        ([], "expected OP and at least one SHAPE"),
        (["rms_norm", "4096", "--gpu", "h200"], "SHAPE is '4096'; expected MxN"),
        (["rms_norm", "64x256", "--gpu", "h300"], "--gpu is 'h300'; expected one of"),
        (["rms_norm", "99999999999999999999x8", "--gpu", "h200"], "expected sizes below 2**31"),
        (["layer_norm", "64x256", "--gpu", "h200"], "OP is 'layer_norm'; expected one of"),
        (["rms_norm", "64x256", "--softcap", "1", "--gpu", "h200"], "--softcap is an option of linear_cross_entropy"),
        (["--from", "/no/such/file", "--gpu", "h200"], "No such file"),
        (["rms_norm", "64x256", "--from", "x", "--gpu", "h200"], "expected OP and at least one SHAPE, or --from"),
    ],
)
def test_what_is_wrong_is_told(words, said, compiled, capsys):
    if "--gpu" not in words:
        words = [*words, "--gpu", "h200"]
    assert main(["precompile", *words]) == 2
    assert said in capsys.readouterr().err
    assert compiled == []


@pytest.mark.parametrize(
    "line, said",
    [
        (b"rms_norm 64x256 --residul", "unrecognized arguments: --residul"),
        (b"rms_norm", "the following arguments are required: shape"),
        (b"rms_nrom 64x256", "OP is 'rms_nrom'; expected one of"),
        (b"rms_norm 64xx", "SHAPE is '64xx'; expected MxN"),
        (b"rms_norm 64x256 --softcap 3", "--softcap is an option of linear_cross_entropy"),
        (b"rms_norm 64x256 --dtype int8", "--dtype is 'int8'; expected one of"),
        (b'rms_norm "64x256', "No closing quotation"),
        (b"rms_norm \xff", "not UTF-8; expected a text file"),
    ],
)
def test_a_file_with_a_mistake(line, said, compiled, capsys, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_bytes(b"rms_norm 64x256\n" + line + b"\n")
    assert main(["precompile", "--from", str(file), "--gpu", "h200"]) == 2
    assert f"precompile: {file}, line 2: {said}" in capsys.readouterr().err
    assert compiled == []


def test_a_file_with_a_line_that_has_no_kernel(compiled, capsys, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("# nothing else\n")
    assert main(["precompile", "--from", str(file), "--gpu", "h200"]) == 2
    assert f"{file} has no shape" in capsys.readouterr().err
    file.write_text("rms_norm 64x256\nrms_norm 64x256 --dtype fp64\n")
    assert main(["precompile", "--from", str(file), "--gpu", "h200"]) == 1
    assert f"nothing to compile: {file}, line 2: rms_norm 64x256 float64 on H200: " in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which is the default")
def test_without_a_gpu_it_must_be_named(compiled, capsys):
    assert main(["precompile", "rms_norm", "64x256"]) == 2
    assert "--gpu, of h100, h200, b200\n" in capsys.readouterr().err


def test_where_nothing_can_be_kept(compiled, capsys, monkeypatch, tmp_path):
    words = ["precompile", "rms_norm", "64x256", "--gpu", "h200"]
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert main(words) == 2
    assert "others may write" in capsys.readouterr().err
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    assert main(words) == 2
    assert "QUACKISH_CACHE=0" in capsys.readouterr().err
    assert compiled == []


def test_failures_are_told(compiled, capsys, monkeypatch):
    def compile_all(requests, jobs):
        assert jobs == 2
        return (Outcome(request, "failed", "for a reason") for request in requests)

    monkeypatch.setattr(parallel, "compile_all", compile_all)
    assert main(["precompile", "rms_norm", "64x256", "--gpu", "h200", "--jobs", "5"]) == 1
    printed = capsys.readouterr()
    assert "RmsNormFwd sm_90a n=256 x=bf16" in printed.err
    assert "failed: for a reason" in printed.err
    assert "0 compiled, 0 were there, 2 failed" in printed.out


def test_what_could_not_be_stored_is_told(compiled, capsys, monkeypatch, tmp_path):
    def compile_all(requests, jobs):
        yield Outcome(requests[0], "compiled", "")
        yield Outcome(requests[1], "not stored", "No space left on device")

    monkeypatch.setattr(parallel, "compile_all", compile_all)
    assert main(["precompile", "rms_norm", "64x256", "--gpu", "h200"]) == 1
    printed = capsys.readouterr()
    assert "2 kernels: 2 compiled, 0 were there, 0 failed" in printed.out
    assert f"1 stored in {tmp_path / 'cache'}\n" in printed.out
    assert f"compiled 2, stored 1 in {tmp_path / 'cache'}: No space left on device. " in printed.err


def test_kernels_that_cannot_be_stored_are_not_said_to_be_there(capsys, monkeypatch, tmp_path):
    """A real compilation; a folder has the name that the kernel's file would get."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    (request,) = precompile.requests_of("rms_norm_forward", "64x256", "h200")
    name = cache.name_of(compiling.identity_of(request))
    (tmp_path / "cache").mkdir(mode=0o700)
    (tmp_path / "cache" / name).mkdir()
    assert main(["precompile", "rms_norm_forward", "64x256", "--gpu", "h200"]) == 1
    printed = capsys.readouterr()
    assert f"compiled 1, stored 0 in {tmp_path / 'cache'}: Is a directory" in printed.err
    assert "they are in" not in printed.out


def test_without_a_compiler(compiled, capsys, monkeypatch):
    def find():
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(toolchain, "find", find)
    assert main(["precompile", "rms_norm", "64x256", "--gpu", "h200"]) == 2
    assert "the compiler is not installed (No module named 'cutlass')" in capsys.readouterr().err
    assert compiled == []


def test_interrupted(compiled, capsys, monkeypatch):
    def compile_all(requests, jobs):
        yield Outcome(requests[0], "compiled", "")
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel, "compile_all", compile_all)
    assert main(["precompile", "rms_norm", "64x256", "--gpu", "h200"]) == 130
    assert "what is stored so far is kept" in capsys.readouterr().err


def test_on_disk_afterwards(tmp_path):
    """As a user runs it, twice, and then a process that asks for the same."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    code = """
import sys
from quackish.__main__ import main
from quackish.launch import cache
cache._STARTED = float("inf")  # sources may be edited while tests run
main(["precompile", "rms_norm_forward", "64x256", "--gpu", "h200"])
main(["precompile", "rms_norm_forward", "64x256", "--gpu", "h200"])
from quackish import kernels, launch
from quackish.configs.rms_norm import RmsNormFwdProblem, rms_norm_fwd_config
from quackish.gpu import H200
problem = RmsNormFwdProblem(256, "bfloat16", "bfloat16", "bfloat16", None, None)
launch.get(kernels.find("rms_norm_fwd", H200), problem, rms_norm_fwd_config(problem, H200), H200.target)
print(launch.counters)
"""
    env = {**os.environ, "QUACKISH_CACHE_DIR": str(tmp_path / "cache")}
    cwd = Path(__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    first, first_sum, second, second_sum, counters = done.stdout.splitlines()
    assert ("compiled RmsNormFwd" in first, "1 compiled, 0 were there" in first_sum) == (True, True)
    assert ("loaded   RmsNormFwd" in second, "0 compiled, 1 were there" in second_sum) == (True, True)
    assert counters == "Counters(compiles=0, disk_loads=1, launches=0)"


def test_progress_with_rich(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    outcomes = [Outcome(None, "compiled", "")] * 3
    assert list(precompile._with_progress(iter(outcomes), 3)) == outcomes
    assert capsys.readouterr().out == ""


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() not in ((9, 0), (10, 0)),
    reason="needs a GPU that kernels run on",
)
def test_operations_compile_nothing_more(tmp_path):
    """Exported, imported into an empty cache folder, and used: by a process that compiles nothing."""
    env = {**os.environ, "QUACKISH_CACHE_DIR": str(tmp_path / "made")}
    cwd = Path(__file__).parents[1]

    def quackish(*words):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    quackish("-m", "quackish", "precompile", "rms_norm", "512x1024", "--residual", "--gpu", "this")
    quackish("-m", "quackish", "precompile", "linear_cross_entropy", "512x256x2000", "--gpu", "this")
    quackish("-m", "quackish", "cache", "export", str(tmp_path / "kernels.tar"))
    env["QUACKISH_CACHE_DIR"] = str(tmp_path / "imported")
    assert "of no use" not in quackish("-m", "quackish", "cache", "import", str(tmp_path / "kernels.tar"))
    code = """
import sys
import torch
import quackish
from quackish.launch import counters
bf16 = dict(dtype=torch.bfloat16, device="cuda", requires_grad=True)
x, r, w = torch.randn(512, 1024, **bf16), torch.randn(512, 1024, **bf16), torch.ones(1024, **bf16)
sum(quackish.rms_norm(x, w, residual=r)).sum().backward()
x, w = torch.randn(512, 256, **bf16), torch.randn(2000, 256, **bf16)
target = torch.arange(512, device="cuda")
quackish.linear_cross_entropy(x, w, target).backward()
with torch.no_grad():
    quackish.linear_cross_entropy(x, w, target)
torch.cuda.synchronize()
print(counters.compiles, counters.disk_loads > 8, counters.launches > 8, "cutlass" in sys.modules)
"""
    from quackish.launch import objects

    imported = objects.linker() is None
    assert quackish("-c", code).strip() == f"0 True True {imported}"
