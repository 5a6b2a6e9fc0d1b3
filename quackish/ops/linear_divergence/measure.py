"""Measures one cell of linear_divergence: calls every provider twice, then times all and the bare products in turns.

A sample is one plain call: forward without grad, or forward and `backward()`. The roof is cuBLAS on tensors of the same
sizes: both models' logits for forward, and also dx and dw for forward and backward. The truth is fp64.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quackish import linear_divergence
from quackish.bench.cells import AGAIN, OURS, Cell, options_of
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, first_calls, measure_host, time_columns, truth_of, warm_up_cublas
from quackish.ops.linear_divergence import providers
from quackish.ops.linear_divergence.providers import Loss
from quackish.ops.linear_divergence.tools import LINEAR_DIVERGENCE
from quackish.testing.timing import Times, take_turns

ROOFS = {"forward": "two-gemms", "forward+backward": "four-gemms"}
ROWS, CLASSES = 512, 4096  # compared rows of dx and dw


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the matrix products to `run`."""
    run.begin("inputs")
    dtype = getattr(torch, cell.dtype)
    args = LINEAR_DIVERGENCE.arguments(cell.shape, dtype, run.device, {"no_grad": True})
    tensors = list(args.values())
    x, w = (t.requires_grad_() for t in tensors[:2])
    beta = float(options_of(cell.data).get("beta", 0.0))
    warm_up_cublas(run.device)
    grad = cell.direction != "forward"

    def clear() -> None:
        x.grad = w.grad = None

    def step(loss: Loss) -> Callable[[], Tensor]:
        def train() -> Tensor:
            clear()
            value = loss(*tensors, beta)
            value.backward()
            return value.detach()

        def loss_only() -> Tensor:
            with torch.no_grad():
                return loss(*tensors, beta)

        return train if grad else loss_only

    truth = None if cell.direction == "host" else truth_of(run, lambda: _truth(tensors, beta, grad))

    def errors_of(value: Tensor) -> Mapping[str, float]:
        return {} if truth is None else _errors(value, x.grad, w.grad, truth)

    works, records = first_calls(names, run, step, errors_of, clear)
    if cell.direction == "host":
        measure_host(works, records, run)
        return
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
    roof = ROOFS[cell.direction]
    run.begin("roof")
    try:
        works[roof] = _products([t.detach() for t in tensors], grad)
    except torch.cuda.OutOfMemoryError as error:
        run.fail(roof, error)

    def report(name: str, times: Mapping[str, Times]) -> None:
        run.report(name, records.get(name, {"status": "ok"}) | time_columns(times[name], times.get(roof)))

    run.begin("timing")
    times = take_turns(works, run.device, run.rounds, run.seconds, on_error=run.fail, after=report)
    for name in times:
        report(name, times)
    works.clear()
    clear()
    run.release()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # the next cell has other sizes


def _products(tensors: list[Tensor], grad: bool) -> Callable[[], object]:
    """The matrix products of one call by torch.mm, in x's dtype."""
    x, w, teacher_x, teacher_w = tensors
    logits = x.new_empty(len(x), len(w))
    dlogits, dx, dw = torch.empty_like(logits).normal_(), torch.empty_like(x), torch.empty_like(w)

    def run() -> None:
        torch.mm(teacher_x, teacher_w.T, out=logits)
        torch.mm(x, w.T, out=logits)
        if grad:
            torch.mm(dlogits, w, out=dx)
            torch.mm(dlogits.T, x, out=dw)

    return run


def _truth(tensors: list[Tensor], beta: float, grad: bool) -> list[Tensor]:
    """The loss and its gradients in fp64."""
    wide = [t.detach().double().requires_grad_(grad and i < 2) for i, t in enumerate(tensors)]
    loss = linear_divergence(*wide, beta=beta, backend="reference", memory_limit=16 << 30)
    return [loss.detach(), *(torch.autograd.grad(loss, wide[:2]) if grad else ())]


def _errors(loss: Tensor, dx: Tensor | None, dw: Tensor | None, truth: list[Tensor]) -> dict[str, float]:
    """The relative error of the loss, and norm-wise errors of evenly spread rows of the gradients."""
    errors = {"err_loss": float((loss.double() - truth[0]).abs() / truth[0].abs())}
    for name, got, want, count in zip(("err_dx", "err_dweight"), (dx, dw), truth[1:], (ROWS, CLASSES), strict=False):
        if got is not None:
            rows = slice(None, None, max(1, len(want) // count))
            errors[name] = float((got[rows].double() - want[rows]).norm() / want[rows].norm())
    return errors


BENCHES = (
    Bench(
        LINEAR_DIVERGENCE,
        roofs=ROOFS,
        errors=("err_loss", "err_dx", "err_dweight"),
        baselines={"two-gemms": "2 GEMMs", "four-gemms": "4 GEMMs"},
        providers=tuple(providers.PROVIDERS),
        load=providers.load,
        measure=measure,
        section_per_cell=True,
    ),
)
