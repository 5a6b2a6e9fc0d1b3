"""dweight_out of RMSNorm: the buffer that the weight gradient is added to."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F

from quackish.errors import UnsupportedError
from quackish.ops.rms_norm.api import RMSNorm, rms_norm
from quackish.ops.rms_norm.problems import RmsNormBwdProblem
from quackish.testing.errors import error
from tests import buffer_layouts
from tests.rms_norm.cases import BF16, FP32, Functions, assert_same, buffer_case, on, step


@pytest.mark.parametrize("shape", [(16,), pytest.param((4, 16), marks=pytest.mark.exhaustive)], ids=str)
@pytest.mark.parametrize("buffer", [FP32, BF16, "strided"], ids=str)
def test_dweight_out(norm_anywhere, buffer, shape):
    x, w, dy, out = buffer_case(shape, buffer)
    wd = w.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.rms_norm(x.double(), (16,), None, 1e-6) * wd, wd, dy.double())
    call = functools.partial(rms_norm, eps=1e-6, backend="cute" if norm_anywhere else "auto")
    y, dx, _ = step(call, (x, w), dy)

    def twice(call, out):  # micro-batches over one buffer, and a retained graph
        graphs = [call(x, w, dweight_out=out) for _ in range(2)]
        assert (out == 1).all()  # forward adds nothing
        x.grad = None
        graphs[0].backward(dy, retain_graph=True)
        assert_same((graphs[0].detach(), x.grad), (y.detach(), dx))
        graphs[0].backward(dy)
        graphs[1].backward(dy)
        assert w.grad is None

    results = [out, *(buffer_case(shape, buffer)[3] for _ in range(2))]
    twice(call, results[0])
    with Functions():  # through the operators
        twice(call, results[1])
    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for _ in range(3):  # AOTAutograd saves the buffer, so one graph after the other
        compiled(x, w, dweight_out=results[2]).backward(dy)
    assert w.grad is None
    eps = torch.finfo(out.dtype).eps
    assert error(out, 1 + 3 * want).within(2 * eps, 16 * eps)
    assert_same(results[1:], [out] * 2)
    if norm_anywhere and norm_anywhere.launches:
        added = [problem.add_dweight for problem, _ in norm_anywhere.launches if isinstance(problem, RmsNormBwdProblem)]
        assert added == [False, *[buffer != "strided"] * 6, *[False] * 3]  # compiled code's operators are functional


@pytest.mark.parametrize("shape", [(16,), (4, 16)], ids=str)
@pytest.mark.parametrize("layout", buffer_layouts.NAMES)
def test_buffers_of_any_strides(norm_anywhere, layout, shape):
    """The weight gradient is added to the buffer's elements and to nothing around them."""
    for dtype in (FP32, BF16):
        x, w, dy, want = buffer_case(shape, dtype)
        view, whole = buffer_layouts.ones_in(layout, shape, dtype, want.device)
        for out in (want, view):
            rms_norm(x, w, dweight_out=out, backend="cute" if norm_anywhere else "auto").backward(dy)
        assert error(view, want.double()).norm <= torch.finfo(dtype).eps
        assert view.ne(1).any()
        assert buffer_layouts.are_neighbours_unchanged(view, whole)


def test_dweight_out_in_special_cases(norm_path):
    x, w, dy, out = buffer_case((16,), FP32)
    rms_norm(x, w.detach(), dweight_out=out).backward(dy)
    rms_norm(x, w, residual=x, dweight_out=out)[1].backward(dy)
    rms_norm(x[:0], w, dweight_out=out).sum().backward()
    with torch.no_grad():
        rms_norm(x, w, dweight_out=out)
    assert (out == 1).all()
    want = torch.ones_like(out)
    rms_norm(x, w, dweight_out=want).backward(dy)
    (dx,) = torch.autograd.grad(rms_norm(x, w, dweight_out=out), x, dy, create_graph=True)
    assert dx.requires_grad
    assert not out.requires_grad
    torch.testing.assert_close(out, want)
    m = RMSNorm((2, 8))
    buffer = torch.ones(2, 8)
    m(x.detach().float().view(-1, 2, 8), dweight_out=buffer).backward(dy.float().view(-1, 2, 8))
    torch.testing.assert_close(buffer.view(-1), want, rtol=1e-2, atol=1e-2)
    assert m.weight.grad is None


def test_autograd_detects_writes_to_dweight_out(norm_anywhere):
    x, w, dy, out = buffer_case((16,), FP32)
    y = rms_norm(x, w, dweight_out=out)
    product = (torch.ones((), requires_grad=True, **on) * out).sum()  # saves the buffer for its backward
    y.backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: Functions()], ids=["eager", "operators"])
def test_invalid_buffers_raise(norm_path, mode):
    x, w, dy, out = buffer_case((16,), FP32)
    flat = torch.zeros(32)
    with mode():
        with pytest.raises(
            ValueError, match="rms_norm: dweight_out shares memory with weight, expected a buffer of its"
        ):
            rms_norm(x, w, dweight_out=w.detach())
        with pytest.raises(ValueError, match="rms_norm: dweight_out shares memory with x"):
            rms_norm(flat.view(2, 16), w, dweight_out=flat[16:])
        rms_norm(flat[:16].view(1, 16), w, dweight_out=flat[16:])  # one storage without overlap
        for buffer in buffer_layouts.overlapping(w.shape):
            with pytest.raises(ValueError, match=r"rms_norm: dweight_out has shape .* so its elements share memory"):
                rms_norm(x, w, dweight_out=buffer)
        with pytest.raises(ValueError, match="rms_norm: dweight_out requires grad"):
            rms_norm(x, w, dweight_out=out.clone().requires_grad_())
        y = rms_norm(x, w, dweight_out=out)
        out.untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=r"rms_norm: dweight_out has shape .* but no memory"):
            rms_norm(x, w, dweight_out=out)
        with pytest.raises(ValueError, match=r"rms_norm_backward: dweight_out has shape .* but no memory"):
            y.backward(dy)
    with pytest.raises(UnsupportedError, match="expected no dweight_out, which only backward"):
        torch.func.grad(lambda x: rms_norm(x, w, dweight_out=torch.zeros(16)).sum())(x)
