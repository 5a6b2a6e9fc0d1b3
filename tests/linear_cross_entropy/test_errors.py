"""Errors and warnings of linear cross entropy, and plans that must not be shared by calls."""

import math
import re
import warnings

import pytest
import torch

from quackish import errors
from quackish.errors import PortablePathWarning, UnsupportedError
from quackish.ops.linear_cross_entropy import api
from quackish.ops.linear_cross_entropy.api import LinearCrossEntropyLoss, linear_cross_entropy
from tests import buffer_layouts
from tests.linear_cross_entropy.cases import make

FP32 = torch.float32


def wrong(**change):
    x, w, target, kw = make(dtype=torch.float32)
    args = {"input": x, "linear_weight": w, "target": target, **kw}
    args.update(change)
    return linear_cross_entropy(**args)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"input": torch.zeros(13, 7)}, ValueError, r"input has shape \(13, 7\), expected \(..., 8\)"),
        ({"input": torch.tensor(1.0)}, ValueError, r"input has shape \(\), expected \(..., 8\)"),
        ({"linear_weight": torch.zeros(8)}, ValueError, r"linear_weight has shape \(8,\), expected \(V, H\)"),
        ({"linear_weight": torch.zeros(0, 8)}, ValueError, r"linear_weight has shape \(0, 8\), expected \(V, H\)"),
        ({"target": torch.zeros(12, dtype=torch.int64)}, ValueError, r"target has shape \(12,\), expected \(13,\)"),
        ({"weight": torch.zeros(1)}, ValueError, r"weight has shape \(1,\), expected \(11,\)"),
        ({"weight": torch.zeros(11, device="meta")}, ValueError, "weight is on meta, expected input.s device cpu"),
        ({"target": torch.rand(13)}, TypeError, "target is torch.float32, expected class indices, int32 or int64"),
        ({"input": torch.zeros(13, 8).half()}, TypeError, "linear_weight is torch.float32, expected input"),
        ({"input": torch.zeros(13, 8).int()}, TypeError, "input is torch.int32, expected bfloat16"),
        ({"linear_bias": torch.zeros(11).half()}, TypeError, "linear_bias is torch.float16, expected input"),
        ({"grad_weight_out": torch.zeros(11, 8).half()}, TypeError, "grad_weight_out is torch.float16, expected"),
        ({"grad_weight_out": torch.zeros(11, 8).requires_grad_()}, ValueError, "grad_weight_out requires grad"),
        ({"reduction": "avg"}, ValueError, "reduction is 'avg', expected one of none, mean, sum"),
        ({"schedule": "fast"}, ValueError, "schedule is 'fast', expected one of auto, stored, chunked, recompute"),
        ({"backend": "triton"}, ValueError, "backend is 'triton', expected one of auto, cute, reference"),
        ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5, expected 0 <= label_smoothing <= 1"),
        ({"softcap": math.nan}, ValueError, "softcap is nan, expected None or a positive number"),
        ({"softcap": 1e-50}, ValueError, "softcap is 1e-50, expected None or a positive number"),
        ({"softcap": True}, TypeError, "softcap is True, a bool; expected a float or None"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale is 0.0, expected None or a positive finite number"),
        ({"logit_scale": math.inf}, ValueError, "logit_scale is inf, expected None or a positive finite number"),
        ({"logit_scale": "1"}, TypeError, "logit_scale is '1', a str; expected a float or a 0-dim tensor or None"),
        ({"logit_scale": torch.tensor(2)}, TypeError, "logit_scale is torch.int64, expected bfloat16"),
        (
            {"logit_scale": torch.ones((), device="meta")},
            ValueError,
            r"logit_scale is on meta, expected cpu \(input's\)",
        ),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1.0, expected a finite number that is not negative"),
        ({"z_loss": math.inf}, ValueError, "z_loss is inf, expected a finite number that is not negative"),
        ({"z_loss": 1e39}, ValueError, r"z_loss is 1e\+39, expected a finite number"),  # infinite in fp32
        ({"chunk_size": 0}, ValueError, "chunk_size is 0, expected None or at least 1 row"),
        ({"chunk_size": 2**63}, ValueError, "chunk_size is 9223372036854775808, expected None or at least 1 row"),
        ({"num_items": 10**400}, ValueError, "num_items is 10+, expected at least 0"),
        ({"ignore_index": 2**63}, ValueError, "ignore_index is 9223372036854775808, expected a 64-bit integer"),
        ({"return_lse": 1}, TypeError, "return_lse is 1, an int; expected True or False"),
        (
            {"return_lse": True, "return_stats": True},
            ValueError,
            "return_lse and return_stats are True",
        ),
        ({"num_items": -1}, ValueError, "num_items is -1, expected at least 0"),
        ({"num_items": torch.tensor(3.0, requires_grad=True)}, ValueError, "num_items requires grad, but gets"),
        ({"input": [[1.0]]}, TypeError, "input is a list; expected a torch.Tensor"),
        ({"target": None}, TypeError, "target is None; expected a torch.Tensor"),
        ({"weight": [1.0] * 11}, TypeError, "weight is a list; expected a torch.Tensor or None"),
        ({"num_items": torch.ones(1)}, ValueError, r"num_items has shape \(1,\), expected a 0-dim tensor"),
        ({"num_items": 3, "reduction": "sum"}, ValueError, 'num_items is given but reduction is "sum"'),
    ],
)
def test_errors_name_the_argument(change, error, message):
    with pytest.raises(error, match=f"linear_cross_entropy: {message}"):
        wrong(**change)


