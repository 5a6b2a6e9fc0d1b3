"""Linear cross entropy: the reference, and the values of the public function on every path.

test_lce_schedules.py tests the launches and memory of kernels.
"""

import functools
import inspect
import itertools

import pytest
import torch
import torch.nn.functional as F

from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from tests.linear_cross_entropy.cases import (
    IGNORED,
    IN_EMULATOR,
    OPTIONS,
    PATHS,
    REDUCTIONS,
    SCHEDULES,
    assert_same,
    composed,
    hard_rows,
    make,
    norm_error,
    on_every_path,
    run,
    truth,
    unit_roundoff,
)

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


# The reference --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_reference_matches_autograd_of_pytorch(name, reduction):
    x, w, target, kw = make(**OPTIONS[name], reduction=reduction)
    shape = target.shape if reduction == "none" else ()
    grad, grad_lse = torch.randn(shape, dtype=torch.float64), torch.randn(target.shape, dtype=torch.float64)
    want = run(x, w, target, kw, grad, grad_lse, f=composed)
    got = truth(x, w, target, kw, grad, grad_lse)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


# Against truth --------------------------------------------------------------------------------------------------------


def every_option():
    """(name, reduction, path). On the CPU every reduction with no option and with all, and one with each other."""
    for i, name in enumerate(OPTIONS):
        for reduction, path in itertools.product(REDUCTIONS, PATHS):
            if path.marks or name in ("plain", "all") or reduction == REDUCTIONS[i % 3]:
                yield pytest.param(name, reduction, *path.values, marks=path.marks)


@pytest.mark.parametrize("name, reduction, path", list(every_option()), indirect=["path"])
def test_every_option(name, reduction, path):
    for dtype in path.dtypes:
        x, w, target, kw = path.case(dtype=dtype, **OPTIONS[name], reduction=reduction)
        of = dict(dtype=torch.promote_types(dtype, FP32), **path.here)
        grad, grad_lse = torch.randn(target.shape if reduction == "none" else (), **of), torch.randn(target.shape, **of)
        for schedule in SCHEDULES:
            path.check(x, w, target, kw, grad, grad_lse, schedule=schedule, chunk_size=path.chunk_size)
            path.check(x, w, target, kw, grad, None, schedule=schedule)


def in_emulator():
    """(name, reduction, schedule, path): every schedule on Hopper and on Blackwell, which has the same launches."""
    hopper, hopper_at_once, late, at_once = IN_EMULATOR
    yield "bias", "sum", "chunked", hopper
    for case in (
        ("plain", "mean", "chunked", late),
        ("all", "none", "stored", hopper), ("all", "mean", "recompute", hopper_at_once),
        ("all", "none", "recompute", at_once), ("bias", "mean", "stored", late),
        ("all", "sum", "recompute", late), ("unsmoothed", "mean", "chunked", at_once),
    ):  # fmt: skip
        yield pytest.param(*case, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize("name, reduction, schedule, path", list(in_emulator()), indirect=["path"])
def test_every_schedule_in_the_emulator(name, reduction, schedule, path):
    x, w, target, kw = path.case(**OPTIONS[name], reduction=reduction)
    grad, grad_lse = torch.randn(target.shape if reduction == "none" else ()), torch.randn(target.shape)
    if schedule == "chunked" or name == "all":
        given = None if name == "bias" else grad_lse  # a gradient of lse runs more kernels, which other cases have
        path.check(x, w, target, kw, grad, given, schedule=schedule, chunk_size=path.chunk_size)
    if schedule != "chunked":
        path.check(x, w, target, kw, grad, None, schedule=schedule)


@pytest.mark.parametrize(
    "path",
    ["kernels-cpu", *(pytest.param(path, marks=pytest.mark.exhaustive) for path in IN_EMULATOR[::2])],
    indirect=True,
)
def test_kept_exp_logits(path, limits):
    """test_lce_schedules.py has more cases, on our GEMM."""
    limits(STORED_BYTES=0, rows_to_keep=lambda *args: 128)
    x, w, target, kw = path.case(m=200, bias=True, reduction="none")
    path.check(x, w, target, kw, torch.rand(200, **path.here))
    assert path.calls["TargetsArgs"] == path.calls["dw"] // 2 >= 1


@on_every_path
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


@on_every_path
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
@pytest.mark.parametrize(
    "reduction, options", [("sum", {}), ("none", dict(softcap=30.0)), ("none", dict(logit_scale=2.0))], ids=str
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_hard_rows(reduction, schedule, options, path):
    for dtype in [BF16, FP16] if path.kernels else [FP32, BF16, FP16]:
        x, w, target = hard_rows(dtype, path.device)
        path.check(x, w, target, dict(reduction=reduction, **options), schedule=schedule)


@on_every_path
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


@on_every_path
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


# PyTorch's own --------------------------------------------------------------------------------------------------------


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


# Rows and options -----------------------------------------------------------------------------------------------------


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


@on_every_path
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


@on_every_path
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


@on_every_path
def test_mean_with_zero_class_weights_is_nan_as_in_pytorch(path):
    x, w, target, _ = path.case()
    weight = torch.zeros(path.v, dtype=x.dtype, **path.here)
    assert path.call(x, w, target, weight=weight).isnan()
    assert F.cross_entropy(F.linear(x, w), target, weight=weight).isnan()


@on_every_path
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


@on_every_path
def test_ignore_index_may_be_a_class_or_none(path):
    x, w, target, _ = path.case()
    assert_same(path.call(x, w, target, ignore_index=None), path.call(x, w, target))
    path.check(x, w, target.clamp(min=0), dict(ignore_index=0))


@on_every_path
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


@on_every_path
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


# Shapes, strides, dtypes ----------------------------------------------------------------------------------------------


@on_every_path
@pytest.mark.parametrize("m", [1, 2, 127, 128, 129, 257])
def test_row_counts(m, path):
    x, w, target, kw = path.case(m, **OPTIONS["bias"])
    target[-1] = 3
    for schedule in SCHEDULES:
        path.check(x, w, target, kw, schedule=schedule, chunk_size=128)


@on_every_path
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


@on_every_path
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


@on_every_path
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


@on_every_path
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
