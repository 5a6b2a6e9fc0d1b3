"""Linear cross entropy in plain PyTorch: the specification on full logits, and of one chunk.

With z = input @ linear_weight.T + linear_bias, c = softcap * tanh(z / softcap), a = logit_scale * c,
lse = logsumexp(a), t the target, w the class weights (1 by default), e = label_smoothing and
q = w * ((1 - e) * onehot(t) + e / V):

    loss   = sum_j q_j * (lse - a_j) + z_loss * lse**2   for a live row, 0 for an ignored row
    da     = g * ((sum(q) + 2 * z_loss * lse) * p - q) + g_lse * p,   p = exp(a - lse)
    dz     = logit_scale * da * (1 - (c / softcap)**2)
    dinput = dz @ linear_weight,   dlinear_weight = dz.T @ input,   dlinear_bias = sum of dz over rows

With g_lp and g_h the gradients of log_prob = a_t - lse and of the entropy h = -sum_j p_j * log p_j:

    da += g_lp * (onehot(t) - p) - g_h * p * (log p + h)

`mean` divides the sum over rows, including z_loss, by `mean_divisor`. Class weights do not scale z_loss, which
regularizes the logits.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from quackish.ops.shared.matmul import accumulate_dtype


class LinearCrossEntropyStats(NamedTuple):
    """Row statistics of target's shape, fp32 (fp64 for fp64). All except `predicted` are differentiable."""

    lse: Tensor  # logsumexp of the logits; 0 in ignored rows, as are log_prob and entropy
    log_prob: Tensor  # of the target; NaN if the target is invalid
    entropy: Tensor  # of softmax(logits), in nats
    predicted: Tensor  # int64: the first class with the largest logit; -1 in ignored rows and if a logit is NaN


@dataclasses.dataclass(frozen=True)
class Rows:
    """The targets of m rows, checked."""

    ignored: Tensor  # (m,) bool
    index: Tensor  # (m,) int64 in [0, V): the class; arbitrary if the target is invalid
    weight: Tensor  # (m,) class weight of the target; 0 for an ignored row, NaN if the target is invalid

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.ignored[rows], self.index[rows], self.weight[rows])


