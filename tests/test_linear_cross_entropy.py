"""Linear cross entropy: the spec, the public call by whatever path the device has, the portable operators, the module.

On CPU that is the portable path. On a Hopper GPU 16-bit inputs are the kernels' and others the portable path's.
"""

import inspect
import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from lce_cases import (
    IGNORED,
    OPTIONS,
    REDUCTIONS,
    SCHEDULES,
    make,
    norm_error,
    parameters,
    run,
    truth,
    unit_roundoff,
)
from torch.autograd.profiler import profile
from wrapper_tensor import Wrapper

from quackish import errors
from quackish.configs.linear_cross_entropy import (
    CHUNK_BYTES,
    LinearCrossEntropyProblem,
    bytes_per_logit,
    linear_cross_entropy_config,
)
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.ops.linear_cross_entropy import LinearCrossEntropyLoss, linear_cross_entropy
from quackish.ops.linear_cross_entropy.portable import _loop_op

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LOSS = {"cpu": 1e-6, "cuda": 5e-6}  # relative; the kernels' tanh is within 2^-21 of softcap


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """The warning about the portable path has its own tests; here it counts as given."""
    monkeypatch.setattr(errors, "warn_once", lambda *a, **k: None)
    monkeypatch.setattr("quackish.ops.linear_cross_entropy.portable.warn_once", lambda *a, **k: None)


