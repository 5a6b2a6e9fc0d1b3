"""warm_up.py of linear cross entropy: it prepares exactly the kernels that the call then uses."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quackish.device.kernel_device import KernelDevice, device_of, substitute
from quackish.device.kernel_for import CompiledKernel, request_for
from quackish.gpu import H200
from quackish.ops.linear_cross_entropy import api as public
from quackish.ops.linear_cross_entropy import warm_up as preparing
from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from quackish.ops.linear_cross_entropy.row_problems import LceSortProblem
from tests.linear_cross_entropy.cases import OPTIONS, REDUCTIONS, SCHEDULES, inputs_and_options, make

BF16, FP16 = torch.bfloat16, torch.float16


# Of the last call, whose kernels do nothing.
REQUESTS, LAUNCHES = set(), []


def kernel_for(problem, gpu):
    request = request_for(problem, gpu)
    REQUESTS.add(request)
    return CompiledKernel(lambda *args: LAUNCHES.append(problem.spec.name), request.config)


@pytest.fixture
def asked():
    """The requests that are prepared for CPU tensors on an H200."""
    asked = []
    with substitute("cpu", KernelDevice(H200, kernel_for, prepare=asked.append)):
        yield asked


def prepare(x, w, target, kw, **options):
    inputs, options = inputs_and_options(x, w, target, **kw, **options)
    preparing.prepare(public.make_call(inputs, options, eager=True))


def called(x, w, target, kw, **options):
    """The requests of a call, forward and backward."""
    REQUESTS.clear()
    LAUNCHES.clear()
    with substitute("cpu", KernelDevice(H200, kernel_for)):  # a new device, which asks for each kernel
        loss = linear_cross_entropy(x, w, target, **kw, **options)
        if loss.requires_grad:
            loss.backward(torch.rand(loss.shape))
    assert len(LAUNCHES) >= 4
    return REQUESTS


def check(asked, x, w, target, kw, **options):
    """`prepare` runs and requests the same kernels as the call."""
    prepared_before = len(asked)
    prepare(x, w, target, kw, **options)
    assert len(asked) == prepared_before + 1
    assert set(asked[-1]) == called(x, w, target, kw, **options)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("dtype", [BF16, pytest.param(FP16, marks=pytest.mark.exhaustive)], ids=str)
def test_prepares_the_kernels_of_a_call(dtype, name, reduction, asked):
    for schedule in SCHEDULES:
        for m, h, v, chunk_size in ((300, 8, 700, 128), (40, 64, 1000, None)):
            x, w, target, kw = make(m, h, v, dtype, **OPTIONS[name])
            options = dict(reduction=reduction, schedule=schedule, chunk_size=chunk_size)
            for weight, given in ((w, {}), (w, dict(grad_weight_out=torch.zeros(w.shape))), (w.detach(), {})):
                device_of(x.device).cache.clear()  # two schedules may have equal keys
                check(asked, x, weight, target, kw, **options, **given)


def test_dw_in_forward(asked, narrow):
    check(asked, *make(600, 512, 4000, BF16), schedule="recompute")
    assert any(isinstance(request.problem, LceSortProblem) for request in asked[-1])


@pytest.mark.parametrize("m, v, dtype", [(3000, 6000, FP16), (600, 33_000, BF16), (600, 33_000, FP16)])
def test_blocks_of_classes_depend_on_all_rows(m, v, dtype, asked):
    """Their number and width depend on the rows."""
    check(asked, *make(m, 8, v, dtype, bias=True), schedule="recompute", chunk_size=128)


def test_calls_with_the_same_kernels_prepare_once(asked):
    x, w, target, kw = make(300, 64, 700, BF16)

    def rows(*shape):
        m = torch.Size(shape).numel()
        return x.detach()[:m].view(*shape, 64).requires_grad_(), w, target[:m].view(shape), kw

    groups = [
        [(rows(*shape), {}) for shape in ((300,), (200,), (2, 100), (3, 50), (1, 7), ())],
        [((x, w, target.int(), kw), {})],
        [((x.half(), w.half(), target, kw), {})],
        # the key has no numbers, only whether they are given
        [(rows(100), dict(softcap=20.0)), (rows(100), dict(softcap=30.0, z_loss=1e-4, ignore_index=-1))],
        [(rows(100), dict(num_items=items)) for items in (80, 90)],
        [(rows(100), dict(num_items=torch.tensor(items))) for items in (80, 90)],  # which the kernel reads
        [(rows(100), dict(logit_scale=scale)) for scale in (0.5, 2, torch.tensor(0.5))],
        # one chunk, and several
        [(rows(m), dict(chunk_size=128)) for m in (100, 128)],
        [(rows(m), dict(chunk_size=128)) for m in (129, 300)],
    ]
    for group in groups:
        check(asked, *group[0][0], **group[0][1])
        prepared_before = len(asked)
        for args, options in group[1:]:
            prepare(*args, **options)
            assert len(asked) == prepared_before
            assert set(asked[-1]) == called(*args, **options)
    with torch.no_grad():
        check(asked, x, w, target, kw)


def test_exp_logits_in_one_and_two_buffers(asked, limits):
    limits(SHARED_FROM=1 << 20)
    for m in (100, 600, 700):
        x, w, target, kw = make(m, 512, 1400, BF16)
        prepare(x, w, target, kw)
        assert set(asked[-1]) == called(x, w, target, kw)
    assert len(asked) == 2
    assert set(asked[0]) != set(asked[1])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_unaligned_rows(schedule, asked):
    x, w, target, kw = make(100, 72, 700, BF16)
    w = w.detach()[:, :64].requires_grad_()
    flat = x.detach().view(-1)
    shifted, far_apart = flat[1 : 1 + 99 * 64].view(99, 64), x.detach()[:99, 8:]
    odd, transposed = flat[: 99 * 65].view(99, 65)[:, :64], flat[: 99 * 64].view(64, 99).t()
    for given, n in ((far_apart, 1), (odd, 2), (shifted, 2), (transposed, 2), (odd.view(9, 11, 64), 2)):
        given = given.requires_grad_()
        prepare(given, w, target[:99].view(given.shape[:-1]), kw, schedule=schedule)
        assert len(asked) == n
    for given, requests in ((far_apart, asked[0]), (odd, asked[1]), (shifted, asked[1]), (transposed, asked[0])):
        assert set(requests) == called(given, w, target[:99], kw, schedule=schedule)


@pytest.mark.parametrize("name", ["all", "unsmoothed"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_prepare_allocates_nothing_and_sets_no_device(schedule, name, asked):
    """Compiled code depends on the default device, and overlapping threads might not restore it."""
    devices, defaults = set(), set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            devices.update(t.device.type for t in tree_leaves(out) if isinstance(t, torch.Tensor))
            defaults.add(torch.get_default_device().type)
            return out

    for chunk_size in (None, 128):
        x, w, target, kw = make(300, 64, 700, BF16, **OPTIONS[name])
        inputs, options = inputs_and_options(x, w, target, **kw, schedule=schedule, chunk_size=chunk_size)
        call = public.make_call(inputs, options, eager=True)
        with Watch():
            assert preparing.requests_of(call)
    assert (devices, defaults) == ({"meta"}, {"cpu"})


def test_prepare_imports_nothing():
    """Some operations on meta tensors import 500 modules (250 ms): `prepare` uses none of them."""
    code = """
import sys
import tests.linear_cross_entropy.test_prepare as t
asked = []
with t.substitute("cpu", t.KernelDevice(t.H200, t.kernel_for, prepare=asked.append)):
    before = set(sys.modules)
    for schedule in t.SCHEDULES:
        t.prepare(*t.make(300, 64, 700, t.BF16), schedule=schedule)
    assert len(asked) == len(t.SCHEDULES)
    print(len(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10
