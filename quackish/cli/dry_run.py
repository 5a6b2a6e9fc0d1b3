"""Dry runs: the launches and the memory of a call, found by running the operation on meta tensors. Needs no GPU.

The operation's own code runs on a Device whose kernels do nothing but record their launch. For linear cross entropy and
grouped_mlp, a dispatch mode also records PyTorch's own launches, such as cuBLAS GEMMs, and counts allocated memory.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quackish.configs.choose import Choice, choose
from quackish.configs.linear_cross_entropy import LinearCrossEntropyConfig, even_chunks, expected_time
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.operations.table import Args, Operation
from quackish.ops.device import Device, empty_on, substitute, why_unsupported
from quackish.ops.grouped_mlp import autograd as grouped
from quackish.ops.grouped_mlp import checks, kernel_steps
from quackish.ops.kernel_for import Kernel, kernel_for
from quackish.ops.linear_cross_entropy import api, memory
from quackish.ops.linear_cross_entropy.calls import Plan
from quackish.ops.linear_cross_entropy.checks import Inputs, Options
from quackish.work import SHORT, Work, sizes_of, work

META = memory.META


class Step(NamedTuple):
    """A launch, of a quackish kernel or by PyTorch, and how often it is repeated."""

    phase: str  # "forward" or "backward"
    kernel: str  # a name in the table of kernels, or such as "torch.mm"
    problem: Any  # a string with the shapes for PyTorch's launches
    choice: Choice | None  # None for PyTorch's launches
    sizes: dict[str, int]
    work: Work  # bytes and FLOPs of one call
    calls: int = 1


class Buffer(NamedTuple):
    text: str
    bytes: int


@dataclasses.dataclass
class DryRun:
    """Launches and memory of a call's forward and backward, with all gradients."""

    portable: str | None = None  # why the portable path runs; None if kernels run
    plan: dict[str, str] = dataclasses.field(default_factory=dict)  # decisions and their reasons, by title
    steps: list[Step] = dataclasses.field(default_factory=list)
    peak_bytes: int = 0  # peak memory, with results but without inputs
    buffers: list[Buffer] = dataclasses.field(default_factory=list)  # allocated at the peak, the largest first
    notes: list[str] = dataclasses.field(default_factory=list)


def dry_run(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...], name: str) -> DryRun:
    """Runs a call on meta tensors. `name` is the operation's in messages. ValueError for invalid arguments."""
    with substitute(META, Device(gpu, kernel_for)):
        if why := why_unsupported(name, op.kernel, META):
            return DryRun(portable=why)
    try:
        return DRY_RUNS.get(op.name, launches)(op, args, gpu, passes)
    except UnsupportedError as error:
        return DryRun(portable=str(error))


