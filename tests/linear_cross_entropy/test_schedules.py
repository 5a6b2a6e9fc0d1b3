"""Linear cross entropy on kernels: launches and memory of schedules, autograd, and operators.

Each test runs on emulated kernels without a GPU, and on a Hopper GPU. test_linear_cross_entropy.py tests the results.
"""

import contextlib
import functools
import gc
import itertools
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import quackish
from quackish.errors import UnsupportedError
from quackish.kernels.gemm.problem import NUM_TICKETS
from quackish.ops.linear_cross_entropy.calls import LossPlan, RowState, Saved, unpack
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.layout import first_classes, recompute_blocks, shared_storage
from quackish.ops.linear_cross_entropy.operators import forward_operator
from quackish.ops.linear_cross_entropy.row_problems import SortArgs
from quackish.testing.errors import same_bits
from tests.linear_cross_entropy.cases import (
    IGNORED,
    OPTIONS,
    REDUCTIONS,
    SCHEDULES,
    hard_rows,
    make,
    norm_error,
    on_kernels,
    parameters,
    truth,
    unit_roundoff,
)
from tests.variants import few_of
from tests.wrapper_tensor import Wrapper

pytestmark = on_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- against truth ---


@pytest.mark.parametrize("name", ["plain", "bias", "all"])
@pytest.mark.parametrize("m, h, v, columns", [(40, 64, 1000, 512), (40, 64, 256, None), (40, 128, 513, 256)])
def test_exp_logits_in_storage_of_dw(m, h, v, columns, name, limits, path):
    limits(SHARED_FROM=0)
    x, w, target, kw = path.case(m, h, v, **OPTIONS[name])
    plan = shared_storage(m, v, h, 2)
    assert (plan.v1 if plan else None) == columns
    path.check(x, w, target, kw, schedule="chunked")
    if name != "all":
        assert path.calls["dw"] == (1 if columns is None else 2)


@pytest.mark.parametrize("dtype, dw_dtype", [(BF16,) * 2, (FP16,) * 2, (BF16, FP32)])
@pytest.mark.parametrize("name", ["plain", "all"])
@pytest.mark.parametrize("ignored", [False, True])
def test_dlogits_in_storage_of_dw(ignored, name, dtype, dw_dtype, limits, path):
    limits(scratch_columns=lambda *args: 256)
    m, h, v = 200, 64, 2500
    x, w, target, kw = path.case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    if ignored:
        target.fill_(IGNORED)
    blocks = recompute_blocks(m, v, h, dw_dtype.itemsize, 256)
    assert sum(block.offset is not None for block in blocks) > 1
    with torch.autocast(path.device.type, dtype=dtype, enabled=dw_dtype == FP32):
        for reduction in ("mean", "none"):
            path.calls.clear()
            options = dict(reduction=reduction, schedule="recompute")
            _, _, grads = path.run(x, w, target, kw, **options)
            assert path.calls["dlogits"] == path.calls["dx"] == path.calls["dw"] == len(blocks)
            rounded = [t.detach().to(dtype) for t in (x, w)]
            for got, want in zip(grads, truth(*rounded, target, kw | {"reduction": reduction})[2], strict=True):
                assert norm_error(got, want) <= 4 * unit_roundoff(dtype)
            buffer = torch.zeros(w.shape, **path.here)  # no dW whose storage could be used
            loss = path.call(x, w, target, grad_weight_out=buffer, **kw, **options)
            loss.sum().backward()
            assert norm_error(buffer, grads[1].double()) <= 2 * unit_roundoff(dtype)


