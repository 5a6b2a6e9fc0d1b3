"""Inputs, truth and error measures that the tests of linear cross entropy share."""

import torch

from quackish.ops.linear_cross_entropy import linear_cross_entropy
from quackish.reference.linear_cross_entropy import linear_cross_entropy_backward, linear_cross_entropy_forward

SCHEDULES = ["chunked", "stored", "recompute"]
REDUCTIONS = ["mean", "sum", "none"]
IGNORED = -100

# Every option alone, then all at once; on kernels label smoothing takes other ones.
OPTIONS = {
    "plain": {},
    "bias": {"bias": True},
    "weight": {"class_weight": True},
    "smoothing": {"label_smoothing": 0.1},
    "weighted_smoothing": {"class_weight": True, "label_smoothing": 0.3},
    "softcap": {"softcap": 3.0},
    "z_loss": {"z_loss": 0.01},
    "unsmoothed": {"bias": True, "class_weight": True, "softcap": 3.0, "z_loss": 0.01},
    "all": {"bias": True, "class_weight": True, "label_smoothing": 0.1, "softcap": 3.0, "z_loss": 0.01},
}


def make(m=13, h=8, v=11, dtype=torch.float64, device="cpu", seed=0, bias=False, class_weight=False, **options):
    """(input, linear_weight, target, options): tensors that require grad, some rows ignored, on the device."""
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


def parameters(x, w, kw):
    return [x, w] + ([kw["linear_bias"]] if "linear_bias" in kw else [])


def run(x, w, target, kw, grad=None, grad_lse=None, f=linear_cross_entropy, **more):
    """loss, lse, gradients of what requires one; grad None is ones."""
    loss, lse = f(x, w, target, return_lse=True, **kw, **more)
    outputs = [loss] if grad_lse is None else [loss, lse]
    gradients = [torch.ones_like(loss) if grad is None else grad] + ([] if grad_lse is None else [grad_lse])
    wanted = [t for t in parameters(x, w, kw) if t.requires_grad]
    return loss.detach(), lse.detach(), torch.autograd.grad(outputs, wanted, gradients)


def truth(x, w, target, kw, grad=None, grad_lse=None):
    """The spec in fp64 on the same (already rounded) values: loss, lse, (dinput, dlinear_weight[, dlinear_bias])."""
    kw = {k: t.detach().double() if isinstance(t, torch.Tensor) else t for k, t in kw.items()}
    x, w = x.detach().double(), w.detach().double()
    loss, lse = linear_cross_entropy_forward(x, w, target, **kw)
    grad = torch.ones_like(loss) if grad is None else grad.double()
    grad_lse = None if grad_lse is None else grad_lse.double()
    grads = linear_cross_entropy_backward(grad, grad_lse, x, w, target, **kw)
    return loss, lse, grads[: 3 if "linear_bias" in kw else 2]


def norm_error(got, want):
    return ((got.double() - want).norm() / want.norm().clamp(min=1e-30)).item()


def unit_roundoff(dtype):
    return torch.finfo(dtype).eps / 2
