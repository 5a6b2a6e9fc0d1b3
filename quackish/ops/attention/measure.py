"""Measures one cell of scaled_dot_product_attention: calls every provider twice, then times all in turns.

A cell's data are the options of its call, such as "attn_bias=1,H attn_mask=half". The roof is computed, not measured:
for each pass, the bytes of its inputs and outputs or the FLOPs of its matmuls (two in forward, five in backward) at the
GPU's speeds in quackish/gpu.py, whichever takes longer. Tiles of 64 x 64 in which no key takes part do not count.
Direction "host" measures the host time instead. Errors are norm-wise against the reference in fp64.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell, options_of
from quackish.bench.definition import Bench
from quackish.bench.measure import Record, Run, first_calls, measure_host, time_columns, truth_of, warm_up_cublas
from quackish.device.work import Work, estimate
from quackish.gpu import Roofs, gpu_of, roofs_of
from quackish.ops.attention import providers
from quackish.ops.attention.providers import Attention, ours
from quackish.ops.attention.tools import ATTENTION
from quackish.ops.shared.for_tools import Args, in_fp64
from quackish.testing import inputs
from quackish.testing.timing import Times, take_turns

MINIMUM = "minimum"  # the computed roof
ROOFS = {"forward": MINIMUM, "forward+backward": MINIMUM}
LEAVES = ("query", "key", "value", "attn_bias")
ERRORS = ("err_y", "err_dq", "err_dk", "err_dv", "err_dbias")
_NAMES = (*LEAVES, "attn_mask")
_TILE = 64


def make(cell: Cell, device: torch.device) -> tuple[Args, Tensor | None]:
    """The arguments of a provider, and the gradient of o (None: without grad)."""
    grad = cell.direction != "forward"
    options = options_of(cell.data) | ({} if grad else {"no_grad": True})
    made = ATTENTION.arguments(cell.shape, getattr(torch, cell.dtype), device, options)
    args = {name: made.get(name) for name in _NAMES} | {"is_causal": made.get("is_causal", False)}
    return args, inputs.rows(cell.shape, made["query"].dtype, seed=8, device=device) if grad else None


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the computed minimum to `run`."""
    run.begin("inputs")
    args, do = make(cell, run.device)
    warm_up_cublas(run.device)
    truth = None if cell.direction == "host" else truth_of(run, lambda: _truth(args, do, run.device))

    def errors_of(results: tuple[Tensor, ...]) -> dict[str, float]:
        return {name: _error(got, want) for name, got, want in zip(ERRORS, results, truth or (), strict=False)}

    works, records = first_calls(names, run, lambda attention: step(attention, args, do), errors_of)
    truth = None  # frees it
    if cell.direction == "host":
        measure_host(works, records, run)
        return
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
    us, note = None, ""
    if run.device.type == "cuda" and (roofs := roofs_of(gpu_of(run.device.index))):
        us, note = minimum(args, do is not None, roofs.fastest or roofs)
    roof = None if us is None else Times(us, us, us)
    run.begin("timing")
    times = take_turns(works, run.device, run.rounds, run.seconds, on_error=run.fail)
    for name, of in times.items():
        run.report(name, records[name] | time_columns(of, roof))
    if roof is not None:
        record: Record = {"status": "ok", "note": note}
        run.report(MINIMUM, record | time_columns(roof, roof))


def step(attention: Attention, args: Args, do: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """The measured call, which returns (o, dq, dk, dv, dbias) without those that do not exist."""
    leaves = [args[name] for name in LEAVES if args[name] is not None]

    def run() -> tuple[Tensor, ...]:
        o = attention(*args.values())
        return o.detach(), *(() if do is None else torch.autograd.grad(o, leaves, do))

    return run


def _truth(args: Args, do: Tensor | None, device: torch.device) -> tuple[Tensor, ...]:
    """In fp64, kept in fp32 to save memory: its rounding is far below that of 16 bits."""
    double = step(ours(backend="reference"), in_fp64(args, device), None if do is None else do.double())()
    return tuple(t.float() for t in double)


def _error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, summed in fp64 a few heads at a time."""
    sums = torch.zeros(2, dtype=torch.float64, device=want.device)
    for a, b in zip(got.flatten(0, 1).split(4), want.flatten(0, 1).split(4), strict=True):
        b = b.double()
        sums += torch.stack([(a.double() - b).square().sum(), b.square().sum()])
    return float((sums[0] / sums[1]).sqrt())


def minimum(args: Args, grad: bool, roofs: Roofs) -> tuple[float, str]:
    """(the computed minimum in microseconds, what bounds each pass)"""
    q, k, bias, mask = (args[name] for name in ("query", "key", "attn_bias", "attn_mask"))
    scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * share_of_tiles(mask, args["is_causal"], q, k)
    bytes_of_bias = 0 if bias is None else bias.nbytes
    bytes_read = q.nbytes + 2 * k.nbytes + bytes_of_bias + (0 if mask is None else mask.nbytes)
    matmul = round(2 * scores * q.shape[3])
    passes = {"forward": Work(bytes_read, q.nbytes, 2 * matmul)}
    if grad:  # also reads o and do; writes dq, dk, dv and dbias
        written = q.nbytes + 2 * k.nbytes + bytes_of_bias
        passes["backward"] = Work(bytes_read + 2 * q.nbytes, written, 5 * matmul)
    found = {name: estimate(work, roofs) for name, work in passes.items()}
    parts = ", ".join(f"{name} {one.us:.0f} us ({one.bound})" for name, one in found.items())
    return sum(one.us for one in found.values()), parts


def share_of_tiles(mask: Tensor | None, is_causal: bool, q: Tensor, k: Tensor) -> float:
    """The share of tiles of 64 x 64 scores in which a key takes part."""
    if mask is None and not is_causal:
        return 1.0
    tiles: Any = torch.ones(1, 1, -(-q.shape[2] // _TILE), -(-k.shape[2] // _TILE), device=q.device)
    if mask is not None:
        mask = mask.expand(-1, -1, q.shape[2], -1)
        tiles = F.max_pool2d(mask.half() if q.is_cuda else mask.float(), _TILE, ceil_mode=True)
    return float((tiles.tril() if is_causal else tiles).float().mean())


BENCHES = (
    Bench(
        ATTENTION,
        roofs=ROOFS,
        errors=ERRORS,
        providers=tuple(providers.PROVIDERS),
        load=providers.load,
        measure=measure,
        on_cpu=("torch-math",),
    ),
)
