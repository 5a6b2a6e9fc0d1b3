"""RMSNorm without a GPU: the reference, and the torch layer on emulated kernels.

Emulated kernels take the same arguments and access the same memory as compiled ones, but compute in PyTorch. Tests with
the fixture `anywhere` also run on a GPU; test_rms_norm_gpu.py has the tests that need one.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import itertools
import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from quackish import errors, gpu, toolchain
from quackish.configs import choose
from quackish.configs.rms_norm import MAX_M, RmsNormBwdProblem, RmsNormFwdProblem
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.ops import rms_norm as ops
from quackish.ops import rms_norm_plans as plans
from quackish.ops import workspace
from quackish.ops.device import Device, device_of, substitute
from quackish.ops.kernel_for import Kernel, kernel_for
from quackish.ops.rms_norm import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
from quackish.reference import rms_norm as reference
from quackish.testing import assert_close_to_fp64
from quackish.testing import inputs as make
from quackish.testing.errors import error, same_bits
from quackish.testing.inputs import KINDS
from tests import buffer_layouts
from tests.rms_norm_cases import LAYOUTS, assert_same
from tests.wrapper_tensor import Wrapper

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from torch itself

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32)
STREAM = 1234  # the handle of the current stream


# Kernels in PyTorch -------------------------------------------------------------------------------------------------


class EmulatedConfig:
    def num_ctas(self, m, sm_count, heads):
        assert sm_count == gpu.H200.sm_count
        return min(m, 7)

    def scratch_floats(self, problem, num_ctas):
        return num_ctas * problem.n


class Emulated:
    """Emulated kernels, and their launches as (problem, arguments)."""

    def __init__(self):
        self.launches, self.tickets, self.scratch = [], torch.zeros(3, dtype=torch.int32), []
        self.device = Device(gpu.H200, self.kernel_for, stream=lambda: STREAM, workspace=self.take)

    def kernel_for(self, name, problem, on):
        assert on == gpu.H200
        kernel = {"rms_norm_fwd": self.forward, "rms_norm_bwd": self.backward}[name]
        return Kernel(functools.partial(kernel, problem), EmulatedConfig())

    def take(self, stream, scratch_floats):
        assert stream == STREAM
        self.scratch.append(torch.empty(scratch_floats))
        return self.tickets.data_ptr(), self.scratch[-1].data_ptr(), None

    def forward(self, p, *args):
        x, weight, bias, residual, y, res, rstd, x_rows, residual_rows, eps, weight_offset, m, num_ctas, stream = args
        self.launches.append((p, args))
        assert stream == STREAM
        assert num_ctas == min(m, 7)
        res_dtype = p.res_dtype or p.residual_dtype
        out_y, out_res, out_rstd = reference.rms_norm_fwd(
            read_rows(p, x, p.x_dtype, m, x_rows),
            read_parameter(p, weight, p.weight_dtype),
            read_parameter(p, bias, p.bias_dtype),
            read_rows(p, residual, p.residual_dtype, m, residual_rows),
            eps,
            weight_offset,
            None if res_dtype is None else getattr(torch, res_dtype),
            getattr(torch, p.y_dtype),
        )
        write(p, y, p.y_dtype, out_y)
        write(p, res, res_dtype, out_res)
        write(p, rstd, "float32", out_rstd)

    def backward(self, p, *args):
        x, weight, dy, dres, rstd, dx, dresidual, dweight, dbias, scratch, ticket = args[:11]
        x_rows, dy_rows, dres_rows, weight_offset, m, num_ctas, stream = args[11:]
        self.launches.append((p, args))
        assert stream == STREAM
        if p.dweight_dtype or p.dbias_dtype:
            assert not memory(ticket, torch.int32, 3).any()
            memory(scratch, FP32, num_ctas * p.n).fill_(float("nan"))
        else:
            assert scratch is None
            assert ticket is None
        dtypes = (p.dx_dtype, p.dresidual_dtype, "float32" if p.add_dweight else p.dweight_dtype, p.dbias_dtype)
        out = reference.rms_norm_bwd(
            read_rows(p, dy, p.dy_dtype, m, dy_rows),
            read_rows(p, x, p.x_dtype, m, x_rows),
            read_parameter(p, weight, p.weight_dtype),
            memory(rstd, FP32, m).view(-1, p.heads),
            read_rows(p, dres, p.dres_dtype, m, dres_rows),
            weight_offset,
            *(getattr(torch, dtype) if dtype else None for dtype in dtypes),
        )
        if p.add_dweight:
            there = memory(dweight, getattr(torch, p.dweight_dtype), p.heads * p.n)
            there.copy_(there.float() + out[2].view(-1))
            out, dweight, dtypes = (*out[:2], None, out[3]), None, (*dtypes[:2], None, dtypes[3])
        for pointer, dtype, value in zip((dx, dresidual, dweight, dbias), dtypes, out, strict=True):
            write(p, pointer, dtype, value)


def memory(address, dtype, size):
    return torch.frombuffer((ctypes.c_char * (size * dtype.itemsize)).from_address(address), dtype=dtype)


def read_rows(p, address, dtype, m, layout):
    """(m / heads, heads, n) at the given addresses; None if the problem has no such tensor."""
    assert (address is None) == (dtype is None)
    assert (layout is None) == (p.packed or dtype is None)
    if dtype is None:
        return None
    dtype = getattr(torch, dtype)
    m1, s0, s1 = layout or (1, p.n, 0)
    r = torch.arange(m).view(-1, p.heads)
    start = (r // m1) * s0 + (r % m1) * s1
    assert not p.aligned or (address % 16 == 0 and not (start * dtype.itemsize % 16).any())
    return memory(address, dtype, int(start.max()) + p.n)[start[..., None] + torch.arange(p.n)]


def read_parameter(p, address, dtype):
    assert (address is None) == (dtype is None)
    assert not (p.aligned and address and address % 16)
    return None if dtype is None else memory(address, getattr(torch, dtype), p.heads * p.n).view(p.heads, p.n)


def write(p, address, dtype, value):
    assert (address is None) == (dtype is None)
    if dtype is not None:
        assert not p.aligned or address % 16 == 0
        memory(address, getattr(torch, dtype), value.numel()).copy_(value.reshape(-1))


@pytest.fixture
def kernels():
    """Runs CPU tensors on emulated kernels, as CUDA tensors on compiled ones."""
    emulated = Emulated()
    plans._plans.clear()
    with substitute("cpu", emulated.device):
        yield emulated


@pytest.fixture(params=["portable", "kernels"])
def path(request):
    """Runs the test on the portable path and on emulated kernels."""
    return request.getfixturevalue("kernels") if request.param == "kernels" else None


@pytest.fixture(params=["portable", "kernels", pytest.param("gpu", marks=pytest.mark.gpu)])
def anywhere(request):
    """As `path`, and also on a GPU."""
    if request.param != "gpu":
        yield request.getfixturevalue("kernels") if request.param == "kernels" else None
        return
    on["device"] = "cuda"
    errors._warned.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", PortablePathWarning)
        yield Emulated()  # without launches
    on["device"] = "cpu"


on = dict(device="cpu")  # of all tensors in tests


def rows(*args, **options):
    return make.rows(*args, **options, **on)


def weights(*args, **options):
    return make.weights(*args, **options, **on)


def leaf(t):
    return t.detach().clone().requires_grad_()


def step(call, inputs, dy):
    """[outputs, gradients of the inputs that require one]; dy has a gradient for each output."""
    out = call(*inputs)
    outs = out if isinstance(out, tuple) else (out,)
    wanted = [t for t in inputs if t is not None and t.requires_grad]
    return [*outs, *torch.autograd.grad(outs, wanted, dy, allow_unused=True)]


# The reference ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*FLOATS, FP64])
@pytest.mark.parametrize("kind", KINDS)
def test_reference_against_pytorch(dtype, kind):
    x, w = leaf(rows((33, 200), dtype, kind=kind)), leaf(weights(200, dtype))
    dy = rows((33, 200), dtype, seed=2)
    ours = step(lambda x, w: rms_norm(x, w, eps=1e-5), (x, w), dy)
    theirs = step(lambda x, w: F.rms_norm(x, (200,), w, 1e-5), (x, w), dy)
    truth = step(lambda x, w: F.rms_norm(x, (200,), w, 1e-5), (leaf(x.double()), leaf(w.double())), dy.double())
    eps = torch.finfo(dtype).eps
    for got, peer, want in zip(ours, theirs, truth, strict=True):
        e, bound = error(got, want), error(peer, want)
        assert e.within(max(1.5 * bound.norm, 2 * eps), max(1.5 * bound.worst, 4 * eps)), (e, bound)


@pytest.mark.parametrize("weight, bias, residual, offset", list(itertools.product([0, 1], [0, 1], [0, 1], [0.0, 1.0])))
def test_gradcheck(weight, bias, residual, offset):
    if offset and not weight:
        return
    x = leaf(rows((2, 3, 5), FP64))
    w = leaf(weights(5, FP64)) if weight else None
    b = leaf(rows((5,), FP64, seed=2)) if bias else None
    r = leaf(rows((2, 3, 5), FP64, seed=3)) if residual else None

    def call(x, w, b, r):
        return rms_norm(x, w, b, residual=r, eps=1e-3, weight_offset=offset)

    assert torch.autograd.gradcheck(call, (x, w, b, r))
    assert torch.autograd.gradgradcheck(
        call, (x[:1, :2].detach().requires_grad_(), w, b, r if r is None else r[:1, :2])
    )


# Semantics, on both paths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x_dtype, w_dtype, r_dtype, out_dtype", list(itertools.product(FLOATS, FLOATS, FLOATS, (None, FP32)))
)
@pytest.mark.parametrize("residual_dtype", [None, BF16, FP32])
def test_every_mix_of_dtypes(path, residual_dtype, x_dtype, w_dtype, r_dtype, out_dtype):
    x, r = leaf(rows((3, 7, 16), x_dtype)), leaf(rows((3, 7, 16), r_dtype, seed=1))
    w, b = leaf(weights(16, w_dtype)), leaf(rows((16,), w_dtype, seed=2))

    def call(x, w, b, r):
        dtypes = dict(residual_dtype=residual_dtype, out_dtype=out_dtype)
        return rms_norm(x, w, b, residual=r, eps=1e-6, weight_offset=0.5, **dtypes)

    res_dtype = residual_dtype or r_dtype

    def reference(x, w, b, r):
        res = rounded(x + r, res_dtype)
        return F.rms_norm(res, (16,), w + 0.5, 1e-6) + b, res

    y, res = call(x, w, b, r)
    assert (y.dtype, res.dtype) == (out_dtype or x_dtype, res_dtype)
    assert same_bits(res, (x.float() + r.float()).to(res_dtype))
    assert_close_to_fp64(call, reference, x, w, b, r)


def rounded(t, dtype):
    """fp64 t rounded to `dtype`, with an unrounded gradient."""
    return t + (t.float().to(dtype).double() - t).detach()


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)))
@pytest.mark.parametrize("used", ["y", "res", "both"])
def test_only_required_gradients_are_computed(path, wanted, used):
    tensors = [rows((4, 8)), weights(8), rows((8,), seed=2), rows((4, 8), BF16, seed=3)]
    inputs = [t.requires_grad_(flag) for t, flag in zip(tensors, wanted, strict=True)]
    y, res = rms_norm(*inputs[:3], residual=inputs[3])
    assert y.requires_grad == res.requires_grad == any(wanted)
    if not any(wanted):
        return
    outs = {"y": (y,), "res": (res,), "both": (y, res)}[used]
    asked = [t for t in inputs if t.requires_grad]
    got = torch.autograd.grad(outs, asked, [torch.ones_like(t) for t in outs], allow_unused=True)
    for t, grad in zip(asked, got, strict=True):
        if grad is None:  # res does not depend on the parameters
            assert used == "res"
            assert t.dim() == 1
        else:
            assert (grad.shape, grad.dtype) == (t.shape, t.dtype)
    if path and used != "res":
        problem, _ = path.launches[-1]
        assert (problem.dweight_dtype, problem.dbias_dtype) == tuple("float32" if f else None for f in wanted[1:3])
        both = {(True, True): ("float32", "bfloat16"), (True, False): ("float32", None)}
        dx = both.get((wanted[0], wanted[3]), ("bfloat16", None) if wanted[3] else (None, None))
        assert (problem.dx_dtype, problem.dresidual_dtype) == dx
        assert problem.dres_dtype == ("bfloat16" if used == "both" and (wanted[0] or wanted[3]) else None)


@pytest.mark.parametrize("make", [torch.clone, lambda t: torch.cat([t, t], 1)[:, : t.shape[1]]], ids=["", "strided"])
def test_a_weight_per_head(anywhere, make):
    """x is a slice of qkv, (2, 5, 4, 16)."""
    qkv, r, dy = rows((2, 5, 3, 4, 16)), rows((2, 5, 4, 16), BF16, seed=1), rows((2, 5, 4, 16), seed=2)
    w, b = make(rows((4, 16), seed=3)), make(rows((4, 16), BF16, seed=4))
    x, w, b, r = inputs = [t.detach().requires_grad_() for t in (qkv[:, :, 1], w, b, r)]

    def call(x, w, b, r):
        return rms_norm(x, w, b, residual=r, eps=1e-6, weight_offset=0.5, backend="cute" if anywhere else "auto")

    def reference(x, w, b, r):
        res = rounded(x + r, BF16)
        return F.rms_norm(res, (16,), None, 1e-6) * (w + 0.5) + b, res

    assert_close_to_fp64(call, reference, *inputs)
    got = step(call, inputs, (dy, dy.to(BF16)))
    for h in range(4):  # same bits as the norm of each head alone
        alone = [t.detach().requires_grad_() for t in (x[..., h, :], w[h], b[h], r[..., h, :])]
        want = step(call, alone, (dy[..., h, :], dy[..., h, :].to(BF16)))
        assert_same([t[..., h, :].contiguous() for t in (*got[:3], got[5])], (*want[:3], want[5]))
        torch.testing.assert_close((got[3][h], got[4][h]), (want[3], want[4]))


def test_functions_of_a_weight_per_head(path):
    x, w, dy = rows((3, 4, 8)), weights(32).view(4, 8), rows((3, 4, 8), seed=2)
    y, _, rstd = rms_norm_forward(x, w)
    assert rstd.shape == (3, 4)
    got = rms_norm_backward(dy, x, w, rstd, dbias=True)
    want = step(lambda x, w, b: rms_norm(x, w, b), (leaf(x), leaf(w), leaf(torch.zeros(4, 8))), dy)
    assert_same([y, got.dx, got.dweight, got.dbias], want)
    single = step(rms_norm, (leaf(x[:, :1]), leaf(w[:1])), dy[:, :1])  # (1, 8) is a weight for one head
    plain = step(rms_norm, (leaf(x[:, 0]), leaf(w[0])), dy[:, 0])
    assert_same([t.view(-1, 8) for t in single], [t.view(-1, 8) for t in plain])
    if path:
        assert [problem.heads for problem, _ in path.launches] == [4] * 4 + [1] * 4


def buffer_case(shape, buffer):
    """x and a weight of `shape` that require grad, a gradient of y, and a buffer of ones."""
    x, w, dy = leaf(rows((5, 4, 16), BF16)), leaf(rows(shape, BF16, seed=1)), rows((5, 4, 16), BF16, seed=2)
    if buffer == "strided":
        return x, w, dy, torch.ones(*shape, 2, **on)[..., 1]
    return x, w, dy, torch.ones(shape, dtype=buffer, **on)


@pytest.mark.parametrize("shape", [(16,), (4, 16)], ids=str)
@pytest.mark.parametrize("buffer", [FP32, BF16, "strided"], ids=str)
def test_dweight_out(anywhere, buffer, shape):
    x, w, dy, out = buffer_case(shape, buffer)
    wd = w.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(F.rms_norm(x.double(), (16,), None, 1e-6) * wd, wd, dy.double())
    call = functools.partial(rms_norm, eps=1e-6, backend="cute" if anywhere else "auto")
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
    if anywhere and anywhere.launches:
        added = [problem.add_dweight for problem, _ in anywhere.launches if isinstance(problem, RmsNormBwdProblem)]
        assert added == [False, *[buffer != "strided"] * 6, *[False] * 3]  # compiled code's operators are functional


@pytest.mark.parametrize("shape", [(16,), (4, 16)], ids=str)
@pytest.mark.parametrize("layout", buffer_layouts.NAMES)
def test_buffers_of_any_strides(anywhere, layout, shape):
    """The weight gradient is added to the buffer's elements and to nothing around them."""
    for dtype in (FP32, BF16):
        x, w, dy, want = buffer_case(shape, dtype)
        view, whole = buffer_layouts.ones_in(layout, shape, dtype, want.device)
        for out in (want, view):
            rms_norm(x, w, dweight_out=out, backend="cute" if anywhere else "auto").backward(dy)
        assert error(view, want.double()).norm <= torch.finfo(dtype).eps
        assert view.ne(1).any()
        assert buffer_layouts.are_neighbours_unchanged(view, whole)


