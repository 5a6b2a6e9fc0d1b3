"""The data of a case, its softmax-like dlogits, and how far losses and gradients are from fp64.

The truth is fp64 from the rounded inputs: the loss and every row's lse whole, dX on some rows and dW on some classes,
both spread evenly. Chunks of rows keep it within a few GB at any shape.
"""

import dataclasses
import math

import torch
from torch import Tensor

from quackish.bench.providers_linear_cross_entropy import IGNORED
from quackish.bench.truth import chunks
from quackish.testing import inputs

CHUNK_ELEMENTS = 1 << 27
ROWS, CLASSES = 512, 4096  # of dX and dW that are compared
SPREAD = 1.5  # standard deviation of the logits
CONFIDENCE = (0.9, 0.99, 0.999)  # of the target, in turn, with data "confident"


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor  # (m, h), a leaf that requires grad
    w: Tensor  # (v, h), likewise
    target: Tensor  # (m,) int64
    all_targets: Tensor  # the same with no row ignored

    @classmethod
    def make(
        cls, m: int, h: int, v: int, kind: str, ignored: float, device: torch.device, dtype: torch.dtype
    ) -> "Data":
        """Normal: logits of deviation SPREAD. `ignored` is the share of rows, at random, with target -100."""
        x = inputs.rows((m, h), dtype, seed=0, device=device)
        w = inputs.rows((v, h), dtype, seed=1, device=device).mul_(SPREAD / math.sqrt(h))
        generator = torch.Generator(device).manual_seed(2)
        all_targets = torch.randint(v, (m,), generator=generator, device=device)
        if kind == "confident":
            _make_confident(x, w, all_targets)
        elif kind != "normal":
            raise ValueError(f"data is {kind!r}; expected normal or confident")
        target = all_targets.clone()
        target[torch.randperm(m, generator=generator, device=device)[: round(ignored * m)]] = IGNORED
        return cls(x.requires_grad_(), w.requires_grad_(), target, all_targets)

    def clear_grads(self) -> None:
        self.x.grad = self.w.grad = None


def _make_confident(x: Tensor, w: Tensor, target: Tensor) -> None:
    """Moves each row along its target's weights until the target's probability is about CONFIDENCE."""
    v = w.shape[0]
    for at in chunks(*x.shape, CHUNK_ELEMENTS):
        rows, towards = x[at].float(), w[target[at]].float()
        p = torch.tensor(CONFIDENCE, device=x.device)[torch.arange(at.start, at.start + len(rows), device=x.device) % 3]
        # log of the others' sum, for normal logits, and the odds on top
        wanted = math.log(v) + SPREAD**2 / 2 + torch.logit(p)
        missing = wanted - (rows * towards).sum(1)
        x[at] = (rows + (missing / towards.square().sum(1))[:, None] * towards).to(x.dtype)


def dlogits_of(data: Data) -> Tensor:
    """(m, v) in x's dtype: (softmax - onehot) / live rows, what the two GEMMs of backward multiply."""
    x, w, target = data.x.detach(), data.w.detach(), data.target
    live = target != IGNORED
    out = x.new_empty(x.shape[0], w.shape[0])
    for at in chunks(*out.shape, CHUNK_ELEMENTS):
        p = torch.softmax((x[at] @ w.T).float(), 1)
        _minus_onehot(p, target[at].clamp(min=0))
        out[at] = p.mul_((live[at] / live.sum())[:, None])
    return out


def _minus_onehot(p: Tensor, index: Tensor) -> None:
    p.scatter_add_(1, index[:, None], p.new_full((len(p), 1), -1.0))


class Truth:
    """What a loss and its gradients are compared with: dX of `rows` rows, dW of `classes` classes."""

    def __init__(self, data: Data, rows: int = ROWS, classes: int = CLASSES, elements: int = CHUNK_ELEMENTS):
        x, w, target = data.x.detach(), data.w.detach().double(), data.target
        (m, _), v = x.shape, w.shape[0]
        self.rows = _spread(m, rows, x.device)
        self.classes = _spread(v, classes, x.device)
        live = target != IGNORED
        scale = live.double() / live.sum().clamp(min=1)  # (m,) of each row's loss in the mean
        index = target.clamp(min=0)

        # the loss, and each row's lse
        lse = torch.empty(m, dtype=torch.float64, device=x.device)
        loss = torch.zeros((), dtype=torch.float64, device=x.device)
        for at in chunks(m, v, elements):
            z = x[at].double() @ w.T
            lse[at] = torch.logsumexp(z, 1)
            loss += ((lse[at] - z.gather(1, index[at, None]).squeeze(1)) * scale[at]).sum()
            del z
        self.loss = loss

        # dX of some rows
        self.dx = torch.empty(len(self.rows), x.shape[1], dtype=torch.float64, device=x.device)
        for at in chunks(len(self.rows), v, elements):
            rows = self.rows[at]
            p = (x[rows].double() @ w.T).sub_(lse[rows, None]).exp_()
            _minus_onehot(p, index[rows])
            self.dx[at] = p.mul_(scale[rows, None]) @ w
            del p

        # dW of some classes
        w = w[self.classes]
        self.dw = torch.zeros_like(w)
        for at in chunks(m, max(len(self.classes), x.shape[1]), elements):
            rows = x[at].double()
            p = (rows @ w.T).sub_(lse[at, None]).exp_()
            p -= (index[at, None] == self.classes).double()
            self.dw += p.mul_(scale[at, None]).T @ rows

    def errors(self, loss: Tensor, dx: Tensor | None, dw: Tensor | None) -> dict[str, float]:
        """The loss's relative error, and |got - truth| / |truth| of the gradients."""
        errors = {"err_loss": float((loss.detach().double() - self.loss).abs() / self.loss.abs())}
        if dx is not None:
            errors["err_dx"] = float((dx[self.rows].double() - self.dx).norm() / self.dx.norm())
        if dw is not None:
            errors["err_dweight"] = float((dw[self.classes].double() - self.dw).norm() / self.dw.norm())
        return errors


def _spread(n: int, count: int, device: torch.device) -> Tensor:
    """At most `count` indices below `n`, evenly spread."""
    return torch.arange(min(n, count), device=device) * n // min(n, count)
