"""Results per signature: when a function is called again, and when its result is reused."""

import pytest
import torch

from quackish.ops.shared import signatures
from quackish.ops.shared.signatures import PerSignature
from tests.wrapper_tensor import Wrapper


@pytest.fixture
def calls():
    return []


@pytest.fixture
def per_signature(calls):
    def function(tensors, *options):
        if "illegal" in options:
            raise ValueError("illegal")
        calls.append((tensors, options))
        return len(calls)

    return PerSignature(function)


def test_a_function_is_called_once_per_signature(per_signature):
    x = torch.ones(4, 6)
    others = [
        ((x[:, :3], None), 1),
        ((x.t(), None), 1),
        ((x.view(6, 4).t(), None), 1),  # the same shape, other strides
        ((x.double(), None), 1),
        ((x.to("meta"), None), 1),
        ((torch.nn.Parameter(x), None), 1),
        ((x, x), 1),
        ((x, None), 1.0),
        ((x, None), True),
        ((x, None), "1"),
    ]
    assert per_signature((x, None), 1) == per_signature((torch.zeros(4, 6), None), 1) == 1
    found = [per_signature(*case) for case in others]
    assert found == [per_signature(*case) for case in others] == list(range(2, 2 + len(others)))
    with torch.autocast("cpu", torch.bfloat16):
        assert per_signature((x, None), 1) == 2 + len(others)


def test_what_is_not_kept(per_signature, calls, monkeypatch):
    x = torch.ones(2)
    for _ in range(2):
        with pytest.raises(ValueError, match="illegal"):
            per_signature((x,), "illegal")
    assert calls == []
    nested = torch.nested.nested_tensor([x, x])
    for tensors, options in ((Wrapper(x),), ()), ((x,), ([],)), (("no tensor",), ()), ((nested,), ()):
        assert per_signature(tensors, *options) != per_signature(tensors, *options)
    monkeypatch.setattr(signatures, "_MAX_RESULTS", 2)
    first, _, last = [per_signature((x,), i) for i in range(3)]
    assert per_signature((x,), 2) == last
    assert per_signature((x,), 0) != first
