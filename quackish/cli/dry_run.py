"""Dry runs: the launches and the memory of a call, found by running the operation on meta tensors. Needs no GPU.

The code of linear cross entropy and grouped_mlp runs with stand-ins for their kernels, which record each launch. A
dispatch mode records PyTorch's own launches, such as cuBLAS GEMMs, and counts allocated memory. RMSNorm has one launch
per direction, described by its plans.
"""

import argparse
import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

import quackish
from quackish.cli.parser import CommandError
from quackish.configs.choose import Choice, choose
from quackish.configs.linear_cross_entropy import LinearCrossEntropyConfig, even_chunks, expected_time
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.device import Device, empty_on, substitute
from quackish.ops.grouped_mlp import autograd as grouped
from quackish.ops.grouped_mlp import checks, kernel_steps
from quackish.ops.kernel_for import Kernel, kernel_for
from quackish.ops.linear_cross_entropy import api, memory
from quackish.ops.linear_cross_entropy.calls import Plan
from quackish.ops.linear_cross_entropy.checks import Inputs, Options
from quackish.ops.rms_norm_plans import check_problem
from quackish.reference.grouped_mlp import GATED
from quackish.work import SHORT, Work, sizes_of, work


class Step(NamedTuple):
    """A launch, of a quackish kernel or by PyTorch, and how often it is repeated."""

    phase: str  # "forward" or "backward"
    kernel: str  # a name in the table of kernels, or such as "torch.mm"
    problem: Any  # for PyTorch's launches a string with the shapes
    choice: Choice | None  # None for PyTorch's launches
    sizes: dict[str, int]
    work: Work  # of one call
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


# RMSNorm -------------------------------------------------------------------------------------------------------------


def rms_norm(args: argparse.Namespace, shape: tuple[int, ...], gpu: Gpu) -> DryRun:
    m, n = shape
    dry, reasons = DryRun(), {}
    for phase, name, problem in _norm_problems(args, m, n):
        if args.op not in ("rms_norm", f"rms_norm_{phase}"):
            continue
        try:
            check_problem(problem, m)
            choice = choose(name, problem, gpu)
        except UnsupportedError as error:
            reasons[phase] = str(error)
            continue
        launch_work = work(name, problem, {"m": m})
        dry.steps.append(Step(phase, name, problem, choice, {"m": m}, launch_work))
        dry.buffers.append(Buffer(f"results of {phase}", launch_work.bytes_written))
        if getattr(problem, "num_sums", 0):
            floats = choice.config.scratch_floats(problem, choice.config.num_ctas(m, gpu.sm_count, problem.heads))
            dry.buffers.append(Buffer("scratch of the sums over CTAs, kept for the stream", 4 * floats))
    dry.peak_bytes = sum(buffer.bytes for buffer in dry.buffers)
    if not dry.steps:
        return DryRun(portable=next(iter(reasons.values())))
    dry.plan |= {f"Path of {phase}": f"the portable path, in plain PyTorch: {why}" for phase, why in reasons.items()}
    return dry


