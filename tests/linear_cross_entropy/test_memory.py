"""`memory_limit` of linear_cross_entropy: dry runs match measured peaks, and the fastest config that fits runs."""

import contextlib
import itertools
import re
import subprocess
import sys

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import kernel_for
from quackish.errors import UnsupportedError
from quackish.gpu import H200
from quackish.ops.linear_cross_entropy import memory
from quackish.ops.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy, make_plan
from quackish.ops.linear_cross_entropy.gemm_problems import SOFTMAX_TILE_N
from quackish.ops.linear_cross_entropy.layout import LinearCrossEntropyConfig, LinearCrossEntropyProblem, by_speed
from quackish.testing.errors import same_bits
from tests.linear_cross_entropy.cases import (
    OPTIONS,
    SCHEDULES,
    inputs_and_options,
    make,
    norm_error,
    on_every_path,
    on_kernels,
    parameters,
    truth,
    unit_roundoff,
)
from tests.peak_memory import taken

TILE_N = SOFTMAX_TILE_N["sm_90"]

BF16, FP32, CUDA = torch.bfloat16, torch.float32, torch.device("cuda")


def least(call):
    """The smallest limit that `call(memory_limit)` accepts."""
    with pytest.raises(ValueError, match="memory_limit is 0 bytes, expected at least") as error:
        call(0)
    return int(re.search(r"at least (\d+)", str(error.value))[1])


def test_order_of_candidates():
    def order(schedule="auto", chunk_size=None, m=8192, reduction="mean", **kw):
        found = by_speed(
            LinearCrossEntropyProblem(128_256, 4096, "bfloat16", reduction, **kw), m, 4096, schedule, chunk_size
        )
        return [(config.schedule, config.chunk_rows) for config in found]

    known, late, out = order(), order(reduction="none"), order(grad_weight_out=True)
    assert known[0][0] == "chunked"
    assert known.index(("chunked", 2048)) < known.index(("recompute", 4096)) < known.index(("chunked", 768))
    assert [name for name, _ in known if name == "stored"] == []
    assert [name for name, _ in (late[0], late[-1])] == ["stored", "recompute"]
    assert {name for name, _ in late} == {"stored", "recompute"}
    many = [
        tuple(config)
        for config in by_speed(LinearCrossEntropyProblem(128_256, 4096, "bfloat16", "none"), 8192, 4096, "auto", None)
    ]
    kept = [rows for _, rows, *_, keeps in many if keeps]
    assert kept == [4096, 2816, 2048, 1664, 1408, 1280, 1024]  # of 8192: the most first
    assert many.index(("recompute", 1024, False, False, True)) < many.index(("recompute", 14_336, False, False, False))
    assert list(dict.fromkeys(name for name, _ in out)) == ["stored", "chunked", "recompute"]
    assert order(chunk_size=1000) == [("chunked", 1024), ("recompute", 1024)]
    assert {name for name, _ in order("stored")} == {"stored"}
    assert all(rows >= 256 for _, rows in known)


# Dry runs -------------------------------------------------------------------------------------------------------------


def request_of(x, w, target, kw, eager=True, device=None):
    inputs, options = inputs_and_options(x, w, target, **kw)
    plan = make_plan(inputs, options)
    request = memory.Request(*memory.request_for(inputs, plan, options.return_lse, eager))
    return request._replace(device=device or x.device), LinearCrossEntropyConfig(*plan.config)


@pytest.mark.parametrize(
    "name, dtype, reduction",
    [
        *(pytest.param("plain", FP32, name, marks=pytest.mark.exhaustive) for name in ("mean", "none")),
        ("all", BF16, "sum"),
    ],
)
def test_dry_run_of_portable_path_matches_measured_peak(name, reduction, dtype):
    for schedule, variant in itertools.product(SCHEDULES, ("both", "input", "buffer", "none", "stats")):
        x, w, target, kw = make(500, 64, 1200, dtype, reduction=reduction, **OPTIONS[name])
        kw |= dict(schedule=schedule, chunk_size=128, return_stats=variant == "stats")
        w.requires_grad_(variant in ("both", "buffer", "stats"))
        x.requires_grad_(variant != "none")
        bias = [t.requires_grad_(variant == "both") for t in (kw.get("linear_bias"),) if t is not None]
        if variant == "buffer":
            kw["grad_weight_out"] = torch.zeros(w.shape)
        wanted = [t for t in (x, w, *bias) if t.requires_grad]
        grads = [torch.ones(500 if reduction == "none" else ()), *[torch.ones(500)] * 3 * (variant == "stats")]

        def step(x=x, w=w, target=target, kw=kw, wanted=wanted, grads=grads):
            kept = linear_cross_entropy(x, w, target, **kw)
            results = [kept[0], *kept[1][:3]] if kw["return_stats"] else [kept]
            return kept, torch.autograd.grad(results, wanted, grads, allow_unused=True) if wanted else None

        found = memory.MemoryDryRun(*request_of(x, w, target, kw)).run()
        assert found.peak == pytest.approx(taken(step), rel=0.01), (schedule, variant)


