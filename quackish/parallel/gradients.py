"""The gradients on one rank's shard. Where dx is ready before dw, its sum over ranks runs beside the GEMM of dw."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quackish.configs.linear_cross_entropy import even_chunks
from quackish.ops.linear_cross_entropy.autograd import backward_of, forward_of
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.schedules import Grads, GradsNeeded, Plan, ranges
from quackish.reference.linear_cross_entropy import accumulate_dtype

Begin = Callable[[Tensor], Callable[[], Tensor]]  # begin_sum of the ranks
Arriving = Sequence[Tensor | None]  # (m,) gradients of the shard's loss, lse, log_prob and entropy


def gradients(
    shard: Inputs, plan: Plan, needed: GradsNeeded, arriving: Arriving, kept: Sequence[Tensor | None], begin: Begin
) -> tuple[Grads, Callable[[], Tensor] | None]:
    """The gradients, and what returns dx summed over ranks. kept: state, live_x and exp_logits, of forward_of."""
    first, end = needed, None
    if kept[2] is not None and plan.why_portable is None and arriving[3] is None:
        first = GradsNeeded(needed.dx, None, False)
    grads = backward_of(shard, plan, first, arriving, kept) if first.any() else Grads()
    if grads.dx is not None:
        end = begin(grads.dx)
    if needed.but(first).any():
        grads = grads.and_also(backward_of(shard, plan, needed.but(first), arriving, kept))
    return grads, end


def gradients_by_chunks(
    shard: Inputs, plan: Plan, needed: GradsNeeded, arriving: Arriving, chunk_rows: int, begin: Begin, parts: int
) -> tuple[Grads, Callable[[], Tensor] | None]:
    """As `gradients`, with nothing kept: each chunk of rows runs `stored`. dw is summed over chunks in fp32 at least.

    parts: ranks among which dx is scattered, or 1. A chunk has as many rows of each of these parts.
    """
    m, dw_out, fp32 = shard.target.numel(), shard.grad_weight_out, accumulate_dtype(plan.compute_dtype)
    chunk_rows = even_chunks(max(m, 1), chunk_rows)
    if m > chunk_rows or dw_out is not None:
        needed = needed._replace(dw=needed.dw and fp32)
    dw = dw_out if dw_out is not None and dw_out.dtype == fp32 else None
    db, ends = None, []

    def run(rows: slice) -> Grads:
        # A function: what a chunk allocates is gone before the next one allocates.
        x, target, *grads = (
            None if t is None else t.reshape(parts, m // parts, *t.shape[1:])[:, rows].flatten(0, 1)
            for t in (shard.input, shard.target, *arriving)
        )
        chunk = shard._replace(input=x, target=target, grad_weight_out=dw)
        kept = forward_of(chunk, plan, needed)[5:8]
        grads, end = gradients(chunk, plan, needed, grads, kept, begin)
        ends.append(end)
        return grads

    for start, rows in ranges(max(m // parts, 1), max(chunk_rows // parts, 1)):
        grads = run(slice(start, start + rows))
        if dw is None:
            dw = grads.dw
        elif grads.dw is not None:  # the portable path has not added it
            dw.add_(grads.dw)
        db = grads.db if db is None else db.add_(grads.db)
    end = None if needed.dx is None else lambda: torch.cat([end() for end in ends])
    return Grads(None, None if dw is dw_out else dw, db), end
