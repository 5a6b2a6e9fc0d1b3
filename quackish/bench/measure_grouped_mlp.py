"""Measures one cell of grouped_mlp: calls every provider twice, then times all of them and the roof in turns.

All groups have the same size, and the scales require grad. The roof is the same matmuls by cuBLAS (torch.bmm): two for
forward, six for forward and backward. Errors are norm-wise against the reference in fp64; err_dweight is that of w1.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, MLP_GEMMS, OURS, Cell
from quackish.bench.measure import Run, first_calls, time_columns, warm_up_cublas
from quackish.bench.providers_grouped_mlp import Mlp, ours
from quackish.testing import inputs
from quackish.testing.timing import take_turns

ERRORS = ("err_y", "err_dx", "err_dweight")


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the roof to `run`."""
    run.begin("inputs")
    (r, h, i, e), common = cell.shape, dict(dtype=getattr(torch, cell.dtype), device=run.device)
    x, dy = (inputs.rows((r, h), seed=seed, **common) for seed in (0, 1))
    w1, w2 = (inputs.rows((e, n, k), seed=2, **common).mul_(k**-0.5) for n, k in ((2 * i, h), (h, i)))
    scales = inputs.rows((r,), seed=3, device=run.device).sigmoid()
    offs = (torch.arange(1, e + 1, device=run.device) * r // e).int()
    warm_up_cublas(run.device)
    gradient = None if cell.direction == "forward" else dy
    run.begin("truth")
    truth: tuple[Tensor, ...] = ()
    try:
        fp64 = (t.double() for t in (x, w1, w2, scales))
        truth = step(ours(backend="reference"), *fp64, offs, gradient)()[:3]
    except torch.cuda.OutOfMemoryError as failure:
        run.fail("truth", failure)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # frees the fp64 copies, several GB

    def errors_of(results: tuple[Tensor, ...]) -> dict[str, float]:
        triples = zip(ERRORS, results, truth, strict=False)
        return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in triples}

    works, records = first_calls(names, run, lambda mlp: step(mlp, x, w1, w2, scales, offs, gradient), errors_of)
    truth = ()
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
    roof = MLP_GEMMS[cell.direction]
    works[roof] = products(x, w1, w2, gradient)
    run.begin("timing")
    times = take_turns(works, run.device, run.rounds, run.seconds, on_error=run.fail)
    for name in times:
        run.report(name, records.get(name, {"status": "ok"}) | time_columns(times[name], times.get(roof)))


def step(
    mlp: Mlp, x: Tensor, w1: Tensor, w2: Tensor, scales: Tensor, offs: Tensor, dy: Tensor | None
) -> Callable[[], tuple[Tensor, ...]]:
    """The measured call, which returns (y, dx, dw1, dw2, dscales), or (y,) without grad."""
    leaves = [t.detach().requires_grad_(dy is not None) for t in (x, w1, w2, scales)]

    def run() -> tuple[Tensor, ...]:
        y = mlp(*leaves, offs)
        return y.detach(), *(() if dy is None else torch.autograd.grad(y, leaves, dy))

    return run


def products(x: Tensor, w1: Tensor, w2: Tensor, dy: Tensor | None) -> Callable[[], Any]:
    """The bare matmuls, for groups of R // E rows."""
    groups, rows = w1.shape[0], x.shape[0] // w1.shape[0]
    x, dy = (None if t is None else t[: groups * rows].view(groups, rows, -1) for t in (x, dy))
    z = torch.bmm(x, w1.mT)
    act = z[:, :, : w2.shape[2]].contiguous()
    pairs = [(x, w1.mT), (act, w2.mT)]
    if dy is not None:
        pairs += [(dy, w2), (z, w1), (z.mT, x), (dy.mT, act)]
    return lambda: [torch.bmm(a, b) for a, b in pairs]
