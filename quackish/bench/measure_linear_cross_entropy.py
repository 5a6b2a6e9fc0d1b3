"""One cell of linear cross entropy: every provider called once, then all of them timed in turns beside bare GEMMs.

A sample is one plain call, of the loss alone without grad or of forward and `backward()`. A provider's first sample
also gives its peak memory and its errors. The roof is cuBLAS on the same data: the logits GEMM for the loss, the three
of a step for forward and backward. Direction "host" is the host time of a forward and backward.
"""

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quackish.bench.cells import A_LAUNCH, AGAIN, NONE_IGNORED, OURS, Cell
from quackish.bench.host import host_times, launch_times
from quackish.bench.measured import Account, Measured, Run, first_call, warm_up_cublas
from quackish.bench.providers_linear_cross_entropy import Loss
from quackish.bench.truth import same_every_time
from quackish.bench.truth_linear_cross_entropy import Data, Truth, dlogits_of
from quackish.testing.timing import Times, take_turns

THREE_GEMMS, GEMMS = "three-gemms", ("gemm-logits", "gemm-dx", "gemm-dw")
ROOFS = {"forward": GEMMS[0], "forward+backward": THREE_GEMMS}

Works = dict[str, Callable[[], Tensor]]


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Tells `run` about each of `names`, ours a second time, and the GEMMs: failures at once, results at the end."""
    run.at("inputs")
    data = Data.make(*cell.shape, cell.data, cell.ignored, run.device, getattr(torch, cell.dtype))
    warm_up_cublas(run.device)
    if cell.direction == "host":
        _measure_host(data, names, run)
        return
    grad, all_live = cell.direction == "forward+backward", torch.equal(data.target, data.all_targets)
    run.at("truth")
    try:
        truth = Truth(data)
    except torch.cuda.OutOfMemoryError as error:
        truth = None
        run.fail("truth", error)
    works, results = _first_calls(data, grad, names, run)
    accounts = dict.fromkeys(works)  # of the second calls, which show more than their time

    def fail(name: str, error: Exception) -> None:
        works.pop(name, None)
        run.fail(name, error)

    if OURS in works:  # twice: how far apart are two measurements of the same thing?
        works[AGAIN] = works[OURS]
        if not all_live:
            works[NONE_IGNORED] = _step(run.load(OURS), data, grad, data.all_targets)
    roof = ROOFS[cell.direction] if all_live else NONE_IGNORED
    if all_live:
        run.at("roof")
        try:
            works |= _gemms(data, grad)
        except torch.cuda.OutOfMemoryError as error:
            fail(roof, error)

    def before(name: str) -> None:
        data.clear_grads()
        if name in accounts:
            accounts[name] = Account(name, run.memory)

    def after(name: str, value: Tensor, times: Mapping[str, Times]) -> None:
        if name in accounts:
            peak = accounts.pop(name).peak()
            errors = truth.errors(value, data.x.grad, data.w.grad) if truth else {}
            results[name] = dataclasses.replace(results[name], peak_bytes=peak, errors=errors)
        run.partial(name, timed(name, times))

    def timed(name: str, times: Mapping[str, Times]) -> Measured:
        note = results[OURS].note if name == AGAIN else ""
        found = results.get(name) or Measured(note=note)
        return dataclasses.replace(found, times=times[name], roof=times.get(roof))

    run.at("timing")
    times = take_turns(works, run.device, run.rounds, run.seconds, on_error=fail, before=before, after=after)
    for name in works:
        run.tell(name, timed(name, times))
    works.clear()
    _release(data, run)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # the next cell needs other sizes


def _measure_host(data: Data, names: Sequence[str], run: Run) -> None:
    works, results = _first_calls(data, True, names, run)
    run.at("timing")
    for name, times in host_times(works, run.device).items():
        run.tell(name, dataclasses.replace(results[name], times=times))
    if OURS in works and run.device.type == "cuda" and (times := launch_times(works[OURS], run.device)):
        run.tell(A_LAUNCH, Measured(times=times))


def _first_calls(data: Data, grad: bool, names: Sequence[str], run: Run) -> tuple[Works, dict[str, Measured]]:
    """The works to be timed, and what their first calls showed; failures are reported."""
    works: Works = {}
    results: dict[str, Measured] = {}
    for name in names:
        run.at(name)
        account = Account(name, run.memory)
        try:
            works[name] = _step(run.load(name), data, grad)
            results[name] = first_call(name, works[name], run)[1]
            if run.repeats:
                same = _same_bytes(works[name], data, run.repeats)
                results[name] = dataclasses.replace(results[name], deterministic=same)
        except Exception as error:  # a peer that is broken here must not stop the others
            works.pop(name, None)
            run.fail(name, error)
        _release(data, run)
        standing = account.close()
        if name in works:
            results[name] = dataclasses.replace(results[name], standing_bytes=standing)
            run.partial(name, results[name])
    return works, results


def _step(loss: Loss, data: Data, grad: bool, target: Tensor | None = None) -> Callable[[], Tensor]:
    """The work that is measured; the gradients end up in `data`."""
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


def _same_bytes(work: Callable[[], Tensor], data: Data, runs: int) -> bool | None:
    try:
        return same_every_time(lambda: (work(), data.x.grad, data.w.grad), runs)
    except torch.cuda.OutOfMemoryError:  # no room for the copies to compare with
        return None


def _release(data: Data, run: Run) -> None:
    """Frees what a failed call may still hold; the allocator keeps its blocks for the next one."""
    data.clear_grads()
    gc.collect()
    gc.freeze()  # else each collection goes over the objects of every library again: 0.2 s and more
    run.synchronize()  # raises if the CUDA context is lost: nothing more can be measured here


def _gemms(data: Data, grad: bool) -> Mapping[str, Callable[[], object]]:
    """The bare GEMMs on the same data, by torch.mm: each alone, and the three in a row."""
    x, w = data.x.detach(), data.w.detach()
    if not grad:
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
    return {THREE_GEMMS: lambda: [gemm() for gemm in calls], **gemms}
