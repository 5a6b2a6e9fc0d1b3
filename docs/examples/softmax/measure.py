"""Measures one cell of softmax: calls every provider, then times all of them and the roof in turns.

The roof is PyTorch's elementwise kernel with the same memory traffic: `torch.mul(a, 1.0, out=c)` for forward,
`torch.add(a, b, out=c)` for backward, which is timed alone. Errors are norm-wise against fp64.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, first_calls, imported, time_columns
from quackish.ops.softmax.reference import softmax_bwd, softmax_fwd
from quackish.ops.softmax.tools import SOFTMAX
from quackish.testing import inputs
from quackish.testing.timing import take_turns

ROOFS = {"forward": "mul", "backward": "add"}
PROVIDERS: dict[str, Callable[[Tensor], Tensor]] = {OURS: SOFTMAX.function, "torch": lambda x: torch.softmax(x, -1)}


def load(name: str) -> Callable[[Tensor], Tensor]:
    """The provider `name`, or the user's "module:attribute"."""
    return imported(name) if ":" in name else PROVIDERS[name]


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the roof to `run`."""
    run.begin("inputs")
    x = SOFTMAX.arguments(cell.shape, getattr(torch, cell.dtype), run.device)["x"]
    dy = inputs.rows(cell.shape, x.dtype, seed=1, device=run.device)
    a, out = x.detach(), torch.empty_like(x)
    truth, column = softmax_fwd(a.double()), "err_y"
    if cell.direction == "backward":
        truth, column = softmax_bwd(dy.double(), truth), "err_dx"

    def call_of(provider: Callable[[Tensor], Tensor]) -> Callable[[], Tensor]:
        if cell.direction == "forward":
            return lambda: provider(a)
        y = provider(x)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    def errors_of(got: Tensor) -> dict[str, float]:
        return {column: float((got.double() - truth).norm() / truth.norm())}

    calls, records = first_calls(names, run, call_of, errors_of)
    if OURS in calls:  # a second time, to show the noise
        calls[AGAIN], records[AGAIN] = calls[OURS], {"status": "ok", "note": records[OURS]["note"]}
    roofs = {"mul": lambda: torch.mul(a, 1.0, out=out), "add": lambda: torch.add(a, dy, out=out)}
    roof = ROOFS[cell.direction]
    calls[roof] = roofs[roof]
    run.begin("timing")
    times = take_turns(calls, run.device, run.rounds, run.seconds, on_error=run.fail)
    for name in times:
        run.report(name, records.get(name, {"status": "ok"}) | time_columns(times[name], times.get(roof)))


BENCHES = (
    Bench(
        op=SOFTMAX,
        directions={"forward": "forward", "backward": "backward"},
        roofs=ROOFS,
        errors=("err_y", "err_dx"),
        unit="us",
        providers=tuple(PROVIDERS),
        load=load,
        measure=measure,
    ),
)
