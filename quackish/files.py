"""Files that are written whole or not at all."""

import os
import tempfile
from pathlib import Path

TEMPORARY = ".tmp"  # what files end in while they are written


def write(path: Path, data: bytes) -> None:
    """Writes beside `path`, readable by this user only, then renames. Raises OSError."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
