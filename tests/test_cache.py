"""Compiled kernels on disk: damage, strangers' files, unusable folders, several processes, what the key holds."""

import contextlib
import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from toy_kernels import HostConfig, HostProblem, HostToy, Toy, ToyConfig, ToyProblem

from quackish import launch, toolchain
from quackish.launch import cache, parallel
from quackish.launch import compile as compiling

TESTS = Path(__file__).parent
MEMORY_ONLY = "kept in memory only"


hash_sources = cache._source_hash.__wrapped__


def ignore_edits(setattr=setattr):
    """Sources may be edited while tests run."""
    setattr(cache, "_STARTED", float("inf"))
    setattr(cache, "_source_hash", lambda class_file: "not looked at")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """As in a new process, with an empty cache folder."""
    monkeypatch.setattr(compiling, "_ready", {})
    monkeypatch.setattr("quackish.errors._warned", set())
    ignore_edits(monkeypatch.setattr)
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


def test_second_process_loads():
    assert silently(use) == "compiled"
    assert silently(use) == "loaded"
    assert silently(use, 3) == "compiled"


def test_only_the_user_may_read(folder):
    use()
    (file,) = folder.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600


def test_head_tells_what_a_file_is(folder):
    use()
    (file,) = folder.iterdir()
    told = json.loads(file.read_bytes().split(b"\n")[2])
    assert told["kernel"] == "toy_kernels.HostToy"
    assert told["problem"] == "HostProblem(factor=2)"
    assert told["target"] == "sm_90a"


# Damage

FLIPS = {"format": 3, "checksum": 30, "identity": 150, "object": -2000, "last byte": -1}
DAMAGE = {
    **{
        f"flipped {name}": lambda data, i=i: data[:i] + bytes([data[i] ^ 1]) + data[i:][1:] for name, i in FLIPS.items()
    },
    "truncated object": lambda data: data[:-100],
    "truncated identity": lambda data: data[:120],
    "truncated checksum": lambda data: data[:40],
    "longer": lambda data: data + b"\0",
    "empty": lambda data: b"",
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_file_is_compiled_again(folder, damage):
    use()
    (file,) = folder.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    assert file.read_bytes() != good
    with pytest.warns(RuntimeWarning, match=r"is not used \(damaged\)") as warned:
        assert use() == "compiled"
    assert len(warned) == 1
    assert file.read_bytes() == good
    assert silently(use) == "loaded"


def test_unreadable_file_is_compiled_again(folder):
    use()
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="is not used"), pytest.warns(RuntimeWarning, match=MEMORY_ONLY):
        assert use() == "compiled"


def test_a_fifo_does_not_block(folder):
    use()
    (file,) = folder.iterdir()
    file.unlink()
    os.mkfifo(file, 0o600)
    with within_a_minute(), pytest.warns(RuntimeWarning, match="is not used .*not a regular file") as warned:
        assert use() == "compiled"
    assert len(warned) == 1
    assert silently(use) == "loaded"  # it took the place of the FIFO


@contextlib.contextmanager
def within_a_minute():
    """Raises where the code waits for ever."""

    def stop(*args):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def packed(identity: bytes, payload: bytes = b"code") -> bytes:
    """A file with a valid checksum."""
    body = identity + b"\n" + payload
    return b"quackish kernel 1\n" + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


DEEP = packed(b"[" * 200_000 + b"]" * 200_000)


def test_a_deeply_nested_identity_is_compiled_again(folder):
    use()
    (file,) = folder.iterdir()
    file.write_bytes(DEEP)
    with pytest.warns(RuntimeWarning, match="is not used .*nested too deeply") as warned:
        assert use() == "compiled"
    assert len(warned) == 1
    assert silently(use) == "loaded"


def test_object_for_another_target_is_refused(folder):
    def get(target):
        compiling._ready.clear()
        before = launch.counters.compiles
        launch.get(Toy, ToyProblem(), ToyConfig(), target)
        return launch.counters.compiles - before

    assert get("sm_100a") == 1
    (other,) = folder.iterdir()
    assert get("sm_90a") == 1
    (mine,) = set(folder.iterdir()) - {other}
    assert other.read_bytes() != mine.read_bytes()
    os.replace(other, mine)
    with pytest.warns(RuntimeWarning, match="made for another"):
        assert get("sm_90a") == 1
    assert silently(get, "sm_90a") == 0


