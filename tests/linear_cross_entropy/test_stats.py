"""`return_stats` of linear_cross_entropy: lse, log_prob, entropy, predicted, and their gradients."""

import itertools

import pytest
import torch

from quackish import linear_cross_entropy
from quackish.ops.linear_cross_entropy.reference import linear_cross_entropy_forward
from quackish.testing.errors import same_bits
from tests.linear_cross_entropy.cases import (
    IGNORED,
    OPTIONS,
    SCHEDULES,
    Path,
    hard_rows,
    norm_error,
    on_every_path,
    on_kernels,
    parameters,
    unit_roundoff,
)

FP64 = torch.float64
NAN = float("nan")
EVERY_COMBINATION = [c for c in itertools.product((False, True), repeat=4) if any(c)]
SMOOTHED = ["plain", "unsmoothed", "all"]


def outputs(f, x, w, target, kw, **options):
    """[loss, lse, log_prob, entropy, predicted]"""
    loss, stats = f(x, w, target, return_stats=True, **kw, **options)
    return [loss, *stats]


def truth(x, w, target, kw):
    """(outputs of the reference in fp64, its tensors that require grad)"""
    kw = {k: t.detach().double() if isinstance(t, torch.Tensor) else t for k, t in kw.items()}
    leaves = parameters(x.detach().double(), w.detach().double(), kw)
    for t in leaves:
        t.requires_grad_()
    return outputs(linear_cross_entropy_forward, *leaves[:2], target, kw), leaves


def check(path: Path, x, w, target, kw, combinations=(), **options):
    """Compares statistics, and gradients of each combination of outputs, with truth."""
    got, (want, true_leaves) = outputs(path.call, x, w, target, kw, **options), truth(x, w, target, kw)
    exact = x.dtype == FP64
    close = max(path.close, 2e-6) if path.kernels else 1e-11 if exact else 2e-6
    if path.approximates and not exact:
        close += 2**-20 * (kw.get("softcap") or 0.0)
    assert torch.equal(got[4], want[4])
    assert got[4].dtype == torch.int64
    assert not got[4].requires_grad
    for one, true in zip(got[:4], want[:4], strict=True):
        assert one.dtype == torch.promote_types(x.dtype, torch.float32)
        torch.testing.assert_close(one.double(), true, rtol=close, atol=close, equal_nan=True)
    leaves = parameters(x, w, kw)
    weights = [torch.randn(t.shape, dtype=t.dtype, device=t.device) for t in got[:4]]
    for combination in combinations:
        chosen = [i for i in range(4) if combination[i]]
        grads, true_grads = (
            torch.autograd.grad([of[i] for i in chosen], by, [weights[i].to(of[i].dtype) for i in chosen], True)
            for of, by in ((got, leaves), (want, true_leaves))
        )
        for one, true in zip(grads, true_grads, strict=True):
            assert norm_error(one, true) <= (1e-11 if exact else 4 * unit_roundoff(x.dtype)), combination


def masked(kw, target):
    """Masks class 3, after removing it from the targets."""
    if "linear_bias" in kw:
        target[target == 3] = 4
        kw["linear_bias"].data[3] = -torch.inf
    return kw


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_reference_matches_categorical_distribution(softcap):
    x, w, target = torch.randn(9, 8, dtype=FP64), torch.randn(11, 8, dtype=FP64), torch.randint(11, (9,))
    x.requires_grad_()
    target[4] = IGNORED
    live = target != IGNORED
    _, _, log_prob, entropy, predicted = outputs(linear_cross_entropy_forward, x, w, target, dict(softcap=softcap))
    logits = x @ w.T if softcap is None else softcap * torch.tanh(x @ w.T / softcap)
    of = torch.distributions.Categorical(logits=logits)
    want = of.log_prob(target.clamp(min=0)).where(live, 0.0), of.entropy().where(live, 0.0)
    torch.testing.assert_close((log_prob, entropy), want)
    assert torch.equal(predicted, logits.argmax(1).where(live, -1))
    weights = torch.randn(2, 9, dtype=FP64)
    got, want = (torch.autograd.grad(pair, x, list(weights)) for pair in ((log_prob, entropy), want))
    torch.testing.assert_close(got, want)


@on_every_path
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name, path):
    for dtype in path.dtypes:
        x, w, target, kw = path.case(dtype=dtype, **OPTIONS[name])
        with torch.no_grad():
            check(path, x, w, target, masked(kw, target), chunk_size=path.chunk_size)


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SMOOTHED)
def test_every_combination_of_gradients(name, schedule, path):
    x, w, target, kw = path.case(**OPTIONS[name])
    options = dict(schedule=schedule, chunk_size=path.chunk_size)
    check(path, x, w, target, masked(kw, target), EVERY_COMBINATION, **options)
    kw["reduction"] = "none"
    check(path, x, w, target, kw, [(True, True, True, True)], **options)


@on_kernels
def test_gradients_in_fp16(path):
    x, w, target, kw = path.case(dtype=torch.float16, **OPTIONS["all"])
    check(path, x, w, target, kw, EVERY_COMBINATION[::4])


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_flagged_and_confident_rows(schedule, path):
    dtype = FP64 if path.kernels is None else torch.bfloat16
    x, w, target = hard_rows(dtype, path.device)
    check(path, x, w, target, {}, [(False, False, True, False), (False, False, False, True)], schedule=schedule)


