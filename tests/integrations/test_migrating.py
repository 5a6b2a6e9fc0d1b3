"""docs/migrating.md: other libraries' calls and ours, on a CPU. Liger's kernels run in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

import quackish

M, H, V, IGNORED = 20, 16, 40, -100


def inputs():
    torch.manual_seed(0)
    x, w, b = torch.randn(M, H, requires_grad=True), torch.randn(V, H, requires_grad=True), torch.randn(V)
    target = torch.randint(V, (M,))
    target[3] = IGNORED
    return x, w, b.requires_grad_(), target


def check_liger() -> None:
    """Called in a process of its own, because Triton reads TRITON_INTERPRET on import."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    x, w, b, target = inputs()
    grads = torch.rand(M)
    for liger, ours in (
        ({}, {}),
        (dict(reduction="sum"), dict(reduction="sum")),
        (dict(reduction="none"), dict(reduction="none")),
        (dict(ignore_index=5), dict(ignore_index=5)),
        (dict(lse_square_scale=1e-2), dict(z_loss=1e-2)),
        (dict(label_smoothing=0.1), dict(label_smoothing=0.1)),
    ):
        labels = target.masked_fill(target == IGNORED, 5) if "ignore_index" in liger else target
        theirs = LigerFusedLinearCrossEntropyLoss(**liger)(w, x, labels, b)
        mine = quackish.linear_cross_entropy(x, w, labels, linear_bias=b, **ours)
        torch.testing.assert_close(mine, theirs)
        grad = grads if mine.dim() else torch.tensor(0.7)
        wants, got = (torch.autograd.grad(loss, [x, w, b], grad) for loss in (theirs, mine))
        torch.testing.assert_close(got, wants, rtol=1e-4, atol=1e-5)
    returned = dict(return_token_accuracy=True, return_predicted_tokens=True, return_z_loss=True, lse_square_scale=1e-2)
    out = LigerFusedLinearCrossEntropyLoss(**returned)(w, x, target, b)
    _, stats = quackish.linear_cross_entropy(x, w, target, linear_bias=b, return_stats=True)
    live = target != IGNORED
    torch.testing.assert_close((stats.predicted == target)[live].float().mean(), out.token_accuracy.detach())
    torch.testing.assert_close(stats.predicted, out.predicted_tokens.long())
    torch.testing.assert_close((1e-2 * stats.lse**2).sum() / live.sum(), out.z_loss)
    scaled = LigerFusedLinearCrossEntropyLoss(reduction="none", use_token_scaling=True)(w, x, target, b)
    loss = quackish.linear_cross_entropy(x, w, target, linear_bias=b, reduction="none")
    torch.testing.assert_close(loss * (-loss).detach().exp(), scaled)
    nothing = torch.full_like(target, IGNORED)
    assert LigerFusedLinearCrossEntropyLoss()(w, x, nothing) == quackish.linear_cross_entropy(x, w, nothing) == 0


def test_liger():
    pytest.importorskip("liger_kernel")
    code = "from tests.integrations.test_migrating import check_liger; check_liger()"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_quack():
    pytest.importorskip("quack")
    from quack.linear_cross_entropy import linear_cross_entropy_func_ref
    from quack.rmsnorm import rmsnorm_ref

    x, w, b, target = inputs()
    for reduction in ("mean", "sum", "none"):
        theirs = linear_cross_entropy_func_ref(x, w, b, target, reduction=reduction)
        mine = quackish.linear_cross_entropy(x, w, target, linear_bias=b, reduction=reduction)
        torch.testing.assert_close(mine, theirs)
    weight, bias, residual = torch.randn(H), torch.randn(H), torch.randn(M, H)
    for options in ({}, dict(weight_offset=1.0)):
        torch.testing.assert_close(
            quackish.rms_norm(x, weight, bias, eps=1e-6, **options), rmsnorm_ref(x, weight, bias, eps=1e-6, **options)
        )
    torch.testing.assert_close(
        quackish.rms_norm(x, weight, bias, residual=residual, eps=1e-6),
        rmsnorm_ref(x, weight, bias, residual, eps=1e-6),
    )