def launches(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Runs an operation that allocates by its Device alone. Launches of PyTorch are not recorded."""
    dry, scratch, phase = DryRun(), [], "forward"

    def record(kernel: str, problem: Any, gpu: Gpu) -> Kernel:
        choice = choose(kernel, problem, gpu)

        def launch(*args: Any) -> None:
            sizes = sizes_of(kernel, args)
            dry.steps.append(Step(phase, kernel, problem, choice, sizes, work(kernel, problem, sizes)))

        return Kernel(launch, choice.config)

    def workspace(stream: int, floats: int) -> tuple[int, int, None]:
        scratch.append(Buffer("scratch of the sums over CTAs, kept for the stream", 4 * floats))
        return 0, 0, None

    with substitute(META, Device(gpu, record, empty_on(META), workspace=workspace)):
        results = op.forward(args, "cute")
        try:
            phase = "backward"
            op.backward(args, results)
        except UnsupportedError as error:
            if passes == ("backward",):
                raise
            dry.plan["Path of backward"] = f"the portable path, in plain PyTorch: {error}"
    if not dry.steps:
        raise AssertionError(
            f"{op.name}: the dry run saw no launch. A plain eager call must run its kernels without a custom operator: "
            "on meta tensors PyTorch runs only an operator's fake implementation"
        )
    dry.steps = [step for step in dry.steps if step.phase in passes]
    dry.buffers = [Buffer(f"results of {step.phase}", step.work.bytes_written) for step in dry.steps]
    dry.buffers += scratch if "backward" in passes else []
    dry.peak_bytes = sum(buffer.bytes for buffer in dry.buffers)
    return dry


# Linear cross entropy ------------------------------------------------------------------------------------------------


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


def linear_cross_entropy(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Eager mode. Not thread-safe."""
    plan, request, options = _linear_cross_entropy(args, gpu)
    chosen = plan.config
    if options.memory_limit is not None:
        limits = options.memory_limit, request, options.schedule, options.chunk_size
        chosen = memory.choose_within_limit(*limits, gpu)
    config = LinearCrossEntropyConfig(*chosen)
    recorder = _LceRecorder(request._replace(device=META), config, gpu)  # bytes without rounding
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


def _linear_cross_entropy(args: Args, gpu: Gpu) -> tuple[Plan, memory.Request, Options]:
    """The plan without a memory limit, the call, and its options."""
    inputs = Inputs(*map(args.get, Inputs._fields))
    options = Options(**{name: args[name] for name in Options._fields if name in args} | {"backend": "cute"})
    with substitute(META, Device(gpu, kernel_for)):
        plan = api.make_plan(inputs, options)
    request = memory.Request(*memory.request_for(inputs, plan, options.return_lse, eager=True))
    return plan, request._replace(device=torch.device("cuda")), options


def _schedule(plan: Plan, args: Args, options: Options) -> str:
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
        text = f"{plan.schedule}, by the rule in kernel_config, quackish/configs/linear_cross_entropy.py"
    else:
        is_given = plan.schedule == options.schedule
        text = plan.schedule + (", as given" if is_given else f" in place of {options.schedule}")
    if reasons and plan.schedule != "chunked":
        text += f"; gradients are computed in backward because of {reasons}"
    text += "; exponentials of the first chunk are kept" * plan.keeps_first
    return text + "; the input's gradient is computed in forward" * plan.dx_in_forward


# grouped_mlp ---------------------------------------------------------------------------------------------------------


def grouped_mlp(op: Operation, args: Args, gpu: Gpu, passes: tuple[str, ...]) -> DryRun:
    """Eager mode."""
    inputs = checks.Inputs(*map(args.get, checks.Inputs._fields))
    activation, recompute = args.get("activation", "swiglu"), args.get("recompute", False)
    checks.check_mlp("grouped_mlp", inputs, activation, recompute, "cute")
    experts, _, i = inputs.w2.shape
    if why := kernel_steps.why_unsupported("grouped_mlp", inputs.x, i, experts):
        raise UnsupportedError(why)
    grad, dy = inputs.x.requires_grad, torch.empty_like(inputs.x)
    inputs = checks.Inputs(*[None if t is None else t.detach() for t in inputs])
    recorder = _Recorder()
    recorder.ignore(*inputs, dy)
    steps = kernel_steps.KernelSteps(Device(gpu, recorder.kernel_for, empty_on(memory.META)))
    with recorder:
        y, preactivation = grouped.forward(steps, inputs, activation, grad and not recompute)
        if grad:
            recorder.phase = "backward"
            dtypes = grouped.Dtypes._make(None if t is None else t.dtype for t in inputs.leaves())
            grads = grouped.gradients(steps, dy, inputs, preactivation, activation, dtypes)
            del y, grads  # held until here
    notes = ["Bytes and FLOPs assume that every group is used and every row is in one: only the GPU knows the groups."]
    return DryRun(None, {}, recorder.steps, recorder.peak, recorder.buffers(), notes)


# Recording -----------------------------------------------------------------------------------------------------------

_OVERWRITES = ("zero_", "fill_", "copy_")  # methods that do not read their own tensor


class _Recorder(memory.MemoryCounter):
    """Records the launches of quackish's kernels and of PyTorch."""

    phase = "forward"

    def __init__(self, *args):
        self.steps: list[Step] = []
        super().__init__(*args)

    def kernel_for(self, name: str, problem: Any, gpu: Gpu) -> Kernel:
        choice = choose(name, problem, gpu)

        def launch(*args) -> None:
            sizes = sizes_of(name, args)
            self.steps.append(Step(self.phase, name, problem, choice, sizes, work(name, problem, sizes), self.calls))

        return Kernel(launch, choice.config)

    def buffers(self) -> list[Buffer]:
        """The tensors allocated at the peak, the largest first."""
        return sorted((Buffer(_shape(held), held.bytes) for held in self.at_peak), key=lambda buffer: -buffer.bytes)

    def record_call(self, func, args, result) -> None:
        name = func.overloadpacket.__name__
        returns = [returned.alias_info for returned in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returns)
        if is_view or "empty" in name:
            return
        read, written = memory.tensors_of(args), memory.tensors_of(result)
        if name in _OVERWRITES or name.startswith("new_"):
            read = read[1:]
        if name in ("mm", "addmm"):
            (m, k), n = read[-2].shape, read[-1].shape[1]
            flops = 2 * m * n * k
            text = f"m={m} n={n} k={k} {_dtype(read[-1])} out={_dtype(written[0])} (cuBLAS)"
        else:
            flops = sum(t.numel() for t in written) if name in ("add_", "sum") else 0
            text = " ".join([*map(_shape, written[:1] or read[:1]), "(PyTorch)"])
        launch_work = Work(sum(t.nbytes for t in read), sum(t.nbytes for t in written), flops)
        self.steps.append(Step(self.phase, f"torch.{name}", text, None, {}, launch_work, self.calls))


class _LceRecorder(_Recorder, memory.MemoryDryRun):
    """Records a call of linear cross entropy."""


def _dtype(t: Tensor | memory.Allocation) -> str:
    name = str(t.dtype).removeprefix("torch.")
    return SHORT.get(name, name)


def _shape(t: Tensor | memory.Allocation) -> str:
    return f"{'x'.join(map(str, t.shape)) or 'scalar'} {_dtype(t)}"


# The other operations have `launches`.
DRY_RUNS: dict[str, Callable[[Operation, Args, Gpu, tuple[str, ...]], DryRun]] = {
    "linear_cross_entropy": linear_cross_entropy,
    "grouped_mlp": grouped_mlp,
}
