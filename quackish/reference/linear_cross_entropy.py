"""Linear cross entropy in plain PyTorch: the spec on whole logits, and the maths of one chunk of them.

With z = input @ linear_weight.T + linear_bias, c = softcap * tanh(z / softcap), a = logit_scale * c,
lse = logsumexp(a), t the target, w the class weights (1 where none are given), e = label_smoothing and
q = w * ((1 - e) * onehot(t) + e / V):

    loss   = sum_j q_j * (lse - a_j) + z_loss * lse**2   for each live row, 0 for an ignored one
    da     = g * ((sum(q) + 2 * z_loss * lse) * p - q) + g_lse * p,   p = exp(a - lse)
    dz     = logit_scale * da * (1 - (c / softcap)**2)
    dinput = dz @ linear_weight,   dlinear_weight = dz.T @ input,   dlinear_bias = sum of dz over rows

With g_lp and g_h the gradients of log_prob = a_t - lse and of the entropy h = -sum_j p_j * log p_j:

    da += g_lp * (onehot(t) - p) - g_h * p * (log p + h)

`mean` divides the sum of the rows, z_loss included, by `mean_divisor`. z_loss regularises the logits, not a class, so
a row's class weight does not scale it.
"""

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What everything but the GEMMs' operands is computed in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class LinearCrossEntropyStats(NamedTuple):
    """Statistics of the rows, of target's shape, fp32 (fp64 for fp64). All but `predicted` are differentiable."""

    lse: Tensor  # logsumexp of the logits; 0 in an ignored row, as log_prob and entropy
    log_prob: Tensor  # of the target; NaN if the target is no class
    entropy: Tensor  # of softmax(logits), in nats
    predicted: Tensor  # int64: the first class with the largest logit; -1 in an ignored row, and with a NaN


@dataclasses.dataclass(frozen=True)
class Rows:
    """What the targets say about each row."""

    ignored: Tensor  # (m,) bool
    index: Tensor  # (m,) int64, always in [0, V): the class, any for rows that have none
    weight: Tensor  # (m,) class weight of the target; 0 for an ignored row, NaN for a target that is no class

    def __getitem__(self, rows: slice) -> "Rows":
        return Rows(self.ignored[rows], self.index[rows], self.weight[rows])