def test_dweight_out_in_special_cases(path):
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


def test_autograd_detects_writes_to_dweight_out(anywhere):
    x, w, dy, out = buffer_case((16,), FP32)
    y = rms_norm(x, w, dweight_out=out)
    product = (torch.ones((), requires_grad=True, **on) * out).sum()  # saves the buffer for its backward
    y.backward(dy)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("mode", [contextlib.nullcontext, lambda: Functions()], ids=["eager", "operators"])
def test_invalid_buffers_raise(path, mode):
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


@pytest.mark.parametrize("residual", [False, True])
def test_no_rows(anywhere, residual):
    x, w, b = leaf(rows((2, 0, 8))), leaf(weights(8, BF16)), leaf(weights(8))
    out = rms_norm(x, w, b, residual=x if residual else None, backend="cute" if anywhere else "auto")
    y = out[0] if residual else out
    assert y.shape == x.shape
    dx, dw, db = torch.autograd.grad(y, (x, w, b), y)
    assert dx.shape == x.shape
    assert same_bits(dw, torch.zeros_like(w))
    assert same_bits(db, torch.zeros_like(b))
    assert not anywhere or not anywhere.launches


@pytest.mark.filterwarnings("ignore::quackish.errors.PortablePathWarning")  # fp64 on a GPU
@pytest.mark.parametrize("dtype", [*FLOATS, FP64])
def test_default_eps_is_pytorchs(path, dtype):
    x, w = rows((4, 8), dtype) * 1e-4, weights(8, dtype)  # squares as small as fp32's epsilon
    want = F.rms_norm(x, (8,), w)
    with Functions() as called:  # through the operator
        torch.testing.assert_close(rms_norm(x, w), want)
    assert "quackish.rms_norm_fwd.default" in called.seen
    torch.testing.assert_close(rms_norm(x, w), want)
    torch.testing.assert_close(rms_norm_forward(x, w).y, want)
    torch.testing.assert_close(RMSNorm(8, dtype=dtype)(x), F.rms_norm(x, (8,)))


