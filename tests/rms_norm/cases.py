"""Inputs, layouts, steps and modes shared by the tests of RMSNorm."""

import torch

from quackish.ops.rms_norm.api import rms_norm
from quackish.testing import inputs as make
from quackish.testing.errors import same_bits

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FLOATS = (BF16, FP16, FP32)
on = dict(device="cpu")  # of all tensors in tests


# Tensors of shape (2, s, 4, n); `of(*shape)` makes a packed one.
LAYOUTS = {
    "packed": lambda of, s, n: of(2, s, 4, n),
    "slice of qkv": lambda of, s, n: of(2, s, 3, 4, n)[:, :, 1],
    "columns of a matrix": lambda of, s, n: of(8 * s, 3 * n)[:, n : 2 * n].unflatten(0, (2, s, 4)),
    "transposed rows": lambda of, s, n: of(4 * s, 2, n).transpose(0, 1).unflatten(1, (s, 4)),
    "expanded rows": lambda of, s, n: of(1, 1, 4, n).expand(2, s, 4, n),
    "three levels": lambda of, s, n: of(2, 4, s, n).transpose(1, 2),
    "columns first": lambda of, s, n: of(2, s, n, 4).transpose(2, 3),
    "expanded columns": lambda of, s, n: of(2, s, 4, 1).expand(2, s, 4, n),
    "off by one element": lambda of, s, n: of(8 * s * n + 1)[1:].view(2, s, 4, n),
}


def assert_same(a, b):
    assert len(a) == len(b)
    for i, (one, other) in enumerate(zip(a, b, strict=True)):
        assert same_bits(one, other), f"result {i}"


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


def buffer_case(shape, buffer):
    """x and a weight of `shape` that require grad, a gradient of y, and a buffer of ones."""
    x, w, dy = leaf(rows((5, 4, 16), BF16)), leaf(rows(shape, BF16, seed=1)), rows((5, 4, 16), BF16, seed=2)
    if buffer == "strided":
        return x, w, dy, torch.ones(*shape, 2, **on)[..., 1]
    return x, w, dy, torch.ones(shape, dtype=buffer, **on)


def case(m=6, n=8):
    inputs = [leaf(rows((m, n), BF16)), leaf(weights(n)), leaf(rows((n,), seed=1)), leaf(rows((m, n), seed=2))]
    return inputs, (rows((m, n), BF16, seed=3), rows((m, n), seed=4))


def with_residual(x, w, b, r):
    return rms_norm(x, w, b, residual=r, weight_offset=1.0)


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
