"""One cell of grouped_mlp: every provider called twice, then all of them timed in turns beside bare matrix products.

Groups have the same size, and scales a gradient. The roof is cuBLAS, torch.bmm of all groups: the two products of
forward, or the six of forward and backward. Errors are norm-wise against the reference in fp64, of w1's gradient for
both weights.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, MLP_GEMMS, OURS, Cell
from quackish.bench.measure import Run, first_calls, timed, warm_up_cublas
from quackish.bench.providers_grouped_mlp import Mlp, ours
from quackish.testing import inputs
from quackish.testing.timing import take_turns

ERRORS = ("err_y", "err_dx", "err_dweight")


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Tells `run` about each of `names`, ours a second time, and the products."""
    run.at("inputs")
    (r, h, i, e), how = cell.shape, dict(dtype=getattr(torch, cell.dtype), device=run.device)
    x, dy = (inputs.rows((r, h), seed=seed, **how) for seed in (0, 1))
    w1, w2 = (inputs.rows((e, n, k), seed=2, **how).mul_(k**-0.5) for n, k in ((2 * i, h), (h, i)))
    scales = inputs.rows((r,), seed=3, device=run.device).sigmoid()
    offs = (torch.arange(1, e + 1, device=run.device) * r // e).int()
    warm_up_cublas(run.device)
    gradient = None if cell.direction == "forward" else dy
    run.at("truth")
    truth: tuple[Tensor, ...] = ()
    try:
        fp64 = (t.double() for t in (x, w1, w2, scales))
        truth = step(ours(backend="reference"), *fp64, offs, gradient)()[:3]
    except torch.cuda.OutOfMemoryError as failure:
        run.fail("truth", failure)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # of fp64 copies, several GB

    def errors_of(results: tuple[Tensor, ...]) -> dict[str, float]:
        triples = zip(ERRORS, results, truth, strict=False)
        return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in triples}

    works, results = first_calls(names, run, lambda mlp: step(mlp, x, w1, w2, scales, offs, gradient), errors_of)
    truth = ()
    if OURS in works:  # twice: how far apart are two measurements of the same thing?
        works[AGAIN], results[AGAIN] = works[OURS], {"status": "ok", "note": results[OURS]["note"]}
    roof = MLP_GEMMS[cell.direction]
    works[roof] = products(x, w1, w2, gradient)
    run.at("timing")
    times = take_turns(works, run.device, run.rounds, run.seconds, on_error=run.fail)
    for name in times:
        run.tell(name, results.get(name, {"status": "ok"}) | timed(times[name], times.get(roof)))


def step(
    mlp: Mlp, x: Tensor, w1: Tensor, w2: Tensor, scales: Tensor, offs: Tensor, dy: Tensor | None
) -> Callable[[], tuple[Tensor, ...]]:
    """The work that is measured: (y, dx, dw1, dw2, dscales), or (y,) without grad."""
    leaves = [t.detach().requires_grad_(dy is not None) for t in (x, w1, w2, scales)]

    def run() -> tuple[Tensor, ...]:
        y = mlp(*leaves, offs)
        return y.detach(), *(() if dy is None else torch.autograd.grad(y, leaves, dy))

    return run


def products(x: Tensor, w1: Tensor, w2: Tensor, dy: Tensor | None) -> Callable[[], Any]:
    """The bare matrix products, of groups of R // E rows."""
    groups, rows = w1.shape[0], x.shape[0] // w1.shape[0]
    x, dy = (None if t is None else t[: groups * rows].view(groups, rows, -1) for t in (x, dy))
    z = torch.bmm(x, w1.mT)
    act = z[:, :, : w2.shape[2]].contiguous()
    pairs = [(x, w1.mT), (act, w2.mT)]
    if dy is not None:
        pairs += [(dy, w2), (z, w1), (z.mT, x), (dy.mT, act)]
    return lambda: [torch.bmm(a, b) for a, b in pairs]
