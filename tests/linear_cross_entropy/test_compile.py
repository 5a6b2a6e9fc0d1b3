"""Linear cross entropy compiled and transformed: operators, torch.compile, torch.func, subclasses, meta tensors."""

import types

import pytest
import torch
import torch._dynamo.testing

from quackish.errors import UnsupportedError
from quackish.ops.linear_cross_entropy import checks
from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from quackish.ops.linear_cross_entropy.calls import GradOutputs, LossPlan, Outputs, Saved, unpack
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.operators import backward_operator, forward_operator
from tests.linear_cross_entropy.cases import (
    IGNORED,
    OPTIONS,
    REDUCTIONS,
    SCHEDULES,
    assert_same,
    composed,
    make,
    norm_error,
    on_every_path,
    parameters,
)
from tests.variants import one_per
from tests.wrapper_tensor import Wrapper

BF16, FP32 = torch.bfloat16, torch.float32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_compiled_code_can_check_options():
    """torch.compile of torch 2.11 traces functions, but no bound methods such as tuple.__contains__."""
    assert all(isinstance(is_legal, types.FunctionType) for _, _, _, is_legal, _ in checks._OPTIONS)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    "needs", [[True, True, True], pytest.param([False, True, False], marks=pytest.mark.exhaustive)]
)
def test_opcheck(needs, schedule, device):
    for reduction, return_stats in zip(REDUCTIONS, (False, True, True), strict=True):
        x, w, target, kw = make(dtype=FP32, device=device, bias=True, class_weight=True)
        for t, need in zip(parameters(x, w, kw), needs, strict=True):
            t.requires_grad_(need)
        scale = torch.tensor(0.7, device=device)
        inputs = Inputs(x, w, target, kw["linear_bias"], kw["weight"], scale)
        plan = LossPlan(
            ignore_index=IGNORED, label_smoothing=0.1, softcap=3.0, z_loss=1e-3, reduction=reduction,
            return_stats=return_stats, compute_dtype=FP32, why_portable="", schedule=schedule, chunk_rows=5,
        )  # fmt: skip
        args = *inputs, *plan, needs
        torch.library.opcheck(forward_operator.overload, args)
        with torch.no_grad():
            outputs, saved, _ = unpack(forward_operator(*args), Outputs, Saved)
            grads = [None if t is None else torch.rand_like(t) for t in outputs[: len(GradOutputs._fields)]]
            args = [t.detach() if torch.is_tensor(t) else t for t in args]
            torch.library.opcheck(backward_operator.overload, (*grads, *saved, *args))


@on_every_path
@pytest.mark.parametrize("schedule", one_per(lambda schedule: 0, SCHEDULES))
@pytest.mark.parametrize(
    "return_lse, with_buffer", [(False, True), pytest.param(True, False, marks=pytest.mark.exhaustive)]
)
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


@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_compiled_with_a_memory_limit_and_other_numbers(dynamic):
    """Numbers that torch.compile makes symbolic: the second value in a call, or all with dynamic=True."""
    torch._dynamo.reset()
    x, w, target = torch.randn(6, 8), torch.randn(10, 8), torch.arange(6)

    def step(z_loss, smoothing):
        options = dict(z_loss=z_loss, label_smoothing=smoothing, softcap=smoothing * 50, memory_limit=10**9)
        return linear_cross_entropy(x, w, target, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for numbers in ((0.1, 0.1), (0.2, 0.2), (0.3, 0.4)):
        torch.testing.assert_close(compiled(*numbers), step(*numbers))


@on_every_path
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


def test_meta_tensors_give_meta_tensors():
    x, w = (torch.empty(shape, device="meta", requires_grad=True) for shape in ((13, 8), (11, 8)))
    target = torch.empty(13, device="meta", dtype=torch.int64)
    loss, lse = linear_cross_entropy(x, w, target, return_lse=True)
    loss.backward()
    assert (loss.device.type, lse.shape, x.grad.shape, w.grad.shape) == ("meta", (13,), (13, 8), (11, 8))


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