@pytest.fixture
def poisoned():
    """torch.empty hands out NaN, so what is returned without having been written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def composed(x, w, target, linear_bias=None, softcap=None, z_loss=0.0, reduction="mean", return_lse=False, **kw):
    """What a user writes without quackish: F.cross_entropy of F.linear, softcap and z_loss around it."""
    logits = F.linear(x, w, linear_bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, target, reduction=reduction, **kw)
    lse = torch.logsumexp(logits, -1)
    live = target != IGNORED
    if z_loss:
        z = (z_loss * lse.square()).masked_fill(~live, 0.0)
        count = (
            live.sum() if kw.get("weight") is None else kw["weight"][target.clamp(min=0)].masked_fill(~live, 0).sum()
        )
        loss = loss + {"none": z, "sum": z.sum(), "mean": z.sum() / count}[reduction]
    return (loss, lse.masked_fill(~live, 0.0)) if return_lse else loss


# --- the spec ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_spec_equals_what_autograd_makes_of_pytorch(name, reduction):
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction)
    shape = target.shape if reduction == "none" else ()
    grad, grad_lse = torch.randn(shape, dtype=torch.float64), torch.randn(target.shape, dtype=torch.float64)
    want = run(x, w, target, kw, grad, grad_lse, f=composed)
    got = truth(x, w, target, kw, grad, grad_lse)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


# --- against truth ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_fp64_equals_truth(name, reduction, device, poisoned):
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction, device=device)
    shape = target.shape if reduction == "none" else ()
    grad = torch.randn(shape, dtype=torch.float64, device=device)
    grad_lse = torch.randn(target.shape, dtype=torch.float64, device=device)
    for schedule in SCHEDULES:
        for chunk_size in (1, 5, 13, None):
            for g_lse in (None, grad_lse):
                got = run(x, w, target, kw, grad, g_lse, schedule=schedule, chunk_size=chunk_size)
                torch.testing.assert_close(got, truth(x, w, target, kw, grad, g_lse), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["plain", "unsmoothed", "all"])
def test_error_is_the_dtypes_own_and_below_pytorchs(name, dtype, device, poisoned):
    x, w, target, kw = make(m=300, h=96, v=257, dtype=dtype, device=device, **OPTIONS[name])
    w = (w.detach() * 0.2).requires_grad_()
    kw = {k: t.float() if k == "weight" else t for k, t in kw.items()}
    plain_kw = {k: t.to(dtype) if k == "weight" else t for k, t in kw.items()}
    loss, lse, grads = run(x, w, target, kw, chunk_size=128)
    true_loss, true_lse, true_grads = truth(x, w, target, kw)
    _, _, their_grads = run(x, w, target, plain_kw, f=composed)
    assert loss.dtype == lse.dtype == torch.float32
    assert norm_error(loss, true_loss) < LOSS[device]
    assert norm_error(lse, true_lse) < LOSS[device]
    # Our roundings: the result's; on CUDA that of the 16-bit dlogits, and of the rows that they multiply where a factor
    # was taken out of them; fp32 sums are what fp32 GEMMs make of them.
    roundings = {"cpu": 1, "cuda": 3}[device] if dtype != torch.float32 else 30
    for got, want, theirs in zip(grads, true_grads, their_grads, strict=True):
        assert got.dtype == dtype
        assert norm_error(got, want) <= roundings * unit_roundoff(dtype)
        assert norm_error(got, want) <= (4 if dtype == torch.float32 else 1) * norm_error(theirs, want)
        assert (got.double() - want).abs().max() <= roundings * 2 * unit_roundoff(dtype) * want.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_confident_rows_keep_their_gradient(p, dtype, device):
    # linear_weight is the identity, so input holds the logits and dinput is dlogits, element by element.
    v = 64
    logits = torch.zeros(v, v).fill_diagonal_(torch.tensor(p / (1 - p) * (v - 1)).log().item())
    x = logits.to(device, dtype).requires_grad_()
    w = torch.eye(v, dtype=dtype, device=device).requires_grad_()
    target = torch.arange(v, device=device)
    _, _, (dx, _) = run(x, w, target, {"reduction": "sum"})
    want = truth(x, w, target, {"reduction": "sum"})[2][0]
    # The softmax's few fp32 roundings beside 1 (of lse, on kernels), then dlogits' and dinput's own, relative
    # to each element; below fp16's normal numbers the spacing takes over.
    bound = {"cpu": 8, "cuda": 64}[device] * unit_roundoff(torch.float32) / (1 - p) + (
        2 * unit_roundoff(dtype) if dtype != torch.float32 else 0
    )
    spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((dx.double() - want).abs() <= bound * want.abs() + spacing).all()


def hard_rows():
    v, h = 40, 40
    base = torch.randn(6, h, generator=torch.Generator().manual_seed(3))
    late = base[0].clone()
    late[-1] = 30.0  # the maximum is the last column
    above = base[1].clone()
    above[7] = 500.0  # one logit hundreds above the rest
    below = base[2].clone()
    below[5] = -500.0  # and one below, which is the target
    big = torch.where(torch.arange(h) % 2 == 0, 1e4, -1e4)
    shifted = base[3] + 1e4  # a large mean
    equal = torch.full((h,), -1e4)
    return torch.stack([late, above, below, big, shifted, equal]), torch.eye(v, h), torch.tensor([39, 3, 5, 1, 2, 9])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_hard_rows(dtype, device, softcap):
    x, w, target = hard_rows()
    x, w, target = x.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_(), target.to(device)
    kw = dict(reduction="none", softcap=softcap)
    loss, lse, grads = run(x, w, target, kw)
    true_loss, true_lse, true_grads = truth(x, w, target, kw)
    close = 2e-6 if device == "cpu" else 2e-6 + (softcap or 0.0) * 2**-20
    torch.testing.assert_close(loss.double(), true_loss, rtol=2e-6, atol=close)
    torch.testing.assert_close(lse.double(), true_lse, rtol=2e-6, atol=close)
    for got, want in zip(grads, true_grads, strict=True):
        assert got.isfinite().all()
        assert norm_error(got, want) <= max({"cpu": 2, "cuda": 3}[device] * unit_roundoff(dtype), 1e-5)


def test_a_masked_class_costs_nothing():
    x, w, target, kw = make(dtype=torch.float32, bias=True)
    target[target == 10] = 0
    with torch.no_grad():
        kw["linear_bias"][10] = float("-inf")
    loss, _, grads = run(x, w, target, kw)
    want = F.cross_entropy(F.linear(x[:, :], w[:10], kw["linear_bias"][:10]), target)
    torch.testing.assert_close(loss, want.detach())
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][10] == 0).all()


# --- gradcheck ---


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["plain", "weighted_smoothing", "all"])
def test_gradcheck(name, reduction, schedule):
    x, w, target, kw = make(m=5, h=3, v=4, **OPTIONS[name], reduction=reduction)
    bias = kw.pop("linear_bias", None)

    def f(x, w, *b):
        bias = b[0] if b else None
        return linear_cross_entropy(
            x, w, target, linear_bias=bias, return_lse=True, schedule=schedule, chunk_size=2, **kw
        )

    assert torch.autograd.gradcheck(f, [x, w] + ([bias] if bias is not None else []))


# --- PyTorch's own ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["plain", "bias", "weight", "smoothing", "weighted_smoothing"])
def test_equals_pytorchs_linear_cross_entropy(name, reduction):
    theirs = getattr(F, "linear_cross_entropy", None)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction)
    ours = linear_cross_entropy(x, w, target, **kw)
    torch.testing.assert_close(ours, theirs(x, w, target, **kw))
    names = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(linear_cross_entropy).parameters)[: len(names) - 1] == names[:-1]  # but options


def test_one_row_without_batch():
    x, w, _, _ = make(m=1)
    target = torch.tensor(3)
    for reduction in REDUCTIONS:
        ours = linear_cross_entropy(x[0], w, target, reduction=reduction)
        torch.testing.assert_close(ours, F.cross_entropy(F.linear(x[0], w), target, reduction=reduction))
        assert ours.shape == ()


# --- semantics, row by row ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_items", [None, 7, 0])
@pytest.mark.parametrize("m", [0, 6])
def test_every_target_ignored(m, num_items, schedule, device, poisoned):
    x, w, target, kw = make(m=m, dtype=torch.float32, device=device, **OPTIONS["all"])
    target.fill_(IGNORED)
    loss, lse, grads = run(x, w, target, kw, schedule=schedule, num_items=num_items)
    assert loss == 0
    assert (lse == 0).all()
    assert [g.count_nonzero() for g in grads] == [0, 0, 0]
    assert [g.shape for g in grads] == [x.shape, w.shape, (11,)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_nan_in_an_ignored_row_changes_nothing(name, schedule, poison, device):
    x, w, target, kw = make(dtype=torch.float32, device=device, **OPTIONS[name])
    for reduction in REDUCTIONS:
        clean = run(x, w, target, kw, reduction=reduction, schedule=schedule, chunk_size=5)
        bad = x.detach().clone()
        bad[target == IGNORED] = poison
        poisoned = run(bad.requires_grad_(), w, target, kw, reduction=reduction, schedule=schedule, chunk_size=5)
        torch.testing.assert_close(poisoned, clean, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nan_in_a_live_row_is_seen(schedule, device):
    x, w, target, kw = make(dtype=torch.float32, device=device, bias=True)
    with torch.no_grad():
        x[2, 3] = float("nan")
    rows, _, _ = run(x, w, target, kw, reduction="none", schedule=schedule)
    loss, _, (dx, dw, db) = run(x, w, target, kw, schedule=schedule)
    others = torch.arange(13, device=device) != 2
    assert loss.isnan()
    assert rows[2].isnan()
    assert rows[others].isfinite().all()
    assert dx[2].isnan().all()
    assert dx[others].isfinite().all()
    assert dw.isnan().all()
    assert db.isnan().all()


@pytest.mark.parametrize("bad", [11, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_target_that_is_no_class_raises_on_cpu(bad, dtype):
    x, w, target, _ = make()
    target = target.to(dtype)
    target[4] = bad
    with pytest.raises(IndexError, match=rf"target 4 of 13 is {bad}, expected 0 <= target < 11 or ignore_index -100"):
        linear_cross_entropy(x, w, target)


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [11, -1, 2**40])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_target_that_is_no_class_is_nan_on_cuda(name, dtype, schedule, bad):
    x, w, target, kw = make(dtype=dtype, device="cuda", **OPTIONS[name])
    ignored, wrong = target.clone(), target.clone()
    ignored[4], wrong[4] = IGNORED, bad
    others = torch.arange(13, device="cuda") != 4
    for reduction in REDUCTIONS:
        loss, _, (dx, dw, *_) = run(x, w, wrong, kw, schedule=schedule, reduction=reduction)
        _, _, (want, *_) = run(x, w, ignored, kw, schedule=schedule, reduction=reduction)
        assert (loss if reduction != "none" else loss[4]).isnan()
        assert dx[4].isnan().all()
        assert dw.isnan().all()
        assert torch.equal(dx[others], want[others])


def test_the_spec_has_nan_for_a_target_that_is_no_class():
    # On CPU the public call raises before; the spec is where this row of the table can be seen without a GPU.
    x, w, target, kw = make(**OPTIONS["all"])
    ignored, wrong = target.clone(), target.clone()
    ignored[4], wrong[4] = IGNORED, 99
    loss, _, (dx, dw, _) = truth(x, w, wrong, kw)
    others = torch.arange(13) != 4
    assert loss.isnan()
    assert dx[4].isnan().all()
    assert dw.isnan().all()
    assert torch.equal(dx[others], truth(x, w, ignored, kw)[2][0][others])


def test_mean_over_classes_of_weight_zero_is_nan_as_in_pytorch():
    x, w, target, _ = make()
    weight = torch.zeros(11, dtype=torch.float64)
    assert linear_cross_entropy(x, w, target, weight=weight).isnan()
    assert F.cross_entropy(F.linear(x, w), target, weight=weight).isnan()


@pytest.mark.parametrize("num_items", [29, torch.tensor(29), torch.tensor(29.0, dtype=torch.float64)])
def test_num_items_replaces_the_divisor(num_items):
    x, w, target, kw = make(dtype=torch.float32, **OPTIONS["all"])
    total, _, sum_grads = run(x, w, target, kw, reduction="sum")
    loss, _, grads = run(x, w, target, kw, num_items=num_items)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, total / 29)
    torch.testing.assert_close(grads, tuple(g / 29 for g in sum_grads))


def test_ignore_index_may_be_a_class_and_none_is_pytorchs_default():
    x, w, target, _ = make()
    target = target.clamp(min=0)
    torch.testing.assert_close(
        linear_cross_entropy(x, w, target, ignore_index=3), F.cross_entropy(F.linear(x, w), target, ignore_index=3)
    )
    target[0] = IGNORED
    assert torch.equal(linear_cross_entropy(x, w, target, ignore_index=None), linear_cross_entropy(x, w, target))


# --- shapes, strides, dtypes ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("m, h, v", [(0, 8, 11), (1, 8, 11), (1, 1, 1), (5, 8, 1), (5, 8, 2), (5, 1, 11), (129, 3, 7)])
def test_small_and_odd_shapes(m, h, v, dtype, device, poisoned):
    x, w, target, kw = make(m=m, h=h, v=v, dtype=dtype, device=device, **OPTIONS["all"])
    for schedule in SCHEDULES:
        loss, lse, grads = run(x, w, target, kw, schedule=schedule, chunk_size=64)
        true_loss, true_lse, true_grads = truth(x, w, target, kw)
        tight = dict(rtol=1e-5, atol=1e-5) if dtype == torch.bfloat16 else dict(rtol=1e-11, atol=1e-12)
        torch.testing.assert_close((loss.double(), lse.double()), (true_loss, true_lse), **tight)
        for got, want in zip(grads, true_grads, strict=True):
            # V = 1: the gradient is what is left of p - 1 = 0
            close = dict(rtol=0.03, atol=0.01) if dtype == torch.bfloat16 else tight
            torch.testing.assert_close(got.double(), want, **close)


def strided(t, how):
    """The same values, laid out otherwise."""
    if how == "transposed":
        return t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(2)[::2]
    out = t.new_full([2 * n + 1 for n in t.shape], -1)
    view = out[tuple(slice(1, None, 2) for _ in t.shape)]
    return view.copy_(t)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["transposed", "sparse"])
def test_any_strides(how, device):
    x, w, target, kw = make(dtype=torch.float32, device=device, **OPTIONS["all"])
    want = run(x, w, target, kw, chunk_size=5)
    kw = {
        k: strided(t.detach(), how).requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for k, t in kw.items()
    }
    xs, ws = (strided(t.detach(), how).requires_grad_() for t in (x, w))
    got = run(xs, ws, strided(target, how), kw, chunk_size=5)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_leading_dimensions_and_an_expanded_grad_output():
    x, w, target, kw = make(m=12, **OPTIONS["all"], reduction="none")
    loss, lse, (dx, dw, db) = run(x, w, target, kw)
    x3 = x.detach().reshape(2, 3, 2, 8).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    target3 = target.reshape(2, 3, 2)
    loss3, lse3 = linear_cross_entropy(x3, w, target3, return_lse=True, **kw)
    assert loss3.shape == lse3.shape == target3.shape
    torch.testing.assert_close((loss3.flatten(), lse3.flatten()), (loss, lse))
    grads = torch.autograd.grad(loss3.sum(), (x3, w, kw["linear_bias"]))  # sum's gradient has strides of 0
    torch.testing.assert_close((grads[0].reshape(12, 8), *grads[1:]), (dx, dw, db))


def test_int32_targets_give_the_same_bits():
    x, w, target, kw = make(dtype=torch.float32, **OPTIONS["all"])
    torch.testing.assert_close(run(x, w, target.int(), kw), run(x, w, target, kw), rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast(schedule, dtype, device):
    x, w, target, kw = make(m=40, h=32, dtype=torch.float32, device=device, **OPTIONS["all"])
    with torch.autocast(device, dtype=dtype):
        loss, _, grads = run(x, w, target, kw, schedule=schedule, chunk_size=16)
    rounded = [t.detach().to(dtype) for t in (x, w)]
    true_loss, _, true_grads = truth(*rounded, target, kw)
    assert loss.dtype == torch.float32
    assert norm_error(loss, true_loss) < LOSS[device]  # the operands are rounded to autocast's dtype, and nothing else
    for got, want in zip(grads, true_grads, strict=True):
        assert got.dtype == torch.float32
        assert norm_error(got, want) < (1e-6 if device == "cpu" else unit_roundoff(dtype))
    with torch.autocast(device, dtype=dtype):  # mixed dtypes are autocast's business, fp64 is not
        linear_cross_entropy(x.to(dtype), w, target)
        assert linear_cross_entropy(x.double(), w.double(), target).dtype == torch.float64


# --- autograd ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_lse", [False, True])
def test_two_backwards_give_the_same_bits_and_write_nothing(with_lse, schedule, reduction, device):
    x, w, target, kw = make(dtype=torch.float32, device=device, **OPTIONS["all"], reduction=reduction)
    inputs = [*parameters(x, w, kw), target, kw["weight"]]
    loss, lse = linear_cross_entropy(x, w, target, return_lse=True, schedule=schedule, chunk_size=5, **kw)
    outputs = [loss, lse] if with_lse else [loss]
    grad_outputs = [torch.rand_like(o) for o in outputs]
    before = [t.detach().clone() for t in inputs + grad_outputs]
    first, second = (
        torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs, retain_graph=True) for _ in range(2)
    )
    held = [t.clone() for t in first]
    for g in second:  # a user may write what a backward returned
        g.zero_()
    third = torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs)
    torch.testing.assert_close(list(third), held, rtol=0, atol=0)
    torch.testing.assert_close([t.detach() for t in inputs + grad_outputs], before, rtol=0, atol=0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_schedules_and_grad_mode_give_the_same_bits(reduction, dtype, device):
    x, w, target, kw = make(m=300, h=64, v=130, dtype=dtype, device=device, **OPTIONS["all"], reduction=reduction)
    results = [run(x, w, target, kw, schedule=schedule, chunk_size=128) for schedule in SCHEDULES]
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=0, atol=0)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, w, target, chunk_size=128, **kw), results[0][0])


def gemms(f):
    """How many matrix products f runs."""
    with profile() as prof:
        f()
    return sum(e.name in ("aten::mm", "aten::addmm") for e in prof.function_events)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for_are_computed(reduction, schedule):
    all_wanted, chunks = None, 3
    for bits in reversed(range(8)):
        x, w, target, kw = make(dtype=torch.float32, bias=True, reduction=reduction)
        tensors = [x, w, kw["linear_bias"]]
        wants = [bool(bits >> i & 1) for i in range(3)]
        for t, want in zip(tensors, wants, strict=True):
            t.requires_grad_(want)

        losses = []
        forward = gemms(
            lambda: losses.append(linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=5, **kw))  # noqa: B023
        )
        loss = losses[0]
        assert loss.requires_grad == any(wants)
        if not any(wants):
            assert forward == chunks
            continue
        backward = gemms(lambda: loss.sum().backward())  # noqa: B023
        again = 0 if schedule == "stored" or (schedule == "chunked" and reduction == "mean") else chunks
        assert forward + backward == chunks + again + chunks * (wants[0] + wants[1])
        grads = [t.grad for t in tensors]
        assert [g is not None for g in grads] == wants
        all_wanted = all_wanted or grads
        for got, want in zip(grads, all_wanted, strict=True):
            assert got is None or torch.equal(got, want)


def test_without_grad_nothing_is_kept_or_computed():
    x, w, target, _ = make(dtype=torch.float32)
    with torch.no_grad():
        assert gemms(lambda: linear_cross_entropy(x, w, target, schedule="chunked")) == 1
        assert not linear_cross_entropy(x, w, target).requires_grad


def test_no_gradient_flows_to_class_weights():
    x, w, target, kw = make(class_weight=True)
    weight = kw["weight"].requires_grad_()
    linear_cross_entropy(x, w, target, weight=weight).backward()
    assert weight.grad is None


def test_double_backward_says_no():
    for schedule in SCHEDULES:
        x, w, target, _ = make()
        loss = linear_cross_entropy(x, w, target, schedule=schedule)
        with pytest.raises(RuntimeError, match="linear_cross_entropy: create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_grad_weight_out(reduction, buffer_dtype, dtype, device):
    if dtype == torch.float32 and buffer_dtype != dtype:
        pytest.skip("a buffer narrower than the weight is a TypeError")
    x, w, target, kw = make(dtype=dtype, device=device, reduction=reduction, **OPTIONS["all"])
    buffer = torch.ones(w.shape, dtype=buffer_dtype, device=device)
    want = truth(x, w, target, kw)[2][1]
    for schedule in SCHEDULES:
        x.grad, w.grad = None, None
        buffer.fill_(1.0)
        graphs = [
            linear_cross_entropy(x, w, target, grad_weight_out=buffer, schedule=schedule, chunk_size=5, **kw).sum()
            for _ in range(2)  # two graphs over one buffer: micro-batches
        ]
        assert (buffer == 1).all()  # forward adds nothing
        graphs[0].backward(torch.tensor(0.5, device=device), retain_graph=True)
        graphs[0].backward(torch.tensor(2.0, device=device))
        graphs[1].backward(torch.tensor(0.25, device=device))
        assert w.grad is None
        assert x.grad is not None
        bound = 4 * unit_roundoff(buffer_dtype) + 2 * unit_roundoff(dtype) if device == "cuda" else None
        bound = bound or max(3 * unit_roundoff(buffer_dtype), 1e-6)  # fp32 reaches the buffer: it alone rounds
        assert norm_error(buffer, 1 + 2.75 * want) <= bound


def test_grad_weight_out_is_left_alone_where_the_weight_wants_no_gradient():
    x, w, target, _ = make()
    buffer = torch.ones_like(w)
    linear_cross_entropy(x, w.detach(), target, grad_weight_out=buffer).backward()
    assert (buffer == 1).all()


# --- operators and torch.compile ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_opcheck(needs, schedule, device):
    for reduction in ("sum", "none"):
        x, w, target, kw = make(dtype=torch.float32, device=device, bias=True, class_weight=True)
        bias, weight = kw["linear_bias"], kw["weight"]
        for t, need in zip((x, w, bias), needs, strict=True):
            t.requires_grad_(need)
        options = IGNORED, 0.1, 3.0, 1e-3, 5, torch.float32
        now, keep = needs if schedule == "chunked" else [False] * 3, schedule == "stored"
        nothing = [None] * 4
        args = x, w, target, bias, weight, *nothing, *options, now, keep, reduction == "sum", ""
        torch.library.opcheck(_loop_op, args)
        tensors = (x.detach(), w.detach(), target, bias.detach(), weight, None)
        logits = torch.randn(13, 11, device=device) if keep else None
        grad = torch.rand(13, device=device)
        torch.library.opcheck(_loop_op, (*tensors, grad, grad, logits, *options, needs, False, False, ""))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager_for_many_m_with_two_graphs(return_lse, with_buffer, device):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    head = LinearCrossEntropyLoss(8, 11, bias=True, z_loss=1e-3, softcap=5.0, chunk_size=16, device=device)
    w, bias = head.linear.weight, head.linear.bias

    def step(x, target, n, buffer):
        out = head(x * 2, target, num_items=n, grad_weight_out=buffer, return_lse=return_lse)
        return out if return_lse else (out,)

    compiled = torch.compile(step, fullgraph=True, backend=frames)
    for m in (7, 40, 64, 3, 33, 16):
        x, _, target, _ = make(m=m, dtype=torch.float32, device=device)
        n = torch.tensor(m, device=device)
        results = []
        for f in (step, compiled):
            buffer = torch.zeros_like(w) if with_buffer else None
            outputs = f(x, target, n, buffer)
            dx, dw, db = torch.autograd.grad(outputs[0], [x, w, bias], allow_unused=True)
            assert (dw is None) == with_buffer
            results.append([o.detach() for o in outputs] + [dx, buffer if with_buffer else dw, db])
        # compiled code hands a returned lse a gradient of zeros, so it sums in another order than eager's None
        close = dict(rtol=1e-5, atol=1e-7) if return_lse else dict(rtol=0, atol=0)
        torch.testing.assert_close(results[1], results[0], **close)
    assert frames.frame_count <= 2  # the first M, then any M


def test_compiled_under_autocast_and_reduction_none():
    torch._dynamo.reset()
    x, w, target, _ = make(dtype=torch.float32)

    def step(x, w, target):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return linear_cross_entropy(x, w, target, reduction="none", label_smoothing=0.1)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w, target), step(x, w, target)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), w)[0] for loss in (got, want)))


def test_activation_checkpointing():
    x, w, target, kw = make(dtype=torch.float32, bias=True)
    _, _, want = run(x, w, target, kw)
    loss = torch.utils.checkpoint.checkpoint(lambda x: linear_cross_entropy(x, w, target, **kw), x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(loss, parameters(x, w, kw)), want, rtol=0, atol=0)


# --- errors ---


def wrong(**change):
    x, w, target, kw = make(dtype=torch.float32)
    args = {"input": x, "linear_weight": w, "target": target, **kw}
    args.update(change)
    return linear_cross_entropy(**args)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.zeros(13, 7)}, ValueError, r"input has shape \(13, 7\), expected \(..., 8\)"),
        ({"input": torch.tensor(1.0)}, ValueError, r"input has shape \(\), expected \(..., 8\)"),
        ({"linear_weight": torch.zeros(8)}, ValueError, r"linear_weight has shape \(8,\), expected \(V, H\)"),
        ({"linear_weight": torch.zeros(0, 8)}, ValueError, r"linear_weight has shape \(0, 8\), expected \(V, H\)"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, ValueError, r"target has shape \(12,\), expected \(13,\)"),
        ({"linear_bias": torch.zeros(8)}, ValueError, r"linear_bias has shape \(8,\), expected \(11,\)"),
        ({"weight": torch.zeros(1)}, ValueError, r"weight has shape \(1,\), expected \(11,\)"),
        (
            {"grad_weight_out": torch.zeros(8, 11)},
            ValueError,
            r"grad_weight_out has shape \(8, 11\), expected \(11, 8\)",
        ),
        ({"weight": torch.zeros(11, device="meta")}, ValueError, "weight is on meta, expected cpu, where input is"),
        ({"target": torch.rand(13)}, TypeError, "target is torch.float32, expected class indices, int32 or int64"),
        ({"target": torch.zeros(13, dtype=torch.uint8)}, TypeError, "target is torch.uint8, expected int32 or int64"),
        ({"input": torch.zeros(13, 8).half()}, TypeError, "linear_weight is torch.float32, expected torch.float16"),
        ({"input": torch.zeros(13, 8).int()}, TypeError, "input is torch.int32, expected bfloat16"),
        ({"linear_bias": torch.zeros(11).half()}, TypeError, "linear_bias is torch.float16, expected torch.float32"),
        ({"weight": torch.ones(11).int()}, TypeError, "weight is torch.int32, expected a floating dtype"),
        ({"grad_weight_out": torch.zeros(11, 8).half()}, TypeError, "grad_weight_out is torch.float16, expected"),
        ({"grad_weight_out": torch.zeros(11, 8).requires_grad_()}, ValueError, "grad_weight_out requires grad"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg', expected one of none, mean, sum"),
        ({"schedule": "fast"}, ValueError, "schedule is 'fast', expected one of auto, stored, chunked, recompute"),
        ({"backend": "triton"}, ValueError, "backend is 'triton', expected one of auto, cute, reference"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5, expected 0 <= label_smoothing <= 1"),
        ({"softcap": 0.0}, ValueError, "softcap is 0.0, expected None or a positive number"),
        ({"softcap": math.nan}, ValueError, "softcap is nan, expected None or a positive number"),
        ({"softcap": 1e-50}, ValueError, "softcap is 1e-50, expected None or a positive number"),
        ({"softcap": True}, TypeError, "softcap is True, a bool; expected a float or None"),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1.0, expected a finite number that is not negative"),
        ({"z_loss": math.inf}, ValueError, "z_loss is inf, expected a finite number that is not negative"),
        ({"z_loss": "1"}, TypeError, "z_loss is '1', a str; expected a float"),
        ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected None or at least 1 row"),
        ({"chunk_size": 128.0}, TypeError, "chunk_size is 128.0, a float; expected an int or None"),
        ({"ignore_index": -100.0}, TypeError, "ignore_index is -100.0, a float; expected an int or None"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index is 9223372036854775808, expected a 64-bit integer"),
        ({"return_lse": 1}, TypeError, "return_lse is 1, a int; expected True or False"),
        ({"num_items": -1}, ValueError, "num_items is -1, expected at least 0"),
        ({"num_items": 2.0}, TypeError, "num_items is 2.0, a float; expected an int or a 0-dim tensor"),
        ({"num_items": True}, TypeError, "num_items is True, a bool; expected an int or a 0-dim tensor"),
        ({"num_items": torch.tensor(3.0, requires_grad=True)}, ValueError, "num_items requires grad, but no gradient"),
        ({"input": [[1.0]]}, TypeError, "input is a list, expected a torch.Tensor"),
        ({"target": None}, TypeError, "target is a NoneType, expected a torch.Tensor"),
        ({"weight": [1.0] * 11}, TypeError, "weight is a list, expected a torch.Tensor or None"),
        ({"num_items": torch.ones(1)}, ValueError, r"num_items has shape \(1,\), expected a 0-dim tensor"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items replaces .* reduction is "sum"'),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: {message}"):
        wrong(**change)


def test_a_buffer_that_is_the_weight_is_refused():
    x, w, target, _ = make(dtype=torch.float32)
    flat = torch.zeros(3 * w.numel())
    for of in (w.detach(), x.detach()):
        buffer = of.view(-1)[: w.numel()].view(-1, 8)
        with pytest.raises(ValueError, match="grad_weight_out shares memory with"):
            linear_cross_entropy(x, w, target, grad_weight_out=buffer)
    first, second = (flat[i * w.numel() :][: w.numel()].view(w.shape) for i in (0, 1))
    linear_cross_entropy(x, first, target, grad_weight_out=second)  # one storage, apart


@pytest.mark.parametrize("version", [1, 2])
def test_a_buffer_under_fsdp_is_refused(version, tmp_path):
    """FSDP reduces .grad alone: the buffer would get this rank's whole gradient."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        head = LinearCrossEntropyLoss(8, 11)
        if version == 1:
            head = torch.distributed.fsdp.FullyShardedDataParallel(head, device_id=torch.device("cpu"))
        else:
            torch.distributed.fsdp.fully_shard(head, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        x, _, target, _ = make(dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="linear_weight is a parameter that FSDP shards"):
            head(x, target, grad_weight_out=torch.zeros(11, 8))
        head(x, target).backward()
        assert all(p.grad is not None for p in head.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "first, second",
    [
        (dict(ignore_index=-100.0), dict(ignore_index=-100)),
        (dict(chunk_size=128.0), dict(chunk_size=128)),
        (dict(chunk_size=True), dict(chunk_size=1)),
        (dict(num_items=True), dict(num_items=1)),
        (dict(z_loss=False), dict(z_loss=0)),
    ],
    ids=str,
)
def test_a_refused_argument_decides_nothing_for_one_that_equals_it(first, second):
    for _ in range(2):
        with pytest.raises(TypeError):
            wrong(**first)
        wrong(**second)


@pytest.mark.parametrize("softcap", [math.inf, 1e300])
def test_a_softcap_that_is_infinite_caps_nothing(softcap):
    assert torch.equal(wrong(softcap=softcap), wrong())


def test_meta_tensors_give_meta_tensors():
    x, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((13, 8), (11, 8)))
    target = torch.empty(13, device="meta", dtype=torch.int64)
    loss, lse = linear_cross_entropy(x, w, target, return_lse=True)
    loss.backward()
    assert (loss.device.type, lse.shape, x.grad.shape, w.grad.shape) == ("meta", (13,), (13, 8), (11, 8))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ignore_index", [2**32, 2**32 - 1, -(2**33)])
