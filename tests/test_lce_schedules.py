"""Linear cross entropy on kernels: schedules, autograd and operators, with `backend="cute"`.

Each test runs twice: without a GPU over emulated launchers, and on a Hopper GPU over the kernels. Memory that nobody
has written holds NaN.
"""

import contextlib
import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from emulated_kernels import Counted, lce_kernels
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
from wrapper_tensor import Wrapper

from quackish.configs.linear_cross_entropy import (
    first_classes,
    recompute_blocks,
    shared_storage,
)
from quackish.errors import UnsupportedError
from quackish.ops import cuda
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import autograd as on_kernels
from quackish.ops.linear_cross_entropy import exp_logits as of_e
from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.testing.errors import same_bits

DTYPES = [torch.bfloat16, torch.float16]
FP32 = torch.float32
CUTE = dict(backend="cute")
HERE = {}  # the device of the running test


@pytest.fixture(autouse=True, params=["emulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def kernels(request, monkeypatch, run_on):
    """What launches, with `calls`; and tensors are made on its device."""
    if request.param == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        if reason := public.no_kernel_on(device):
            pytest.skip(reason)
        k = Counted(on_kernels.kernels_of(device))
        monkeypatch.setattr(cuda, "empty", cuda._empty)  # the shorter way is not PyTorch's to fill
    else:
        device, k = torch.device("cpu"), Counted(lce_kernels())
    run_on(lambda device: k)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # torch.empty hands out NaN
    torch.manual_seed(0)
    HERE["device"] = device
    yield k
    torch.use_deterministic_algorithms(before)


def case(m=300, h=8, v=700, dtype=torch.bfloat16, **options):
    """As make(), class weights in fp32, logits of a few units."""
    x, w, target, kw = make(m, h, v, dtype, HERE["device"], **options)
    w = (w.detach() * h**-0.5).requires_grad_()
    return x, w, target, {k: t.float() if k == "weight" else t for k, t in kw.items()}


def check(x, w, target, kw, grad=None, grad_lse=None, **how):
    """Against truth: fp32's roundings in loss and lse, and tanh's of the kernels; in gradients a few of the dtype's."""
    loss, lse, grads = run(x, w, target, kw, grad, grad_lse, backend="cute", **how)
    true_loss, true_lse, true_grads = truth(x, w, target, kw, grad, grad_lse)
    assert loss.dtype == lse.dtype == torch.float32
    close = 2e-6 if HERE["device"].type == "cpu" else 1e-5 + 2**-20 * (kw.get("softcap") or 0.0)
    torch.testing.assert_close(loss.double(), true_loss, rtol=close, atol=close)
    torch.testing.assert_close(lse.double(), true_lse, rtol=close, atol=close)
    ways = [grads]
    if how.get("schedule") == "recompute" and grad_lse is None:  # another way where no lse is returned
        alone = linear_cross_entropy(x, w, target, **kw, backend="cute", **how)
        wanted = [t for t in parameters(x, w, kw) if t.requires_grad]
        ways.append(torch.autograd.grad(alone, wanted, torch.ones_like(alone) if grad is None else grad))
    bound = 4 * unit_roundoff(x.dtype)
    for grads_of_one in ways:
        for got, want, of in zip(grads_of_one, true_grads, parameters(x, w, kw), strict=True):
            assert got.dtype == of.dtype
            assert got.shape == of.shape
            if want.norm() == 0:
                assert (got == 0).all()
            else:
                assert norm_error(got, want) <= bound
    return loss, lse, grads


# --- against truth ---


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, reduction, dtype):
    x, w, target, kw = case(dtype=dtype, **OPTIONS[name], reduction=reduction)
    grad, grad_lse = torch.randn(target.shape if reduction == "none" else (), **HERE), torch.randn(target.shape, **HERE)
    for schedule in SCHEDULES:
        for chunk_size in (128, None):
            for g_lse in (None, grad_lse):
                check(x, w, target, kw, grad, g_lse, schedule=schedule, chunk_size=chunk_size)


@pytest.mark.parametrize("name", ["plain", "bias", "all"])
@pytest.mark.parametrize("m, h, v, columns", [(40, 64, 1000, 512), (40, 64, 256, None), (40, 128, 513, 256)])
def test_e_in_the_storage_of_the_weight_gradient(m, h, v, columns, name, kernels, limits):
    limits(SHARED_FROM=0)
    x, w, target, kw = case(m, h, v, **OPTIONS[name])
    plan = shared_storage(m, v, h, 2)
    assert (plan.columns if plan else None) == columns
    check(x, w, target, kw, schedule="chunked")
    if name != "all":
        assert kernels.calls["dw"] == (1 if columns is None else 2)


@pytest.mark.parametrize("dtype, dw_dtype", [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, FP32)])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("ignored", [False, True])
def test_dlogits_in_the_storage_of_the_weight_gradient(ignored, name, dtype, dw_dtype, kernels, limits):
    limits(scratch_columns=lambda *how: 256)
    m, h, v = 200, 64, 2500
    x, w, target, kw = case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    if ignored:
        target.fill_(IGNORED)
    blocks = recompute_blocks(m, v, h, dw_dtype.itemsize, 256)
    assert sum(block.offset is not None for block in blocks) > 1
    with torch.autocast(HERE["device"].type, dtype=dtype, enabled=dw_dtype == FP32):
        for reduction in ("mean", "none"):
            kernels.calls.clear()
            how = dict(reduction=reduction, schedule="recompute", **CUTE)
            _, _, grads = run(x, w, target, kw, **how)
            assert kernels.calls["dlogits"] == kernels.calls["dx"] == kernels.calls["dw"] == len(blocks)
            rounded = [t.detach().to(dtype) for t in (x, w)]
            for got, want in zip(grads, truth(*rounded, target, kw | {"reduction": reduction})[2], strict=True):
                assert norm_error(got, want) <= 4 * unit_roundoff(dtype)
            buffer = torch.zeros(w.shape, **HERE)  # nobody else's storage is used
            loss = linear_cross_entropy(x, w, target, grad_weight_out=buffer, **kw, **how)
            loss.sum().backward()
            assert norm_error(buffer, grads[1].double()) <= 2 * unit_roundoff(dtype)


