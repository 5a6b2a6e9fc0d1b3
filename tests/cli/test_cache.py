"""`quackish cache`: listing, verification, deletion."""

import os
import shutil

import pytest

pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
from quackish.__main__ import main
from quackish.device import cache, toolchain
from quackish.device import compile as compiling
from tests.device.test_cache import ignore_edits, packed, use, within_a_minute
from tests.device.toy_kernels import HostConfig, HostProblem, HostToy


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path, wide):
    compiling._ready.clear()
    ignore_edits(monkeypatch.setattr)
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("QUACKISH_CACHE", raising=False)
    return tmp_path / "cache"


def store(factor=2, target="sm_90a", **changes):
    """Stores a fake kernel; returns its file."""
    identity = cache.identity(HostToy, HostProblem(factor), HostConfig(), target) | changes
    cache.store(HostToy, identity, b"object " * 100)
    return cache.location() / cache.name_of(identity)


def run(capsys, *words):
    """Exit status, and what was printed."""
    status = main(["cache", *map(str, words)])
    printed = capsys.readouterr()
    return status, printed.out + printed.err


# ls, verify, clear


def test_ls(capsys):
    store()
    store(3, "sm_100a")
    store(4, quackish="0.0.1")
    store(5, cpu="aarch64")
    store(6, kernel="nobody.knows.This")
    status, out = run(capsys, "ls")
    assert status == 0
    groups = [part.splitlines() for part in out.split("\n\n")]
    rows = {line: lines[0] for lines in groups for line in lines if "factor=" in line}
    tools = toolchain.find()
    assert rows["    factor=2"].endswith(f" {tools.dsl} {tools.flavour} {tools.cpu}, usable here")
    assert rows["    factor=3"] == rows["    factor=2"]
    usable = next(lines for lines in groups if "    factor=2" in lines)
    assert usable[usable.index("    factor=2") - 1].startswith("  HostToy sm_90a, ")
    assert usable[usable.index("    factor=3") - 1].startswith("  HostToy sm_100a, ")
    assert rows["    factor=4"].endswith("not usable here: quackish 0.0.1, here 0.1.0")
    assert "not usable here: cpu aarch64, here" in rows["    factor=5"]
    assert rows["    factor=6"].endswith("not usable here: kernel nobody.knows.This, unknown here")
    assert "5 kernels" in out


def damage(path):
    data = path.read_bytes()
    path.write_bytes(data[:-5] + b"?" + data[-4:])


def rename(path):
    path.rename(path.with_name("HostToy-sm_90a-" + "0" * 64 + ".kernel"))


BAD = {
    "damaged": (damage, "damaged"),
    "renamed": (rename, "does not match its kernel"),
    "writable by others": (lambda path: path.chmod(0o622), "others may write"),
    "a FIFO": (lambda path: (path.unlink(), os.mkfifo(path)), "not a file but a link, a folder or a device"),
    "deep": (lambda path: path.write_bytes(packed(b"[" * 200_000 + b"]" * 200_000)), "nested too deeply"),
    "no identity": (lambda path: path.write_bytes(packed(b'"nothing"')), "its identity is incomplete"),
}


@pytest.mark.parametrize("how", BAD)
def test_verify(capsys, folder, how):
    store(2)
    spoil, fault = BAD[how]
    spoil(store(3))
    with within_a_minute():
        status, out = run(capsys, "verify")
    assert status == 1
    assert fault in out
    assert f"2 kernels in {folder}: 1 good, 1 bad" in out
    assert "1 kernel bad" in run(capsys, "ls")[1]
    assert len(list(folder.iterdir())) == 2
    assert run(capsys, "verify", "--delete")[0] == 0
    assert len(list(folder.iterdir())) == 1
    assert run(capsys, "verify")[0] == 0


@pytest.mark.parametrize("words", [("verify", "--delete"), ("clear",)])
def test_a_folder_does_not_stop_deletion(capsys, words):
    paths = sorted(store(factor) for factor in (2, 3, 4))
    damage(paths[1])
    paths[0].unlink()
    paths[0].mkdir()  # comes first
    status, out = run(capsys, *words)
    assert status == 1
    assert f"{paths[0]} cannot be deleted: Is a directory" in out
    assert "deleted " in out
    assert [path.exists() for path in paths] == [True, False, words[0] == "verify"]


def test_control_characters_are_escaped(capsys):
    evil = "\x1b]0;evil\x07\n\r\x9b31m\u202e\ud800"
    for factor, field in enumerate(("problem", "config", "quackish", "nvidia-cutlass-dsl", "cuda", "cpu"), 2):
        store(factor, **{field: f"P(x='{evil}')" if field == "problem" else evil})
    store(9, kernel="sys.Evil")  # a module without a file
    outputs = [run(capsys, "ls")]
    (cache.location() / f"{evil[:-1]}.kernel").write_bytes(b"")
    outputs.append(run(capsys, "verify"))
    assert [status for status, _ in outputs] == [0, 1]
    for _, out in outputs:
        assert r"\x1b]0;evil\x07\n" in out
        assert all(c.isprintable() or c == "\n" for c in out), out


def test_clear(capsys, folder):
    here, stale, damaged = store(3, "sm_100a"), store(4, cpu="aarch64"), store(5)
    damage(damaged)
    bystander = folder / "notes.txt"
    bystander.write_text("not ours")
    run(capsys, "clear", "--stale")
    assert (here.exists(), stale.exists(), damaged.exists()) == (True, False, True)
    run(capsys, "clear")
    assert list(folder.iterdir()) == [bystander]


def test_a_copied_folder_is_used(folder, monkeypatch, tmp_path):
    assert use(3) == "compiled"
    shutil.copytree(folder, tmp_path / "another")
    monkeypatch.setenv("QUACKISH_CACHE_DIR", str(tmp_path / "another"))
    assert use(3) == "loaded"


def test_a_cache_folder_writable_by_others(capsys, folder):
    store(2)
    folder.chmod(0o777)
    status, out = run(capsys, "verify")
    assert (status, "others may write" in out) == (1, True)
