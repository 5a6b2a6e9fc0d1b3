"""Maintenance of the cache folder: list, verify and remove kernels."""

import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from quackish.device import cache, files
from quackish.errors import UnsupportedError


class Entry(NamedTuple):
    """A file of the cache folder."""

    path: Path
    bytes: int
    modified: float  # seconds since 1970
    identity: dict[str, str]  # empty if unreadable
    fault: str  # what is wrong with the file, or ""


def printable(text: str) -> str:
    """Escapes control characters, as the text of an identity comes from a file."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def entries() -> list[Entry]:
    """All kernels in the cache folder, verified and sorted by name. Other files are ignored."""
    folder = cache.location()
    return sorted(map(_examine, folder.glob("*" + cache.SUFFIX))) if folder.is_dir() else []


def leftovers() -> list[Path]:
    """Temporary files of interrupted writes, and of writes in progress."""
    return sorted(cache.location().glob("*" + files.TEMPORARY))


def folder_fault() -> str:
    """Why the cache folder cannot be used; "" if it can, or can be created."""
    folder = cache.location()
    try:
        status = os.stat(folder)
        if not stat.S_ISDIR(status.st_mode):
            return "it is not a folder"
        cache.check_owner(status)
        if not os.access(folder, os.R_OK | os.X_OK):
            return "it is not readable"
    except FileNotFoundError:
        return f"it does not exist, and {why}" if (why := files.why_no_output(folder)) else ""
    except (OSError, ValueError) as error:
        return cache.reason_of(error)
    return files.why_not_writable(folder)


def why_unusable(identity: dict[str, str]) -> str:
    """Says why this process does not load a good file; "" if it loads it.

    The reason is the first field of its identity that has another value here.
    """
    module = identity["kernel"].rpartition(".")[0]
    if not cache.has_source(module):
        return f"kernel {printable(identity['kernel'])}, unknown here"
    try:
        here = cache.shared_identity(module)
    except UnsupportedError as error:
        return f"nvidia-cutlass-dsl {printable(identity.get('nvidia-cutlass-dsl', ''))}, here none ({error})"
    for field in ("cpu", "cuda", "nvidia-cutlass-dsl", "apache-tvm-ffi", "quackish", *here):
        value = identity.get(field, "unknown")
        if value != here[field]:
            is_long = field in ("sources", "options", "environment")
            return f"other {field}" if is_long else f"{field} {printable(value)}, here {here[field]}"
    return ""


def remove(paths: Iterable[Path]) -> tuple[int, list[str]]:
    """Deletes files. Returns the number deleted, and a message for each that cannot be deleted."""
    count, failures = 0, []
    for path in paths:
        try:
            os.unlink(path)
            count += 1
        except FileNotFoundError:  # deleted by another process
            pass
        except OSError as error:
            failures.append(f"{path} cannot be deleted: {error.strerror}")
    return count, failures


def _examine(path: Path) -> Entry:
    """Verifies a file. Never raises: `Entry.fault` says what is wrong."""
    identity, fault, size, modified = {}, "", 0, time.time()
    try:
        status = os.lstat(path)
        size, modified = status.st_size, status.st_mtime
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("not a file but a link, a folder or a device")
        identity = _identity(cache.read(path), path.name)
    except (OSError, ValueError) as error:
        fault = cache.reason_of(error)
    return Entry(path, size, modified, identity, fault)


def _identity(content: bytes, name: str) -> dict[str, str]:
    """The identity in a file's content. Raises ValueError unless it is good and `name` is its name."""
    identity, _ = cache.unpack(content)
    strings = isinstance(identity, dict) and all(isinstance(text, str) for pair in identity.items() for text in pair)
    if not strings or not {"kernel", "problem", "config", "target"} <= identity.keys():
        raise ValueError("its identity is incomplete")
    if cache.name_of(identity) != name:
        raise ValueError(cache.WRONG_NAME)
    return identity
