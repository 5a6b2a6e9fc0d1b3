"""Linear cross entropy: reference, public function on every path, portable operators, and module.

test_lce_schedules.py tests the launches and memory of kernels.
"""

import functools
import inspect
import itertools
import math
import re
import types
import warnings

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.autograd.profiler import profile

from quackish import errors
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.ops.linear_cross_entropy import LinearCrossEntropyLoss, api, checks, linear_cross_entropy
from quackish.ops.linear_cross_entropy.autograd import _bwd_op, _fwd_op
from quackish.testing import assert_deterministic
from quackish.testing.errors import same_bits
from tests import buffer_layouts
from tests.cuda_graphs import captured, no_synchronization
from tests.lce_cases import (
    IGNORED,
    OPTIONS,
    PATHS,
    REDUCTIONS,
    SCHEDULES,
    hard_rows,
    make,
    norm_error,
    on_every_path,
    on_portable_and_kernels,
    parameters,
    run,
    truth,
    unit_roundoff,
)
from tests.wrapper_tensor import Wrapper

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def composed(
    x, w, target, linear_bias=None, softcap=None, logit_scale=None, z_loss=0.0, reduction="mean", return_lse=False, **kw
):
    """The same loss in plain PyTorch: F.linear, softcap, logit_scale, F.cross_entropy and z_loss."""
    logits = F.linear(x, w, linear_bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if logit_scale is None else logits * logit_scale
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


# --- reference ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_reference_matches_autograd_of_pytorch(name, reduction):
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction)
    shape = target.shape if reduction == "none" else ()
    grad, grad_lse = torch.randn(shape, dtype=torch.float64), torch.randn(target.shape, dtype=torch.float64)
    want = run(x, w, target, kw, grad, grad_lse, f=composed)
    got = truth(x, w, target, kw, grad, grad_lse)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


# --- against truth ---


@on_every_path
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, reduction, path):
    for dtype in path.dtypes:
        x, w, target, kw = path.case(dtype=dtype, **OPTIONS[name], reduction=reduction)
        of = dict(dtype=torch.promote_types(dtype, FP32), **path.here)
        grad, grad_lse = torch.randn(target.shape if reduction == "none" else (), **of), torch.randn(target.shape, **of)
        for schedule in SCHEDULES:
            path.check(x, w, target, kw, grad, grad_lse, schedule=schedule, chunk_size=path.chunk_size)
            path.check(x, w, target, kw, grad, None, schedule=schedule)


@on_portable_and_kernels
@pytest.mark.parametrize("name", ["plain", "unsmoothed", "all"])
def test_error_is_rounding_error_and_below_pytorchs(name, path):
    on_cpu = path.kernels is None and path.device.type == "cpu"
    for dtype in [BF16, FP16] if path.kernels else [FP32, BF16, FP16] if on_cpu else [FP32]:
        x, w, target, kw = make(m=300, h=96, v=257, dtype=dtype, device=path.device, **OPTIONS[name])
        w = (w.detach() * 0.2).requires_grad_()
        kw = {k: t.float() if k == "weight" else t for k, t in kw.items()}
        plain_kw = {k: t.to(dtype) if k == "weight" else t for k, t in kw.items()}
        loss, lse, grads = path.run(x, w, target, kw, chunk_size=128)
        true_loss, true_lse, true_grads = truth(x, w, target, kw)
        _, _, their_grads = run(x, w, target, plain_kw, f=composed)
        assert loss.dtype == lse.dtype == FP32
        for got, want in (loss, true_loss), (lse, true_lse):
            assert norm_error(got, want) < (1e-6 if on_cpu else 5e-6)
        # Roundings to the dtype: the result; on kernels also 16-bit dlogits and scaled x. In fp32, sums in GEMMs.
        roundings = 30 if dtype == FP32 else 3 if path.kernels else 1
        for got, want, theirs in zip(grads, true_grads, their_grads, strict=True):
            assert got.dtype == dtype
            assert norm_error(got, want) <= roundings * unit_roundoff(dtype)
            assert norm_error(got, want) <= (4 if dtype == FP32 else 1) * norm_error(theirs, want)
            assert (got.double() - want).abs().max() <= roundings * 2 * unit_roundoff(dtype) * want.abs().max()


@on_portable_and_kernels
@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
def test_gradient_of_confident_rows(p, path):
    # linear_weight is the identity, so input is the logits and dinput is dlogits.
    v = 640 if path.kernels else 64
    logits = torch.zeros(v, v).fill_diagonal_(torch.tensor(p / (1 - p) * (v - 1)).log().item())
    target = torch.arange(v, **path.here)
    for dtype, schedule in itertools.product([BF16, FP16] if path.kernels else [FP32, BF16, FP16], SCHEDULES):
        x, w = logits.to(path.device, dtype).requires_grad_(), torch.eye(v, dtype=dtype, **path.here).requires_grad_()
        _, _, (dx, _) = path.run(x, w, target, {"reduction": "sum"}, schedule=schedule)
        want = truth(x, w, target, {"reduction": "sum"})[2][0]
        # fp32 rounding of numbers near 1, then relative roundings of the exponential, the row factor
        # and the result. Subnormal fp16 numbers have an absolute error.
        on_cpu = path.kernels is None and path.device.type == "cpu"
        bound = (8 if on_cpu else 64) * unit_roundoff(FP32) / (1 - p)
        bound += (0 if dtype == FP32 else 2 if on_cpu else 3) * unit_roundoff(dtype)
        spacing = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        assert ((dx.double() - want).abs() <= bound * want.abs() + spacing).all()