@pytest.mark.parametrize("bad", [11, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_invalid_target_raises_on_cpu(bad, dtype):
    x, w, target, _ = make()
    target = target.to(dtype)
    target[4] = bad
    with pytest.raises(IndexError, match=rf"target 4 of 13 is {bad}, expected 0 <= target < 11 or ignore_index -100"):
        linear_cross_entropy(x, w, target)


def test_buffer_must_not_overlap_weight_or_input():
    x, w, target, _ = make(dtype=torch.float32)
    flat = torch.zeros(3 * w.numel())
    for of in (w.detach(), x.detach()):
        buffer = of.view(-1)[: w.numel()].view(-1, 8)
        with pytest.raises(ValueError, match="grad_weight_out shares memory with"):
            linear_cross_entropy(x, w, target, grad_weight_out=buffer)
    for buffer in buffer_layouts.overlapping(w.shape):
        with pytest.raises(ValueError, match=r"grad_weight_out has shape .* so its elements share memory"):
            linear_cross_entropy(x, w, target, grad_weight_out=buffer)
    first, second = (flat[i * w.numel() :][: w.numel()].view(w.shape) for i in (0, 1))
    linear_cross_entropy(x, first, target, grad_weight_out=second)  # one storage without overlap


@pytest.mark.parametrize(
    "name, value", [("weight", torch.ones(11)), ("logit_scale", torch.tensor(2.0)), ("num_items", torch.tensor(2.0))]
)
def test_argument_without_gradient_must_not_require_one(name, value):
    """As in PyTorch's losses: an error if grad is enabled, also after such a call without grad made the same plan."""
    needs = value.clone().requires_grad_()
    message = f"linear_cross_entropy: {name} requires grad, but gets no gradient; expected {name}.detach()"
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(wrong(**{name: needs}), wrong(**{name: value}))
        for call in (wrong, torch.compile(wrong, backend="eager")):
            with pytest.raises(ValueError, match=re.escape(message)):
                call(**{name: needs})
    if name != "num_items":  # an argument of the module's call
        with pytest.raises(ValueError, match=f"LinearCrossEntropyLoss: {name} requires grad"):
            LinearCrossEntropyLoss(8, 11, **{name: needs})
        with torch.no_grad():
            module = LinearCrossEntropyLoss(8, 11, **{name: needs})
        with pytest.raises(ValueError, match=re.escape(message)):
            module(*make(dtype=FP32)[::2])


def test_tangents_of_class_weights():
    x, w, target, _ = make(dtype=torch.float64)
    weight, tangent = torch.rand(2, 11, dtype=torch.float64)

    def loss(weight):
        return linear_cross_entropy(x.detach(), w.detach(), target, weight=weight)

    _, got = torch.func.jvp(loss, (weight,), (tangent,))
    step = 1e-6 * tangent
    torch.testing.assert_close(got, (loss(weight + step) - loss(weight - step)) / 2e-6, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("version", [1, 2])
def test_buffer_under_fsdp_raises(version, tmp_path):
    """FSDP reduces only .grad: the buffer would get this rank's unreduced gradient."""
    import torch.distributed.fsdp

    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        head = LinearCrossEntropyLoss(8, 11)
        if version == 1:
            head = torch.distributed.fsdp.FullyShardedDataParallel(head, device_id=torch.device("cpu"))
        else:
            torch.distributed.fsdp.fully_shard(head, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        x, _, target, _ = make(dtype=torch.float32)
        with pytest.raises(UnsupportedError, match="linear_weight is a parameter that FSDP shards"):
            head(x, target, grad_weight_out=torch.zeros(11, 8))
        head(x, target).backward()
        assert all(p.grad is not None for p in head.parameters())
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "first, second",
    [
        (dict(ignore_index=-100.0), dict(ignore_index=-100)),
        (dict(chunk_size=128.0), dict(chunk_size=128)),
        (dict(chunk_size=True), dict(chunk_size=1)),
        (dict(num_items=True), dict(num_items=1)),
        (dict(z_loss=False), dict(z_loss=0)),
        (dict(logit_scale=True), dict(logit_scale=1)),
    ],
    ids=str,
)
def test_rejected_argument_does_not_affect_equal_valid_one(first, second):
    for _ in range(2):
        with pytest.raises(TypeError):
            wrong(**first)
        wrong(**second)


@pytest.mark.parametrize("name, numbers", [("num_items", (3, 4)), ("logit_scale", (0.5, 0.7))])
def test_plan_is_shared_by_all_numbers(name, numbers):
    wrong(**{name: numbers[0]})
    calls = dict(api._calls)
    wrong(**{name: numbers[1]})
    assert api._calls == calls


@pytest.mark.parametrize(
    "name, right, other",
    [
        ("target", torch.zeros(13, dtype=torch.int64), torch.uint8),
        ("linear_weight", torch.zeros(11, 8), torch.float16),
        ("linear_bias", torch.zeros(11), torch.float16),
        ("weight", torch.ones(11), torch.int32),
        ("grad_weight_out", torch.zeros(11, 8), torch.float16),
    ],
)
def test_plan_is_not_reused_for_other_dtypes(name, right, other):
    for _ in range(2):
        wrong(**{name: right})  # valid
        with pytest.raises(TypeError, match=f"linear_cross_entropy: {name} is {other}, expected"):
            wrong(**{name: right.to(other)})


@pytest.mark.parametrize("softcap", [math.inf, 1e300])
def test_infinite_softcap_is_no_cap(softcap):
    assert torch.equal(wrong(softcap=softcap), wrong())


def test_cpu_has_no_kernel_and_no_warning(recwarn):
    with pytest.raises(UnsupportedError, match=r'no kernel for cpu tensors. backend="auto" runs the portable path'):
        wrong(backend="cute")
    assert torch.equal(wrong(backend="auto"), wrong(backend="reference"))
    assert not [w for w in recwarn if w.category is PortablePathWarning]


@pytest.mark.gpu
def test_one_warning_per_reason_on_cuda():
    errors._warned.clear()
    x, w, target, _ = make(dtype=FP32, device="cuda")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for backend in ("reference", "auto", "auto"):
            linear_cross_entropy(x, w, target, backend=backend)
    (only,) = [s for s in seen if s.category is PortablePathWarning]
    assert re.search(r"linear_cross_entropy: no kernel for (sm_\d+ |torch.float32).*portable path", str(only.message))
    with pytest.raises(UnsupportedError, match=r"linear_cross_entropy: no kernel for (sm_|torch\.float32)"):
        linear_cross_entropy(x, w, target, backend="cute")