@pytest.mark.parametrize("dw_dtype", [torch.bfloat16, FP32])
@pytest.mark.parametrize("name", ["plain", "softcap", "weight"])
@pytest.mark.parametrize("m, live", [(600, 600), (600, 130), (600, 0), (300, 300)])
def test_recompute_begins_the_weight_gradient_in_forward(m, live, name, dw_dtype, kernels, narrow):
    h, v = 512, 4000
    x, w, target, kw = case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    target[: m - live] = IGNORED
    columns, _, part_rows = first_classes(m, v, h, dw_dtype.itemsize)
    parts, blocks = -(-m // part_rows), recompute_blocks(m, v, h, dw_dtype.itemsize, 256)
    assert columns == blocks[0].v1 > 256
    how = dict(schedule="recompute", **kw, **CUTE)
    with torch.autocast(HERE["device"].type, dtype=torch.bfloat16, enabled=dw_dtype == FP32):
        loss = linear_cross_entropy(x, w, target, **how)
        assert (kernels.calls["logits"], kernels.calls["dx"], kernels.calls["dw"]) == (parts, parts, 1)
        first = torch.autograd.grad(loss * 0.7, [x, w], retain_graph=True)
        assert (kernels.calls["dlogits"], kernels.calls["dw"]) == (len(blocks) - 1, len(blocks))
        again = torch.autograd.grad(loss * 0.7, [x, w])
        assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))
        kernels.calls.clear()
        (only_dx,) = torch.autograd.grad(linear_cross_entropy(x, w.detach(), target, **how) * 0.7, [x])
        assert kernels.calls["dw"] == kernels.calls["dlogits"] == 0
    rounded = [t.detach().bfloat16() for t in (x, w)]
    wants = truth(*rounded, target, kw)[2]
    for got, want in zip(first, wants, strict=True):
        assert norm_error(got, 0.7 * want) <= 4 * unit_roundoff(torch.bfloat16)
    assert norm_error(only_dx, 0.7 * wants[0]) <= 4 * unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize("dw_dtype", [torch.bfloat16, FP32])
@pytest.mark.parametrize("where", ["below", "above", "at"])
def test_targets_on_either_side_of_the_first_classes(where, dw_dtype, kernels, narrow):
    m, h, v = 600, 512, 4000
    x, w, target, _ = case(m, h, v, dtype=dw_dtype)
    split = first_classes(m, v, h, dw_dtype.itemsize).columns
    first, last = {"below": (0, split), "above": (split, v), "at": (split - 1, split + 1)}[where]
    live = target != IGNORED
    target[live] = first + target[live] % (last - first)
    with torch.autocast(HERE["device"].type, dtype=torch.bfloat16, enabled=dw_dtype == FP32):
        loss = linear_cross_entropy(x, w, target, schedule="recompute", **CUTE)
        assert kernels.calls["dw"] == kernels.calls["sort"] == 1
        dx, dw = torch.autograd.grad(loss, [x, w])
    want_dx, want_dw = truth(*[t.detach().bfloat16() for t in (x, w)], target, {})[2]
    assert norm_error(dx, want_dx) <= 4 * unit_roundoff(torch.bfloat16)
    for part in (slice(split - 1), slice(split - 1, split), slice(split, split + 1), slice(split + 1, v)):
        assert norm_error(dw[part], want_dw[part]) <= 4 * unit_roundoff(torch.bfloat16)
    if where == "at":  # of many targets, which are added in fp32: little but its own rounding
        assert norm_error(dw[split - 1], want_dw[split - 1]) <= 0.5 * unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mean", [2.0, 8.0])
@pytest.mark.parametrize("v", [16, 1000])
def test_gradients_whose_parts_cancel(v, mean, schedule):
    """Channels with a mean, and targets as likely as the model says: what a class gets from the softmax is nearly what
    its targets take, and either alone is many times the gradient."""
    m, h = 2048, 64
    make = torch.Generator().manual_seed(0)
    x = torch.randn(m, h, generator=make)
    x[:, :2] += mean
    w = (torch.randn(v, h, generator=make) * 0.05).bfloat16()
    x = x.bfloat16()
    target = torch.multinomial((x.double() @ w.double().T).softmax(1), 1, generator=make)[:, 0]
    x, w, target = x.to(**HERE).requires_grad_(), w.to(**HERE).requires_grad_(), target.to(**HERE)
    true = truth(x, w, target, {})[2]
    logits = F.linear(x, w) if x.is_cuda else (x.float() @ w.float().T).bfloat16()
    dlogits = torch.autograd.grad(F.cross_entropy(logits.float(), target), logits)[0]
    theirs = (dlogits.T.float() @ x.float()).bfloat16()  # as torch's GEMM rounds
    loss = linear_cross_entropy(x, w, target, schedule=schedule, **CUTE)
    _, dw = torch.autograd.grad(loss, [x, w])
    assert norm_error(dw, true[1]) <= 1.02 * norm_error(theirs, true[1])


