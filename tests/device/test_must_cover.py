"""A Device whose every call must run kernels: nothing runs the portable path, and nothing outlives its block."""

import contextlib
import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import quackish
from quackish import parallel
from quackish.device.kernel_device import substitute
from quackish.errors import PortablePathWarning, UnsupportedError
from tests import idle_kernels

BF16 = torch.bfloat16


@contextlib.contextmanager
def must_cover():
    """CPU tensors run kernels that do nothing. Yields the launches."""
    device, launches = idle_kernels.device()
    with substitute("cpu", dataclasses.replace(device, must_cover=True)):
        yield launches


def ones(*shape, dtype=BF16):
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def rms_norm(dtype=BF16, **options):
    return quackish.rms_norm(ones(8, 16, dtype=dtype), ones(16, dtype=dtype), **options).sum()


def rms_norm_with_residual(dtype=BF16, **options):
    """Only res has a gradient, so that backward launches nothing."""
    x, w = ones(8, 16, dtype=dtype), ones(16, dtype=dtype)
    return quackish.rms_norm(x, w, residual=x, **options)[1].sum()


def cross_entropy(dtype=BF16, **options):
    x, w = ones(8, 16, dtype=dtype), ones(24, 16, dtype=dtype)
    return quackish.linear_cross_entropy(x, w, torch.arange(8), **options)


def stored(dtype=BF16, **options):
    return cross_entropy(dtype, schedule="stored", **options)


def chunked(dtype=BF16, **options):
    """Forward computes the gradients, and backward scales them."""
    return cross_entropy(dtype, schedule="chunked", **options)


def grouped_mlp(dtype=BF16, **options):
    tensors = [ones(*shape, dtype=dtype) for shape in ((8, 16), (2, 32, 16), (2, 16, 16))]
    return quackish.grouped_mlp(*tensors, torch.tensor([3, 8]).int(), **options).sum()


def grouped_mm(dtype=BF16, **options):
    return quackish.grouped_mm(
        ones(8, 16, dtype=dtype), ones(2, 16, 16, dtype=dtype), torch.tensor([3, 8]).int(), **options
    ).sum()


def moe_mlp(dtype=BF16, **options):
    x, w1, w2 = (ones(*shape, dtype=dtype) for shape in ((4, 16), (2, 32, 16), (2, 16, 16)))
    choice, scores = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]), ones(4, 2, dtype=dtype)
    return quackish.moe_mlp(x, choice, scores, w1, w2, **options).sum()


def moe_mlp_with_bias(dtype=BF16, **options):
    """Only the router's weights have a gradient, which does not pass through grouped_mlp."""
    x, w1, w2, b2 = (torch.ones(shape, dtype=dtype) for shape in ((4, 16), (2, 32, 16), (2, 16, 16), (2, 16)))
    choice, scores = torch.tensor([[0, 1], [1, 0], [1, 1], [0, 0]]), ones(4, 2, dtype=dtype)
    return quackish.moe_mlp(x, choice, scores, w1, w2, b2=b2, **options).sum()


CALLS = [rms_norm, rms_norm_with_residual, stored, chunked, grouped_mlp, grouped_mm, moe_mlp, moe_mlp_with_bias]
every_call = pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)


@every_call
def test_a_call_that_no_kernel_covers_raises(call):
    with must_cover() as launches:
        call().backward()
        covered = len(launches)
        assert covered
        with pytest.raises(UnsupportedError, match=r"no kernel .*; here every call must run kernels, unless it has"):
            call(torch.float64)
        call(torch.float64, backend="reference").backward()
        with pytest.raises(UnsupportedError, match=r'no kernel .* backend="auto" runs the portable path'):
            call(torch.float64, backend="cute")
    assert len(launches) == covered


def transformed_norm(x):
    return torch.func.vjp(lambda x: quackish.rms_norm(x, None), x.detach())