def _norm_problems(args: argparse.Namespace, m: int, n: int) -> list[tuple[str, str, Any]]:
    """(phase, kernel, problem) of forward and backward, from the plans of a call on meta tensors."""
    weight_dtype = args.weight_dtype or args.dtype
    heads = 1 if args.heads is None or weight_dtype == "none" else args.heads
    if heads < 1 or m % heads:
        raise CommandError(f"--heads is {heads}, expected a divisor of {m} rows")
    if args.residual is None and args.residual_dtype is not None:
        raise CommandError("--residual-dtype is given without --residual; expected both")
    if args.dweight_out and weight_dtype == "none":
        raise CommandError("--dweight-out is given, but --weight-dtype is none: there is no weight")

    def tensor(dtype: str, *shape: int) -> Tensor:
        dtype = args.dtype if dtype in ("same", "none") else dtype
        return torch.empty(shape, dtype=getattr(torch, dtype), device=memory.META, requires_grad=True)

    shape, parameter = ((m, n), (n,)) if heads == 1 else ((m // heads, heads, n), (heads, n))
    weight = None if weight_dtype == "none" else tensor(weight_dtype, *parameter)
    outputs: Any = quackish.rms_norm(
        tensor(args.dtype, *shape),
        weight,
        tensor(weight_dtype, *parameter) if args.bias else None,
        residual=None if args.residual is None else tensor(args.residual, *shape),
        residual_dtype=args.residual_dtype and getattr(torch, args.residual_dtype),
        out_dtype=args.out_dtype and getattr(torch, args.out_dtype),
        dweight_out=torch.empty_like(weight, dtype=torch.float32) if args.dweight_out else None,
    )
    outputs = (outputs,) if args.residual is None else outputs
    torch.autograd.backward(outputs, [torch.empty_like(t) for t in outputs])
    forward = outputs[0].grad_fn.plan
    *_, backward = forward.backward.values()
    return [("forward", "rms_norm_fwd", forward.problem), ("backward", "rms_norm_bwd", backward.problem)]


# Linear cross entropy ------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """The config that `memory_limit` selects from `bytes` up to the next faster point."""

    config: LinearCrossEntropyConfig
    bytes: int
    rows: int | None  # per chunk; None for a schedule without chunks
    time: float  # expected, relative to the three GEMMs


def frontier(args: argparse.Namespace, shape: tuple[int, ...], gpu: Gpu) -> list[Point]:
    """What each `memory_limit` selects for a call of linear cross entropy, the fastest first."""
    (m, h, _), (_, request), points = shape, _linear_cross_entropy(args, shape, gpu), []
    for config, needs in memory.frontier(request, args.schedule or "auto", args.chunk_size, gpu):
        has_chunks = args.no_grad or config.schedule == "chunked" or config.dw_in_chunks
        rows = even_chunks(m, config.chunk_rows) if has_chunks else None
        points.append(Point(config, needs, rows, expected_time(config, m, h)))
    return points


def linear_cross_entropy(args: argparse.Namespace, shape: tuple[int, ...], gpu: Gpu) -> DryRun:
    """Eager mode. Not thread-safe."""
    grad, (plan, request) = not args.no_grad, _linear_cross_entropy(args, shape, gpu)
    chosen = plan.schedule, plan.chunk_rows, plan.dx_in_forward, plan.dw_in_chunks
    if args.memory_limit is not None:
        try:
            schedule = args.schedule or "auto"
            chosen = memory.choose_within_limit(args.memory_limit, request, schedule, args.chunk_size, gpu)
        except ValueError as error:
            raise _command_error(error) from None
    config = LinearCrossEntropyConfig(*chosen)
    recorder = _LceRecorder(request._replace(device=memory.META), config, gpu)  # bytes without rounding
    recorder.run()
    plan = recorder.plan
    gathers = [step for step in recorder.steps if (step.phase, step.kernel) == ("forward", "lce_gather")]
    num_chunks, sizes = sum(step.calls for step in gathers), dict.fromkeys(str(step.sizes["rows"]) for step in gathers)
    decisions = {
        "Schedule": _schedule(plan, args) if grad else "none, as nothing needs a gradient",
        "Chunks": f"{num_chunks} in forward, of {' and '.join(sizes)} rows; at most {plan.chunk_rows}",
    }
    notes = ["All rows count as live: only the GPU knows how many are ignored, and skips those."]
    if any(step.kernel == "torch.mm" for step in recorder.steps):
        notes.append("torch.mm and torch.addmm are cuBLAS GEMMs: quackish has no GEMM kernel for this GPU.")
    return DryRun(None, decisions, recorder.steps, recorder.peak, recorder.buffers(), notes)


def _linear_cross_entropy(args: argparse.Namespace, shape: tuple[int, ...], gpu: Gpu) -> tuple[Plan, memory.Request]:
    """The plan without a memory limit, and the call."""
    m, h, v = shape
    dtype, grad = getattr(torch, args.dtype), not args.no_grad
    with torch.device(memory.META):
        x, w = (torch.empty(rows, h, dtype=dtype, requires_grad=grad) for rows in (m, v))
        bias = torch.empty(v, dtype=dtype, requires_grad=grad) if args.bias else None
        target = torch.empty(m, dtype=torch.int64)
        class_weight = torch.empty(v) if args.class_weight else None
        logit_scale = None if args.logit_scale is None else torch.empty(())
        dw_out = torch.empty(v, h) if args.grad_weight_out else None
    inputs = Inputs(x, w, bias, target, class_weight, logit_scale, None, dw_out)
    options = Options(
        args.reduction or "mean", -100, args.label_smoothing or 0.0, args.softcap, args.z_loss or 0.0,
        bool(args.return_lse), bool(args.return_stats), args.schedule or "auto", args.chunk_size, args.memory_limit,
        "cute",
    )  # fmt: skip
    try:
        with substitute(memory.META, Device(gpu, kernel_for)):
            plan = api.make_plan(inputs, options)
    except ValueError as error:
        raise _command_error(error) from None
    fixed = plan[: Plan._fields.index("schedule")]
    device = torch.device("cuda")
    has_scale = logit_scale is not None
    return plan, memory.Request(
        memory.tensor_metadata(inputs), fixed, None, options.return_lse, has_scale, device, eager=True
    )


def _command_error(error: ValueError) -> CommandError:
    """An operation's error without the operation's name."""
    return CommandError(str(error).partition(": ")[2])


def _schedule(plan: Plan, args: argparse.Namespace) -> str:
    """The schedule, and why."""
    defers_gradients = {
        "fp16": args.dtype == "float16",
        "label smoothing": args.label_smoothing,
        'reduction "none"': args.reduction == "none",
        "a returned lse": args.return_lse,
        "returned statistics": args.return_stats,
        "grad_weight_out": args.grad_weight_out,
    }
    reasons = " and ".join(reason for reason, holds in defers_gradients.items() if holds)
    if args.memory_limit is not None:
        text = f"{plan.schedule}, the fastest within the memory limit"
    elif args.schedule in (None, "auto"):
        text = f"{plan.schedule}, by the rule in kernel_config, quackish/configs/linear_cross_entropy.py"
    else:
        text = plan.schedule + (", as given" if plan.schedule == args.schedule else f" in place of {args.schedule}")
    if reasons and plan.schedule != "chunked":
        text += f"; gradients are computed in backward because of {reasons}"
    return text + "; the input's gradient is computed in forward" * plan.dx_in_forward


# grouped_mlp ---------------------------------------------------------------------------------------------------------


def grouped_mlp(args: argparse.Namespace, shape: tuple[int, ...], gpu: Gpu) -> DryRun:
    """Eager mode."""
    rows, h, i, experts = shape
    activation, recompute = args.activation or "swiglu", bool(args.recompute)
    dtype, width = getattr(torch, args.dtype), i * (1 + (activation in GATED))
    w1_rows = i if args.w3 else width
    with torch.device(memory.META):
        x, dy = (torch.empty(rows, h, dtype=dtype) for _ in range(2))
        w1, w2 = torch.empty(experts, w1_rows, h, dtype=dtype), torch.empty(experts, h, i, dtype=dtype)
        w3 = torch.empty(experts, i, h, dtype=dtype) if args.w3 else None
        b1, b2 = (torch.empty(experts, n, dtype=dtype) if args.bias else None for n in (width, h))
        scales = torch.empty(rows) if args.scales else None
        offs = torch.empty(experts, dtype=torch.int32)
        weights = (w1, w3, w2) if args.grad_weight_out else (None,) * 3
        outs = [None if w is None else torch.empty(w.shape) for w in weights]
    inputs = checks.Inputs(x, w1, w3, b1, w2, b2, scales, offs, *outs)
    try:
        checks.check_mlp(inputs, activation, recompute, "cute")
    except ValueError as error:
        raise _command_error(error) from None
    if why := kernel_steps.why_unsupported("grouped_mlp", x, i, experts):
        raise UnsupportedError(why)
    recorder, keeps = _Recorder(), not (args.no_grad or recompute)
    recorder.ignore(*inputs, dy)
    steps = kernel_steps.KernelSteps(Device(gpu, recorder.kernel_for, empty_on(memory.META)))
    with recorder:
        y, preactivation = grouped.forward(steps, inputs, activation, keeps)
        if not args.no_grad:
            recorder.phase = "backward"
            dtypes = grouped.Dtypes._make(None if t is None else t.dtype for t in inputs[:7])
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
