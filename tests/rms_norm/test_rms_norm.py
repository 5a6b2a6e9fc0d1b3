"""RMSNorm without a GPU: values and gradients on the portable path and on emulated kernels, and the module.

Tests with the fixture `norm_anywhere` also run on a GPU; test_rms_norm_gpu.py has the tests that need one.
"""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F

from quackish import LinearCrossEntropyLoss
from quackish.ops.rms_norm.api import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
from quackish.testing import assert_close_to_fp64
from quackish.testing.errors import error, same_bits
from quackish.testing.inputs import KINDS
from tests.emulator_cases import BLACKWELL, HOPPER, ONE_EACH, QUICK, emulated
from tests.rms_norm import truth
from tests.rms_norm.cases import BF16, FLOATS, FP16, FP32, FP64, Functions, assert_same, leaf, rows, step, weights

# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, FP64])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_against_pytorch(dtype, kind):
    x, w = leaf(rows((33, 200), dtype, kind=kind)), leaf(weights(200, dtype))
    dy = rows((33, 200), dtype, seed=2)
    ours = step(lambda x, w: rms_norm(x, w, eps=1e-5), (x, w), dy)
    theirs = step(lambda x, w: F.rms_norm(x, (200,), w, 1e-5), (x, w), dy)
    truth = step(lambda x, w: F.rms_norm(x, (200,), w, 1e-5), (leaf(x.double()), leaf(w.double())), dy.double())
    eps = torch.finfo(dtype).eps
    for got, peer, want in zip(ours, theirs, truth, strict=True):
        e, bound = error(got, want), error(peer, want)
        assert e.within(max(1.5 * bound.norm, 2 * eps), max(1.5 * bound.worst, 4 * eps)), (e, bound)


@pytest.mark.parametrize("weight, bias, residual, offset", list(itertools.product([0, 1], [0, 1], [0, 1], [0.0, 1.0])))
def test_gradcheck(weight, bias, residual, offset):
    if offset and not weight:
        return
    x = leaf(rows((2, 3, 5), FP64))
    w = leaf(weights(5, FP64)) if weight else None
    b = leaf(rows((5,), FP64, seed=2)) if bias else None
    r = leaf(rows((2, 3, 5), FP64, seed=3)) if residual else None

    def call(x, w, b, r):
        return rms_norm(x, w, b, residual=r, eps=1e-3, weight_offset=offset)

    assert torch.autograd.gradcheck(call, (x, w, b, r))
    assert torch.autograd.gradgradcheck(
        call, (x[:1, :2].detach().requires_grad_(), w, b, r if r is None else r[:1, :2])
    )


# Values and gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x_dtype, w_dtype, r_dtype, out_dtype", list(itertools.product(FLOATS, FLOATS, FLOATS, (None, FP32)))
)
@pytest.mark.parametrize("residual_dtype", [None, BF16, FP32])
def test_every_mix_of_dtypes(norm_path, residual_dtype, x_dtype, w_dtype, r_dtype, out_dtype):
    x, r = leaf(rows((3, 7, 16), x_dtype)), leaf(rows((3, 7, 16), r_dtype, seed=1))
    w, b = leaf(weights(16, w_dtype)), leaf(rows((16,), w_dtype, seed=2))

    def call(x, w, b, r):
        dtypes = dict(residual_dtype=residual_dtype, out_dtype=out_dtype)
        return rms_norm(x, w, b, residual=r, eps=1e-6, weight_offset=0.5, **dtypes)

    res_dtype = residual_dtype or r_dtype

    def reference(x, w, b, r):
        res = rounded(x + r, res_dtype)
        return F.rms_norm(res, (16,), w + 0.5, 1e-6) + b, res

    y, res = call(x, w, b, r)
    assert (y.dtype, res.dtype) == (out_dtype or x_dtype, res_dtype)
    assert same_bits(res, (x.float() + r.float()).to(res_dtype))
    assert_close_to_fp64(call, reference, x, w, b, r)


