"""Combines the shards' row statistics into the loss, and distributes gradients. No communication.

With lse_r the logsumexp of rank r's logits, nll_o = lse_o - a_t on the rank o that owns the target, s the label
smoothing, w_t the target's class weight, W_r the sum of rank r's class weights, and W the sum of all class weights:

    lse = log sum_r exp(lse_r),   log_share_r = lse_r - lse,   nll = lse - a_t = nll_o - log_share_o
    loss = (1 - s) * w_t * nll + s / V * sum_r (smooth_r - W_r * log_share_r) + z_loss * lse**2
    entropy = sum_r exp(log_share_r) * (entropy_r - log_share_r)

where smooth_r is the sum over rank r's classes of class weight * (lse_r - a). log_softmax over ranks computes log_share
without rounding lse, so nll stays accurate in confident rows, where log_share_o is near 0.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.linear_cross_entropy.reference import Rows

NO_CLASSES = -1e30  # lse of an empty shard: exp(NO_CLASSES - lse) is 0, and 0 * NO_CLASSES is not NaN


class ShardStats(NamedTuple):
    """Row statistics of one shard, (m,) each, or of all shards, (ranks, m). fp32 (fp64 for fp64)."""

    lse: Tensor
    nll: Tensor  # arbitrary on ranks that do not own the target, as is `weight`
    weight: Tensor | None = None  # the target's class weight, if there are class weights
    smooth: Tensor | None = None  # with label smoothing, as is `total_weight`
    total_weight: Tensor | None = None  # W_r, the same for all rows
    entropy: Tensor | None = None  # with return_stats, as are the next two
    max_logit: Tensor | None = None
    predicted: Tensor | None = None  # the class of max_logit, counted over all shards

    def stacked(self) -> Tensor:
        return torch.stack([t for t in self if t is not None])

    def unstack(self, gathered: Tensor) -> "ShardStats":
        """The statistics of all shards from `gathered`, the `stacked` of all ranks concatenated."""
        count = sum(t is not None for t in self)
        columns = (gathered[i::count] for i in range(count))
        return ShardStats(*(None if t is None else next(columns) for t in self))


class LossOptions(NamedTuple):
    label_smoothing: float
    z_loss: float
    smoothing_per_class: float  # label_smoothing / V


class Combined(NamedTuple):
    """Loss and statistics of each row over all classes, (m,), and what their gradients need.

    In ignored rows, predicted is -1 and the other statistics are 0.
    """

    loss: Tensor
    lse: Tensor | None  # if needed
    log_prob: Tensor | None  # with return_stats, as the next two
    entropy: Tensor | None
    predicted: Tensor | None
    rows: Rows  # with the target's class weight
    target_weight: Tensor  # (1 - s) * w_t
    owns_target: Tensor  # bool: this rank owns the target
    log_share: Tensor  # of this rank
    own: ShardStats  # of this rank
    total_weight: Tensor | None  # W


def combine(
    stats: ShardStats, rank: int, owner: Tensor, rows: Rows, options: LossOptions, needs_lse: bool = False
) -> Combined:
    """stats: of all ranks. owner: (m,) int64, the rank that owns the target. rows: without class weights."""

    def from_owner(t: Tensor) -> Tensor:
        return t.gather(0, owner[None])[0]

    log_shares = stats.lse.log_softmax(0)
    nll = from_owner(stats.nll - log_shares)
    if stats.weight is not None:  # a product: rows without a class keep their NaN or 0
        rows = dataclasses.replace(rows, weight=from_owner(stats.weight) * rows.weight)
    target_weight, lse, total_weight = rows.weight, None, None
    if options.label_smoothing:
        target_weight = (1.0 - options.label_smoothing) * target_weight
    loss = target_weight * nll
    if stats.weight is not None or options.label_smoothing == 1.0:  # weight 0 of a masked target: 0, not 0 * inf
        loss = loss.masked_fill((target_weight == 0) & ~nll.isnan(), 0.0)
    if stats.smooth is not None:
        loss = loss + options.smoothing_per_class * (stats.smooth - stats.total_weight * log_shares).sum(0)
        total_weight = stats.total_weight.sum(0)
    if needs_lse or options.z_loss:
        lse = stats.lse.amax(0) - log_shares.amax(0)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    log_prob = entropy = predicted = None
    if stats.entropy is not None:
        entropy = (log_shares.exp() * (stats.entropy - log_shares)).sum(0)
        log_prob = (-nll).masked_fill(rows.weight.isnan(), float("nan"))
        predicted = stats.predicted.gather(0, stats.max_logit.argmax(0)[None])[0]  # ties: the lowest rank
        predicted = predicted.masked_fill(rows.ignored | lse.isnan(), -1).long()
    loss, lse, log_prob, entropy = (
        None if t is None else t.masked_fill(rows.ignored, 0.0) for t in (loss, lse, log_prob, entropy)
    )
    return Combined(
        loss, lse, log_prob, entropy, predicted, rows, target_weight, owner == rank, log_shares[rank],
        ShardStats(*(None if t is None else t[rank] for t in stats)), total_weight,
    )  # fmt: skip


def row_gradients(
    combined: Combined,
    options: LossOptions,
    classes: int,  # of this rank's shard
    grad_loss: Tensor | None,  # 0-dim or (m,), of the rows' losses before division; None: 0, as for the next three
    grad_lse: Tensor | None,  # (m,)
    grad_log_prob: Tensor | None,
    grad_entropy: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of this shard's loss, lse, log_prob and entropy, (m,) each, from those of the outputs."""
    c, smoothing = combined, options.smoothing_per_class
    grad_loss = c.target_weight.new_zeros(()) if grad_loss is None else grad_loss
    grad_nll = grad_loss * c.target_weight
    if grad_log_prob is not None:
        grad_nll = grad_nll - grad_log_prob
    grad_total_lse = grad_nll
    if c.total_weight is not None:
        grad_total_lse = grad_total_lse + grad_loss * (smoothing * c.total_weight)
    if options.z_loss:
        grad_total_lse = grad_total_lse + grad_loss * (2.0 * options.z_loss * c.lse)
    if grad_lse is not None:
        grad_total_lse = grad_total_lse + grad_lse
    grad_nll = grad_nll * c.owns_target
    share = c.log_share.exp()
    grad_own_lse = share * grad_total_lse - grad_nll
    if grad_entropy is not None:
        grad_entropy = grad_entropy * share  # first, because an empty shard has share 0 and log_share near NO_CLASSES
        grad_own_lse = grad_own_lse + grad_entropy * (c.own.entropy - c.log_share - c.entropy)
    if c.total_weight is None:
        return grad_nll, grad_own_lse, None, grad_entropy
    grad_smooth = (smoothing * grad_loss).expand(c.target_weight.shape)
    return grad_smooth * classes, grad_own_lse - grad_smooth * c.own.total_weight, -grad_nll, grad_entropy