def test_int32_targets_and_an_ignore_index_that_int32_cannot_hold(ignore_index, device):
    x, w, target, _ = make(device=device)
    target = target.clamp(min=0)
    target[3] = 0
    want = linear_cross_entropy(x, w, target, reduction="none")
    got = linear_cross_entropy(x, w, target.int(), reduction="none", ignore_index=ignore_index)
    assert torch.equal(got, want)
    assert (got != 0).all()


# --- torch.func, forward-mode AD, subclasses ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_torch_func_and_forward_mode_ad(name, reduction, device):
    x, w, target, kw = make(device=device, **OPTIONS[name], reduction=reduction)
    leaves = parameters(x, w, kw)

    def function(*leaves, f=linear_cross_entropy):
        bias = dict(linear_bias=leaves[2]) if len(leaves) == 3 else {}
        return f(*leaves[:2], target, **kw | bias, return_lse=True)

    plain = [t.detach() for t in leaves]
    tangents = [torch.randn_like(t) for t in plain]
    (loss, lse), (dloss, dlse) = torch.func.jvp(function, tuple(plain), tuple(tangents))
    want_loss, want_lse = function(*leaves)
    torch.testing.assert_close((loss, lse), (want_loss.detach(), want_lse.detach()))
    _, want = torch.func.jvp(lambda *leaves: function(*leaves, f=composed), tuple(plain), tuple(tangents))
    torch.testing.assert_close((dloss, dlse), want)
    assert dloss.abs().sum() > 0

    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(t, d) for t, d in zip(plain, tangents, strict=True)]
        got = [torch.autograd.forward_ad.unpack_dual(t).tangent for t in function(*duals)]
    torch.testing.assert_close(got, list(want))

    grads = torch.func.grad(lambda *leaves: function(*leaves)[0].sum(), argnums=tuple(range(len(plain))))(*plain)
    torch.testing.assert_close(grads, torch.autograd.grad(want_loss.sum(), leaves))