def test_tensors_without_memory_raise(kernels):
    x, w = rows((3, 8)), weights(8)
    w.untyped_storage().resize_(0)  # as FSDP does after resharding a parameter
    with pytest.raises(ValueError, match=r"rms_norm: weight has shape \(8,\) but no memory"):
        rms_norm(x, w)
    assert not kernels.launches


def test_wrapper_subclass_intercepts_operator(path):
    x, w = rows((3, 8)), weights(8)
    wrapped = Wrapper(x)
    y = rms_norm(wrapped, w)
    assert "quackish.rms_norm_fwd.default" in wrapped.seen
    torch.testing.assert_close(y, rms_norm(x, w))


def test_inputs_are_not_modified(anywhere):
    x, w, b, r = leaf(rows((6, 8))), leaf(weights(8)), leaf(rows((8,), seed=1)), leaf(rows((6, 8), seed=2))
    dy, dres = rows((6, 8), seed=3), rows((6, 8), seed=4)
    mine = (x, w, b, r, dy, dres)
    before = [t.detach().clone() for t in mine]
    step(lambda *a: rms_norm(*a[:3], residual=a[3]), (x, w, b, r), (dy, dres))
    assert_same([t.detach() for t in mine], before)
    assert all(t._version == 0 for t in mine)


def test_same_bits_without_grad_and_in_second_backward(anywhere):
    x, w = leaf(rows((6, 8))), leaf(weights(8))
    y = rms_norm(x, w)
    with torch.no_grad():
        quiet = rms_norm(x, w)
    with torch.inference_mode():
        inference = rms_norm(x, w)
    assert not quiet.requires_grad
    assert same_bits(y, quiet)
    assert same_bits(y, inference)
    first = torch.autograd.grad(y, (x, w), torch.ones_like(y), retain_graph=True)
    assert_same(first, torch.autograd.grad(y, (x, w), torch.ones_like(y)))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, (x, w), torch.ones_like(y))


