"""Layouts of RMSNorm's tensors: in place or copied, and which kernel and plan runs."""

import contextlib
import dataclasses
import itertools

import pytest
import torch

from quackish.device.kernel_device import substitute
from quackish.ops.rms_norm import plans
from quackish.ops.rms_norm.api import rms_norm, rms_norm_backward
from quackish.testing.errors import same_bits
from tests.rms_norm.cases import (
    BF16,
    FP32,
    LAYOUTS,
    Functions,
    assert_same,
    case,
    leaf,
    rows,
    step,
    weights,
    with_residual,
)
from tests.rms_norm.emulated import Emulated

# Layouts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make, folded",
    [
        (lambda: torch.empty(6, 8), (1, 8, 0)),
        (lambda: torch.empty(8), (1, 8, 0)),
        (lambda: torch.empty(1, 1, 8), (1, 8, 0)),
        (lambda: torch.empty(2, 3, 4, 8), (1, 8, 0)),
        (lambda: torch.empty(6, 32)[:, 8:16], (1, 32, 0)),
        (lambda: torch.empty(2, 5, 3, 4, 8)[:, :, 0], (4, 96, 8)),  # (B, S, 3, H, D): q, k or v
        (lambda: torch.empty(2, 5, 3, 4, 8)[:, :1, 1], (4, 480, 8)),
        (lambda: torch.empty(2, 3, 4, 8).transpose(1, 2), None),
        (lambda: torch.empty(2, 3, 4, 8).transpose(1, 2)[0], (3, 8, 32)),
        (lambda: torch.empty(8).expand(6, 8), (1, 0, 0)),
        (lambda: torch.empty(4, 8).expand(3, 4, 8), (4, 0, 8)),
        (lambda: torch.empty(4, 1, 8).expand(4, 3, 8), (3, 8, 0)),
        (lambda: torch.empty(8, 6).t(), None),
        (lambda: torch.empty(6, 1).expand(6, 8), None),
        (lambda: torch.empty(6, 5)[:, :1], (1, 5, 0)),
    ],
)
def test_fold_rows(make, folded):
    t = make()
    assert plans.fold_rows(t.shape, t.stride()) == folded
    if folded:
        m1, s0, s1 = folded
        starts = torch.arange(t.numel() // t.shape[-1])
        want = torch.as_strided(torch.arange(10000), t.shape, t.stride())[..., 0].reshape(-1)
        assert torch.equal((starts // m1) * s0 + (starts % m1) * s1, want)


STRIDED = ("slice of qkv", "columns of a matrix", "transposed rows", "expanded rows")


IN_PLACE = ("packed", *STRIDED, "off by one element")


def layout(name):
    return LAYOUTS[name](lambda *shape: rows(shape, seed=sum(shape)), 5, 8)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(norm_kernels, name):
    """Of x, then of a residual and of both output gradients."""
    t, other, w = layout(name), rows((2, 5, 4, 8), seed=13), weights(8)

    def compare(call, inputs, dy):
        want = step(lambda *a: call(*a, backend="reference"), [leaf(u.contiguous()) for u in inputs], dy)
        got = step(call, [u.detach().requires_grad_() for u in inputs], dy)
        assert_same(got, want)
        assert all(out.is_contiguous() for out in got)
        return norm_kernels.launches[-2:]

    (forward, f), (backward, b) = compare(rms_norm, (t, w), other)
    assert (f[0] == t.data_ptr()) == (b[0] == t.data_ptr()) == (name in IN_PLACE)
    assert forward.packed == backward.packed == (name not in STRIDED)
    assert forward.aligned == backward.aligned == (name != "off by one element")

    def with_residual(x, w, r, backend="auto"):
        return rms_norm(x, w, residual=r, backend=backend)

    (_, f), (_, b) = compare(with_residual, (other, w, t), (t, t))
    assert (f[3] == t.data_ptr()) == (b[2] == t.data_ptr()) == (b[3] == t.data_ptr()) == (name in IN_PLACE)


@pytest.mark.parametrize(
    "n, dtype, out_dtype, aligned",
    [
        (8, BF16, FP32, True),
        (4, BF16, FP32, False),
        (4, FP32, FP32, True),
        (4, FP32, BF16, False),
        (7, FP32, FP32, False),
    ],
)
def test_alignment_of_rows(norm_kernels, n, dtype, out_dtype, aligned):
    w = weights(n, dtype)
    rms_norm(rows((4, n), dtype), w, out_dtype=out_dtype)
    rms_norm(rows((4, 3 * n), dtype)[:, n : 2 * n], None, out_dtype=out_dtype)
    rms_norm_backward(rows((4, n), out_dtype), rows((4, n), dtype), w, torch.ones(4))
    assert [problem.aligned for problem, _ in norm_kernels.launches] == [aligned] * 3


def test_strided_parameter_is_copied(norm_kernels):
    x, w, b = rows((4, 8)), weights(16)[::2], rows((8, 3), seed=1)[:, 1]
    want = rms_norm(x, w, b, backend="reference")
    inputs = [x.requires_grad_(), w.detach().requires_grad_(), b.detach().requires_grad_()]
    got = step(rms_norm, inputs, torch.ones(4, 8))
    assert same_bits(got[0], want)
    assert [g.shape for g in got[1:]] == [x.shape, w.shape, b.shape]


# Plans ----------------------------------------------------------------------------------------------------------------


def test_plans_are_not_reused_for_other_layouts(norm_path):
    """Runs every layout after every other, so that a plan with an incomplete key would be reused wrongly."""
    w, bias = leaf(weights(8)), torch.ones(8)
    tensors = list(map(layout, LAYOUTS))
    for i, j in itertools.product(range(len(tensors)), repeat=2):
        # x and residual stay while dy and dres change: one forward plan, many backward plans
        x, dy, r, dres = (tensors[k % len(tensors)] for k in (i, j, i + 3, j // 2))
        want = step(
            with_residual, [leaf(t.contiguous()) for t in (x, w, bias, r)], (dy.contiguous(), dres.contiguous())
        )
        inputs = [x.detach().requires_grad_(), w, leaf(bias), r.detach().requires_grad_()]
        got = step(with_residual, inputs, (dy, dres))
        for a, b in zip(got, want, strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b)
        want = step(rms_norm, (leaf(x.contiguous()), w), dy.contiguous())
        assert_same(step(rms_norm, (x.detach().requires_grad_(), w), dy), want)


def test_plans_with_aligned_and_unaligned_parameters(norm_kernels):
    x, buffer = rows((4, 8)), weights(9)
    for weight, aligned in ((buffer[:8], True), (buffer[1:], False), (buffer[:8], True), (buffer[1:], False)):
        got = rms_norm(x, weight)
        assert same_bits(got, rms_norm(x, weight.clone(), backend="reference"))
        rms_norm(x, weights(8), weight)
        rms_norm_backward(x, x, weight, torch.ones(4))
        assert [problem.aligned for problem, _ in norm_kernels.launches[-3:]] == [aligned] * 3
    assert sum(isinstance(plan, plans.BackwardPlan) for plan in plans._plans.values()) == 1


def test_plan_cache(norm_kernels):
    row, w = rows((1, 8)), weights(8)
    for m in (1, 2, 3, 1, 2, 3):
        rms_norm(row.expand(m, 8), w)
    assert len(plans._plans) == 3
    for m in range(1, plans._MAX_PLANS + 5):
        rms_norm(row.expand(m, 8), w)
    assert len(plans._plans) == 4
    assert len({problem for problem, _ in norm_kernels.launches}) == 2  # problems do not include M


def test_backward_plan_is_cached_in_forward_plan(norm_kernels):
    x, w = leaf(rows((4, 8))), torch.nn.Parameter(weights(8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            rms_norm(x, w).sum().backward()
    assert len(norm_kernels.launches) == 4
    assert not [event.name for event in profile.events() if "quackish" in event.name]


def test_launches_and_allocations_use_the_tensors_device(norm_kernels):
    inputs, dy = case()
    want = step(with_residual, inputs, dy)
    current, device = ["another"], norm_kernels.device

    @contextlib.contextmanager
    def make_current():
        kept, current[0] = current[0], "this one"
        yield
        current[0] = kept

    def empty(*args):
        assert current[0] == "this one"
        return device.empty(*args)

    driver = dict(index="this one", current=lambda: current[0], make_current=make_current, empty=empty)
    with substitute("cpu", dataclasses.replace(device, **driver)):
        for _ in range(2):
            assert_same(step(with_residual, inputs, dy), want)
            assert current == ["another"]
    assert len(norm_kernels.launches) == 2 + 4


def test_no_plan_leaks_into_a_substitute_or_out_of_it(norm_kernels):
    x, w = leaf(rows((4, 8))), leaf(weights(8))
    y = rms_norm(x, w)
    assert len(norm_kernels.launches) == 1
    inner = Emulated()
    with substitute("cpu", inner.device):
        z = rms_norm(x, w)
        assert (len(inner.launches), len(norm_kernels.launches)) == (1, 1)
        with pytest.raises(RuntimeError, match="rms_norm: cpu tensors had another device of kernels in forward"):
            y.sum().backward()
        z.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="had another device of kernels in forward; expected backward inside the sa"):
        z.sum().backward()
    y.sum().backward()
    assert (len(inner.launches), len(norm_kernels.launches)) == (2, 2)
    with Functions():
        y = rms_norm(x, w)
    with substitute("cpu", inner.device), pytest.raises(RuntimeError, match="expected backward inside the same"):
        y.sum().backward()