def test_torch_func_vmap_and_what_it_cannot_do():
    x, w, target, _ = make(dtype=torch.float32)
    bad = torch.full_like(target, 99)
    batch = torch.stack([x, 2 * x]).detach()
    got = torch.func.vmap(lambda x: linear_cross_entropy(x, w, target))(batch)
    torch.testing.assert_close(got, torch.stack([linear_cross_entropy(x, w, target) for x in batch]))
    with pytest.raises(UnsupportedError, match=r"torch\.func .* expected no grad_weight_out"):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, target, grad_weight_out=torch.zeros_like(w)))(x)
    with pytest.raises(IndexError, match="target 0 of 13 is 99"):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, bad))(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["input", "linear_weight", "target"])
def test_a_wrapper_subclass_decides_what_an_operator_does(which, dtype, device):
    """It has no memory: a kernel would be given a null pointer."""
    x, w, target, _ = make(h=64, v=130, dtype=dtype, device=device)
    args = dict(input=x.detach(), linear_weight=w.detach(), target=target)
    want = linear_cross_entropy(**args)
    args[which] = wrapped = Wrapper(args[which])
    assert torch.equal(linear_cross_entropy(**args), want)
    assert wrapped.seen


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["input", "linear_weight", "target"])
def test_a_tensor_whose_memory_was_freed_reaches_no_kernel(name):
    x, w, target, _ = make(h=64, v=130, dtype=torch.bfloat16, device="cuda")
    args = dict(input=x.detach(), linear_weight=w.detach(), target=target)
    args[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"linear_cross_entropy: {name} has shape .* but no memory"):
        linear_cross_entropy(**args)
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "name, right, other",
    [
        ("target", torch.zeros(13, dtype=torch.int64), torch.uint8),
        ("linear_weight", torch.zeros(11, 8), torch.float16),
        ("linear_bias", torch.zeros(11), torch.float16),
        ("weight", torch.ones(11), torch.int32),
        ("grad_weight_out", torch.zeros(11, 8), torch.float16),
    ],
)
def test_a_plan_serves_only_the_dtypes_it_was_made_for(name, right, other):
    for _ in range(2):
        wrong(**{name: right})  # nothing is wrong with it
        with pytest.raises(TypeError, match=f"linear_cross_entropy: {name} is {other}, expected"):
            wrong(**{name: right.to(other)})


