"""Inputs, truth, error measures and paths shared by the tests of linear cross entropy."""

import pytest
import torch
import torch.nn.functional as F

from quackish.ops.linear_cross_entropy.api import linear_cross_entropy
from quackish.ops.linear_cross_entropy.checks import Inputs, Options
from quackish.ops.linear_cross_entropy.reference import linear_cross_entropy_forward
from tests.emulator_cases import BLACKWELL, HOPPER

SCHEDULES = ["chunked", "stored", "recompute"]
REDUCTIONS = ["mean", "sum", "none"]
IGNORED = -100

# Each option alone, then combined. On kernels, label smoothing runs other kernels.
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "weight": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "weighted_smoothing": {"class_weight": True, "label_smoothing": 0.3},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.01},
    "unsmoothed": {"bias": True, "class_weight": True, "softcap": 3.0, "z_loss": 0.01},
    "scaled": {"bias": True, "class_weight": True, "softcap": 3.0, "logit_scale": 2.5, "z_loss": 0.01},
    "all": {
        "bias": True, "class_weight": True, "label_smoothing": 0.1, "softcap": 3.0, "logit_scale": 0.7, "z_loss": 0.01,
    },
}  # fmt: skip


def make(m=13, h=8, v=11, dtype=torch.float64, device="cpu", seed=0, bias=False, class_weight=False, **options):
    """(input, linear_weight, target, options). Tensors require grad, and some rows are ignored."""
    given = dict(generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    x = torch.randn(m, h, **given, dtype=torch.float64)
    w = torch.randn(v, h, **given, dtype=torch.float64)
    target = torch.randint(0, v, (m,), **given)
    target[1::5] = IGNORED
    kw = dict(options)
    if bias:
        kw["linear_bias"] = torch.randn(v, **given, dtype=torch.float64).to(device, dtype).requires_grad_()
    if class_weight:
        kw["weight"] = (torch.rand(v, **given, dtype=torch.float64) + 0.1).to(device, dtype)
    return x.to(device, dtype).requires_grad_(), w.to(device, dtype).requires_grad_(), target.to(device), kw


def inputs_and_options(x, w, target, **kw):
    """Inputs and Options of a call."""
    inputs, options = ({k: a for k, a in kw.items() if k in kind._fields} for kind in (Inputs, Options))
    return Inputs(x, w, target, **inputs), Options(**options)


def parameters(x, w, kw):
    return [x, w] + ([kw["linear_bias"]] if "linear_bias" in kw else [])


def run(x, w, target, kw, grad=None, grad_lse=None, f=linear_cross_entropy, **more):
    """(loss, lse, gradients of the parameters that require grad). grad None: ones."""
    loss, lse = f(x, w, target, return_lse=True, **kw, **more)
    outputs = [loss] if grad_lse is None else [loss, lse]
    gradients = [torch.ones_like(loss) if grad is None else grad] + ([] if grad_lse is None else [grad_lse])
    wanted = [t for t in parameters(x, w, kw) if t.requires_grad]
    return loss.detach(), lse.detach(), torch.autograd.grad(outputs, wanted, gradients)


def truth(x, w, target, kw, grad=None, grad_lse=None):
    """The reference in fp64 on the same values: loss, lse, (dinput, dlinear_weight[, dlinear_bias])."""
    kw = {k: t.detach().double() if isinstance(t, torch.Tensor) else t for k, t in kw.items()}
    x, w = x.detach().double(), w.detach().double()
    for t in parameters(x, w, kw):
        t.requires_grad_()
    grad, grad_lse = (None if g is None else g.double() for g in (grad, grad_lse))
    with torch.enable_grad():
        return run(x, w, target, kw, grad, grad_lse, f=spec)


def spec(x, w, target, return_lse, **kw):
    return linear_cross_entropy_forward(x, w, target, **kw)


def composed(
    x, w, target, linear_bias=None, softcap=None, logit_scale=None, z_loss=0.0, reduction="mean", return_lse=False, **kw
):
    """The same loss in plain PyTorch: F.linear, softcap, logit_scale, F.cross_entropy and z_loss."""
    logits = F.linear(x, w, linear_bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    logits = logits if logit_scale is None else logits * logit_scale
    loss = F.cross_entropy(logits, target, reduction=reduction, **kw)
    lse = torch.logsumexp(logits, -1)
    live = target != IGNORED
    if z_loss:
        z = (z_loss * lse.square()).masked_fill(~live, 0.0)
        count = (
            live.sum() if kw.get("weight") is None else kw["weight"][target.clamp(min=0)].masked_fill(~live, 0).sum()
        )
        loss = loss + {"none": z, "sum": z.sum(), "mean": z.sum() / count}[reduction]
    return (loss, lse.masked_fill(~live, 0.0)) if return_lse else loss


def hard_rows(dtype, device):
    """linear_weight is the identity, so input is the logits."""
    v = h = 640
    rows, target = torch.randn(200, h, device=device), torch.randint(0, v, (200,), device=device)
    rows[3, -1] = 30.0  # late maximum
    rows[5, 7] = 500.0  # far above the other logits, not the target
    rows[140, 300] = 9e3  # in the other tile of rows
    rows[6, target[6]] = -500.0  # and the target far below
    rows[7] = torch.where(torch.arange(h, device=device) % 2 == 0, 1e4, -1e4)
    rows[8] += 1e4  # a large mean
    rows[9] = -1e4
    rows[10, target[10]] = 500.0
    return rows.to(dtype).requires_grad_(), torch.eye(v, h, dtype=dtype, device=device).requires_grad_(), target


def norm_error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2


def assert_same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


# Paths of linear_cross_entropy ----------------------------------------------------------------------------------------

PATHS = [
    pytest.param(f"{kind}-{device}", marks=pytest.mark.gpu if device == "cuda" else ())
    for kind in ("portable", "kernels")
    for device in ("cpu", "cuda")
]
# The fixture `path` of conftest.py sets it up.
on_every_path, on_kernels = (pytest.mark.parametrize("path", paths, indirect=True) for paths in (PATHS, PATHS[2:]))

IN_EMULATOR = [f"kernels-{name}" for name in (*HOPPER, *BLACKWELL)]


class Path:
    """Portable: small inputs in fp64. Kernels: 16 bits, several tiles and chunks. `is_small`: two of each."""

    def __init__(self, device, kernels=None, close=1e-11, is_small=False, approximates=None):
        self.device, self.kernels, self.close = device, kernels, close
        self.approximates = device.type == "cuda" if approximates is None else approximates  # tanh, of fp32
        self.here, portable = dict(device=device), kernels is None
        self.defaults = dict(backend="reference" if portable else "cute")
        self.calls = None if portable else kernels.calls  # launches, by method
        self.dtypes = [torch.float64] if portable else [torch.bfloat16, torch.float16]
        self.m, self.v, self.chunk_size = (13, 11, 5) if portable else (300, 700, 128)
        if is_small:  # the emulator is slow: two tiles of rows and of classes
            self.dtypes, self.m, self.v, self.chunk_size = [torch.bfloat16], 200, 300, 128

    def case(self, m=None, h=8, v=None, dtype=None, **options):
        """As make(), with fp32 class weights and logits of order 1."""
        m, v = self.m if m is None else m, v or self.v
        x, w, target, kw = make(m, h, v, dtype or self.dtypes[0], self.device, **options)
        w = (w.detach() * h**-0.5).requires_grad_()
        return x, w, target, {k: t.float() if k == "weight" else t for k, t in kw.items()}

    def call(self, x, w, target, **options):
        return linear_cross_entropy(x, w, target, **self.defaults | options)

    def run(self, *args, **options):
        return run(*args, **self.defaults | options)

    def check(self, x, w, target, kw, grad=None, grad_lse=None, **options):
        """Compares with truth: loss and lse within fp32 rounding (and tanh), gradients within a few dtype roundings."""
        loss, lse, grads = self.run(x, w, target, kw, grad, grad_lse, **options)
        true_loss, true_lse, true_grads = truth(x, w, target, kw, grad, grad_lse)
        assert loss.dtype == lse.dtype == torch.promote_types(x.dtype, torch.float32)
        exact = x.dtype == torch.float64
        close = self.close if exact or self.kernels else 2e-6
        if self.approximates and not exact:
            close += 2**-20 * (kw.get("softcap") or 0.0) * float(kw.get("logit_scale") or 1.0)
        torch.testing.assert_close((loss.double(), lse.double()), (true_loss, true_lse), rtol=close, atol=close)
        ways = [grads]
        if self.kernels and options.get("schedule") == "recompute" and grad_lse is None:
            alone = self.call(x, w, target, **kw, **options)  # runs differently if no lse is returned
            wanted = [t for t in parameters(x, w, kw) if t.requires_grad]
            ways.append(torch.autograd.grad(alone, wanted, torch.ones_like(alone) if grad is None else grad))
        for grads in ways:
            for got, want, of in zip(grads, true_grads, parameters(x, w, kw), strict=True):
                assert (got.dtype, got.shape) == (of.dtype, of.shape)
                if want.norm() == 0:
                    assert (got == 0).all()
                else:
                    bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(x.dtype, 4 * unit_roundoff(x.dtype))
                    assert norm_error(got, want) <= bound