def rounded(t, dtype):
    """fp64 t rounded to `dtype`, with an unrounded gradient."""
    return t + (t.float().to(dtype).double() - t).detach()


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("used", ["y", "res", "both"])
def test_only_required_gradients_are_computed(norm_path, wanted, used):
    tensors = [rows((4, 8)), weights(8), rows((8,), seed=2), rows((4, 8), BF16, seed=3)]
    inputs = [t.requires_grad_(flag) for t, flag in zip(tensors, wanted, strict=True)]
    y, res = rms_norm(*inputs[:3], residual=inputs[3])
    assert y.requires_grad == res.requires_grad == any(wanted)
    if not any(wanted):
        return
    outs = {"y": (y,), "res": (res,), "both": (y, res)}[used]
    asked = [t for t in inputs if t.requires_grad]
    got = torch.autograd.grad(outs, asked, [torch.ones_like(t) for t in outs], allow_unused=True)
    for t, grad in zip(asked, got, strict=True):
        if grad is None:  # res does not depend on the parameters
            assert used == "res"
            assert t.dim() == 1
        else:
            assert (grad.shape, grad.dtype) == (t.shape, t.dtype)
    if norm_path and used != "res":
        problem, _ = norm_path.launches[-1]
        assert (problem.dweight_dtype, problem.dbias_dtype) == tuple("float32" if f else None for f in wanted[1:3])
        both = {(True, True): ("float32", "bfloat16"), (True, False): ("float32", None)}
        dx = both.get((wanted[0], wanted[3]), ("bfloat16", None) if wanted[3] else (None, None))
        assert (problem.dx_dtype, problem.dresidual_dtype) == dx
        assert problem.dres_dtype == ("bfloat16" if used == "both" and (wanted[0] or wanted[3]) else None)


@pytest.mark.parametrize("make", [torch.clone, lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]], ids=["", "strided"])
def test_a_weight_per_head(norm_anywhere, make):
    """x is a slice of qkv, (2, 5, 4, 16)."""
    qkv, r, dy = rows((2, 5, 3, 4, 16)), rows((2, 5, 4, 16), BF16, seed=1), rows((2, 5, 4, 16), seed=2)
    w, b = make(rows((4, 16), seed=3)), make(rows((4, 16), BF16, seed=4))
    x, w, b, r = inputs = [t.detach().requires_grad_() for t in (qkv[:, :, 1], w, b, r)]

    def call(x, w, b, r):
        return rms_norm(x, w, b, residual=r, eps=1e-6, weight_offset=0.5, backend="cute" if norm_anywhere else "auto")

    def reference(x, w, b, r):
        res = rounded(x + r, BF16)
        return F.rms_norm(res, (16,), None, 1e-6) * (w + 0.5) + b, res

    assert_close_to_fp64(call, reference, *inputs)
    got = step(call, inputs, (dy, dy.to(BF16)))
    for h in range(4):  # same bits as the norm of each head alone
        alone = [t.detach().requires_grad_() for t in (x[..., h, :], w[h], b[h], r[..., h, :])]
        want = step(call, alone, (dy[..., h, :], dy[..., h, :].to(BF16)))
        assert_same([t[..., h, :].contiguous() for t in (*got[:3], got[5])], (*want[:3], want[5]))
        torch.testing.assert_close((got[3][h], got[4][h]), (want[3], want[4]))


def test_functions_of_a_weight_per_head(norm_path):
    x, w, dy = rows((3, 4, 8)), weights(32).view(4, 8), rows((3, 4, 8), seed=2)
    y, _, rstd = rms_norm_forward(x, w)
    assert rstd.shape == (3, 4)
    got = rms_norm_backward(dy, x, w, rstd, dbias=True)
    want = step(lambda x, w, b: rms_norm(x, w, b), (leaf(x), leaf(w), leaf(torch.zeros(4, 8))), dy)
    assert_same([y, got.dx, got.dweight, got.dbias], want)
    single = step(rms_norm, (leaf(x[:, :1]), leaf(w[:1])), dy[:, :1])  # (1, 8) is a weight for one head
    plain = step(rms_norm, (leaf(x[:, 0]), leaf(w[0])), dy[:, 0])
    assert_same([t.view(-1, 8) for t in single], [t.view(-1, 8) for t in plain])
    if norm_path:
        assert [problem.heads for problem, _ in norm_path.launches] == [4] * 4 + [1] * 4


@pytest.mark.parametrize("residual", [False, True])
def test_no_rows(norm_anywhere, residual):
    x, w, b = leaf(rows((2, 0, 8))), leaf(weights(8, BF16)), leaf(weights(8))
    out = rms_norm(x, w, b, residual=x if residual else None, backend="cute" if norm_anywhere else "auto")
    y = out[0] if residual else out
    assert y.shape == x.shape
    dx, dw, db = torch.autograd.grad(y, (x, w, b), y)
    assert dx.shape == x.shape
    assert same_bits(dw, torch.zeros_like(w))
    assert same_bits(db, torch.zeros_like(b))
    assert not norm_anywhere or not norm_anywhere.launches


