"""Work whose result several tests read, done once even if pytest-xdist spreads them over processes."""

import fcntl
import json
import os
from pathlib import Path


def once(tmp_path_factory, name, make):
    """`make(folder)`, a value that JSON can keep. Other processes of this run wait for it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # of all workers
    kept = Path(folder, f"{name}.json")
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            (folder / name).mkdir()
            kept.write_text(json.dumps(make(folder / name)))
    return json.loads(kept.read_text())
