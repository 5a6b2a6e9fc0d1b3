"""The loss of a row from its statistics on each rank's shard of the classes, and back. No communication, no logits.

With lse_r the logsumexp of rank r's logits, nll_o = lse_o - a_t on the rank o that has the target, s the label
smoothing, w_t the target's class weight and W_r the sum of the class weights of rank r (W of all):

    lse = log sum_r exp(lse_r),   log_share_r = lse_r - lse,   nll = lse - a_t = nll_o - log_share_o
    loss = (1 - s) * w_t * nll + s / V * sum_r (smooth_r - W_r * log_share_r) + z_loss * lse**2
    entropy = sum_r exp(log_share_r) * (entropy_r - log_share_r)

where smooth_r is the sum over the classes of rank r of class weight * (lse_r - a). Confident rows keep the digits of
nll: log_softmax computes log_share_o, which is near 0 there, without rounding lse.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.reference.linear_cross_entropy import Rows

NO_CLASSES = -1e30  # lse of an empty shard: exp(NO_CLASSES - lse) is 0, and 0 * NO_CLASSES is not NaN


class Parts(NamedTuple):
    """Statistics of each row on one rank's shard, (m,) each, or of all ranks, (ranks, m). fp32 (fp64 for fp64)."""

    lse: Tensor
    nll: Tensor  # anything where another rank has the target
    weight: Tensor | None = None  # the target's class weight, likewise; with class weights
    smooth: Tensor | None = None  # with label smoothing, as the next one
    total_weight: Tensor | None = None  # W_r, the same for all rows
    entropy: Tensor | None = None  # with return_stats, as what follows
    highest: Tensor | None = None  # the largest logit
    predicted: Tensor | None = None  # its class among all ranks' classes

    def stacked(self) -> Tensor:
        return torch.stack([t for t in self if t is not None])

    def unstacked(self, gathered: Tensor) -> "Parts":
        """gathered: (ranks * parts, m), of all ranks' `stacked`."""
        step = sum(t is not None for t in self)
        columns = (gathered[i::step] for i in range(step))
        return Parts(*(None if t is None else next(columns) for t in self))


@dataclasses.dataclass(frozen=True)
class Formula:
    label_smoothing: float
    z_loss: float
    num_classes: int  # V, of all ranks

    @property
    def spread(self) -> float:
        return self.label_smoothing / self.num_classes


class Combined(NamedTuple):
    """Of each row, (m,). The statistics are 0 in ignored rows, and predicted is -1."""

    loss: Tensor
    lse: Tensor | None  # if it is needed
    log_prob: Tensor | None  # with return_stats, as the next two
    entropy: Tensor | None
    predicted: Tensor | None
    rows: Rows  # with the target's class weight
    hit: Tensor  # (1 - s) * w_t
    mine: Tensor  # bool: this rank has the target
    log_share: Tensor  # this rank's
    own: Parts  # this rank's
    total_weight: Tensor | None  # W


def combine(parts: Parts, rank: int, owner: Tensor, rows: Rows, formula: Formula, needs_lse: bool = False) -> Combined:
    """parts: of all ranks. owner: (m,) int64, the rank that has the target. rows: without class weights."""

    def of_owner(t: Tensor) -> Tensor:
        return t.gather(0, owner[None])[0]

    log_shares = parts.lse.log_softmax(0)
    nll = of_owner(parts.nll - log_shares)
    if parts.weight is not None:  # NaN and 0 of a row without a class stay
        rows = dataclasses.replace(rows, weight=of_owner(parts.weight) * rows.weight)
    hit, lse, all_weights = rows.weight, None, None
    if formula.label_smoothing:
        hit = (1.0 - formula.label_smoothing) * hit
    loss = hit * nll
    if parts.weight is not None or formula.label_smoothing == 1.0:  # a masked target that does not count: not 0 * inf
        loss = loss.masked_fill((hit == 0) & ~nll.isnan(), 0.0)
    if parts.smooth is not None:
        loss = loss + formula.spread * (parts.smooth - parts.total_weight * log_shares).sum(0)
        all_weights = parts.total_weight.sum(0)
    if needs_lse or formula.z_loss:
        lse = parts.lse.amax(0) - log_shares.amax(0)
    if formula.z_loss:
        loss = loss + formula.z_loss * lse.square()
    log_prob = entropy = predicted = None
    if parts.entropy is not None:
        entropy = (log_shares.exp() * (parts.entropy - log_shares)).sum(0)
        log_prob = (-nll).masked_fill_(rows.weight.isnan(), float("nan"))
        predicted = parts.predicted.gather(0, parts.highest.argmax(0)[None])[0]  # of equal ones, the lowest rank's
        predicted = predicted.masked_fill(rows.ignored | lse.isnan(), -1).long()
    for t in (loss, lse, log_prob, entropy):
        if t is not None:
            t.masked_fill_(rows.ignored, 0.0)
    own = Parts(*(None if t is None else t[rank] for t in parts))
    mine, log_share = owner == rank, log_shares[rank]
    return Combined(loss, lse, log_prob, entropy, predicted, rows, hit, mine, log_share, own, all_weights)


def row_gradients(
    c: Combined,
    formula: Formula,
    classes: int,  # of the operation on this rank's shard
    grad_loss: Tensor | None,  # 0-dim or (m,), of the rows' losses before any division; as for the others, None is 0
    grad_lse: Tensor | None,  # (m,)
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """From what arrives at the outputs, what arrives at this rank's loss, lse, log_prob and entropy: (m,) each."""
    spread = formula.spread
    grad_loss = c.hit.new_zeros(()) if grad_loss is None else grad_loss
    at_target = grad_loss * c.hit  # of nll
    if grad_log_prob is not None:
        at_target = at_target - grad_log_prob
    at_lse = at_target  # of the lse of all classes
    if c.total_weight is not None:
        at_lse = at_lse + grad_loss * (spread * c.total_weight)
    if formula.z_loss:
        at_lse = at_lse + grad_loss * (2.0 * formula.z_loss * c.lse)
    if grad_lse is not None:
        at_lse = at_lse + grad_lse
    at_target = at_target * c.mine
    share = c.log_share.exp()
    grad = share * at_lse - at_target
    if grad_entropy is not None:
        grad_entropy = grad_entropy * share  # first: 0 of an empty shard, whose lse is NO_CLASSES
        grad = grad + grad_entropy * (c.own.entropy - c.log_share - c.entropy)
    if c.total_weight is None:
        return at_target, grad, None, grad_entropy
    smooth = (spread * grad_loss).expand(c.hit.shape)
    return smooth * classes, grad - smooth * c.own.total_weight, -at_target, grad_entropy
