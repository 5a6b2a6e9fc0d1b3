"""RMSNorm's kernels on a GPU: numbers against fp64, bits against bits, and all that may go on beside or around them.

Tests in test_rms_norm*.py that take `norm_anywhere` run on a GPU as well.
"""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from quackish.device import workspace
from quackish.ops.rms_norm import reference
from quackish.ops.rms_norm.api import rms_norm, rms_norm_backward, rms_norm_forward
from quackish.testing import assert_close_to_fp64, assert_deterministic
from quackish.testing.device import poison_free_memory
from quackish.testing.errors import error
from quackish.testing.inputs import KINDS, rows, weights
from tests.cuda_graphs import captured, no_synchronization
from tests.rms_norm.cases import LAYOUTS, assert_same, on
from tests.rms_norm.truth import EPS32, Case, assert_close, forward, make_case, pytorch, step, truth

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32)


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch):
    monkeypatch.setitem(on, "device", "cuda")


# Numbers ------------------------------------------------------------------------------------------------------------

NS = (1, 2, 3, 8, 100, 256, 257, 1000, 1024, 2048, 4096, 4097, 8192, 16384, 16392, 32768, 65536, 262144)


@pytest.mark.parametrize("n, dtype", [*itertools.product(NS, (BF16, FP32)), (257, FP16), (4096, FP16), (65536, FP16)])
def test_numbers(n, dtype):
    for m in (1, 3, 4097 if n <= 8192 else 257 if n <= 65536 else 65):
        case = make_case(m, n, dtype, dtype)
        peers = pytorch(case)
        poison_free_memory()
        assert_close(case, step(case), peers)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [256, 4096, 5000])
def test_hard_data(n, kind, dtype):
    case = make_case(1025, n, dtype, dtype, kind=kind)
    assert_close(case, step(case), pytorch(case))


# n and y's dtype cycle, so that all combinations with the other dtypes occur.
MIXES = [
    (n, *dtypes, out_dtype)
    for dtypes, n, out_dtype in zip(
        itertools.product(FLOATS, FLOATS, (None, *FLOATS)),
        itertools.cycle((257, 1024, 1000, 4097, 8192)),
        itertools.cycle((None, None, None, FP32, FP32, BF16, FP16)),
        strict=False,
    )
]


@pytest.mark.parametrize("n, x, weight, residual, out_dtype", MIXES)
def test_mixes_of_dtypes(n, x, weight, residual, out_dtype):
    case = make_case(133, n, x, weight, weight, residual, out_dtype, weight_offset=1.0)
    poison_free_memory()
    assert_close(case, step(case))


OPTIONS = list(itertools.product((None, BF16), (None, BF16), (None, BF16, FP32)))


@pytest.mark.parametrize(
    "n, weight, bias, residual",
    [*((1000, *o) for o in OPTIONS), *((n, *o) for n in (4096, 20000) for o in (OPTIONS[0], OPTIONS[-1]))],
)
def test_options(n, weight, bias, residual):
    case = make_case(333, n, BF16, weight, bias, residual)
    assert_close(case, step(case))


@pytest.mark.parametrize("residual, residual_dtype", [(BF16, FP32), (FP32, BF16)])
@pytest.mark.parametrize("n", [257, 4096, 16_384])
def test_residual_dtype(n, residual, residual_dtype):
    case = make_case(333, n, BF16, BF16, None, residual, residual_dtype=residual_dtype)
    poison_free_memory()
    assert_close(case, step(case))


def test_y_is_the_norm_of_the_rounded_res():
    """y is fp32, so it shows whether the bf16 res was rounded before the norm."""
    case = make_case(133, 1000, FP32, FP32, residual=BF16)
    assert_close(case, step(case))