def dry_run(m=1024, h=4096, v=128_256, device=CUDA, eager=True, on_kernels=True, needs_grad=True, **kw):
    """On an H200."""
    x, w = (torch.empty(rows, h, dtype=BF16, device="meta", requires_grad=needs_grad) for rows in (m, v))
    target = torch.empty(m, dtype=torch.int64, device="meta")
    with substitute("meta", KernelDevice(H200, kernel_for)) if on_kernels else contextlib.nullcontext():
        request = request_of(x, w, target, kw, eager, device)
    return memory.MemoryDryRun(*request, H200).run()


def test_peaks_of_the_headline_shape():
    assert dry_run(8192).peak <= 2.69e9
    assert dry_run(8192, schedule="recompute").peak <= 1.30e9
    assert dry_run(8192, schedule="recompute", chunk_size=4096).peak <= 1.18e9


@pytest.mark.parametrize("m, h, v", [(9000, 2048, 128_256), (12_288, 4096, 128_256), (16_384, 4096, 128_256),
    (32_768, 4096, 128_256), (16_384, 4096, 262_144), (16_384, 8192, 128_256), (8192, 640, 262_144)])  # fmt: skip
def test_kept_exp_logits_take_no_more_than_mean(m, h, v):
    mean, recompute = dry_run(m, h, v).peak, dry_run(m, h, v, reduction="none", schedule="recompute").peak
    for options in ({}, dict(return_stats=True)):
        kept = dry_run(m, h, v, reduction="none", **options)
        assert kept.plan.keeps_first
        assert recompute < kept.peak <= mean