def test_cute_has_no_kernel_and_the_cpu_needs_no_warning(monkeypatch, recwarn):
    with pytest.raises(UnsupportedError, match=r'no kernel for cpu. backend="auto" runs the portable path'):
        wrong(backend="cute")
    monkeypatch.undo()  # the true warn_once
    assert torch.equal(wrong(backend="auto"), wrong(backend="reference"))
    assert not [w for w in recwarn if w.category is PortablePathWarning]


# --- module ---


def test_module_takes_pytorchs_arguments_and_state():
    theirs_class = getattr(torch.nn, "LinearCrossEntropyLoss", None)
    if theirs_class is None:
        pytest.skip(f"torch {torch.__version__} has no nn.LinearCrossEntropyLoss (2.13 has)")
    names = list(inspect.signature(theirs_class).parameters)
    assert set(names) <= set(inspect.signature(LinearCrossEntropyLoss).parameters)
    args = dict(bias=True, weight=torch.rand(11), label_smoothing=0.1, ignore_index=2, reduction="sum", options=None)
    theirs, ours = theirs_class(8, 11, **args), LinearCrossEntropyLoss(8, 11, **args, backend="reference")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, _, target, _ = make(dtype=torch.float32)
    target = target.clamp(min=0)
    torch.testing.assert_close(ours(x, target), theirs(x, target))


