"""`quackish precompile`: it stores the kernels that the operations launch.

test_explain.py tests that a dry run launches the same as the operation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from quackish.__main__ import main
from quackish.cli import precompile
from quackish.cli.parser import CommandError, Parser
from quackish.device import cache, toolchain
from quackish.device import compile as compiling
from quackish.device.compile_jobs import Outcome


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path, wide):
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    return tmp_path / "cache"


def run(words, compile_all=None, find=lambda: None):
    """(exit status, requested kernels). Nothing is compiled."""
    requests = []

    def stand_in(kernels, jobs):
        requests.extend(kernels)
        if compile_all is not None:
            return compile_all(kernels, jobs)
        return (Outcome(request, "loaded" if i == 0 else "compiled", "") for i, request in enumerate(kernels))

    parser = Parser()
    precompile.add_arguments(parser)
    return precompile.run(parser.parse_args(words.split()), find, stand_in), requests


def test_several_shapes_and_gpus(capsys):
    status, requests = run("rms_norm 64x256 1000x256 64x512 --gpu h100,h200,B200")
    assert status == 0
    targets = [request.target for request in requests]
    assert (targets.count("sm_90a"), targets.count("sm_100a")) == (4, 4)  # not for each M, nor for H100 and H200
    out = capsys.readouterr().out
    assert "[8/8] compiled RmsNormBwd sm_100a n=512 x=bf16" in out
    assert "8 kernels: 7 compiled, 1 on disk, 0 failed" in out


def test_calls_without_grad_are_included():
    _, requests = run("linear_cross_entropy 300x64x1000 --gpu h200")
    _, without_grad = run("linear_cross_entropy 300x64x1000 --gpu h200 --no-grad")
    assert set(without_grad) < set(requests)
    assert len(requests) == len(set(requests)) >= 8


def test_a_file(tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_text("# ours\n\nrms_norm 64x256 --residual # with\nlinear_cross_entropy 64x64x500 --schedule stored\n")
    status, requests = run(f"--from {file} --gpu h200")
    assert status == 0
    names = {request.kernel_class.__name__ for request in requests}
    assert names > {"RmsNormFwd", "RmsNormBwd", "LceGemmSm90", "LceRows"}
    assert all(request.problem.residual_dtype for request in requests if "RmsNormFwd" in str(request.kernel_class))


def test_calls_on_the_portable_path(capsys, tmp_path):
    assert run("rms_norm 64x256 --dtype fp64 --gpu h200") == (1, [])
    out = capsys.readouterr().out
    assert "nothing to compile: rms_norm 64x256 float64 on H200: rms_norm: no kernel for x in float64" in out
    (tmp_path / "file").write_text("rms_norm 64x256\nrms_norm 64x256 --dtype fp64\n")
    assert run(f"--from {tmp_path / 'file'} --gpu h200")[0] == 1
    assert f"nothing to compile: {tmp_path / 'file'}, line 2: rms_norm 64x256 float64 on" in capsys.readouterr().out


def test_gpus_without_kernels_are_refused():
    for name in ("A10", "cpu"):
        with pytest.raises(CommandError, match=f"'{name}' is unknown; expected one of h100, .*, gb200, b300, this$"):
            run(f"rms_norm 64x256 --gpu h200,{name}")


@pytest.mark.parametrize(
    "words, message",
    [
        ("rms_norm", "expected OP and at least one SHAPE"),
        ("", "expected OP and at least one SHAPE"),
        ("--from /no/such/file", "No such file"),
        ("--from /dev/null", "/dev/null has no shape; expected lines such as"),
        ("rms_norm 64x256 --from x", "expected OP and at least one SHAPE, or --from"),
    ],
)
def test_invalid_arguments(words, message, capsys):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    assert main(["precompile", *words.split(), "--gpu", "h200"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "line, message",
    [
        (b"rms_norm 64x256 --residul", "unrecognized arguments: --residul"),
        (b"rms_norm 64xx", "SHAPE is '64xx'; expected MxN"),
        (b'rms_norm "64x256', "No closing quotation"),
        (b"rms_norm \xff", "not UTF-8; expected a text file"),
    ],
)
def test_errors_in_a_file_name_the_line(line, message, tmp_path):
    file = tmp_path / "shapes.txt"
    file.write_bytes(b"rms_norm 64x256\n" + line + b"\n")
    with pytest.raises(CommandError) as error:
        run(f"--from {file} --gpu h200")
    assert str(error.value).startswith(f"{file}, line 2: {message}")


def test_unusable_compiler_or_cache(folder, monkeypatch):
    def find():
        return toolchain._folder("nvidia-cutlass-dsl", "not_installed")

    with pytest.raises(CommandError, match=r"the compiler cannot be used: .* \(no module named 'not_installed'\)"):
        run("rms_norm 64x256 --gpu h200", find=find)
    with pytest.raises(CommandError, match="no compiler for this driver"):
        run("rms_norm 64x256 --gpu h200", find=lambda: toolchain.choose_flavour([13], (11, 8)))
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(CommandError, match="others may write"):
        run("rms_norm 64x256 --gpu h200")
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    with pytest.raises(CommandError, match="QUACKISH_CACHE=0"):
        run("rms_norm 64x256 --gpu h200")


def test_failures_and_interruption(capsys):
    def failing(requests, jobs):
        assert jobs == 2
        return (Outcome(request, "failed", "for a reason") for request in requests)

    assert run("rms_norm 64x256 --gpu h200 --jobs 5", failing)[0] == 1
    printed = capsys.readouterr()
    assert "RmsNormFwd sm_90a n=256 x=bf16" in printed.err
    assert "failed: for a reason" in printed.err
    assert "0 compiled, 0 on disk, 2 failed" in printed.out

    def interrupted(requests, jobs):
        yield Outcome(requests[0], "compiled", "")
        raise KeyboardInterrupt

    assert run("rms_norm 64x256 --gpu h200", interrupted)[0] == 130
    assert "the kernels stored so far are kept" in capsys.readouterr().err


def test_kernels_that_cannot_be_stored(capsys, folder):
    """Compiles a kernel whose file name is taken by a folder."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (request,) = precompile.requests_of("rms_norm_forward", "64x256", "h200")
    name = cache.name_of(cache.identity(*request))
    folder.mkdir(mode=0o700)
    (folder / name).mkdir()
    assert main(["precompile", "rms_norm_forward", "64x256", "--gpu", "h200"]) == 1
    printed = capsys.readouterr()
    assert f"compiled 1, stored 0 in {folder}: Is a directory" in printed.err


