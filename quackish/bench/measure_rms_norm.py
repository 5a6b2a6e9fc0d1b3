"""One cell of RMSNorm, forward or backward: every provider tried alone, then all of them timed in turns.

A sample is one replay of a CUDA graph that holds the whole operation. The roof is PyTorch's elementwise kernel for the
same memory traffic: `torch.mul(a, 1.0, out=c)` for forward, `torch.add(a, b, out=c)` for backward.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.measured import Account, Measured, Run, first_call, warm_up_cublas
from quackish.bench.providers_rms_norm import Provider
from quackish.bench.truth import same_every_time
from quackish.bench.truth_rms_norm import Data, errors
from quackish.testing.timing import Work, interleave, prepare

ROOFS = {"forward": "mul", "backward": "add"}


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Tells `run` about each of `names`, ours a second time, and the roof: failures at once, results at the end."""
    run.at("inputs")
    data = Data.make(*cell.shape, getattr(torch, cell.dtype), run.device)
    works: dict[str, Work] = {}
    results: dict[str, Measured] = {}
    expected = {"forward": (data.x,), "backward": (data.x, data.weight)}[cell.direction]  # outputs are like these
    warm_up_cublas(run.device)
    for name in names:
        run.at(name)
        account = Account(name, run.memory)
        try:
            call = _call(run.load(name), cell.direction, data)
            works[name], results[name] = _try_out(name, call, expected, run, account)
        except Exception as error:  # a peer that is broken here must not stop the others
            works.pop(name, None)
            run.fail(name, error)
        if name not in works:
            account.close()

    run.at("errors")
    found_errors = errors(cell.direction, data, {name: work.outputs for name, work in works.items()})

    run.at("timing")
    runs = {name: work.run for name, work in works.items()}
    if OURS in works:  # twice: how far apart are two measurements of the same thing?
        runs[AGAIN], results[AGAIN] = works[OURS].run, Measured(note=results[OURS].note)
    roof = ROOFS[cell.direction]
    roofs = elementwise_roofs(data.x, data.dy, data.out)
    runs[roof], results[roof] = prepare(roofs[roof], run.device).run, Measured()
    times = interleave(runs, run.device, run.rounds)
    for name in runs:
        found = dict(times=times[name], roof=times[roof], errors=found_errors.get(name, {}))
        run.tell(name, dataclasses.replace(results[name], **found))


def elementwise_roofs(a: Tensor, b: Tensor, out: Tensor) -> dict[str, Callable[[], Tensor]]:
    """One read and one write, and two reads and one write, by kernels that run at the speed of memory at any size.

    Not `out.copy_(a)`: large tensors are copied by a copy engine, at 2736 GB/s where quackish's forward runs at 4100
    (65536 x 4096, bf16, H200).
    """
    return {"mul": lambda: torch.mul(a, 1.0, out=out), "add": lambda: torch.add(a, b, out=out)}


def _call(provider: Provider, direction: str, data: Data) -> Callable[[], tuple]:
    if direction == "forward":
        return lambda: provider.forward(data.x, data.weight)
    return lambda: provider.backward(data.dy, data.x, data.weight, data.rstd)


def _try_out(
    name: str, call: Callable[[], tuple], expected: Sequence[Tensor], run: Run, account: Account
) -> tuple[Work, Measured]:
    """A first call, which compiles; peak memory of a second one; then the graph, whose outputs stay allocated."""
    outputs, found = first_call(name, call, run)
    for got, like in zip(outputs, expected, strict=False):
        if got.shape != like.shape:
            raise ValueError(f"returned {tuple(got.shape)} where {tuple(like.shape)} was expected")
    del outputs, got
    account.start()
    call()
    run.synchronize()
    memory = dict(peak_bytes=account.peak(), standing_bytes=account.close())

    work = prepare(call, run.device)
    plain = run.device.type == "cuda" and not work.is_graph
    note = ", ".join(filter(None, ("plain launches" if plain else "", found.note)))
    same = same_every_time(lambda: _poisoned(work), run.repeats) if run.repeats else None
    run.synchronize()
    return work, dataclasses.replace(found, note=note, deterministic=same, **memory)


def _poisoned(work: Work) -> Sequence[Tensor]:
    """The outputs of a run; those of a graph held NaN before."""
    if not work.is_graph:
        return work.run()
    for t in work.outputs:
        t.fill_(float("nan"))
    work.run()
    return work.outputs
