"""The vocabulary-parallel head on several processes, which run parallel_checks.py once for all tests of a kind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_checks
import pytest
import torch

HERE = Path(__file__).parent


def run_ranks(folder, kind, ranks):
    """Of each rank: check -> "" or a traceback."""
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "parallel_checks.py"), str(rank), str(folder / "store"), str(file), kind],
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


def assert_passed(name, results):
    for rank, done in enumerate(results):
        assert done.get(name, "did not run: another check failed") == "", f"rank {rank}"


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    return run_ranks(tmp_path_factory.mktemp("ranks"), "gloo", parallel_checks.RANKS)


@pytest.mark.parametrize("name", parallel_checks.CHECKS)
def test_ranks_compute_what_one_process_does(name, on_cpu):
    assert_passed(name, on_cpu)


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    return run_ranks(tmp_path_factory.mktemp("ranks"), "nccl", 2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", parallel_checks.GPU_CHECKS)
def test_gpus_compute_what_one_does(name, on_gpus):
    assert_passed(name, on_gpus)