def transformed_loss(x):
    target, classes = torch.arange(8), ones(24, 16).detach()
    return torch.func.grad(lambda x: quackish.linear_cross_entropy(x, classes, target))(x.detach())


def second_derivative(x):
    return torch.autograd.grad(quackish.rms_norm(x, None).sum(), x, create_graph=True)


def batched_gradients(x):
    return torch.autograd.grad(
        quackish.rms_norm(x, None), x, torch.ones(2, *x.shape, dtype=BF16), is_grads_batched=True
    )


def batched_product(x):
    return quackish.grouped_mm(x[None], ones(1, 16, 16))


@pytest.mark.parametrize(
    "call, text",
    [
        (transformed_norm, "rms_norm: torch.func"),
        (transformed_loss, "linear_cross_entropy: torch.func"),
        (second_derivative, "rms_norm: double backward"),
        (batched_gradients, "rms_norm: .*vmap over gradients"),
        (batched_product, "grouped_mm: without offs"),
    ],
)
def test_the_ways_past_the_kernels_raise(call, text):
    with must_cover(), pytest.raises(UnsupportedError, match=f"{text}.*; here every call must run kernels"):
        call(ones(8, 16))


@every_call
@pytest.mark.parametrize("where", ["outside", "in another block"])
def test_backward_outside_the_block_raises(call, where):
    with must_cover() as launches:
        loss = call()
    forward = len(launches)
    with must_cover() if where == "in another block" else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match=r"had another device of kernels in forward; expected backward inside"):
            loss.backward()
    assert len(launches) == forward


@every_call
def test_forward_outside_the_block_raises(call):
    loss = call(backend="reference")
    with must_cover(), pytest.raises(RuntimeError, match="had another device of kernels in forward"):
        loss.backward()


@every_call
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpoint_computes_again_inside_the_block(call, use_reentrant):
    x = torch.zeros((), requires_grad=True)
    with must_cover() as launches:
        loss = checkpoint(lambda x: call() + x, x, use_reentrant=use_reentrant)
        forward = len(launches)
        loss.backward()
    assert len(launches) > forward


@every_call
def test_backward_of_a_checkpoint_outside_the_block_raises(call):
    x = torch.zeros((), requires_grad=True)
    with must_cover() as launches:
        loss = checkpoint(lambda x: call() + x, x, use_reentrant=False)
    forward = len(launches)
    with pytest.raises((RuntimeError, torch.utils.checkpoint.CheckpointError)):
        loss.backward()
    assert len(launches) == forward


COMPILED = [rms_norm, stored, grouped_mlp, grouped_mm, moe_mlp]


@pytest.mark.parametrize("call", COMPILED, ids=lambda call: call.__name__)
@pytest.mark.parametrize("before", [False, True], ids=["inside", "before the block"])
def test_torch_compile_is_refused(call, before):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager")
    if before:
        compiled()
    with must_cover() as launches, pytest.raises(RuntimeError, match="compile is not supported where every call"):
        compiled()
    assert not launches
    compiled()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::quackish.errors.PortablePathWarning")
def test_other_substitutes_still_warn():
    with idle_kernels.on_cpu():
        quackish.errors._warned.clear()
        with pytest.warns(PortablePathWarning, match="no kernel for"):
            rms_norm(torch.float64)
        assert torch.func.vmap(lambda x: quackish.rms_norm(x, None))(torch.ones(2, 8, 16)).shape == (2, 8, 16)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_parallel_head(one_rank):
    def call(dtype=BF16):
        x, w = ones(8, 16, dtype=dtype), ones(24, 16, dtype=dtype)
        return parallel.linear_cross_entropy(x, w, torch.arange(8), schedule="stored")

    with must_cover() as launches:
        call().backward()
        loss = call()
        with pytest.raises(UnsupportedError, match="here every call must run kernels"):
            call(torch.float64)
    before = len(launches)
    with pytest.raises(RuntimeError, match=r"parallel.linear_cross_entropy: cpu tensors had another device of kernels"):
        loss.backward()
    assert len(launches) == before > 0