def test_modified_input_raises(anywhere):
    x, w = leaf(rows((6, 8))) * 1.0, leaf(weights(8))
    y = rms_norm(x, w)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_second_derivatives(anywhere):
    x, w, r = leaf(rows((3, 8))), leaf(weights(8)), leaf(rows((3, 8), seed=1))

    def second(norm):
        y, res = norm(x, w, residual=r)
        dx, dw = torch.autograd.grad((y * res).square().sum(), (x, w), create_graph=True)
        return torch.autograd.grad((dx.square().sum() + dw.sum()), (x, w, r))

    def plain(x, w, residual):
        res = x + residual
        return F.rms_norm(res, (8,), w), res

    for got, want in zip(second(rms_norm), second(plain), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual_dtype", [None, BF16])
def test_functional_forward_and_backward(anywhere, residual_dtype):
    x, w, b = rows((2, 3, 8), BF16), weights(8), rows((8,), BF16, seed=1)
    r, dy, dres = rows((2, 3, 8), seed=2), rows((2, 3, 8), BF16, seed=3), rows((2, 3, 8), seed=4)
    inputs = [leaf(t) for t in (x, w, b, r)]
    dres, kwargs = dres.to(residual_dtype or FP32), dict(weight_offset=1.0, residual_dtype=residual_dtype)
    want = step(lambda x, w, b, r: rms_norm(x, w, b, residual=r, **kwargs), inputs, (dy, dres))
    y, res, rstd = rms_norm_forward(*inputs[:3], residual=inputs[3], **kwargs)
    assert not y.requires_grad
    assert (rstd.shape, rstd.dtype) == ((2, 3), FP32)
    options = dict(weight_offset=1.0, dres=dres, dbias=True, dresidual=True)
    grads = rms_norm_backward(dy, res, w, rstd, **options, dx_dtype=BF16, dresidual_dtype=FP32, dbias_dtype=BF16)
    assert_same([y, res, grads.dx, grads.dweight, grads.dbias, grads.dresidual], want)

    out = rms_norm_forward(x, None)
    assert out.res is x
    grads = rms_norm_backward(dy, x, None, out.rstd, dx=False, dbias=True)
    assert grads.dx is grads.dweight is grads.dresidual is None
    assert grads.dbias.dtype == BF16
    assert rms_norm_backward(dy, x, w, out.rstd, dx=False, dweight=False) == (None,) * 4


# The module ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [8, (8,), [4, 8]])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_module_is_a_drop_in(path, shape, affine, dtype):
    options = dict(elementwise_affine=affine, dtype=dtype)
    theirs, ours = torch.nn.RMSNorm(shape, **options), RMSNorm(shape, **options)
    if affine:
        torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = rows((3, 4, 8), dtype) * 1e-2  # small, so that eps counts
    torch.testing.assert_close(ours(x), theirs(x))
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, torch.nn.RMSNorm)
    y, res = ours(x, x)
    torch.testing.assert_close(res, x + x)
    torch.testing.assert_close(y, theirs(x + x))


def test_module_options():
    dtypes = dict(residual_dtype=FP16, out_dtype=FP32)
    m = RMSNorm(8, 1e-5, True, "cpu", BF16, bias=True, weight_offset=1.0, **dtypes, backend="reference")
    assert {k: (v.dtype, v.unique().tolist()) for k, v in m.state_dict().items()} == {
        "weight": (BF16, [0.0]),
        "bias": (BF16, [0.0]),
    }
    shown = "weight_offset=1.0, residual_dtype=torch.float16, out_dtype=torch.float32, backend=reference, bias=True)"
    assert repr(m).endswith(shown)
    x = rows((3, 8), BF16)
    y = m(x)
    assert [y.dtype, *(t.dtype for t in m(x, x))] == [FP32, FP32, FP16]
    torch.testing.assert_close(y, F.rms_norm(x.float(), (8,), None, 1e-5))
    torch.nn.init.ones_(m.weight)
    m.reset_parameters()
    assert not m.weight.any()
    assert same_bits(copy.deepcopy(m)(x), y)
    x = rows((2, 3, 4))
    multi = RMSNorm((3, 4), bias=True)
    y = multi(x.transpose(0, 1).contiguous().transpose(0, 1))
    torch.testing.assert_close(y, F.rms_norm(x, (3, 4)))
    with pytest.raises(ValueError, match=r"RMSNorm: x is \(2, 3\); expected \(\.\.\., 3, 4\)"):
        multi(torch.ones(2, 3))


# Errors -------------------------------------------------------------------------------------------------------------