@pytest.mark.filterwarnings("ignore::quackish.errors.PortablePathWarning")  # fp64 on a GPU
@pytest.mark.parametrize("dtype", [*FLOATS, FP64])
def test_default_eps_is_pytorchs(norm_path, dtype):
    x, w = rows((4, 8), dtype) * 1e-4, weights(8, dtype)  # squares as small as fp32's epsilon
    want = F.rms_norm(x, (8,), w)
    with Functions() as called:  # through the operator
        torch.testing.assert_close(rms_norm(x, w), want)
    assert "quackish.rms_norm_fwd.default" in called.seen
    torch.testing.assert_close(rms_norm(x, w), want)
    torch.testing.assert_close(rms_norm_forward(x, w).y, want)
    torch.testing.assert_close(RMSNorm(8, dtype=dtype)(x), F.rms_norm(x, (8,)))


def test_inputs_are_not_modified(norm_anywhere):
    x, w, b, r = leaf(rows((6, 8))), leaf(weights(8)), leaf(rows((8,), seed=1)), leaf(rows((6, 8), seed=2))
    dy, dres = rows((6, 8), seed=3), rows((6, 8), seed=4)
    mine = (x, w, b, r, dy, dres)
    before = [t.detach().clone() for t in mine]
    step(lambda *a: rms_norm(*a[:3], residual=a[3]), (x, w, b, r), (dy, dres))
    assert_same([t.detach() for t in mine], before)
    assert all(t._version == 0 for t in mine)


def test_same_bits_without_grad_and_in_second_backward(norm_anywhere):
    x, w = leaf(rows((6, 8))), leaf(weights(8))
    y = rms_norm(x, w)
    with torch.no_grad():
        quiet = rms_norm(x, w)
    with torch.inference_mode():
        inference = rms_norm(x, w)
    assert not quiet.requires_grad
    assert same_bits(y, quiet)
    assert same_bits(y, inference)
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    assert_same(first, torch.autograd.grad(y, (x, w), torch.ones_like(y)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, w), torch.ones_like(y))


