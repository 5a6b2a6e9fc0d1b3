"""RMSNorm compiled, traced, checkpointed and transformed; under modes, hooks and tensor subclasses."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from quackish.errors import UnsupportedError
from quackish.ops.rms_norm import operators as ops
from quackish.ops.rms_norm.api import RMSNorm, rms_norm, rms_norm_backward, rms_norm_forward
from tests.rms_norm.cases import (
    BF16,
    FP16,
    FP32,
    Functions,
    Seen,
    assert_same,
    case,
    leaf,
    on,
    rows,
    step,
    weights,
    with_residual,
)
from tests.wrapper_tensor import Wrapper

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from torch itself


@pytest.mark.parametrize("residual, res_dtype, out_dtype", [(None,) * 3, (BF16, FP32, None), (FP32, None, FP32)])
def test_opcheck(norm_anywhere, residual, res_dtype, out_dtype):
    (x, w, b, r), (dy, _) = case()
    r = None if residual is None else r.detach().to(residual).requires_grad_()
    torch.library.opcheck(ops.forward.overload, (x, w, b, r, None, 1e-6, 1.0, res_dtype, out_dtype, "auto"))
    torch.library.opcheck(ops.forward.overload, (x, None, None, r, None, 1e-6, 0.0, res_dtype, out_dtype, "auto"))
    x, w, rstd, dy = x.detach(), w.detach(), torch.ones(6, device=x.device), dy.to(out_dtype or BF16)
    dres, second = None if r is None else r.detach(), FP32 if residual == FP32 else None
    torch.library.opcheck(ops.backward.overload, (dy, x, w, rstd, dres, 1.0, BF16, second, FP32, FP32, "auto"))
    torch.library.opcheck(ops.backward.overload, (dy, x, w, rstd, None, 1.0, None, None, FP32, None, "auto"))


def test_compiled_equals_eager_for_any_number_of_rows(norm_path):
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


def test_compiled_module_and_functions(norm_anywhere):
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
def test_activation_checkpointing(norm_anywhere, options):
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
def test_results_under_modes_and_hooks(norm_anywhere, situation):
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
def test_saved_tensor_hooks_that_change_the_dtype(norm_path, hooked_first, ndim, strided):
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


def test_gradients_and_saved_tensors_of_other_types(norm_path):
    x, w, dy = leaf(rows((6, 8))), leaf(weights(8)), rows((6, 8), seed=1)
    y = rms_norm(x, w)
    want = torch.autograd.grad(y, (x, w), dy, retain_graph=True)
    for got in torch.autograd.grad(y, (x, w), TwoTensor(dy, dy), retain_graph=True), want:
        assert_same([getattr(g, "a", g) for g in got], want)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: TwoTensor(t, t) if t.dim() == 2 else t):
        y = rms_norm(x, w)
    assert_same([g.b for g in torch.autograd.grad(y, (x, w), dy)], want)


def test_subclasses_fake_and_meta_tensors(norm_path):
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


def test_wrapper_subclass_intercepts_operator(norm_path):
    x, w = rows((3, 8)), weights(8)
    wrapped = Wrapper(x)
    y = rms_norm(wrapped, w)
    assert "quackish.rms_norm_fwd.default" in wrapped.seen
    torch.testing.assert_close(y, rms_norm(x, w))


def test_torch_func_and_forward_mode_ad(norm_path):
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