@on_every_path
@pytest.mark.parametrize("options", [{}, dict(softcap=30.0), dict(logit_scale=2.0)], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_hard_rows(reduction, schedule, options, path):
    for dtype in [BF16, FP16] if path.kernels else [FP32, BF16, FP16]:
        x, w, target = hard_rows(dtype, path.device)
        path.check(x, w, target, dict(reduction=reduction, **options), schedule=schedule)


@on_portable_and_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_class(smoothing, schedule, path):
    x, w, target, kw = path.case(bias=True, label_smoothing=smoothing)
    target[target == 10] = 0
    with torch.no_grad():
        kw["linear_bias"][10] = float("-inf")
    loss, _, grads = path.run(x, w, target, kw, schedule=schedule)
    if smoothing:
        assert loss == torch.inf  # smoothing makes every class a target
        return
    keep = torch.arange(path.v, **path.here) != 10
    logits = F.linear(x.double(), w[keep].double(), kw["linear_bias"][keep].double())
    want = F.cross_entropy(logits, torch.where(target > 10, target - 1, target)).detach()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][10] == 0).all()


@on_portable_and_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_masked_target_has_infinite_loss_and_finite_gradients(schedule, path):
    x, w, target, kw = path.case(bias=True)
    with torch.no_grad():
        kw["linear_bias"][target[0]] = float("-inf")
    loss, _, grads = path.run(x, w, target, kw, schedule=schedule)
    assert loss == torch.inf
    assert all(g.isfinite().all() for g in grads)


@on_every_path
@pytest.mark.parametrize("options", [{}, dict(label_smoothing=0.1), dict(logit_scale=2.0)], ids=str)
def test_masked_classes_with_weight_zero(options, path):
    x, w, target, kw = path.case(bias=True, class_weight=True, **options)
    with torch.no_grad():
        kw["linear_bias"][10:600] = float("-inf")  # on kernels all classes of a tile
        kw["weight"][10:600] = 0
    target[:3] = 10
    loss, _, grads = path.run(x, w, target, kw)
    want, _, _ = truth(x, w, target, kw)
    assert want.isfinite()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in grads)


# --- PyTorch's own ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["plain", "bias", "weight", "smoothing", "weighted_smoothing"])
def test_matches_pytorchs_linear_cross_entropy(name, reduction):
    theirs = getattr(F, "linear_cross_entropy", None)
    if theirs is None:
        pytest.skip(f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has)")
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction)
    ours = linear_cross_entropy(x, w, target, **kw)
    torch.testing.assert_close(ours, theirs(x, w, target, **kw))
    names = list(inspect.signature(theirs).parameters)
    assert list(inspect.signature(linear_cross_entropy).parameters)[: len(names) - 1] == names[:-1]  # except options


# --- semantics, row by row ---


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_items", [None, 7, 0])
@pytest.mark.parametrize("m", [0, 300])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_every_target_ignored(name, m, num_items, schedule, path):
    x, w, target, kw = path.case(m, **OPTIONS[name])
    target.fill_(IGNORED)
    with torch.no_grad():
        x.fill_(float("nan"))
    loss, lse, grads = path.run(x, w, target, kw, schedule=schedule, num_items=num_items, chunk_size=path.chunk_size)
    assert loss == 0
    assert (lse == 0).all()
    assert lse.shape == (m,)
    assert [g.count_nonzero() for g in grads] == [0, 0, 0]
    assert [g.shape for g in grads] == [x.shape, w.shape, (path.v,)]


