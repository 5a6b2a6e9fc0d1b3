"""Measures one cell of grouped_mlp, moe_mlp or mlp: calls every provider twice, then times all and the roof in turns.

The roof is the bare matmuls, two for forward and six for forward and backward, by the fastest of torch.bmm (for groups
of equal size), F.grouped_mm and QuACK; for mlp by torch.mm, with gate and up in one matrix or in two, which makes three
and nine. The note of its row says which. Direction "host" measures the host time instead. Errors are norm-wise against
the reference in fp64; err_dweight is the error of w1.
"""

import importlib.util
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quackish.bench.cells import AGAIN, OURS, Cell
from quackish.bench.definition import Bench
from quackish.bench.measure import Run, first_calls, measure_host, reason, time_columns, truth_of, warm_up_cublas
from quackish.ops.mlp import providers
from quackish.ops.mlp.providers import grouped_mm, loader, ours, ours_dense, ours_moe
from quackish.ops.mlp.tools import GROUPED_MLP, MLP, MOE_MLP
from quackish.ops.shared.for_tools import Args, in_fp64, operations
from quackish.testing import inputs
from quackish.testing.timing import synchronize, take_turns

ROOFS = {"forward": "two-gemms", "forward+backward": "six-gemms"}
ERRORS = ("err_y", "err_dx", "err_dweight", "err_dw2", "err_dscales")
# (the arguments of a provider, those with gradients)
_ARGUMENTS = {
    "grouped_mlp": (("x", "w1", "w2", "scales", "offs"), ("x", "w1", "w2", "scales")),
    "moe_mlp": (("x", "top_k_index", "top_k_weights", "w1", "w2"), ("x", "w1", "w2", "top_k_weights")),
    "mlp": (("x", "w1", "w2", "w3"), ("x", "w1", "w2", "w3")),
}
_REFERENCES = {"grouped_mlp": ours, "moe_mlp": ours_moe, "mlp": ours_dense}
DATA = ("normal", "zipf", "half-empty")  # groups of equal size, in proportion to 1 / rank, and none for every other one


class Data(NamedTuple):
    """The arguments of one step, and the rows and groups of its bare matmuls."""

    args: Args  # a provider's arguments
    leaves: tuple[str, ...]  # the arguments with gradients, in the order of ERRORS
    dy: Tensor | None  # None: without grad
    x: Tensor  # (R, H)
    offs: Tensor | None  # (E,); None for mlp
    equal: bool  # all groups have the same size

    @classmethod
    def make(cls, cell: Cell, device: torch.device) -> "Data":
        op, grad = operations()[cell.op], cell.direction != "forward"
        options = {"no_grad": not grad} | {"grouped_mlp": {"scales": True}, "mlp": {"w3": True}}.get(cell.op, {})
        args = op.arguments(cell.shape, getattr(torch, cell.dtype), device, options)
        x, num_groups, offs = args["x"].detach(), len(args["w2"]), None
        if cell.op == "mlp":
            rows = x
        elif cell.op == "moe_mlp":
            choice = inputs.rows((len(x), num_groups), seed=7, device=device).topk(cell.shape[-1])
            args["top_k_index"] = choice.indices
            args["top_k_weights"] = choice.values.softmax(1).to(x.dtype).requires_grad_(grad)
            sizes = choice.indices.flatten().bincount(minlength=num_groups)
            rows = x.repeat_interleave(cell.shape[-1], 0)
        else:
            sizes, rows = torch.tensor(group_sizes(cell.data, len(x), num_groups), device=device), x
        if cell.op != "mlp":
            offs = args["offs"] = sizes.cumsum(0, dtype=torch.int32)
        names, leaves = _ARGUMENTS[cell.op]
        dy = inputs.rows(tuple(x.shape), x.dtype, seed=8, device=device) if grad else None
        equal = cell.op == "grouped_mlp" and cell.data == "normal"
        return cls({name: args[name] for name in names}, leaves, dy, rows, offs, equal)

    def in_fp64(self) -> "Data":
        return self._replace(args=in_fp64(self.args, self.x.device), dy=None if self.dy is None else self.dy.double())


