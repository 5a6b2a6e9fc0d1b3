"""`explain` for linear cross entropy: its schedule and why, and what a dry run launches and holds."""

import argparse

import torch

from quackish import kernels
from quackish.cli import dry_run
from quackish.cli.explained import Explained
from quackish.cli.parser import Refused
from quackish.configs.linear_cross_entropy import (
    E_BYTES,
    E_ITEMSIZE,
    KEPT_BYTES,
    ROOMY_BYTES,
    ROW_MULTIPLE,
    KernelProblem,
    LinearCrossEntropyConfig,
    LinearCrossEntropyProblem,
    bytes_per_logit,
    kernel_config,
    linear_cross_entropy_config,
)
from quackish.errors import UnsupportedError
from quackish.gpu import Gpu
from quackish.ops.linear_cross_entropy.checks import check_options


def explain(args: argparse.Namespace, shape: list[int], gpu: Gpu | None) -> Explained:
    m, h, v = shape
    reduction, schedule = args.reduction or "mean", args.schedule or "auto"
    smoothing, z_loss = args.label_smoothing or 0.0, args.z_loss or 0.0
    try:
        check_options(
            reduction=reduction, label_smoothing=smoothing, softcap=args.softcap, z_loss=z_loss, schedule=schedule,
            chunk_size=args.chunk_size,
        )  # fmt: skip
    except ValueError as error:
        raise Refused(str(error).removeprefix("linear_cross_entropy: ")) from None
    about = dict(op=args.op, shape=f"{m}x{h}x{v}", dtype=args.dtype, gpu=gpu)
    reason = _why_portable(gpu, args.dtype, h)
    if reason is not None:
        problem = LinearCrossEntropyProblem(v, args.dtype, reduction, args.softcap is not None, bool(args.return_lse))
        how = linear_cross_entropy_config(problem, m, schedule, args.chunk_size)
        rows = min(how.chunk_rows, m)
        flight = rows * v * bytes_per_logit(problem)
        plan = {"Schedule": f"{how.schedule}, {rows} rows at a time: {flight / 1e9:.2f} GB of logits in flight"}
        return Explained(**about, portable=reason, plan=plan)
    problem = KernelProblem(
        v=v, h=h, dtype=args.dtype, reduction=reduction, return_lse=bool(args.return_lse),
        grad_weight_out=bool(args.grad_weight_out), label_smoothing=smoothing > 0,
    )  # fmt: skip
    how = kernel_config(problem, m, schedule, args.chunk_size)
    call = dry_run.LceCall(
        m, h, v, getattr(torch, args.dtype), reduction, args.bias, bool(args.class_weight), smoothing, args.softcap,
        z_loss, bool(args.return_lse), bool(args.grad_weight_out), not args.no_grad,
        bool(args.compiled),
    )  # fmt: skip
    trace = dry_run.linear_cross_entropy(call, how, gpu)
    schedule = f"{how.schedule}: {schedule_reason(problem, m, schedule, how)}"
    if how.dx_in_forward:
        schedule += "; the input's gradient is made in forward"
        begun = [step.sizes["v1"] for step in trace.steps if (step.phase, step.kernel) == ("forward", "lce_targets")]
        if begun:
            schedule += f", and the weight's of {begun[0]} classes"
    plan = {
        "Schedule": "none, as nothing needs a gradient" if args.no_grad else schedule,
        "Chunks": _chunks(trace, problem, how, args.chunk_size, bool(args.compiled)),
    }
    notes = [
        "Work counts every row as live: ignored ones are left out on the GPU, which alone knows how many there are."
    ]
    if any(step.kernel == "torch.mm" for step in trace.steps):
        notes.append("torch.mm and torch.addmm are cuBLAS's GEMMs: there is no GEMM of ours for this GPU.")
    return Explained(**about, portable=None, plan=plan, trace=trace, notes=notes)


def schedule_reason(problem: KernelProblem, m: int, schedule: str, how: LinearCrossEntropyConfig) -> str:
    """Why `kernel_config` answered `how` where `schedule` was asked for."""
    asked = f"{schedule} was asked for" if schedule != "auto" else "auto"
    if not problem.has_e:
        why = "label smoothing changes every class" if problem.label_smoothing else "fp16 has not the range for exp"
        return f"{asked}, and gradients cannot start from exponentials that were kept: {why}"
    if schedule == "chunked" and how.schedule != "chunked":
        return f'{asked}, but with reduction "none" forward does not know what each row\'s gradient is multiplied by'
    if schedule != "auto":
        return "asked for"
    if how.schedule == "chunked":
        return "auto; forward can make the gradients, up to one factor that backward brings"
    late = (
        ('reduction is "none"', problem.reduction == "none"),
        ("lse is returned", problem.return_lse),
        ("the weight's gradient is added to a buffer", problem.grad_weight_out),
    )
    kept, limit = m * problem.v * E_ITEMSIZE / 1e9, KEPT_BYTES / 1e9
    fits = "at most" if how.schedule == "stored" else "more than"
    because = " and ".join(words for words, holds in late if holds)
    return f"auto; {because}, so it is left to backward; all exponentials would take {kept:.2f} GB, {fits} {limit:.2f}"


def _chunks(
    trace: dry_run.Trace, problem: KernelProblem, how: LinearCrossEntropyConfig, chunk_size: int | None, compiled: bool
) -> str:
    rows = [step.sizes["rows"] for step in trace.steps if (step.phase, step.kernel) == ("forward", "lce_gather")]
    sizes = " and ".join(map(str, dict.fromkeys(rows)))
    if chunk_size:
        why = "which was asked for, in whole tiles"
    elif how.chunk_rows == ROW_MULTIPLE:
        why = "the fewest there are"
    elif how.dx_in_forward and compiled and not problem.grad_weight_out:
        why = "of which exponentials take as much memory as the weight's gradient will"
    elif how.dx_in_forward and not problem.grad_weight_out:
        why = "or fewer, as their exponentials lie where the weight's gradient comes to be"
    else:
        limit = ROOMY_BYTES if how.dx_in_forward else E_BYTES
        why = f"which keeps their exponentials within {limit / 1e9:.2f} GB"
    return f"{len(rows)} in forward, of {sizes} rows; at most {how.chunk_rows}, {why}"


def _why_portable(gpu: Gpu | None, dtype: str, h: int) -> str | None:
    """None where kernels run."""
    who, end = "linear_cross_entropy: no kernel for", 'backend="auto" runs the portable path.'
    if gpu is None:
        return f"{who} cpu. {end}"
    try:
        kernels.find("lce_rows", gpu)
    except ModuleNotFoundError:  # the compiler is not installed here
        pass
    except UnsupportedError as error:
        return str(error).replace("lce_rows", "linear_cross_entropy")
    if dtype not in ("bfloat16", "float16"):
        return f"{who} torch.{dtype}; supported: torch.bfloat16, torch.float16. {end}"
    if h % 8:
        return f"{who} linear_weight with {h} columns; supported: multiples of 8. {end}"
    return None
