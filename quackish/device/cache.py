"""Compiled kernels on disk, in the user's cache folder or QUACKISH_CACHE_DIR; QUACKISH_CACHE=0 disables the cache.

A cached object is code that will run, and a stale one gives wrong numbers. So the folder and its files must belong to
the user and be writable by nobody else. A file's name is a hash of everything the code depends on (its identity), and
the file repeats the identity under a checksum. A bad file or folder costs a compilation and one warning, never an
error.

A file has three lines, followed by the object: the format, the SHA-256 of everything below, the identity as JSON.
"""

import functools
import hashlib
import importlib.util
import json
import os
import re
import stat
import sys
import time
from pathlib import Path
from typing import Any

from quackish._version import __version__
from quackish.device import files, toolchain, variables
from quackish.errors import warn_once

OPTIONS = "--enable-tvm-ffi --opt-level 3"  # for the compiler
_FORMAT = b"quackish kernel 1\n"
SUFFIX = ".kernel"
_STARTED = time.time()
_PACKAGE = Path(__file__).parents[1]
WRONG_NAME = "its name does not match its kernel, target and toolchain"


def identity(kernel_class: type, problem: Any, config: Any, target: str) -> dict[str, str]:
    """Everything that the object depends on: the request, the sources and the toolchain."""
    return {
        "kernel": f"{kernel_class.__module__}.{kernel_class.__qualname__}",
        "problem": repr(problem),
        "config": repr(config),
        "target": target,
        **shared_identity(kernel_class.__module__),
    }


def shared_identity(module: str) -> dict[str, str]:
    """The part of the identity that all kernels with a class in `module` share: sources and toolchain."""
    tools = toolchain.find()
    return {
        "options": OPTIONS,
        "environment": " ".join(f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith("CUTE_DSL_")),
        "sources": _source_hash(module),
        "quackish": __version__,
        "nvidia-cutlass-dsl": tools.dsl,
        "apache-tvm-ffi": tools.ffi,
        "cuda": tools.flavour,
        "cpu": tools.cpu,
    }


def load(kernel_class: type, identity: dict[str, str]) -> bytes | None:
    """The verified object stored under `identity`; None if there is none."""
    folder = folder_for(kernel_class)
    if folder is None:
        return None
    path = folder / name_of(identity)
    try:
        stored, payload = unpack(read(path))
        if stored != identity:
            raise ValueError(WRONG_NAME)
        return payload
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        warn_once(f"The cached kernel {path} is compiled again: {error}.", RuntimeWarning)
        return None


def holds(kernel_class: type, identity: dict[str, str]) -> bool:
    """True if there is a file for `identity`. Its content is not verified."""
    folder = folder_for(kernel_class)
    return folder is not None and (folder / name_of(identity)).exists()


def store(kernel_class: type, identity: dict[str, str], payload: bytes) -> str:
    """Stores `payload` for later processes. If two processes store at once, both succeed and the later file remains.

    Returns why it was not stored, or "".
    """
    if is_off():
        return "QUACKISH_CACHE=0 turns the cache off"
    try:
        folder = _checked_folder(kernel_class)
        body = json.dumps(identity).encode() + b"\n" + payload
        files.write(folder / name_of(identity), _head(body) + body)
    except (OSError, ValueError) as error:
        return _warn_memory_only(error)
    return ""


def reason_of(error: Exception) -> str:
    """The error's message without a file name, which may be random."""
    return getattr(error, "strerror", None) or str(error)


