"""The module LinearCrossEntropyLoss."""

import inspect

import pytest
import torch

from quackish.errors import UnsupportedError
from quackish.ops.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy
from tests.linear_cross_entropy.cases import make


def test_module_matches_pytorchs():
    theirs_class = getattr(torch.nn, "LinearCrossEntropyLoss", None)
    if theirs_class is None:
        pytest.skip(f"torch {torch.__version__} has no nn.LinearCrossEntropyLoss (2.13 has)")
    names = list(inspect.signature(theirs_class).parameters)
    assert set(names) <= set(inspect.signature(LinearCrossEntropyLoss).parameters)
    args = dict(bias=True, weight=torch.rand(11), label_smoothing=0.1, ignore_index=2, reduction="sum", options=None)
    theirs, ours = theirs_class(8, 11, **args), LinearCrossEntropyLoss(8, 11, **args, backend="reference")
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x, _, target, _ = make(dtype=torch.float32)
    target = target.clamp(min=0)
    torch.testing.assert_close(ours(x, target), theirs(x, target))


def test_module_options():
    x, _, target, _ = make(dtype=torch.float32)
    args = dict(softcap=2.0, z_loss=0.1, label_smoothing=0.2, schedule="recompute", chunk_size=4, reduction="mean")
    args["logit_scale"] = 0.5
    head = LinearCrossEntropyLoss(8, 11, **args, ignore_index=0)
    assert list(head.state_dict()) == ["linear.weight"]
    want = linear_cross_entropy(x, head.linear.weight, target.clamp(min=0), ignore_index=0, num_items=9, **args)
    assert torch.equal(head(x, target.clamp(min=0), num_items=9), want)
    assert "softcap=2.0" in repr(head)
    head.logit_scale = torch.tensor(0.5)
    loss, stats = head(x, target.clamp(min=0), num_items=9, return_stats=True)
    assert torch.equal(loss, want)
    assert stats.entropy.shape == target.shape


@pytest.mark.parametrize(
    "args, error, message",
    [
        (dict(out_features=(3,)), UnsupportedError, r"out_features is \(3,\), expected \(\)"),
        (dict(options=object()), UnsupportedError, "options configures torch's chunking, expected None"),
        (dict(weight=torch.ones(3)), ValueError, r"weight has shape \(3,\), expected \(11,\)"),
        (dict(label_smoothing=2.0), ValueError, "label_smoothing is 2.0"),
        (dict(logit_scale=-1.0), ValueError, "logit_scale is -1.0"),
    ],
)
def test_module_errors(args, error, message):
    with pytest.raises(error, match=message):
        LinearCrossEntropyLoss(8, 11, **args)