def test_kernels_are_on_disk_afterwards(capsys):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    (request,) = precompile.requests_of("rms_norm_forward", "64x256", "h200")
    for first, last in ("compiled RmsNormFwd", "1 compiled, 0 on"), ("loaded   RmsNormFwd", "0 compiled, 1 on"):
        assert main(["precompile", "rms_norm_forward", "1000x256", "--gpu", "h200"]) == 0
        out = capsys.readouterr().out
        assert first in out
        assert last in out
        assert " s in 1 process; " in out
        assert compiling.is_available(request)  # for any M


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() not in ((9, 0), (10, 0)),
    reason="needs a GPU that kernels run on",
)
def test_operations_compile_nothing_more(tmp_path):
    """Kernels in a copied cache folder are used by a process that compiles nothing."""
    env = {**os.environ, "QUACKISH_CACHE_DIR": str(tmp_path / "made")}
    cwd = Path(__file__).parents[2]

    def quackish(*words):
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=cwd, env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    quackish("-m", "quackish", "precompile", "rms_norm", "512x1024", "--residual", "--gpu", "this")
    quackish("-m", "quackish", "precompile", "linear_cross_entropy", "512x256x2000", "--gpu", "this")
    env["QUACKISH_CACHE_DIR"] = str(shutil.copytree(tmp_path / "made", tmp_path / "copied"))
    code = """
import sys
import torch
import quackish
from quackish.device.launch import counters
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
    from quackish.device import objects

    imported = objects.linker() is None
    assert quackish("-c", code).strip() == f"0 True True {imported}"