@pytest.mark.parametrize(
    "m, live, name, dw_dtype",
    [
        *((m, live, "plain", FP32) for m, live in ((600, 600), (600, 130), (600, 0), (300, 300))),
        (600, 130, "softcap", BF16),
        (600, 130, "weight", BF16),
    ],
)
def test_recompute_starts_dw_in_forward(m, live, name, dw_dtype, narrow, path):
    h, v = 512, 4000
    x, w, target, kw = path.case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    target[: m - live] = IGNORED
    columns, _, part_rows = first_classes(m, v, h, dw_dtype.itemsize)
    parts, blocks = -(-m // part_rows), recompute_blocks(m, v, h, dw_dtype.itemsize, 256)
    assert columns == blocks[0].v1 > 256
    options = dict(schedule="recompute", **kw)
    with torch.autocast(path.device.type, dtype=BF16, enabled=dw_dtype == FP32):
        loss = path.call(x, w, target, **options)
        assert (path.calls["logits"], path.calls["dx"], path.calls["dw"]) == (parts, parts, 1)
        first = torch.autograd.grad(loss * 0.7, [x, w], retain_graph=True)
        assert (path.calls["dlogits"], path.calls["dw"]) == (len(blocks) - 1, len(blocks))
        again = torch.autograd.grad(loss * 0.7, [x, w])
        assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))
        path.calls.clear()
        (only_dx,) = torch.autograd.grad(path.call(x, w.detach(), target, **options) * 0.7, [x])
        assert path.calls["dw"] == path.calls["dlogits"] == 0
    rounded = [t.detach().bfloat16() for t in (x, w)]
    wants = truth(*rounded, target, kw)[2]
    for got, want in zip(first, wants, strict=True):
        assert norm_error(got, 0.7 * want) <= 4 * unit_roundoff(BF16)
    assert norm_error(only_dx, 0.7 * wants[0]) <= 4 * unit_roundoff(BF16)


@pytest.fixture
def keeps_first(limits):
    """Makes "auto" keep exp_logits of the first 128 rows, and divide the classes into several blocks."""
    limits(STORED_BYTES=0, rows_to_keep=lambda *args: 128, scratch_columns=lambda *args: 256, KEPT_BLOCK=512)


LIVE = {300: "plain", 200: "bias", 128: "scaled", 60: "plain", 0: "bias"}


@pytest.mark.parametrize("dw_dtype", [BF16, FP32])
@pytest.mark.parametrize("live, name", few_of(LIVE.items(), LIVE, ("plain", "bias", "scaled")))
def test_exp_logits_of_the_first_chunk_are_kept(live, name, dw_dtype, keeps_first, path):
    m, h, v = 300, 64, 2500
    x, w, target, kw = path.case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    target[: m - live] = IGNORED
    grad = torch.rand(m, **path.here)
    with torch.autocast(path.device.type, dtype=BF16, enabled=dw_dtype == FP32):
        loss = path.call(x, w, target, reduction="none", **kw)
        assert path.calls["logits"] == 3  # chunks of 128 rows
        blocks = recompute_blocks(m - 128, v, h, dw_dtype.itemsize, 256, 512)
        inputs = parameters(x, w, kw)
        path.calls.clear()
        grads = torch.autograd.grad(loss, inputs, grad, retain_graph=True)
        assert path.calls["dlogits"] == path.calls["TargetsArgs"] == len(blocks) > 4
        assert path.calls["dw"] == 2 * len(blocks)
        assert path.calls["dx"] == 1 + len(blocks)
        again = torch.autograd.grad(loss, inputs, grad, retain_graph=True)
        (only_dx,) = torch.autograd.grad(path.call(x, w.detach(), target, reduction="none", **kw), [x], grad)
        buffer = torch.zeros(w.shape, **path.here)
        path.call(x, w, target, reduction="none", grad_weight_out=buffer, **kw).backward(grad)
        all_recomputed = path.call(x, w, target, reduction="none", schedule="recompute", **kw)
    assert same_bits(loss, all_recomputed)
    assert all(map(same_bits, grads, again))
    rounded = [t.detach().bfloat16() for t in (x, w)]
    true_loss, _, wants = truth(*rounded, target, kw | {"reduction": "none"}, grad)
    torch.testing.assert_close(loss.double(), true_loss, rtol=1e-4, atol=1e-4)
    for got, want in zip([*grads, only_dx, buffer], [*wants, *wants[:2]], strict=True):
        assert norm_error(got, want) <= 4 * unit_roundoff(BF16)