@on_every_path
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_nan_in_ignored_row_has_no_effect(name, schedule, poison, path):
    x, w, target, kw = path.case(**OPTIONS[name])
    target[path.m // 3 :] = IGNORED  # the last chunks have no live row
    for reduction in REDUCTIONS:
        options = dict(reduction=reduction, schedule=schedule, chunk_size=path.chunk_size)
        clean = path.run(x, w, target, kw, **options)
        bad = x.detach().clone()
        bad[target == IGNORED] = poison
        assert_same(path.run(bad.requires_grad_(), w, target, kw, **options), clean)
    path.check(x, w, target, kw, schedule=schedule, chunk_size=path.chunk_size)


@on_portable_and_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_nan_in_live_row_propagates(name, schedule, path):
    x, w, target, kw = path.case(**OPTIONS[name])
    with torch.no_grad():
        x[2, 3] = float("nan")
    options = dict(schedule=schedule, chunk_size=path.chunk_size)
    rows, _, _ = path.run(x, w, target, kw, reduction="none", **options)
    loss, _, (dx, dw, db) = path.run(x, w, target, kw, **options)
    others = torch.arange(path.m, **path.here) != 2
    assert loss.isnan()
    assert rows[2].isnan()
    assert rows[others].isfinite().all()
    assert dx[2].isnan().all()
    assert dx[others].isfinite().all()
    assert dw.isnan().all()
    assert db.isnan().all()


@pytest.mark.parametrize("bad", [11, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_invalid_target_raises_on_cpu(bad, dtype):
    x, w, target, _ = make()
    target = target.to(dtype)
    target[4] = bad
    with pytest.raises(IndexError, match=rf"target 4 of 13 is {bad}, expected 0 <= target < 11 or ignore_index -100"):
        linear_cross_entropy(x, w, target)


@on_portable_and_kernels
@pytest.mark.parametrize("bad", [700, -1, 2**40])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_invalid_target_gives_nan(name, schedule, bad, path):
    x, w, target, kw = path.case(**OPTIONS[name])
    ignored, wrong = target.clone(), target.clone()
    ignored[4], wrong[4] = IGNORED, bad
    others = torch.arange(path.m, **path.here) != 4
    # On a CPU the portable path raises IndexError: check the reference instead.
    spec = path.kernels is None and path.device.type == "cpu"
    results = truth if spec else functools.partial(path.run, schedule=schedule)
    for reduction in REDUCTIONS:
        loss, _, (dx, dw, *_) = results(x, w, wrong, kw | {"reduction": reduction})
        _, _, (want, *_) = results(x, w, ignored, kw | {"reduction": reduction})
        assert (loss if reduction != "none" else loss[4]).isnan()
        assert dx[4].isnan().all()
        assert dw.isnan().all()
        assert torch.equal(dx[others], want[others])


@on_portable_and_kernels
def test_mean_with_zero_class_weights_is_nan_as_in_pytorch(path):
    x, w, target, _ = path.case()
    weight = torch.zeros(path.v, dtype=x.dtype, **path.here)
    assert path.call(x, w, target, weight=weight).isnan()
    assert F.cross_entropy(F.linear(x, w), target, weight=weight).isnan()


@on_portable_and_kernels
@pytest.mark.parametrize("num_items", [29, torch.tensor(29), torch.tensor(29.0, dtype=FP64)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_num_items_replaces_the_divisor(schedule, num_items, path):
    x, w, target, kw = path.case(**OPTIONS["weight"], z_loss=0.01)
    path.check(x, w, target, {**kw, "num_items": num_items}, schedule=schedule)


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_logit_scale_may_be_a_tensor(with_grad_lse, schedule, path):
    for dtype in path.dtypes:
        x, w, target, kw = path.case(dtype=dtype)
        grad_lse = torch.ones(target.shape, dtype=torch.promote_types(dtype, FP32), **path.here)
        given = dict(grad_lse=grad_lse if with_grad_lse else None, schedule=schedule)
        want = path.run(x, w, target, kw, **given, logit_scale=0.375)
        for scale in torch.tensor(0.375, dtype=BF16), torch.tensor(0.375, **path.here):
            assert_same(path.run(x, w, target, kw, **given, logit_scale=scale), want)
            path.check(x, w, target, {**kw, "logit_scale": scale}, **given)


@on_portable_and_kernels
def test_ignore_index_may_be_a_class_or_none(path):
    x, w, target, _ = path.case()
    assert_same(path.call(x, w, target, ignore_index=None), path.call(x, w, target))
    path.check(x, w, target.clamp(min=0), dict(ignore_index=0))


@on_portable_and_kernels
@pytest.mark.parametrize("ignore_index", [2**32, 2**32 - 1, -(2**33)])
def test_int32_targets_and_ignore_index_outside_int32(ignore_index, path):
    x, w, target, kw = path.case(**OPTIONS["all"])
    assert_same(path.run(x, w, target.int(), kw), path.run(x, w, target, kw))
    target = target.clamp(min=0)
    target[3] = 0
    want = path.call(x, w, target, reduction="none")
    got = path.call(x, w, target.int(), reduction="none", ignore_index=ignore_index)
    assert torch.equal(got, want)
    assert (got != 0).all()


# --- shapes, strides, dtypes ---


@on_portable_and_kernels
@pytest.mark.parametrize("m", [1, 2, 127, 128, 129, 257])
def test_row_counts(m, path):
    x, w, target, kw = path.case(m, **OPTIONS["bias"])
    target[-1] = 3
    for schedule in SCHEDULES:
        path.check(x, w, target, kw, schedule=schedule, chunk_size=128)


@on_portable_and_kernels
@pytest.mark.parametrize("v", [1, 2, 7, 8, 255, 256, 257, 2049])
@pytest.mark.parametrize("name", ["plain", "bias", "smoothing"])
def test_vocabularies(v, name, path):
    for dtype, schedule in itertools.product(path.dtypes, SCHEDULES):
        x, w, target, kw = path.case(130, 8 if path.kernels else 1, v, dtype, **OPTIONS[name])
        if v > 1:
            path.check(x, w, target, kw, schedule=schedule)
        else:  # p - 1 is 0 except for rounding
            loss, _, grads = path.run(x, w, target, kw, schedule=schedule)
            assert abs(loss) < 1e-6
            assert all(g.abs().max() < 1e-6 for g in grads)


def strided(t, layout):
    """The same values with other strides."""
    if layout == "transposed":
        return t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(2)[::2]
    if layout == "unaligned":
        return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)
    out = t.new_full([2 * n + 1 for n in t.shape], -1)
    return out[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)


@on_portable_and_kernels
@pytest.mark.parametrize("layout", ["transposed", "sparse", "unaligned"])
@pytest.mark.parametrize("name", ["weight", "all"])
def test_any_strides(name, layout, path):
    x, w, target, kw = path.case(40, **OPTIONS[name])

    def other(t):
        return strided(t.detach(), layout).requires_grad_(t.requires_grad) if torch.is_tensor(t) else t

    for schedule in SCHEDULES:
        want = path.run(x, w, target, kw, schedule=schedule)
        got = path.run(*map(other, (x, w, target)), {k: other(t) for k, t in kw.items()}, schedule=schedule)
        close = 0 if path.kernels else 1e-11  # portable: GEMMs may differ by layout
        torch.testing.assert_close(got, want, rtol=close, atol=close)


@on_portable_and_kernels
def test_leading_dimensions_and_an_expanded_grad_output(path):
    x, w, target, kw = path.case(12, **OPTIONS["all"], reduction="none")
    loss, lse, (dx, dw, db) = path.run(x, w, target, kw)
    x3 = x.detach().reshape(2, 3, 2, 8).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    target3 = target.reshape(2, 3, 2)
    loss3, lse3 = path.call(x3, w, target3, return_lse=True, **kw)
    assert loss3.shape == lse3.shape == target3.shape
    grads = torch.autograd.grad(loss3.sum(), (x3, w, kw["linear_bias"]))  # the gradient of sum() has stride 0
    got = loss3.flatten(), lse3.flatten(), grads[0].reshape(12, 8), *grads[1:]
    close = 0 if path.kernels else 1e-11
    torch.testing.assert_close(got, (loss, lse, dx, dw, db), rtol=close, atol=close)
    for reduction in REDUCTIONS:  # a single row without a batch dimension
        one = path.call(x[0], w, torch.tensor(3, **path.here), reduction=reduction)
        want = F.cross_entropy(F.linear(x[0].double(), w.double()), torch.tensor(3, **path.here))
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)
        assert torch.autograd.grad(one, x)[0].isfinite().all()


@on_portable_and_kernels
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_autocast(name, schedule, dtype, path):
    x, w, target, kw = path.case(dtype=FP32, **OPTIONS[name])
    on_cpu = path.kernels is None and path.device.type == "cpu"
    for chunk_size in (path.chunk_size, None):
        with torch.autocast(path.device.type, dtype=dtype):
            loss, _, grads = path.run(x, w, target, kw, schedule=schedule, chunk_size=chunk_size)
        # autocast rounds the operands; kernels also round dlogits and scaled rows of x
        rounded = [t.detach().to(dtype) for t in (x, w)]
        true_loss, _, true_grads = truth(*rounded, target, kw)
        assert loss.dtype == FP32
        assert norm_error(loss, true_loss) < (1e-6 if on_cpu else 1e-5)
        for got, want in zip(grads, true_grads, strict=True):
            assert got.dtype == FP32
            assert norm_error(got, want) < (1e-6 if on_cpu else 2 * unit_roundoff(dtype))
    with torch.autocast(path.device.type, dtype=dtype):  # autocast allows mixed dtypes, and ignores fp64
        mixed = path.call(x.half(), w, target)
        assert all(t.isfinite().all() for t in torch.autograd.grad(mixed, [x, w]))
        loss = linear_cross_entropy(x.double(), w.double(), target, backend="reference")
        assert loss.dtype == FP64


# --- autograd ---


@on_portable_and_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_two_backwards_give_the_same_bits_and_modify_nothing(name, with_lse, schedule, reduction, path):
    x, w, target, kw = path.case(140, **OPTIONS[name], reduction=reduction)
    inputs = [*parameters(x, w, kw), target] + ([kw["weight"]] if "weight" in kw else [])
    for chunk_size in (path.chunk_size, None):
        loss, lse = path.call(x, w, target, return_lse=True, schedule=schedule, chunk_size=chunk_size, **kw)
        outputs = [loss, lse] if with_lse else [loss]
        grad_outputs = [torch.rand_like(o) for o in outputs]
        theirs = [*inputs, *grad_outputs, loss, lse]
        before = [t.detach().clone() for t in theirs]
        first, second = (
            torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs, retain_graph=True) for _ in range(2)
        )
        held = [t.clone() for t in first]
        for g in second:  # users may modify gradients
            g.zero_()
        third = torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs)
        assert_same(list(third), held)
        assert_same([t.detach() for t in theirs], before)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_scales_fp32_gradients_in_place_unless_graph_is_retained(retain_graph):
    x, w, target, _ = make(40, 16, 300, FP32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x, w, target)
    grads = torch.autograd.grad(loss, [x, w], torch.tensor(0.5), retain_graph=retain_graph)
    addresses = [t.data_ptr() for t in saved]
    assert [g.data_ptr() in addresses for g in grads] == [not retain_graph] * 2


@on_portable_and_kernels
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_loss_is_independent_of_schedule_chunks_and_grad_mode(name, reduction, path):
    x, w, target, kw = path.case(**OPTIONS[name], reduction=reduction)
    with torch.no_grad():
        want = path.call(x, w, target, return_lse=True, **kw)
    close = 0 if path.kernels else 1e-6  # portable GEMMs may differ in bits
    for schedule, chunk_size in itertools.product(SCHEDULES, (path.chunk_size, None)):
        got = path.run(x, w, target, kw, schedule=schedule, chunk_size=chunk_size)[:2]
        torch.testing.assert_close(got, want, rtol=close, atol=close)


def gemms(f):
    """How many matrix products f runs."""
    with profile() as prof:
        f()
    return sum(e.name in ("aten::mm", "aten::addmm") for e in prof.function_events)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_required_gradients_are_computed(reduction, schedule):
    all_wanted, chunks = None, 3
    for wants in itertools.product((True, False), repeat=3):
        x, w, target, kw = make(dtype=FP32, bias=True, reduction=reduction)
        tensors = [t.requires_grad_(want) for t, want in zip(parameters(x, w, kw), wants, strict=True)]
        losses = []

        def forward(x=x, w=w, target=target, kw=kw, losses=losses):
            losses.append(linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=5, **kw))

        count = gemms(forward)
        assert losses[0].requires_grad == any(wants)
        if not any(wants):
            assert count == chunks
            continue
        count += gemms(losses[0].sum().backward)
        again = 0 if schedule == "stored" or (schedule == "chunked" and reduction == "mean") else chunks
        assert count == chunks + again + chunks * (wants[0] + wants[1])
        grads = [t.grad for t in tensors]
        assert [g is not None for g in grads] == list(wants)
        all_wanted = all_wanted or grads
        assert all(g is None or torch.equal(g, want) for g, want in zip(grads, all_wanted, strict=True))