# Folders


def check_memory_only(match):
    """Kernels work, nothing is kept, and one warning is given for all of them."""
    with pytest.warns(RuntimeWarning) as warned:
        assert [use(), use(), use(3)] == ["compiled"] * 3
    assert len(warned) == 1
    assert MEMORY_ONLY in str(warned[0].message)
    assert match in str(warned[0].message)


def test_folder_that_cannot_be_made(folder):
    folder.write_text("a file where the folder should be")
    check_memory_only("File exists")


def test_folder_below_a_file(folder, monkeypatch):
    folder.write_text("a file where a folder above should be")
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(folder / "below"))
    check_memory_only("Not a directory")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_folder(folder):
    folder.mkdir(mode=0o500)
    check_memory_only("Permission denied")


def test_folder_that_cannot_be_written(folder, monkeypatch):
    def full(**kwargs):
        raise OSError(28, "No space left on device", str(folder / f"tmp{time.time_ns()}"))  # a new name each time

    monkeypatch.setattr("quackish.launch.cache.tempfile.mkstemp", full)
    check_memory_only("No space left on device")
    request = compiling.Request(HostToy, HostProblem(), HostConfig(), "sm_90a")
    assert compiling.obtain(request)[1:] == ("not stored", "No space left on device")


def test_a_worker_says_what_it_could_not_store(folder):
    folder.write_text("a file where the folder should be")
    (outcome,) = parallel.compile_all([compiling.Request(HostToy, HostProblem(), HostConfig(), "sm_90a")], jobs=1)
    assert outcome[1:] == ("not stored", "File exists")


def test_write_that_fails_leaves_nothing(folder, monkeypatch):
    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("quackish.launch.cache.os.replace", fail)
    check_memory_only("Input/output error")
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_folder_that_others_may_write(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    check_memory_only("others may write")
    assert list(folder.iterdir()) == []


def test_folder_of_another_user(folder, monkeypatch):
    use()
    monkeypatch.setattr("quackish.launch.cache.os.geteuid", lambda: os.getuid() + 1)
    check_memory_only("belongs to user")


def test_file_that_others_may_write(folder):
    use()
    (file,) = folder.iterdir()
    file.chmod(0o660)
    with pytest.warns(RuntimeWarning, match="is not used .*others may write"):
        assert use() == "compiled"
    assert silently(use) == "loaded"


def test_cache_turned_off(folder, monkeypatch):
    monkeypatch.setenv("QUACKISH_CACHE", "0")
    assert silently(use) == "compiled"
    assert silently(use) == "compiled"
    assert not folder.exists()


def test_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("QUACKISH_CACHE_DIR")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "home" / name))
    use()
    assert len(list((tmp_path / "home" / "quackish").iterdir())) == 1


# Other processes


def start(code, folder):
    code = "from test_cache import ignore_edits, use\nignore_edits()\n" + code
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    env = dict(os.environ, PYTHONPATH=path, QUACKISH_CACHE_DIR=str(folder))
    return subprocess.Popen(
        [sys.executable, "-W", "error::RuntimeWarning", "-c", code], env=env, stderr=subprocess.PIPE
    )


def test_two_processes_at_once(folder):
    code = """
import time
from pathlib import Path
Path({me!r}).touch()
for _ in range(30_000):  # 30 s
    if Path({other!r}).exists():
        break
    time.sleep(0.001)
for factor in (2, 3, 4):
    use(factor)
"""
    a, b = str(folder.parent / "a"), str(folder.parent / "b")
    both = [start(code.format(me=a, other=b), folder), start(code.format(me=b, other=a), folder)]
    for process in both:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors.decode()
    assert len(list(folder.iterdir())) == 3
    assert silently(lambda: [use(2), use(3), use(4)]) == ["loaded"] * 3