@pytest.mark.parametrize("m, n", [(33000, 65536), (8_400_001, 256)])
def test_more_than_2_to_the_31_elements(m, n):
    x, dy = (torch.empty(m, n, dtype=BF16, device="cuda") for _ in range(2))
    for i in range(0, m, 1 << 16):  # in chunks, to limit fp32 copies
        x[i : i + (1 << 16)].normal_()
        dy[i : i + (1 << 16)].normal_()
    w = weights(n, device="cuda")
    y, _, rstd = rms_norm_forward(x, w, eps=1e-6, backend="cute")
    dx, dw, _, _ = rms_norm_backward(dy, x, w, rstd, backend="cute")
    dw_true = torch.zeros(n, dtype=FP64, device="cuda")
    chunk = (1 << 26) // n
    for i in range(0, m, chunk):
        part = slice(i, min(i + chunk, m))
        args = x[part].double(), w.double()
        y_true, _, rstd_true = reference.rms_norm_fwd(*args, None, None, 1e-6)
        dx_true, _, dw_part, _ = reference.rms_norm_bwd(
            dy[part].double(), *args, rstd_true, None, 0.0, FP64, None, FP64
        )
        dw_true += dw_part
        eps = torch.finfo(BF16).eps
        assert error(y[part], y_true).within(0.6 * eps, 1.1 * eps), i
        assert error(dx[part], dx_true).within(0.6 * eps, 1.1 * eps), i
    assert error(dw, dw_true).within(16 * EPS32, 64 * EPS32)


@pytest.mark.parametrize("m, heads, n", [(1000, 32, 128), (3, 7, 257), (40, 33, 64), (5, 66, 8192), (300, 3, 16_384)])
def test_a_weight_per_head(m, heads, n):
    x, r = (rows((m, heads, n), dtype, seed=seed, device="cuda") for seed, dtype in enumerate((BF16, FP32)))
    w, b = (weights(heads * n, dtype, seed=2, device="cuda").view(heads, n) for dtype in (BF16, FP32))
    inputs = x, w, b, r = [t.requires_grad_() for t in (x, w, b, r)]

    def norm(x, w, b, r):
        return rms_norm(x, w, b, residual=r, eps=1e-6, backend="cute")

    def true_norm(x, w, b, r):
        return F.rms_norm(x + r, (n,), None, 1e-6) * w + b, x + r

    assert_close_to_fp64(norm, true_norm, *inputs)
    assert_deterministic(norm, *inputs, runs=5)
    for h in (0, heads - 1):
        alone = norm(x[:, h], w[h], b[h], r[:, h])
        assert_same([t[:, h].contiguous() for t in norm(*inputs)], alone)


# Layouts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [128, 99])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, n):
    t = LAYOUTS[name](lambda *shape: rows(shape, BF16, seed=5, device="cuda"), 33, n)
    other = rows(t.shape, BF16, seed=3, device="cuda")
    w = weights(n, device="cuda").requires_grad_()
    for x, residual, dy in ((t, None, other), (other, None, t), (other, t, t), (t, t, other)):
        x, residual = (None if u is None else u.detach().requires_grad_() for u in (x, residual))
        dres = None if residual is None else dy
        case = Case(x, w, None, residual, dy, dres, dict(eps=1e-6, weight_offset=0.0))
        assert_close(case, step(case))


# Bits ---------------------------------------------------------------------------------------------------------------

SHAPES = [(1, 257), (4097, 256), (4096, 1024), (777, 4096), (300, 16384), (130, 65536), (1000, 3000)]


@pytest.mark.parametrize("m, n", SHAPES)
def test_20_runs_are_equal(m, n):
    case = make_case(m, n, BF16, BF16, FP32, FP32)
    assert_close(case, step(case))
    assert_deterministic(lambda x, w, b, r: rms_norm(x, w, b, residual=r, backend="cute"), *case.inputs)