@on_portable_and_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arguments_without_gradient(schedule, path):
    x, w, target, kw = path.case(class_weight=True)
    weight = kw["weight"].requires_grad_()
    loss = path.call(x, w, target, weight=weight, schedule=schedule)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)
    path.call(x, w, target, weight=weight, schedule=schedule).backward()
    assert weight.grad is None
    buffer = torch.ones(w.shape, dtype=x.dtype, **path.here)  # unused, because the weight needs no gradient
    path.call(x, w.detach(), target, grad_weight_out=buffer, schedule=schedule).backward()
    assert (buffer == 1).all()


@on_every_path
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)  # fp32 on kernels: parameters, under autocast
@pytest.mark.parametrize("buffer_dtype", [FP32, BF16, "strided"], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_grad_weight_out(name, reduction, buffer_dtype, dtype, path):
    if dtype == FP32 and buffer_dtype == BF16:
        return  # TypeError: the buffer is narrower than the weight
    x, w, target, kw = path.case(dtype=dtype, **OPTIONS[name], reduction=reduction)
    if buffer_dtype == "strided":
        buffer = torch.ones(w.shape[1], w.shape[0], **path.here).t()
    else:
        buffer = torch.ones(w.shape, dtype=buffer_dtype, **path.here)
    autocast = torch.autocast(path.device.type, dtype=BF16, enabled=path.kernels is not None)
    want = truth(*(t.detach().bfloat16() if path.kernels else t for t in (x, w)), target, kw)[2][1]
    bound = 4 * unit_roundoff(buffer.dtype)  # on a CPU only the buffer rounds
    bound += 4 * unit_roundoff(BF16) if path.kernels else 2 * unit_roundoff(dtype) if x.is_cuda else 1e-6
    for schedule in ("auto", *SCHEDULES):
        x.grad, w.grad = None, None
        buffer.fill_(1.0)
        options = dict(grad_weight_out=buffer, schedule=schedule, chunk_size=path.chunk_size)
        with autocast:
            graphs = [path.call(x, w, target, **options, **kw).sum() for _ in range(2)]  # micro-batches over one buffer
        assert (buffer == 1).all()  # forward adds nothing
        graphs[0].backward(torch.tensor(0.5, **path.here), retain_graph=True)
        graphs[0].backward(torch.tensor(2.0, **path.here))
        graphs[1].backward(torch.tensor(0.25, **path.here))
        assert w.grad is None
        assert x.grad is not None
        assert norm_error(buffer, 1 + 2.75 * want) <= bound


@on_every_path
@pytest.mark.parametrize("layout", buffer_layouts.NAMES)
def test_buffers_of_any_strides(layout, path):
    """The weight gradient is added to the buffer's elements and to nothing around them."""
    x, w, target, kw = path.case(dtype=BF16)
    want = truth(x, w, target, kw)[2][1]
    for dtype, schedule in itertools.product((FP32, BF16), SCHEDULES):
        view, whole = buffer_layouts.ones_in(layout, w.shape, dtype, path.device)
        options = dict(grad_weight_out=view, schedule=schedule, chunk_size=path.chunk_size)
        path.call(x, w, target, **options, **kw).backward()
        assert norm_error(view, 1 + want) <= 4 * unit_roundoff(dtype) + 4 * unit_roundoff(BF16), (dtype, schedule)
        assert buffer_layouts.are_neighbours_unchanged(view, whole), (dtype, schedule)


@on_portable_and_kernels
def test_activation_checkpointing(path):
    x, w, target, kw = path.case(bias=True)
    _, _, want = path.run(x, w, target, kw)
    loss = torch.utils.checkpoint.checkpoint(lambda x: path.call(x, w, target, **kw), x, use_reentrant=False)
    assert_same(torch.autograd.grad(loss, parameters(x, w, kw)), want)


# --- operators and torch.compile ---


def test_compiled_code_can_check_options():
    """torch.compile of torch 2.11 traces functions, but no bound methods such as tuple.__contains__."""
    assert all(isinstance(is_legal, types.FunctionType) for _, _, _, is_legal, _ in checks._OPTIONS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_opcheck(needs, schedule, device):
    for reduction, return_stats in zip(REDUCTIONS, (False, True, True), strict=True):
        x, w, target, kw = make(dtype=FP32, device=device, bias=True, class_weight=True)
        for t, need in zip(parameters(x, w, kw), needs, strict=True):
            t.requires_grad_(need)
        scale = torch.tensor(0.7, device=device)
        args = x, w, kw["linear_bias"], target, kw["weight"], scale, None, None, IGNORED, 0.1, 3.0, 1e-3, reduction
        args = *args, return_stats, FP32, schedule, 5, False, False, "", needs
        torch.library.opcheck(_fwd_op, args)
        with torch.no_grad():
            loss, lse, log_prob, entropy, _, *kept = _fwd_op(*args)[:8]
            grads = [None if t is None else torch.rand_like(t) for t in (loss, lse, log_prob, entropy)]
            args = [t.detach() if torch.is_tensor(t) else t for t in args]
            torch.library.opcheck(_bwd_op, (*grads, *kept, *args))


@on_portable_and_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager_for_many_m_with_two_graphs(return_lse, with_buffer, schedule, path):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, w, _, kw = path.case(bias=True)
    bias = kw["linear_bias"]

    def step(x, target, n, buffer):
        out = linear_cross_entropy(
            x * 2, w, target, linear_bias=bias, num_items=n, z_loss=1e-3, softcap=5.0, schedule=schedule,
            chunk_size=path.chunk_size, grad_weight_out=buffer, return_lse=return_lse, **path.defaults,
        )  # fmt: skip
        return out if return_lse else (out,)

    compiled = torch.compile(step, fullgraph=True, backend=frames)
    for m in (7, 140, 64, 3, 333, 16):
        x, _, target, _ = path.case(m)
        n = torch.tensor(m, **path.here)
        results = []
        for f in (step, compiled):
            buffer = torch.zeros_like(w, dtype=torch.promote_types(w.dtype, FP32)) if with_buffer else None
            outputs = f(x, target, n, buffer)
            grad = torch.full_like(outputs[0], 0.5)
            dx, dw, db = torch.autograd.grad(outputs[0], [x, w, bias], grad, allow_unused=True)
            assert (dw is None) == with_buffer
            results.append([o.detach() for o in outputs] + [dx, buffer if with_buffer else dw, db])
        # compiled code passes zeros as the gradient of lse, so backward recomputes gradients in another order
        assert_same(results[1][: len(outputs)], results[0][: len(outputs)])
        for got, want in zip(results[1], results[0], strict=True):
            assert norm_error(got, want.double()) <= (2**-7 if return_lse or with_buffer else 0)
    assert frames.frame_count <= 2  # the first M, then any M


@on_portable_and_kernels
def test_compiled_under_autocast_and_reduction_none(path):
    torch._dynamo.reset()
    x, w, target, _ = path.case(dtype=FP32)

    def step(x, w, target):
        with torch.autocast(path.device.type, dtype=BF16):
            return linear_cross_entropy(x, w, target, reduction="none", label_smoothing=0.1, **path.defaults)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w, target), step(x, w, target)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), w)[0] for loss in (got, want)))


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
        ({"weight": torch.zeros(1)}, ValueError, r"weight has shape \(1,\), expected \(11,\)"),
        ({"weight": torch.zeros(11, device="meta")}, ValueError, "weight is on meta, expected input.s device cpu"),
        ({"target": torch.rand(13)}, TypeError, "target is torch.float32, expected class indices, int32 or int64"),
        ({"input": torch.zeros(13, 8).half()}, TypeError, "linear_weight is torch.float32, expected input"),
        ({"input": torch.zeros(13, 8).int()}, TypeError, "input is torch.int32, expected bfloat16"),
        ({"linear_bias": torch.zeros(11).half()}, TypeError, "linear_bias is torch.float16, expected input"),
        ({"grad_weight_out": torch.zeros(11, 8).half()}, TypeError, "grad_weight_out is torch.float16, expected"),
        ({"grad_weight_out": torch.zeros(11, 8).requires_grad_()}, ValueError, "grad_weight_out requires grad"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg', expected one of none, mean, sum"),
        ({"schedule": "fast"}, ValueError, "schedule is 'fast', expected one of auto, stored, chunked, recompute"),
        ({"backend": "triton"}, ValueError, "backend is 'triton', expected one of auto, cute, reference"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5, expected 0 <= label_smoothing <= 1"),
        ({"softcap": math.nan}, ValueError, "softcap is nan, expected None or a positive number"),
        ({"softcap": 1e-50}, ValueError, "softcap is 1e-50, expected None or a positive number"),
        ({"softcap": True}, TypeError, "softcap is True, a bool; expected a float or None"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale is 0.0, expected None or a positive finite number"),
        ({"logit_scale": math.inf}, ValueError, "logit_scale is inf, expected None or a positive finite number"),
        ({"logit_scale": "1"}, TypeError, "logit_scale is '1', a str; expected a float or a 0-dim tensor or None"),
        ({"logit_scale": torch.tensor(2)}, TypeError, "logit_scale is torch.int64, expected bfloat16"),
        (
            {"logit_scale": torch.ones((), device="meta")},
            ValueError,
            r"logit_scale is on meta, expected cpu \(input's\)",
        ),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1.0, expected a finite number that is not negative"),
        ({"z_loss": math.inf}, ValueError, "z_loss is inf, expected a finite number that is not negative"),
        ({"z_loss": 1e39}, ValueError, r"z_loss is 1e\+39, expected a finite number"),  # infinite in fp32
        ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected None or at least 1 row"),
        ({"chunk_size": 2**63}, ValueError, "chunk_size is 9223372036854775808, expected None or at least 1 row"),
        ({"num_items": 10**400}, ValueError, "num_items is 10+, expected at least 0"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index is 9223372036854775808, expected a 64-bit integer"),
        ({"return_lse": 1}, TypeError, "return_lse is 1, a int; expected True or False"),
        (
            {"return_lse": True, "return_stats": True},
            ValueError,
            "return_lse and return_stats are True",
        ),
        ({"num_items": -1}, ValueError, "num_items is -1, expected at least 0"),
        ({"num_items": torch.tensor(3.0, requires_grad=True)}, ValueError, "num_items requires grad, but gets"),
        ({"input": [[1.0]]}, TypeError, "input is a list, expected a torch.Tensor"),
        ({"target": None}, TypeError, "target is a NoneType, expected a torch.Tensor"),
        ({"weight": [1.0] * 11}, TypeError, "weight is a list, expected a torch.Tensor or None"),
        ({"num_items": torch.ones(1)}, ValueError, r"num_items has shape \(1,\), expected a 0-dim tensor"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items is given but reduction is "sum"'),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: {message}"):
        wrong(**change)


def test_buffer_must_not_overlap_weight_or_input():
    x, w, target, _ = make(dtype=torch.float32)
    flat = torch.zeros(3 * w.numel())
    for of in (w.detach(), x.detach()):
        buffer = of.view(-1)[: w.numel()].view(-1, 8)
        with pytest.raises(ValueError, match="grad_weight_out shares memory with"):
            linear_cross_entropy(x, w, target, grad_weight_out=buffer)
    for buffer in buffer_layouts.overlapping(w.shape):
        with pytest.raises(ValueError, match=r"grad_weight_out has shape .* so its elements share memory"):
            linear_cross_entropy(x, w, target, grad_weight_out=buffer)
    first, second = (flat[i * w.numel() :][: w.numel()].view(w.shape) for i in (0, 1))
    linear_cross_entropy(x, first, target, grad_weight_out=second)  # one storage without overlap


@pytest.mark.parametrize("version", [1, 2])
def test_buffer_under_fsdp_raises(version, tmp_path):
    """FSDP reduces only .grad: the buffer would get this rank's unreduced gradient."""
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
        (dict(logit_scale=True), dict(logit_scale=1)),
    ],
    ids=str,
)
def test_rejected_argument_does_not_affect_equal_valid_one(first, second):
    for _ in range(2):
        with pytest.raises(TypeError):
            wrong(**first)
        wrong(**second)


@pytest.mark.parametrize("name, numbers", [("num_items", (3, 4)), ("logit_scale", (0.5, 0.7))])
def test_plan_is_shared_by_all_numbers(name, numbers):
    wrong(**{name: numbers[0]})
    plans = dict(api._plans)
    wrong(**{name: numbers[1]})
    assert api._plans == plans


@pytest.mark.parametrize("softcap", [math.inf, 1e300])
def test_infinite_softcap_is_no_cap(softcap):
    assert torch.equal(wrong(softcap=softcap), wrong())


def test_meta_tensors_give_meta_tensors():
    x, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((13, 8), (11, 8)))
    target = torch.empty(13, device="meta", dtype=torch.int64)
    loss, lse = linear_cross_entropy(x, w, target, return_lse=True)
    loss.backward()
    assert (loss.device.type, lse.shape, x.grad.shape, w.grad.shape) == ("meta", (13,), (13, 8), (11, 8))


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


def test_torch_func_vmap_and_unsupported_arguments():
    x, w, target, _ = make(dtype=torch.float32)
    bad = torch.full_like(target, 99)
    batch = torch.stack([x, 2 * x]).detach()
    got = torch.func.vmap(lambda x: linear_cross_entropy(x, w, target))(batch)
    torch.testing.assert_close(got, torch.stack([linear_cross_entropy(x, w, target) for x in batch]))
    gradient = torch.func.grad(lambda x: linear_cross_entropy(x, w, target))
    torch.testing.assert_close(torch.func.vmap(gradient)(batch), torch.stack([gradient(x) for x in batch]))
    with pytest.raises(UnsupportedError, match=r"torch\.func .* expected no grad_weight_out"):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, target, grad_weight_out=torch.zeros_like(w)))(x)
    with pytest.raises(IndexError, match="target 0 of 13 is 99"):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, bad))(x)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["input", "linear_weight", "target"])
