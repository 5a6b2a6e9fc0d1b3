"""Rotary position embeddings compiled, traced, checkpointed, under autocast; subclasses and fake tensors."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import quackish
from quackish.ops.rotary.operators import operator
from quackish.testing.errors import same_bits
from tests.emulator_cases import QUICK, emulated
from tests.rotary.cases import BF16, FP16, case, step
from tests.wrapper_tensor import Wrapper

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # from torch itself
rotary = quackish.rotary


@pytest.mark.parametrize("where", ["portable", pytest.param(QUICK, marks=pytest.mark.exhaustive)])
def test_opcheck(where):
    q, k, cos, sin = case()
    with emulated(where) if where == QUICK else torch.enable_grad():
        if where == "portable":
            torch.library.opcheck(operator.overload, (q, k, cos, sin, None, None, 16, "halves", False, "auto"))
        args = (q[:, :1, ::2], None, cos[:, ::2], sin[:, ::2], [48, 16, 16, 1], None, 16, "interleaved", True, "auto")
        torch.library.opcheck(operator.overload, args)


def test_compiled_equals_eager_for_any_batch_and_length():
    torch.compiler.reset()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    @torch.compile(fullgraph=True, backend=aot_autograd(fw_compiler=count, bw_compiler=count))
    def compiled(q, k, cos, sin):
        return rotary(q, k, cos, sin, layout="interleaved_to_halves")

    for batch, length in ((2, 5), (3, 6), (4, 7), (5, 300)):
        inputs = case(batch, length=length)
        got, want = compiled(*inputs), rotary(*inputs, layout="interleaved_to_halves")
        for a, b in zip(got, want, strict=True):
            assert same_bits(a, b)
            assert a.stride() == b.stride()
        grads = [t.detach() for t in want]
        for a, b in zip(*(torch.autograd.grad(out, inputs[:2], grads) for out in (got, want)), strict=True):
            assert same_bits(a, b)
            assert a.stride() == b.stride()
    assert len(graphs) == 4  # forward and backward, for the first sizes and for any sizes


def test_compiled_without_k_and_grad():
    torch.compiler.reset()
    q, _, cos, sin = case(grad=False)
    out, none = torch.compile(rotary, fullgraph=True, backend="aot_eager")(q, None, cos, sin)
    assert none is None
    assert same_bits(out, rotary(q, None, cos, sin)[0])


def test_checkpoint_and_autocast():
    inputs = case()
    want = step(inputs)
    q, k = checkpoint(rotary, *inputs, use_reentrant=False)
    grads = torch.autograd.grad((q.float().sum(), k.float().sum()), inputs[:2])
    for a, b in zip(grads, torch.autograd.grad([t.float().sum() for t in rotary(*inputs)], inputs[:2]), strict=True):
        assert same_bits(a, b)
    with torch.autocast("cpu", FP16):
        got = step(inputs)
    assert all(map(same_bits, got, want))
    assert got[0].dtype == BF16


def test_subclasses_fake_and_meta_tensors():
    class Marked(torch.Tensor):
        pass

    q, k, cos, sin = inputs = case(grad=False)
    want = rotary(*inputs)
    marked, _ = rotary(q.as_subclass(Marked), k, cos, sin)
    assert isinstance(marked, Marked)
    assert same_bits(marked.as_subclass(torch.Tensor), want[0])
    wrapped = Wrapper(q)
    assert same_bits(rotary(wrapped, k, cos, sin)[0], want[0])
    assert "quackish.rotary.default" in wrapped.seen
    with torch._subclasses.FakeTensorMode() as mode:
        fake, _ = rotary(*map(mode.from_tensor, inputs))
    meta, _ = rotary(*(t.to("meta") for t in inputs))
    for t in (fake, meta):
        assert (t.shape, t.stride(), t.dtype) == (q.shape, q.stride(), BF16)
