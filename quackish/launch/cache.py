"""Compiled kernels on disk, in the user's cache folder or QUACKISH_CACHE_DIR; QUACKISH_CACHE=0 goes without.

A cached object is code that will run, and a stale one gives wrong numbers. So: the folder and the file are this user's
and nobody else may write them; the name is a hash of everything that the code depends on; the file repeats all of it,
under a checksum. Whatever is wrong with a file or the folder costs a compilation and one warning, never an error.

A file is three lines and the object: the format, the SHA-256 of the rest, the identity as JSON (`head -3` shows it).
"""

import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from quackish import toolchain
from quackish.errors import warn_once

_FORMAT = b"quackish kernel 1\n"
TEMPORARY = ".tmp"
SUFFIX = ".kernel"
_STARTED = time.time()
_PACKAGE = Path(__file__).parents[1]
OWN = "quackish.kernels."  # what the modules of our kernels start with


def identity(kernel_class: type, problem: Any, config: Any, target: str, options: str) -> dict[str, str]:
    """Everything that the object depends on: what was asked, and what it was made of and with."""
    return {
        "kernel": f"{kernel_class.__module__}.{kernel_class.__qualname__}",
        "problem": repr(problem),
        "config": repr(config),
        "target": target,
        **made_with(kernel_class.__module__, options),
    }


def made_with(module: str, options: str) -> dict[str, str]:
    """For all kernels whose class is in `module`."""
    from quackish import __version__

    tools = toolchain.find()
    return {
        "options": options,
        "environment": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("CUTE_DSL_")),
        "sources": _source_hash(_elsewhere(module)),
        "quackish": __version__,
        "nvidia-cutlass-dsl": tools.dsl,
        "apache-tvm-ffi": tools.ffi,
        "cuda": tools.flavour,
        "cpu": tools.cpu,
    }


def load(kernel_class: type, identity: dict[str, str]) -> bytes | None:
    """The object stored under `identity`, verified; None where there is none."""
    folder = _folder(kernel_class)
    if folder is None:
        return None
    path = _path(folder, identity)
    try:
        return _unpack(read(path), identity)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(f"The cached kernel {path} is not used ({error}); it is compiled again.", RuntimeWarning)
        return None


def holds(kernel_class: type, identity: dict[str, str]) -> bool:
    """Whether there is a file for `identity`, not yet verified."""
    folder = _folder(kernel_class)
    return folder is not None and _path(folder, identity).exists()


def is_usable(kernel_class: type) -> bool:
    """Whether objects are kept; where not, there was a warning."""
    return _folder(kernel_class) is not None


def store(kernel_class: type, identity: dict[str, str], payload: bytes) -> str:
    """Keeps `payload` for later processes. Of two that store at once, both succeed and the last one's file stays.

    Returns why it was not stored; "" where it was.
    """
    if is_off():
        return "QUACKISH_CACHE=0 turns the cache off"
    try:
        folder = _checked_folder(kernel_class)
        _remove_leftovers(folder)
        write(_path(folder, identity), _pack(payload, identity))
    except (OSError, ValueError) as error:
        return _warn_memory_only(location(), error)
    return ""


def read(path: Path) -> bytes:
    """The content of a regular file that nobody else may write. Raises ValueError for any other, OSError.

    Never blocks: a FIFO in place of the file would otherwise wait for a writer.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        check_owner(status)
        return file.read()


def write(path: Path, data: bytes) -> None:
    """All of it or nothing, for this user alone."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=TEMPORARY)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def _pack(payload: bytes, identity: dict[str, str]) -> bytes:
    body = json.dumps(identity).encode() + b"\n" + payload
    return _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes, identity: dict[str, str]) -> bytes:
    """Raises ValueError unless `data` is what `_pack` made for this identity, to the last bit."""
    stored, payload = unpack(data)
    if stored != identity:
        raise ValueError("made for another kernel, target or toolchain than its name says")
    return payload


