"""Providers of the distillation loss: quackish, TRL, Liger and PyTorch, and the bare matrix products.

A provider takes x (m, h), w (v, h), teacher_x (m, k), teacher_w (v, k) and beta, and returns the mean divergence.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish import linear_divergence
from quackish.bench.cells import OURS
from quackish.bench.measure import imported

Loss = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def ours(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
    return linear_divergence(x, w, teacher_x, teacher_w, beta=beta)


def per_row(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
    """A gradient for each row, as policy gradients need."""
    return linear_divergence(x, w, teacher_x, teacher_w, beta=beta, reduction="none").mean()


def eager(x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
    """All logits, in fp32."""
    log_s, log_t = (F.linear(a, b).float().log_softmax(-1) for a, b in ((x, w), (teacher_x, teacher_w)))
    if beta in (0, 1):
        first, second = (log_t, log_s) if beta == 0 else (log_s, log_t)
        return (first.exp() * (first - second)).sum(-1).mean()
    log_m = torch.logaddexp(log_s + torch.log1p(torch.tensor(-beta)).item(), log_t + torch.tensor(beta).log().item())
    to_mixture = [(log_p.exp() * (log_p - log_m)).sum(-1) for log_p in (log_t, log_s)]
    return (beta * to_mixture[0] + (1 - beta) * to_mixture[1]).mean()


class Trl:
    """The loss of TRL's DistillationTrainer."""

    def __init__(self):
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        self.function = _chunked_divergence_loss

    def __call__(self, x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
        mask = torch.ones(1, len(x), dtype=torch.bool, device=x.device)
        return self.function(x[None], teacher_x[None], w, teacher_w, mask, beta)[0]


class Liger:
    def __init__(self):
        from liger_kernel.ops.fused_linear_jsd import LigerFusedLinearJSDFunction

        self.function = LigerFusedLinearJSDFunction

    def __call__(self, x: Tensor, w: Tensor, teacher_x: Tensor, teacher_w: Tensor, beta: float) -> Tensor:
        return self.function.apply(x, w, teacher_x, teacher_w, None, beta, -100, 1.0)


PROVIDERS: dict[str, Callable[[], Loss]] = {
    OURS: lambda: ours,
    "quackish-per-row": lambda: per_row,
    "trl": Trl,
    "liger": Liger,
    "torch": lambda: eager,
    "torch-compile": lambda: torch.compile(eager),
}


def load(name: str) -> Loss:
    """The provider `name`, or the user's "module:attribute"."""
    return imported(name) if ":" in name else PROVIDERS[name]()