def rows_of(target: Tensor, v: int, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Rows:
    """Reads targets of (m,) without ever indexing out of bounds: NaN marks the rows whose target is no class."""
    target = target.long()  # before it is compared: in int32, an ignore_index of 2**32 would be class 0
    ignored = target == ignore_index
    index = target.clamp(0, v - 1)
    if weight is None:
        row_weight = torch.ones_like(target, dtype=dtype)
    else:
        row_weight = weight.to(dtype).index_select(0, index)
    return Rows(ignored, index, row_weight.masked_fill_(index != target, float("nan")).masked_fill_(ignored, 0.0))


def mean_divisor(rows: Rows, num_items: int | Tensor | None = None) -> Tensor:
    """What `mean` divides by: the sum of the rows' class weights, or `num_items`; 1 where no row has a class.

    A target that is no class counts for nothing: the other rows' gradients are as if that row were ignored.
    """
    uncounted = rows.weight.isnan() | rows.ignored
    if num_items is None:
        divisor = rows.weight.nansum()
    else:
        # a product, not a copy: num_items may be a 0-dim CPU tensor beside CUDA rows, and a copy would synchronise
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
    """(loss, lse) of input (m, h), linear_weight (v, h), target (m,), from whole logits, in fp32 (fp64 for fp64).

    With `return_stats` (loss, statistics).

    An ignored row has loss 0 and lse 0; a row whose target is no class has loss NaN. Its gradients are autograd's.
    """
    dtype, v = accumulate_dtype(input.dtype), linear_weight.shape[0]
    rows = rows_of(target, v, weight, ignore_index, dtype)
    logits = input.to(dtype).masked_fill(rows.ignored[:, None], 0.0) @ linear_weight.to(dtype).T
    if linear_bias is not None:
        logits = logits + linear_bias.to(dtype)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    predicted = logits.argmax(-1) if return_stats else None
    if logit_scale is not None:  # rounds: may make logits equal
        logits = logits * logit_scale
    hit = rows.index[:, None] == torch.arange(v, device=logits.device)  # F.one_hot cannot be batched by vmap
    q = (1.0 - label_smoothing) * hit.to(dtype) + label_smoothing / v
    if weight is not None:
        q = q * weight.to(dtype)
    q = q.masked_fill(rows.weight.isnan()[:, None], float("nan"))
    logp, lse = torch.log_softmax(logits, -1), torch.logsumexp(logits, -1)
    # a logit of -inf (a masked class) has logp -inf and must not meet its q of 0
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


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """The options that change the loss of a row."""

    label_smoothing: float
    softcap: float | None
    z_loss: float
    logit_scale: Tensor | None = None  # 0-dim, in logits' dtype


def chunk_of_rows(
    logits: Tensor,  # (m, v) fp32 or fp64: input @ linear_weight.T + linear_bias; overwritten
    rows: Rows,
    weight: Tensor | None,  # (v,) in logits' dtype
    options: RowOptions,
    want_grad: bool,
    grad_rows: Tensor | None = None,  # (m,) gradient of each row's loss; None is 1
    grad_lse: Tensor | None = None,  # (m,); None is 0, as for the next two
    grad_log_prob: Tensor | None = None,
    grad_entropy: Tensor | None = None,
    return_stats: bool = False,
) -> tuple[Tensor, list[Tensor], Tensor | None]:
    """loss (m,), [lse (m,)] and, where wanted, dlogits (m, v) of one chunk, in logits' own memory if they can be.

    With `return_stats` the list has all statistics.

    Every sum runs along a row, so nothing here depends on which rows share a chunk. Ignored rows must come with finite
    logits: the chunk loop zeroes their rows of the input.
    """
    v, smoothing, softcap, logit_scale = logits.shape[1], options.label_smoothing, options.softcap, options.logit_scale
    if softcap is None:
        tanh, shifted = None, logits
    else:
        tanh = logits.div_(softcap).tanh_()
        shifted = tanh * softcap
    predicted = shifted.argmax(1) if return_stats else None
    if logit_scale is not None:  # rounds: may make logits equal
        shifted.mul_(logit_scale)

    # loss: from a - max and its exponentials, never from a - lse, whose rounding grows with |lse|
    top = shifted.amax(1, keepdim=True)
    shifted.sub_(top)
    at_target = shifted.gather(1, rows.index[:, None]).squeeze(1)
    if smoothing:
        total_weight = float(v) if weight is None else weight.sum()
        if weight is None:
            weighted = shifted.sum(1)
        else:  # a masked class that does not count adds nothing
            weighted = torch.where((weight == 0) & (shifted == -torch.inf), 0.0, shifted) @ weight
    wants_entropy = return_stats or grad_entropy is not None
    e = shifted.exp() if wants_entropy else shifted.exp_()
    total = e.sum(1)
    log_total = total.log()
    if wants_entropy:
        shifted.clamp_(min=-1e4)  # a masked class: 0 * -1e4, not 0 * -inf
        mean = (e * shifted).sum(1) / total
    lse = top.squeeze(1) + log_total
    hit = (1.0 - smoothing) * rows.weight
    loss = hit * (log_total - at_target)
    # a masked target whose class does not count: 0, not 0 * inf
    loss = loss.masked_fill((hit == 0) & (at_target == -torch.inf) & ~log_total.isnan(), 0.0)
    if smoothing:
        loss = loss + (smoothing / v) * (total_weight * log_total - weighted)
    if options.z_loss:
        loss = loss + options.z_loss * lse.square()
    ignored = rows.ignored
    loss = loss.masked_fill(ignored, 0.0)
    stats = [lse.masked_fill(ignored, 0.0)]
    if return_stats:
        log_prob = (at_target - log_total).masked_fill(rows.weight.isnan(), float("nan"))
        stats += [t.masked_fill(ignored, 0.0) for t in (log_prob, (log_total - mean).clamp(min=0.0))]
        stats.append(predicted.masked_fill(lse.isnan() | ignored, -1))
    if not want_grad:
        return loss, stats, None

    # dlogits = scale * e - q, the target's p - 1 formed here, in fp32
    scale = hit + 2.0 * options.z_loss * lse
    spread = torch.full_like(hit, smoothing / v)
    if smoothing:
        scale = scale + spread * total_weight
    if grad_rows is not None:
        scale, hit, spread = scale * grad_rows, hit * grad_rows, spread * grad_rows
    if grad_lse is not None:
        scale = scale + grad_lse
    if grad_log_prob is not None:
        scale, hit = scale - grad_log_prob, hit - grad_log_prob
    if logit_scale is not None:
        scale, hit, spread = scale * logit_scale, hit * logit_scale, spread * logit_scale
    scale, hit, spread = (c.masked_fill(ignored, 0.0) for c in (scale, hit, spread))
    coef = (scale / total)[:, None]
    if grad_entropy is not None:
        if logit_scale is not None:
            grad_entropy = grad_entropy * logit_scale
        coef = shifted.sub_(mean[:, None]).mul_(-(grad_entropy / total).masked_fill(ignored, 0.0)[:, None]).add_(coef)
    dlogits = e.mul_(coef)
    if smoothing:
        dlogits.sub_(spread[:, None]) if weight is None else dlogits.addr_(spread, weight, alpha=-1)
    index = rows.index[:, None]
    dlogits.scatter_(1, index, dlogits.gather(1, index) - hit[:, None])
    if tanh is not None:
        dlogits.mul_(tanh.square_().neg_().add_(1.0))
    return loss, stats, dlogits