@pytest.mark.parametrize("output", ["lse", "log_prob", "entropy"])
def test_gradients_of_statistics_with_kept_exp_logits(output, keeps_first, path):
    x, w, target, _ = path.case(300, 64, 2500)
    _, stats = path.call(x, w, target, return_stats=True)
    grad = torch.rand(300, **path.here)
    path.calls.clear()
    got = torch.autograd.grad(getattr(stats, output), [x, w], grad)
    recomputes_all = output == "entropy"
    assert (path.calls["TargetsArgs"] == 0) == recomputes_all
    x64, w64 = (t.detach().double().requires_grad_() for t in (x, w))
    _, true = quackish.linear_cross_entropy(x64, w64, target, return_stats=True)
    for mine, want in zip(got, torch.autograd.grad(getattr(true, output), [x64, w64], grad.double()), strict=True):
        assert norm_error(mine, want) <= 4 * unit_roundoff(BF16)


@pytest.mark.exhaustive
def test_kept_exp_logits_are_compiled(keeps_first, path):
    """One graph for several M."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def step(x, w, target):
        return path.call(x * 1, w, target, reduction="none")

    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for m in (300, 290, 257):
        x, w, target, _ = path.case(m, 64, 2500)
        path.calls.clear()
        want, got = (torch.autograd.grad(f(x, w, target).sum(), [x, w]) for f in (step, compiled))
        assert path.calls["TargetsArgs"] > 0
        assert all(map(same_bits, got, want))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dw_dtype", [FP32, pytest.param(BF16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("where", ["below", "above", "at"])
def test_targets_around_the_end_of_the_first_classes(where, dw_dtype, narrow, path):
    m, h, v = 600, 512, 4000
    x, w, target, _ = path.case(m, h, v, dtype=dw_dtype)
    split, _, _ = first_classes(m, v, h, dw_dtype.itemsize)
    first, last = {"below": (0, split), "above": (split, v), "at": (split - 1, split + 1)}[where]
    live = target != IGNORED
    target[live] = first + target[live] % (last - first)
    with torch.autocast(path.device.type, dtype=BF16, enabled=dw_dtype == FP32):
        loss = path.call(x, w, target, schedule="recompute")
        assert path.calls["dw"] == path.calls["SortArgs"] == 1
        dx, dw = torch.autograd.grad(loss, [x, w])
    want_dx, want_dw = truth(*[t.detach().bfloat16() for t in (x, w)], target, {})[2]
    assert norm_error(dx, want_dx) <= 4 * unit_roundoff(BF16)
    for part in (slice(split - 1), slice(split - 1, split), slice(split, split + 1), slice(split + 1, v)):
        assert norm_error(dw[part], want_dw[part]) <= 4 * unit_roundoff(BF16)
    if where == "at":  # many targets, added in fp32: only the final rounding
        assert norm_error(dw[split - 1], want_dw[split - 1]) <= 0.5 * unit_roundoff(BF16)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mean", [2.0, 8.0])
@pytest.mark.parametrize("v", [16, 1000])
def test_gradients_with_cancellation(v, mean, schedule, path):
    """With a mean in x and targets drawn from the model, softmax and target terms of dW nearly cancel."""
    m, h = 2048, 64
    make = torch.Generator().manual_seed(0)
    x = torch.randn(m, h, generator=make)
    x[:, :2] += mean
    w = (torch.randn(v, h, generator=make) * 0.05).bfloat16()
    x = x.bfloat16()
    target = torch.multinomial((x.double() @ w.double().T).softmax(1), 1, generator=make)[:, 0]
    x, w, target = x.to(**path.here).requires_grad_(), w.to(**path.here).requires_grad_(), target.to(**path.here)
    true = truth(x, w, target, {})[2]
    logits = F.linear(x, w) if x.is_cuda else (x.float() @ w.float().T).bfloat16()
    dlogits = torch.autograd.grad(F.cross_entropy(logits.float(), target), logits)[0]
    theirs = (dlogits.T.float() @ x.float()).bfloat16()  # rounded as in torch's GEMM
    loss = path.call(x, w, target, schedule=schedule)
    _, dw = torch.autograd.grad(loss, [x, w])
    assert norm_error(dw, true[1]) <= 1.02 * norm_error(theirs, true[1])


@pytest.mark.parametrize("dw_dtype", [FP32, pytest.param(BF16, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["plain", "bias", "softcap"])
@pytest.mark.parametrize("ignored", [False, True])
def test_recompute_with_a_chunk_size(ignored, name, dw_dtype, limits, path):
    """dW is summed over chunks, one block of classes at a time."""
    limits(DW_BLOCK=1504)
    m, h, v, chunk = 300, 256, 4004, 128
    x, w, target, kw = path.case(m, h, v, dtype=dw_dtype, **OPTIONS[name])
    target[: 270 if ignored else 0] = IGNORED  # of three chunks, one with live rows
    inputs = parameters(x, w, kw)
    with torch.autocast(path.device.type, dtype=BF16, enabled=dw_dtype == FP32):
        loss = path.call(x, w, target, schedule="recompute", chunk_size=chunk, **kw)
        first = torch.autograd.grad(loss, inputs, retain_graph=True)
        assert path.calls["dlogits"] == path.calls["dw"] == 9
        assert path.calls["dx"] == path.calls["logits"] == 3
        again = torch.autograd.grad(loss, inputs)
    rounded = [t.detach().bfloat16() for t in (x, w)]
    for got, other, want in zip(first, again, truth(*rounded, target, kw)[2], strict=True):
        assert norm_error(got, want) <= 4 * unit_roundoff(BF16)
        assert same_bits(got, other)


def test_no_kernel_for_other_dtypes_and_widths(path):
    x, w, target, _ = make(dtype=FP32, device=path.device)
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: no kernel for torch\.float32"):
        path.call(x, w, target)
    x, w, target, _ = make(h=12, dtype=BF16, device=path.device)
    with pytest.raises(UnsupportedError, match="linear_cross_entropy: no kernel for linear_weight with 12 columns"):
        path.call(x, w, target)


def test_flagged_rows_with_exp_logits_in_two_buffers(limits, path):
    limits(SHARED_FROM=0)
    x, w, target = hard_rows(BF16, path.device)
    x, target = x[:16].detach().requires_grad_(), target[:16]  # few rows, so that exp_logits also lie in dW
    path.check(x, w, target, dict(reduction="sum"), schedule="chunked")
    assert path.calls["logits"] == 1
    assert path.calls["dw"] == 2


def shifted(t):
    """A copy that does not start on 16 bytes, as in a buffer of many tensors."""
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def spread(t):
    """A copy whose elements are apart."""
    return torch.stack([t, t], -1)[..., 0]


CHANGES = {"dense": functools.partial(torch.clone, memory_format=torch.contiguous_format)}
CHANGES |= {"shifted": shifted, "spread": spread}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("v, change", [(33, "dense"), (700, "dense"), (64, "shifted"), (700, "spread")])
def test_saved_tensors_in_other_memory(v, change, schedule, path):
    x, w, target, kw = path.case(v=v, bias=True)
    want = path.run(x, w, target, kw, schedule=schedule)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: CHANGES[change](t) if t.dim() else t):
        got = path.run(x, w, target, kw, schedule=schedule)
    for one, other in zip([*got[:2], *got[2]], [*want[:2], *want[2]], strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_alignment_is_not_of_the_signature(schedule, path):
    x, w, target, kw = path.case(bias=True)
    shifted = x.detach().new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x.detach()).requires_grad_()
    for given in (x, shifted, x):
        path.check(given, w, target, kw, schedule=schedule)


def test_saved_targets_of_another_dtype(path):
    x, w, target, _ = path.case()
    want = torch.autograd.grad(path.call(x, w, target), [x, w])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.int() if t.dtype == torch.int64 else t, lambda t: t):
        loss = path.call(x, w, target, schedule="chunked")
    for retain_graph in (True, False):  # the second backward pass runs forward again
        assert all(map(same_bits, torch.autograd.grad(loss, [x, w], retain_graph=retain_graph), want))


@pytest.mark.parametrize("shape", [(20,), (4, 5)])
def test_outputs_may_be_modified(shape, path):
    x, w, target, _ = path.case(m=20)
    x, target = x.detach().view(*shape, -1).requires_grad_(), target.view(shape)
    loss, lse = path.call(x, w, target, reduction="none", return_lse=True)
    loss *= 2
    lse.mul_(3)
    (loss.sum() + lse.sum()).backward()
    again, more = path.call(x, w, target, reduction="none", return_lse=True)
    (want,) = torch.autograd.grad((2 * again).sum() + (3 * more).sum(), x)
    torch.testing.assert_close(x.grad, want)


# --- autograd ---


def test_chunked_returns_forward_gradients_once(path):
    x, w, target, kw = path.case(**OPTIONS["bias"])
    loss = path.call(x, w, target, schedule="chunked", **kw)
    path.calls.clear()
    loss.backward(retain_graph=True)
    assert path.calls == {"scale": 2}  # dx and dw; db, which is fp32
    loss.backward()
    assert path.calls["logits"] == 1
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_retained_graph_detects_modified_inputs(path):
    x, w, target, kw = path.case()
    loss = path.call(x, w, target, schedule="chunked", **kw)
    loss.backward(retain_graph=True)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("name, e_route", [("bias", True), ("smoothing", False)])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_required_gradients_are_computed(reduction, schedule, name, e_route, path):
    all_wanted, chunks = None, 3
    for wants in itertools.product((True, False), repeat=3):
        x, w, target, kw = path.case(**{**OPTIONS[name], "bias": True}, reduction=reduction)
        tensors = [t.requires_grad_(want) for t, want in zip(parameters(x, w, kw), wants, strict=True)]
        path.calls.clear()
        loss = path.call(x, w, target, schedule=schedule, chunk_size=128, **kw)
        assert loss.requires_grad == any(wants)
        if not any(wants):
            each_chunk = dict.fromkeys(("GatherArgs", "logits", "RowsArgs"), chunks)
            assert path.calls == {"compact": 1, **each_chunk}
            continue
        loss.sum().backward()
        ran = "recompute" if not e_route or (schedule, reduction) == ("chunked", "none") else schedule
        times = {"chunked": chunks, "stored": 1, "recompute": 1}[ran]  # one block of classes
        dx_in_forward = ran == "recompute" and e_route and reduction == "mean"
        calls = path.calls
        assert calls["logits"] == (1 if ran == "stored" else chunks)
        if dx_in_forward and wants[1]:
            times = chunks
        assert calls["dlogits"] == (times if ran == "recompute" and any(wants[dx_in_forward:]) else 0)
        dx_times = chunks if dx_in_forward else times
        for kernel, n, want in zip(("dx", "dw", "BiasArgs"), (dx_times, times, times), wants, strict=True):
            assert calls[kernel] == n * want
        assert calls["SortArgs"] == calls["TargetsArgs"] == (0 if ran == "recompute" else times * wants[1])
        grads = [t.grad for t in tensors]
        assert [g is not None for g in grads] == list(wants)
        all_wanted = all_wanted or grads
        assert all(g is None or torch.equal(g, want) for g, want in zip(grads, all_wanted, strict=True))


def test_gradients_of_two_dtypes_are_scaled(path):
    grads = []
    for factor in (1, 3):
        x, w, target, kw = path.case(bias=True)
        kw["linear_bias"] = kw["linear_bias"].detach().float().requires_grad_()
        loss = path.call(x, w.detach(), target, schedule="chunked", **kw)
        grads.append(torch.autograd.grad(factor * loss, (x, kw["linear_bias"])))
    (_, once), (_, scaled) = grads
    assert torch.equal(scaled, 3 * once)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_gradient_of_lse_alone(schedule, path):
    x, w, target, kw = path.case(**OPTIONS["all"])
    _, lse = path.call(x, w, target, return_lse=True, schedule=schedule, **kw)
    grad_lse = torch.rand(300, **path.here)
    grads = torch.autograd.grad(lse, [x, w], grad_lse)
    want = truth(x, w, target, kw, torch.zeros((), **path.here), grad_lse)[2]
    for got, true in zip(grads, want, strict=False):
        assert norm_error(got, true) <= 4 * unit_roundoff(BF16)


def test_grad_weight_out_is_added_to_in_the_gemm(path):
    x, w, target, _ = path.case()
    buffer = torch.zeros(w.shape, **path.here)
    seen = []
    dw = path.kernels.dw
    path.kernels.dw = lambda e, xs, state, start, out, add, *more: (
        seen.append((out.data_ptr(), add)),
        dw(e, xs, state, start, out, add, *more),
    )
    for schedule in ("auto", "recompute"):
        path.call(x, w, target, grad_weight_out=buffer, schedule=schedule).backward()
    assert seen == [(buffer.data_ptr(), True)] * 2


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("schedule", ["chunked", "stored"])
def test_pytorchs_sort_gives_the_same_bits(schedule, ignored, request, path):
    x, w, target, _ = path.case(m=700, v=40)
    target[5] = 10_000  # invalid target: the loss is NaN, and slot_target has a -1
    if not ignored:
        target[target == IGNORED] = 3

    def step():
        loss = path.call(x, w, target, schedule=schedule, chunk_size=384)
        return torch.autograd.grad(loss, [x, w])

    presorted, launch = [], path.kernels.launch
    path.kernels.launch = lambda args, *problem: (
        presorted.append(args.index is not None) if isinstance(args, SortArgs) else None,
        launch(args, *problem),
    )
    want = step()
    request.getfixturevalue("few_rows_counted")
    assert all(map(same_bits, step(), want))
    chunks = len(presorted) // 2
    assert chunks
    assert presorted == [False] * chunks + [True] * chunks


BUFFERS = {"plain": None, "weight": FP16, "scaled": FP32, "all": None}


@pytest.mark.parametrize("options, buffer", few_of(BUFFERS.items(), BUFFERS, (None, FP16, FP32)))
def test_fp16_gradients_of_mean_over_many_rows_are_accurate(options, buffer, path):
    """(p - onehot) / rows would be subnormal in fp16."""
    x, w, target, kw = path.case(m=3000, h=8, v=1000, dtype=FP16, **OPTIONS[options])
    if "weight" in kw:
        kw["weight"] = kw["weight"] * 1e6
        if options == "scaled":
            kw |= dict(logit_scale=1e5, softcap=None, z_loss=0.0)  # such dlogits would be infinite
        if options == "weight":
            target[target == 7] = 8
            kw["weight"][7] = 1e30  # no target has this class, so it must have no effect
    out = None if buffer is None else torch.zeros(w.shape, dtype=buffer, **path.here)
    path.call(x, w, target, grad_weight_out=out, **kw).backward()
    dx, dw, *_ = truth(x, w, target, kw)[2]
    for got, want in (x.grad, dx), (w.grad if out is None else out, dw):
        assert norm_error(got, want) <= 4 * unit_roundoff(FP16)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autograd_detects_writes_to_grad_weight_out(schedule, path):
    x, w, target, _ = path.case()
    buffer = torch.zeros(w.shape, **path.here)
    loss = path.call(x, w, target, grad_weight_out=buffer, schedule=schedule)
    product = (torch.ones((), requires_grad=True, **path.here) * buffer).sum()  # saves buffer for its backward
    loss.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("name", ["input", "linear_weight", "target"])
def test_arguments_without_memory_raise(name, path):
    x, w, target, _ = path.case()
    args = dict(input=x.detach(), linear_weight=w.detach(), target=target)
    args[name].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=rf"linear_cross_entropy: {name} has shape .* but no memory"):
        path.call(*args.values())


def test_tensors_without_memory_raise(path):
    x, w, target, _ = path.case()
    buffer = torch.zeros(w.shape, **path.here)
    loss = path.call(x, w, target, grad_weight_out=buffer, schedule="stored")
    buffer.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"grad_weight_out has shape .* but no memory"):
        loss.backward()
    with pytest.raises(ValueError, match=r"grad_weight_out has shape .* but no memory"):
        path.call(x, w, target, grad_weight_out=buffer)
    assert path.calls["dw"] == 0

    loss = path.call(x, w, target)
    with pytest.raises(TypeError, match="an argument is a Wrapper without memory"):
        torch.autograd.grad(loss, x, Wrapper(torch.ones_like(loss)))
    assert path.calls["scale"] == 0

    path.calls.clear()
    with pytest.raises(UnsupportedError, match=r'torch\.func .* expected none of them with backend="cute"'):
        torch.func.grad(lambda x: path.call(x, w, target))(x)
    assert not path.calls


@pytest.mark.parametrize("operators", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_backward_of_retained_graph_modifies_no_saved_tensor(schedule, operators, path):
    x, w, target, _ = path.case()
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t)
    with hooks, torch.overrides.BaseTorchFunctionMode() if operators else contextlib.nullcontext():
        loss, lse = path.call(x, w, target, schedule=schedule, return_lse=True)
    before = [t.detach().clone() for t in saved]
    grads = [torch.rand_like(loss), torch.rand_like(lse)]
    first = torch.autograd.grad([loss, lse], [x, w], grads, retain_graph=True)
    for t, want in zip(saved, before, strict=True):
        assert same_bits(t.detach(), want)
    for got, want in zip(torch.autograd.grad([loss, lse], [x, w], grads), first, strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("schedule, reduction", [("stored", "none"), ("chunked", "mean"), ("recompute", "mean")])
def test_concurrent_backwards_of_retained_graph(schedule, reduction, path):
    x, w, target, _ = path.case()
    loss = path.call(x, w, target, schedule=schedule, reduction=reduction)
    given = [torch.rand_like(loss) for _ in range(4)]
    want = [torch.autograd.grad(loss, [x, w], g, retain_graph=True) for g in given]
    with ThreadPoolExecutor(4) as threads:
        for _ in range(5):
            loss = path.call(x, w, target, schedule=schedule, reduction=reduction)
            runs = threads.map(functools.partial(torch.autograd.grad, loss, [x, w], retain_graph=True), given)
            for got, expected in zip(runs, want, strict=True):
                assert all(map(same_bits, got, expected))


@pytest.mark.parametrize("schedule", ["stored", "recompute"])
def test_concurrent_backwards_have_separate_tickets(schedule, path):
    x, w, target, _ = path.case()
    loss = path.call(x, w, target, schedule=schedule)
    want = torch.autograd.grad(loss, [x, w], retain_graph=True)
    _, saved, _ = unpack(loss.grad_fn.saved_tensors, Inputs, Saved)
    state = RowState.from_memory(saved.state.data, x.shape[0])  # data: autograd must not see the write
    tickets = state.tensor("tickets", NUM_TICKETS).fill_(1)  # as during another backward
    got = torch.autograd.grad(loss, [x, w], retain_graph=True)
    assert all(map(same_bits, got, want))
    assert (tickets == 1).all()


@pytest.mark.parametrize("schedule, dtype", [("stored", BF16), ("recompute", FP16)])
def test_backward_can_be_retried_after_out_of_memory(schedule, dtype, path, monkeypatch):
    x, w, target, kw = path.case(dtype=dtype, class_weight=True)
    loss, other = (path.call(x, w, target, schedule=schedule, **kw) for _ in range(2))
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(path.kernels.kernels, "dx", Mock(side_effect=torch.OutOfMemoryError))
        torch.autograd.grad(loss, [x, w])
    assert all(map(same_bits, torch.autograd.grad(loss, [x, w]), torch.autograd.grad(other, [x, w])))


def test_dropped_result_frees_its_graph(path):
    """No reference cycle through an output: the graph is freed without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        for schedule in SCHEDULES:
            x, w, target, _ = path.case()
            outputs = path.call(x, w, target, schedule=schedule, return_lse=True)
            node = weakref.ref(outputs[0].grad_fn)
            del outputs
            assert node() is None
    finally:
        gc.enable()


