"""Calls of RMSNorm, forward and backward, and bounds on their errors, for tests on GPUs and in the emulator.

Tensors are on `rms_norm_cases.on["device"]`.
"""

import dataclasses

import torch
import torch.nn.functional as F

from quackish.ops.rms_norm import reference
from quackish.ops.rms_norm.api import rms_norm
from quackish.testing.errors import Error, error, same_bits
from tests.rms_norm.cases import leaf, rows, weights

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS32 = torch.finfo(FP32).eps


@dataclasses.dataclass
class Case:
    """Tensors of one call, forward and backward; None where absent."""

    x: torch.Tensor
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    residual: torch.Tensor | None
    dy: torch.Tensor
    dres: torch.Tensor | None
    options: dict

    @property
    def inputs(self):
        return [t for t in (self.x, self.weight, self.bias, self.residual) if t is not None]

    @property
    def grad_outputs(self):
        return [self.dy] if self.residual is None else [self.dy, self.dres]


def make_case(
    m, n, x=BF16, weight=FP32, bias=None, residual=None, out_dtype=None, weight_offset=0.0, kind="normal", seed=0,
    residual_dtype=None,
):  # fmt: skip
    options = dict(residual_dtype=residual_dtype, out_dtype=out_dtype, weight_offset=weight_offset, eps=1e-6)
    return Case(
        leaf(rows((m, n), x, kind=kind, seed=seed)),
        leaf(weights(n, weight, seed=seed + 1)) if weight else None,
        leaf(rows((n,), bias, seed=seed + 2)) if bias else None,
        leaf(rows((m, n), residual, seed=seed + 3)) if residual else None,
        rows((m, n), out_dtype or x, seed=seed + 4),
        rows((m, n), residual_dtype or residual, seed=seed + 5) if residual else None,
        options,
    )


def forward(case, backend="cute"):
    """(y,) or (y, res)."""
    c = case
    out = rms_norm(c.x, c.weight, c.bias, residual=c.residual, backend=backend, **c.options)
    return out if isinstance(out, tuple) else (out,)


def step(case, backend="cute"):
    """[y, (res,) dx, (dweight, dbias, dresidual)]"""
    outs = forward(case, backend)
    return [*outs, *torch.autograd.grad(outs, case.inputs, case.grad_outputs)]


def names(case):
    present = {"dx": case.x, "dweight": case.weight, "dbias": case.bias, "dresidual": case.residual}
    return ["y", *(["res"] if case.residual is not None else []), *(n for n, t in present.items() if t is not None)]


def truth(case, res):
    """{name: (expected value in fp64, error bound)}. res is the rounded, normalized tensor."""
    c, offset = case, case.options["weight_offset"]
    x, w, b, dy, dres = (None if t is None else t.detach().double() for t in (res, c.weight, c.bias, c.dy, c.dres))
    y, _, rstd = reference.rms_norm_fwd(x, w, b, None, case.options["eps"], offset)
    asked = [FP64, None, None if w is None else FP64, None if b is None else FP64]
    dx, _, dw, db = reference.rms_norm_bwd(dy, x, w, rstd, dres, offset, *asked)
    # for small n, dx is a difference of nearly equal terms
    rstd = rstd.unsqueeze(-1)
    g, xhat = (dy if w is None else dy * (w + offset)).abs(), (x * rstd).abs()
    noise = 16 * EPS32 * rstd * (g + xhat * (xhat * g).mean(-1, keepdim=True))
    out = dict(y=(y, 0.0), res=(x, 0.0), dx=(dx, noise), dweight=(dw, 0.0), dbias=(db, 0.0), dresidual=(dx, noise))
    return {name: out[name] for name in names(case)}


def assert_close(case, got, peers=None):
    """Errors are bounded by the dtype, or by 1.5 times PyTorch's error if that is larger."""
    res = got[1] if case.residual is not None else case.x
    if case.residual is not None:
        assert same_bits(res, (case.x.float() + case.residual.float()).to(res.dtype))
    for i, (name, (want, noise)) in enumerate(truth(case, res).items()):
        e, peer = error(got[i], want, noise), error(peers[i], want, noise) if peers else Error(0.0, 0.0)
        eps = torch.finfo(got[i].dtype).eps if got[i].dtype != FP32 else 0.0
        norm, worst = max(0.6 * eps + 8 * EPS32, 1.5 * peer.norm), max(eps + 32 * EPS32, 1.5 * peer.worst)
        assert e.within(norm, worst), f"{name}: {e} of ({norm}, {worst}); PyTorch {peer}"


def pytorch(case):
    """The same step with PyTorch's norm, for a case with one dtype and no options."""
    c = case
    y = F.rms_norm(c.x, c.x.shape[-1:], c.weight, c.options["eps"])
    return [y, *torch.autograd.grad(y, c.inputs, c.dy)]
