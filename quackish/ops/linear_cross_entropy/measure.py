"""Measures one cell of linear cross entropy: calls every provider twice, then times all and the bare GEMMs in turns.

A sample is one plain call: forward without grad, or forward and `backward()`. The roof is cuBLAS on the same data: the
logits GEMM for forward, three GEMMs for forward and backward. Direction "steady" times bursts of forward and backward
without pauses, "host" the host time of one.

The truth is the reference in fp64 on the rounded inputs. Gradients are compared for some rows of dX and some classes of
dW, both evenly spread.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quackish import linear_cross_entropy
from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, chunks, first_calls, measure_host, time_columns, truth_of, warm_up_cublas
from quackish.ops.linear_cross_entropy import providers
from quackish.ops.linear_cross_entropy.providers import Loss
from quackish.ops.linear_cross_entropy.tools import IGNORED, LINEAR_CROSS_ENTROPY
from quackish.testing.timing import Times, bursts, take_turns

NONE_IGNORED = f"{OURS} (none ignored)"  # the roof of a cell with ignored rows
GEMMS, THREE_GEMMS = ("gemm-logits", "gemm-dx", "gemm-dw"), "three-gemms"
BASELINES = {THREE_GEMMS: "3 GEMMs", "gemm-logits": "logits", "gemm-dx": "dX", "gemm-dw": "dW"}
BASELINES |= {NONE_IGNORED: "none ignored"}
ROOFS = {"forward": GEMMS[0], "forward+backward": THREE_GEMMS, "steady": THREE_GEMMS}
BURST_S = 0.3
CHUNK_ELEMENTS = 1 << 27
ROWS, CLASSES = 512, 4096  # compared rows of dX and dW
SPREAD = 1.5  # standard deviation of the logits
CONFIDENCE = (0.9, 0.99, 0.999)  # probabilities of the targets with data "confident", cycling over rows


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor  # (m, h), a leaf that requires grad
    w: Tensor  # (v, h), likewise
    target: Tensor  # (m,) int64
    all_targets: Tensor  # the targets if no row were ignored

    @classmethod
    def make(
        cls, m: int, h: int, v: int, kind: str, ignored: float, device: torch.device, dtype: torch.dtype
    ) -> "Data":
        """Logits have standard deviation SPREAD. `ignored` is the share of rows, chosen at random, with target -100."""
        args = LINEAR_CROSS_ENTROPY.arguments((m, h, v), dtype, device, {"no_grad": True})
        x, w = args["input"], args["linear_weight"].mul_(SPREAD)
        generator = torch.Generator(device).manual_seed(2)
        all_targets = torch.randint(v, (m,), generator=generator, device=device)
        if kind == "confident":
            _make_confident(x, w, all_targets)
        target = all_targets.clone()
        target[torch.randperm(m, generator=generator, device=device)[: round(ignored * m)]] = IGNORED
        return cls(x.requires_grad_(), w.requires_grad_(), target, all_targets)

    def clear_grads(self) -> None:
        self.x.grad = self.w.grad = None


def _make_confident(x: Tensor, w: Tensor, target: Tensor) -> None:
    """Moves each row of x along its target's weights until the target's probability is about CONFIDENCE."""
    v = w.shape[0]
    for chunk in chunks(*x.shape, CHUNK_ELEMENTS):
        rows, direction = x[chunk].float(), w[target[chunk]].float()
        row_numbers = torch.arange(chunk.start, chunk.start + len(rows), device=x.device)
        p = torch.tensor(CONFIDENCE, device=x.device)[row_numbers % len(CONFIDENCE)]
        # log of the sum over the other classes, for normal logits, plus the log odds
        wanted = math.log(v) + SPREAD**2 / 2 + torch.logit(p)
        missing = wanted - (rows * direction).sum(1)
        x[chunk] = (rows + (missing / direction.square().sum(1))[:, None] * direction).to(x.dtype)


def dlogits_of(data: Data) -> Tensor:
    """(m, v) in x's dtype: (softmax - onehot) / live rows, an operand of both backward GEMMs."""
    x, w, target = data.x.detach(), data.w.detach(), data.target
    live = target != IGNORED
    out = x.new_empty(x.shape[0], w.shape[0])
    for chunk in chunks(*out.shape, CHUNK_ELEMENTS):
        p = torch.softmax((x[chunk] @ w.T).float(), 1)
        p.scatter_add_(1, target[chunk, None].clamp(min=0), p.new_full((len(p), 1), -1.0))
        out[chunk] = p.mul_((live[chunk] / live.sum())[:, None])
    return out


