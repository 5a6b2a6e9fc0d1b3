"""Rotary position embeddings on a GPU: numbers, bits, CUDA graphs, tensors of more than 2^31 elements."""

import itertools

import pytest
import torch

import quackish
from quackish.testing import assert_close_to_fp64, assert_deterministic
from quackish.testing.device import poison_free_memory
from quackish.testing.errors import error, same_bits
from tests.cuda_graphs import captured, no_synchronization
from tests.rotary.cases import BF16, FP16, FP32, LAYOUTS, case, functions, step, truth

pytestmark = pytest.mark.gpu
rotary = quackish.rotary
SIZES = [(64, 64), (128, 128), (256, 64), (80, 32), (72, 48), (81, 30), (2, 2)]  # D and rotary_dim


@pytest.fixture(autouse=True)
def _free_memory():
    """Other processes test on this GPU too."""
    yield
    torch.cuda.empty_cache()


@pytest.mark.parametrize("layout, sizes, dtype", list(itertools.product(LAYOUTS, SIZES, (BF16, FP16, FP32))))
def test_numbers(layout, sizes, dtype):
    d, rotary_dim = sizes
    options = dict(layout=layout, rotary_dim=rotary_dim)
    for half, table_dtype, table_batch in ((False, FP32, 3), (True, dtype, 1)):
        inputs = case(3, 9, 2, 131, d, rotary_dim, dtype, table_dtype, half, table_batch, device="cuda")
        poison_free_memory()
        assert_close_to_fp64(*functions(backend="cute", **options), *inputs)


def test_errors_are_at_most_pytorchs():
    """Beside the formula of Transformers in the same dtype."""
    q, k, cos, sin = case(2, 8, 2, 300, 128, table_dtype=BF16, half=True, device="cuda", grad=False)
    cos, sin = (torch.cat([t, t], -1) for t in (cos, sin))
    want, _ = truth(q.double(), None, cos.double(), sin.double())
    rotated = torch.cat((-q[..., 64:], q[..., :64]), -1)
    theirs = error(q * cos[:, None] + rotated * sin[:, None], want)
    ours = error(rotary(q, k, cos, sin, backend="cute")[0], want)
    assert ours.norm <= theirs.norm
    assert ours.worst <= theirs.worst


@pytest.mark.parametrize("sizes", [(8, 32, 8, 2048, 64), (1, 5, 1, 37, 81)])
def test_20_runs_are_equal(sizes):
    inputs = case(*sizes, rotary_dim=sizes[-1] // 2 * 2, device="cuda")
    assert_deterministic(lambda *args: rotary(*args, rotary_dim=sizes[-1] // 2 * 2, backend="cute"), *inputs)


def test_bits_depend_on_the_row_alone():
    q, k, cos, sin = inputs = case(8, 32, 8, 2048, 64, device="cuda", grad=False)
    whole = rotary(*inputs, backend="cute")
    for batch, heads, rows in ((slice(1, 2), slice(3, 4), slice(9, 10)), (slice(2, 8), slice(0, 7), slice(100, 900))):
        out, _ = rotary(q[batch, heads, rows], k[batch, :, rows], cos[:, rows], sin[:, rows], backend="cute")
        assert same_bits(out, whole[0][batch, heads, rows])
    unaligned = torch.empty(8, 32, 2048, 65, dtype=BF16, device="cuda")[..., 1:].copy_(q)
    assert same_bits(rotary(unaligned, None, cos, sin, backend="cute")[0], whole[0])


def test_graphs_and_no_synchronization():
    inputs = case(2, 8, 2, 300, 128, device="cuda")
    step(inputs, backend="cute")
    with no_synchronization():
        q, k = rotary(*inputs, backend="cute")
        torch.autograd.grad((q, k), inputs[:2], (q.detach(), k.detach()))
    graph, results = captured(lambda: rotary(*inputs, backend="cute"))
    fresh = case(2, 8, 2, 300, 128, device="cuda", grad=False)
    with torch.no_grad():
        for mine, new in zip(inputs, fresh, strict=True):
            mine.copy_(new * 0.5)
    graph.replay()
    assert all(map(same_bits, results, rotary(*inputs, backend="cute")))


@pytest.mark.parametrize("transposed", [False, True])
def test_more_than_2_to_the_31_elements(transposed):
    """The last rows, whose offsets exceed 32 bits."""
    if torch.cuda.mem_get_info()[0] < 16e9:
        pytest.skip("needs 16 GB of free GPU memory")
    batch, heads, length, d = 3, 48, 118_000, 128
    shape = (batch, length, heads, d) if transposed else (batch, heads, length, d)
    q = torch.empty(shape, dtype=BF16, device="cuda").normal_()
    q = (q.transpose(1, 2) if transposed else q).requires_grad_()
    assert q.numel() > 2**31
    _, _, cos, sin = case(1, 1, 1, length, d, device="cuda")
    out, _ = rotary(q, None, cos, sin, backend="cute")
    (dq,) = torch.autograd.grad(out, q, out.detach())
    part = (slice(-1, None), slice(-2, None), slice(-100, None))
    last = q[part].detach().double().requires_grad_()
    want, _ = truth(last, None, cos[:, -100:].double(), sin[:, -100:].double())
    (true,) = torch.autograd.grad(want, last, out[part].detach().double())
    for got, wanted in ((out, want), (dq, true)):
        assert (got[part] - wanted).norm() <= 2**-8 * wanted.norm()