def test_second_derivatives(norm_anywhere):
    x, w, r = leaf(rows((3, 8))), leaf(weights(8)), leaf(rows((3, 8), seed=1))

    def second(norm):
        y, res = norm(x, w, residual=r)
        dx, dw = torch.autograd.grad((y * res).square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad((dx.square().sum() + dw.sum()), (x, w, r))

    def plain(x, w, residual):
        res = x + residual
        return F.rms_norm(res, (8,), w), res

    for got, want in zip(second(rms_norm), second(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual_dtype", [None, BF16])
def test_functional_forward_and_backward(norm_anywhere, residual_dtype):
    x, w, b = rows((2, 3, 8), BF16), weights(8), rows((8,), BF16, seed=1)
    r, dy, dres = rows((2, 3, 8), seed=2), rows((2, 3, 8), BF16, seed=3), rows((2, 3, 8), seed=4)
    inputs = [leaf(t) for t in (x, w, b, r)]
    dres, kwargs = dres.to(residual_dtype or FP32), dict(weight_offset=1.0, residual_dtype=residual_dtype)
    want = step(lambda x, w, b, r: rms_norm(x, w, b, residual=r, **kwargs), inputs, (dy, dres))
    y, res, rstd = rms_norm_forward(*inputs[:3], residual=inputs[3], **kwargs)
    assert not y.requires_grad
    assert (rstd.shape, rstd.dtype) == ((2, 3), FP32)
    options = dict(weight_offset=1.0, dres=dres, dbias=True, dresidual=True)
    grads = rms_norm_backward(dy, res, w, rstd, **options, dx_dtype=BF16, dresidual_dtype=FP32, dbias_dtype=BF16)
    assert_same([y, res, grads.dx, grads.dweight, grads.dbias, grads.dresidual], want)

    out = rms_norm_forward(x, None)
    assert out.res is x
    grads = rms_norm_backward(dy, x, None, out.rstd, dx=False, dbias=True)
    assert grads.dx is grads.dweight is grads.dresidual is None
    assert grads.dbias.dtype == BF16
    assert rms_norm_backward(dy, x, w, out.rstd, dx=False, dweight=False) == (None,) * 4


# The module -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [8, (8,), [4, 8]])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_module_is_a_drop_in(norm_path, shape, affine, dtype):
    options = dict(elementwise_affine=affine, dtype=dtype)
    theirs, ours = torch.nn.RMSNorm(shape, **options), RMSNorm(shape, **options)
    if affine:
        torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = rows((3, 4, 8), dtype) * 1e-2  # small, so that eps counts
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.RMSNorm)
    y, res = ours(x, x)
    torch.testing.assert_close(res, x + x)
    torch.testing.assert_close(y, theirs(x + x))


def test_module_options():
    dtypes = dict(residual_dtype=FP16, out_dtype=FP32)
    m = RMSNorm(8, 1e-5, True, "cpu", BF16, bias=True, weight_offset=1.0, **dtypes, backend="reference")
    assert {k: (v.dtype, v.unique().tolist()) for k, v in m.state_dict().items()} == {
        "weight": (BF16, [0.0]),
        "bias": (BF16, [0.0]),
    }
    shown = "weight_offset=1.0, residual_dtype=torch.float16, out_dtype=torch.float32, backend=reference, bias=True)"
    assert repr(m).endswith(shown)
    x = rows((3, 8), BF16)
    y = m(x)
    assert [y.dtype, *(t.dtype for t in m(x, x))] == [FP32, FP32, FP16]
    torch.testing.assert_close(y, F.rms_norm(x.float(), (8,), None, 1e-5))
    torch.nn.init.ones_(m.weight)
    m.reset_parameters()
    assert not m.weight.any()
    assert same_bits(copy.deepcopy(m)(x), y)
    x = rows((2, 3, 4))
    multi = RMSNorm((3, 4), bias=True)
    y = multi(x.transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(y, F.rms_norm(x, (3, 4)))
    with pytest.raises(ValueError, match=r"RMSNorm: x is \(2, 3\); expected \(\.\.\., 3, 4\)"):
        multi(torch.ones(2, 3))


# In the emulator ------------------------------------------------------------------------------------------------------

# M, N and options of `make_case`: short and long rows, odd ones, rows split over clusters, dtypes, residual and bias.
EMULATED = {
    "many rows": (130, 64, dict(weight=BF16)),
    "everything": (20, 1000, dict(bias=BF16, residual=FP32, out_dtype=FP16, weight_offset=1.0)),
    "odd": (7, 257, dict(weight=BF16, bias=BF16, residual=BF16)),
    "staged rows": (9, 4096, dict(weight=BF16)),
    "fp16": (9, 2056, dict(x=FP16, weight=FP16)),
    "fp32": (5, 8200, dict(x=FP32)),
    "another residual dtype": (5, 520, dict(weight=BF16, residual=BF16, residual_dtype=FP32)),
    "no weight": (5, 512, dict(weight=None)),
    "cluster of 4": (5, 20_000, dict(weight=BF16)),
    "cluster of 16": (2, 262_144, dict(weight=BF16)),
}


def in_emulator():
    """(case, setting): one case runs every way, the others one way each."""
    for i, name in enumerate(EMULATED):
        for setting in ONE_EACH if name == "everything" else ONE_EACH[i % 4 : i % 4 + 1]:
            marks = () if (name, setting) == ("everything", QUICK) else pytest.mark.exhaustive
            yield pytest.param(name, setting, marks=marks)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, setting", list(in_emulator()))
def test_errors_in_the_emulator_are_within_the_bounds_of_a_gpu(name, setting):
    m, n, options = EMULATED[name]
    case = truth.make_case(m, n, **options)
    with emulated(setting, sm_count=16 if n > 65_536 else 4) as report:
        truth.assert_close(case, truth.step(case))
    assert [launch.kernel for launch in report.launches] == ["rms_norm_fwd", "rms_norm_bwd"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "m, heads, n, setting", [(9, 7, 257, BLACKWELL[0]), (20, 6, 128, HOPPER[1]), (3, 3, 16_384, BLACKWELL[0])]
)
def test_a_weight_per_head_in_the_emulator(m, heads, n, setting):
    x, r = (rows((m, heads, n), dtype, seed=seed) for seed, dtype in enumerate((BF16, FP32)))
    w, b = (weights(heads * n, dtype, seed=2).view(heads, n) for dtype in (BF16, FP32))

    def true_norm(x, w, b, r):
        return F.rms_norm(x + r, (n,), None, 1e-6) * w + b, x + r

    with emulated(setting, sm_count=16):  # all heads' CTAs are resident
        inputs = map(leaf, (x, w, b, r))
        assert_close_to_fp64(lambda x, w, b, r: rms_norm(x, w, b, residual=r, eps=1e-6), true_norm, *inputs)


def test_modules_in_pickles_of_older_versions():
    assert pickle.loads(b"cquackish.ops.rms_norm\nRMSNorm\n.") is RMSNorm
    assert pickle.loads(b"cquackish.ops.linear_cross_entropy.api\nLinearCrossEntropyLoss\n.") is LinearCrossEntropyLoss


def test_gradients_of_two_leaves_accumulate():
    """With several normalized dimensions: autograd adds to gradients in place, which must not share memory."""
    norm = RMSNorm((4, 8))
    x, residual = (torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2))
    y, _ = norm(x, residual)
    once = torch.autograd.grad(y.sum(), (x, residual))
    for _ in range(3):
        y, _ = norm(x, residual)
        y.sum().backward()
    for t, grad in zip((x, residual), once, strict=True):
        torch.testing.assert_close(t.grad, 3 * grad)
