"""The vocabulary-parallel head on three gloo processes, which run parallel_checks.py once for all tests here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_checks
import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each rank: check -> "" or a traceback."""
    folder = tmp_path_factory.mktemp("ranks")
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [folder / f"{rank}.json" for rank in range(parallel_checks.RANKS)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_checks.py"), str(rank), str(folder / "store"), str(file)],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, file in enumerate(files)
    ]
    try:
        printed = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for rank, (process, text) in enumerate(zip(processes, printed, strict=True)):
        assert process.returncode == 0, f"rank {rank}: {text}"
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize("name", parallel_checks.CHECKS)
def test_ranks_compute_what_one_process_does(name, results):
    for rank, done in enumerate(results):
        assert done.get(name, "did not run: another check failed") == "", f"rank {rank}"