def test_kill_in_the_middle_of_a_write(folder):
    code = """
import os, signal
os.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
use()
"""
    process = start(code, folder)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    (leftover,) = folder.iterdir()
    leftover.write_bytes(leftover.read_bytes()[:1000])  # as if killed a little earlier
    assert silently(use) == "compiled"
    assert silently(use) == "loaded"
    assert leftover.exists()  # its process might still be writing
    hour_ago = time.time() - 3601
    os.utime(leftover, (hour_ago, hour_ago))
    assert silently(use, 3) == "compiled"
    assert not leftover.exists()
    assert len(list(folder.iterdir())) == 2


# What the key holds


def identity(problem=HostProblem(), config=HostConfig(), target="sm_90a", options="-O3", kernel_class=HostToy):  # noqa: B008
    return cache.identity(kernel_class, problem, config, target, options)


def other_tools(patch, **fields):
    other = toolchain.find()._replace(**fields)
    patch.setattr(toolchain, "find", lambda: other)


INGREDIENTS = {
    "kernel": lambda patch: identity(kernel_class=Toy),
    "problem": lambda patch: identity(problem=HostProblem(factor=3)),
    "config": lambda patch: identity(config=HostConfig(unroll=2)),
    "target": lambda patch: identity(target="sm_90"),
    "options": lambda patch: identity(options="-O2"),
    "environment": lambda patch: patch.setenv("CUTE_DSL_LINEINFO", "1"),
    "sources": lambda patch: patch.setattr(cache, "_source_hash", lambda file: "0"),
    "quackish": lambda patch: patch.setattr("quackish.__version__", "0.0.0"),
    "nvidia-cutlass-dsl": lambda patch: other_tools(patch, dsl="0.0.0"),
    "apache-tvm-ffi": lambda patch: other_tools(patch, ffi="0.0.0"),
    "cuda": lambda patch: other_tools(patch, flavour="cu12"),
    "cpu": lambda patch: other_tools(patch, cpu="another"),
}


@pytest.mark.parametrize("ingredient", INGREDIENTS)
def test_key_changes_with(folder, monkeypatch, ingredient):
    before = identity()
    cache.store(HostToy, before, b"object")
    after = INGREDIENTS[ingredient](monkeypatch) or identity()
    assert {name for name in before if before[name] != after[name]} == {ingredient}
    assert cache.load(HostToy, after) is None
    cache.store(HostToy, after, b"another")
    assert len(list(folder.iterdir())) == 2
    assert cache.load(HostToy, before) == b"object"
    assert cache.load(HostToy, after) == b"another"


def test_every_ingredient_is_tested():
    assert set(identity()) == set(INGREDIENTS)


def test_source_hash(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_PACKAGE", tmp_path)
    for folder in ("kernels/common", "configs", "ops"):
        tmp_path.joinpath(folder).mkdir(parents=True)
    kernel = tmp_path / "kernels/a.py"
    elsewhere = tmp_path / "elsewhere.py"

    def write(path, text):
        tmp_path.joinpath(path).write_text(text)
        return hash_sources(kernel)

    elsewhere.write_text("1")
    seen = [write("kernels/a.py", "1"), write("kernels/a.py", "2"), write("configs/a.py", "1")]
    seen += [write("kernels/common/b.py", ""), write("kernels/common/b.py", "2")]
    tmp_path.joinpath("kernels/common/b.py").rename(tmp_path / "kernels/b.py")
    seen.append(hash_sources(kernel))
    seen.append(hash_sources(elsewhere))
    elsewhere.write_text("2")
    seen.append(hash_sources(elsewhere))
    assert len(set(seen)) == len(seen)
    before = hash_sources(kernel)
    assert write("ops/a.py", "1") == before  # the torch layer is not in what is compiled
    assert write("kernels/notes.txt", "1") == before
    kernel.touch()
    assert hash_sources(kernel) == before  # contents count, not times


def test_sources_edited_since_the_start_are_not_cached(folder, monkeypatch):
    assert use() == "compiled"
    newest = max(path.stat().st_mtime for path in cache._sources(TESTS / "toy_kernels.py"))
    monkeypatch.setattr(cache, "_STARTED", newest - 1)
    check_memory_only("changed after this process started")
    assert len(list(folder.iterdir())) == 1
    monkeypatch.setattr(cache, "_STARTED", newest)
    assert use() == "loaded"