@pytest.mark.parametrize("dw_dtype", [torch.bfloat16, FP32])
@pytest.mark.parametrize("name", ["plain", "bias", "softcap"])
@pytest.mark.parametrize("ignored", [False, True])
def test_recompute_with_a_chunk_size(ignored, name, dw_dtype, kernels, limits):
    """The weight gradient is summed over chunks, some classes at a time."""
    limits(DW_BLOCK=1504)
    m, h, v, chunk = 300, 256, 4004, 128
    x, w, target, kw = case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    target[: 270 if ignored else 0] = IGNORED  # of three chunks, one with live rows
    inputs = parameters(x, w, kw)
    with torch.autocast(HERE["device"].type, dtype=torch.bfloat16, enabled=dw_dtype == FP32):
        loss = linear_cross_entropy(x, w, target, schedule="recompute", chunk_size=chunk, **kw, **CUTE)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert kernels.calls["dlogits"] == kernels.calls["dw"] == 9
        assert kernels.calls["dx"] == kernels.calls["logits"] == 3
        again = torch.autograd.grad(loss, inputs)
    rounded = [t.detach().bfloat16() for t in (x, w)]
    for got, other, want in zip(first, again, truth(*rounded, target, kw)[2], strict=True):
        assert norm_error(got, want) <= 4 * unit_roundoff(torch.bfloat16)
        assert same_bits(got, other)


@pytest.mark.parametrize("m", [1, 2, 127, 128, 129, 257])
def test_row_counts(m):
    x, w, target, kw = case(m, **OPTIONS["bias"])
    target[-1] = 3
    for schedule in SCHEDULES:
        check(x, w, target, kw, schedule=schedule, chunk_size=128)


@pytest.mark.parametrize("v", [1, 2, 7, 8, 255, 256, 257, 2049])
@pytest.mark.parametrize("name", ["plain", "bias", "smoothing"])
def test_vocabularies(v, name):
    x, w, target, kw = case(m=130, v=v, **OPTIONS[name])
    for schedule in SCHEDULES:
        for dtype in DTYPES:
            x, w = (t.detach().to(dtype).requires_grad_() for t in (x, w))
            kw = {k: t.detach().to(dtype).requires_grad_() if k == "linear_bias" else t for k, t in kw.items()}
            if v > 1:
                check(x, w, target, kw, schedule=schedule)
            else:  # p - 1 is 0 but for rounding
                loss, _, grads = run(x, w, target, kw, schedule=schedule, **CUTE)
                assert abs(loss) < 1e-6
                assert all(g.abs().max() < 1e-6 for g in grads)


def test_no_kernel_for_other_dtypes_and_widths():
    x, w, target, _ = make(dtype=torch.float32, device=HERE["device"])
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: no kernel for torch\.float32"):
        linear_cross_entropy(x, w, target, backend="cute")
    x, w, target, _ = make(h=12, dtype=torch.bfloat16, device=HERE["device"])
    with pytest.raises(UnsupportedError, match="linear_cross_entropy: no kernel for linear_weight with 12 columns"):
        linear_cross_entropy(x, w, target, backend="cute")


def test_no_rows():
    x, w, target, kw = case(m=0, **OPTIONS["all"])
    loss, lse, grads = run(x, w, target, kw, **CUTE)
    assert loss == 0
    assert lse.shape == (0,)
    assert [g.count_nonzero() for g in grads] == [0, 0, 0]


# --- semantics, row by row ---


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_items", [None, 7, 0])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_every_target_ignored(name, num_items, schedule):
    x, w, target, kw = case(**OPTIONS[name])
    target.fill_(IGNORED)
    loss, lse, grads = run(x, w, target, kw, schedule=schedule, num_items=num_items, chunk_size=128, **CUTE)
    assert loss == 0
    assert (lse == 0).all()
    assert [g.count_nonzero() for g in grads] == [0, 0, 0]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_nan_in_an_ignored_row_changes_nothing(name, schedule, poison):
    x, w, target, kw = case(**OPTIONS[name])
    for reduction in REDUCTIONS:
        how = dict(reduction=reduction, schedule=schedule, chunk_size=128, **CUTE)
        clean = run(x, w, target, kw, **how)
        bad = x.detach().clone()
        bad[target == IGNORED] = poison
        torch.testing.assert_close(run(bad.requires_grad_(), w, target, kw, **how), clean, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_nan_in_a_live_row_is_seen(name, schedule):
    x, w, target, kw = case(**OPTIONS[name])
    with torch.no_grad():
        x[2, 3] = float("nan")
    how = dict(schedule=schedule, chunk_size=128, **CUTE)
    rows, _, _ = run(x, w, target, kw, reduction="none", **how)
    loss, _, (dx, dw, db) = run(x, w, target, kw, **how)
    others = torch.arange(300, **HERE) != 2
    assert loss.isnan()
    assert rows[2].isnan()
    assert rows[others].isfinite().all()
    assert dx[2].isnan().all()
    assert dx[others].isfinite().all()
    assert dw.isnan().all()
    assert db.isnan().all()


@pytest.mark.parametrize("bad", [700, -1, 2**40])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["plain", "all"])
def test_a_target_that_is_no_class_is_nan(name, schedule, bad):
    x, w, target, kw = case(**OPTIONS[name])
    ignored, wrong = target.clone(), target.clone()
    ignored[4], wrong[4] = IGNORED, bad
    others = torch.arange(300, **HERE) != 4
    for reduction in REDUCTIONS:
        how = dict(reduction=reduction, schedule=schedule, **CUTE)
        loss, _, (dx, dw, *_) = run(x, w, wrong, kw, **how)
        _, _, (want, *_) = run(x, w, ignored, kw, **how)
        assert (loss if reduction != "none" else loss[4]).isnan()
        assert dx[4].isnan().all()
        assert dw.isnan().all()
        assert torch.equal(dx[others], want[others])