def group_sizes(data: str, rows: int, groups: int) -> list[int]:
    """The rows of each group: see DATA. Ranks are in random order."""
    shares = [1.0] * groups
    if data == "zipf":
        shares = [1 / (1 + rank) for rank in range(groups)]
        random.Random(0).shuffle(shares)
    elif data == "half-empty":
        shares = [float(group % 2) for group in range(groups)]
    ends = [round(rows * sum(shares[: i + 1]) / sum(shares)) for i in range(groups)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def measure(cell: Cell, names: Sequence[str], run: Run) -> None:
    """Reports each of `names`, quackish a second time, and the roof to `run`."""
    run.begin("inputs")
    data = Data.make(cell, run.device)
    warm_up_cublas(run.device)
    truth = None
    if cell.direction != "host":
        reference = _REFERENCES[cell.op](backend="reference")
        truth = truth_of(run, lambda: step(reference, data.in_fp64())())

    def errors_of(results: tuple[Tensor, ...]) -> dict[str, float]:
        triples = zip(ERRORS, results, truth or (), strict=False)
        return {name: float((got.double() - want).norm() / want.norm()) for name, got, want in triples}

    works, records = first_calls(names, run, lambda mlp: step(mlp, data), errors_of)
    truth = None  # frees it
    if cell.direction == "host":
        measure_host(works, records, run)
        return
    if OURS in works:  # a second time, to show the noise
        works[AGAIN], records[AGAIN] = works[OURS], {"status": "ok", "note": records[OURS]["note"]}
    run.begin("roof")
    bare, failures = gemms(data) if data.offs is not None else dense_gemms(data), []

    def on_error(name: str, error: Exception) -> None:
        if name in bare:
            failures.append(f"{name}: {reason(error)}")
            synchronize(run.device)
        else:
            run.fail(name, error)

    run.begin("timing")
    times = take_turns(works | bare, run.device, run.rounds, run.seconds, on_error=on_error)
    fastest = min(times.keys() & bare.keys(), key=lambda name: times[name].median, default=None)
    for name in times.keys() - bare.keys():
        run.report(name, records[name] | time_columns(times[name], times.get(fastest)))
    if fastest is not None:
        record = {"status": "ok", "note": ", ".join([fastest, *failures])}
        run.report(ROOFS[cell.direction], record | time_columns(times[fastest], times[fastest]))


def step(mlp: Callable[..., Tensor], data: Data) -> Callable[[], tuple[Tensor, ...]]:
    """The measured call, which returns y and the gradients in the order of `leaves`, or (y,) without grad."""
    leaves = [data.args[name] for name in data.leaves]

    def run() -> tuple[Tensor, ...]:
        y = mlp(*data.args.values())
        return y.detach(), *(() if data.dy is None else torch.autograd.grad(y, leaves, data.dy))

    return run


def gemms(data: Data) -> dict[str, Callable[[], Any]]:
    """The bare matmuls by each library that has them here."""
    w1, w2, offs, x = data.args["w1"].detach(), data.args["w2"].detach(), data.offs, data.x
    dy = None if data.dy is None else torch.empty_like(x).normal_()
    groups, common = len(w2), dict(dtype=x.dtype, device=x.device)
    z = inputs.rows((len(x), w1.shape[1]), seed=9, **common)
    act = z[:, : w2.shape[2]].contiguous()

    def calls(rows_times: Callable[..., Tensor], sums: Callable[..., Tensor]) -> Callable[[], list[Tensor]]:
        """rows_times(a, w): a @ w[g] for each row's group; sums(a, b): a[g].T @ b[g]."""

        def run() -> list[Tensor]:
            results = [rows_times(x, w1.mT), rows_times(act, w2.mT)]
            if dy is not None:
                results += [rows_times(dy, w2), rows_times(z, w1), sums(z, x), sums(dy, act)]
            return results

        return run

    def by_group(t: Tensor) -> Tensor:
        return t[: len(t) // groups * groups].unflatten(0, (groups, -1))

    made = {"F.grouped_mm": calls(lambda a, w: grouped_mm(a, w, offs=offs), lambda a, b: grouped_mm(a.T, b, offs=offs))}
    if data.equal:
        bmm = lambda a, w: torch.bmm(by_group(a), w), lambda a, b: torch.bmm(by_group(a).mT, by_group(b))
        made["torch.bmm"] = calls(*bmm)
    if x.is_cuda and importlib.util.find_spec("quack"):
        from quack.gemm_interface import gemm

        ends = F.pad(offs, (1, 0))
        made["QuACK"] = calls(
            lambda a, w: gemm(a, w, cu_seqlens_m=ends, tuned=False),
            lambda a, b: gemm(a.T, b, cu_seqlens_k=ends, tuned=False),
        )
    return made


def dense_gemms(data: Data) -> dict[str, Callable[[], Any]]:
    """The bare matmuls of mlp by torch.mm."""
    x, w1, w2, w3 = (t.detach() for t in data.args.values())
    (m, i), dy = (len(x), len(w1)), None if data.dy is None else torch.empty_like(x).normal_()
    z = inputs.rows((m, 2 * i), seed=9, dtype=x.dtype, device=x.device)
    act, both = z[:, :i].contiguous(), torch.cat([w1, w3])
    halves = z[:, :i].contiguous(), z[:, i:].contiguous()

    def run(parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
        """parts: a weight, and the gradient of its product."""
        results = [*(x @ w.T for w, _ in parts), act @ w2.T]
        if dy is not None:
            results += [dy @ w2, dy.T @ act, *(dz @ w for w, dz in parts), *(dz.T @ x for _, dz in parts)]
        return results

    one, two = [(both, z)], list(zip((w1, w3), halves, strict=True))
    return {"torch.mm": lambda: run(one), "torch.mm, gate and up apart": lambda: run(two)}


BENCHES = (
    Bench(GROUPED_MLP, ROOFS, ERRORS, tuple(providers.PROVIDERS), loader(providers.PROVIDERS), measure),
    Bench(MOE_MLP, ROOFS, ERRORS, tuple(providers.MOE_PROVIDERS), loader(providers.MOE_PROVIDERS), measure),
    Bench(MLP, ROOFS, ERRORS, tuple(providers.DENSE_PROVIDERS), loader(providers.DENSE_PROVIDERS), measure),
)
