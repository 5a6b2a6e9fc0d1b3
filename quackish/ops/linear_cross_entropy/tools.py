"""Linear cross entropy for the tools."""

import math
from typing import NamedTuple, get_args

import torch

from quackish.device.kernel_device import KernelDevice, substitute
from quackish.device.kernel_for import kernel_for
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy import memory
from quackish.ops.linear_cross_entropy.api import linear_cross_entropy, make_plan
from quackish.ops.linear_cross_entropy.calls import LossPlan
from quackish.ops.linear_cross_entropy.checks import Inputs
from quackish.ops.linear_cross_entropy.checks import Options as CallOptions
from quackish.ops.linear_cross_entropy.gemm_problems import GEMM_SPEC
from quackish.ops.linear_cross_entropy.layout import LinearCrossEntropyConfig, even_chunks, expected_time
from quackish.ops.shared.argument_types import size
from quackish.ops.shared.dry_run import DryRun, Recorder
from quackish.ops.shared.for_tools import Args, Maker, Operation, Options, SelfTest, flag, no_grad, value
from quackish.ops.shared.memory_counter import META
from quackish.ops.shared.models import Model
from quackish.text import table_of
from quackish.types import Reduction, Schedule

IGNORED = -100


def _make(new: Maker, shape: tuple[int, ...], options: Options) -> Args:
    """Logits have standard deviation 1. Every ninth row is ignored."""
    m, h, v = shape
    target = torch.arange(m, device=new.device) * 7 % v
    target[::9] = IGNORED
    return {"input": new.rows(m, h, seed=0), "linear_weight": new.rows(v, h, seed=1).mul_(h**-0.5), "target": target}


# Dry runs -------------------------------------------------------------------------------------------------------------


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
    return DryRun(None, decisions, recorder.steps, recorder.peak, recorder.buffers(), notes)


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


# For explain ----------------------------------------------------------------------------------------------------------


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
            limit: math.ceil(point.bytes / 1e5) / 10,  # rounded up, so that this limit is enough
            "schedule": point.config.schedule,
            "chunk rows": point.rows,
            time: point.time,
        }
        for point in points
    ]
    return table_of(rows, {limit: ",.1f", "schedule": "", "chunk rows": "d"} | ({time: ".2f"} if grad else {}))


# The operation --------------------------------------------------------------------------------------------------------

LINEAR_CROSS_ENTROPY = Operation(
    name="linear_cross_entropy",
    title="Linear cross entropy",
    function=linear_cross_entropy,
    results=("loss", "lse"),
    leaves=("input", "linear_weight", "linear_bias"),
    spec=GEMM_SPEC,
    dims=("M", "H", "V"),
    example="8192x4096x128256",
    small=(48, 64, 512),
    model_shapes=Model.head_shapes,
    make=_make,
    options={
        "bias": flag("linear_bias", "with a bias", lambda new, m, h, v: new.rows(v, seed=3)),
        "schedule": value("schedule", ", ".join(get_args(Schedule)), example="recompute"),
        "chunk_size": value("chunk_size", type=int, metavar="ROWS", example=8),
        "memory_limit": value(
            "memory_limit",
            "limit on memory besides inputs and gradients, such as 500MB or 1.5GB",
            type=size,
            metavar="BYTES",
            example=1 << 30,
        ),
        "reduction": value("reduction", ", ".join(get_args(Reduction)), example="none"),
        "class_weight": flag("weight", "with class weights", lambda new, m, h, v: new.weights(v, dtype=torch.float32)),
        "label_smoothing": value("label_smoothing", type=float, metavar="S", example=0.1),
        "softcap": value("softcap", type=float, metavar="C", example=30.0),
        "logit_scale": value("logit_scale", type=float, metavar="S", example=0.5),
        "z_loss": value("z_loss", type=float, metavar="C", example=1e-3),
        "return_lse": flag("return_lse", "also return lse, and backpropagate through it"),
        "return_stats": flag("return_stats", "also return the statistics, and backpropagate through them"),
        "grad_weight_out": flag(
            "grad_weight_out", "add the weight gradients to buffers", lambda new, m, h, v: new.zeros(v, h)
        ),
        "no_grad": no_grad(),
    },
    dry_run=dry_run,
    explain=explain,
    bounds={"loss": 1e-4, "lse": 1e-4},
    self_tests={
        "": SelfTest((200, 256, 1000)),
        "chunks": SelfTest(
            (300, 256, 1003), dict(bias=True, schedule="chunked", chunk_size=128, softcap=30.0, z_loss=1e-3)
        ),
        "class weights": SelfTest((300, 256, 1003), dict(class_weight=True, reduction="sum")),
        "stored": SelfTest((300, 256, 1003), dict(bias=True, schedule="stored", reduction="none", return_lse=True)),
        "recompute": SelfTest((2000, 256, 9001), dict(schedule="recompute")),
        "recompute in chunks": SelfTest((2000, 256, 9001), dict(schedule="recompute", chunk_size=512)),
        "loss per row": SelfTest((2000, 256, 9001), dict(schedule="recompute", reduction="none")),
        "a buffer": SelfTest((300, 256, 1003), dict(grad_weight_out=True)),
        "smoothing": SelfTest((300, 256, 1003), dict(class_weight=True, label_smoothing=0.1)),
        "fp16": SelfTest((300, 256, 1003), dict(bias=True), torch.float16),
        "many rows of few classes": SelfTest((20_000, 64, 100)),
    },
    large_tests=[  # with the GEMMs of "chunked", and with "recompute" all epilogues
        SelfTest((4096, 2048, 32_000)),
        SelfTest((4096, 2048, 32_000), dict(schedule="recompute")),
        SelfTest((8192, 4096, 128_256), only_timed=True),
    ],
)
FUNCTIONS = (LINEAR_CROSS_ENTROPY,)