def hard_rows(dtype):
    """linear_weight is the identity, so input holds the logits."""
    v = h = 640
    rows, target = torch.randn(200, h, **HERE), torch.randint(0, v, (200,), **HERE)
    rows[3, -1] = 30.0  # late maximum
    rows[5, 7] = 500.0  # far above the rest, not the target
    rows[140, 300] = 9e3  # in the other tile of rows
    rows[6, target[6]] = -500.0  # and the target far below
    rows[7] = torch.where(torch.arange(h, **HERE) % 2 == 0, 1e4, -1e4)
    rows[8] += 1e4  # a large mean
    rows[9] = -1e4
    rows[10, target[10]] = 500.0
    return rows.to(dtype).requires_grad_(), torch.eye(v, h, **HERE).to(dtype).requires_grad_(), target


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_hard_rows(reduction, schedule, softcap, dtype):
    x, w, target = hard_rows(dtype)
    check(x, w, target, dict(reduction=reduction, softcap=softcap), schedule=schedule)


def test_e_in_two_buffers_is_done_again_in_both(kernels, limits):
    limits(SHARED_FROM=0)
    x, w, target = hard_rows(torch.bfloat16)
    x, target = x[:16].detach().requires_grad_(), target[:16]  # few rows: E lies in the weight gradient as well
    check(x, w, target, dict(reduction="sum"), schedule="chunked")
    assert kernels.calls["logits"] == kernels.calls["recompute_flagged"] == 1
    assert kernels.calls["dw"] == 2