def read(path: Path) -> bytes:
    """The content of a regular file that only this user may write. Raises ValueError for any other file, and OSError.

    Never blocks: opening a FIFO without O_NONBLOCK would wait for a writer.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        check_owner(status)
        return file.read()


def _head(body: bytes) -> bytes:
    """The lines before the body of a file: the format and the checksum."""
    return _FORMAT + hashlib.sha256(body).hexdigest().encode() + b"\n"


def unpack(data: bytes) -> tuple[dict[str, str], bytes]:
    """Returns (identity, payload). Raises ValueError unless `data` is exactly what `store` writes."""
    body = data[len(_head(b"")) :]
    if data != _head(body) + body:
        raise ValueError("damaged")
    stored, _, payload = body.partition(b"\n")
    try:
        return json.loads(stored), payload
    except RecursionError:
        raise ValueError("its identity is nested too deeply") from None


def name_of(identity: dict[str, str]) -> str:
    """File name for an identity."""
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return f"{identity['kernel'].rpartition('.')[2]}-{identity['target']}-{digest}{SUFFIX}"


def location() -> Path:
    """Where the cache folder is, or would be."""
    import platformdirs

    return Path(variables.get(variables.CACHE_DIR) or platformdirs.user_cache_dir("quackish"))


def make_folder() -> Path:
    """Creates the cache folder. Raises OSError if that fails, ValueError if another user may write to the folder."""
    folder = location()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(os.stat(folder))
    return folder


def is_off() -> bool:
    return variables.get(variables.CACHE) == "0"


def folder_for(kernel_class: type) -> Path | None:
    """The cache folder; None, with a warning, if it must not be used. The check is cheap and runs on every use."""
    if is_off():
        return None
    try:
        return _checked_folder(kernel_class)
    except (OSError, ValueError) as error:
        _warn_memory_only(error)
        return None


def _checked_folder(kernel_class: type) -> Path:
    """The cache folder. Raises OSError or ValueError if it must not be used, or if a source of the kernel was edited.

    After an edit, this process could store a kernel of the old source under the hash of the new one.
    """
    folder = make_folder()
    for path in _sources(kernel_class.__module__):
        if path.stat().st_mtime > _STARTED:
            raise ValueError(f"{path} changed after this process started")
    return folder


def check_owner(status: os.stat_result) -> None:
    """Raises ValueError if another user owns the file or may write to it: that user could make us run code."""
    if status.st_uid != os.geteuid():
        raise ValueError(f"it belongs to user {status.st_uid}, not {os.geteuid()}")
    if status.st_mode & 0o022:
        raise ValueError(f"others may write to it (mode {status.st_mode & 0o777:o}; `chmod go-w` makes it safe)")


def _warn_memory_only(error: Exception) -> str:
    """Warns once and returns the reason."""
    reason = reason_of(error)
    warn_once(
        f"Compiled kernels are kept in memory only, so each process compiles its own: cache folder {location()}: "
        f"{reason}. QUACKISH_CACHE_DIR names another folder; QUACKISH_CACHE=0 turns the cache off.",
        RuntimeWarning,
    )
    return reason


# Sources --------------------------------------------------------------------------------------------------------------


def _sources(module: str) -> tuple[Path, ...]:
    """The files that a kernel class in `module` may depend on: its own, and those of quackish that it imports.

    Imports are read from the files, also those in functions, and followed; nothing is imported.
    """
    own = _file_of(module)
    found, todo = {own}, [own]
    while todo:
        for path in _imports(todo.pop()):
            if path not in found:
                found.add(path)
                todo.append(path)
    return tuple(sorted(found))


_IMPORT = re.compile(
    rb"^[ \t]*(?:from (quackish[\w.]*) import (\([^)]*\)|[^#\n]*)|import (quackish[\w.]*))", re.MULTILINE
)


@functools.cache
def _imports(path: Path) -> tuple[Path, ...]:
    """The files of quackish that a file imports. Parsing it would take ten times as long."""
    names: set[str] = set()
    for package, members, module in _IMPORT.findall(path.read_bytes()):
        name = (package or module).decode()
        names |= {name, *(f"{name}.{member}" for member in re.findall(r"\w+", members.decode()))}
    files = [_PACKAGE.parent.joinpath(*name.split(".")) for name in names]
    candidates = [path for file in files for path in (file.with_suffix(".py"), file / "__init__.py")]
    return tuple(path for path in candidates if path.exists())


def has_source(module: str) -> bool:
    """True if kernels with a class in `module` can be identified in this process."""
    if module.startswith(f"{_PACKAGE.name}."):
        return _file_of(module).exists()
    return getattr(sys.modules.get(module), "__file__", None) is not None


def _file_of(module: str) -> Path:
    """The source file of a module, which is not imported."""
    if module.startswith(f"{_PACKAGE.name}."):
        return _PACKAGE.parent.joinpath(*module.split(".")).with_suffix(".py")
    loaded = sys.modules.get(module)
    return Path(loaded.__file__ if loaded else importlib.util.find_spec(module).origin).resolve()


@functools.cache
def _source_hash(module: str) -> str:
    """The hash of a kernel's sources, once per process: later edits do not affect imported code."""
    digest = hashlib.sha256()
    for path in _sources(module):
        name = path.relative_to(_PACKAGE) if path.is_relative_to(_PACKAGE) else path.name
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode() + content)
    return digest.hexdigest()
