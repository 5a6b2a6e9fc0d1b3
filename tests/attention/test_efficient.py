"""The steps by PyTorch's memory-efficient attention, whose functions formulas replace on a CPU."""

import types

import pytest
import torch

import quackish
from quackish.ops.attention import efficient
from quackish.ops.attention.reference import Inputs, Options
from quackish.testing.errors import same_bits
from tests.attention.cases import BF16, FP16, assert_large_right, assert_right, case, large_case, step, truth


def attend(q, k, v, bias, scale):
    assert bias.isfinite().any(-1).all()  # otherwise it is NaN in PyTorch's
    x = q.float() @ k.float().mT * scale + bias.float()
    return (x.softmax(-1) @ v.float()).to(q.dtype), x.logsumexp(-1)


def differentiate(do, q, k, v, bias, out, lse, scale, need_ds):
    do, q, k, v, out = (t.float() for t in (do, q, k, v, out))
    p = (q @ k.mT * scale + bias.float() - lse[..., None]).exp()
    ds = p * (do @ v.mT - (do * out).sum(-1, keepdim=True))
    return tuple(t.to(bias.dtype) for t in (ds @ k * scale, ds.mT @ q * scale, p.mT @ do, ds))


@pytest.fixture
def formulas(monkeypatch):
    """Calls with backend "auto" run the steps, with these formulas."""
    for function in (attend, differentiate):
        monkeypatch.setattr(efficient, function.__name__, function)
    monkeypatch.setattr(efficient, "covers", lambda inputs, options: True)


CALLS = {
    "own bias": dict(bias=(2, 4, 70, 81)),
    "bias of a head, mask of keys": dict(bias=(1, 4, 70, 81), mask=(2, 1, 1, 81)),
    "bias of keys": dict(bias=(2, 1, 1, 81)),
    "bias of a head, causal": dict(bias=(1, 4, 70, 81), is_causal=True),
    "bias and mask, GQA": dict(bias=(1, 1, 70, 81), mask=(2, 1, 70, 81), kv_heads=2, dtype=FP16),
    "mask": dict(mask=(2, 1, 70, 81), scale=0.3),
    "window": dict(window=(5, 0)),
    "nothing": {},
}


@pytest.mark.parametrize("min_rows, max_scores", [(64, efficient.MAX_SCORES), (20, 0)], ids=["whole", "in parts"])
@pytest.mark.parametrize("kind", CALLS)
def test_numbers(kind, min_rows, max_scores, formulas, monkeypatch):
    """Also of rows without a key, and with a gradient of lse."""
    monkeypatch.setattr(efficient, "MAX_SCORES", max_scores)
    monkeypatch.setattr(efficient, "_MIN_ROWS", min_rows)
    args = case(2, 4, 70, 81, 32, **CALLS[kind])
    got = step(args, backend="auto")
    assert_right(got, truth(args), args["query"].dtype)
    if "attn_mask" in args and args["attn_mask"].shape[2] > 1:
        assert not got["o"][:, :, 3].any()
        assert not got["query"][:, :, 3].any()


def test_gradients_have_the_strides_of_their_tensors(formulas):
    """As compiled code expects them."""
    args = case(2, 4, 70, 81, 32, bias=(1, 4, 70, 81))
    for name in ("query", "key", "value"):
        args[name] = args[name].detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    o = quackish.scaled_dot_product_attention(
        *(args[name] for name in ("query", "key", "value")), attn_bias=args["attn_bias"]
    )
    for t, grad in zip(
        (args["query"], args["key"]), torch.autograd.grad(o.sum(), (args["query"], args["key"])), strict=True
    ):
        assert grad.stride() == t.stride()


@pytest.mark.parametrize(
    "differs",
    [
        dict(batch=65_536),
        dict(heads=65_536),
        dict(d=12),
        dict(d=264),
        dict(softcap=3.0),
        dict(dtype=torch.float32),
        dict(bias_dtype=torch.float32),
        dict(bias_keys=1),
        dict(family="sm_75"),
        dict(family="sm_121"),
    ],
    ids=str,
)
def test_what_it_covers(differs, monkeypatch):
    sizes = dict(batch=2, heads=3, d=64, dtype=BF16, bias_dtype=None, bias_keys=9, softcap=None, family="sm_89")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def covers(batch, heads, d, dtype, bias_dtype, bias_keys, softcap, family):
        monkeypatch.setattr(efficient, "gpu_of", lambda index: types.SimpleNamespace(family=family))
        q, k = (torch.empty(batch, heads, length, d, dtype=dtype, device="meta") for length in (7, 9))
        bias = torch.empty(1, 1, 7, bias_keys, dtype=bias_dtype or dtype, device="meta")
        return efficient.covers(Inputs(q, k, k, bias, None), Options(1.0, softcap, None, None))

    assert covers(**sizes)
    assert not covers(**sizes | differs)


def test_large_biases(formulas):
    """Up to the smallest finite number."""
    args = large_case(heads=1, bias=(1, 1, 70, 72))
    assert_large_right(step(args, backend="auto"), args)


def test_pytorchs_functions_take_these_arguments():
    """PyTorch checks them against their schemas, then finds no function for CPUs."""
    q, k, bias, lse = (
        torch.zeros(shape, dtype=BF16) for shape in ((1, 2, 7, 8), (1, 2, 9, 8), (1, 2, 7, 9), (1, 2, 7))
    )
    for call, name in (
        (lambda: efficient.attend(q, k, k, bias, 0.5), "forward"),
        (lambda: efficient.differentiate(q, q, k, k, bias, q, lse, 0.5, True), "backward"),
    ):
        with pytest.raises(NotImplementedError, match=f"'aten::_efficient_attention_{name}'.*'CPU' backend"):
            call()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", CALLS)
def test_numbers_on_a_gpu(kind, monkeypatch):
    args = case(2, 4, 70, 81, 32, device="cuda", **CALLS[kind])
    monkeypatch.setattr("quackish.device.kernel_device._uses_kernels", True)  # restored after the test
    quackish.use_kernels(False)
    calls = []
    attend = efficient.attend
    monkeypatch.setattr(efficient, "attend", lambda *args: calls.append(1) or attend(*args))
    got = step(args, backend="auto")
    assert calls
    assert_right(got, truth(args), args["query"].dtype)
    assert all(map(same_bits, step(args, backend="auto").values(), got.values()))
