"""Errors and warnings of grouped_mlp."""

import warnings

import pytest
import torch

from quackish import errors, grouped_mlp, grouped_mm
from quackish.errors import PortablePathWarning, UnsupportedError
from tests import buffer_layouts
from tests.mlp.cases import BF16, FP16, FP32, FP64, make

E, R, H, I = 3, 5, 4, 2  # noqa: E741


WRONG = {
    "x is a list; expected a torch.Tensor": dict(x=[1.0]),
    "w1 is a DTensor": dict(w1=type("DTensor", (torch.Tensor,), {})),
    "offs is on meta but x is on cpu": dict(offs=torch.zeros(E, dtype=torch.int32, device="meta")),
    r"x is \(1, 5, 4\); expected \(R, H\) with H >= 1: flatten": dict(x=torch.zeros(1, R, H)),
    r"w2 is \(3, 5, 2\) but x is \(5, 4\); expected \(E, 4, I\)": dict(w2=torch.zeros(E, 5, I)),
    r"w2 is \(0, 4, 2\)": dict(w2=torch.zeros(0, H, I)),
    r"w1 is \(3, 2, 4\) but .* expected \(3, 4, 4\) as \[gate; up\], or w3 beside it": dict(w1=torch.zeros(E, I, H)),
    r'w1 is \(3, 4, 4\) but .* activation "relu2"; expected \(3, 2, 4\)': dict(activation="relu2"),
    r"w1 is \(2, 4, 4\)": dict(w1=torch.zeros(2, 2 * I, H)),
    r"w3 is \(3, 4, 2\) .* expected \(3, 2, 4\)": dict(w1=torch.zeros(E, I, H), w3=torch.zeros(E, H, I)),
    'w3 is given but activation is "silu", which has no gate': dict(activation="silu", w3=torch.zeros(E, I, H)),
    r"b1 is \(3, 2\) .* expected \(3, 4\)": dict(b1=torch.zeros(E, I)),
    r"b2 is \(4,\) .* expected \(3, 4\)": dict(b2=torch.zeros(H)),
    r"scales is \(5, 1\) .* expected \(5,\)": dict(scales=torch.zeros(R, 1)),
    r"offs is \(4,\) .* expected \(3,\)": dict(offs=torch.zeros(E + 1, dtype=torch.int32)),
    "offs is torch.int64; expected torch.int32, as": dict(offs=torch.zeros(E, dtype=torch.int64)),
    "x is torch.int32; expected bfloat16, float16": dict(x=torch.zeros(R, H, dtype=torch.int32)),
    "w2 is torch.float64; expected torch.float32, as x is": dict(w2=torch.zeros(E, H, I, dtype=FP64)),
    "scales is torch.bool; expected bfloat16": dict(scales=torch.zeros(R, dtype=torch.bool)),
    "activation is 'swigl'; expected one of .*; did you mean swiglu": dict(activation="swigl"),
    "recompute is 1, an int; expected True or False": dict(recompute=1),
    "backend is 'cuda'; expected one of 'auto'": dict(backend="cuda"),
    r"grad_w1_out is \(3, 2, 4\) .* expected \(3, 4, 4\)": dict(grad_w1_out=torch.zeros(E, I, H)),
    "grad_w2_out is torch.float16; expected torch.float32 or w2's": dict(grad_w2_out=torch.zeros(E, H, I, dtype=FP16)),
    "grad_w3_out is given but w3 is None": dict(grad_w3_out=torch.zeros(E, I, H)),
    "grad_w1_out requires grad": dict(grad_w1_out=torch.zeros(E, 2 * I, H, requires_grad=True)),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments(message):
    right = dict(
        x=torch.zeros(R, H), w1=torch.zeros(E, 2 * I, H), w2=torch.zeros(E, H, I),
        offs=torch.zeros(E, dtype=torch.int32),
    )  # fmt: skip
    grouped_mlp(**right)
    wrong = dict(right, **WRONG[message])
    if isinstance(wrong["w1"], type):
        wrong["w1"] = right["w1"].as_subclass(wrong["w1"])
    with pytest.raises((ValueError, TypeError), match=f"grouped_mlp: {message}"):
        grouped_mlp(**wrong)


def test_what_is_refused():
    case, dy = make((2, 1), 4, 3, tail=0)
    with pytest.raises(RuntimeError, match=r"grouped_mlp: create_graph=True \(double backward\) is not supported"):
        torch.autograd.grad(grouped_mlp(**case).sum(), case["x"], create_graph=True)
    with pytest.raises(RuntimeError, match="is_grads_batched=True"):
        torch.autograd.grad(grouped_mlp(**case), case["x"], dy.expand(2, *dy.shape), is_grads_batched=True)
    for transformed in (
        lambda: torch.func.grad(lambda x: grouped_mlp(**{**case, "x": x}).sum())(case["x"]),
        lambda: torch.func.vmap(lambda x: grouped_mlp(**{**case, "x": x}))(torch.stack([case["x"]] * 2)),
        lambda: torch.func.vmap(lambda x: grouped_mm(x, case["w1"].mT, case["offs"]))(torch.stack([case["x"]] * 2)),
    ):
        with pytest.raises(UnsupportedError, match=r"torch\.func transforms and forward-mode AD are not supported"):
            transformed()
    with pytest.raises(
        UnsupportedError, match=r'grouped_mlp: no kernel for cpu tensors\. backend="auto" runs the portable'
    ):
        grouped_mlp(**case, backend="cute")
    with pytest.raises(
        UnsupportedError, match=r'grouped_mm: no kernel for cpu tensors\. backend="auto" runs the portable'
    ):
        grouped_mm(case["x"], case["w1"].mT, case["offs"], backend="cute")


def test_memory_that_was_freed_before_backward():
    for name in ("x", "grad_w1_out"):
        case, dy = make(dtype=BF16)
        case["grad_w1_out"] = torch.zeros_like(case["w1"], dtype=FP32)
        y = grouped_mlp(**case)
        case[name].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=f"grouped_mlp: {name} has shape .* but no memory"):
            y.backward(dy)


def test_a_buffer_must_not_share_memory():
    case, _ = make()
    with pytest.raises(
        ValueError, match="grouped_mlp: grad_w1_out shares memory with w1, expected a buffer of its own"
    ):
        grouped_mlp(**case, grad_w1_out=case["w1"].detach())
    for buffer in buffer_layouts.overlapping(case["w1"].shape):
        with pytest.raises(ValueError, match=r"grouped_mlp: grad_w1_out has shape .* so its elements share memory"):
            grouped_mlp(**case, grad_w1_out=buffer)


@pytest.mark.gpu
def test_one_warning_a_reason():
    errors._warned.clear()
    case, _ = make(dtype=FP32, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            grouped_mlp(**case)
            grouped_mm(case["x"], case["w1"].mT, case["offs"])
    messages = [str(w.message) for w in seen if w.category is PortablePathWarning]
    assert len(messages) == 2
    assert all("no kernel for torch.float32" in message for message in messages)