def test_module_keeps_its_options():
    x, _, target, _ = make(dtype=torch.float32)
    args = dict(softcap=2.0, z_loss=0.1, label_smoothing=0.2, schedule="recompute", chunk_size=4, reduction="mean")
    head = LinearCrossEntropyLoss(8, 11, **args, ignore_index=0)
    assert list(head.state_dict()) == ["linear.weight"]
    want = linear_cross_entropy(x, head.linear.weight, target.clamp(min=0), ignore_index=0, num_items=9, **args)
    assert torch.equal(head(x, target.clamp(min=0), num_items=9), want)
    assert "softcap=2.0" in repr(head)


@pytest.mark.parametrize(
    "args, error, message",
    [
        (dict(out_features=(3,)), UnsupportedError, r"out_features is \(3,\), expected \(\)"),
        (dict(options=object()), UnsupportedError, "options are torch's own chunking, expected None"),
        (dict(weight=torch.ones(3)), ValueError, r"weight has shape \(3,\), expected \(11,\)"),
        (dict(label_smoothing=2.0), ValueError, "label_smoothing is 2.0"),
    ],
)
def test_module_errors(args, error, message):
    with pytest.raises(error, match=message):
        LinearCrossEntropyLoss(8, 11, **args)


# --- config ---


@pytest.mark.parametrize("v", [2, 256, 32_000, 128_256, 262_144])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("softcap", [False, True])
def test_chunks_fit_the_budget_whatever_m(v, dtype, softcap):
    problem = LinearCrossEntropyProblem(v, dtype, "mean", softcap)
    rows = {linear_cross_entropy_config(problem, m).chunk_rows for m in (0, 1, 4096, 10**6)}
    (rows,) = rows
    assert rows % 128 == 0
    per_row = bytes_per_logit(problem) * v
    assert rows * per_row <= CHUNK_BYTES < (rows + 128) * per_row