def unpack(data: bytes) -> tuple[dict[str, str], bytes]:
    """(identity, payload). Raises ValueError unless `data` is what `_pack` made for some identity, to the last bit."""
    head_size = len(_FORMAT) + 64 + 1
    head, body = data[:head_size], data[head_size:]
    if head != _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n":
        raise ValueError("damaged")
    stored, _, payload = body.partition(b"\n")
    try:
        return json.loads(stored), payload
    except RecursionError:
        raise ValueError("its identity is nested too deeply") from None


def name_of(identity: dict[str, str]) -> str:
    """The name of its file."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return f"{identity['kernel'].rpartition('.')[2]}-{identity['target']}-{digest}{SUFFIX}"


def _path(folder: Path, identity: dict[str, str]) -> Path:
    return folder / name_of(identity)


def location() -> Path:
    """Where the cache folder is, or would be."""
    import platformdirs

    return Path(os.environ.get("QUACKISH_CACHE_DIR") or platformdirs.user_cache_dir("quackish"))


def make_folder() -> Path:
    """The cache folder. Raises OSError where it cannot be made, ValueError where somebody else may write it."""
    folder = location()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(os.stat(folder))
    return folder


def is_off() -> bool:
    return os.environ.get("QUACKISH_CACHE") == "0"


def _folder(kernel_class: type) -> Path | None:
    """The cache folder; None where it must not be used. Asked anew each time: all of it is cheap beside a load."""
    if is_off():
        return None
    try:
        return _checked_folder(kernel_class)
    except (OSError, ValueError) as error:
        _warn_memory_only(location(), error)
        return None


def _checked_folder(kernel_class: type) -> Path:
    """Raises OSError or ValueError where it must not be used."""
    folder = make_folder()
    _check_unedited(_elsewhere(kernel_class.__module__))
    return folder


def check_owner(status: os.stat_result) -> None:
    """Raises ValueError where another user owns or may write it, and so could give us code to run."""
    if status.st_uid != os.geteuid():
        raise ValueError(f"it belongs to user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write to it (mode {status.st_mode & 0o777:o}; `chmod go-w` makes it safe)")


def _check_unedited(class_file: Path | None) -> None:
    """Raises ValueError where a source changed after this process may have imported it: what runs here is then not
    what `_source_hash` reads, and would be stored under its name."""
    for path in _sources(class_file):
        if path.stat().st_mtime > _STARTED:
            raise ValueError(f"{path} changed after this process started")


def _warn_memory_only(folder: Path, error: Exception) -> str:
    """Returns the reason."""
    reason = getattr(error, "strerror", None) or str(error)  # strerror: without the file's name, which may be random
    warn_once(
        f"Compiled kernels are kept in memory only, so each process compiles its own: cache folder {folder}: {reason}. "
        "QUACKISH_CACHE_DIR names another folder; QUACKISH_CACHE=0 turns the cache off.",
        RuntimeWarning,
    )
    return reason


def _remove_leftovers(folder: Path) -> None:
    """Temporary files of processes that were killed while they wrote: older than any write takes."""
    for path in folder.glob("*" + TEMPORARY):
        with contextlib.suppress(OSError):  # another process may be faster
            if path.stat().st_mtime < time.time() - 3600:
                path.unlink()


def _elsewhere(module: str) -> Path | None:
    """The file of a kernel class that is not one of ours, which are in `_sources` anyway. Nothing is imported."""
    if module.startswith(OWN):
        return None
    loaded = sys.modules.get(module)
    return Path(loaded.__file__ if loaded else importlib.util.find_spec(module).origin).resolve()


def _sources(class_file: Path | None) -> list[Path]:
    """What a kernel may be made of: all device code and configs, and the class's own file where it lies elsewhere."""
    inside = [path for layer in ("kernels", "configs") for path in _PACKAGE.joinpath(layer).rglob("*.py")]
    return sorted({*inside, class_file} - {None})


@functools.cache
def _source_hash(class_file: Path | None) -> str:
    """Once a process: later edits are not what runs here."""
    digest = hashlib.sha256()
    for path in _sources(class_file):
        name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
