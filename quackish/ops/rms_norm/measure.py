"""Measures one cell of RMSNorm, forward or backward: calls every provider alone, then times all of them in turns.

A sample is one replay of a CUDA graph of the whole operation. The roof is PyTorch's elementwise kernel with the same
memory traffic: `torch.mul(a, 1.0, out=c)` for forward, `torch.add(a, b, out=c)` for backward. Errors are norm-wise
against fp64 from the rounded inputs.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, chunks, first_calls, time_columns, warm_up_cublas
from quackish.ops.rms_norm import providers
from quackish.ops.rms_norm.providers import Provider
from quackish.ops.rms_norm.reference import rms_norm_bwd, rms_norm_fwd, rms_norm_rstd
from quackish.ops.rms_norm.tools import EPS, RMS_NORM
from quackish.testing import inputs
from quackish.testing.timing import TimedCall, interleave, prepare

ROOFS = {"forward": "mul", "backward": "add"}
CHUNK_ELEMENTS = 1 << 25


@dataclasses.dataclass(frozen=True)
class Data:
    x: Tensor  # (m, n)
    dy: Tensor  # (m, n)
    weight: Tensor  # (n,)
    rstd: Tensor  # (m,) fp32

    @classmethod
    def make(cls, m: int, n: int, dtype: torch.dtype, device: torch.device) -> "Data":
        args = RMS_NORM.arguments((m, n), dtype, device)
        x, weight = (args[name].detach() for name in ("x", "weight"))
        dy = inputs.rows((m, n), dtype, seed=1, device=device)
        rstd = [rms_norm_rstd(x[chunk], EPS, torch.float64).float() for chunk in chunks(m, n, CHUNK_ELEMENTS)]
        return cls(x, dy, weight, torch.cat(rstd))


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the roof to `run`."""
    run.begin("inputs")
    data = Data.make(*cell.shape, getattr(torch, cell.dtype), run.device)
    out = torch.empty_like(data.x)
    warm_up_cublas(run.device)

    def call_of(provider: Provider) -> Callable[[], tuple]:
        if cell.direction == "forward":
            return lambda: provider.forward(data.x, data.weight)
        return lambda: provider.backward(data.dy, data.x, data.weight, data.rstd)

    calls, records = first_calls(names, run, call_of, lambda outputs: errors(cell.direction, data, outputs))
    roof = ROOFS[cell.direction]
    # Not `out.copy_(x)`: a copy engine copies large tensors at 2736 GB/s, and quackish's forward reaches 4100
    # (65536 x 4096, bf16, H200).
    roofs = {"mul": lambda: torch.mul(data.x, 1.0, out=out), "add": lambda: torch.add(data.x, data.dy, out=out)}
    calls[roof] = roofs[roof]
    works: dict[str, TimedCall] = {}
    for name, call in calls.items():
        run.begin(name)
        try:
            works[name] = prepare(call, run.device)
        except Exception as error:
            run.fail(name, error)
    if OURS in works:  # a second time, to show the noise
        works[AGAIN] = works[OURS]
    run.begin("timing")
    times = interleave({name: work.run for name, work in works.items()}, run.device, run.rounds)
    for name, work in works.items():
        record = records.get(name) or {"status": "ok", "note": ""}
        plain = "plain launches" if run.device.type == "cuda" and not work.is_graph else ""
        note = ", ".join(filter(None, (plain, record["note"])))
        run.report(name, record | {"note": note} | time_columns(times[name], times.get(roof)))


def errors(direction: str, data: Data, outputs: Sequence[Tensor], elements: int = CHUNK_ELEMENTS) -> dict[str, float]:
    """‖got - truth‖ / ‖truth‖ of (y, ...) or (dx, dweight). ValueError if shapes are wrong."""
    for got, like in zip(outputs, (data.x, data.weight)[: 1 + (direction == "backward")], strict=False):
        if got.shape != like.shape:
            raise ValueError(f"returned {tuple(got.shape)}, expected {tuple(like.shape)}")
    weight, fp64 = data.weight.double(), torch.float64
    dweight, squared_error, squared_norm = torch.zeros_like(weight), 0.0, 0.0
    for chunk in chunks(*data.x.shape, elements):
        x = data.x[chunk]
        if direction == "forward":
            truth = rms_norm_fwd(x.double(), weight, None, None, EPS)[0]
        else:
            rstd = rms_norm_rstd(x, EPS, fp64)
            truth, _, part, _ = rms_norm_bwd(data.dy[chunk], x, data.weight, rstd, None, 0.0, fp64, None, fp64)
            dweight += part
        squared_error += (outputs[0][chunk].double() - truth).square().sum()
        squared_norm += truth.square().sum()
    error = math.sqrt(squared_error / squared_norm)
    if direction == "forward":
        return {"err_y": error}
    return {"err_dx": error, "err_dweight": float((outputs[1].double() - dweight).norm() / dweight.norm())}


BENCHES = (
    Bench(
        RMS_NORM,
        directions={"forward": "forward", "backward": "backward"},
        roofs=ROOFS,
        errors=("err_y", "err_dx", "err_dweight"),
        unit="us",
        providers=tuple(providers.PROVIDERS),
        load=providers.load,
        measure=measure,
    ),
)