def rows_of(target: Tensor, v: int, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Rows:
    """The Rows of targets (m,). Never indexes out of bounds: invalid targets get a NaN weight."""
    target = target.long()  # before comparing: in int32, an ignore_index of 2**32 would be class 0
    ignored = target == ignore_index
    index = target.clamp(0, v - 1)
    if weight is None:
        row_weight = torch.ones_like(target, dtype=dtype)
    else:
        row_weight = weight.to(dtype).index_select(0, index)
    return Rows(ignored, index, row_weight.masked_fill(index != target, float("nan")).masked_fill(ignored, 0.0))


def mean_divisor(rows: Rows, num_items: int | Tensor | None = None) -> Tensor:
    """The divisor of `mean`: the sum of the rows' class weights, or `num_items`; 1 if no row has a class.

    Rows with invalid targets do not count, so the other rows' gradients are as if these rows were ignored.
    """
    uncounted = rows.weight.isnan() | rows.ignored
    if num_items is None:
        divisor = rows.weight.nansum()
    else:
        # multiply instead of copy: copying a 0-dim CPU tensor to the GPU would synchronize
        divisor = (torch.ones((), dtype=rows.weight.dtype, device=rows.weight.device) * num_items).to(rows.weight.dtype)
    return divisor.masked_fill(uncounted.all(), 1.0)


def linear_cross_entropy_forward(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float | Tensor | None = None,
    z_loss: float = 0.0,
    num_items: int | Tensor | None = None,
    return_stats: bool = False,
) -> tuple[Tensor, Tensor | LinearCrossEntropyStats]:
    """(loss, lse), with `return_stats` (loss, stats), of input (m, h), linear_weight (v, h), target (m,).

    From full logits in fp32 (fp64 for fp64); autograd computes gradients. An ignored row has loss 0 and lse 0;
    a row with an invalid target has loss NaN.
    """
    dtype, v = accumulate_dtype(input.dtype), linear_weight.shape[0]
    rows = rows_of(target, v, weight, ignore_index, dtype)
    logits = input.to(dtype).masked_fill(rows.ignored[:, None], 0.0) @ linear_weight.to(dtype).T
    if linear_bias is not None:
        logits = logits + linear_bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    predicted = logits.argmax(-1) if return_stats else None
    if logit_scale is not None:  # after argmax, because rounding may make logits equal
        logits = logits * logit_scale
    onehot = rows.index[:, None] == torch.arange(v, device=logits.device)  # vmap does not support F.one_hot
    q = (1.0 - label_smoothing) * onehot.to(dtype) + label_smoothing / v
    if weight is not None:
        q = q * weight.to(dtype)
    q = q.masked_fill(rows.weight.isnan()[:, None], float("nan"))
    logp, lse = torch.log_softmax(logits, -1), torch.logsumexp(logits, -1)
    # a masked class has logp -inf and may have q 0: avoid 0 * inf
    loss = -(q * logp).masked_fill(q == 0, 0.0).sum(-1) + z_loss * lse.square()
    loss = loss.masked_fill(rows.ignored, 0.0)
    stats = lse = lse.masked_fill(rows.ignored, 0.0)
    if return_stats:
        log_prob = logp.gather(1, rows.index[:, None]).squeeze(1).masked_fill(rows.weight.isnan(), float("nan"))
        entropy = -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(-1)
        log_prob, entropy = (t.masked_fill(rows.ignored, 0.0) for t in (log_prob, entropy))
        stats = LinearCrossEntropyStats(lse, log_prob, entropy, predicted.masked_fill(lse.isnan() | rows.ignored, -1))
    if reduction == "none":
        return loss, stats
    return loss.sum() / mean_divisor(rows, num_items) if reduction == "mean" else loss.sum(), stats


def chunk_of_rows(
    logits: Tensor,  # (m, v) fp32 or fp64: input @ linear_weight.T + linear_bias; overwritten
    rows: Rows,
    weight: Tensor | None,  # (v,) in logits' dtype
    label_smoothing: float,
    softcap: float | None,
    z_loss: float,
    logit_scale: Tensor | None,  # 0-dim, in logits' dtype
    needs_grad: bool,
    grad_loss: Tensor | None = None,  # (m,) gradient of each row's loss; None: 1
    grad_lse: Tensor | None = None,  # (m,); None: 0, as for the next two
    grad_log_prob: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    return_stats: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """(loss (m,), [lse (m,)], dlogits (m, v) or None) of one chunk. With `return_stats` the list has all statistics.

    dlogits use the memory of `logits` if possible. All sums run along a row, so results do not depend on the other rows
    of the chunk. Ignored rows must have finite logits: the caller zeroes their rows of the input.
    """
    v, smoothing = logits.shape[1], label_smoothing
    if softcap is None:
        tanh, shifted = None, logits
    else:
        tanh = logits.div_(softcap).tanh_()
        shifted = tanh * softcap
    predicted = shifted.argmax(1) if return_stats else None
    if logit_scale is not None:  # after argmax, because rounding may make logits equal
        shifted.mul_(logit_scale)

    # loss: from a - max and its exponentials, because the rounding error of a - lse grows with |lse|
    row_max = shifted.amax(1, keepdim=True)
    shifted.sub_(row_max)
    at_target = shifted.gather(1, rows.index[:, None]).squeeze(1)
    if smoothing:
        total_weight = float(v) if weight is None else weight.sum()
        if weight is None:
            weighted = shifted.sum(1)
        else:  # a masked class with weight 0 adds 0, not 0 * -inf
            weighted = torch.where((weight == 0) & (shifted == -torch.inf), 0.0, shifted) @ weight
    needs_entropy = return_stats or grad_entropy is not None
    exp_logits = shifted.exp() if needs_entropy else shifted.exp_()
    row_sum = exp_logits.sum(1)
    log_sum = row_sum.log()
    if needs_entropy:
        shifted.clamp_(min=-1e4)  # a masked class: 0 * -1e4, not 0 * -inf
        mean = (exp_logits * shifted).sum(1) / row_sum
    lse = row_max.squeeze(1) + log_sum
    coef_target = (1.0 - smoothing) * rows.weight
    loss = coef_target * (log_sum - at_target)
    # a masked target with class weight 0: 0, not 0 * inf
    loss = loss.masked_fill((coef_target == 0) & (at_target == -torch.inf) & ~log_sum.isnan(), 0.0)
    if smoothing:
        loss = loss + (smoothing / v) * (total_weight * log_sum - weighted)
    if z_loss:
        loss = loss + z_loss * lse.square()
    ignored = rows.ignored
    loss = loss.masked_fill(ignored, 0.0)
    stats = [lse.masked_fill(ignored, 0.0)]
    if return_stats:
        log_prob = (at_target - log_sum).masked_fill(rows.weight.isnan(), float("nan"))
        stats += [t.masked_fill(ignored, 0.0) for t in (log_prob, (log_sum - mean).clamp(min=0.0))]
        stats.append(predicted.masked_fill(lse.isnan() | ignored, -1))
    if not needs_grad:
        return loss, stats, None

    # dlogits = coef_softmax * p - coef_smooth * weight - coef_target * onehot, with p - 1 of the target formed in fp32
    coef_softmax = coef_target + 2.0 * z_loss * lse
    coef_smooth = torch.full_like(coef_target, smoothing / v)
    if smoothing:
        coef_softmax = coef_softmax + coef_smooth * total_weight
    if grad_loss is not None:
        coef_softmax, coef_target, coef_smooth = (c * grad_loss for c in (coef_softmax, coef_target, coef_smooth))
    if grad_lse is not None:
        coef_softmax = coef_softmax + grad_lse
    if grad_log_prob is not None:
        coef_softmax, coef_target = coef_softmax - grad_log_prob, coef_target - grad_log_prob
    if logit_scale is not None:
        coef_softmax, coef_target, coef_smooth = (c * logit_scale for c in (coef_softmax, coef_target, coef_smooth))
    coef_softmax, coef_target, coef_smooth = (
        c.masked_fill(ignored, 0.0) for c in (coef_softmax, coef_target, coef_smooth)
    )
    factor = (coef_softmax / row_sum)[:, None]
    if grad_entropy is not None:
        if logit_scale is not None:
            grad_entropy = grad_entropy * logit_scale
        coef_entropy = -(grad_entropy / row_sum).masked_fill(ignored, 0.0)
        factor = shifted.sub_(mean[:, None]).mul_(coef_entropy[:, None]).add_(factor)
    dlogits = exp_logits.mul_(factor)
    if smoothing:
        dlogits.sub_(coef_smooth[:, None]) if weight is None else dlogits.addr_(coef_smooth, weight, alpha=-1)
    index = rows.index[:, None]
    dlogits.scatter_(1, index, dlogits.gather(1, index) - coef_target[:, None])
    if tanh is not None:
        dlogits.mul_(tanh.square_().neg_().add_(1.0))
    return loss, stats, dlogits
