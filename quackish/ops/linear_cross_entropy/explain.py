"""Dry runs of linear cross entropy for the tools, and what `explain` adds: what each memory limit selects."""

from typing import NamedTuple

import torch

from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import kernel_for
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy import memory
from quackish.ops.linear_cross_entropy.api import make_plan
from quackish.ops.linear_cross_entropy.calls import LossPlan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.checks import Options as CallOptions
from quackish.ops.linear_cross_entropy.layout import LinearCrossEntropyConfig, even_chunks, expected_time
from quackish.ops.shared.dry_run import DryRun, Recorder
from quackish.ops.shared.for_tools import Args, Operation
from quackish.ops.shared.memory_counter import META
from quackish.text import megabytes, table_of


class Point(NamedTuple):
    """The config that `memory_limit` selects from `bytes` up to the next faster point."""

    config: LinearCrossEntropyConfig
    bytes: int
    rows: int | None  # per chunk; None for a schedule without chunks
    time: float  # expected, relative to the three GEMMs


def frontier(args: Args, gpu: Gpu) -> list[Point]:
    """What each `memory_limit` selects for a call of linear cross entropy, the fastest first."""
    (m, h), (_, request, options), points = args["input"].shape, _linear_cross_entropy(args, gpu), []
    for config, needs in memory.frontier(request, options.schedule, options.chunk_size, gpu):
        has_chunks = config.schedule == "chunked" or config.dw_in_chunks or config.keeps_first
        has_chunks = has_chunks or not args["input"].requires_grad
        rows = even_chunks(m, config.chunk_rows) if has_chunks else None
        points.append(Point(config, needs, rows, expected_time(config, m, h)))
    return points


def dry_run(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Eager mode. Not thread-safe."""
    plan, request, options = _linear_cross_entropy(args, gpu)
    chosen = plan.config
    if options.memory_limit is not None:
        limits = options.memory_limit, request, options.schedule, options.chunk_size
        chosen = memory.choose_within_limit(*limits, gpu)
    config = LinearCrossEntropyConfig(*chosen)
    recorder = _Recorder(request._replace(device=META), config, gpu)  # bytes without rounding
    recorder.run()
    plan = recorder.plan
    gathers = [step for step in recorder.steps if (step.phase, step.kernel) == ("forward", "lce_gather")]
    num_chunks, sizes = sum(step.calls for step in gathers), dict.fromkeys(str(step.sizes["rows"]) for step in gathers)
    grad = args["input"].requires_grad
    decisions = {
        "Schedule": _schedule(plan, args, options) if grad else "none, as nothing needs a gradient",
        "Chunks": f"{num_chunks} in forward, of {' and '.join(sizes)} rows; at most {plan.chunk_rows}",
    }
    notes = ["All rows count as live: only the GPU knows how many are ignored, and skips those."]
    limited = memory.MemoryDryRun(request, config, gpu).run().peak_without_grads  # with rounding, as the limit has it
    return DryRun(None, decisions, recorder.steps, recorder.peak, recorder.buffers(), notes, limited)


def _linear_cross_entropy(args: Args, gpu: Gpu) -> tuple[LossPlan, memory.Request, CallOptions]:
    """The plan without a memory limit, the call, and its options."""
    inputs = Inputs(*map(args.get, Inputs._fields))
    options = CallOptions(**{name: args[name] for name in CallOptions._fields if name in args} | {"backend": "cute"})
    with substitute(META, KernelDevice(gpu, kernel_for)):
        plan = make_plan(inputs, options)
    request = memory.Request(*memory.request_for(inputs, plan, options.return_lse, eager=True))
    return plan, request._replace(device=torch.device("cuda")), options


def _schedule(plan: LossPlan, args: Args, options: CallOptions) -> str:
    """The schedule, and why."""
    defers_gradients = {
        "fp16": args["input"].dtype == torch.float16,
        "label smoothing": options.label_smoothing,
        'reduction "none"': options.reduction == "none",
        "a returned lse": options.return_lse,
        "returned statistics": options.return_stats,
        "grad_weight_out": "grad_weight_out" in args,
    }
    reasons = " and ".join(reason for reason, holds in defers_gradients.items() if holds)
    if options.memory_limit is not None:
        text = f"{plan.schedule}, the fastest within the memory limit"
    elif options.schedule == "auto":
        text = f"{plan.schedule}, by the rule in kernel_config, quackish/ops/linear_cross_entropy/layout.py"
    else:
        is_given = plan.schedule == options.schedule
        text = plan.schedule + (", as given" if is_given else f" in place of {options.schedule}")
    if reasons and plan.schedule != "chunked":
        text += f"; gradients are computed in backward because of {reasons}"
    text += "; exponentials of the first chunk are kept" * plan.keeps_first
    return text + "; the input's gradient is computed in forward" * plan.dx_in_forward


class _Recorder(Recorder, memory.MemoryDryRun):
    """Records a call of linear cross entropy."""


def explain(args: Args, gpu: Gpu) -> tuple[list[str], list[str]]:
    """(tables, notes): what each memory limit selects."""
    grad = args["input"].requires_grad
    note = "Expected times: expected_time in quackish/ops/linear_cross_entropy/layout.py, all gradients, bf16."
    return [_limit_table(frontier(args, gpu), grad)], [note] * grad


def _limit_table(points: list[Point], grad: bool) -> str:
    """What each memory limit selects."""
    limit, time = "memory_limit from MB", "expected time / 3 GEMMs"
    rows = [
        {
            limit: megabytes(point.bytes),
            "schedule": point.config.schedule,
            "chunk rows": point.rows,
            time: point.time,
        }
        for point in points
    ]
    return table_of(rows, {limit: ",.1f", "schedule": "", "chunk rows": "d"} | ({time: ".2f"} if grad else {}))
