"""linear_divergence on a GPU: sizes that the emulator is too slow for, bits, synchronization, CUDA graphs."""

import pytest
import torch

from quackish import linear_divergence
from quackish.testing.errors import same_bits
from tests.cuda_graphs import captured, no_synchronization
from tests.linear_divergence.test_linear_divergence import BF16, EVERYTHING, FP16, compare, make

pytestmark = pytest.mark.gpu


def on_gpu(args: dict) -> dict:
    return {name: t.cuda() for name, t in args.items()}


@pytest.mark.parametrize("beta, reduction", [(0.0, "mean"), (0.3, "none"), (1.0, "sum")])
@pytest.mark.parametrize("v, dtype", [(50_257, BF16), (128_256, FP16), (151_936, BF16), (262_144, BF16)])
def test_vocabularies(beta, reduction, v, dtype):
    """Rows over clusters of up to 16 CTAs."""
    compare(on_gpu(make(300, 256, 320, v, dtype)), reduction, beta=beta, **EVERYTHING)
    compare(on_gpu(make(300, 256, 320, v, dtype, bias=False, mask=False)), reduction, beta=beta)


def step(args: dict, **options) -> list[torch.Tensor]:
    leaves = [args[name].detach().requires_grad_() for name in ("input", "linear_weight")]
    loss = linear_divergence(**args | dict(input=leaves[0], linear_weight=leaves[1]), **options, backend="cute")
    return [loss.detach(), *torch.autograd.grad(loss.sum(), leaves)]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_twenty_runs_have_the_same_bits(reduction):
    args = on_gpu(make(3000, 512, 768, 32_003, BF16))
    first = step(args, beta=0.5, reduction=reduction)
    for _ in range(20):
        assert all(same_bits(a, b) for a, b in zip(step(args, beta=0.5, reduction=reduction), first, strict=True))


def test_several_blocks_of_8192_rows():
    """dw is summed in fp32 over blocks; a row's loss does not depend on them."""
    args = on_gpu(make(20_000, 64, 64, 1003, BF16))
    loss, *_ = step(args, reduction="none")
    part = {name: t[9000:9100] if len(t) == 20_000 else t for name, t in args.items()}
    assert same_bits(loss[9000:9100], step(part, reduction="none")[0])
    compare(args, "mean", beta=0.5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_synchronizes_and_graphs_replay(reduction):
    args = on_gpu(make(700, 128, 128, 5003, BF16))
    expected = step(args, beta=0.5, reduction=reduction)
    with no_synchronization():
        step(args, beta=0.5, reduction=reduction)
        if reduction == "mean":
            step(args, beta=0.5, num_items=torch.tensor(500))  # on the CPU
    graph, results = captured(lambda: step(args, beta=0.5, reduction=reduction))
    for _ in range(3):
        graph.replay()
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_teacher_that_is_not_finite(beta):
    args = on_gpu(make(70, 128, 128, 5003, BF16, mask=False))
    args["teacher_input"][1], args["teacher_input"][4] = torch.nan, torch.inf
    _, dx, _ = step(args, beta=beta, reduction="sum")
    bad = [1, 4]
    assert dx[bad].isnan().all()
    assert dx[[row for row in range(70) if row not in bad]].isfinite().all()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("limit", [200_000_000, 400_000_000])  # several blocks of rows, and one
def test_a_memory_limit_holds(limit, reduction):
    args = on_gpu(make(3000, 512, 768, 32_003, BF16, bias=False, mask=False))
    step(args, reduction=reduction, memory_limit=limit)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = step(args, reduction=reduction, memory_limit=limit)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken - sum(t.nbytes for t in results[1:]) <= limit
