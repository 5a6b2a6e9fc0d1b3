"""Linear cross entropy under autograd: repeated backward passes, which gradients are computed, grad_weight_out."""

import itertools

import pytest
import torch
from torch.autograd.profiler import profile

from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from tests import buffer_layouts
from tests.linear_cross_entropy.cases import (
    OPTIONS,
    REDUCTIONS,
    SCHEDULES,
    assert_same,
    make,
    norm_error,
    on_every_path,
    parameters,
    truth,
    unit_roundoff,
)

BF16, FP32 = torch.bfloat16, torch.float32


@on_every_path
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name, with_lse", [("bias", False), ("all", True)])
def test_two_backwards_give_the_same_bits_and_modify_nothing(name, with_lse, schedule, reduction, path):
    x, w, target, kw = path.case(140, **OPTIONS[name], reduction=reduction)
    inputs = [*parameters(x, w, kw), target] + ([kw["weight"]] if "weight" in kw else [])
    for chunk_size in (path.chunk_size, None):
        loss, lse = path.call(x, w, target, return_lse=True, schedule=schedule, chunk_size=chunk_size, **kw)
        outputs = [loss, lse] if with_lse else [loss]
        grad_outputs = [torch.rand_like(o) for o in outputs]
        theirs = [*inputs, *grad_outputs, loss, lse]
        before = [t.detach().clone() for t in theirs]
        first, second = (
            torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs, retain_graph=True) for _ in range(2)
        )
        held = [t.clone() for t in first]
        for g in second:  # users may modify gradients
            g.zero_()
        third = torch.autograd.grad(outputs, parameters(x, w, kw), grad_outputs)
        assert_same(list(third), held)
        assert_same([t.detach() for t in theirs], before)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_backward_scales_fp32_gradients_in_place_unless_graph_is_retained(retain_graph):
    x, w, target, _ = make(40, 16, 300, FP32)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(x, w, target)
    grads = torch.autograd.grad(loss, [x, w], torch.tensor(0.5), retain_graph=retain_graph)
    addresses = [t.data_ptr() for t in saved]
    assert [g.data_ptr() in addresses for g in grads] == [not retain_graph] * 2


def gemms(f):
    """How many matrix products f runs."""
    with profile() as prof:
        f()
    return sum(e.name in ("aten::mm", "aten::addmm") for e in prof.function_events)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_only_required_gradients_are_computed(reduction, schedule):
    all_wanted, chunks = None, 3
    for wants in itertools.product((True, False), repeat=3):
        x, w, target, kw = make(dtype=FP32, bias=True, reduction=reduction)
        tensors = [t.requires_grad_(want) for t, want in zip(parameters(x, w, kw), wants, strict=True)]
        losses = []

        def forward(x=x, w=w, target=target, kw=kw, losses=losses):
            losses.append(linear_cross_entropy(x, w, target, schedule=schedule, chunk_size=5, **kw))

        count = gemms(forward)
        assert losses[0].requires_grad == any(wants)
        if not any(wants):
            assert count == chunks
            continue
        count += gemms(losses[0].sum().backward)
        again = 0 if schedule == "stored" or (schedule == "chunked" and reduction == "mean") else chunks
        assert count == chunks + again + chunks * (wants[0] + wants[1])
        grads = [t.grad for t in tensors]
        assert [g is not None for g in grads] == list(wants)
        all_wanted = all_wanted or grads
        assert all(g is None or torch.equal(g, want) for g, want in zip(grads, all_wanted, strict=True))


@on_every_path
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_arguments_without_gradient(schedule, path):
    x, w, target, kw = path.case(class_weight=True)
    loss = path.call(x, w, target, **kw, schedule=schedule)
    with pytest.raises(RuntimeError, match="linear_cross_entropy: create_graph=True"):
        torch.autograd.grad(loss, x, create_graph=True)
    buffer = torch.ones(w.shape, dtype=x.dtype, **path.here)  # unused, because the weight needs no gradient
    path.call(x, w.detach(), target, grad_weight_out=buffer, schedule=schedule).backward()
    assert (buffer == 1).all()


@on_every_path
@pytest.mark.parametrize(
    "dtype, buffer_dtype",  # dtype fp32 on kernels: parameters, under autocast
    [(FP32, FP32), (FP32, "strided"), (BF16, FP32), (BF16, BF16), (BF16, "strided")],
    ids=str,
)
@pytest.mark.parametrize("name, reduction", [("bias", "mean"), ("all", "none")])
def test_grad_weight_out(name, reduction, buffer_dtype, dtype, path):
    x, w, target, kw = path.case(dtype=dtype, **OPTIONS[name], reduction=reduction)
    if buffer_dtype == "strided":
        buffer = torch.ones(w.shape[1], w.shape[0], **path.here).t()
    else:
        buffer = torch.ones(w.shape, dtype=buffer_dtype, **path.here)
    autocast = torch.autocast(path.device.type, dtype=BF16, enabled=path.kernels is not None)
    want = truth(*(t.detach().bfloat16() if path.kernels else t for t in (x, w)), target, kw)[2][1]
    bound = 4 * unit_roundoff(buffer.dtype)  # on a CPU only the buffer rounds
    bound += 4 * unit_roundoff(BF16) if path.kernels else 2 * unit_roundoff(dtype) if x.is_cuda else 1e-6
    for schedule in ("auto", *SCHEDULES):
        x.grad, w.grad = None, None
        buffer.fill_(1.0)
        options = dict(grad_weight_out=buffer, schedule=schedule, chunk_size=path.chunk_size)
        with autocast:
            graphs = [path.call(x, w, target, **options, **kw).sum() for _ in range(2)]  # micro-batches over one buffer
        assert (buffer == 1).all()  # forward adds nothing
        graphs[0].backward(torch.tensor(0.5, **path.here), retain_graph=True)
        graphs[0].backward(torch.tensor(2.0, **path.here))
        graphs[1].backward(torch.tensor(0.25, **path.here))
        assert w.grad is None
        assert x.grad is not None
        assert norm_error(buffer, 1 + 2.75 * want) <= bound


@on_every_path
@pytest.mark.parametrize("layout", buffer_layouts.NAMES)
def test_buffers_of_any_strides(layout, path):
    """The weight gradient is added to the buffer's elements and to nothing around them."""
    x, w, target, kw = path.case(dtype=BF16)
    want = truth(x, w, target, kw)[2][1]
    for dtype, schedule in itertools.product((FP32, BF16), SCHEDULES):
        view, whole = buffer_layouts.ones_in(layout, w.shape, dtype, path.device)
        options = dict(grad_weight_out=view, schedule=schedule, chunk_size=path.chunk_size)
        path.call(x, w, target, **options, **kw).backward()
        assert norm_error(view, 1 + want) <= 4 * unit_roundoff(dtype) + 4 * unit_roundoff(BF16), (dtype, schedule)
        assert buffer_layouts.are_neighbours_unchanged(view, whole), (dtype, schedule)


@on_every_path
def test_activation_checkpointing(path):
    x, w, target, kw = path.case(bias=True)
    _, _, want = path.run(x, w, target, kw)
    loss = torch.utils.checkpoint.checkpoint(lambda x: path.call(x, w, target, **kw), x, use_reentrant=False)
    assert_same(torch.autograd.grad(loss, parameters(x, w, kw)), want)