X, W = torch.ones(4, 8), torch.ones(8)
ERRORS = [
    (lambda: rms_norm(X, torch.ones(5)), ValueError, "rms_norm: weight has 5 elements but x has 8 columns"),
    (lambda: rms_norm(X, W, torch.ones(9)), ValueError, "rms_norm: bias has 9 elements but x has 8 columns"),
    (
        lambda: rms_norm(X, torch.ones(1, 8)), ValueError,
        "rms_norm: weight is (1, 8) but x is (4, 8); expected (8,), or x's last two dimensions (heads, n)",
    ),
    (
        lambda: rms_norm(X, W, X), ValueError,
        "rms_norm: bias is (4, 8) but weight is (8,); expected weight's shape, or (8,) without weight",
    ),
    (lambda: rms_norm(X, None, X), ValueError, "rms_norm: bias is (4, 8) but weight is None; expected weight's"),
    (lambda: rms_norm(torch.tensor(1.0), W), ValueError, "rms_norm: x is (); expected (..., n) with n >= 1"),
    (lambda: rms_norm(X[:, :0], None), ValueError, "rms_norm: x is (4, 0); expected"),
    (lambda: rms_norm(X, W, residual=X[:2]), ValueError, "residual is (2, 8) but x is (4, 8); expected equal"),
    (lambda: rms_norm(X.int(), W), TypeError, "rms_norm: x is int32; expected one of bfloat16, float16, float32"),
    (lambda: rms_norm([1.0], W), TypeError, "rms_norm: x is a list; expected a torch.Tensor"),
    (lambda: rms_norm(X, W.to("meta")), ValueError, "rms_norm: weight is on meta but x is on cpu"),
    (lambda: rms_norm(X, W, eps=W), TypeError, "rms_norm: eps is a Tensor; expected a float"),
    (lambda: rms_norm(X, W, eps=1.0) is rms_norm(X, W, eps=True), TypeError, "eps is a bool"),
    (lambda: rms_norm(X, W, eps=-1e-6), ValueError, "rms_norm: eps is -1e-06; expected a finite number, at least 0"),
    (lambda: rms_norm_forward(X, W, eps=math.nan), ValueError, "rms_norm: eps is nan; expected a finite number"),
    (lambda: rms_norm(X, W, eps=0) is rms_norm(X, W, eps=math.inf), ValueError, "rms_norm: eps is inf; expected"),
    (lambda: ops._op_fwd(X, W, None, None, None, -1.0, 0.0, None, None, "auto"), ValueError, "eps is -1.0; expected"),
    (lambda: RMSNorm(8, eps=-1), ValueError, "RMSNorm: eps is -1; expected a finite number, at least 0"),
    (lambda: RMSNorm(8, weight_offset=math.nan), ValueError, "RMSNorm: weight_offset is nan; expected a finite number"),
    (lambda: rms_norm(X, W, eps=1e300), ValueError, "rms_norm: eps is 1e+300; expected a finite number"),
    (lambda: RMSNorm(8, backend="cuda"), ValueError, "RMSNorm: backend is 'cuda'; expected one of 'auto'"),
    (lambda: RMSNorm(8, out_dtype="bf16"), TypeError, "RMSNorm: out_dtype is bf16; expected None or one of bfloat16"),
    (lambda: rms_norm_backward(X, X, W, W[:4], weight_offset=math.inf), ValueError, "weight_offset is inf; expected"),
    (lambda: rms_norm(X, W, weight_offset=None), TypeError, "rms_norm: weight_offset is a NoneType"),
    (lambda: rms_norm(X, None, weight_offset=1.0), ValueError, "weight_offset is 1.0 but weight is None"),
    (lambda: rms_norm(X, W, out_dtype=torch.int8), TypeError, "rms_norm: out_dtype is torch.int8; expected None"),
    (lambda: rms_norm(X, W, residual_dtype=FP32), ValueError, "residual_dtype is torch.float32 but residual is"),
    (lambda: rms_norm_backward(X, X, W, W[:4], dresidual=True, dresidual_dtype=int), TypeError, "dresidual_dtype is"),
    (lambda: rms_norm(X, W, dweight_out=X), ValueError, "dweight_out is (4, 8) but weight is (8,); expected"),
    (lambda: rms_norm(X, None, dweight_out=W), ValueError, "dweight_out is (8,) but weight is None; expected"),
    (lambda: rms_norm(X, W, dweight_out=W.half()), TypeError, "dweight_out is float16; expected float32 or weight's"),
    (lambda: rms_norm(X, W, dweight_out=1.0), TypeError, "rms_norm: dweight_out is a float; expected a torch.Tensor"),
    (lambda: rms_norm(X, W, backend="cuda"), ValueError, "rms_norm: backend is 'cuda'; expected one of 'auto'"),
    (lambda: rms_norm(X, W, backend="cute"), UnsupportedError, "rms_norm: no kernel for cpu tensors"),
    (lambda: rms_norm_backward(X[:3], X, W, X[:, 0]), ValueError, "backward: dy is (3, 8) but x is (4, 8)"),
    (lambda: rms_norm_backward(X, X, W, W), ValueError, "rms_norm_backward: rstd is (8,), strides (1,), and x is"),
    (lambda: rms_norm_backward(X, X, W, W[:4].half()), TypeError, "rms_norm_backward: rstd is float16; expected"),
    (lambda: rms_norm_backward(None, X, W, W[:4]), TypeError, "rms_norm_backward: dy is a NoneType; expected"),
    (
        lambda: ops._op_bwd(X, X, W, W[:4], None, 0.0, None, FP32, None, None, "auto"), ValueError,
        "rms_norm_backward: dresidual_dtype is given without dx_dtype; for one gradient, pass dx_dtype",
    ),
    (
        lambda: RMSNorm(8, elementwise_affine=False, weight_offset=1.0), ValueError,
        "RMSNorm: weight_offset is 1.0 but elementwise_affine is False",
    ),
    (lambda: RMSNorm(9)(X), ValueError, "RMSNorm: x is (4, 8); expected (..., 9)"),
]  # fmt: skip


@pytest.mark.parametrize("call, kind, text", ERRORS)
def test_errors_name_the_argument(call, kind, text):
    for _ in range(2):  # the first call must not cache a plan
        with pytest.raises(kind) as caught:
            call()
        assert text in str(caught.value)


def find(problem, backend="auto", device="cuda:0", m=5, **options):
    name = "rms_norm_fwd" if isinstance(problem, RmsNormFwdProblem) else "rms_norm_bwd"
    device = torch.device(device)
    return plans.find_kernel(name, problem, m, device, device_of(device), backend, **options)


FP32_PROBLEM = RmsNormFwdProblem(8, "float32", "float32")


@pytest.fixture
def two_gpus():
    with substitute("cuda:0", Device(gpu.H200, kernel_for)), substitute("cuda:1", Device(gpu.A100, kernel_for)):
        yield


