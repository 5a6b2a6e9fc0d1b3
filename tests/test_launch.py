"""The launcher: what it returns, how often it compiles, threads, forks, errors, and what it reads from a cubin."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from toy_kernels import BrokenToy, HostConfig, HostProblem, HostToy, Toy, ToyConfig, ToyProblem

from quackish import launch
from quackish.launch import compile as compiling

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """As in a new process, with an empty cache folder."""
    monkeypatch.setattr(compiling, "_ready", {})
    monkeypatch.setattr("quackish.errors._warned", set())
    monkeypatch.setattr("quackish.launch.cache._STARTED", float("inf"))  # sources may be edited while tests run
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    for counter in vars(launch.counters):
        monkeypatch.setattr(launch.counters, counter, 0)


def forget():
    """As in the next process: what was compiled is on disk only."""
    compiling._ready.clear()


def host_toy(factor=2, target="sm_90a"):
    return launch.get(HostToy, HostProblem(factor), HostConfig(), target)


def check(kernel, factor, n=5):
    x, o = torch.arange(float(n)), torch.full((n,), torch.nan)
    kernel(x, o)
    assert torch.equal(o, factor * x)


def test_import_loads_no_compiler():
    code = """
import sys
import torch
before = set(sys.modules)
import quackish.launch
loaded = {name.partition(".")[0] for name in set(sys.modules) - before} & {"cutlass", "cuda", "tvm_ffi", "triton"}
assert not loaded, f"import quackish.launch loaded {sorted(loaded)}"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stderr


def test_fifty_m_are_one_compile():
    for m in range(1, 51):
        check(host_toy(factor=3), 3, n=m)
    assert vars(launch.counters) == dict(compiles=1, disk_loads=0, launches=50)


def test_kernel_is_prepared_once():
    assert host_toy() is host_toy()
    assert host_toy() is not host_toy(factor=3)
    assert launch.counters.compiles == 2


def test_ready_kernels_need_no_lock(monkeypatch):
    kernel = host_toy()
    monkeypatch.setattr(compiling, "lock", None)
    assert host_toy() is kernel


def test_each_target_has_its_own_kernel():
    kernels = {launch.get(Toy, ToyProblem(), ToyConfig(), target) for target in ("sm_90a", "sm_100a", "sm_90a")}
    assert len(kernels) == 2
    assert launch.counters.compiles == 2


@pytest.mark.parametrize("times", [1, 2], ids=["compiled", "from disk"])
def test_one_calling_convention(times):
    for _ in range(times):
        forget()
        kernel = launch.get(Toy, ToyProblem(), ToyConfig(), "sm_90a")
        host = host_toy()
    assert (launch.counters.compiles, launch.counters.disk_loads) == (2, 2 * (times - 1))
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
    assert launch.counters.launches == 1  # refused calls launched nothing


def in_threads(calls):
    """Runs the calls in one thread each, all at once; their results, in order."""
    barrier, results = threading.Barrier(len(calls)), [None] * len(calls)

    def run(i):
        barrier.wait()
        results[i] = calls[i]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_four_threads_with_one_key():
    kernels = in_threads([host_toy] * 4)
    assert launch.counters.compiles == 1
    assert len(set(kernels)) == 1
    check(kernels[0], 2)


def test_four_threads_with_four_keys():
    kernels = in_threads([lambda factor=factor: host_toy(factor) for factor in range(4)])
    assert launch.counters.compiles == 4
    for factor, kernel in enumerate(kernels):
        check(kernel, factor)


def test_fork():
    code = """
import os
from test_launch import check, host_toy
check(host_toy(2), 2)
child = os.fork()
if child == 0:  # what was loaded before, and the compiler, both work here
    check(host_toy(2), 2)
    check(host_toy(3), 3)
    os._exit(7)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(TESTS), str(TESTS.parent)]))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 7, done.stderr


def test_errors_say_what_was_compiled():
    with pytest.raises(RuntimeError) as caught:
        launch.get(BrokenToy, HostProblem(factor=5), HostConfig(unroll=3), "sm_90a")
    for part in ("BrokenToy", "sm_90a", "no_such_attribute", "HostProblem(factor=5)", "HostConfig(unroll=3)"):
        assert part in str(caught.value)
    with pytest.raises(RuntimeError, match="HostToy does not compile for sm_42"):
        host_toy(target="sm_42")
    check(host_toy(), 2)  # and the compiler is not left in a state, nor the lock locked


@pytest.mark.parametrize("target", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "config", [ToyConfig(), ToyConfig(threads=256, cluster=2), ToyConfig(threads=64, cluster=2, cooperative=True)]
)
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


def test_resources_of_another_compiler_are_not_zero(monkeypatch):
    monkeypatch.setattr("quackish.launch.cubin._LAUNCH_CONFIG", "!llvm.struct<(i32)>")
    with pytest.raises(RuntimeError, match="shared memory"):
        launch.resources(Toy, ToyProblem(), ToyConfig(), "sm_90a")


def test_resources_without_cuobjdump(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr("quackish.launch.cubin._TOOLKIT", str(tmp_path))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install triton"):
        launch.resources(Toy, ToyProblem(), ToyConfig(), "sm_90a")


@pytest.mark.gpu
@pytest.mark.parametrize("times", [1, 2], ids=["compiled", "from disk"])
@pytest.mark.parametrize(
    "config", [ToyConfig(), ToyConfig(cluster=2), ToyConfig(cooperative=True), ToyConfig(cluster=2, cooperative=True)]
)
def test_launch_on_the_gpu(config, times):
    from quackish.gpu import gpu_of

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