@pytest.mark.parametrize("n", [64, 257, 1024, 4096, 16384, 65536])
def test_rows_are_independent_of_m(n):
    whole = make_case(4096 if n <= 16384 else 1024, n, BF16, BF16, None, FP32)
    y, res, dx, _, dr = step(whole)
    for part in (slice(0, 1), slice(3, 10), slice(100, 612), slice(1, 1024)):
        some = dataclasses.replace(
            whole,
            **{f: getattr(whole, f)[part].detach().clone() for f in ("x", "residual", "dy", "dres")},
        )
        some.x.requires_grad_()
        some.residual.requires_grad_()
        got = step(some)
        assert_same([*got[:3], got[4]], [t[part] for t in (y, res, dx, dr)])


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
def test_only_required_gradients_are_computed(wanted):
    case = make_case(257, 1024, BF16, BF16, FP32, FP32)
    _, res = forward(case)
    everything = {name: want for name, (want, _) in truth(case, res).items() if name not in ("y", "res")}
    rstd = rms_norm_forward(case.x, case.weight, case.bias, residual=case.residual, eps=1e-6).rstd
    asked = dict(zip(everything, wanted, strict=True))
    poison_free_memory(nbytes=4 << 20)
    got = rms_norm_backward(
        case.dy, res, case.weight, rstd, dres=case.dres, **asked, dx_dtype=BF16, dbias_dtype=FP32, backend="cute"
    )
    for name, flag in asked.items():
        grad = getattr(got, name)
        assert (grad is not None) == flag
        if flag:
            eps = torch.finfo(grad.dtype).eps
            assert error(grad, everything[name]).within(eps + 8 * EPS32, eps + 32 * EPS32), name


# Streams, graphs, threads, devices ----------------------------------------------------------------------------------


def two_norms(case):
    c = case
    y, res = rms_norm(c.x, c.weight, c.bias, residual=c.residual, backend="cute")
    return rms_norm(y, c.weight, backend="cute"), res


def two_norms_step(case):
    outs = two_norms(case)
    return [*outs, *torch.autograd.grad(outs, case.inputs, case.grad_outputs)]


@pytest.mark.parametrize("m, n", [(4096, 1024), (130, 4096)])
def test_graph_replay_with_new_data(m, n):
    case = make_case(m, n, bias=FP32, residual=FP32)
    static = [*case.inputs, *case.grad_outputs]
    graph, results = captured(lambda: two_norms_step(case))
    for seed in (10, 20, 30):
        fresh = make_case(m, n, bias=FP32, residual=FP32, seed=seed)
        with torch.no_grad():
            for mine, new in zip(static, [*fresh.inputs, *fresh.grad_outputs], strict=True):
                mine.copy_(new)
        for t in results:
            t.detach().fill_(float("nan"))
        graph.replay()
        assert_same(results, two_norms_step(fresh))


@pytest.mark.parametrize("m, n", [(64, 1024), (2048, 4096)])
def test_two_concurrent_threads_and_streams(m, n):
    cases = [make_case(m, n, bias=FP32, seed=seed) for seed in (0, 50)]
    want = [step(case) for case in cases]
    torch.cuda.synchronize()

    def work(case):
        with torch.cuda.stream(torch.cuda.Stream()):
            runs = [step(case) for _ in range(50)]
            torch.cuda.current_stream().synchronize()
        return runs

    with ThreadPoolExecutor(2) as threads:
        for runs, expected in zip(threads.map(work, cases), want, strict=True):
            for results in runs:
                assert_same(results, expected)


def test_tickets_are_zero_after_launches():
    case = make_case(1000, 2048)
    step(case)
    torch.cuda.synchronize()
    tickets = [space.memory[: workspace.NUM_TICKETS] for space in workspace._workspaces.values()]
    assert tickets
    assert not any(t.any() for t in (*tickets, *workspace._reserve_memory))


def test_no_host_synchronization():
    case = make_case(1000, 2048, bias=FP32, residual=BF16)
    step(case)
    with no_synchronization():
        for backend in ("cute", "auto"):
            step(case, backend)
        with torch.cuda.stream(torch.cuda.Stream()):
            step(case)
        with pytest.raises(RuntimeError):
            case.x.sum().item()


# Compiled, checkpointed, traced -------------------------------------------------------------------------------------


def test_compiled_into_cuda_graphs():
    """The warm-up run allocates from a pool that later runs reuse: tickets must not be in it."""
    torch.compiler.reset()
    workspace._reserves.clear()
    workspace._workspaces.clear()
    case = make_case(1000, 2048, bias=FP32)
    want = step(case)
    workspace._reserves.clear()
    workspace._workspaces.clear()
    compiled = torch.compile(rms_norm, fullgraph=True, mode="reduce-overhead")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        y = compiled(case.x, case.weight, case.bias, backend="cute", **case.options)
        grads = torch.autograd.grad(y, case.inputs, case.dy)
        assert_same([t.clone() for t in (y, *grads)], want)