def test_wrapper_subclass_intercepts_operator(which, dtype, device):
    """The subclass has no memory: a kernel would get a null pointer."""
    x, w, target, _ = make(h=64, v=130, dtype=dtype, device=device)
    args = dict(input=x.detach(), linear_weight=w.detach(), target=target)
    want = linear_cross_entropy(**args)
    args[which] = wrapped = Wrapper(args[which])
    assert torch.equal(linear_cross_entropy(**args), want)
    assert wrapped.seen


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
def test_plan_is_not_reused_for_other_dtypes(name, right, other):
    for _ in range(2):
        wrong(**{name: right})  # valid
        with pytest.raises(TypeError, match=f"linear_cross_entropy: {name} is {other}, expected"):
            wrong(**{name: right.to(other)})


def test_cpu_has_no_kernel_and_no_warning(recwarn):
    with pytest.raises(UnsupportedError, match=r'no kernel for cpu tensors. backend="auto" runs the portable path'):
        wrong(backend="cute")
    assert torch.equal(wrong(backend="auto"), wrong(backend="reference"))
    assert not [w for w in recwarn if w.category is PortablePathWarning]


# --- module ---


def test_module_matches_pytorchs():
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


def test_module_options():
    x, _, target, _ = make(dtype=torch.float32)
    args = dict(softcap=2.0, z_loss=0.1, label_smoothing=0.2, schedule="recompute", chunk_size=4, reduction="mean")
    args["logit_scale"] = 0.5
    head = LinearCrossEntropyLoss(8, 11, **args, ignore_index=0)
    assert list(head.state_dict()) == ["linear.weight"]
    want = linear_cross_entropy(x, head.linear.weight, target.clamp(min=0), ignore_index=0, num_items=9, **args)
    assert torch.equal(head(x, target.clamp(min=0), num_items=9), want)
    assert "softcap=2.0" in repr(head)
    head.logit_scale = torch.tensor(0.5)
    loss, stats = head(x, target.clamp(min=0), num_items=9, return_stats=True)
    assert torch.equal(loss, want)
    assert stats.entropy.shape == target.shape