class Truth:
    """The loss and its gradients in fp64: dX of `rows` rows, dW of `classes` classes."""

    def __init__(self, data: Data, grad: bool = True, rows: int = ROWS, classes: int = CLASSES):
        x, w = (t.detach().double().requires_grad_(grad) for t in (data.x, data.w))
        loss = linear_cross_entropy(x, w, data.target, schedule="chunked", backend="reference")
        self.loss, self.dx, self.dw = loss.detach(), None, None
        if grad:
            loss.backward()
            self.rows, self.classes = _spread(len(x), rows, x.device), _spread(len(w), classes, w.device)
            self.dx, self.dw = x.grad[self.rows], w.grad[self.classes]

    def errors(self, loss: Tensor, dx: Tensor | None, dw: Tensor | None) -> dict[str, float]:
        """The relative error of the loss, and |got - truth| / |truth| of the gradients."""
        errors = {"err_loss": float((loss.detach().double() - self.loss).abs() / self.loss.abs())}
        if self.dx is not None:
            errors["err_dx"] = float((dx[self.rows].double() - self.dx).norm() / self.dx.norm())
            errors["err_dweight"] = float((dw[self.classes].double() - self.dw).norm() / self.dw.norm())
        return errors


def _spread(n: int, count: int, device: torch.device) -> Tensor:
    """At most `count` evenly spread indices below `n`."""
    return torch.arange(min(n, count), device=device) * n // min(n, count)


# Measuring ------------------------------------------------------------------------------------------------------------


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the GEMMs to `run`."""
    run.begin("inputs")
    torch.backends.cuda.matmul.allow_tf32 = cell.dtype == "tf32"
    dtype = getattr(torch, cell.dtype.replace("tf32", "float32"))
    data = Data.make(*cell.shape, cell.data, cell.ignored, run.device, dtype)
    warm_up_cublas(run.device)
    grad = cell.direction != "forward"
    truth = truth_of(run, lambda: Truth(data, grad)) if cell.direction != "host" else None

    def errors_of(value: Tensor) -> Mapping[str, float]:
        return truth.errors(value, data.x.grad, data.w.grad) if truth else {}

    works, records = first_calls(names, run, lambda loss: _step(loss, data, grad), errors_of, data.clear_grads)
    if cell.direction == "host":
        measure_host(works, records, run)
        return
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
        if cell.ignored:
            works[NONE_IGNORED] = _step(run.load(OURS), data, grad, data.all_targets)
    roof = NONE_IGNORED if cell.ignored else ROOFS[cell.direction]
    if not cell.ignored:
        run.begin("roof")
        try:
            works |= _gemms(data, cell.direction)
        except torch.cuda.OutOfMemoryError as error:
            run.fail(roof, error)

    def report(name: str, times: Mapping[str, Times]) -> None:
        run.report(name, records.get(name, {"status": "ok"}) | time_columns(times[name], times.get(roof)))

    run.begin("timing")
    if cell.direction == "steady":
        seconds = BURST_S if run.device.type == "cuda" else 0.0
        times = bursts(works, run.device, seconds=seconds, on_error=run.fail)
    else:
        times = take_turns(works, run.device, run.rounds, run.seconds, on_error=run.fail, after=report)
    for name in times:
        report(name, times)
    works.clear()
    data.clear_grads()
    run.release()
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # the next cell has other sizes


def _step(loss: Loss, data: Data, grad: bool, target: Tensor | None = None) -> Callable[[], Tensor]:
    """The measured call. Gradients accumulate in `data`."""
    target = data.target if target is None else target

    def train() -> Tensor:
        data.clear_grads()
        value = loss(data.x, data.w, target)
        value.backward()
        return value.detach()

    def loss_only() -> Tensor:
        with torch.no_grad():
            return loss(data.x.detach(), data.w.detach(), target)

    return train if grad else loss_only


def _gemms(data: Data, direction: str) -> dict[str, Callable[[], object]]:
    """The GEMMs by torch.mm on the same data: each alone (except for "steady"), and the three in a row."""
    x, w = data.x.detach(), data.w.detach()
    if direction == "forward":
        logits = x.new_empty(x.shape[0], w.shape[0])
        return {GEMMS[0]: lambda: torch.mm(x, w.T, out=logits)}
    dlogits = dlogits_of(data)
    logits, dx, dw = (torch.empty_like(t) for t in (dlogits, x, w))
    gemms = {
        GEMMS[0]: lambda: torch.mm(x, w.T, out=logits),
        GEMMS[1]: lambda: torch.mm(dlogits, w, out=dx),
        GEMMS[2]: lambda: torch.mm(dlogits.T, x, out=dw),
    }
    calls = tuple(gemms.values())
    return {THREE_GEMMS: lambda: [gemm() for gemm in calls], **(gemms if direction != "steady" else {})}


BENCHES = (
    Bench(
        LINEAR_CROSS_ENTROPY,
        roofs=ROOFS,
        errors=("err_loss", "err_dx", "err_dweight"),
        baselines={
            THREE_GEMMS: "3 GEMMs",
            **dict(zip(GEMMS, ("logits", "dX", "dW"), strict=True)),
            NONE_IGNORED: "none ignored",
        },
        providers=providers.PROVIDERS,
        load=providers.load,
        measure=measure,
        main={"forward": providers.LOSS, "forward+backward": providers.MAIN},
        more_outputs=providers.MORE_OUTPUTS,
        variants=r"quackish-(chunked|recompute)-[1-9]\d*",
        section_per_cell=True,
    ),
)
