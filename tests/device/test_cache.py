"""Compiled kernels on disk: damaged and foreign files, unusable folders, several processes, the key."""

import contextlib
import dataclasses
import hashlib
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from quackish import errors
from quackish.device import cache, compile_jobs, launch, toolchain
from quackish.device import compile as compiling
from tests import forked
from tests.device.toy_kernels import HostConfig, HostProblem, HostToy, Toy

TESTS = Path(__file__).parent
MEMORY_ONLY = "kept in memory only"


def ignore_edits(setattr=setattr):
    """Allows edits of sources while tests run."""
    setattr(cache, "_STARTED", float("inf"))
    setattr(cache, "_source_hash", lambda module: "ignored")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """As in a new process, with an empty cache folder."""
    errors._warned.clear()
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    return tmp_path / "cache"


def use(factor=2):
    """Gets a kernel as a new process would, and calls it: "compiled" or "loaded"."""
    compiling._ready.clear()
    before = dataclasses.replace(launch.counters)
    kernel = launch.get(HostToy, HostProblem(factor), HostConfig(), "sm_90a")
    x, o = torch.arange(5.0), torch.full((5,), torch.nan)
    kernel(x, o)
    assert torch.equal(o, factor * x)
    compiles = launch.counters.compiles - before.compiles
    loads = launch.counters.disk_loads - before.disk_loads
    return {(1, 0): "compiled", (0, 1): "loaded"}[compiles, loads]