@on_every_path
def test_ties_go_to_the_first_class(path):
    ties = [(0, 1), (3, 4), (5, 13), (10, 16), (63, 64), (7, 71), (191, 192), (2, 699), (200, 210), (383, 500)]
    x, w = torch.zeros(len(ties) + 1, 64), torch.randn(700, 64) * 0.1
    for i, pair in enumerate(ties):
        x[i, i], w[list(pair)] = 4.0, torch.nn.functional.one_hot(torch.tensor(i), 64).float()
    x, w = (t.to(path.device, path.dtypes[0]) for t in (x, w))  # the last row's logits are all 0
    for target in torch.zeros(len(x), dtype=torch.int64, device=path.device), torch.arange(len(x), **path.here) + 300:
        predicted = path.call(x, w, target, return_stats=True)[1].predicted
        assert predicted.tolist() == [a for a, _ in ties] + [0]


@on_every_path
def test_ties_are_decided_before_logit_scale(path):
    dtype = torch.bfloat16 if path.kernels else torch.float32
    x = torch.tensor([[1.0, 2.0**-23] + [0.0] * 6], dtype=dtype, **path.here)
    w = torch.tensor([[1.9375, 0.0], [1.9375, 1.0]], dtype=dtype, **path.here)
    w = torch.nn.functional.pad(w, (0, 6))
    logits = w[:, :2].float() @ x[0, :2].float()
    assert logits[0] < logits[1]
    assert logits[0] * 1.1 == logits[1] * 1.1
    target = torch.zeros(1, dtype=torch.int64, **path.here)
    assert path.call(x, w, target, return_stats=True, logit_scale=1.1)[1].predicted.tolist() == [1]


@on_every_path
def test_ignored_nan_and_invalid_rows(path):
    x, w, target, _ = path.case()
    x.data[4] = NAN
    on_cpu = path.kernels is None and path.device.type == "cpu"  # an IndexError
    bad = [] if on_cpu else [7, 8]
    clean = x.detach().clone()
    clean[4] = 0
    want = outputs(path.call, clean, w, target, {})[1:]
    target[bad] = torch.tensor([w.shape[0], -7], **path.here)[: len(bad)]
    got = outputs(path.call, x, w, target, {})[1:]
    for one, all_right in zip(got, want, strict=True):
        all_right[4] = -1 if one.dtype == torch.int64 else NAN
        if one is got[1]:
            all_right[bad] = NAN
        # rows with invalid targets have another row_shift
        others = [i for i in range(len(target)) if i not in bad]
        torch.testing.assert_close(one[others], all_right[others], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(one[bad], all_right[bad], rtol=1e-6, atol=1e-6, equal_nan=True)
    assert [t[1].item() for t in got] == [0.0, 0.0, 0.0, -1]
    dx = torch.autograd.grad(got[1][0] + got[2][0], x)[0]
    assert dx[0].isfinite().all()
    assert dx[4].isnan().all()
    assert (dx[1] == 0).all()


@on_every_path
@pytest.mark.parametrize("name", ["plain", "all"])
def test_bits_of_loss_and_statistics(name, path):
    x, w, target, kw = path.case(**OPTIONS[name])
    loss, lse = path.call(x, w, target, return_lse=True, **kw)
    first = outputs(path.call, x, w, target, kw)
    assert same_bits(first[0], loss)
    assert same_bits(first[1], lse)
    for schedule in SCHEDULES:
        for again in (outputs(path.call, x, w, target, kw, schedule=schedule) for _ in range(3)):
            assert all(same_bits(one, other) for one, other in zip(again, first, strict=True))


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_backwards_give_the_same_bits_after_outputs_are_modified(schedule, path):
    x, w, target, kw = path.case(**OPTIONS["unsmoothed"])
    loss, *stats = outputs(path.call, x, w, target, kw, schedule=schedule)
    weights = [torch.rand(target.shape, dtype=loss.dtype, **path.here) for _ in range(3)]
    total = loss + sum((t * g).sum() for t, g in zip(stats[:3], weights, strict=True))
    first = torch.autograd.grad(total, parameters(x, w, kw), retain_graph=True)
    for t in stats:
        t.data.zero_()
    again = torch.autograd.grad(total, parameters(x, w, kw))
    assert all(same_bits(one, other) for one, other in zip(first, again, strict=True))


@on_kernels
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stored_recomputes_logits_only_for_gradient_of_entropy(schedule, path):
    x, w, target, _ = path.case()
    for i, name in enumerate(("lse", "log_prob", "entropy")):
        stats = path.call(x, w, target, schedule=schedule, return_stats=True)[1]
        path.calls.clear()
        stats[i].sum().backward()
        assert (path.calls["dlogits"] == 0) == (schedule == "stored" and name != "entropy")


@on_every_path
def test_compiled_equals_eager(path):
    torch._dynamo.reset()
    x, w, target, _ = path.case()
    reward = torch.rand(target.shape, dtype=torch.promote_types(x.dtype, torch.float32), **path.here)

    def step(x, w, target):
        loss, stats = linear_cross_entropy(x, w, target, return_stats=True, **path.defaults)
        return loss - (stats.log_prob * reward).sum() - stats.entropy.sum(), stats

    results = []
    for f in step, torch.compile(step, fullgraph=True, backend="aot_eager"):
        total, stats = f(x, w, target)
        results.append([total.detach(), *stats, *torch.autograd.grad(total, (x, w))])
    for one, other in zip(*results, strict=True):
        assert same_bits(one, other)


def test_torch_func_and_meta():
    x, w, target = torch.randn(5, 8, dtype=FP64), torch.randn(11, 8, dtype=FP64), torch.randint(11, (5,))

    def entropy(x):
        return linear_cross_entropy(x, w, target, return_stats=True)[1].entropy.sum()

    leaf = x.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(entropy)(x), torch.autograd.grad(entropy(leaf), leaf)[0])
    _, stats = linear_cross_entropy(x.to("meta"), w.to("meta"), target.to("meta"), return_stats=True)
    assert [(t.shape, t.dtype) for t in stats] == [((5,), FP64)] * 3 + [((5,), torch.int64)]