def test_one_warning_or_error_without_a_kernel(two_gpus):
    errors._warned.clear()
    for call, text in (
        (lambda: find(FP32_PROBLEM, device="cuda:1"), r"no kernel for sm_80 \(A100\); supported: sm_90"),
        (
            lambda: find(dataclasses.replace(FP32_PROBLEM, weight_dtype="float64")),
            "no kernel for weight in float64; supp",
        ),
        (lambda: find(FP32_PROBLEM, rstd_dtype=FP64), "no kernel for rstd in float64; supported: float32"),
        (lambda: find(FP32_PROBLEM, m=MAX_M + 1), "no kernel for 2146435073 rows of 8; at most 2146435072"),
    ):
        with pytest.warns(PortablePathWarning, match=f"^rms_norm: {text}"):
            assert call() is None
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call() is None  # warned before
    with pytest.raises(UnsupportedError, match="rows of 8"):
        find(FP32_PROBLEM, backend="cute", m=MAX_M + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_reason = RmsNormBwdProblem(8, "float32", "float32")  # the same reason in both directions
        assert find(one_reason, device="cuda:1") is None
        assert find(FP32_PROBLEM, m=MAX_M + 2, backend="reference") is None
        assert find(FP32_PROBLEM, device="cpu") is None


def test_without_the_compiler():
    errors._warned.clear()

    def kernel_for(kernel, problem, gpu):
        return toolchain._folder("nvidia-cutlass-dsl", "not_installed")

    with substitute("cuda:0", Device(gpu.H200, kernel_for)):
        with pytest.warns(
            PortablePathWarning, match=r"^rms_norm: nvidia-cutlass-dsl.*installs it\. backend=.auto. runs"
        ):
            assert find(FP32_PROBLEM) is None
        with pytest.raises(UnsupportedError, match="no module named 'not_installed'"):
            find(FP32_PROBLEM, backend="cute")


# Layouts: in place or copied, and which kernel ------------------------------------------------------------------------


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
def test_layouts(kernels, name):
    """Of x, then of a residual and of both output gradients."""
    t, other, w = layout(name), rows((2, 5, 4, 8), seed=13), weights(8)

    def compare(call, inputs, dy):
        want = step(lambda *a: call(*a, backend="reference"), [leaf(u.contiguous()) for u in inputs], dy)
        got = step(call, [u.detach().requires_grad_() for u in inputs], dy)
        assert_same(got, want)
        assert all(out.is_contiguous() for out in got)
        return kernels.launches[-2:]

    (forward, f), (backward, b) = compare(rms_norm, (t, w), other)
    assert (f[0] == t.data_ptr()) == (b[0] == t.data_ptr()) == (name in IN_PLACE)
    assert forward.packed == backward.packed == (name not in STRIDED)
    assert forward.aligned == backward.aligned == (name != "off by one element")

    def with_residual(x, w, r, backend="auto"):
        return rms_norm(x, w, residual=r, backend=backend)

    (_, f), (_, b) = compare(with_residual, (other, w, t), (t, t))
    assert (f[3] == t.data_ptr()) == (b[2] == t.data_ptr()) == (b[3] == t.data_ptr()) == (name in IN_PLACE)


def test_plans_are_not_reused_for_other_layouts(path):
    """Runs every layout after every other, so that a plan with an incomplete key would be reused wrongly."""
    w = leaf(weights(8))
    tensors = list(map(layout, LAYOUTS))
    for i, j in itertools.product(range(len(tensors)), repeat=2):
        # x and residual stay while dy and dres change: one forward plan, many backward plans
        x, dy, r, dres = (tensors[k % len(tensors)] for k in (i, j, i + 3, j // 2))
        want = step(with_residual, [leaf(t.contiguous()) for t in (x, w, W, r)], (dy.contiguous(), dres.contiguous()))
        inputs = [x.detach().requires_grad_(), w, leaf(W), r.detach().requires_grad_()]
        got = step(with_residual, inputs, (dy, dres))
        for a, b in zip(got, want, strict=True):
            assert a.is_contiguous()
            torch.testing.assert_close(a, b)
        want = step(rms_norm, (leaf(x.contiguous()), w), dy.contiguous())
        assert_same(step(rms_norm, (x.detach().requires_grad_(), w), dy), want)


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
def test_alignment_of_rows(kernels, n, dtype, out_dtype, aligned):
    w = weights(n, dtype)
    rms_norm(rows((4, n), dtype), w, out_dtype=out_dtype)
    rms_norm(rows((4, 3 * n), dtype)[:, n : 2 * n], None, out_dtype=out_dtype)
    rms_norm_backward(rows((4, n), out_dtype), rows((4, n), dtype), w, torch.ones(4))
    assert [problem.aligned for problem, _ in kernels.launches] == [aligned] * 3


def test_strided_parameter_is_copied(kernels):
    x, w, b = rows((4, 8)), weights(16)[::2], rows((8, 3), seed=1)[:, 1]
    want = rms_norm(x, w, b, backend="reference")
    inputs = [x.requires_grad_(), w.detach().requires_grad_(), b.detach().requires_grad_()]
    got = step(rms_norm, inputs, torch.ones(4, 8))
    assert same_bits(got[0], want)
    assert [g.shape for g in got[1:]] == [x.shape, w.shape, b.shape]


def test_plans_with_aligned_and_unaligned_parameters(kernels):
    x, buffer = rows((4, 8)), weights(9)
    for weight, aligned in ((buffer[:8], True), (buffer[1:], False), (buffer[:8], True), (buffer[1:], False)):
        got = rms_norm(x, weight)
        assert same_bits(got, rms_norm(x, weight.clone(), backend="reference"))
        rms_norm(x, weights(8), weight)
        rms_norm_backward(x, x, weight, torch.ones(4))
        assert [problem.aligned for problem, _ in kernels.launches[-3:]] == [aligned] * 3
    assert sum(isinstance(plan, plans.BackwardPlan) for plan in plans._plans.values()) == 1


def test_plan_cache(kernels):
    row, w = rows((1, 8)), weights(8)
    for m in (1, 2, 3, 1, 2, 3):
        rms_norm(row.expand(m, 8), w)
    assert len(plans._plans) == 3
    for m in range(1, plans._MAX_PLANS + 5):
        rms_norm(row.expand(m, 8), w)
    assert len(plans._plans) == 4
    assert len({problem for problem, _ in kernels.launches}) == 2  # problems do not include M


def test_backward_plan_is_cached_in_forward_plan(kernels):
    x, w = leaf(rows((4, 8))), torch.nn.Parameter(weights(8))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(2):
            rms_norm(x, w).sum().backward()
    assert len(kernels.launches) == 4
    assert not [event.name for event in profile.events() if "quackish" in event.name]


@pytest.mark.parametrize("mode", ["function", "module", "operator", "no_grad", "backward", "compiled"])
def test_warning_points_at_the_users_line(monkeypatch, mode):
    errors._warned.clear()
    choose.reload()
    wanted = "rms_norm_bwd" if mode == "backward" else "rms_norm_fwd"
    monkeypatch.setattr(plans, "find_kernel", lambda name, *args: plans.warn_once("why") if name == wanted else None)
    call = dict(module=RMSNorm(8), compiled=torch.compile(lambda x: rms_norm(x, None), backend="aot_eager"))
    call = call.get(mode, lambda x: rms_norm(x, None))
    context = {"operator": Functions(), "no_grad": torch.no_grad()}.get(mode, contextlib.nullcontext())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with context:
            y = call(leaf(rows((4, 8))))
        if mode == "backward":
            y.sum().backward()
    assert [w.filename for w in seen if str(w.message) == "why"] == [__file__]


def test_launches_and_allocations_use_the_tensors_device(kernels):
    inputs, dy = case()
    want = step(with_residual, inputs, dy)
    current, device = ["another"], kernels.device

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
    assert len(kernels.launches) == 2 + 4


def test_no_plan_leaks_into_a_substitute_or_out_of_it(kernels):
    x, w = leaf(rows((4, 8))), leaf(weights(8))
    y = rms_norm(x, w)
    assert len(kernels.launches) == 1
    inner = Emulated()
    with substitute("cpu", inner.device):
        z = rms_norm(x, w)
        assert (len(inner.launches), len(kernels.launches)) == (1, 1)
        with pytest.raises(RuntimeError, match="rms_norm: cpu tensors had another device of kernels in forward"):
            y.sum().backward()
        z.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="had another device of kernels in forward; expected backward inside the sa"):
        z.sum().backward()
    y.sum().backward()
    assert (len(inner.launches), len(kernels.launches)) == (2, 2)
    with Functions():
        y = rms_norm(x, w)
    with substitute("cpu", inner.device), pytest.raises(RuntimeError, match="expected backward inside the same"):
        y.sum().backward()


# Workspace ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """workspace.py on a simulated GPU."""

    class Device:
        stream, capturing = 1, False

        def take(self, index, scratch_floats):
            return workspace.take(index, self.stream, scratch_floats)

        def new_reserve(self, index):
            assert not self.capturing
            zeros = torch.zeros(workspace._RESERVE * 32, dtype=torch.int32)
            workspace._reserve_memory.append(zeros)
            return iter(range(zeros.data_ptr(), zeros.data_ptr() + zeros.nbytes, 128))

    def on_cpu(make):
        return lambda *args, device=None, **options: make(*args, **options)

    d = Device()
    for owner, name, value in (
        (workspace, "_workspaces", {}),
        (workspace, "_reserves", {}),
        (workspace, "_reserve_memory", []),
        (workspace, "_RESERVE", 4),
        (workspace, "_MAX_STREAMS", 8),
        (workspace, "_new_reserve", d.new_reserve),
        (workspace.cuda, "is_capturing", lambda: d.capturing),
        (torch.cuda, "current_stream", lambda index: None),
        (torch, "zeros", on_cpu(torch.zeros)),
        (torch, "empty", on_cpu(torch.empty)),
    ):
        monkeypatch.setattr(owner, name, value)
    return d


def test_each_stream_has_its_own_workspace(device):
    first = device.take(0, 100)
    assert first[2][:32].tolist() == [0] * 32
    assert first[:2] == (first[2].data_ptr(), first[2].data_ptr() + 128)
    assert device.take(0, 100)[:2] == device.take(0, 1)[:2] == first[:2]
    device.stream = 2
    second = device.take(0, 100)
    other = device.take(1, 100)
    assert len({*first[:2], *second[:2], *other[:2]}) == 6
    device.stream = 1
    assert device.take(0, 100)[:2] == first[:2]
    assert len(workspace._reserve_memory) == 2  # one per device


def test_scratch_grows_and_stays_alive_until_the_launch(device):
    taken = [device.take(0, floats) for floats in (65, 128, 129, 300, 70, 512)]
    assert [len(t[2]) - 32 for t in taken] == [128, 128, 256, 512, 512, 512]
    assert len({t[0] for t in taken}) == 3  # earlier ones stay alive until their launch
    assert all(t[2].data_ptr() == t[0] for t in taken)


def test_number_of_workspaces_is_bounded(device):
    for device.stream in range(100):
        device.take(0, 100)
        assert len(workspace._workspaces) <= 8
    assert len(workspace._reserve_memory) == 1


def test_captured_launch_has_its_own_tickets_and_scratch(device):
    eager = device.take(0, 100)
    device.capturing = True
    taken = [device.take(0, 100) for _ in range(3)]
    assert [b[0] - a[0] for a, b in itertools.pairwise(taken)] == [128] * 2
    assert len({t[1] for t in (eager, *taken)}) == 4
    for _, scratch, kept in taken:
        assert kept[1].data_ptr() == scratch
        assert len(kept[1]) == 100
    device.capturing = False
    assert device.take(0, 100)[:2] == eager[:2]


def test_capture_without_reserve_allocates_tickets(device):
    device.capturing = True
    address, _, (zeros, _) = device.take(0, 4)  # the first launch
    assert zeros.data_ptr() == address
    assert zeros.tolist() == [0] * 32
    device.capturing = False
    device.take(0, 4)
    device.capturing = True
    assert [device.take(0, 4)[2][0] is None for _ in range(5)] == [True] * 4 + [False]  # used up


# Compiled, traced, checkpointed, transformed ------------------------------------------------------------------------


def case(m=6, n=8):
    inputs = [leaf(rows((m, n), BF16)), leaf(weights(n)), leaf(rows((n,), seed=1)), leaf(rows((m, n), seed=2))]
    return inputs, (rows((m, n), BF16, seed=3), rows((m, n), seed=4))


def with_residual(x, w, b, r):
    return rms_norm(x, w, b, residual=r, weight_offset=1.0)


@pytest.mark.parametrize("residual, res_dtype, out_dtype", [(None,) * 3, (BF16, FP32, None), (FP32, None, FP32)])
def test_opcheck(anywhere, residual, res_dtype, out_dtype):
    (x, w, b, r), (dy, _) = case()
    r = None if residual is None else r.detach().to(residual).requires_grad_()
    torch.library.opcheck(ops._op_fwd, (x, w, b, r, None, 1e-6, 1.0, res_dtype, out_dtype, "auto"))
    torch.library.opcheck(ops._op_fwd, (x, None, None, r, None, 1e-6, 0.0, res_dtype, out_dtype, "auto"))
    x, w, rstd, dy = x.detach(), w.detach(), torch.ones(6, device=x.device), dy.to(out_dtype or BF16)
    dres, second = None if r is None else r.detach(), FP32 if residual == FP32 else None
    torch.library.opcheck(ops._op_bwd, (dy, x, w, rstd, dres, 1.0, BF16, second, FP32, FP32, "auto"))
    torch.library.opcheck(ops._op_bwd, (dy, x, w, rstd, None, 1.0, None, None, FP32, None, "auto"))


def test_compiled_equals_eager_for_any_number_of_rows(path):
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    compiled = torch.compile(with_residual, fullgraph=True, backend=backend)
    for m in (5, 6, 7, 300, 2):
        inputs, dy = case(m)
        assert_same(step(compiled, inputs, dy), step(with_residual, inputs, dy))
    assert len(graphs) == 4  # forward and backward, for the first M and for any M
    targets = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert {"quackish.rms_norm_fwd.default", "quackish.rms_norm_bwd.default"} <= targets


def test_compiled_module_and_functions(anywhere):
    torch.compiler.reset()
    (x, w, _, r), (dy, dres) = case()
    module = RMSNorm((2, 4), bias=True, device=x.device, residual_dtype=FP16)

    def call(x, r):
        y, res = module(x.view(6, 2, 4), r.view(6, 2, 4))
        out = rms_norm_forward(x, w, residual=r)
        grads = rms_norm_backward(dy, out.res, w, out.rstd, dres=dres, dresidual=True, dx_dtype=x.dtype)
        return y, res, out.y, grads.dx.float() + grads.dresidual, grads.dweight

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(compiled(x, r), call(x, r))


def two_norms(x, w, b, r):
    y, res = rms_norm(x, w, b, residual=r)
    return rms_norm(y * 2, w), res


def keep_norms(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if "rms_norm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "options",
    [
        dict(use_reentrant=False),
        dict(use_reentrant=True),
        dict(use_reentrant=False, context_fn=functools.partial(create_selective_checkpoint_contexts, keep_norms)),
    ],
    ids=["plain", "reentrant", "selective"],
)
def test_activation_checkpointing(anywhere, options):
    for mode in (contextlib.nullcontext, Seen):  # in backward only
        inputs, dy = case()
        want = step(two_norms, inputs, dy)
        y, res = checkpoint(two_norms, *inputs, **options)
        with mode():
            torch.autograd.backward((y, res), dy)
        assert_same([y, res, *(t.grad for t in inputs)], want)


def restrided(ndim):
    """Hooks that change the strides of x (ndim 2) or of the weight (ndim 1)."""

    def pack(t):
        return torch.stack([t, t], -1)[..., 0] if t.dim() == ndim and t.shape[-1] == 8 else t

    return torch.autograd.graph.saved_tensors_hooks(lambda t: t, pack)


SITUATIONS = {
    "autocast": lambda: torch.autocast(on["device"], dtype=BF16),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "saved x with other strides": lambda: restrided(2),
    "saved weight with other strides": lambda: restrided(1),
    "a dispatch mode": lambda: Seen(),
    "a function mode": lambda: Functions(),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_results_under_modes_and_hooks(anywhere, situation):
    inputs, dy = case()
    want = step(two_norms, inputs, dy)
    with SITUATIONS[situation]() as mode:
        assert_same(step(two_norms, inputs, dy), want)
    seen = getattr(mode, "seen", None)
    assert seen is None or "quackish.rms_norm_fwd.default" in seen
    if isinstance(mode, Seen):
        assert "quackish.rms_norm_bwd.default" in seen
        outs = two_norms(*inputs)
        with Seen() as mode:  # backward only
            torch.autograd.grad(outs, inputs, dy)
        assert "quackish.rms_norm_bwd.default" in mode.seen


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("ndim", [2, 1])
@pytest.mark.parametrize("hooked_first", [False, True])
def test_saved_tensor_hooks_that_change_the_dtype(path, hooked_first, ndim, strided):
    x, w, dy = leaf(rows((6, 8))), leaf(weights(8)), rows((6, 8), seed=1)
    dy = dy.t().contiguous().t() if strided else dy

    def narrow(t):  # x or the weight, not rstd
        return t.bfloat16() if t.dim() == ndim and t.shape[-1] == 8 else t

    want = step(lambda x, w: rms_norm(x, w, backend="reference"), (x, w), dy)
    for hooked in (hooked_first, not hooked_first):
        with torch.autograd.graph.saved_tensors_hooks(narrow if hooked else lambda t: t, lambda t: t):
            got = step(rms_norm, (x, w), dy)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, **(dict(rtol=2e-2, atol=2e-2) if hooked else dict(rtol=0, atol=0)))


def test_gradients_and_saved_tensors_of_other_types(path):
    x, w, dy = leaf(rows((6, 8))), leaf(weights(8)), rows((6, 8), seed=1)
    y = rms_norm(x, w)
    want = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    for got in torch.autograd.grad(y, (x, w), TwoTensor(dy, dy), retain_graph=True), want:
        assert_same([getattr(g, "a", g) for g in got], want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: TwoTensor(t, t) if t.dim() == 2 else t):
        y = rms_norm(x, w)
    assert_same([g.b for g in torch.autograd.grad(y, (x, w), dy)], want)


class Calls:
    """The functions called, by name, in `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def call(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Seen(Calls, torch.utils._python_dispatch.TorchDispatchMode):
    __torch_dispatch__ = Calls.call


class Functions(Calls, torch.overrides.TorchFunctionMode):
    __torch_function__ = Calls.call


def test_subclasses_fake_and_meta_tensors(path):
    class Marked(torch.Tensor):
        pass

    inputs, dy = case()
    marked = [inputs[0].detach().as_subclass(Marked).requires_grad_(), *inputs[1:]]
    y, res = with_residual(*marked)
    assert isinstance(y, Marked)
    assert_same([y.as_subclass(torch.Tensor), res.as_subclass(torch.Tensor)], with_residual(*inputs))
    grads = torch.autograd.grad((y, res), marked, dy)
    assert_same([g.as_subclass(torch.Tensor) for g in grads], step(with_residual, inputs, dy)[2:])

    with torch._subclasses.FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in inputs]
        y, res = with_residual(*fakes)
    outside = rms_norm(fakes[0], fakes[1])
    for fake, dtype in ((y, BF16), (res, FP32), (outside, BF16)):
        assert isinstance(fake, torch._subclasses.FakeTensor)
        assert (fake.shape, fake.dtype) == ((6, 8), dtype)
    x, w = torch.empty(3, 8, device="meta", requires_grad=True), torch.empty(8, device="meta", requires_grad=True)
    y = rms_norm(x, w)
    y.sum().backward()
    assert (y.shape, y.device.type, x.grad.shape, w.grad.shape) == ((3, 8), "meta", (3, 8), (8,))


def test_torch_func_and_forward_mode_ad(path):
    x, w = rows((3, 4, 8)), weights(8)

    def loss(x, w):
        return rms_norm(x, w).square().sum()

    want = step(loss, (leaf(x), leaf(w)), torch.tensor(1.0))[1:]
    for got, g in zip(torch.func.grad(loss, argnums=(0, 1))(x, w), want, strict=True):
        torch.testing.assert_close(got, g)
    torch.testing.assert_close(torch.func.vmap(rms_norm, (0, None))(x, w), rms_norm(x, w))
    torch.testing.assert_close(torch.func.vmap(rms_norm)(x, w.expand(3, 8)), rms_norm(x, w))
    y, dy = torch.func.jvp(lambda x: rms_norm(x, w), (x,), (x,))
    _, truth = torch.func.jvp(lambda x: F.rms_norm(x, (8,), w), (x,), (x,))
    torch.testing.assert_close(y, rms_norm(x, w))
    torch.testing.assert_close(dy, truth)
    with torch.autograd.forward_ad.dual_level():  # without a transform
        y = rms_norm(torch.autograd.forward_ad.make_dual(x, x), w)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(y).tangent, truth)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.func.vmap(lambda x: rms_norm(x, w, backend="cute"))(x)

    # batched gradients through a graph recorded outside any transform
    x, w = leaf(rows((2, 8))), leaf(w)
    y = rms_norm(x, w)
    batch = torch.eye(16).view(16, 2, 8)
    each = [torch.autograd.grad(y, (x, w), one, retain_graph=True) for one in batch]
    got = torch.autograd.grad(y, (x, w), batch, is_grads_batched=True, retain_graph=True)
    for i, g in enumerate(got):
        torch.testing.assert_close(g, torch.stack([e[i] for e in each]))
