"""scaled_dot_product_attention on the portable path: numbers, what is promised for edge cases, errors, compilation."""

import re
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import quackish
from quackish.errors import UnsupportedError
from quackish.ops.attention import operators, reference
from quackish.testing.errors import same_bits
from tests.attention.cases import (
    BF16,
    FP16,
    FP32,
    FP64,
    LARGE,
    assert_large_right,
    assert_right,
    case,
    large_case,
    large_products,
    step,
    truth,
)

attention = quackish.scaled_dot_product_attention

# Numbers --------------------------------------------------------------------------------------------------------------

CALLS = {
    "bias": dict(bias=(2, 4, 9, 13)),
    "bias of a head": dict(bias=(4, 9, 13)),
    "bias of keys": dict(bias=(2, 1, 1, 13)),
    "bias of queries": dict(bias=(1, 4, 9, 1)),
    "mask": dict(mask=(9, 13)),
    "bias and mask": dict(bias=(1, 1, 9, 13), mask=(2, 1, 9, 13)),
    "causal": dict(bias=(1, 4, 9, 13), is_causal=True),
    "GQA": dict(bias=(2, 4, 9, 13), kv_heads=2),
    "scale": dict(mask=(2, 4, 9, 13), scale=0.3),
}


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("max_scores", [reference.MAX_SCORES, 300], ids=["whole", "in chunks"])
def test_results_are_pytorchs(kind, max_scores, monkeypatch):
    """In fp64, where rows have keys."""
    monkeypatch.setattr(reference, "MAX_SCORES", max_scores)
    args = case(2, 4, 9, 13, 8, dtype=FP64, **CALLS[kind])
    mask = args.pop("attn_mask", None)
    if mask is not None:
        mask[..., 0] = True
    theirs = {name: t for name, t in args.items() if name not in ("attn_bias", "is_causal")}
    added = args.get("attn_bias", torch.zeros((), dtype=FP64))
    causal = torch.ones(9, 13, dtype=torch.bool).tril() if args.get("is_causal") else None
    for keep in (mask, causal):
        added = added if keep is None else torch.where(keep, added, -torch.inf)
    want = F.scaled_dot_product_attention(**theirs, attn_mask=added.expand(2, 4, 9, 13))
    got = attention(**args, attn_mask=mask)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    leaves = [t for t in args.values() if isinstance(t, torch.Tensor)]
    dy = torch.randn(want.shape, dtype=FP64)
    for ours, other in zip(*(torch.autograd.grad(y, leaves, dy) for y in (got, want)), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("num_q, num_k", [(1, 1), (1, 9), (9, 1)])
def test_lengths_of_one(num_q, num_k):
    args = case(2, 4, num_q, num_k, 8, dtype=FP64, bias=(2, 4, num_q, num_k), kv_heads=2)
    bias = args.pop("attn_bias")
    found = [
        (y, *torch.autograd.grad(y.square().sum(), (*list(args.values())[:3], bias)))
        for y in (attention(**args, attn_bias=bias), F.scaled_dot_product_attention(**args, attn_mask=bias))
    ]
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_softcap_window_and_lse_have_the_right_gradients():
    args = case(1, 2, 6, 7, 4, dtype=FP64, bias=(1, 2, 6, 7))

    def call(query, key, value, attn_bias):
        return attention(
            query, key, value, attn_bias=attn_bias, softcap=2.0, window=(3, 1), return_lse=True, backend="reference"
        )

    assert torch.autograd.gradcheck(call, tuple(args.values()))
    i, j = torch.arange(6)[:, None], torch.arange(7)
    x = 2.0 * torch.tanh(args["query"] @ args["key"].mT * 0.5 / 2.0) + args["attn_bias"]
    x = x.masked_fill((j < i - 3) | (j > i + 1), -torch.inf)
    out, lse = call(**args)
    torch.testing.assert_close(out, x.softmax(-1) @ args["value"])
    torch.testing.assert_close(lse, x.logsumexp(-1))


@pytest.mark.parametrize("no_limit", [1 << 31, sys.maxsize, 1 << 70])
def test_windows_as_long_as_any_sequence(no_limit):
    args = case(1, 2, 6, 7, 4, dtype=FP32)
    results = [attention(**args, window=window, return_lse=True) for window in ((no_limit, no_limit), (None, None))]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_errors_of_16_bits(dtype):
    args = case(2, 4, 50, 60, 16, dtype=dtype, bias=(1, 4, 50, 60), bias_dtype=FP32, mask=(2, 1, 50, 60))
    assert_right(step(args, backend="reference"), truth(args), dtype)


@pytest.mark.parametrize("kind", LARGE)
def test_large_biases(kind):
    args = large_case(**LARGE[kind])
    assert_large_right(step(args, backend="reference"), args)


@pytest.mark.parametrize("scale", [2.0**12, -(2.0**12)])
def test_large_products(scale):
    args = large_products(scale, 32)
    assert_large_right(step(args, backend="reference"), args)


@pytest.mark.parametrize("dtype", [FP32, FP64])
@pytest.mark.parametrize("low", [-1e9, -1e30, torch.finfo(FP32).min, torch.finfo(FP64).min])
def test_a_row_whose_keys_all_have_one_large_bias(dtype, low):
    if low < torch.finfo(dtype).min:
        pytest.skip("not a number of this dtype")
    q, k = (torch.zeros(1, 1, 2, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    v = torch.tensor([[0.0], [1.0]], dtype=dtype).repeat(1, 1, 1, 8).requires_grad_()
    bias = torch.full((1, 1, 2, 2), low, dtype=dtype, requires_grad=True)
    out = attention(q, k, v, attn_bias=bias)
    assert (out == 0.5).all()
    dv, dbias = torch.autograd.grad(out[:, :, 0].sum(), (v, bias))
    torch.testing.assert_close(dv, torch.full_like(dv, 0.5))
    torch.testing.assert_close(dbias[0, 0], torch.tensor([[-2.0, 2.0], [0.0, 0.0]], dtype=dtype))


def test_additive_mask_is_a_bias():
    args = case(bias=(1, 2, 70, 70), dtype=FP32)
    bias = args.pop("attn_bias")
    assert same_bits(attention(**args, attn_mask=bias), attention(**args, attn_bias=bias))


# Edge cases -----------------------------------------------------------------------------------------------------------


def test_a_row_without_keys():
    args = case(2, 2, 9, 13, 8, bias=(2, 2, 9, 13), mask=(2, 1, 9, 13))
    got = step(args, backend="reference")
    assert (got["o"][:, :, 3] == 0).all()
    assert (got["lse"][:, :, 3] == -torch.inf).all()
    assert (got["query"][:, :, 3] == 0).all()
    assert (got["attn_bias"][:, :, 3] == 0).all()
    args["attn_mask"] = torch.zeros_like(args["attn_mask"])
    assert all((t == 0).all() for name, t in step(args, backend="reference").items() if name != "lse")


@pytest.mark.parametrize("sizes", [(0, 2, 5, 7), (2, 2, 0, 7), (2, 2, 5, 0)])
def test_empty_tensors(sizes):
    batch, heads, num_q, num_k = sizes
    args = case(batch, heads, num_q, num_k, 8, bias=(batch, heads, num_q, num_k))
    got = step(args, backend="auto")
    assert got["o"].shape == (batch, heads, num_q, 8)
    for name, grad in got.items():
        assert grad.shape == (args[name].shape if name in args else got[name].shape)
        assert name == "lse" or not grad.any()


def test_plain_calls_are_pytorchs(monkeypatch):
    """Neither bias, mask, window, softcap nor lse."""
    q, k, v = (t.detach() for t in case(2, 2, 9, 9, 8, dtype=FP32).values())
    called = []
    theirs = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **kw: called.append(kw) or theirs(*a, **kw))
    assert same_bits(attention(q, k, v, is_causal=True), theirs(q, k, v, is_causal=True))
    assert [kw["is_causal"] for kw in called] == [True]
    attention(q, k, v, torch.ones(9, 9, dtype=torch.bool))
    assert len(called) == 1
    with pytest.raises(UnsupportedError, match="a call without bias and mask runs PyTorch's own kernels"):
        attention(q, k, v, backend="cute")


@pytest.mark.parametrize("of", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("compiled", [False, True])
def test_causal_bias_is_pytorchs(of, compiled):
    """Its elements are uninitialized memory."""
    torch.compiler.reset()
    q, k, v = (t.detach() for t in case(2, 2, 5, 9, 8, dtype=FP32).values())
    function = torch.compile(attention, fullgraph=True, backend="aot_eager") if compiled else attention
    keep = torch.ones(5, 9, dtype=torch.bool).tril(0 if of is causal_upper_left else 4)
    want = F.scaled_dot_product_attention(q, k, v, keep)
    torch.testing.assert_close(function(q, k, v, of(5, 9)), want)


@pytest.mark.parametrize(
    "option", [dict(attn_bias=torch.zeros(5, 9)), dict(return_lse=True), dict(backend="reference")]
)
def test_causal_bias_is_refused_beside_other_options(option):
    q, k, v = (t.detach() for t in case(2, 2, 5, 9, 8, dtype=FP32).values())
    with pytest.raises(
        UnsupportedError, match="attn_mask is a CausalBias, which only PyTorch's own function takes; exp"
    ):
        attention(q, k, v, causal_lower_right(5, 9), **option)


def test_inputs_edited_before_backward():
    args = case(bias=(1, 2, 70, 70), mask=(70, 70), dtype=FP32)
    for name in ("attn_bias", "attn_mask"):
        out = attention(**args)
        with torch.no_grad():
            args[name].add_(1) if name == "attn_bias" else args[name].logical_not_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_checkpoints():
    """Recomputed in backward, also inside compiled code."""
    args = case(bias=(1, 2, 70, 70), mask=(70, 70), dtype=FP32)
    leaves = [t for t in args.values() if t.requires_grad]

    def checkpointed():
        return checkpoint(lambda: attention(**args), use_reentrant=False)

    want = torch.autograd.grad(attention(**args).sum(), leaves)
    torch.compiler.reset()
    for function in (checkpointed, torch.compile(checkpointed, fullgraph=True, backend="aot_eager")):
        assert all(map(same_bits, torch.autograd.grad(function().sum(), leaves), want))


def test_second_derivatives_are_refused():
    args = case(bias=(1, 2, 70, 70), dtype=FP32)
    with pytest.raises(RuntimeError, match="double backward"):
        torch.autograd.grad(attention(**args).sum(), args["query"], create_graph=True)


# Errors ---------------------------------------------------------------------------------------------------------------

BIAS = torch.zeros(70, 70)
ERRORS = [
    (UnsupportedError, dict(dropout_p=0.1), "dropout_p is 0.1; expected 0.0: dropout is not supported"),
    (
        ValueError,
        dict(attn_mask=BIAS, attn_bias=BIAS),
        "attn_mask is torch.float32 and attn_bias is given; expected a bool attn_mask beside attn_bias",
    ),
    (ValueError, dict(attn_bias=torch.zeros(3, 70, 70)), "attn_bias is (3, 70, 70); expected (1, 2, 70, 70), or 1 in"),
    (ValueError, dict(attn_mask=torch.ones(70, 69).bool()), "attn_mask is (70, 69); expected (1, 2, 70, 70), or 1 in"),
    (TypeError, dict(attn_bias=BIAS.int()), "attn_bias is torch.int32; expected "),
    (TypeError, dict(attn_bias=[0.0]), "attn_bias is a list; expected a torch.Tensor or None"),
    (TypeError, dict(key=torch.zeros(1, 2, 70, 64, dtype=FP16)), "key is torch.float16; expected torch.float32, as"),
    (ValueError, dict(key=torch.zeros(1, 2, 70, 32)), "expected query and key with one head dimension of at least 1"),
    (ValueError, dict(value=torch.zeros(1, 2, 9, 64)), "expected key and value of one length"),
    (ValueError, dict(key=torch.zeros(1, 3, 70, 64), value=torch.zeros(1, 3, 70, 64)), "or enable_gqa=True"),
    (ValueError, dict(window=3), "window is 3; expected (left, right), the keys before and after, or None"),
    (ValueError, dict(window=(-1, 0)), "window is (-1, 0); expected integers from 0, or None for no limit"),
    (ValueError, dict(softcap=0.0), "softcap is 0.0; expected a finite number above 0, or None"),
    (ValueError, dict(softcap=float("inf")), "softcap is inf; expected a finite number above 0, or None"),
    (ValueError, dict(backend="cuda"), "backend is 'cuda'; expected one of 'auto', "),
]


@pytest.mark.parametrize("kind, change, message", ERRORS, ids=[message[:30] for *_, message in ERRORS])
def test_errors(kind, change, message):
    with pytest.raises(kind, match="^scaled_dot_product_attention: .*" + re.escape(message)):
        attention(**case(dtype=FP32) | change)


# torch.compile and operators ------------------------------------------------------------------------------------------


def test_compiles_for_two_lengths():
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (33, 40):
        args = case(2, 2, length, length, 16, bias=(1, 2, length, length), mask=(2, 1, length, length))
        got, want = (step(args, function, backend="auto") for function in (compiled, attention))
        for name, t in want.items():
            assert same_bits(got[name], t), (length, name)


def test_operators_are_registered_as_torch_expects():
    args = case(1, 2, 9, 13, 8, bias=(1, 2, 9, 13), mask=(9, 13), dtype=FP32)
    inputs = [args[name] for name in ("query", "key", "value", "attn_bias")]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    mask = args["attn_mask"][None, None]
    torch.library.opcheck(operators.forward.overload, (*inputs, mask, 0.35, 2.0, 3, 0, "auto"), test_utils=tests)
