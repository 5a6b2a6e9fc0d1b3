"""Atomic file writes."""

import os
import tempfile
from pathlib import Path

TEMPORARY = ".tmp"  # suffix of files that are being written


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
