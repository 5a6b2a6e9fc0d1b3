"""Atomic file writes, and folders that can be written."""

import os
import tempfile
from pathlib import Path

TEMPORARY = ".tmp"  # suffix of files that are being written


def why_not_writable(folder: Path) -> str:
    """Why no file can be created in a folder that exists; "" if one can.

    It tries, because os.access is true for root on file systems where nothing can be created, such as /proc.
    """
    if not folder.is_dir():
        return f"{folder} is not a folder"
    try:
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"


def why_no_output(folder: Path) -> str:
    """Why no file can be written to a folder, which need not exist; "" if one can."""
    return why_not_writable(next(path for path in (folder, *folder.parents) if os.path.exists(path)))


def write(path: Path, data: bytes) -> None:
    """Writes a temporary file next to `path`, readable only by this user, and renames it. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
