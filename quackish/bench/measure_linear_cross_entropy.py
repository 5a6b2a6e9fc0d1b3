"""One case of linear cross entropy: every provider tried alone, then all of them timed in turns beside bare GEMMs.

A sample is one plain call, of the loss alone without grad or of forward and `backward()`. The roof is cuBLAS on the
same data: the logits GEMM for the loss, the three of a step for both.
"""

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quackish import launch
from quackish.bench.cells import Cell
from quackish.bench.measured import AGAIN, OURS, Measured, Run, is_ours
from quackish.bench.memory import Account, warm_up_cublas
from quackish.bench.providers_linear_cross_entropy import Loss
from quackish.bench.truth_linear_cross_entropy import Data, Truth, dlogits_of, is_deterministic
from quackish.testing.timing import take_turns

THREE_GEMMS, GEMMS = "three-gemms", ("gemm-logits", "gemm-dx", "gemm-dw")
NONE_IGNORED = f"{OURS} (none ignored)"  # where rows are ignored it stands for the roof
ROOFS = {"forward": GEMMS[0], "forward+backward": THREE_GEMMS}

Works = dict[str, Callable[[], Tensor]]


def measure_cell(cell: Cell, names: Sequence[str], run: Run) -> None:
    run.at("inputs")
    data = Data.make(*cell.shape, "normal", 0.0, run.device, getattr(torch, cell.dtype))
    measure(cell.direction, data, names, run)


def measure(
    direction: str, data: Data, names: Sequence[str], run: Run, *, errors: bool = True, seconds: float = 0.4
) -> None:
    """Tells `run` of each of `names`, of ours a second time, and of the GEMMs; of failures at once, of all else last.

    `seconds` is how much one provider is given where it already has five samples.
    """
    grad, all_live = direction == "forward+backward", torch.equal(data.target, data.all_targets)
    works, results = try_out(data, grad, names, run, errors=errors)

    def fail(name: str, error: Exception) -> None:
        works.pop(name, None)
        run.fail(name, error)

    if OURS in works:  # twice: how far apart are two measurements of the same thing?
        works[AGAIN], results[AGAIN] = works[OURS], Measured(note=results[OURS].note)
        if not all_live:
            works[NONE_IGNORED] = _step(run.load(OURS), data, grad, data.all_targets)
    roof = ROOFS[direction] if all_live else NONE_IGNORED
    if all_live:
        run.at("roof")
        try:
            works |= _gemms(data, grad)
        except torch.cuda.OutOfMemoryError as error:
            fail(roof, error)

    run.at("timing")
    times = take_turns(works, run.device, run.rounds, seconds, on_error=fail)
    for name in works:
        found = dict(times=times[name], roof=times.get(roof))
        run.tell(name, dataclasses.replace(results.get(name, Measured()), **found))
    works.clear()
    _release(data, run)
    if run.device.type == "cuda":
        torch.cuda.empty_cache()  # the next case asks for other sizes


def try_out(
    data: Data, grad: bool, names: Sequence[str], run: Run, *, errors: bool = True
) -> tuple[Works, dict[str, Measured]]:
    """What is measured, and what is known of it but its time, for those that work; the others are told as failed."""
    warm_up_cublas(run.device)
    run.at("truth")
    truth = None
    try:
        truth = Truth(data) if errors else None
    except torch.cuda.OutOfMemoryError as error:
        run.fail("truth", error)
    works: Works = {}
    results: dict[str, Measured] = {}
    for name in names:
        run.at(name)
        account = Account(name, run.device)
        try:
            works[name] = _step(run.load(name), data, grad)
            results[name] = _try_out(name, works[name], data, truth, run, account)
        except Exception as error:  # a peer that is broken here must not stop the others
            works.pop(name, None)
            run.fail(name, error)
        _release(data, run)
        standing = account.close()
        if name in works:
            results[name] = dataclasses.replace(results[name], standing_bytes=standing)
    return works, results


def _step(loss: Loss, data: Data, grad: bool, target: Tensor | None = None) -> Callable[[], Tensor]:
    """The work that is measured; the gradients end in `data`."""
    target = data.target if target is None else target

    def train():
        data.clear_grads()
        value = loss(data.x, data.w, target)
        value.backward()
        return value.detach()

    def loss_only():
        with torch.no_grad():
            return loss(data.x.detach(), data.w.detach(), target)

    return train if grad else loss_only


def _try_out(
    name: str, work: Callable[[], Tensor], data: Data, truth: Truth | None, run: Run, account: Account
) -> Measured:
    """A first call, which compiles; of a second one errors and peak memory."""
    seconds, compiles = [], launch.counters.compiles
    for _ in range(2):
        data.clear_grads()
        account.start()
        launches, start = launch.counters.launches, time.perf_counter()
        value = work()
        run.synchronize()
        seconds.append(time.perf_counter() - start)
    launches = launch.counters.launches - launches
    peak = account.peak()
    errors = {} if truth is None else truth.errors(value, data.x.grad, data.w.grad)
    return Measured(
        note="portable path" if run.device.type == "cuda" and is_ours(name) and not launches else "",
        peak_bytes=peak,
        first_s=seconds[0],
        compiles=launch.counters.compiles - compiles,
        launches=launches,
        deterministic=_is_deterministic(work, data, run.repeats) if run.repeats else None,
        errors=errors,
    )


def _is_deterministic(work: Callable[[], Tensor], data: Data, runs: int) -> bool | None:
    """None where the copies to compare with have no room."""
    try:
        return is_deterministic(work, data, runs)
    except torch.cuda.OutOfMemoryError:
        return None


def _release(data: Data, run: Run) -> None:
    """What a failed call may still hold is let go; the allocator keeps its blocks for the next one."""
    data.clear_grads()
    gc.collect()
    run.synchronize()  # raises where the CUDA context is lost: nothing more is measured here


def _gemms(data: Data, grad: bool) -> Mapping[str, Callable[[], object]]:
    """The bare GEMMs on the same data, by torch.mm; each alone, and the three in a row."""
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