def silently(function, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return function(*args)


def test_another_process_loads_the_file(folder):
    assert silently(use) == "compiled"
    assert silently(use) == "loaded"
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


# Damage


def flipped(data, i):
    return data[:i] + bytes([data[i] ^ 1]) + data[i:][1:]


def packed(identity: bytes, payload: bytes = b"code") -> bytes:
    """A file with a valid checksum."""
    body = identity + b"\n" + payload
    return b"quackish kernel 1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


@contextlib.contextmanager
def within_a_minute():
    """Raises if the code hangs."""

    def stop(*args):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def rewrite(change):
    return lambda file: file.write_bytes(change(file.read_bytes()))


BAD = {
    "format": (rewrite(lambda data: flipped(data, 3)), "damaged"),
    "checksum": (rewrite(lambda data: flipped(data, 30)), "damaged"),
    "identity": (rewrite(lambda data: flipped(data, 150)), "damaged"),
    "last byte": (rewrite(lambda data: flipped(data, -1)), "damaged"),
    "empty": (rewrite(lambda data: b""), "damaged"),
    "deep": (rewrite(lambda data: packed(b"[" * 200_000 + b"]" * 200_000)), "nested too deeply"),
    "a FIFO": (lambda file: (file.unlink(), os.mkfifo(file, 0o600)), "not a regular file"),
    "writable by others": (lambda file: file.chmod(0o660), "others may write"),
}


@pytest.mark.parametrize("how", BAD)
def test_a_bad_file_is_compiled_again(folder, how):
    use()
    (file,) = folder.iterdir()
    good = file.read_bytes()
    spoil, why = BAD[how]
    spoil(file)
    with within_a_minute(), pytest.warns(RuntimeWarning, match=rf"is compiled again: .*{why}") as warned:
        assert use() == "compiled"
    assert len(warned) == 1
    assert file.read_bytes() == good
    assert silently(use) == "loaded"


def test_object_for_another_target_is_refused(folder):
    cache.store(HostToy, identity(target="sm_100a"), b"object")
    (file,) = folder.iterdir()
    file.rename(folder / cache.name_of(identity()))
    with pytest.warns(RuntimeWarning, match="does not match its kernel, target"):
        assert cache.load(HostToy, identity()) is None


# Folders


def check_memory_only(match):
    """Kernels work, nothing is stored, and there is one warning for all of them."""
    with pytest.warns(RuntimeWarning) as warned:
        assert [use(), use(), use(3)] == ["compiled"] * 3
    assert len(warned) == 1
    assert MEMORY_ONLY in str(warned[0].message)
    assert match in str(warned[0].message)


def test_folder_that_cannot_be_made(folder):
    folder.write_text("a file where the folder should be")
    check_memory_only("File exists")
    request = compiling.Request(HostToy, HostProblem(), HostConfig(), "sm_90a")
    assert compiling.obtain(request)[1:] == ("not stored", "File exists")
    (outcome,) = compile_jobs.compile_all([request], jobs=1)
    assert outcome[1:] == ("not stored", "File exists")


def test_write_that_fails_leaves_nothing(folder, monkeypatch):
    def fail(temporary, path):
        raise OSError(28, "No space left on device", temporary)  # a new name each time

    monkeypatch.setattr(os, "replace", fail)
    check_memory_only("No space left on device")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folder_writable_by_others(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    check_memory_only("others may write")
    assert list(folder.iterdir()) == []


def test_folder_of_another_user(folder, monkeypatch):
    use()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    check_memory_only("belongs to user")


def test_cache_turned_off(folder, monkeypatch):
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    assert [silently(use), silently(use)] == ["compiled", "compiled"]
    assert not folder.exists()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("QUACKISH_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    use()
    assert len(list((tmp_path / "home" / "quackish").iterdir())) == 1


# Other processes


def start(run, folder, *args):
    process = forked.context().Process(target=in_a_process, args=(run, folder, *args))
    process.start()
    return process


def in_a_process(run, folder, *args):
    os.environ["QUACKISH_CACHE_DIR"] = str(folder)
    cache._STARTED = float("inf")  # allows edits of sources while tests run
    warnings.simplefilter("error", RuntimeWarning)
    run(*args)


def use_three(me, other):
    me.touch()
    while not other.exists():
        time.sleep(0.001)
    for factor in (2, 3, 4):
        use(factor)


def test_two_processes_at_once(folder):
    a, b = folder.parent / "a", folder.parent / "b"
    for process in [start(use_three, folder, a, b), start(use_three, folder, b, a)]:
        process.join(timeout=60)
        assert process.exitcode == 0
    assert len(list(folder.iterdir())) == 3
    assert silently(lambda: [use(2), use(3), use(4)]) == ["loaded"] * 3


def use_and_die():
    os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    use()


def test_kill_during_a_write(folder):
    process = start(use_and_die, folder)
    process.join(timeout=60)
    assert process.exitcode == -signal.SIGKILL
    (leftover,) = folder.iterdir()
    leftover.write_bytes(leftover.read_bytes()[:1000])  # as if killed a little earlier
    assert silently(use) == "compiled"
    assert silently(use) == "loaded"
    assert leftover.exists()  # its process might still be writing: `cache clear` deletes it
    assert len(list(folder.iterdir())) == 2


# The key


def identity(problem=HostProblem(), config=HostConfig(), target="sm_90a", kernel_class=HostToy):  # noqa: B008
    return cache.identity(kernel_class, problem, config, target)


def changed(owner, name, value):
    return lambda patch: patch.setattr(owner, name, value)


def other_tools(**fields):
    tools = toolchain.find()._replace(**fields)
    return changed(toolchain, "find", lambda: tools)


INGREDIENTS = {
    "kernel": lambda patch: identity(kernel_class=Toy),
    "problem": lambda patch: identity(problem=HostProblem(factor=3)),
    "config": lambda patch: identity(config=HostConfig(unroll=2)),
    "target": lambda patch: identity(target="sm_90"),
    "options": changed(cache, "OPTIONS", "-O2"),
    "environment": lambda patch: patch.setenv("CUTE_DSL_LINEINFO", "1"),
    "sources": changed(cache, "_source_hash", lambda file: "0"),
    "quackish": changed(cache, "__version__", "0.0.0"),
    "nvidia-cutlass-dsl": other_tools(dsl="0.0.0"),
    "apache-tvm-ffi": other_tools(ffi="0.0.0"),
    "cuda": other_tools(flavour="cu12"),
    "cpu": other_tools(cpu="another"),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_key_changes_with(folder, monkeypatch, ingredient):
    before = identity()
    assert before.keys() == INGREDIENTS.keys()
    cache.store(HostToy, before, b"object")
    after = INGREDIENTS[ingredient](monkeypatch) or identity()
    assert {name for name in before if before[name] != after[name]} == {ingredient}
    assert cache.load(HostToy, after) is None
    cache.store(HostToy, after, b"another")
    assert len(list(folder.iterdir())) == 2
    assert cache.load(HostToy, before) == b"object"
    assert cache.load(HostToy, after) == b"another"


def test_a_kernel_depends_on_what_it_imports(monkeypatch, tmp_path):
    package = tmp_path / "quackish"
    monkeypatch.setattr(cache, "_PACKAGE", package)
    files = {
        "ops/op/kernels/kernel.py": "from quackish.kernels.shared import f\nfrom quackish.ops.op import (\n problems)",
        "ops/op/problems.py": "import quackish.device.spec\n",
        "ops/op/api.py": "from quackish.ops.op import problems",
        "ops/op/__init__.py": "",
        "kernels/shared.py": "def f():\n    from quackish.kernels import memory",
        "kernels/memory.py": "",
        "device/spec.py": "",
    }
    for path, text in files.items():
        package.joinpath(path).parent.mkdir(parents=True, exist_ok=True)
        package.joinpath(path).write_text(text)

    def hashed():
        cache._imports.cache_clear()
        return cache._source_hash.__wrapped__("quackish.ops.op.kernels.kernel")

    before = hashed()
    for path, text in files.items():
        package.joinpath(path).touch()  # times do not matter
        assert hashed() == before
        package.joinpath(path).write_text(text + "\n# edited")
        assert (hashed() == before) == (path == "ops/op/api.py"), path
        package.joinpath(path).write_text(text)
    package.joinpath("kernels/memory.py").rename(package / "kernels/other.py")
    assert hashed() != before
    cache._imports.cache_clear()


def test_a_kernel_of_the_package_depends_on_its_problem_and_not_on_the_operation():
    names = {str(path.relative_to(cache._PACKAGE)) for path in cache._sources("quackish.ops.rms_norm.kernels.backward")}
    assert {"ops/rms_norm/kernels/backward.py", "ops/rms_norm/problems.py", "kernels/rows.py", "gpu.py"} <= names
    assert not {"ops/rms_norm/api.py", "ops/rms_norm/plans.py", "device/kernel_device.py"} & names


def test_sources_edited_after_the_start(folder, monkeypatch):
    assert use() == "compiled"
    newest = max(path.stat().st_mtime for path in cache._sources("tests.device.toy_kernels"))
    monkeypatch.setattr(cache, "_STARTED", newest - 1)
    check_memory_only("changed after this process started")
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(cache, "_STARTED", newest)
    assert use() == "loaded"
