"""Shows the kernels and configs that a call uses and why, with bytes, FLOPs, estimated time and peak memory.

    quackish explain rms_norm_backward 16384x4096 --gpu b200
    quackish explain linear_cross_entropy 8192x4096x128256 --schedule recompute
    quackish explain linear_cross_entropy 8192x4096x128256 --gpu b200
    quackish explain grouped_mlp 131072x2048x768x128 --scales

Needs no GPU. Each kernel is compiled for the chosen GPU, which takes a second, to read its registers and shared memory
with cuobjdump, from Triton's wheel or the CUDA toolkit. --no-compile skips this.

Estimated times are those of the bytes and FLOPs at the speeds in the last lines. A launch can be faster: the speed of
tensor cores is that of long GEMMs at the power limit. For a B200, where nothing was measured, they are intervals.

For linear cross entropy a table shows what each memory_limit selects.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from quackish.cli import call_arguments
from quackish.cli.call_arguments import dry_run_call, meta_arguments, select_gpu
from quackish.cli.console import progress
from quackish.device import launch
from quackish.device.choose import Choice
from quackish.device.launch import Resources
from quackish.device.spec import EMULATED_ONLY
from quackish.device.work import Work, describe, estimate
from quackish.gpu import NAMED, Gpu, Roofs, roofs_of, speeds
from quackish.ops.shared.argument_types import one_of
from quackish.text import fill, megabytes, table_of, text_table

if TYPE_CHECKING:
    from quackish.ops.shared.dry_run import DryRun, Step

_SYSTEM_SMEM_BYTES = 1024  # per CTA

_ON_EXPONENTIALS = (
    "A launch that computes scores takes at least the longest of memory, tensor cores and exponentials (16 per cycle "
    "and SM), and at most their sum, with other arithmetic of twice the exponentials' time."
)

_Chosen = tuple[Any, Choice]  # a problem, and the config of its kernel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    call_arguments.add_arguments(parser)
    names = {name: name for name in (*NAMED, "cpu", "this")}
    gpu_help = f"{', '.join(NAMED)}, cpu, or this; default: this machine's GPU, h200 if it has none"
    parser.add_argument("--gpu", type=one_of(names), help=gpu_help)
    compile_help = "do not compile; omits registers, shared memory and CTAs per SM"
    parser.add_argument("--no-compile", action="store_true", help=compile_help)


def begin(args: argparse.Namespace) -> None:
    call_arguments.shape_of(args, call_arguments.CALLS[args.op][0], call_arguments.DRY)
    if args.gpu == "this":
        select_gpu(args.gpu)
    if not args.no_compile:
        line = "explain: compiles each kernel to read its registers, which takes seconds; --no-compile skips this"
        print(fill(line, indent="  "), file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> int:
    print(text(args))
    return 0


def text(args: argparse.Namespace) -> str:
    (gpu, why), operation = select_gpu(args.gpu), call_arguments.CALLS[args.op][0]
    dry = dry_run_call(args, gpu)
    where = f"{gpu.name} ({gpu.target}, {gpu.sm_count} SMs)" if gpu else "a CPU"
    head = [f"{args.op} {args.shape} {args.dtype} on {where}", *[f"GPU: {why}"] * bool(why)]
    if dry.portable is not None:
        return _filled([*head, "Path: the portable path, in plain PyTorch", f"Why: {dry.portable}"])
    head += ["Path: quackish's kernels", *(f"{title}: {decision}" for title, decision in dry.plan.items())]
    roofs, notes = roofs_of(gpu), list(dry.notes)
    if roofs is not None and roofs.fastest is not None:
        head.append(
            f"Nothing was measured on a {gpu.name}: expected times are intervals, from the fastest to the slowest."
        )
    if gpu.family in EMULATED_ONLY:
        notes.append("No Blackwell GPU has run these kernels: they are compiled and emulated. See docs/blackwell.md.")
    distinct = list(dict.fromkeys((s.problem, s.choice) for s in dry.steps if s.choice is not None))
    usage = [] if args.no_compile else _resource_usage(distinct, gpu, notes)
    if roofs is not None and any(step.work.exponentials for step in dry.steps):
        notes.append(_ON_EXPONENTIALS)
    notes += dict.fromkeys(f"{s.kernel}: {s.work.note}." for s in dry.steps if s.work.note)
    parts = [_launch_table(dry.steps, distinct, roofs), _kernel_list(distinct, gpu)]
    if usage:
        parts.append(_resource_table(distinct, usage, gpu))
    parts.append(_memory_table(dry))
    if operation.explain is not None:
        tables, more_notes = operation.explain(meta_arguments(args), gpu)
        parts, notes = parts + tables, notes + more_notes
    return "\n\n".join([_filled(head), *parts, _filled([_roofs(roofs, gpu), *notes])])


def _filled(lines: Sequence[str]) -> str:
    return "\n".join(fill(line, indent="  ") for line in lines)


def _resource_usage(distinct: list[_Chosen], gpu: Gpu, notes: list[str]) -> list[Resources]:
    """The resources of each kernel; empty, with a note, if they cannot be read."""
    usage: list[Resources] = []
    show = progress(len(distinct), "kernels")
    try:
        for problem, choice in distinct:
            show(len(usage), "compiling")
            kernel = problem.spec.kernel_class(gpu)
            usage.append(launch.resources(kernel, problem, choice.config, gpu.target))
    except (FileNotFoundError, ModuleNotFoundError) as error:
        why = "nvidia-cutlass-dsl, the compiler, is not installed." if isinstance(error, ImportError) else error
        notes.append(f"Registers and shared memory are not shown: {why}")
        return []
    return usage


def _launch_table(steps: list["Step"], distinct: list[_Chosen], roofs: Roofs | None) -> str:
    """Numbers and sizes of each launch. Equal launches share a row, in the order of their first launch."""
    time_columns = _time_columns(steps, roofs)
    equal: dict[tuple, list[Step]] = {}
    for step in steps:
        equal.setdefault((step.phase, step.kernel, step.problem, step.choice, *step.sizes.items()), []).append(step)
    rows: list[str | dict[str, Any]] = []
    total: dict[str, Any] = {"launch": f"{sum(step.calls for step in steps)} launches"}
    for phase, groups in itertools.groupby(equal.values(), lambda group: group[0].phase):
        rows.append(phase)
        for group in groups:
            step, calls = group[0], sum(step.calls for step in group)
            is_ours = step.choice is not None
            number = f"[{distinct.index((step.problem, step.choice)) + 1}] " if is_ours else ""
            row: dict[str, Any] = {"launch": number + step.kernel}
            row |= {"read": step.work.bytes_read, "written": step.work.bytes_written, "FLOPs": step.work.flops}
            if roofs is not None:
                row |= {column: us(step.work) for column, us in time_columns.items()}
                row["bound"] = estimate(step.work, roofs).bound
            sizes = describe(None, step.sizes) if is_ours else step.problem
            rows += [row, fill(f"{calls} calls, each {sizes}" if calls > 1 else sizes, "    ")]
            for column in {"read", "written", "FLOPs", *time_columns} & row.keys():
                total[column] = total.get(column, 0) + calls * row[column]
    formats: dict[str, Any] = {"launch": "", "read": _bytes, "written": _bytes, "FLOPs": _unit}
    if time_columns:
        formats |= dict.fromkeys(time_columns, ".1f") | {"bound": ""}
    return table_of(rows + [total] * (len(steps) > 1), formats)


def _time_columns(steps: list["Step"], roofs: Roofs | None) -> dict[str, Callable[[Work], float]]:
    """The columns of estimated times: an interval on GPUs where nothing was measured, and for exponentials."""
    if roofs is None:
        return {}
    fastest = roofs.fastest or roofs
    if roofs.fastest is None and not any(step.work.exponentials for step in steps):
        return {"est. us": lambda work: estimate(work, roofs).us}
    return {"from us": lambda work: estimate(work, fastest).us, "to us": lambda work: estimate(work, roofs).most_us}


def _kernel_list(distinct: list[_Chosen], gpu: Gpu) -> str:
    """Problem and config of each kernel, then the reasons for the configs."""
    lines: list[str] = []
    numbers: dict[str, list[str]] = {}
    for i, (problem, choice) in enumerate(distinct, 1):
        config = " ".join(f"{name}={value}" for name, value in vars(choice.config).items())
        spec = problem.spec
        kernel = f"[{i}] {spec.name}, class {spec.kernel_class(gpu).__name__}: {describe(problem, {})}"
        lines += [fill(kernel, indent="    "), fill(config, "    ")]
        numbers.setdefault(f"{choice.source}: {choice.reason}", []).append(f"[{i}]")
    reasons = [fill(f"{' '.join(numbered)} {reason}", indent="    ") for reason, numbered in numbers.items()]
    return "\n".join(lines + reasons)


def _resource_table(distinct: list[_Chosen], usage: list[Resources], gpu: Gpu) -> str:
    """Registers, shared memory, and CTAs per SM of each kernel; then the kernels that spill."""
    rows, spills = [], []
    for i, ((problem, choice), used) in enumerate(zip(distinct, usage, strict=True), 1):
        count, limit = _ctas_per_sm(used, choice.config, gpu)
        name = problem.spec.name
        row = {"kernel": f"[{i}] {name}", "registers": used.registers, "shared B": used.smem_bytes}
        row |= {"threads": used.threads or choice.config.threads, "CTAs/SM": count, "limited by": limit}
        rows.append(row)
        if used.stack_bytes or used.local_loads or used.local_stores:
            local = f"{used.local_loads} local loads, {used.local_stores} local stores"
            spills.append(
                fill(f"[{i}] {name} spills registers: {used.stack_bytes} bytes of stack, {local}.", indent="  ")
            )
    formats = dict.fromkeys(rows[0], "d") | {"kernel": "", "limited by": ""}
    return "\n".join([table_of(rows, formats), *(spills or ["No kernel spills registers."])])


def _ctas_per_sm(used: Resources, config: Any, gpu: Gpu) -> tuple[int, str]:
    """How many CTAs of a kernel fit on an SM at once, and which resource limits them."""
    threads = used.threads or config.threads
    warp_registers = -(-used.registers * 32 // 256) * 256  # allocated in units of 256 per warp
    fit = {
        "registers": gpu.registers_per_sm // (warp_registers * -(-threads // 32)),
        "shared memory": gpu.smem_bytes_per_sm // (used.smem_bytes + _SYSTEM_SMEM_BYTES),
        "threads": gpu.threads_per_sm // threads,
        "CTAs": gpu.ctas_per_sm,
    }
    limit = min(fit, key=fit.__getitem__)
    return fit[limit], limit


def _memory_table(dry: "DryRun") -> str:
    """The buffers that take 1 % or more of the peak, the sum of smaller ones, and what `memory_limit` counts."""
    large = [buffer for buffer in dry.buffers if buffer.bytes * 100 >= dry.peak_bytes]
    rows = [[_bytes(buffer.bytes), buffer.text] for buffer in large]
    if small := dry.peak_bytes - sum(buffer.bytes for buffer in large):
        rows.append([_bytes(small), "smaller buffers"])
    table = text_table([_bytes(dry.peak_bytes), "peak memory, without inputs, with results and gradients"], rows, "rl")
    if dry.limited_bytes is None:
        return table
    limited = f"memory_limit counts {megabytes(dry.limited_bytes):,.1f} MB: memory besides inputs and gradients."
    return f"{table}\n{fill(limited, indent='  ')}"


def _roofs(roofs: Roofs | None, gpu: Gpu) -> str:
    """The line on the speeds that estimated times assume."""
    if roofs is None:
        return f"No estimated times: the speeds of {gpu.name} are not known."
    if roofs.fastest is not None:
        return f"Expected times are between those at {speeds(roofs)}, and at {speeds(roofs.fastest)} ({roofs.source})."
    return f"Estimated times are at {speeds(roofs)} ({roofs.source}). {roofs.note}".rstrip()


def _bytes(value: float) -> str:
    return _unit(value, "B")


def _unit(value: float, unit: str = "") -> str:
    """A number with a prefix, such as 1.25 GB."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1}f} {prefix}{unit}"
    return f"{value:.0f} {unit}".rstrip()