def test_config_rule():
    def schedule(reduction, m, return_lse=False, **kw):
        problem = LinearCrossEntropyProblem(128_256, "bfloat16", reduction, return_lse=return_lse)
        return linear_cross_entropy_config(problem, m, **kw).schedule

    limit = CHUNK_BYTES // (4 * 128_256)
    assert [schedule("none", m) for m in (limit, limit + 1)] == ["stored", "recompute"]
    assert [schedule("mean", m, return_lse=True) for m in (limit, limit + 1)] == ["stored", "recompute"]
    assert {schedule(r, m) for r in ("mean", "sum") for m in (1, 10**6)} == {"chunked"}
    assert [schedule("none", 10**6, schedule=s) for s in SCHEDULES] == SCHEDULES
    huge = LinearCrossEntropyProblem(10**8, "float64", "mean")
    assert linear_cross_entropy_config(huge, 1).chunk_rows == 128
    assert linear_cross_entropy_config(huge, 1, chunk_size=3).chunk_rows == 3


# --- CUDA only ---


@pytest.mark.gpu
def test_one_warning_a_reason_on_cuda(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(errors, "_warned", set())
    x, w, target, _ = make(dtype=torch.float32, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for backend in ("reference", "auto", "auto"):
            linear_cross_entropy(x, w, target, backend=backend)
    (only,) = [s for s in seen if s.category is PortablePathWarning]
    assert re.search(r"linear_cross_entropy: no kernel for (sm_\d+ |torch.float32).*portable path", str(only.message))
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: no kernel for (sm_|torch\.float32)"):
        linear_cross_entropy(x, w, target, backend="cute")


def cuda_step(schedule, reduction, dtype=torch.bfloat16, num_items=None, name="all"):
    """A training step over static tensors: (step, tensors it reads, the buffer it adds to)."""
    x, w, target, kw = make(m=300, h=64, v=1000, dtype=dtype, device="cuda", **OPTIONS[name], reduction=reduction)
    kw["num_items"] = num_items
    buffer = torch.zeros(w.shape, device="cuda")
    results = []

    def step():
        loss, lse = linear_cross_entropy(
            x, w, target, return_lse=True, grad_weight_out=buffer, schedule=schedule, chunk_size=128, **kw
        )
        grads = torch.autograd.grad(loss.sum(), [x, w, kw["linear_bias"]], allow_unused=True)
        results[:] = [loss.detach(), lse.detach(), grads[0], grads[2]]
        return results

    return step, (x, w, target), buffer


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "dtype, name", [(torch.bfloat16, "unsmoothed"), (torch.bfloat16, "all"), (torch.float32, "all")]
)
def test_no_host_synchronisation(dtype, name, reduction, schedule):
    items = [None] if reduction != "mean" else [None, 7, torch.tensor(7), torch.tensor(7, device="cuda")]
    for num_items in items:
        step, _, _ = cuda_step(schedule, reduction, dtype, num_items, name)

        def steps(step=step):
            step()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                step()

        steps()  # kernels are compiled and loaded
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            steps()
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["unsmoothed", "all"])
def test_cuda_graph_replays_with_new_data(name, reduction, schedule):
    step, (x, w, target), buffer = cuda_step(schedule, reduction, name=name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = list(step())
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
        w.copy_(torch.randn_like(w))
        target.copy_(torch.randint_like(target, 1000))
        target[::3] = IGNORED
    buffer.zero_()
    graph.replay()
    replayed = [t.clone() for t in static] + [buffer.clone()]
    buffer.zero_()
    eager = [*step(), buffer]
    torch.testing.assert_close(replayed, eager, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_same_bits_with_another_stream_busy(dtype, schedule):
    step, _, buffer = cuda_step(schedule, "mean", dtype)
    noise = torch.randn(1024, 1024, device="cuda")
    other = torch.cuda.Stream()
    first = None
    for _ in range(20):
        buffer.zero_()
        with torch.cuda.stream(other):
            noise = (noise @ noise).clamp(-1, 1)
        got = [t.clone() for t in step()] + [buffer.clone()]
        first = first or got
        torch.testing.assert_close(got, first, rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_peak_memory_of_the_portable_path_is_a_chunk_and_an_accumulator(softcap):
    m, h, v, chunk = 4096, 256, 32_000, 512
    x = torch.randn(m, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(v, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(0, v, (m,), device="cuda")

    def peak(schedule):
        x.grad, w.grad = None, None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(
            x, w, target, softcap=softcap, schedule=schedule, chunk_size=chunk, backend="reference"
        ).backward()
        return torch.cuda.max_memory_allocated() - before

    peak("chunked")  # workspaces of the library
    in_flight = chunk * v * (6 if softcap is None else 10)
    held = v * h * (4 + 2) + m * h * (4 + 2)  # fp32 sums and the gradients returned
    slack = 4 << 20
    assert peak("chunked") <= in_flight + held + slack
    assert peak("recompute") <= in_flight + held + slack
    assert peak("stored") <= in_flight + held + m * v * 4 + slack
