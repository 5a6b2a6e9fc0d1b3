"""Measures one cell of rotary, forward or backward: calls every provider, then times all of them in turns.

A sample is one replay of a CUDA graph. The roof is a copy of q and k by PyTorch's elementwise kernel, two calls of
`torch.mul(a, 1.0, out=c)`. Direction "host" measures the host time of forward and backward instead. Errors are
norm-wise against the reference in fp64; err_y is of both results together.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, first_calls, measure_host, time_columns, truth_of
from quackish.ops.rotary import providers
from quackish.ops.rotary.providers import Rotary
from quackish.ops.rotary.tools import ROTARY
from quackish.ops.shared.for_tools import Args, in_fp64
from quackish.testing import inputs
from quackish.testing.timing import TimedCall, interleave, prepare

ROOF = "mul"
ERRORS = {"forward": ("err_y",), "backward": ("err_dq", "err_dk")}


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the roof to `run`."""
    run.begin("inputs")
    args = ROTARY.arguments(cell.shape, getattr(torch, cell.dtype), run.device)
    # with the strides of the results, as attention gives them
    grads = [torch.empty_like(t).copy_(inputs.rows(t.shape, seed=5, device=run.device)) for t in (args["q"], args["k"])]
    is_host = cell.direction == "host"
    truth = None if is_host else truth_of(run, lambda: _truth(cell.direction, args, grads, run.device))

    def errors_of(results: tuple[Tensor, ...] | None) -> dict[str, float]:
        if truth is None or results is None:
            return {}
        if cell.direction == "forward":
            results, wanted = ([torch.cat(list(map(torch.flatten, ts)))] for ts in (results, truth))
        else:
            wanted = list(truth)
        pairs = zip(ERRORS[cell.direction], results, wanted, strict=True)
        return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in pairs}

    calls, records = first_calls(names, run, lambda rotary: call_of(rotary, cell.direction, args, grads), errors_of)
    if is_host:
        measure_host(calls, records, run)
        return
    q, k = args["q"].detach(), args["k"].detach()
    copies = torch.empty_like(q), torch.empty_like(k)
    calls[ROOF] = lambda: (torch.mul(q, 1.0, out=copies[0]), torch.mul(k, 1.0, out=copies[1]))
    works: dict[str, TimedCall] = {}
    for name, call in calls.items():
        run.begin(name)
        try:
            works[name] = prepare(call, run.device)
        except Exception as error:
            run.fail(name, error)
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
    run.begin("timing")
    times = interleave({name: work.run for name, work in works.items()}, run.device, run.rounds)
    for name in works:
        run.report(name, records.get(name, {"status": "ok"}) | time_columns(times[name], times.get(ROOF)))


def call_of(rotary: Rotary, direction: str, args: Args, grads: list[Tensor]) -> Callable[[], tuple[Tensor, ...] | None]:
    """The measured call. Returns the results, None for a provider that writes into its arguments."""
    in_place = getattr(rotary, "in_place", False)
    if in_place:
        args = {name: t.detach().clone().requires_grad_(t.requires_grad) for name, t in args.items()}
        grads = [grad.clone() for grad in grads]
    leaves = args["q"], args["k"]
    plain = {name: t.detach() for name, t in args.items()}
    kept = rotary(**args) if direction == "backward" else ()

    def run() -> tuple[Tensor, ...]:
        if direction == "forward":
            return rotary(**plain)
        results = rotary(**args) if direction == "host" else kept
        return torch.autograd.grad(results, leaves, grads, retain_graph=True)

    def without_results() -> None:
        run()

    return without_results if in_place else run


def _truth(direction: str, args: Args, grads: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    wide = in_fp64(args, device)
    results = ROTARY.function(**wide, backend="reference")
    if direction == "forward":
        return tuple(t.detach() for t in results)
    return torch.autograd.grad(results, (wide["q"], wide["k"]), [grad.double() for grad in grads])


BENCHES = (
    Bench(
        ROTARY,
        directions={"forward": "forward", "backward": "backward"},
        roofs={"forward": ROOF, "backward": ROOF},
        errors=(*ERRORS["forward"], *ERRORS["backward"]),
        unit="us",
        providers=tuple(providers.PROVIDERS),
        load=providers.load,
        measure=measure,
    ),
)
