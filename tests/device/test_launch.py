"""The launcher: calling convention, number of compilations, threads, forks, errors, resources of cubins."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from quackish.device import compile as compiling
from quackish.device import compile_jobs, cubin, launch, objects
from quackish.gpu import H200
from quackish.ops.rms_norm.problems import RmsNormFwdProblem, rms_norm_fwd_config
from tests.device.toy_kernels import BrokenToy, HostConfig, HostProblem, HostToy, Toy, ToyConfig, ToyProblem

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process, with an empty cache folder."""
    forget()
    vars(launch.counters).update(compiles=0, disk_loads=0, launches=0)
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("QUACKISH_CACHE", "QUACKISH_COMPILE_JOBS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def forget():
    """Simulates a new process: compiled kernels are only on disk."""
    compiling._ready.clear()


def in_a_process(code):
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def host_toy(factor=2, target="sm_90a"):
    return launch.get(HostToy, HostProblem(factor), HostConfig(), target)


def check(kernel, factor, n=5):
    x, o = torch.arange(float(n)), torch.full((n,), torch.nan)
    kernel(x, o)
    assert torch.equal(o, factor * x)


def test_one_compile_for_each_key():
    for m in range(1, 51):
        check(host_toy(factor=3), 3, n=m)
    assert vars(launch.counters) == dict(compiles=1, disk_loads=0, launches=50)
    kernels = {launch.get(Toy, ToyProblem(), ToyConfig(), target) for target in ("sm_90a", "sm_100a", "sm_90a")}
    assert len({*kernels, host_toy(2), host_toy(3)}) == 4
    assert launch.counters.compiles == 4


def test_one_calling_convention():
    kernel, host = launch.get(Toy, ToyProblem(), ToyConfig(), "sm_90a"), host_toy()
    check(host, 2)
    x = torch.zeros(8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"argument #0 .*expected device_type=cuda"):
        kernel(x, None, x, 1.0)
    with pytest.raises(TypeError, match="Expects 4 parameters"):
        kernel(x, None, x)
    with pytest.raises(ValueError, match="expected dtype=float32"):
        host(torch.zeros(5), torch.zeros(5, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expected to match mX.shape\[0\]"):
        host(torch.zeros(5), torch.zeros(6))
    with pytest.raises(TypeError, match="keyword"):
        host(mX=torch.zeros(5), mO=torch.zeros(5))
    assert launch.counters.launches == 1  # failed calls launch nothing


def test_threads():
    with ThreadPoolExecutor(4) as threads:
        kernels = list(threads.map(host_toy, (1, 2, 3, 3)))
    assert launch.counters.compiles == 3
    assert kernels[2] is kernels[3]
    for factor, kernel in enumerate(kernels[:3], 1):
        check(kernel, factor)


@pytest.mark.exhaustive
def test_fork():
    code = """
import os
from tests.device.test_launch import check, host_toy
check(host_toy(2), 2)
child = os.fork()
if child == 0:  # loaded kernels and the compiler work here
    check(host_toy(2), 2)
    check(host_toy(3), 3)
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert in_a_process(code) == "7\n"


def test_errors_name_the_request():
    with pytest.raises(RuntimeError) as caught:
        launch.get(BrokenToy, HostProblem(factor=5), HostConfig(unroll=3), "sm_90a")
    for part in ("BrokenToy", "sm_90a", "no_such_attribute", "HostProblem(factor=5)", "HostConfig(unroll=3)"):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="HostToy does not compile for sm_42"):
        host_toy(target="sm_42")
    check(host_toy(), 2)  # compiler and lock still work


# Objects


@pytest.mark.parametrize("linker", [None, "no", "false"], ids=["linked", "no linker", "one that fails"])
def test_object_with_and_without_a_linker(monkeypatch, linker, tmp_path):
    if linker is None and objects.linker() is None:
        pytest.skip("needs a linker: ld, ld.lld or mold")
    host_toy()  # the compiler imports the tools it needs from PATH
    forget()
    if linker is not None:
        monkeypatch.setenv("PATH", str(tmp_path))
    if linker == "false":
        (tmp_path / "ld").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "ld").chmod(0o700)
    with compiling.lock:
        data = objects.export(compiling.compile_kernel(HostToy, HostProblem(3), HostConfig(), "sm_90a"))
    assert int.from_bytes(data[16:18], "little") == (3 if linker is None else 1)  # ET_DYN, ET_REL
    check(objects.load(data, "toy"), 3)


@pytest.mark.skipif(objects.linker() is None, reason="needs a linker: ld, ld.lld or mold")
def test_loading_from_disk_imports_no_compiler():
    """The kernel class is looked up but not imported."""
    problem = RmsNormFwdProblem(256, "bfloat16", "bfloat16", "bfloat16", None, None)
    launch.get(problem.spec.kernel_class(H200), problem, rms_norm_fwd_config(problem, H200), H200.target)
    code = """
import sys
import torch
from quackish.device import launch
from quackish.ops.rms_norm.problems import RmsNormFwdProblem, rms_norm_fwd_config
from quackish.gpu import H200
problem = RmsNormFwdProblem(256, "bfloat16", "bfloat16", "bfloat16", None, None)
kernel = launch.get(problem.spec.kernel_class(H200), problem, rms_norm_fwd_config(problem, H200), H200.target)
try:
    kernel(1.5)
except TypeError as error:
    assert "Expects" in str(error), error
print(launch.counters.compiles, launch.counters.disk_loads, "cutlass" in sys.modules)
"""
    assert in_a_process(code) == "0 1 False\n"


# Compiling in parallel


def requests(*factors):
    return [launch.Request(HostToy, HostProblem(factor), HostConfig(), "sm_90a") for factor in factors]


def test_parallel_compilation(monkeypatch):
    monkeypatch.setenv("QUACKISH_COMPILE_JOBS", "2")
    launch.prepare(requests(2, 3, 4, 3))
    assert vars(launch.counters) == dict(compiles=3, disk_loads=0, launches=0)
    for factor in (2, 3, 4):
        check(host_toy(factor), factor)
    assert vars(launch.counters) == dict(compiles=3, disk_loads=3, launches=3)


def test_prepare_compiles_only_missing_kernels(monkeypatch):
    asked = []
    monkeypatch.setattr(compile_jobs, "compile_all", lambda wanted, jobs: asked.append((list(wanted), jobs)) or [])
    monkeypatch.setenv("QUACKISH_COMPILE_JOBS", "8")
    host_toy(2)  # in memory
    host_toy(3)
    compiling._ready.pop(requests(3)[0])  # on disk
    launch.prepare(requests(2, 3, 4, 5))
    assert asked == [(requests(4, 5), 2)]
    launch.prepare(requests(2, 3, 4))  # a single kernel is not worth a process
    for name, value in (("QUACKISH_COMPILE_JOBS", "1"), ("QUACKISH_CACHE", "0")):  # not allowed, or no cache
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            launch.prepare(requests(4, 5, 6))
    monkeypatch.setattr(sys, "executable", "/opt/program/with-python-in-it/app")
    launch.prepare(requests(4, 5, 6))
    assert len(asked) == 1


def test_jobs(monkeypatch):
    assert [compile_jobs.default_jobs(n, cores=24) for n in (0, 1, 9, 99)] == [0, 1, 9, 16]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert compile_jobs.default_jobs(9, cores=24) == 3
    for invalid in ("", "0", "two", "-1", "1.5"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", invalid)
        assert compile_jobs.default_jobs(99, cores=24) == 16
    monkeypatch.setenv("QUACKISH_COMPILE_JOBS", "5")
    assert compile_jobs.default_jobs(9) == 5


@pytest.fixture
def ended(monkeypatch):
    """A function: whether processes were started and all have ended."""
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **how: started.append(popen(*args, **how)) or started[-1])
    return lambda: started and all(process.returncode is not None for process in started)


def test_stopping_early_ends_all_processes(ended):
    outcomes = compile_jobs.compile_all(requests(2, 3, 4), jobs=2)
    next(outcomes)
    outcomes.close()
    assert ended()


def test_failures_of_parallel_compilation(monkeypatch):
    broken = launch.Request(BrokenToy, HostProblem(), HostConfig(), "sm_90a")
    outcomes = {o.request: o for o in compile_jobs.compile_all([broken, *requests(2)], jobs=1)}
    assert outcomes[broken].status == "failed"
    assert "no_such_attribute" in outcomes[broken].message
    assert outcomes[requests(2)[0]].status == "compiled"
    monkeypatch.setenv("QUACKISH_COMPILE_JOBS", "2")
    launch.prepare([broken, *requests(3)])  # raises nothing
    check(host_toy(3), 3)


# Programs in place of worker.py


def statuses(outcomes, *factors):
    outcomes = list(outcomes)
    assert len(outcomes) == len(factors)
    assert {outcome.request for outcome in outcomes} == set(requests(*factors))
    return [outcome.status for outcome in outcomes]


def test_processes_that_die(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text("import sys; sys.exit('lost its head')")
    outcomes = list(compile_jobs.compile_all(requests(2, 3, 4), jobs=2, worker=worker))
    assert statuses(outcomes, 2, 3, 4) == ["failed"] * 3
    assert all(re.search(r"no answer .* \(\w+Error\(.*\)\): lost its head", o.message) for o in outcomes)


def test_processes_that_hang_are_ended(tmp_path, ended):
    worker = tmp_path / "worker.py"
    worker.write_text("import time; time.sleep(60)")
    outcomes = list(compile_jobs.compile_all(requests(2, 3, 4), jobs=2, worker=worker, timeout=0.2))
    assert statuses(outcomes, 2, 3, 4) == ["failed"] * 3
    assert all("none within 0 s" in outcome.message for outcome in outcomes)
    assert ended()


def test_processes_that_cannot_be_started(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert statuses(compile_jobs.compile_all(requests(2, 3), jobs=2), 2, 3) == ["failed"] * 2
    launch.prepare(requests(2, 3))  # raises nothing
    check(host_toy(2), 2)  # compiled here
    assert launch.counters.compiles == 1


# Resources


@pytest.mark.parametrize("config, target", [(ToyConfig(), "sm_90a"), (ToyConfig(threads=256), "sm_100a")])
def test_resources(config, target):
    found = launch.resources(Toy, ToyProblem(bias=True), config, target)
    assert found.smem_bytes == 4 * config.threads
    assert found.threads == config.threads
    assert 8 <= found.registers <= 40
    assert (found.stack_bytes, found.local_loads, found.local_stores) == (0, 0, 0)


def test_resources_sees_local_memory():
    found = launch.resources(Toy, ToyProblem(), ToyConfig(local_array=True), "sm_90a")
    assert found.stack_bytes >= 32 * 4
    assert found.local_loads > 0
    assert found.local_stores > 0


def test_resources_without_cuobjdump(monkeypatch, tmp_path):
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setitem(sys.modules, "triton", None)  # then find_spec returns None
    with pytest.raises(FileNotFoundError, match="pip install triton"):
        cubin._cuobjdump(str(tmp_path))


@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 2], ids=["compiled", "from disk"])
def test_launch_on_the_gpu(times):
    from quackish.gpu import gpu_of

    config = ToyConfig()
    for _ in range(times):
        forget()
        kernel = launch.get(Toy, ToyProblem(bias=True), config, gpu_of(0).target)
    for n in (6 * config.threads, 4 * config.threads):
        x, b = torch.randn(2, n, device="cuda").bfloat16()
        o = torch.full_like(x, torch.nan)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            kernel(x, b, o, 2.0)
        stream.synchronize()
        wanted = (2 * x.float()).view(-1, config.threads).flip(1).flatten() + b.float()
        assert torch.equal(o, wanted.bfloat16())
    assert vars(launch.counters) == dict(compiles=1, disk_loads=times - 1, launches=2)