@pytest.mark.parametrize("p", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_confident_rows_keep_their_gradient(schedule, p):
    v = 640
    logit = torch.tensor(p / (1 - p) * (v - 1)).log().item()
    x = torch.zeros(v, v, **HERE).fill_diagonal_(logit).bfloat16().requires_grad_()
    w = torch.eye(v, **HERE).bfloat16().requires_grad_()
    target = torch.arange(v, **HERE)
    _, _, (dx, _) = run(x, w, target, {"reduction": "sum"}, schedule=schedule, **CUTE)
    want = truth(x, w, target, {"reduction": "sum"})[2][0]
    assert ((dx.double() - want).abs() <= 0.01 * want.abs()).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_masked_class_costs_nothing(smoothing, schedule):
    x, w, target, kw = case(bias=True)
    target[target == 10] = 0
    with torch.no_grad():
        kw["linear_bias"][10] = float("-inf")
    loss, _, grads = run(x, w, target, kw, schedule=schedule, label_smoothing=smoothing, **CUTE)
    if smoothing:
        assert loss == torch.inf  # every class is a target then
        return
    keep = torch.arange(700, **HERE) != 10
    logits = F.linear(x.float(), w[keep].float(), kw["linear_bias"][keep].float())
    want = F.cross_entropy(logits, torch.where(target > 10, target - 1, target))
    torch.testing.assert_close(loss, want.detach())
    assert all(g.isfinite().all() for g in grads)
    assert (grads[1][10] == 0).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_masked_target_is_an_infinite_loss_with_finite_gradients(schedule):
    x, w, target, kw = case(bias=True)
    with torch.no_grad():
        kw["linear_bias"][target[0]] = float("-inf")
    loss, _, grads = run(x, w, target, kw, schedule=schedule, **CUTE)
    assert loss == torch.inf
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("backend", ["cute", "reference"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_masked_class_that_does_not_count_costs_nothing(smoothing, backend):
    x, w, target, kw = case(bias=True, class_weight=True)
    with torch.no_grad():
        kw["linear_bias"][10] = float("-inf")
        kw["weight"][10] = 0
    target[:3] = 10
    kw["label_smoothing"] = smoothing
    loss, _, grads = run(x, w, target, kw, backend=backend)
    want, _, _ = truth(x, w, target, kw)
    assert want.isfinite()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("v", [33, 700])
def test_saved_tensors_may_come_back_with_other_strides(v, schedule):
    x, w, target, kw = case(v=v, bias=True)
    want = run(x, w, target, kw, schedule=schedule, **CUTE)
    dense = functools.partial(torch.clone, memory_format=torch.contiguous_format)
    with torch.autograd.graph.saved_tensors_hooks(dense, lambda t: t):
        got = run(x, w, target, kw, schedule=schedule, **CUTE)
    for one, other in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("shape", [(20,), (4, 5)])
def test_what_is_returned_may_be_written_to(shape):
    x, w, target, _ = case(m=20)
    x, target = x.detach().view(*shape, -1).requires_grad_(), target.view(shape)
    loss, lse = linear_cross_entropy(x, w, target, reduction="none", return_lse=True, **CUTE)
    loss *= 2
    lse.mul_(3)
    (loss.sum() + lse.sum()).backward()
    again, more = linear_cross_entropy(x, w, target, reduction="none", return_lse=True, **CUTE)
    (want,) = torch.autograd.grad((2 * again).sum() + (3 * more).sum(), x)
    torch.testing.assert_close(x.grad, want)


def test_mean_over_classes_of_weight_zero_is_nan_as_in_pytorch():
    x, w, target, _ = case()
    assert linear_cross_entropy(x, w, target, weight=torch.zeros(700, **HERE), **CUTE).isnan()


@pytest.mark.parametrize("num_items", [29, torch.tensor(29), torch.tensor(29.0, dtype=torch.float64)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_num_items_replaces_the_divisor(schedule, num_items):
    x, w, target, kw = case(**OPTIONS["weight"], z_loss=0.01)
    check(x, w, target, {**kw, "num_items": num_items}, schedule=schedule)


def test_ignore_index_may_be_a_class():
    x, w, target, _ = case()
    check(x, w, target.clamp(min=0), dict(ignore_index=0))


# --- shapes, strides, dtypes ---


def strided(t, how):
    if how == "transposed":
        return t.t().contiguous().t() if t.dim() == 2 else t.repeat_interleave(2)[::2]
    if how == "unaligned":
        flat = t.new_empty(t.numel() + 1)
        return flat[1:].view(t.shape).copy_(t)
    out = t.new_full([2 * n + 1 for n in t.shape], -1)
    return out[tuple(slice(1, None, 2) for _ in t.shape)].copy_(t)


@pytest.mark.parametrize("how", ["transposed", "sparse", "unaligned"])
@pytest.mark.parametrize("name", ["weight", "all"])
def test_any_strides(name, how):
    x, w, target, kw = case(m=40, **OPTIONS[name])
    want = run(x, w, target, kw, **CUTE)
    kw = {
        k: strided(t.detach(), how).requires_grad_(t.requires_grad) if torch.is_tensor(t) else t for k, t in kw.items()
    }
    xs, ws = (strided(t.detach(), how).requires_grad_() for t in (x, w))
    for schedule in SCHEDULES:
        want = run(x, w, target, kw, schedule=schedule, **CUTE)
        got = run(xs, ws, strided(target, how), kw, schedule=schedule, **CUTE)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_leading_dimensions_and_an_expanded_grad_output():
    x, w, target, kw = case(m=12, **OPTIONS["all"], reduction="none")
    loss, lse, (dx, dw, db) = run(x, w, target, kw, **CUTE)
    x3 = x.detach().reshape(2, 3, 2, 8).transpose(0, 2).contiguous().transpose(0, 2).requires_grad_()
    target3 = target.reshape(2, 3, 2)
    loss3, lse3 = linear_cross_entropy(x3, w, target3, return_lse=True, **kw, **CUTE)
    assert loss3.shape == lse3.shape == target3.shape
    torch.testing.assert_close((loss3.flatten(), lse3.flatten()), (loss, lse), rtol=0, atol=0)
    grads = torch.autograd.grad(loss3.sum(), (x3, w, kw["linear_bias"]))  # sum's gradient has strides of 0
    torch.testing.assert_close((grads[0].reshape(12, 8), *grads[1:]), (dx, dw, db), rtol=0, atol=0)
    for reduction in ("mean", "none"):
        one = linear_cross_entropy(x[0], w, torch.tensor(3, **HERE), reduction=reduction, **CUTE)
        assert one.shape == ()
        assert torch.autograd.grad(one, x)[0].isfinite().all()


def test_int32_targets_give_the_same_bits():
    x, w, target, kw = case(**OPTIONS["all"])
    torch.testing.assert_close(run(x, w, target.int(), kw, **CUTE), run(x, w, target, kw, **CUTE), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["bias", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast_of_fp32_parameters(schedule, dtype, name):
    x, w, target, kw = case(dtype=torch.float32, **OPTIONS[name])
    for chunk_size in (128, None):
        with torch.autocast(HERE["device"].type, dtype=dtype):
            loss, _, grads = run(x, w, target, kw, schedule=schedule, chunk_size=chunk_size, **CUTE)
        rounded = [t.detach().to(dtype) for t in (x, w)]
        true_loss, _, true_grads = truth(*rounded, target, kw)
        assert loss.dtype == torch.float32
        assert norm_error(loss, true_loss) < 1e-5
        for got, want in zip(grads, true_grads, strict=True):
            assert got.dtype == torch.float32
            assert norm_error(got, want) < 2 * unit_roundoff(dtype)  # dlogits' and xs' roundings, not the result's


def test_autocast_of_mixed_dtypes():
    x, w, target, _ = case()
    with torch.autocast(HERE["device"].type, dtype=torch.bfloat16):
        loss = linear_cross_entropy(x.half(), w.float(), target, **CUTE)
        for t in torch.autograd.grad(loss, [x, w]):
            assert t.isfinite().all()


# --- autograd ---


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_two_backwards_give_the_same_bits_and_write_nothing(name, with_lse, schedule, reduction):
    x, w, target, kw = case(m=140, **OPTIONS[name], reduction=reduction)
    inputs = [*parameters(x, w, kw), target] + ([kw["weight"]] if "weight" in kw else [])
    for chunk_size in (128, None):
        loss, lse = linear_cross_entropy(
            x, w, target, return_lse=True, schedule=schedule, chunk_size=chunk_size, **kw, **CUTE
        )
        outputs = [loss, lse] if with_lse else [loss]
        grad_outputs = [torch.rand_like(o) for o in outputs]
        before = [t.detach().clone() for t in inputs + grad_outputs + [loss, lse]]
        first, second = (
            torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs, retain_graph=True) for _ in range(2)
        )
        held = [t.clone() for t in first]
        for g in second:  # a user may write what a backward returned
            g.zero_()
        third = torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs)
        torch.testing.assert_close(list(third), held, rtol=0, atol=0)
        after = [t.detach() for t in inputs + grad_outputs + [loss, lse]]
        torch.testing.assert_close(after, before, rtol=0, atol=0)


def test_chunked_hands_out_what_forward_made(kernels):
    x, w, target, kw = case(**OPTIONS["bias"])
    loss = linear_cross_entropy(x, w, target, schedule="chunked", **kw, **CUTE)
    kernels.calls.clear()
    loss.backward(retain_graph=True)
    assert kernels.calls == {"scale": 2}  # dx and dw; db, which is fp32
    loss.backward()
    assert kernels.calls["logits"] == 1
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_retained_graphs_see_inputs_that_changed():
    x, w, target, kw = case()
    loss = linear_cross_entropy(x, w, target, schedule="chunked", **kw, **CUTE)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_schedules_chunks_and_grad_mode_give_the_same_loss(name, reduction):
    x, w, target, kw = case(**OPTIONS[name], reduction=reduction)
    with torch.no_grad():
        want = linear_cross_entropy(x, w, target, return_lse=True, **kw, **CUTE)
    for schedule in SCHEDULES:
        for chunk_size in (128, None):
            got = run(x, w, target, kw, schedule=schedule, chunk_size=chunk_size, **CUTE)[:2]
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # equal bits are the GEMMs' to give


@pytest.mark.parametrize("name, e_route", [("bias", True), ("smoothing", False)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_the_gradients_asked_for_are_computed(reduction, schedule, name, e_route, kernels):
    all_wanted, chunks = None, 3
    for bits in reversed(range(8)):
        x, w, target, kw = case(**{**OPTIONS[name], "bias": True}, reduction=reduction)
        tensors = [x, w, kw["linear_bias"]]
        wants = [bool(bits >> i & 1) for i in range(3)]
        for t, want in zip(tensors, wants, strict=True):
            t.requires_grad_(want)
        kernels.calls.clear()
        loss = linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=128, **kw, **CUTE)
        assert loss.requires_grad == any(wants)
        if not any(wants):
            assert kernels.calls == {
                "compact": 1,
                **dict.fromkeys(("gather", "logits", "recompute_flagged", "rows"), chunks),
            }
            continue
        loss.sum().backward()
        ran = "recompute" if not e_route or (schedule, reduction) == ("chunked", "none") else schedule
        times = {"chunked": chunks, "stored": 1, "recompute": 1}[ran]  # one block of classes
        dx_in_forward = ran == "recompute" and e_route and reduction == "mean"
        calls = kernels.calls
        assert calls["logits"] == calls["recompute_flagged"] == (1 if ran == "stored" else chunks)
        if dx_in_forward and wants[1]:
            times = chunks
        assert calls["dlogits"] == (times if ran == "recompute" and any(wants[dx_in_forward:]) else 0)
        dx_times = chunks if dx_in_forward else times
        assert [calls[n] for n in ("dx", "dw", "bias_sum")] == [
            n * want for n, want in zip((dx_times, times, times), wants, strict=True)
        ]
        assert calls["sort"] == calls["targets"] == (0 if ran == "recompute" else times * wants[1])
        grads = [t.grad for t in tensors]
        assert [g is not None for g in grads] == wants
        all_wanted = all_wanted or grads
        for got, want in zip(grads, all_wanted, strict=True):
            assert got is None or torch.equal(got, want)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lse_alone_may_have_a_gradient(schedule):
    x, w, target, kw = case(**OPTIONS["all"])
    _, lse = linear_cross_entropy(x, w, target, return_lse=True, schedule=schedule, **kw, **CUTE)
    grad_lse = torch.rand(300, **HERE)
    grads = torch.autograd.grad(lse, [x, w], grad_lse)
    want = truth(x, w, target, kw, torch.zeros((), **HERE), grad_lse)[2]
    for got, true in zip(grads, want, strict=False):
        assert norm_error(got, true) <= 4 * unit_roundoff(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)  # fp32: parameters, under autocast
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16, "strided"], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", ["bias", "all"])
def test_grad_weight_out(name, reduction, buffer_dtype, dtype, kernels):
    if dtype == torch.float32 and buffer_dtype == torch.bfloat16:
        pytest.skip("a buffer narrower than the weight is a TypeError")
    x, w, target, kw = case(dtype=dtype, **OPTIONS[name], reduction=reduction)
    buffer = torch.ones(w.shape[1], w.shape[0], **HERE).t() if buffer_dtype == "strided" else None
    buffer = torch.ones(w.shape, dtype=buffer_dtype, **HERE) if buffer is None else buffer
    want = truth(x.detach().bfloat16(), w.detach().bfloat16(), target, kw)[2][1]
    for schedule in ("auto", *SCHEDULES):
        x.grad, w.grad = None, None
        buffer.fill_(1.0)
        with torch.autocast(HERE["device"].type, dtype=torch.bfloat16):
            graphs = [
                linear_cross_entropy(
                    x, w, target, grad_weight_out=buffer, schedule=schedule, chunk_size=128, **kw, **CUTE
                ).sum()
                for _ in range(2)  # two graphs over one buffer: micro-batches
            ]
        assert (buffer == 1).all()  # forward adds nothing
        graphs[0].backward(torch.tensor(0.5, **HERE), retain_graph=True)
        graphs[0].backward(torch.tensor(2.0, **HERE))
        graphs[1].backward(torch.tensor(0.25, **HERE))
        assert w.grad is None
        assert x.grad is not None
        assert norm_error(buffer, 1 + 2.75 * want) <= 4 * unit_roundoff(buffer.dtype) + 4 * unit_roundoff(
            torch.bfloat16
        )


def test_grad_weight_out_is_added_to_in_the_gemm(kernels):
    x, w, target, _ = case()
    buffer = torch.zeros(w.shape, **HERE)
    seen = []
    dw = kernels.dw
    kernels.dw = lambda e, xs, num_live, start, out, add, *more, factor=None: (
        seen.append((out.data_ptr(), add)),
        dw(e, xs, num_live, start, out, add, *more, factor=factor),
    )
    for schedule in ("auto", "recompute"):
        linear_cross_entropy(x, w, target, grad_weight_out=buffer, schedule=schedule, **CUTE).backward()
    assert seen == [(buffer.data_ptr(), True)] * 2


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("schedule", ["chunked", "stored"])
def test_rows_that_pytorch_sorts_give_the_same_bits(schedule, ignored, kernels, monkeypatch):
    x, w, target, _ = case(m=700, v=40)
    target[5] = 10_000  # no class: the loss is NaN, and there is a class -1
    if not ignored:
        target[target == IGNORED] = 3

    def step():
        loss = linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=384, **CUTE)
        return torch.autograd.grad(loss, [x, w])

    want = step()
    monkeypatch.setattr(of_e, "MOST_ROWS_COUNTED", 100)
    sorts = kernels.calls["sort"]
    assert all(map(same_bits, step(), want))
    assert kernels.calls["sort"] > sorts


@pytest.mark.parametrize("buffer", [None, torch.float16, FP32], ids=str)
@pytest.mark.parametrize("options", ["plain", "weight", "all"])
def test_fp16_gradients_of_a_mean_over_many_rows_keep_their_digits(options, buffer):
    """Divided by so many rows, p - onehot would be subnormal."""
    x, w, target, kw = case(m=3000, h=8, v=1000, dtype=torch.float16, **OPTIONS[options])
    if "weight" in kw:
        kw["weight"] = kw["weight"] * 1e6
        if options == "weight":
            target[target == 7] = 8
            kw["weight"][7] = 1e30  # of a class that is no row's target: it must not matter
    loss = linear_cross_entropy(
        x, w, target, **kw, **CUTE,
        grad_weight_out=None if buffer is None else (out := torch.zeros(w.shape, dtype=buffer, **HERE)),
    )  # fmt: skip
    loss.backward()
    dx, dw, *_ = truth(x, w, target, kw)[2]
    assert norm_error(x.grad, dx) <= 4 * unit_roundoff(torch.float16)
    assert norm_error(w.grad if buffer is None else out, dw) <= 4 * unit_roundoff(torch.float16)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autograd_notices_that_grad_weight_out_was_written(schedule):
    x, w, target, _ = case()
    buffer = torch.zeros(w.shape, **HERE)
    loss = linear_cross_entropy(x, w, target, grad_weight_out=buffer, schedule=schedule, **CUTE)
    product = (torch.ones((), requires_grad=True, **HERE) * buffer).sum()  # keeps buffer for its backward
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_grad_weight_out_is_left_alone_where_the_weight_wants_no_gradient():
    x, w, target, _ = case()
    buffer = torch.ones(w.shape, **HERE)
    for schedule in SCHEDULES:
        linear_cross_entropy(x, w.detach(), target, grad_weight_out=buffer, schedule=schedule, **CUTE).backward()
    assert (buffer == 1).all()


def test_no_gradient_flows_to_class_weights():
    x, w, target, kw = case(class_weight=True)
    weight = kw["weight"].requires_grad_()
    linear_cross_entropy(x, w, target, weight=weight, **CUTE).backward()
    assert weight.grad is None


def test_memory_that_was_freed_reaches_no_kernel(kernels):
    x, w, target, _ = case()
    buffer = torch.zeros(w.shape, **HERE)
    loss = linear_cross_entropy(x, w, target, grad_weight_out=buffer, schedule="stored", **CUTE)
    buffer.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"grad_weight_out has shape .* but no memory"):
        loss.backward()
    with pytest.raises(ValueError, match=r"grad_weight_out has shape .* but no memory"):
        linear_cross_entropy(x, w, target, grad_weight_out=buffer, **CUTE)
    assert kernels.calls["dw"] == 0


def test_a_gradient_without_memory_reaches_no_kernel(kernels):
    x, w, target, _ = case()
    loss = linear_cross_entropy(x, w, target, **CUTE)
    with pytest.raises(TypeError, match="an argument is a Wrapper without memory"):
        torch.autograd.grad(loss, x, Wrapper(torch.ones_like(loss)))
    assert kernels.calls["scale"] == 0


def test_torch_func_runs_no_kernel():
    x, w, target, _ = case()
    with pytest.raises(UnsupportedError, match=r'torch\.func .* expected none of them with backend="cute"'):
        torch.func.grad(lambda x: linear_cross_entropy(x, w, target, **CUTE))(x)


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_writes_no_saved_tensor_of_a_graph_that_is_retained(schedule, operators):
    x, w, target, _ = case()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.overrides.BaseTorchFunctionMode() if operators else contextlib.nullcontext():
        loss, lse = linear_cross_entropy(x, w, target, schedule=schedule, return_lse=True, **CUTE)
    before = [t.detach().clone() for t in saved]
    grads = [torch.rand_like(loss), torch.rand_like(lse)]
    first = torch.autograd.grad([loss, lse], [x, w], grads, retain_graph=True)
    for t, want in zip(saved, before, strict=True):
        assert same_bits(t.detach(), want)
    for got, want in zip(torch.autograd.grad([loss, lse], [x, w], grads), first, strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("schedule, reduction", [("stored", "none"), ("chunked", "mean"), ("recompute", "mean")])
def test_backwards_of_a_retained_graph_from_several_threads(schedule, reduction):
    x, w, target, _ = case()
    loss = linear_cross_entropy(x, w, target, schedule=schedule, reduction=reduction, **CUTE)
    given = [torch.rand_like(loss) for _ in range(4)]
    want = [torch.autograd.grad(loss, [x, w], g, retain_graph=True) for g in given]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            loss = linear_cross_entropy(x, w, target, schedule=schedule, reduction=reduction, **CUTE)
            runs = threads.map(functools.partial(torch.autograd.grad, loss, [x, w], retain_graph=True), given)
            for got, expected in zip(runs, want, strict=True):
                assert all(map(same_bits, got, expected))


def test_a_result_that_is_dropped_frees_what_its_node_keeps():
    """Without the garbage collector: no reference cycle through an output."""
    gc.collect()
    gc.disable()
    try:
        for schedule in SCHEDULES:
            x, w, target, _ = case()
            outputs = linear_cross_entropy(x, w, target, schedule=schedule, return_lse=True, **CUTE)
            node = weakref.ref(outputs[0].grad_fn)
            del outputs
            assert node() is None
    finally:
        gc.enable()


def test_double_backward_and_batched_gradients_say_no():
    for schedule in SCHEDULES:
        x, w, target, _ = case()
        loss = linear_cross_entropy(x, w, target, schedule=schedule, **CUTE)
        with pytest.raises(RuntimeError, match="linear_cross_entropy: create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)
        with pytest.raises(RuntimeError, match="linear_cross_entropy: vmap over gradients"):
            torch.autograd.grad(loss, x, torch.ones(2, **HERE), is_grads_batched=True)


def test_activation_checkpointing():
    x, w, target, kw = case(bias=True)
    _, _, want = run(x, w, target, kw, **CUTE)
    loss = torch.utils.checkpoint.checkpoint(
        lambda x: linear_cross_entropy(x, w, target, **kw, **CUTE), x, use_reentrant=False
    )
    torch.testing.assert_close(torch.autograd.grad(loss, parameters(x, w, kw)), want, rtol=0, atol=0)


# --- operators and torch.compile ---


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_opcheck(needs, schedule):
    for reduction in ("mean", "none"):
        x, w, target, kw = case(m=20, bias=True, class_weight=True)
        for t, need in zip(parameters(x, w, kw), needs, strict=True):
            t.requires_grad_(need)
        if schedule == "chunked" and reduction == "none":
            continue  # the rule makes it `recompute`
        dx_in_forward = (schedule, reduction) == ("recompute", "mean")
        options = IGNORED, 0.0, 3.0, 1e-3, reduction, torch.bfloat16, schedule, 128, dx_in_forward, dx_in_forward, needs
        args = x, w, kw["linear_bias"], target, kw["weight"], torch.tensor(9.0, **HERE), None, *options
        # in the order of the fields: compile's own tests of gradients want more digits than bf16 has
        tests = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(on_kernels._fwd_op, args, test_utils=tests)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_who_wants_to_see_operators_gets_the_same_bits(name, reduction, schedule):
    x, w, target, kw = case(**OPTIONS[name], reduction=reduction)
    if reduction == "mean":
        kw["num_items"] = 17
    grad = torch.rand(target.shape if reduction == "none" else (), **HERE)
    for grad_lse in (None, torch.rand(target.shape, **HERE)):
        want = run(x, w, target, kw, grad, grad_lse, schedule=schedule, **CUTE)
        with HERE["device"]:  # a mode
            got = run(x, w, target, kw, grad, grad_lse, schedule=schedule, **CUTE)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("with_buffer", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_compiled_equals_eager_for_many_m_with_two_graphs(return_lse, with_buffer, schedule):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    _, w, _, kw = case(bias=True)
    bias = kw["linear_bias"]

    def step(x, target, n, buffer):
        out = linear_cross_entropy(
            x * 2, w, target, linear_bias=bias, num_items=n, z_loss=1e-3, softcap=5.0, schedule=schedule,
            chunk_size=128, grad_weight_out=buffer, return_lse=return_lse, **CUTE,
        )  # fmt: skip
        return out if return_lse else (out,)

    compiled = torch.compile(step, fullgraph=True, backend=frames)
    for m in (7, 140, 64, 3, 333, 16):
        x, _, target, _ = case(m=m)
        n = torch.tensor(m, **HERE)
        results = []
        for f in (step, compiled):
            buffer = torch.zeros_like(w) if with_buffer else None
            outputs = f(x, target, n, buffer)
            dx, dw, db = torch.autograd.grad(outputs[0], [x, w, bias], torch.tensor(0.5, **HERE), allow_unused=True)
            assert (dw is None) == with_buffer
            results.append([o.detach() for o in outputs] + [dx, buffer if with_buffer else dw, db])
        # compiled code hands a returned lse a gradient of zeros, so `chunked` makes its gradients anew
        torch.testing.assert_close(results[1][: len(outputs)], results[0][: len(outputs)], rtol=0, atol=0)
        for got, want in zip(results[1], results[0], strict=True):
            assert norm_error(got, want.double()) <= (0 if not (return_lse or with_buffer) else 2**-7)
    assert frames.frame_count <= 2  # the first M, then any M


def test_compiled_under_autocast_and_reduction_none():
    torch._dynamo.reset()
    x, w, target, _ = case(dtype=torch.float32)

    def step(x, w, target):
        with torch.autocast(HERE["device"].type, dtype=torch.bfloat16):
            return linear_cross_entropy(x, w, target, reduction="none", label_smoothing=0.1, num_items=None, **CUTE)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got, want = compiled(x, w, target), step(x, w, target)
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(loss.sum(), w)[0] for loss in (got, want)))


def test_compiled_num_items_is_any_number():
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x, w, target, _ = case()
    compiled = torch.compile(
        lambda n: linear_cross_entropy(x, w, target, num_items=n, **CUTE), fullgraph=True, backend=frames
    )
    for n in range(3, 9):
        torch.testing.assert_close(compiled(n), linear_cross_entropy(x, w, target, num_items=n, **CUTE))
    assert frames.frame_count <= 2