def test_peak_of_several_chunks():
    m, h, v, chunk = 4096, 512, 32_000, 1024
    exp_logits, tail = chunk * v * 2 + chunk * (v // TILE_N + h) * 4, 66 * 2 * 128 * 256 * 4
    peak = dry_run(m, h, v, schedule="chunked", chunk_size=chunk).peak
    assert peak <= exp_logits + v * h * 4 + m * h * 2 + (4 << 20) + tail


def test_no_logits_are_kept_without_grad():
    m, h, v = 2048, 512, 32_000
    assert dry_run(m, h, v, needs_grad=False).peak <= m * h * 2 + m * -(-v // TILE_N) * 4 + (4 << 20)


@pytest.mark.parametrize("softcap, bytes_per_logit", [(None, 6), (30.0, 10)])
def test_portable_path_holds_one_chunk_of_logits(softcap, bytes_per_logit):
    m, h, v, chunk = 4096, 256, 32_000, 512
    sums_and_gradients = (v + m) * h * (4 + 2)
    for schedule, kept in ("chunked", 0), ("recompute", 0), ("stored", m * v * 4):
        peak = dry_run(m, h, v, on_kernels=False, softcap=softcap, schedule=schedule, chunk_size=chunk).peak
        assert kept < peak <= chunk * v * bytes_per_logit + sums_and_gradients + kept + (4 << 20)


def test_allocator_rounds_up():
    asked, blocks = ([held.bytes for held in dry_run(device=device).at_peak] for device in (torch.device("cpu"), CUDA))
    assert max(asked) > 1 << 20 > min(asked)
    assert blocks == [-(-size // 512) * 512 + (size > 1 << 20) * (1 << 20) for size in asked]


def test_operators_copy_forward_gradients():
    eager, operators = (dry_run(eager=eager) for eager in (True, False))
    assert eager.grad_bytes == operators.grad_bytes == 4096 * (1024 + 128_256) * 2
    assert operators.peak >= 2 * eager.grad_bytes > eager.peak


@pytest.mark.exhaustive
def test_first_dry_run_of_a_process_equals_the_next_one():
    """Even with Python's garbage collector disabled."""
    code = """
import gc
import torch
from quackish.ops.linear_cross_entropy.layout import LinearCrossEntropyConfig
from quackish.ops.linear_cross_entropy import memory
from quackish.ops.linear_cross_entropy.checks import Inputs
gc.disable()
rows, classes = (((n, 64), (64, 1), 0, torch.float32, True) for n in (3000, 2000))
tensors = Inputs(rows, classes, target=((3000,), (1,), 0, torch.int64, False))
options = 0, 0.0, None, 0.0, "mean", False, torch.float32, ""
request = memory.Request(tensors, options, False, False, torch.device("cpu"), True)
print(*(memory.MemoryDryRun(request, LinearCrossEntropyConfig("recompute", 3000)).run().peak for _ in range(2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    first, second = done.stdout.split()
    assert first == second


# Calls ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _few_candidates(limits, request):
    if "path" in request.fixturenames:
        limits(SPLITS=(1, 2, 8))


def case_of(path, **options):
    """A call whose gradients are large relative to its chunks, so that limits matter."""
    return path.case(1100, 64, 1003, dtype=BF16 if path.kernels else FP32, **options)


@pytest.mark.exhaustive
@on_every_path
def test_smallest_limit_is_tight(path):
    x, w, target, kw = case_of(path, bias=True)
    for options in ({}, dict(schedule="stored"), dict(schedule="chunked", chunk_size=256), dict(reduction="none")):

        def call(limit, options=options):
            return path.call(x, w, target, memory_limit=limit, **kw, **options)

        needed, reduction = least(call), dict(reduction=options.get("reduction", "mean"))
        got = torch.autograd.grad(call(needed).sum(), parameters(x, w, kw))
        for grad, true in zip(got, truth(x, w, target, kw | reduction)[2], strict=True):
            assert norm_error(grad, true) <= 4 * unit_roundoff(x.dtype) + 1e-6
        with pytest.raises(ValueError, match=f'at least {needed}, the peak of schedule="'):
            call(needed - 1)
    with torch.no_grad():
        assert least(call) < needed
        call(least(call))


@on_kernels
def test_plan_is_not_reused_for_other_layouts_and_gradients(path):
    x, w, target, _ = case_of(path)
    columns = torch.cat([x.detach(), x.detach()], 1)[:, ::2].requires_grad_()  # copied for kernels
    unaligned = w.detach().new_empty(w.numel() + 1)[1:].view(w.shape).copy_(w.detach()).requires_grad_()  # also copied
    calls = [(x, w.detach()), (x, w), (columns, w), (columns, unaligned)]
    needed = [least(lambda n, call=call: path.call(*call, target, memory_limit=n)) for call in calls]
    assert needed == sorted(set(needed))
    for call, limit in zip(calls, needed, strict=True):
        path.call(*call, target, memory_limit=limit)
    for call, limit in zip(calls[1:], needed, strict=False):
        with pytest.raises(ValueError, match="memory_limit"):
            path.call(*call, target, memory_limit=limit)


@on_every_path
def test_dry_run_is_isolated_from_the_caller(path):
    """From saved-tensor hooks, checkpointing and inference mode."""
    x, w, target, _ = case_of(path)
    packed, counts = [], []
    for limit in (10**9, 10**9 + 1):
        for _ in range(2):  # the second call finds the plan
            packed.clear()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
                path.call(x, w, target, memory_limit=limit)
            counts.append(len(packed))
    assert len(set(counts)) == 1
    want = torch.autograd.grad(path.call(x, w, target, memory_limit=10**9), [x, w])
    loss = checkpoint(lambda: path.call(x, w, target, memory_limit=10**9 + 2), use_reentrant=False)
    assert all(map(same_bits, torch.autograd.grad(loss, [x, w]), want))
    assert least(lambda n: path.call(x, w, target, memory_limit=n)) > 0
    with torch.inference_mode():
        path.call(x, w, target, memory_limit=10**9)


@pytest.mark.exhaustive
@on_every_path
def test_compiled_with_memory_limit(path):
    """One graph for each M, because the config depends on M."""
    torch._dynamo.reset()
    _, w, _, _ = case_of(path)

    def step(x, target, limit):
        return linear_cross_entropy(x * 2, w, target, memory_limit=limit, **path.defaults)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for m in (1100, 900):
        x, _, target, _ = path.case(m, 64, 1003, dtype=w.dtype)
        for limit in (1 << 28, 1 << 23):
            results = []
            for f in (step, compiled):
                loss = f(x, target, limit)
                results.append([loss.detach(), *torch.autograd.grad(loss, [x, w])])
            for got, want in zip(*results, strict=True):
                assert norm_error(got, want.double()) <= 2 * unit_roundoff(w.dtype)
        with pytest.raises(Exception, match="memory_limit is 5 bytes, expected at least"):
            compiled(x, target, 5)


@pytest.mark.exhaustive
def test_module_and_torch_func():
    head = LinearCrossEntropyLoss(64, 1003, memory_limit=5)
    x, target = torch.randn(300, 64), torch.randint(1003, (300,))
    with pytest.raises(ValueError, match="memory_limit is 5 bytes"):
        head(x, target)
    head.memory_limit = 10**9
    assert head(x, target).isfinite()
    with pytest.raises(UnsupportedError, match="expected no memory_limit"):
        torch.func.grad(lambda x: head(x, target))(x)