def test_batched_gradients_raise(path):
    for schedule in SCHEDULES:
        x, w, target, _ = path.case()
        loss = path.call(x, w, target, schedule=schedule)
        with pytest.raises(RuntimeError, match="linear_cross_entropy: vmap over gradients"):
            torch.autograd.grad(loss, x, torch.ones(2, **path.here), is_grads_batched=True)


# --- operators and torch.compile ---


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("needs", [[True, True, True], [False, True, False]])
def test_opcheck(needs, schedule, path):
    for reduction in ("mean", "none"):
        x, w, target, kw = path.case(m=20, bias=True, class_weight=True)
        for t, need in zip(parameters(x, w, kw), needs, strict=True):
            t.requires_grad_(need)
        if schedule == "chunked" and reduction == "none":
            continue  # the rule makes it `recompute`
        dx_in_forward = (schedule, reduction) == ("recompute", "mean")
        plan = LossPlan(
            ignore_index=IGNORED, label_smoothing=0.0, softcap=3.0, z_loss=1e-3, reduction=reduction,
            return_stats=reduction == "none", compute_dtype=BF16, why_portable=None, schedule=schedule, chunk_rows=128,
            dx_in_forward=dx_in_forward, dw_in_chunks=dx_in_forward,
        )  # fmt: skip
        scale, items = torch.tensor(0.7, **path.here), torch.tensor(9.0, **path.here)
        inputs = Inputs(x, w, target, kw["linear_bias"], kw["weight"], scale, items)
        args = *inputs, *plan, needs
        # without the gradient tests of torch.compile, which are too strict for bf16
        tests = "test_schema", "test_autograd_registration", "test_faketensor"
        torch.library.opcheck(forward_operator.overload, args, test_utils=tests)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["bias", "all"])
def test_operators_give_the_same_bits(name, reduction, schedule, path):
    x, w, target, kw = path.case(**OPTIONS[name], reduction=reduction)
    if reduction == "mean":
        kw["num_items"] = 17
    grad = torch.rand(target.shape if reduction == "none" else (), **path.here)
    for grad_lse in (None, torch.rand(target.shape, **path.here)):
        want = path.run(x, w, target, kw, grad, grad_lse, schedule=schedule)
        with path.device:  # a mode
            got = path.run(x, w, target, kw, grad, grad_lse, schedule=schedule)
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name, numbers", [("num_items", range(3, 9)), ("logit_scale", [0.5, 0.7, 1.5, 2.0, 3.0])])
@pytest.mark.exhaustive
def test_compiled_code_accepts_any_number(name, numbers, path):
    torch._dynamo.reset()
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    x, w, target, _ = path.case()
    compiled = torch.compile(lambda n: path.call(x, w, target, **{name: n}), fullgraph=True, backend=frames)
    for n in numbers:
        torch.testing.assert_close(compiled(n), path.call(x, w, target, **{name: n}))
    assert frames.frame_count <= 2
