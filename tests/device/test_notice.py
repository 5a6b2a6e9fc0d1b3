"""The line that tells a user of a terminal that a call waits for the compiler."""

import io
import threading
import time
from types import SimpleNamespace

import pytest

from quackish.device import compile as compiling
from quackish.device import compile_jobs, notice
from quackish.device.compile import Request
from tests.device.toy_kernels import HostConfig, HostProblem, HostToy

REQUEST = Request(HostToy, HostProblem(2), HostConfig(), "sm_90a")


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stderr(monkeypatch, tmp_path):
    """A terminal, with a compiler that takes 0.3 s and a notice after 0.1 s."""
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("quackish.device.cache._STARTED", float("inf"))
    monkeypatch.setattr(notice, "AFTER_S", 0.1)
    monkeypatch.setattr(notice, "sys", SimpleNamespace(stderr=Terminal()))  # pytest has its own sys.stderr
    seen = []

    def compile_kernel(*request):
        time.sleep(0.3)
        seen.append(notice.sys.stderr.getvalue())  # what the user saw meanwhile

    monkeypatch.setattr(compiling, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compiling.objects, "export", lambda kernel: b"object")
    monkeypatch.setattr(compiling.objects, "load", lambda data, name: print)
    monkeypatch.setattr(compiling, "_ready", {})
    return seen


def test_a_slow_compilation_is_announced_while_it_runs(stderr, tmp_path):
    compiling.get(*REQUEST)
    line = f"quackish: compiling HostToy for sm_90a, first use only; kept in {tmp_path / 'cache'}\n"
    assert stderr == [line]
    compiling.get(*REQUEST)
    compiling._ready.clear()
    compiling.get(*REQUEST)  # from disk
    assert notice.sys.stderr.getvalue() == line


@pytest.mark.parametrize("why", ["fast", "a file", "another rank"])
def test_no_announcement(why, stderr, monkeypatch):
    if why == "fast":
        monkeypatch.setattr(notice, "AFTER_S", 60.0)
    elif why == "a file":
        monkeypatch.setattr(notice.sys, "stderr", io.StringIO())
    else:
        monkeypatch.setenv("LOCAL_RANK", "1")
    compiling.get(*REQUEST)
    assert stderr == [""]
    for timer in threading.enumerate():
        if isinstance(timer, threading.Timer):
            timer.join(10)
            assert not timer.is_alive(), "it would announce a finished compilation"


def test_kernels_that_are_not_kept(stderr, monkeypatch):
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    compiling.get(*REQUEST)
    (line,) = stderr
    assert line.endswith("compiling HostToy for sm_90a, first use only; not kept, so the next process compiles again\n")


def test_kernels_that_compile_in_parallel_are_announced_together(stderr, monkeypatch):
    requests = [REQUEST, REQUEST._replace(problem=HostProblem(3))]
    monkeypatch.setattr(compile_jobs, "default_jobs", lambda count: 2)
    monkeypatch.setattr(compile_jobs, "compile_all", lambda *_: compiling.compile_kernel() or [])
    compile_jobs.prepare(requests)
    (line,) = stderr
    assert line.startswith("quackish: compiling 2 kernels for sm_90a, first use only; kept in ")
