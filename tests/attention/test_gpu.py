"""Attention on a GPU: large tensors, peak memory, bits with and without grad, NaN in skipped tiles, checkpoints."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quackish
from quackish.testing.errors import same_bits
from tests.attention.cases import BF16, assert_right, case, step, truth

pytestmark = pytest.mark.gpu
attention = quackish.scaled_dot_product_attention


def test_more_than_2_31_elements_of_a_bias():
    """The last head, whose offsets exceed 32 bits."""
    if torch.cuda.get_device_properties(0).total_memory < 24e9:
        pytest.skip("needs 24 GB of GPU memory")
    heads, length = 33, 8192
    args = case(1, heads, length, device="cuda")
    bias = torch.empty(1, heads, length, length, dtype=BF16, device="cuda").normal_()
    assert bias.numel() > 2**31
    args["attn_bias"] = bias.requires_grad_()
    out = attention(**args, backend="cute")
    do = torch.ones_like(out)
    grads = torch.autograd.grad(out, list(args.values()), do)
    last = {name: t[:, -1:].detach().double().requires_grad_() for name, t in args.items()}
    want = attention(**last, backend="reference")
    wanted = torch.autograd.grad(want, list(last.values()), do[:, -1:].double())
    for got, true in zip((out.detach(), *grads), (want.detach(), *wanted), strict=True):
        assert (got[:, -1:] - true).norm() <= 2**-8 * true.norm()


@pytest.mark.parametrize("bias", [(2, 4, 1024, 1024), (1, 4, 1024, 1024)], ids=["own", "broadcast"])
def test_peak_memory(bias):
    """Results, gradients and 64 bytes per row."""
    args = case(2, 4, 1024, bias=bias, device="cuda")
    step_of = lambda: torch.autograd.grad(attention(**args, backend="cute"), list(args.values()), do)  # noqa: E731
    do = torch.ones_like(args["query"])
    step_of()  # compiles
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step_of()
    peak = torch.cuda.max_memory_allocated() - before
    rows, d = 2 * 4 * 1024, 64
    most = rows * (4 * 2 * d + 64) + args["attn_bias"].nbytes
    assert peak <= most


def test_bits_are_the_same_without_grad():
    args = case(2, 4, 200, 264, bias=(1, 4, 200, 264), mask=(2, 1, 200, 264), device="cuda")
    got = step(args)
    with torch.no_grad():
        out, lse = attention(**args, return_lse=True, backend="cute")
    assert same_bits(out, got["o"])
    assert same_bits(lse, got["lse"])


@pytest.mark.parametrize("options", [dict(is_causal=True), dict(window=(20, 40))], ids=["causal", "window"])
def test_nan_in_skipped_tiles(options):
    """NaN in keys of tiles in which no key takes part reaches nothing but the gradients of those keys."""
    args = case(2, 2, 128, 520, bias=(2, 2, 128, 520), device="cuda", **options)
    want = truth(args)
    with torch.no_grad():
        for name in ("key", "value"):
            args[name][:, :, 256:] = torch.nan
        args["attn_bias"][..., 256:] = torch.nan
    got = step(args)
    for name in ("key", "value"):
        got[name], want[name] = got[name][:, :, :256], want[name][:, :, :256]
    assert_right(got, want)


def test_checkpoints():
    args = case(2, 2, 129, bias=(1, 2, 129, 129), mask=(2, 1, 129, 129), device="cuda")
    leaves = [t for t in args.values() if t.requires_grad]
    do = torch.ones_like(args["query"])
    want = torch.autograd.grad(attention(**args, backend="cute"), leaves, do)
    again = checkpoint(lambda: attention(**args, backend="cute"), use_reentrant=False)
    assert all(map(same_bits, torch.autograd.grad(again, leaves, do), want))


def test_a_single_query_runs_the_portable_path():
    args = case(2, 4, 1, 300, kv_heads=2, bias=(2, 4, 1, 300), device="cuda")
    with pytest.warns(quackish.errors.PortablePathWarning):
        assert_right(step(args, backend="auto"), truth(args))
