"""RMSNorm's portable path on a GPU: numbers against fp64, bits, and what runs PyTorch's fused kernels.

On a CPU, functions in PyTorch stand in for the fused kernels.
"""

import pytest

import quackish
from quackish.ops.rms_norm import portable
from quackish.testing import assert_deterministic
from tests.rms_norm import truth
from tests.rms_norm.cases import BF16, FP16, FP32, FP64, on


def rounded(results, expected):
    """The results in the shapes and dtypes of `expected`, which are meta tensors."""
    pairs = zip(results, expected, strict=True)
    return tuple(None if like is None else t.reshape(like.shape).to(like.dtype) for t, like in pairs)


def meta(*tensors):
    """The kernels take tensors of one dtype."""
    assert len({t.dtype for t in tensors if t is not None}) == 1
    return [None if t is None else t.to("meta") for t in tensors]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def fused(request, monkeypatch):
    """Calls of the fused kernels: ["forward", (needs dx, needs dweight), ...]."""
    calls, real = [], (portable._fused_forward, portable._fused_backward)

    def forward(x, shape, weight, eps):
        calls.append("forward")
        if x.is_cuda:
            return real[0](x, shape, weight, eps)
        rstd = (x.double().square().mean(-1, keepdim=True) + eps).rsqrt()
        y = x * rstd if weight is None else x * rstd * weight
        x, weight = meta(x, weight)
        return rounded((y, rstd), real[0](x, shape, weight, eps))

    def backward(dy, x, shape, rstd, weight, needs):
        calls.append(needs)
        if x.is_cuda:
            return real[1](dy, x, shape, rstd, weight, needs)
        assert rstd.dtype == FP32
        xhat, g = x * rstd.double(), dy.double() if weight is None else dy.double() * weight
        dx, dweight = rstd * (g - xhat * (xhat * g).mean(-1, keepdim=True)), (dy * xhat).flatten(0, -2).sum(0)
        dy, x, weight = meta(dy, x, weight)
        return rounded((dx, dweight), real[1](dy, x, shape, rstd.to("meta"), weight, needs))

    monkeypatch.setattr(portable, "_fused_forward", forward)
    monkeypatch.setattr(portable, "_fused_backward", backward)
    monkeypatch.setitem(on, "device", request.param)
    if request.param == "cpu":
        monkeypatch.setattr(portable, "_has_kernels", lambda device: True)
    quackish.use_kernels(False)
    yield calls
    quackish.use_kernels(True)


@pytest.mark.parametrize(
    "mix",
    [
        *(dict(x=dtype, weight=dtype) for dtype in (BF16, FP16, FP32)),
        dict(weight=None),
        dict(weight=None, bias=BF16),
        dict(weight=FP32, bias=BF16, weight_offset=1.0),
        dict(weight=BF16, weight_offset=1.0),
        dict(weight=BF16, out_dtype=FP32),
        dict(weight=BF16, residual=BF16),
        dict(weight=BF16, residual=FP32),
        dict(weight=BF16, residual=BF16, residual_dtype=FP32),
        dict(x=FP32, residual=BF16),
        dict(x=FP32, residual=FP16, residual_dtype=FP32, weight_offset=1.0),
    ],
    ids=lambda mix: " ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in mix.items()),
)
def test_each_result_is_rounded_once(fused, mix):
    for m, n in ((33, 100), (5, 257)):
        case = truth.make_case(m, n, **mix)
        got = truth.step(case, "auto")
        truth.assert_close(case, got)
        assert fused == ["forward", (True, case.weight is not None)]
        for t, like in zip(got, [*got[: len(case.grad_outputs)], *case.inputs], strict=True):
            assert (t.shape, t.dtype) == (like.shape, like.dtype)
        exact = truth.truth(case, got[1] if case.residual is not None else case.x).values()
        for t, (want, _) in zip(got, exact, strict=True):
            assert t.is_contiguous()
            assert t.dtype is FP32 or (t == want.to(t.dtype)).double().mean() > 0.98
        fused.clear()
        truth.step(case, "reference")
        assert not fused


def test_the_gradient_of_many_rows_has_no_rounded_partial_sums(fused, monkeypatch):
    monkeypatch.setattr(portable, "_MAX_ROWS", 32)
    dtypes, inner = [], portable._fused_backward
    monkeypatch.setattr(portable, "_fused_backward", lambda *args: dtypes.append(args[1].dtype) or inner(*args))
    for m in (32, 33):
        case = truth.make_case(m, 64, BF16, BF16)
        truth.assert_close(case, truth.step(case, "auto"))
    assert dtypes == [BF16, FP32]


def test_other_calls_run_the_reference(fused, monkeypatch):
    x, heads = truth.rows((3, 2, 8), BF16), truth.weights(16, BF16).view(2, 8)
    wide = truth.weights(8, FP64)
    for weight in (heads, wide):
        y, _, rstd = quackish.rms_norm_forward(x, weight, eps=1e-6)
        quackish.rms_norm_backward(y, x, weight, rstd)
    none = x[:0].requires_grad_()
    quackish.rms_norm(none, truth.weights(8, BF16), eps=1e-6).backward(none)
    monkeypatch.setattr(portable, "_MAX_ELEMENTS", x.numel())
    quackish.rms_norm(x, truth.weights(8, BF16), eps=1e-6)
    assert not fused


@pytest.mark.gpu
@pytest.mark.parametrize("fused", ["cuda"], indirect=True)
@pytest.mark.parametrize("m, n", [(8192, 4096), (100_000, 128), (4096, 257)])
def test_bits_repeat(fused, m, n):
    case = truth.make_case(m, n, BF16, BF16)
    assert_deterministic(lambda x, w: truth.rms_norm(x, w, eps=1e-6), case.x, case.weight, runs=5)
    truth.assert_close(case, truth.step(case, "auto"))
    assert fused
