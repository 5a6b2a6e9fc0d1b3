"""The vocabulary-parallel head in several processes, which run parallel_checks.py once per kind of test."""

import json
import os

import pytest
import torch
from torch.testing import assert_close

from quackish import UnsupportedError
from quackish.ops.linear_cross_entropy.reference import rows_of
from quackish.ops.linear_cross_entropy.sharded.combine import LossOptions, ShardStats, combine
from quackish.parallel import linear_cross_entropy
from tests import forked
from tests.linear_cross_entropy import parallel_checks
from tests.linear_cross_entropy.cases import make
from tests.once import once


def run_rank(env, log, *args):
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(env)
    parallel_checks.main(*args)


def run_ranks(folder, kind, ranks, **env):
    """For each rank: {check: its result or traceback}."""
    files, logs = ([folder / f"{rank}.{suffix}" for rank in range(ranks)] for suffix in ("json", "log"))
    processes = [
        forked.context().Process(
            target=run_rank, args=(env, log, rank, ranks, str(folder / "store"), str(file), kind), daemon=True
        )
        for rank, (file, log) in enumerate(zip(files, logs, strict=True))
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(timeout=500)
    finally:
        for process in processes:
            process.kill()
    # Ignore exit codes: gloo's threads may abort a finished process.
    return [
        json.loads(file.read_text()) if file.exists() else {"": log.read_text()}
        for file, log in zip(files, logs, strict=True)
    ]


def assert_passed(name, results):
    failed = [done.get(name, done.get("", "did not run: another check failed")) for done in results]
    assert not any(failed), "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(failed))


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    def run(folder):
        return run_ranks(folder, "cpu", parallel_checks.RANKS)

    return once(tmp_path_factory, "three_ranks", run)


@pytest.mark.parametrize("name", parallel_checks.CHECKS["cpu"])
def test_ranks_match_one_process(name, on_cpu):
    assert_passed(name, on_cpu)


def test_confident_rows_are_accurate():
    """For logits near 1000, whose fp32 lse rounds to 6e-5, losses of 1e-3 to 1e-5 are accurate to 3e-7."""
    torch.manual_seed(0)
    logits = torch.randn(3, 50, 7, dtype=torch.float64)  # of three ranks
    logits[1, :, 2] = torch.linspace(10.0, 18.0, 50)  # the targets'
    logits += 1000
    lse = logits.logsumexp(2)
    nll = (lse - logits[..., 2])[1].expand(3, 50)
    owner = torch.ones(50, dtype=torch.int64)
    rows = rows_of(owner, 21, None, -100, torch.float32)
    combined = combine(ShardStats(lse.float(), nll.float()), 0, owner, rows, LossOptions(0.0, 0.0, 0.0))
    true = logits.logsumexp((0, 2)) - logits[1, :, 2]
    assert (combined.loss - true).abs().max() <= 3e-7


@pytest.fixture
def alone():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_compiled_code_and_torch_func(alone):
    x, w, target, kw = make(bias=True)

    def double(x, w):
        return 2 * linear_cross_entropy(x + 0.0, w, target, **kw)

    assert_close(torch.compile(double, backend="eager")(x, w), double(x, w), rtol=0, atol=0)
    compiled = torch.autograd.grad(torch.compile(double, backend="eager")(x, w), [x, w])
    assert_close(compiled, torch.autograd.grad(double(x, w), [x, w]), rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.grad(double)(x, w)


def test_class_weights_must_not_require_grad(alone):
    x, w, target, _ = make()
    weight = torch.ones(11, requires_grad=True)
    with torch.no_grad():
        linear_cross_entropy(x, w, target, weight=weight)
    with pytest.raises(ValueError, match=r"^parallel.linear_cross_entropy: weight requires grad, .* weight.detach\(\)"):
        linear_cross_entropy(x, w, target, weight=weight)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", parallel_checks.ON_GPUS)
def test_ranks_on_one_gpu_match_one_process(ranks, tmp_path):
    results = run_ranks(tmp_path, "shared", ranks)
    for name in parallel_checks.CHECKS["shared"]:
        assert_passed(name, results)


def needs_gpus(count):
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


@pytest.fixture(scope="module", params=parallel_checks.ON_GPUS)
def on_gpus(tmp_path_factory, request):
    needs_gpus(request.param)
    return run_ranks(tmp_path_factory.mktemp("ranks"), "gpu", request.param)


@pytest.mark.gpu
@pytest.mark.parametrize("name", parallel_checks.CHECKS["gpu"])
def test_gpus_match_one_gpu(name, on_gpus):
    assert_passed(name, on_gpus)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", parallel_checks.ON_GPUS)
def test_deterministic_bits_are_independent_of_the_algorithm(ranks, tmp_path):
    needs_gpus(ranks)
    found = []
    for algorithm in ("ring", "tree"):  # for all-reduce only: NCCL has no tree all-gather
        folder = tmp_path / algorithm
        folder.mkdir()
        found += run_ranks(folder, "bits", ranks, NCCL_ALGO=f"allreduce:{algorithm}")
    assert len(found[0]["bits_of_dx"]) == 64, found
    assert all(done == found[0] for done in found)
