"""Linear cross entropy on CUDA streams: no synchronization with the host, CUDA graphs, another stream busy."""

import pytest
import torch

from quackish.testing import assert_deterministic
from quackish.testing.errors import same_bits
from tests.cuda_graphs import captured, no_synchronization
from tests.linear_cross_entropy.cases import IGNORED, OPTIONS, PATHS, REDUCTIONS, SCHEDULES

BF16, FP32 = torch.bfloat16, torch.float32


on_cuda, on_kernels_on_cuda, on_portable_on_cuda = (
    pytest.mark.parametrize("path", paths, indirect=True) for paths in (PATHS[1::2], PATHS[3::2], PATHS[1:2])
)


def cuda_step(path, schedule, reduction, num_items=None, name="all"):
    """A training step over static tensors: (step, tensors it reads, the buffer it adds to)."""
    torch.use_deterministic_algorithms(False)  # the tests' deterministic mode adds fills and sorts
    x, w, target, kw = path.case(300, 64, 1000, BF16 if path.kernels else FP32, **OPTIONS[name], reduction=reduction)
    buffer = torch.zeros(w.shape, **path.here)
    options = dict(grad_weight_out=buffer, schedule=schedule, chunk_size=128, num_items=num_items)
    if isinstance(num_items, torch.Tensor):
        kw["logit_scale"] = num_items / 10  # on the same device

    def step():
        loss, lse = path.call(x, w, target, return_lse=True, **options, **kw)
        dx, _, db = torch.autograd.grad(loss.sum(), [x, w, kw["linear_bias"]], allow_unused=True)
        return [loss.detach(), lse.detach(), dx, db]

    return step, (x, w, target), buffer


@on_cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["unsmoothed", "all"])
def test_no_host_synchronization(name, reduction, schedule, path, few_rows_counted):
    items = [None] if reduction != "mean" else [None, 7, torch.tensor(7), torch.tensor(7, device="cuda")]
    for num_items in items:
        step, inputs, _ = cuda_step(path, schedule, reduction, num_items, name)

        def steps(step=step, inputs=inputs):
            step()
            with torch.autocast("cuda", dtype=BF16):
                step()
            with torch.no_grad():
                path.call(*inputs, schedule=schedule)

        steps()  # compile and load kernels
        with no_synchronization():
            steps()


@on_kernels_on_cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["unsmoothed", "all"])
def test_cuda_graph_replay_with_new_data(name, reduction, schedule, path):
    step, (x, w, target), buffer = cuda_step(path, schedule, reduction, name=name)
    graph, static = captured(step)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        w.copy_(torch.randn_like(w) / 8)
        target.copy_(torch.randint_like(target, 1000))
        target[::3] = IGNORED
    buffer.zero_()
    graph.replay()
    replayed = [t.clone() for t in (*static, buffer)]
    buffer.zero_()
    for got, eager in zip(replayed, [*step(), buffer], strict=True):
        assert same_bits(got, eager)


@on_portable_on_cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_portable_path_is_deterministic_with_another_stream_busy(schedule, path):
    step, _, buffer = cuda_step(path, schedule, "mean")

    def run():
        buffer.zero_()
        return *step(), buffer

    assert_deterministic(run)