@pytest.mark.parametrize(
    "args, error, message",
    [
        (dict(out_features=(3,)), UnsupportedError, r"out_features is \(3,\), expected \(\)"),
        (dict(options=object()), UnsupportedError, "options configures torch's chunking, expected None"),
        (dict(weight=torch.ones(3)), ValueError, r"weight has shape \(3,\), expected \(11,\)"),
        (dict(label_smoothing=2.0), ValueError, "label_smoothing is 2.0"),
        (dict(logit_scale=-1.0), ValueError, "logit_scale is -1.0"),
    ],
)
def test_module_errors(args, error, message):
    with pytest.raises(error, match=message):
        LinearCrossEntropyLoss(8, 11, **args)


# --- on CUDA ---


@pytest.mark.gpu
def test_one_warning_per_reason_on_cuda():
    errors._warned.clear()
    x, w, target, _ = make(dtype=FP32, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for backend in ("reference", "auto", "auto"):
            linear_cross_entropy(x, w, target, backend=backend)
    (only,) = [s for s in seen if s.category is PortablePathWarning]
    assert re.search(r"linear_cross_entropy: no kernel for (sm_\d+ |torch.float32).*portable path", str(only.message))
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: no kernel for (sm_|torch\.float32)"):
        linear_cross_entropy(x, w, target, backend="cute")


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
        assert norm_error(got, eager.double()) <= 1e-4 if path.is_cublas else same_bits(got, eager)


@on_portable_on_cuda
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_portable_path_is_deterministic_with_another_stream_busy(schedule, path):
    step, _, buffer = cuda_step(path, schedule, "mean")

    def run():
        buffer.zero_()
        return *step(), buffer

    assert_deterministic(run)
